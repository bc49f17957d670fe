"""A network's files on disk and on the Hugging Face hub: ``config.json``, ``model.safetensors``, nothing executable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from torchcaps.errors import InputError, install
from torchcaps.files import reading
from torchcaps.models.older_files import CURRENT_FORMAT, FORMAT, to_current_weights

CONFIG, WEIGHTS, CLASSES, CARD = "config.json", "model.safetensors", "classes.json", "README.md"

SHIPPED = {"compact": Path(__file__).parent / "weights" / "compact"}
"""The folders of the networks whose weights come with torchcaps."""
SHIPPED_DATA = "digits"
"""The images that stand for those that they were trained on: embedded, and handwritten digits too."""

CHECKSUM = "sha256"
"""The entry of the weights' own metadata that holds what :func:`checksum` gives."""


def read_weights(path: Path, network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a file for a network, by the names and in the axes of its parameters.

    Raises:
        InputError: There is no such file, it is damaged, or its tensors are not those of the checksum that it holds.
    """
    with reading(path, "weights file"):
        contents = path.read_bytes()
        tensors = safetensors.torch.load(contents)
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
        facts = header.get("__metadata__", {})
        if facts.get(CHECKSUM) not in (None, checksum(tensors)):
            raise InputError("its weights have changed since they were written; take a copy that is whole")
        version = int(facts[FORMAT]) if FORMAT in facts else 1 if CHECKSUM in facts else None
    return to_current_weights(network, tensors, version)


def weights_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the contents of a file of weights, contiguous and on the CPU, with their checksum and format."""
    facts = {CHECKSUM: checksum(tensors), FORMAT: str(CURRENT_FORMAT)}
    return safetensors.torch.save(dict(tensors), metadata=facts)


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Put the tensors of a file into a network, in its own precision; from the meta device, it is brought to the CPU.

    Raises:
        InputError: They are not this network's, or not finite; the first that is not is named.
    """
    own = network.state_dict()
    wrong = difference(own, tensors)
    if wrong:
        raise InputError(f"weights {source} do not fit the network: {wrong}")
    for name, tensor in tensors.items():
        if not tensor.to(own[name].dtype).isfinite().all():
            raise InputError(f"weights {source} cannot be used: {name} holds numbers that are NaN or infinite")
    if any(tensor.is_meta for tensor in own.values()):
        network.to_empty(device="cpu")
    network.load_state_dict(tensors)


def difference(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """Name the first tensor that is missing, too many, or of another shape or kind; else return an empty text."""
    for name in [*wanted, *got]:
        is_, should = (_kind(each[name]) if name in each else "nothing" for each in (got, wanted))
        if is_ != should:
            return f"{name} is {is_}, wanted {should}"
    return ""


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{'floats' if value.is_floating_point() else value.dtype} {(*value.shape,)}"


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors on the CPU with their names, types and shapes, in hex; their order makes no difference."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    """Turn whatever the hub's client raises into an InputError: what failed, why, and what helps."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"{failed}: {error.name} is not installed; {install('app')}") from None
    except TypeError:  # an option that it does not take
        raise
    except Exception as error:  # its own errors, and those of whichever HTTP library it uses
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{failed}: {reason}{advice and '; '}{advice}") from error
