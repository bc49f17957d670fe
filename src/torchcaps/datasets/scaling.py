"""Decide which numbers become 0 and 1: one rule for arrays, image files, volumes, estimators and exported networks.

It needs NumPy alone, so that an exported network needs no torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from torchcaps.errors import InputError, shown
from torchcaps.ranges import is_scale

MAX_12_BIT = 4_095
"""Largest number of a 12-bit image."""
MAX_16_BIT = 65_535
"""Largest number of a 16-bit image."""
ROUNDING = 1e-6
"""Largest excess over 0..1 that counts as rounding."""
PERCENTILES = (0.5, 99.5)
"""Percentiles of a volume that become 0 and 1, if no range is set."""
MIN_SHARE = 1 / 15
"""Images whose largest number is not above this share of their range are dark by mistake: 12 bits in 16, or 4 in 8."""
_CHUNK = 2**22  # numbers converted at once, which limits temporary copies to about 32 MiB

Scale = Literal["auto", "none"] | tuple[float, float]
"""Range of pixels. "auto": by the dtype. "none": values stay unchanged. (low, high): values that become 0 and 1."""
Source = Literal["array", "file", "volume", "estimator"]
"""Origin of numbers. It decides what happens if their dtype does not tell their range."""
Pixels = UInt8[np.ndarray, "..."] | Float32[np.ndarray, "..."]
"""Pixels: uint8 of 0..255, or float32 of 0..1."""


def check_scale(scale: Any) -> None:
    """Raise InputError if a value is not "auto", "none", or two finite numbers (low, high) with low < high."""
    if not (isinstance(scale, str) and scale in ("auto", "none")) and not is_scale(scale):
        raise InputError(
            f'scale must be "auto", "none", or two numbers (low, high) with low < high, got {shown(scale)}'
        )


class UnknownRange(InputError):  # noqa: N818  the name is the fault
    """Numbers from ``low`` to ``high``, of files or an array, whose dtype does not tell the range of their pixels."""

    where, dtype, low, high = "", "", 0.0, 0.0

    @classmethod
    def of(cls, where: str, dtype: str, low: float, high: float) -> UnknownRange:
        """Return the error; its class takes one text, so that worker processes can raise it."""
        error = cls(
            f"{where} must be uint8, other integers of 0..255, uint16 of 16 bits, or floats of 0..1, got {dtype} from "
            f"{low:g} to {high:g}; say which numbers become 0 and 1, such as {_scale_words(_likely_scale(low, high))}, "
            "or save floats of 0..1"
        )
        error.where, error.dtype, error.low, error.high = where, dtype, low, high
        return error


def range_of(
    numbers: Shaped[np.ndarray, "..."],
    scale: Scale | None = None,
    where: str = "images",
    source: Source = "array",
) -> tuple[float, float]:
    """Return the numbers that become 0 and 1.

    ===============================  ==========================================================================
    numbers                          range
    ===============================  ==========================================================================
    with ``scale`` (low, high)       low and high; uint8 is refused if it covers less than half of them
    of a volume                      the 0.5th and the 99.5th percentile
    uint8; True and False            0 and 255; 0 and 1
    uint16                           0 and 65,535. In an array they must exceed 4,095, because smaller numbers
                                     are more likely 8-bit or 12-bit.
    other integers of 0..255         0 and 255
    floats of 0..1                   0 and 1
    others of an estimator           minimum and maximum
    others                           refused
    ===============================  ==========================================================================

    Args:
        numbers: The numbers; not empty.
        scale: Range set by the user or kept by a run; None or "auto": none.
        where: Name of the numbers in errors.
        source: Their origin.

    Raises:
        InputError: A number is NaN or infinite, or the dtype does not tell the range.
    """
    low, high = float(numbers.min()), float(numbers.max())  # NaN if any number is NaN
    if not math.isfinite(low) or not math.isfinite(high):
        raise InputError(f"{where} must be finite, got NaN or infinite numbers")
    kind = numbers.dtype.kind
    if scale is not None and not isinstance(scale, str):
        if numbers.dtype == np.uint8 and source != "volume" and 2 * min(255, scale[1]) < scale[0] + scale[1]:
            raise InputError(
                f"{where} is read with 8 bits, so its numbers end at 255, but the range of the pixels is "
                f"{scale[0]:g} to {scale[1]:g}; save it with as many bits as the other images"
            )
        return float(scale[0]), float(scale[1])
    if source == "volume":
        lowest, highest = np.percentile(numbers, PERCENTILES)
        return float(lowest), float(highest)
    if numbers.dtype == np.uint16 and source != "estimator" and (source == "file" or high > MAX_12_BIT or high == 0):
        return 0.0, float(MAX_16_BIT)
    if kind == "b" or (kind == "f" and low >= -ROUNDING and high <= 1 + ROUNDING):
        return 0.0, 1.0
    if numbers.dtype == np.uint8 or (kind in "iu" and numbers.dtype != np.uint16 and low >= 0 and high <= 255):
        return 0.0, 255.0
    if source == "estimator":
        return low, high
    raise UnknownRange.of(where, str(numbers.dtype), low, high)


def as_pixels(
    numbers: Shaped[np.ndarray, "..."],
    scale: Scale | None = None,
    where: str = "images",
    source: Source = "array",
) -> Pixels:
    """Convert numbers to pixels by :func:`range_of`; arguments and errors are the same.

    Returns:
        uint8 for integers whose range is 0..255, and for True and False; otherwise float32, also for the scale "none",
        which keeps the values.
    """
    if scale == "none" or numbers.size == 0:
        return numbers if numbers.dtype == np.uint8 and scale != "none" else numbers.astype(np.float32)
    if numbers.dtype == np.uint8 and scale in (None, "auto") and source != "volume":
        return numbers
    low, high = range_of(numbers, scale, where, source)
    if scale in (None, "auto") and source != "volume" and numbers.dtype.kind in "iub" and high in (1.0, 255.0):
        return (numbers * 255 if high == 1 else numbers).astype(np.uint8)
    return rescaled(numbers, low, high)


def rescaled(numbers: Shaped[np.ndarray, "..."], low: Any, high: Any) -> Float32[np.ndarray, "..."]:
    """Return (x - low) / (high - low), clipped to 0..1, computed in float64; low and high are numbers or arrays.

    Where both are equal, the result is 0 or 1.
    """
    width = np.subtract(high, low, dtype=np.float64)
    width = np.where(width == 0, np.finfo(np.float64).tiny, width)
    if numbers.dtype == np.float32 and np.ndim(low) == 0 and (low, high) == (0.0, 1.0):
        return numbers if numbers.min() >= 0 and numbers.max() <= 1 else numbers.clip(0, 1)
    if np.ndim(width):
        return ((numbers - np.asarray(low, np.float64)) / width).clip(0, 1).astype(np.float32)
    made = np.empty(numbers.shape, np.float32)
    with np.errstate(over="ignore"):
        for chunk, target in zip(_chunks(numbers), _chunks(made), strict=True):
            target[...] = ((chunk.astype(np.float64) - low) / width).clip(0, 1)
    return made


def as_bytes(pixels: Pixels) -> UInt8[np.ndarray, "..."]:
    """Round pixels to 256 steps; uint8 stays."""
    if pixels.dtype == np.uint8:
        return pixels
    made = np.empty(pixels.shape, np.uint8)
    for chunk, target in zip(_chunks(pixels), _chunks(made), strict=True):
        target[...] = (chunk * 255).round()
    return made


def as_floats(pixels: Pixels) -> Float32[np.ndarray, "..."]:
    """Return pixels as float32 of 0..1."""
    return pixels.astype(np.float32) / 255 if pixels.dtype == np.uint8 else pixels


def inverted(pixels: Pixels) -> Pixels:
    """Exchange dark and light."""
    return (255 if pixels.dtype == np.uint8 else 1) - pixels


def alike(images: Sequence[Pixels]) -> list[Pixels]:
    """Return images of a data set in one form: uint8 if no image has further levels, otherwise float32."""
    if all(image.dtype == np.uint8 or np.allclose(as_floats(as_bytes(image)), image, 0, ROUNDING) for image in images):
        return [as_bytes(image) for image in images]
    return [as_floats(image) for image in images]


def note_dark(
    images: Sequence[Pixels], where: str, scale: Scale | None = None, *, any_bits: bool = False, advice: str = ""
) -> None:
    """Say that images with more than 8 bits are far darker than their range allows; others may lie beside them.

    With ``any_bits``, images of a data set that all have 8 bits are compared with 255.
    """
    deep = [image for image in images if image.dtype != np.uint8 and image.size]
    chosen = deep or [image for image in images if any_bits and image.size]
    highest = max((float(image.max()) for image in chosen), default=0.0) / (1 if deep else 255)
    if not 0 < highest <= MIN_SHARE:
        return
    levels = chosen[0].reshape(-1)[:_CHUNK].astype(np.float64) * MAX_16_BIT
    low, high = 0.0, float(255 if not deep else MAX_16_BIT if np.allclose(levels, levels.round(), 0, 0.01) else 1)
    if scale is not None and not isinstance(scale, str):
        low, high = scale
        advice = "The range was set in training or by --scale; give numbers of this range"
    top = low + highest * (high - low)
    likely = _likely_scale(low, round(top, 2)) if top >= 1 else (low, round(top, 4))
    warnings.warn(
        f"No number{' of more than 8 bits' * bool(deep)} in {where} is above {likely[1]:,.6g}, but {high:,.6g} is "
        "white, so they are dark. "
        f"{advice or f'Say which numbers become black and white, such as {_scale_words(likely)}'}.",
        stacklevel=2,
    )


def _scale_words(scale: tuple[float, float]) -> str:
    """Return a range as a user sets it."""
    return f"scale={scale} (--scale {scale[0]},{scale[1]} of train and datasets)"


def _likely_scale(low: float, high: float) -> tuple[float, float]:
    """Return the most likely range of these numbers, to suggest it."""
    ranges = [(0, 1), (-1, 1), (0, 255), (0, MAX_12_BIT), (0, MAX_16_BIT), (-1_000, 1_000), (-1_024, 3_071)]
    for lowest, highest in ranges:
        if lowest <= low and high <= highest and (high > highest / 2 or low < lowest / 2):
            return lowest, highest
    return math.floor(low), math.ceil(high)


def _chunks(numbers: Shaped[np.ndarray, "..."]) -> Iterator[np.ndarray]:
    """Yield flat pieces of a few million numbers, which limit the memory of conversions."""
    flat = numbers.reshape(-1)
    return (flat[start : start + _CHUNK] for start in range(0, max(flat.size, 1), _CHUNK))
