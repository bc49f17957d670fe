"""The download of a file from the first mirror that gives the right contents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchcaps.errors import InputError

TIMEOUT = 30.0
"""Seconds without an answer after which the next mirror is tried."""


def cache_folder() -> Path:
    """The folder for downloads: ``torchcaps`` in the user's cache (pooch's ``os_cache``)."""
    import pooch

    return Path(pooch.os_cache("torchcaps"))


def fetch(filename: str, mirrors: Sequence[str], sha256: str, folder: Path, advice: str) -> Path:
    """Download a file unless it is there already with the right contents.

    The download is written under another name, checked, and renamed: the file in the folder is whole and right, however
    the download ended. An unfinished download starts again.

    Args:
        filename: Its name on the mirrors and in the folder.
        mirrors: Addresses to put before the name, tried in turn.
        sha256: The hash of the file as the mirrors have it, in hex.
        folder: The folder to keep it in.
        advice: The end of the error's sentence when no mirror has it: what the user can do.

    Returns:
        The file's path.

    Raises:
        InputError: No mirror gave the right file; the error says what each of them did.
        OSError: The folder cannot be written, or the disk is full.
    """
    import pooch
    from requests.exceptions import RequestException

    failures = []
    for mirror in mirrors:
        try:
            return Path(
                pooch.retrieve(
                    url=mirror + filename,
                    known_hash=f"sha256:{sha256}",
                    fname=filename,
                    path=folder,
                    downloader=pooch.HTTPDownloader(timeout=TIMEOUT),
                )
            )
        except RequestException as error:
            failures.append(f"{mirror}: {_reason(error)}")
        except ValueError:  # pooch raises it for another hash
            failures.append(f"{mirror}: not the expected contents (SHA-256)")
    raise InputError(f"{filename} could not be downloaded ({'; '.join(failures)}); {advice}")


def _reason(error: Exception) -> str:
    """A few words for an error of requests, whose own text is a screen full of nested exceptions."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, exceptions.Timeout):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(error, exceptions.SSLError):
        return "no trusted certificate"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(error, exceptions.ConnectionError):
        return "no connection"
    return type(error).__name__
