"""Write a network, the names of its classes and its model card into a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from torchcaps.errors import InputError
from torchcaps.export.card import SeedResult, TrainingRecord, model_card
from torchcaps.files import atomic_path, write_json, write_text
from torchcaps.models.files.weights import CARD, CLASSES, CONFIG, WEIGHTS, difference, weights_file
from torchcaps.models.planning import plan_network
from torchcaps.parts import describe
from torchcaps.words import counted

__all__ = ["SeedResult", "TrainingRecord", "save", "write"]


def write(
    network: Any,
    folder: Path,
    dtype: torch.dtype | None = None,
    class_names: Sequence[str] | None = None,
    images: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of :func:`save` except the model card, each in full or not at all."""
    spec = {"class_names": list(class_names)} if images is None and class_names is not None else images
    if spec is not None and len(spec["class_names"]) != network.num_classes:
        raise InputError(
            f"class_names must be {counted(network.num_classes, 'name')}, one for each class, got "
            f"{len(spec['class_names'])}"
        )
    tree, weights = describe(network), network.state_dict()
    planned = plan_network(tree, network.in_shape, network.num_classes)
    changed = difference(planned.state_dict(), weights) or _shared_otherwise(planned, network)
    if changed:
        remedy = "register your own parts with torchcaps.register, and build the network with their names"
        if any(map(is_parametrized, network.modules())):
            remedy = "first call torch.nn.utils.parametrize.remove_parametrizations on its parametrized layers"
        raise InputError(f"the network cannot be saved, because its options build another one: {changed}; {remedy}")
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in weights.items()
    }
    for name, tensor in tensors.items():
        if dtype is not None and not tensor.isfinite().all():
            raise InputError(f"{name} has weights that {dtype} cannot hold; store them with dtype=None")
    write_json(folder / CONFIG, tree | {"in_shape": network.in_shape, "num_classes": network.num_classes})
    with atomic_path(folder / WEIGHTS) as temporary:
        # safetensors' save_file would leave a temporary file behind after a kill
        temporary.write_bytes(weights_file(tensors))
    if spec is None:
        (folder / CLASSES).unlink(missing_ok=True)
    else:
        write_json(folder / CLASSES, spec)


def save(
    network: Any,
    folder: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    training: TrainingRecord | None = None,
    dtype: torch.dtype | None = None,
    source: str | None = None,
    images: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of a network; see :meth:`torchcaps.CapsNet.save_pretrained` for arguments and errors."""
    folder = Path(folder)
    write(network, folder, dtype, class_names, images)
    try:
        names = class_names if images is None else images["class_names"]
        card = model_card(network, training, source, class_names=names, half=dtype == torch.float16)
    except ImportError:  # the base install has no jinja2
        return
    write_text(folder / CARD, card)


def _shared_otherwise(planned: nn.Module, network: nn.Module) -> str:
    """Describe the first parameter that only one of two networks uses under two names; return "" if there is none."""
    ours, theirs = _first_names(network), _first_names(planned)
    for name in ours:
        if ours[name] != theirs[name]:
            name, first = (name, ours[name]) if ours[name] != name else (name, theirs[name])
            return f"{name} and {first} are one parameter in one of them, and two in the other"
    return ""


def _first_names(network: nn.Module) -> dict[str, str]:
    """Return for the name of each parameter and buffer the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
