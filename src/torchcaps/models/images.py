"""What every network asks of its images and classes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchcaps.errors import InputError


def check_shape(in_shape: Sequence[int]) -> tuple[int, int, int]:
    """``in_shape`` as (C, H, W).

    Raises:
        InputError: It is not three positive integers.
    """
    shape = tuple(in_shape) if isinstance(in_shape, Sequence) else ()
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"in_shape must be (channels, height, width), three positive integers, got {in_shape!r}")
    return shape


def check_num_classes(num_classes: int) -> int:
    """``num_classes``.

    Raises:
        InputError: It is no integer of at least 2.
    """
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
        raise InputError(f"num_classes must be an integer of at least 2, got {num_classes!r}")
    return num_classes


def check_images(images: Tensor, in_shape: tuple[int, int, int]) -> None:
    """Raise unless ``images`` is a floating-point batch (B, C, H, W) of ``in_shape``.

    Raises:
        TypeError: Not floating-point.
        ValueError: Another shape.
    """
    if not images.is_floating_point():
        raise TypeError(
            f"images must be floating-point with pixels 0..1, got {images.dtype}; uint8 images are divided by 255 first"
        )
    if tuple(images.shape[1:]) != in_shape:
        wanted = ", ".join(map(str, in_shape))
        raise ValueError(f"images must have shape (B, {wanted}), got {tuple(images.shape)}")
