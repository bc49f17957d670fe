"""Convert pixels of any dtype, container and order of axes to tensors for a network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image
from torch import Tensor

from torchcaps.datasets.images import pillow_numbers, with_channels
from torchcaps.datasets.scaling import Scale, as_bytes, as_pixels, check_scale
from torchcaps.errors import InputError, WrongType, shown

MAX_CHANNELS = 4
"""An axis up to this length is taken for the channels if no order is named."""
Channels = Literal["first", "last"]
"""Position of the channels: (N, C, H, W) or (N, H, W, C)."""


def as_numbers(values: Any, where: str, channels: int | None = None) -> Shaped[Tensor, "..."]:
    """Convert a tensor, an array, a list, Pillow images, or any object that NumPy can read, to a tensor.

    Pillow images get 1 or 3 ``channels``; None: they keep their own.

    Raises:
        WrongType: The values are no real numbers.
        InputError: The images differ in size.
    """
    if isinstance(values, Image.Image):
        values = _pillow_array(values, channels)
    elif isinstance(values, list | tuple):
        values = _stacked(values, where, channels)
    elif not isinstance(values, Tensor) and hasattr(values, "__array__"):
        values = np.asarray(values)
    if isinstance(values, np.ndarray):
        if values.dtype.kind == "O" and values.ndim > 0:
            values = _stacked(list(values), where, channels)
        if values.dtype.kind not in "iufb" or values.dtype.itemsize > 8:
            raise WrongType(f"{where} must be numbers, got an array of {values.dtype}")
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
        with warnings.catch_warnings():  # torch warns of read-only arrays, but nothing is written here
            warnings.simplefilter("ignore")
            values = torch.from_numpy(values)
    if not isinstance(values, Tensor):
        got = "None" if values is None else f"a value of type {type(values).__name__}"
        raise WrongType(f"{where} must be a tensor, an array or a list of numbers, got {got}")
    if values.is_complex() or values.layout != torch.strided or values.is_nested or values.is_meta:
        kind = "nested" if values.is_nested else "meta" if values.is_meta else f"{values.layout} {values.dtype}"
        raise WrongType(f"{where} must be a dense tensor of real numbers, got a {kind} tensor".replace("torch.", ""))
    return values.detach()


def _stacked(values: Sequence[Any], where: str, channels: int | None) -> np.ndarray | Tensor:
    """Stack numbers or images of one size."""
    are_tensors = bool(values) and all(isinstance(each, Tensor) for each in values)
    arrays = values if are_tensors else [_as_array(each, where, channels) for each in values]
    sizes = sorted({tuple(each.shape) for each in arrays})
    if len(sizes) > 1:
        raise InputError(f"{where} must have one size, got several, such as {sizes[0]} and {sizes[1]}")
    if are_tensors:
        return torch.stack(list(values))
    return np.stack(arrays) if arrays else np.zeros(0)


def _as_array(value: Any, where: str, channels: int | None) -> np.ndarray:
    """Convert one entry of a list of numbers or images."""
    if isinstance(value, Image.Image):
        return _pillow_array(value, channels)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of several lengths, or a tensor on a GPU
        raise InputError(f"{where} must be numbers, and images have one size") from None
    if array.dtype.kind not in "iufb":
        raise WrongType(f"{where} must be numbers, got a list of {type(value).__name__}")
    return array


def _pillow_array(image: Image.Image, channels: int | None) -> Shaped[np.ndarray, "C H W"]:
    """Return the pixels of a Pillow image; pixels of more than 8 bits keep their values."""
    pixels = pillow_numbers(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return with_channels(pixels, channels) if channels in (1, 3) and pixels.dtype == np.uint8 else pixels


def scale_pixels(
    values: Any, scale: Scale = "auto", where: str = "images"
) -> UInt8[Tensor, "..."] | Float[Tensor, "..."]:
    """Convert numbers of any dtype to uint8 of 0..255 or float32 of 0..1; ``where`` is their name in errors.

    - "auto": :func:`~torchcaps.datasets.scaling.range_of` decides by the dtype, or refuses.
    - (low, high): x becomes (x - low) / (high - low), clipped to 0..1.
    - "none": numbers become float32 and keep their values.

    Raises:
        WrongType: The values are no real numbers.
        InputError: A number is out of range, NaN or infinite, or ``scale`` is invalid.
    """
    check_scale(scale)
    numbers = as_numbers(values, where)
    if scale == "none" or (numbers.dtype == torch.float32 and numbers.numel() == 0):
        return numbers.float()
    array = (numbers.float() if numbers.dtype == torch.bfloat16 else numbers).cpu().numpy()
    return torch.from_numpy(as_pixels(array, scale, where)).to(numbers.device)


def to_bytes(pixels: Shaped[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Round pixels of 0..1 to 256 steps; uint8 stays."""
    return torch.from_numpy(as_bytes(pixels.cpu().numpy())).to(pixels.device)


# ---- axes


def channels_first(
    images: Shaped[Tensor, "N ..."],
    where: str = "images",
    order: Channels | None = None,
    option: str = "channels",
) -> Shaped[Tensor, "N C H W"]:
    """Reorder images (N, H, W), (N, C, H, W) or (N, H, W, C) to (N, C, H, W).

    Without ``order``, the axis of length 1 to 4 has the channels, if only one of the two is that short. Errors say that
    ``option`` gives the order.

    Raises:
        InputError: The shape is none of these, or ``order`` is None and the shape fits both orders or none.
    """
    if images.ndim == 3:
        images = images[:, None]
        order = order or "first"
    if images.ndim != 4 or 0 in images.shape:
        raise InputError(
            f"{where} must have the shape (N, H, W), (N, C, H, W) or (N, H, W, C) with no axis empty, got "
            f"{shown(tuple(images.shape))}"
        )
    if order is None:
        fitting: list[Channels] = []
        fitting += ["first"] * (images.shape[1] <= MAX_CHANNELS)
        fitting += ["last"] * (images.shape[3] <= MAX_CHANNELS)
        if len(fitting) != 1:
            both = "both axis 1 and axis 3" if fitting else "neither axis 1 nor axis 3"
            raise InputError(
                f"{where} have the shape {tuple(images.shape)}, in which {both} could be 1 to {MAX_CHANNELS} channels; "
                f'say which one by {option}, "first" or "last"'
            )
        (order,) = fitting
    return images if order == "first" else images.movedim(3, 1)


def fit_shape(
    images: Shaped[Tensor, "N ..."],
    in_shape: tuple[int, ...],
    where: str = "images",
    *,
    cropped: bool = False,
    any_size: bool = False,
) -> Shaped[Tensor, "N C *S"]:
    """Reorder images to the axes (N, C, *S) of a network. Its ``in_shape`` (C, *S) decides which axis is which.

    Takes (N, C, *S) and (N, *S, C), and (N, *S) for one channel; S is (H, W), (L,) of lines or (D, H, W) of volumes.
    For height 1 it takes (N, C, L), (N, L) for one channel, and features (N, C). ``cropped`` images may be larger,
    because a crop follows; those of ``any_size`` may be smaller, too.

    Raises:
        InputError: No order of the axes fits.
    """
    channels, *sizes = in_shape
    shape, axes, is_row = tuple(images.shape), len(sizes), len(sizes) == 2 and sizes[0] == 1
    views = []
    if images.ndim == axes + 2:
        views = [images, images.movedim(-1, 1)]
    elif images.ndim == axes + 1:
        views = [images[:, None]] * (channels == 1) + [images[:, :, None]] * is_row
    elif images.ndim == 2 and is_row and channels == 1:
        views = [images[:, None, None]]
    elif images.ndim == 2 and sizes == [1, 1]:
        views = [images[:, :, None, None]]  # features
    for view in views:
        own = tuple(view.shape[1:])
        larger = cropped and all(size >= least for size, least in zip(own[1:], sizes, strict=True))
        if own == in_shape or (own[0] == channels and (larger or any_size)):
            return view.contiguous()
    advice = ""
    if len(shape) == 2 and shape[1] == math.prod(in_shape):
        advice = f"; reshape the rows, such as images.reshape(-1, {', '.join(map(str, in_shape))})"
    names = {1: "length", 2: "height, width", 3: "depth, height, width"}[axes]
    expected = f"{channels}, {names}" if any_size else ", ".join(map(str, in_shape))
    raise InputError(
        f"{where} must have the shape (N, {expected}), as the network was built for (channels, {names}), or channels "
        f"last, got {shown(shape)}{advice}"
    )


def prepare_images(
    values: Any,
    in_shape: tuple[int, ...],
    scale: Scale = "auto",
    where: str = "images",
    *,
    cropped: bool = False,
    any_size: bool = False,
) -> UInt8[Tensor, "N C *S"] | Float[Tensor, "N C *S"]:
    """Convert images of any form to the pixels and axes that a network takes.

    A network of height 1 takes sequences: uint8 counts as pixels, other numbers keep their values, and NaN marks
    padding. Arguments and errors as in :func:`scale_pixels` and :func:`fit_shape`.
    """
    numbers = as_numbers(values, where, in_shape[0])
    is_row = len(in_shape) == 3 and in_shape[1] == 1
    is_sequence = is_row and scale == "auto" and numbers.dtype != torch.uint8
    pixels = scale_pixels(numbers, "none" if is_sequence else scale, where)
    return fit_shape(pixels, in_shape, where, cropped=cropped, any_size=any_size)
