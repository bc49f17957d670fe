"""Find the files of a data set: in a folder that the user names, in the cache of downloads, or on a mirror."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchcaps.datasets.registry import DataRequest
from torchcaps.errors import InputError
from torchcaps.files import require_file, user_path

DATA_VARIABLE = "TORCHCAPS_DATA"  # environment variable with the folder to use by default
TIMEOUT = 30.0  # seconds to wait for a mirror before the next one is tried
_ADVICE = f"without a network, name a folder with its files: --data-dir FOLDER, or {DATA_VARIABLE}"


def data_folders(data_dir: Path | None) -> list[Path]:
    """Return the folders to search: ``data_dir``, else the folder in TORCHCAPS_DATA and the cache of downloads."""
    if data_dir is not None:
        return [data_dir]
    import pooch

    named = os.environ.get(DATA_VARIABLE)
    return [*([user_path(named)] if named else []), Path(pooch.os_cache("torchcaps"))]


@dataclass(kw_only=True)
class Source:
    """Files of a data set, with their mirrors.

    Args:
        name: Name of the data set. Its files may lie in a folder of this name, and downloads go there.
        mirrors: Addresses that precede the name of a file, tried in turn.
        sha256: SHA-256 of each file on the mirrors, by file name. Downloads must have it. A user's file need not,
            because unpacking or repacking changes the hash.
        unpacked: Folder that each archive unpacks to; a gzipped file unpacks to a file without ``.gz``.
        folders: Further folders that may hold the files, relative to the folder that the user named.
        shares_names: True if another data set has files of the same names. Then the files count only in a folder called
            like the data set, or in a folder that the user named for it.
    """

    name: str
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]
    unpacked: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    shares_names: bool = False

    def find(self, data_dir: Path | None) -> Path | None:
        """Return the folder with all files, or None; ``data_dir`` as for `data_folders`."""
        searched = (self._search(root, direct=data_dir is not None) for root in data_folders(data_dir))
        return next((folder for folder, paths in searched if len(paths) == len(self.sha256)), None)

    def paths(self, request: DataRequest) -> dict[str, Path]:
        """Return the path of each file, packed or unpacked, by its name; download missing files to the cache.

        Raises:
            InputError: The folder does not exist or lacks files, or they could not be downloaded.
        """
        named, roots = request.data_dir is not None, data_folders(request.data_dir)
        for root in roots:
            in_cache, own = not named and root == roots[-1], root / self.name
            if not in_cache and not root.is_dir():
                origin = "data_dir" if named else DATA_VARIABLE
                raise InputError(f"{origin} is {root}, but this is no folder; it must hold the files of {self.name}")
            folder, paths = self._search(root, direct=named)
            missing = [name for name in self.sha256 if name not in paths]
            if missing and not in_cache and (paths or named):
                names = " and no ".join(map(self._unpacked, missing))
                packed = ", ".join(name for name in missing if self._unpacked(name) != name)
                raise InputError(
                    f"{folder} has no {names}{f' (or {packed})' if packed else ''}; put all files of {self.name} "
                    f"there or in {own}, or leave the folder out to have them downloaded"
                )
            if not missing and not in_cache:
                return paths
        # earlier downloads must still have their hash
        again = [name for name in self.sha256 if missing or paths[name] == own / name]
        return {name: self.fetch(name, own) if name in again else paths[name] for name in self.sha256}

    def _search(self, root: Path, *, direct: bool = False) -> tuple[Path, dict[str, Path]]:
        """Find the first folder under ``root`` with any of the files, and those files.

        ``direct``: the folder was named for this data set.
        """
        folders = [root / self.name, *(root / folder for folder in self.folders)]
        for folder in [*folders, root] if direct or not self.shares_names else folders:
            paths = {name: path for name in self.sha256 if (path := self._file(folder, name)) is not None}
            if paths:
                return folder, paths
        return root, {}

    def _unpacked(self, name: str) -> str:
        return self.unpacked.get(name, name.removesuffix(".gz"))

    def _file(self, folder: Path, name: str) -> Path | None:
        """Return the path of a file in a folder, preferably unpacked; None if it is missing."""
        unpacked = folder / self._unpacked(name)
        if unpacked.is_dir() if name in self.unpacked else unpacked.is_file():
            return unpacked
        return folder / name if (folder / name).is_file() else None

    def verify(self, path: Path) -> None:
        """Raise InputError if a file differs from the mirrors' file. Call it before readers that trust their input."""
        require_file(path)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256[path.name]:
                raise InputError(f"{path} is not {self.name}'s, or it is damaged (SHA-256); fetch it again")

    def fetch(self, name: str, folder: Path) -> Path:
        """Download a file to a folder if it is missing or differs from the mirrors' file.

        The download is written under another name, checked, and then renamed. So an interrupted download leaves no
        broken file.

        Raises:
            InputError: No mirror gave the right file; the message lists the failure of each.
            OSError: The folder cannot be written, or the disk is full.
        """
        import pooch
        from requests.exceptions import RequestException

        failures, known, loader = [], f"sha256:{self.sha256[name]}", pooch.HTTPDownloader(timeout=TIMEOUT)
        for mirror in self.mirrors:
            try:
                return Path(pooch.retrieve(mirror + name, known, name, folder, downloader=loader))
            except RequestException as error:  # its text is a page of nested exceptions
                status = None if error.response is None else error.response.status_code
                failures.append(f"{mirror}: HTTP status {status}" if status else f"{mirror}: {type(error).__name__}")
            except ValueError:  # pooch raises it for a wrong hash
                failures.append(f"{mirror}: not the expected contents (SHA-256)")
        raise InputError(f"{name} could not be downloaded ({'; '.join(failures)}); {_ADVICE}")
