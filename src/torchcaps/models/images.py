"""What every network asks of its images."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.errors import InputError, reason_of
from torchcaps.models.config import TooSmall
from torchcaps.ops.checks import check_floating, check_one_device, check_one_dtype
from torchcaps.ops.precision import in_full_precision
from torchcaps.ranges import PIXELS

T = TypeVar("T")


def largest_map(module: nn.Module, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Shape of what a module makes of one image, and numbers in the largest tensor on the way; nothing is computed.

    Raises:
        TooSmall: The module refuses the shape.
        InputError: The module returns no tensor.
    """
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output[0].numel())

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = next((tensor.dtype for tensor in planned.values() if tensor.is_floating_point()), torch.float32)
    images = torch.empty(2, *shape, device="meta", dtype=dtype)
    hooks = [each.register_forward_hook(note) for each in module.modules()]
    try:
        with torch.no_grad():
            output = functional_call(module, planned, images)
    except (RuntimeError, ValueError) as error:
        raise TooSmall(f"{type(module).__name__} takes no maps of shape {tuple(shape)}: {reason_of(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor):
        raise InputError(f"{type(module).__name__} must return a tensor, got {type(output).__name__}")
    if output.dtype != dtype or output.ndim < 1 or len(output) != len(images):
        raise InputError(
            f"{type(module).__name__} must return maps of the dtype and the number of its images; of {len(images)} "
            f"images of {dtype} it returns shape {tuple(output.shape)} of {output.dtype}"
        )
    return tuple(output.shape[1:]), max(sizes, default=0)


def backbone_maps(backbone: nn.Module, in_shape: tuple[int, int, int]) -> tuple[tuple[int, int, int], int]:
    """Channels, height and width of a backbone's maps of one image, and numbers in the largest tensor up to there.

    Raises:
        TooSmall: The backbone refuses the shape.
        InputError: The backbone gives no maps.
    """
    maps, largest = largest_map(backbone, in_shape)
    if len(maps) != 3:
        raise InputError(f"the backbone must give maps (B, c, h, w), got shape (B, {', '.join(map(str, maps))})")
    return maps, largest


def if_they_fit(shapes: Callable[[tuple[int, int, int]], T], in_shape: tuple[int, int, int]) -> T:
    """``shapes(in_shape)``, what images of that shape make of a network.

    Args:
        shapes: Raises TooSmall for images that are too small for the network; if some fit, larger ones do too.
        in_shape: Images (C, H, W).

    Raises:
        InputError: The images are too small; the message gives the smallest size that fits.
    """
    channels, height, width = in_shape

    def fits(side: int) -> bool:
        try:
            shapes((channels, side, side))
        except TooSmall:
            return False
        return True

    try:
        return shapes(in_shape)
    except TooSmall as error:
        too_small = min(height, width)
        sides = range(too_small + 1, 2 * max(too_small, int(PIXELS.most)) + 1)
        smallest = bisect_left(sides, True, key=fits)
        if smallest == len(sides):
            raise InputError(
                f"images of {height}×{width} do not fit the network, and larger ones neither: {error}"
            ) from error
        raise InputError(
            f"images of {height}×{width} are too small for the network's convolutions; the smallest size that fits is "
            f"{sides[smallest]}×{sides[smallest]}"
        ) from error


def check_images(caller: str, images: Tensor, in_shape: tuple[int, int, int], weight: Tensor) -> None:
    """Raise unless ``images`` is a floating-point batch (B, C, H, W) of ``in_shape`` that a weight can be used on.

    Raises:
        TypeError: No tensor, not floating-point, or of another dtype than the network.
        InputError: Another shape.
        ValueError: Another device.
    """
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        raise TypeError(
            f"{caller}: images must be floating-point with pixels 0..1, got {images.dtype}; uint8 images are divided "
            "by 255 first"
        )
    check_floating(caller, "images", images)
    check_image_shape(images.shape, in_shape)
    check_one_device(caller, images=images, weights=weight)
    check_one_dtype(caller, images=images, weights=weight)


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
