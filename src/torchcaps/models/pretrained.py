"""A network's files on disk and on the Hugging Face hub: ``config.json``, ``model.safetensors``, nothing executable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchcaps.checks import FLOATS
from torchcaps.errors import InputError, install, unknown_name
from torchcaps.files import could_be_repository, named_in_utf8, require_file

CONFIG, WEIGHTS, CLASSES, CARD = "config.json", "model.safetensors", "classes.json", "README.md"

SHIPPED = ("compact",)
"""Networks whose weights come with torchcaps."""
SHIPPED_DATA = "digits"
"""The images that stand for those that they were trained on: embedded, and handwritten digits too."""
_SHIPPED_FOLDER = Path(__file__).parent / "weights"

CHECKSUM = "sha256"
"""The entry of the weights' own metadata that holds what :func:`checksum` gives."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by their names.

    Raises:
        InputError: There is no such file, it is damaged, or its tensors are not those of the checksum that it holds.
    """
    require_file(path, "weights file")
    try:
        with named_in_utf8(path) as named, safe_open(named, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"weights {path} are damaged: {error}") from None
    # a checksum whose own name is damaged is known by its length
    written = about.get(CHECKSUM) or next((text for text in about.values() if len(text) == 64), None)
    if written not in (None, checksum(tensors)):
        raise InputError(
            f"weights {path} are damaged: they have changed since they were written; take a copy that is whole"
        )
    return tensors


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Put tensors into a network, in the network's own precision.

    Args:
        network: Takes the tensors; one without memory for them, on the meta device, is brought to the CPU.
        tensors: One for each entry of its ``state_dict()``, and no other.
        source: The file they are from, for the error.

    Raises:
        InputError: They are not this network's, or not finite; the first that is not is named.
    """
    own = network.state_dict()
    for name in [*own, *tensors]:
        got = tuple(tensors[name].shape) if name in tensors else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if got != wanted:
            raise InputError(f"weights {source} do not fit the network: {name} has shape {got}, wanted {wanted}")
        fits = tensors[name].dtype == own[name].dtype or (
            tensors[name].dtype in FLOATS and own[name].is_floating_point()
        )
        if not fits:
            kind = "floats" if own[name].is_floating_point() else str(own[name].dtype)
            raise InputError(f"weights {source} do not fit the network: {name} is {tensors[name].dtype}, wanted {kind}")
        if not tensors[name].isfinite().all():
            raise InputError(f"weights {source} cannot be used: {name} holds numbers that are NaN or infinite")
    if any(tensor.is_meta for tensor in own.values()):
        network.to_empty(device="cpu")
    network.load_state_dict(tensors)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors on the CPU with their names, types and shapes, in hex; their order makes no difference."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shipped_folder(name: str = SHIPPED[0]) -> Path:
    """The folder of a network whose weights come with torchcaps.

    Raises:
        InputError: There is none of that name, or this installation was made without its weights.
    """
    if name not in SHIPPED:
        raise unknown_name("network with shipped weights", name, SHIPPED)
    folder = _SHIPPED_FOLDER / name
    if not (folder / WEIGHTS).exists():
        raise InputError(
            f'this installation of torchcaps has no weights of "{name}"; give a run folder, such as one that '
            f"`torchcaps train {name}` writes"
        )
    return folder


def is_shipped(folder: Path) -> bool:
    """Whether a folder is one of :func:`shipped_folder`."""
    return folder.parent == _SHIPPED_FOLDER


def is_public(source: str) -> bool:
    """Whether the name of a network means the same to others: it comes with torchcaps, or is on the hub."""
    return source in SHIPPED or (could_be_repository(Path(source)) and not Path(source).is_dir())


def find_pretrained(source: str | Path, **download: Any) -> Path:
    """The folder that holds a network's files: itself, one that comes with torchcaps, or a download from the hub.

    Args:
        source: A folder, or a name as for :meth:`torchcaps.CapsNet.from_pretrained`. A name of ``SHIPPED`` as a plain
            string is that network, even where a folder is called so too: write ``Path("compact")`` or ``"./compact"``
            for the folder. The hub is asked for plain strings only.
        **download: As for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: There is no such folder, and the hub has no such repository or cannot be reached.
    """
    if source in SHIPPED:
        return shipped_folder(str(source))
    missing = f"there is no folder {source}"
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, Path):
        raise InputError(missing)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS, CLASSES], **download))
    except ModuleNotFoundError as error:
        raise InputError(f"{missing}, and to look on the hub needs {error.name}: {install('app')}") from None
    except TypeError:  # an option that snapshot_download does not take
        raise
    except Exception as error:  # its own errors, and those of whichever HTTP library it uses
        raise InputError(
            f"{missing}, and the hub has no repository {source} that you may read, or could not be reached: "
            f"{_first_line(error)}"
        ) from error


def check_repository(repository: str) -> None:
    """Raise InputError unless ``repository`` is a name with its owner, which those who load it need too."""
    owner, _, name = repository.partition("/")
    if not owner or not name:
        raise InputError(f"{repository} is no name of a repository with its owner, such as someone/capsnet-mnist")


def upload(folder: Path, repository: str, *, private: bool, commit_message: str, token: str | None = None) -> str:
    """Put a folder's files into a repository; arguments, result and errors: :meth:`torchcaps.CapsNet.push_to_hub`."""
    try:
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=commit_message)
        return str(made)
    except ModuleNotFoundError as error:
        raise InputError(f"to write to the hub needs {error.name}: {install('app')}") from None
    except Exception as error:
        raise InputError(
            f"the hub did not take {repository}: {_first_line(error)}; if it does not know you, log in with `hf auth "
            "login`, or set HF_TOKEN to a token that may write"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
