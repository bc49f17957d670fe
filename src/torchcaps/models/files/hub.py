"""Find the files of a network: in a folder, in the wheel, or on the Hugging Face hub; upload them to the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError, install
from torchcaps.models.files.saving import save
from torchcaps.models.files.weights import CLASSES, CONFIG, WEIGHTS

SHIPPED = {"compact": Path(__file__).parents[1] / "weights" / "compact"}
"""Folder of each network whose weights come with torchcaps."""
SHIPPED_DATA = "digits"
"""Data set shown for these networks in place of their training data: embedded handwritten digits."""


def find_pretrained(source: str | Path, **download: Any) -> Path:
    """Return the folder of a network's files: ``source``, one that comes with torchcaps, or a download from the hub.

    Args:
        source: A folder, or a name as for :meth:`torchcaps.CapsNet.from_pretrained`. The string ``"compact"`` is the
            network that comes with torchcaps; for a folder of this name write ``Path("compact")`` or ``"./compact"``.
            Only strings are looked up on the hub.
        **download: As for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: There is no such folder, and the hub has no such repository or cannot be reached.
    """
    if isinstance(source, str) and source in SHIPPED:
        return SHIPPED[source]
    if Path(source).is_dir():
        return Path(source)
    missing = f"there is no folder {source}"
    if isinstance(source, Path):
        raise InputError(missing)
    with asking_the_hub(
        f"{missing}, and the hub has no repository {source} that you may read, or could not be reached"
    ):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS, CLASSES], **download))


@contextmanager
def asking_the_hub(failed: str, advice: str = "") -> Iterator[None]:
    """Turn any error of the hub's client into an InputError.

    Args:
        failed: Beginning of the message: the request that failed.
        advice: End of the message: a remedy.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"{failed}: {error.name} is not installed; {install('app')}") from None
    except TypeError:  # an unknown option in **download: a mistake of the calling code
        raise
    except Exception as error:  # errors of the client and of its HTTP library, which changes between versions
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{failed}: {reason}{advice and '; '}{advice}") from error


def push(network: Any, repository: str, private: bool, commit_message: str, token: str | None, **contents: Any) -> str:
    """Upload the files of a network; see :meth:`torchcaps.CapsNet.push_to_hub` for arguments and errors."""
    owner, _, name = repository.partition("/")
    if not owner or not name:
        raise InputError(f"a repository must be named OWNER/NAME, such as someone/capsnet-mnist, got {repository}")
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder, source=repository, **contents)
        log_in = "to log in, run `hf auth login`, or set HF_TOKEN to a token with permission to write"
        with asking_the_hub(f"the hub did not take {repository}", log_in):
            from huggingface_hub import HfApi

            api = HfApi(token=token)
            made = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=commit_message)
            return str(made)
