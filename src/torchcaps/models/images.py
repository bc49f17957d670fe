"""What every network asks of its images and classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.errors import InputError, shown
from torchcaps.ops.checks import check_floating, check_one_device, check_one_dtype
from torchcaps.ops.precision import in_full_precision
from torchcaps.ranges import COUNT


def check_shape(in_shape: Sequence[int]) -> tuple[int, int, int]:
    """``in_shape`` as (C, H, W).

    Raises:
        InputError: It is not three positive integers, or they are absurdly large.
    """
    shape = tuple(in_shape) if isinstance(in_shape, Sequence) else ()
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        raise InputError(f"in_shape must be (channels, height, width), three positive integers, got {shown(in_shape)}")
    for name, size in zip(("channels", "height", "width"), shape, strict=True):
        COUNT.check(f"in_shape's {name}", size)
    return shape


def check_num_classes(num_classes: int) -> int:
    """``num_classes``.

    Raises:
        InputError: It is no integer of at least 2, or it is absurdly large.
    """
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
        raise InputError(f"num_classes must be an integer of at least 2, got {shown(num_classes)}")
    COUNT.check("num_classes", num_classes)
    return num_classes


def check_objects(objects: int, num_classes: int) -> None:
    """Raise unless some classes can be absent from an image.

    Raises:
        InputError: As many objects in an image as there are classes, or more.
    """
    if objects >= num_classes:
        raise InputError(
            f"objects must be below num_classes, as they are of different classes, got {objects} objects and "
            f"{num_classes} classes"
        )


def map_sizes(
    in_shape: tuple[int, int, int], kernels: Sequence[int], strides: Sequence[int], convolutions: str, padding: int = 0
) -> tuple[list[int], list[int]]:
    """Heights and widths of the maps of convolutions, one after the other.

    Args:
        in_shape: Images (C, H, W).
        kernels: Of the convolutions, pixels.
        strides: Of the convolutions, pixels.
        convolutions: What they are, for the message.
        padding: Zeros on each side of what the last one sees, pixels; the others have none.

    Raises:
        InputError: The images are too small for them; the message gives the smallest size that fits.
    """
    heights, widths = [in_shape[1]], [in_shape[2]]
    for number, (kernel, stride) in enumerate(zip(kernels, strides, strict=True), 1):
        zeros = 2 * padding if number == len(kernels) else 0
        if min(heights[-1], widths[-1]) + zeros < kernel:
            smallest = _smallest_size(kernels, strides, padding)
            raise InputError(
                f"images of {in_shape[1]}×{in_shape[2]} are too small for {convolutions}; the smallest size that fits "
                f"is {smallest}×{smallest}"
            )
        for sizes in (heights, widths):
            sizes.append((sizes[-1] + zeros - kernel) // stride + 1)
    return heights[1:], widths[1:]


def _smallest_size(kernels: Sequence[int], strides: Sequence[int], padding: int) -> int:
    smallest = max(1, kernels[-1] - 2 * padding)
    for kernel, stride in zip(reversed(kernels[:-1]), reversed(strides[:-1]), strict=True):
        smallest = kernel + (smallest - 1) * stride
    return smallest


def check_images(caller: str, images: Tensor, in_shape: tuple[int, int, int], weight: Tensor) -> None:
    """Raise unless ``images`` is a floating-point batch (B, C, H, W) of ``in_shape`` that weights can be used on.

    Args:
        caller: The network to name in an error.
        images: What to check.
        in_shape: (C, H, W).
        weight: Of the network; without autocast it is of the images' dtype.

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
    """Raise unless ``shape`` is (B, C, H, W) with the C, H, W that a network was built for.

    Raises:
        InputError: It is not.
    """
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
