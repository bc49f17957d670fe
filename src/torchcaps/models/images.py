"""Checks of a network's images, shape inference, and the number of images in a chunk for the convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.checks import refuse_fx
from torchcaps.errors import InputError, WrongType, reason_of
from torchcaps.machine import MIB
from torchcaps.nn import Capsules
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import check_one_dtype, in_full_precision
from torchcaps.tracing import is_eager

MAX_CHUNK_MAP_MIB = 3.0
"""Size of the largest map of a chunk, so that it stays in the caches. 1.3 to 4 MiB are equally fast with AVX2 and with
AVX-512; 16 MiB take a fifth longer."""
MAX_TRANSFORM_SHARE = 0.25
"""Share of the working memory for the largest map of a chunk, if the convolution uses the transform."""


class TooSmall(InputError):  # noqa: N818  the name is the fault of a map; callers who know the images catch it
    """A map that is smaller than the windows of the next layer."""


Inferred = tuple[Any, int]
"""Output of a module for a batch, and the largest number of values in a tensor of one image on the way."""


class ShapePlan:
    """Results of :func:`infer_shapes` while a network is planned, for the network that is built after it.

    Both ask for the same shapes in the same order. From the first difference on, shapes are inferred again.
    """

    def __init__(self) -> None:
        self._inferred: list[tuple[Any, Inferred]] = []
        self._known: Iterator[tuple[Any, Inferred]] = iter(())

    def rewind(self) -> None:
        """Return the recorded results from now on."""
        self._known = iter(self._inferred.copy())

    def infer(self, module: nn.Module, inputs: Any) -> Inferred:
        """Return the recorded result of a module with such inputs, or infer and record it."""
        asked = type(module), (inputs if isinstance(inputs, Tensor) else inputs.poses).shape
        if is_eager():
            before, found = next(self._known, (None, None))
            if before == asked and found is not None:
                return found
            self._known = iter(())
        result = _run_without_numbers(module, inputs)
        self._inferred.append((asked, result))
        return result


_PLAN: ContextVar[ShapePlan | None] = ContextVar("plan", default=None)


@contextmanager
def shape_plan() -> Iterator[ShapePlan]:
    """Let :func:`infer_shapes` record its results in a plan."""
    token = _PLAN.set(plan := ShapePlan())
    try:
        yield plan
    finally:
        _PLAN.reset(token)


def infer_shapes(module: nn.Module, inputs: Any) -> Inferred:
    """Run a module on the meta device, without numbers; its parameters and statistics do not change.

    Within :func:`shape_plan`, a module that was seen with such inputs before is not run again.

    Returns:
        Output of the module for a batch, and the largest number of values in a tensor of one image on the way.

    Raises:
        TooSmall: The module refuses the shape.
    """
    plan = _PLAN.get()
    return _run_without_numbers(module, inputs) if plan is None else plan.infer(module, inputs)


def _run_without_numbers(module: nn.Module, inputs: Any) -> Inferred:
    sizes: list[int] = []

    def note_size(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output[0].numel())

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    hooks = [each.register_forward_hook(note_size) for each in module.modules()]
    try:
        with torch.no_grad():
            return functional_call(module, planned, (inputs,)), max(sizes, default=0)
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


def check_images(images: Tensor, in_shape: tuple[int, ...], weight: Tensor, *, any_size: bool = False) -> None:
    """Raise unless ``images`` is a floating-point batch (B, *in_shape) with the dtype and device of ``weight``.

    With ``any_size``, the images may have other sizes along the axes of ``in_shape`` than the channels.
    """
    refuse_fx(images)
    if not isinstance(images, Tensor) or not images.is_floating_point():
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        hint = "; divide uint8 images by 255" if got == torch.uint8 else ""
        raise WrongType(f"images must be a floating-point tensor with pixels 0..1, got {got}{hint}")
    if images.is_nested:
        raise WrongType("images must be a dense tensor, got a nested one; pad the images to one size")
    check_image_shape(images.shape, in_shape, any_size=any_size)
    if images.device != weight.device:
        raise InputError(f"images and weights must be on one device, got {images.device} and {weight.device}")
    check_one_dtype("images and weights", images, weight)


def check_image_shape(shape: Sequence[int], in_shape: tuple[int, ...], *, any_size: bool = False) -> None:
    """Raise InputError unless ``shape`` is (B, *in_shape); with ``any_size``, only axes and channels must fit."""
    axes = ("depth", "height", "width")[4 - len(in_shape) :] if len(in_shape) > 2 else ("length",)
    known = in_shape[:1] if any_size else in_shape
    if len(shape) != len(in_shape) + 1 or tuple(shape[1 : len(known) + 1]) != known:
        sizes = ", ".join(map(str, (*known, *axes[len(known) - 1 :])))
        raise InputError(
            f"images must have shape (B, {sizes}), the network's (channels, {', '.join(axes)}), got {tuple(shape)}"
        )


def standardise(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Scale each image to mean 0 and deviation 1 over all its channels and pixels.

        (x − mean(x)) / max(std(x), 1 / (255 √(C·H·W)))

    Args:
        images: Pixels 0..1. An image of one colour becomes zero.

    Source: TensorFlow's ``per_image_standardization``, which the authors' code applies to pixels of 0..255.
    """
    pixels = in_full_precision(images)
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    variance = centred.square().mean((1, 2, 3), keepdim=True)
    min_variance = 1 / (255**2 * math.prod(images.shape[1:]))  # clamp before the root: its gradient at 0 is infinite
    return (centred / variance.clamp_min(min_variance).sqrt()).to(images.dtype)


def map_chunks(
    function: Callable[[Float[Tensor, "B C H W"]], Capsules], images: Float[Tensor, "B C H W"], largest: int, wide: bool
) -> Capsules:
    """Return ``function(images)``, computed in nearly equal chunks of images. The poses keep their order (B, K, I).

    Args:
        function: The convolutions.
        images: Pixels 0..1.
        largest: Bytes of the largest feature map of one image.
        wide: The convolution uses the transform, which is fastest with many images.
    """
    memory = get_working_memory()
    max_map_mib = memory * MAX_TRANSFORM_SHARE if wide else min(MAX_CHUNK_MAP_MIB, memory)
    chunk_size = max(1, int(max_map_mib * MIB / largest))
    if len(images) <= chunk_size:
        return function(images)
    parts = [function(part) for part in images.tensor_split(-(-len(images) // chunk_size))]
    poses = torch.cat([part.poses.transpose(1, 2) for part in parts]).transpose(1, 2)
    activations = [part.activations for part in parts if part.activations is not None]
    masks = [part.mask for part in parts if part.mask is not None]
    return Capsules(
        poses, torch.cat(activations) if activations else None, parts[0].grid, torch.cat(masks) if masks else None
    )
