"""What every network asks of its images, and how many of them go through its convolutions at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

MAP = 3.0
"""MiB of the largest map of a chunk: it stays in the caches. From 1.3 to 4 MiB are equally fast, with AVX2 and AVX-512;
16 MiB take a fifth longer."""
WIDE = 0.25
"""The share of the working memory that the largest map of a chunk may take where planes are multiplied."""


class TooSmall(InputError):  # noqa: N818  said of a map, and caught where images are known
    """A map that is smaller than the windows that look at it."""


def follow(module: nn.Module, given: Any) -> tuple[Any, int]:
    """Run a module without numbers, on the meta device; its parameters and statistics stay as they are.

    Returns:
        What it makes of a batch, and the numbers in the largest tensor of one image on the way.

    Raises:
        TooSmall: The module refuses the shape.
    """
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output[0].numel())

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    hooks = [each.register_forward_hook(note) for each in module.modules()]
    try:
        with torch.no_grad():
            return functional_call(module, planned, (given,)), max(sizes, default=0)
    except (RuntimeError, ValueError, AssertionError) as error:
        name, shape = type(module).__name__, tuple((given if isinstance(given, Tensor) else given.poses).shape[1:])
        reason = reason_of(error)
        raise TooSmall(reason if name in reason else f"{name} takes no input of shape {shape}: {reason}") from error
    finally:
        for hook in hooks:
            hook.remove()


def follow_backbone(backbone: nn.Module, in_shape: Sequence[int]) -> tuple[Tensor, int]:
    """The maps (2, c, h, w) that a backbone makes of images (C, H, W), and :func:`follow`'s largest.

    Raises:
        TooSmall: The backbone refuses the shape.
        InputError: The backbone gives no maps.
    """
    images = torch.empty(2, *in_shape, device="meta")
    maps, largest = follow(backbone, images)
    if not isinstance(maps, Tensor) or maps.ndim != 4 or maps.dtype != images.dtype or len(maps) != 2:
        got = f"{tuple(maps.shape)} of {maps.dtype}" if isinstance(maps, Tensor) else type(maps).__name__
        raise InputError(
            f"{type(backbone).__name__} must give maps (B, c, h, w), of the number and the dtype of its images; of 2 "
            f"images of {images.dtype} it gives {got}"
        )
    return maps, largest


def check_images(images: Tensor, in_shape: tuple[int, int, int], weight: Tensor) -> None:
    """Raise unless ``images`` is a floating-point batch (B, C, H, W) of ``in_shape`` that a weight can be used on."""
    refuse_fx(images)
    if not isinstance(images, Tensor) or not images.is_floating_point():
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        hint = "; uint8 images are divided by 255 first" if got == torch.uint8 else ""
        raise WrongType(f"images must be a floating-point tensor with pixels 0..1, got {got}{hint}")
    if images.is_nested:
        raise WrongType("images must be a dense tensor, got a nested one; pad the images to one size")
    check_image_shape(images.shape, in_shape)
    if images.device != weight.device:
        raise InputError(f"images and weights must be on one device, got {images.device} and {weight.device}")
    check_one_dtype("images and weights", images, weight)


def check_image_shape(shape: Sequence[int], in_shape: tuple[int, int, int]) -> None:
    """Raise InputError unless ``shape`` is (B, C, H, W) with the C, H, W that a network was built for."""
    if len(shape) != 4 or tuple(shape[1:]) != in_shape:
        wanted = ", ".join(map(str, in_shape))
        raise InputError(
            f"images must have shape (B, {wanted}), as the network was built for (channels, height, width), "
            f"got {tuple(shape)}"
        )


def standardise(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Each image with mean 0 and deviation 1 over all its channels and pixels.

        (x − mean(x)) / max(std(x), 1 / (255 √(C·H·W)))

    Args:
        images: Pixels 0..1. An image of one colour becomes zero.

    Source: TensorFlow's ``per_image_standardization``, which the authors' code applies to pixels of 0..255.
    """
    pixels = in_full_precision(images)
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    variance = centred.square().mean((1, 2, 3), keepdim=True)
    least = 1 / (255**2 * math.prod(images.shape[1:]))  # clamped before the root, whose gradient at zero is infinite
    return (centred / variance.clamp_min(least).sqrt()).to(images.dtype)


def map_chunks(
    function: Callable[[Float[Tensor, "B C H W"]], Capsules], images: Float[Tensor, "B C H W"], largest: int, wide: bool
) -> Capsules:
    """``function(images)``, the convolutions, of so many images at a time as is best, in nearly equal chunks.

    The largest map of an image has so many bytes. ``wide`` convolutions go by products of planes, which want many
    images. The poses keep their memory order (B, K, I).
    """
    memory = get_working_memory()
    at_once = max(1, int((memory * WIDE if wide else min(MAP, memory)) * MIB / largest))
    if len(images) <= at_once:
        return function(images)
    parts = [function(part) for part in images.tensor_split(-(-len(images) // at_once))]
    poses = torch.cat([part.poses.transpose(1, 2) for part in parts]).transpose(1, 2)
    given = [part.activations for part in parts if part.activations is not None]
    masks = [part.mask for part in parts if part.mask is not None]
    return Capsules(poses, torch.cat(given) if given else None, parts[0].grid, torch.cat(masks) if masks else None)
