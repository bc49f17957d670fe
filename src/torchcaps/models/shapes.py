"""Infer the shapes inside a network on the meta device, while it is built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.errors import InputError, reason_of
from torchcaps.nn import Capsules
from torchcaps.parts import Spec, build


class TooSmall(InputError):  # noqa: N818  the name is the fault of a map; callers who know the images catch it
    """A map that is smaller than the windows of the next layer."""


_INFERRED: ContextVar[list[Any] | Iterator[Any] | None] = ContextVar("inferred shapes", default=None)


@contextlib.contextmanager
def shared_shapes(inferred: list[Any] | Iterator[Any]) -> Iterator[None]:
    """Let :func:`infer_shapes` append its results to a list, or take them from the iterator of such a list.

    Used when a network is planned and then built, because both have the same shapes.
    """
    token = _INFERRED.set(inferred)
    try:
        yield
    finally:
        _INFERRED.reset(token)


def infer_shapes(
    module: nn.Module, inputs: Any, note: Callable[..., None] | None = None, noted: Iterable[nn.Module] = ()
) -> tuple[Any, int]:
    """Run a module on the meta device, without numbers; its parameters and statistics do not change.

    Args:
        module: The module.
        inputs: Its input, a tensor or capsules.
        note: Forward hook for the modules ``noted``, while the module runs.
        noted: Modules inside the module.

    Returns:
        Output of the module for a batch, and the largest number of values in a tensor of one image on the way.

    Raises:
        TooSmall: The module refuses the shape.
    """
    inferred = _INFERRED.get()
    if isinstance(inferred, Iterator):
        return cast(tuple[Any, int], next(inferred))
    result = _run_on_meta(module, inputs, note, noted)
    if inferred is not None:
        inferred.append(result)
    return result


def _run_on_meta(
    module: nn.Module, inputs: Any, note: Callable[..., None] | None, noted: Iterable[nn.Module]
) -> tuple[Any, int]:
    sizes: list[int] = []

    def note_size(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output[0].numel())

    # each module once, because torch ties the tensors of a module under two names wrongly
    planned = {
        f"{path}.{name}".lstrip("."): torch.empty_like(tensor, device="meta")
        for path, each in module.named_modules()
        for of_one in (each.named_parameters, each.named_buffers)
        for name, tensor in of_one(recurse=False, remove_duplicate=False)
    }
    hooks = [each.register_forward_hook(note_size) for each in module.modules()]
    hooks += [each.register_forward_hook(note) for each in noted if note is not None]
    try:
        with torch.no_grad():
            return functional_call(module, planned, (inputs,), tie_weights=False), max(sizes, default=0)
    except (RuntimeError, ValueError, AssertionError) as error:
        name, shape = type(module).__name__, tuple((inputs if isinstance(inputs, Tensor) else inputs.poses).shape[1:])
        reason = reason_of(error)
        raise TooSmall(reason if name in reason else f"{name} takes no input of shape {shape}: {reason}") from error
    finally:
        for hook in hooks:
            hook.remove()


def infer_map_shape(backbone: nn.Module, in_shape: Sequence[int]) -> tuple[Tensor, int]:
    """Return a backbone's maps (2, c, h, w) of two images on the meta device, and the size of the largest tensor.

    Raises:
        TooSmall: The backbone refuses the shape.
        InputError: The backbone does not return maps.
    """
    images = torch.empty(2, *in_shape, device="meta")
    maps, largest = infer_shapes(backbone, images)
    if not isinstance(maps, Tensor) or maps.ndim != 4 or maps.dtype != images.dtype or len(maps) != 2:
        got = f"{tuple(maps.shape)} of {maps.dtype}" if isinstance(maps, Tensor) else type(maps).__name__
        raise InputError(
            f"{type(backbone).__name__} must return maps (B, c, h, w), as many as images and of their dtype; for 2 "
            f"images of {images.dtype} it returns {got}"
        )
    return maps, largest


def build_layers(specs: Sequence[Spec], capsules: Capsules, num_classes: int) -> tuple[nn.ModuleList, list[Capsules]]:
    """Build capsule layers, one after another.

    Returns:
        The layers; and the input of each, then the output of the last one, on the meta device: shapes only.
    """
    layers, flow = nn.ModuleList(), [capsules]
    for spec in specs:
        poses, _, grid, _ = flow[-1]
        sizes: dict[str, Any] = {"in_dim": poses.shape[2], "in_capsules": grid or poses.shape[1]}
        sizes |= {"in_types": (grid or poses.shape[1:])[0], "out_capsules": num_classes}
        layers.append(build("layer", spec, **sizes))
        flow.append(Capsules.of(infer_shapes(layers[-1], flow[-1])[0]))
    return layers, flow
