"""Check the images that a network is called with, and standardise them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import refuse_fx
from torchcaps.errors import InputError, WrongType
from torchcaps.ops.precision import check_one_dtype, in_full_precision
from torchcaps.words import AXES


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
    axes = AXES[len(in_shape) - 1]
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
