"""Files of a network on disk and on the Hugging Face hub: ``config.json`` and ``model.safetensors``, no code."""

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
"""Folder of each network whose weights come with torchcaps."""
SHIPPED_DATA = "digits"
"""Data set shown for these networks in place of their training data: embedded handwritten digits."""

CHECKSUM = "sha256"
"""Metadata entry of the weights with the result of :func:`checksum`."""


def read_weights(path: Path, network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a file with the names and axes of a network's parameters.

    Raises:
        InputError: There is no such file, it is damaged, or its tensors do not fit its checksum.
    """
    with reading(path, "weights file"):
        contents = path.read_bytes()
        tensors = safetensors.torch.load(contents)
        header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
        facts = header.get("__metadata__", {})
        if facts.get(CHECKSUM) not in (None, checksum(tensors)):
            raise InputError("its weights have changed since they were written; use an intact copy")
        version = int(facts[FORMAT]) if FORMAT in facts else 1 if CHECKSUM in facts else None
    return to_current_weights(network, tensors, version)


def weights_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the contents of a weights file with checksum and format, for contiguous tensors on the CPU."""
    facts = {CHECKSUM: checksum(tensors), FORMAT: str(CURRENT_FORMAT)}
    return safetensors.torch.save(dict(tensors), metadata=facts)


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Load the tensors of a file into a network, in the network's precision. A network on meta moves to the CPU.

    Raises:
        InputError: A tensor does not fit the network or is not finite; the message names the first.
    """
    own = network.state_dict()
    wrong = difference(own, tensors)
    if wrong:
        raise InputError(f"weights {source} do not fit the network: {wrong}")
    for name, tensor in tensors.items():
        if not tensor.to(own[name].dtype).isfinite().all():
            raise InputError(f"weights {source} cannot be used: {name} holds NaN or infinite numbers")
    if any(tensor.is_meta for tensor in own.values()):
        network.to_empty(device="cpu")
    network.load_state_dict(tensors)


def difference(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """Describe the first tensor that is missing, unexpected, or of another shape or dtype; return "" if all fit."""
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
    """Return the SHA-256, in hex, of tensors on the CPU with names, dtypes and shapes, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
