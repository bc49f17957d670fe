"""The places of a data set's files: a folder that the user names, the cache of downloads, or a mirror."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchcaps.datasets.registry import DataRequest
from torchcaps.errors import InputError
from torchcaps.files import require_file, user_path

DATA_VARIABLE = "TORCHCAPS_DATA"  # names the folder to look in when the user names none
TIMEOUT = 30.0  # seconds without an answer after which the next mirror is tried
_ADVICE = f"where there is no network, name a folder with its files: --data-dir FOLDER, or {DATA_VARIABLE}"


def data_folders(data_dir: Path | None) -> list[Path]:
    """The folders to look in, in order: the one named, else that of TORCHCAPS_DATA and the cache of downloads."""
    if data_dir is not None:
        return [data_dir]
    import pooch

    named = os.environ.get(DATA_VARIABLE)
    return [*([user_path(named)] if named else []), Path(pooch.os_cache("torchcaps"))]


@dataclass(kw_only=True)
class Source:
    """The files of a data set.

    Args:
        name: The data set's name; its files may lie in a folder of this name, where downloads are put too.
        mirrors: Addresses to put before the name of a file, tried in turn.
        sha256: The hash of each file as the mirrors have it, by its name. Downloads must have it; a user's own file
            need not: unpacked, or packed again, it is right and has another hash.
        unpacked: The folder that each archive unpacks to; a gzipped file unpacks to one without ``.gz``.
        folders: Other folders in which the files may lie, relative to the one that the user named.
        shares_names: Whether its files have the names of those of another data set: such files are taken for its own
            only in a folder of its name, or in one that the user named for it.
    """

    name: str
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]
    unpacked: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    shares_names: bool = False

    def find(self, data_dir: Path | None) -> Path | None:
        """The folder that holds all files, or None; ``data_dir`` as for `data_folders`."""
        searched = (self._search(root, direct=data_dir is not None) for root in data_folders(data_dir))
        return next((folder for folder, found in searched if len(found) == len(self.sha256)), None)

    def paths(self, request: DataRequest) -> dict[str, Path]:
        """The path of each file, packed or unpacked, by its name: in the user's folder, in the cache, or downloaded.

        Raises:
            InputError: The folder does not exist or lacks files, or they could not be downloaded.
        """
        named, roots = request.data_dir is not None, data_folders(request.data_dir)
        for root in roots:
            in_cache, own = not named and root == roots[-1], root / self.name
            if not in_cache and not root.is_dir():
                origin = "data_dir" if named else DATA_VARIABLE
                raise InputError(f"{origin} is {root}, which is no folder; it should hold the files of {self.name}")
            folder, found = self._search(root, direct=named)
            missing = [name for name in self.sha256 if name not in found]
            if missing and not in_cache and (found or named):
                wanted = " and no ".join(map(self._unpacked, missing))
                packed = ", ".join(name for name in missing if self._unpacked(name) != name)
                raise InputError(
                    f"{folder} has no {wanted}{f' (or {packed})' if packed else ''}; put all files of {self.name} "
                    f"there or in {own}, or leave the folder out to have them downloaded"
                )
            if not missing and not in_cache:
                return found
        # what was downloaded before must have its hash still
        again = [name for name in self.sha256 if missing or found[name] == own / name]
        return {name: self.fetch(name, own) if name in again else found[name] for name in self.sha256}

    def _search(self, root: Path, *, direct: bool = False) -> tuple[Path, dict[str, Path]]:
        """Find the first folder under ``root`` with any of the files, and those files.

        ``direct``: the folder was named for this data set.
        """
        folders = [root / self.name, *(root / folder for folder in self.folders)]
        for folder in [*folders, root] if direct or not self.shares_names else folders:
            found = {name: path for name in self.sha256 if (path := self._file(folder, name)) is not None}
            if found:
                return folder, found
        return root, {}

    def _unpacked(self, name: str) -> str:
        return self.unpacked.get(name, name.removesuffix(".gz"))

    def _file(self, folder: Path, name: str) -> Path | None:
        """The path of a file in a folder, the unpacked one if both are there; None if neither is."""
        unpacked = folder / self._unpacked(name)
        if unpacked.is_dir() if name in self.unpacked else unpacked.is_file():
            return unpacked
        return folder / name if (folder / name).is_file() else None

    def verify(self, path: Path) -> None:
        """Raise InputError unless a file has the contents of the mirrors', for readers that trust what they read."""
        require_file(path)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256[path.name]:
                raise InputError(f"{path} is not {self.name}'s, or it is damaged (SHA-256); fetch it again")

    def fetch(self, name: str, folder: Path) -> Path:
        """Download a file to a folder unless it is there already with the right contents.

        The download is written under another name, checked, and renamed: the file in the folder is whole and right,
        however the download ended.

        Raises:
            InputError: No mirror gave the right file; the error says what each of them did.
            OSError: The folder cannot be written, or the disk is full.
        """
        import pooch
        from requests.exceptions import RequestException

        failures, known, loader = [], f"sha256:{self.sha256[name]}", pooch.HTTPDownloader(timeout=TIMEOUT)
        for mirror in self.mirrors:
            try:
                return Path(pooch.retrieve(mirror + name, known, name, folder, downloader=loader))
            except RequestException as error:  # its own text is a screen full of nested exceptions
                status = None if error.response is None else error.response.status_code
                failures.append(f"{mirror}: HTTP status {status}" if status else f"{mirror}: {type(error).__name__}")
            except ValueError:  # pooch raises it for another hash
                failures.append(f"{mirror}: not the expected contents (SHA-256)")
        raise InputError(f"{name} could not be downloaded ({'; '.join(failures)}); {_ADVICE}")
