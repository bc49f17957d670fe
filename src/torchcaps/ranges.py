"""Numeric ranges of options. One `Range` does the check and supplies the numbers for help and errors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from torchcaps.errors import InputError, WrongType, shown

MAX_ENTRIES = 100
"""Largest number of entries in a list of widths or of capsule layers."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, written beside a type: ``Annotated[int, Range(1, 9, whole=True)]``.

    Args:
        least: The smallest number.
        most: The largest number.
        above: Exclude ``least`` itself.
        below: Exclude ``most`` itself.
        odd: Accept odd numbers only.
        whole: Accept integers only.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    odd: bool = False
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        if not is_number(value) or not self.least <= value <= self.most:
            return False
        if self.whole and not isinstance(value, Integral):
            return False
        near = _as_float32(value)
        excluded = (self.above and near == self.least) or (self.below and near == self.most)
        return not excluded and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        least, most = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.least, self.most))
        if self.above or self.below:
            return f"{'above' if self.above else 'at least'} {least} and {'below' if self.below else 'at most'} {most}"
        return f"an odd number from {least} to {most}" if self.odd else f"{least} to {most}"

    def check(self, name: str, value: object) -> None:
        """Raise InputError, which calls the number ``name``, unless it is in the range. NaN never is."""
        if value not in self:
            kind = "a whole number, " if self.whole and is_number(value) and not isinstance(value, Integral) else ""
            error = InputError if is_number(value) and not kind else WrongType
            raise error(f"{name} must be {kind}{self}, got {shown(value)}")


def _as_float32(value: Any) -> float:
    """Return the float32 number that a network computes with."""
    try:
        (near,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(near)


def is_number(value: object) -> bool:
    """Return True for a real number of Python or NumPy, but not for a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_scale(value: object) -> bool:
    """Return True for two finite numbers (low, high) of at most 1e38, with low < high."""
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    return len(pair) == 2 and all(is_number(each) and abs(each) <= 1e38 for each in pair) and pair[0] < pair[1]


def is_spacing(value: object) -> bool:
    """Return True for three distances of neighbouring voxels, mm."""
    return isinstance(value, list | tuple) and len(value) == 3 and all(each in MILLIMETRES for each in value)


def image_shape(in_shape: object) -> tuple[int, int, int]:
    """Return ``in_shape`` as (channels, height, width); raise InputError if it is not three positive integers."""
    if not isinstance(in_shape, Sequence) or len(in_shape) != 3 or not all(size in COUNT for size in in_shape):
        raise InputError(f"in_shape must be (channels, height, width), three positive integers, got {shown(in_shape)}")
    channels, height, width = map(int, in_shape)
    return channels, height, width


def spatial_shape(in_shape: object, axes: Sequence[int]) -> tuple[int, ...]:
    """Return ``in_shape`` as channels and one size for each spatial axis; raise InputError if it does not fit.

    Args:
        in_shape: Shape of an image, channels first.
        axes: Numbers of spatial axes that are allowed: (2,) for images only, (1, 2, 3) for lines and volumes too.
    """
    if tuple(axes) == (2,):
        return image_shape(in_shape)
    fits = isinstance(in_shape, Sequence) and len(in_shape) - 1 in axes and all(size in COUNT for size in in_shape)
    if not fits:
        raise InputError(
            f"in_shape must be channels and {min(axes)} to {max(axes)} sizes, such as (1, 64, 64), all positive "
            f"integers, got {shown(in_shape)}"
        )
    assert isinstance(in_shape, Sequence)
    return tuple(map(int, in_shape))


def read_fold(text: str) -> tuple[int, int]:
    """Return the number of the test part and the number of parts of a fold ``"K/N"``; raise InputError for others."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts) in Range(2, 1000)):
        raise InputError(f"fold must be K/N, such as 2/5 for the second of five parts, got {shown(text)}")
    return int(part), int(parts)


def as_text(value: object) -> str:
    """Return an option's value as users read and type it: ``on``, ``none``, ``0.001``, ``512,1024``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ",".join(map(as_text, value)) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Networks compute in float32, whose largest number is about 3.4e38.
_MAX_FLOAT = 1e38

COUNT = Range(1, 1_000_000_000, whole=True)
INDEX = Range(0, COUNT.most, whole=True)
SEVERAL = Range(2, COUNT.most, whole=True)
SEED = Range(0, 2**32 - 1, whole=True)
COVERAGE = Range(0, 1, above=True, below=True)
MILLIMETRES = Range(1e-3, 1e3)

Width = Annotated[int, Range(1, 65_536, whole=True)]
"""Width of a layer: channels, capsule types, components."""
Size = Annotated[int, Range(1, 2**31 - 1, whole=True)]
"""Capsules, classes or channels of the data."""
Pixels = Annotated[int, Range(1, 4096, whole=True)]
"""Sides of images, kernels and strides."""
FROM_DATA = object()
"""Marks an argument that has a default but follows from the data in a network, so that it is no option."""
Axes = Annotated[int, Range(1, 3, whole=True), FROM_DATA]
"""Axes of a map: 1 (lines), 2 (planes) or 3 (volumes)."""
Padding = Annotated[int, Range(0, 4095, whole=True)]
"""Pixels or positions on each side."""
OddKernel = Annotated[int, Range(1, 255, odd=True, whole=True)]
"""Kernel side of a convolution that keeps the size of its maps, pixels."""
Count = Annotated[int, COUNT]
"""Number of images, steps or epochs."""
Index = Annotated[int, INDEX]
"""Index of an epoch, a batch or a process, from 0."""
Iterations = Annotated[int, Range(0, 1000, whole=True)]
"""Number of routing iterations."""
AtLeastOneIteration = Annotated[int, Range(1, 1000, whole=True)]
"""Number of iterations of an algorithm that needs at least one."""
Frequencies = Annotated[int, Range(0, 64, whole=True)]
"""Number of frequencies of a position on a map."""
Processes = Annotated[int, Range(1, 4096, whole=True)]
"""Number of processes or machines of a run."""
Seed = Annotated[int, SEED]
"""Random seed, in the range that NumPy's generators accept."""
Factor = Annotated[float, Range(0, _MAX_FLOAT)]
"""A weight or a margin, which may be zero."""
PositiveFactor = Annotated[float, Range(0, _MAX_FLOAT, above=True)]
"""A scale, a rate or a duration."""
Epsilon = Annotated[float, Range(1e-24, 1)]
"""Number added under a square root. The gradient of a smaller root would overflow in float32."""
Amount = Annotated[float, Range(0, 1e300)]
"""Seconds, bytes and other amounts in a file; NaN is not allowed."""
Finite = Annotated[float, Range(-1e300, 1e300)]
"""Any finite number."""
Degrees = Annotated[float, Range(0, 180)]
"""Largest angle of a rotation in either direction, degrees."""
Share = Annotated[float, Range(0, 1)]
"""A fraction from 0 to 1, both included."""
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
"""A fraction below 1, such as a probability of dropout."""
ShareAboveZero = Annotated[float, Range(0, 1, above=True)]
"""A fraction above 0."""

IGNORED = 255
"""Value of a mask for pixels that no loss and no metric counts."""

Fill = Literal["zeros", "edge"]
"""Pixels outside an image: zeros, or copies of the nearest pixel of its edge."""
Millimetres = Annotated[float, MILLIMETRES]
"""Distance of neighbouring voxels."""
Spacing = tuple[Millimetres, Millimetres, Millimetres]
"""Distances of neighbouring voxels along depth, height and width, mm."""
Components = tuple[tuple[float, ...], ...]
"""Mean of spectra, and the weights of the bands in each of their principal components."""
Pages = Literal["channels", "depth"]
"""Meaning of the pages of an image file: further channels of an image, or the slices of a volume."""
ValidationSplit = Literal["random", "first", "last"]
"""Choice of the validation images among the training images: at random, the first or the last."""
