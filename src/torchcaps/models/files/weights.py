"""The weights file ``model.safetensors``: tensors by the names of the network's parameters, with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.files import reading

CONFIG, WEIGHTS, CLASSES, CARD = "config.json", "model.safetensors", "classes.json", "README.md"
"""Names of a network's files."""
CHECKSUM, FORMAT = "sha256", "format"
"""Metadata entries of the weights: the result of :func:`checksum`, and the version of the format."""
CURRENT_FORMAT = 2
"""Version of the format of weights and checkpoints: every tensor has the name and the axes of its parameter."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Raises:
        InputError: There is no such file, it is damaged or of another format, or its tensors do not fit its checksum.
    """
    with reading(path, "weights file"):
        contents = path.read_bytes()
        tensors = safetensors.torch.load(contents)
        facts = _header(contents).get("__metadata__", {})
        if facts.get(CHECKSUM, "missing" if FORMAT in facts else None) not in (None, checksum(tensors)):
            raise InputError("its weights have changed since they were written; use an intact copy")
    if CHECKSUM in facts or FORMAT in facts:  # files of other programs have neither
        check_format(f"weights file {path}", facts.get(FORMAT, "1"))
    return tensors


def check_format(file: str, version: int | str) -> None:
    """Raise InputError unless a file of torchcaps has the format that this version reads."""
    if str(version) != str(CURRENT_FORMAT):
        raise InputError(
            f"{file} has format {version}, but this version of torchcaps reads format {CURRENT_FORMAT} only; open it "
            "with the version that wrote it"
        )


def weights_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the contents of a weights file for contiguous tensors on the CPU: for equal tensors, equal bytes.

    Tensors that share memory, such as those of a module with two names, are written once for each name.
    """
    facts = {CHECKSUM: checksum(tensors), FORMAT: str(CURRENT_FORMAT)}
    places: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in places else tensor
        places.add(place)
    contents = safetensors.torch.save(apart, metadata=facts)
    # safetensors writes the metadata in random order
    header = json.dumps(_header(contents), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + contents[8 + _header_size(contents) :]


def _header_size(contents: bytes) -> int:
    return int.from_bytes(contents[:8], "little")


def _header(contents: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(contents[8 : 8 + _header_size(contents)])
    return header


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


def difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Describe the first tensor that is missing, unexpected, or of another shape or dtype; return "" if all fit."""
    for name in [*expected, *actual]:
        is_ = _kind(actual[name]) if name in actual else "missing"
        should = _kind(expected[name]) if name in expected else "absent"
        if is_ != should:
            return f"{name} is {is_}, but must be {should}"
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
