"""The values that a setting may have: its check, its help and its errors take its numbers from one range."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from torchcaps.errors import InputError, WrongType, shown

MOST_ENTRIES = 100
"""So many entries at most are in a list of widths, or of capsule layers."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, written beside a type: ``Annotated[int, Range(1, 9, whole=True)]``.

    Args:
        least: The smallest number.
        most: The largest number.
        above: Whether ``least`` itself is left out.
        below: Whether ``most`` itself is left out.
        odd: Whether only odd numbers are meant.
        whole: Whether only integers are meant.
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
        left_out = (self.above and near == self.least) or (self.below and near == self.most)
        return not left_out and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        least, most = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.least, self.most))
        if self.above or self.below:
            return f"{'above' if self.above else 'at least'} {least} and {'below' if self.below else 'at most'} {most}"
        return f"an odd number from {least} to {most}" if self.odd else f"{least} to {most}"

    def check(self, name: str, value: object) -> None:
        """Raise InputError, which says what the number is, unless it is in the range; NaN never is."""
        if value not in self:
            kind = "a whole number, " if self.whole and is_number(value) and not isinstance(value, Integral) else ""
            wrong = InputError if is_number(value) and not kind else WrongType
            raise wrong(f"{name} must be {kind}{self}, got {shown(value)}")


def _as_float32(value: Any) -> float:
    """Return the float32 number that a network computes with."""
    try:
        (near,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(near)


def is_number(value: object) -> bool:
    """Whether a value is a real number, of Python or of NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool)


def image_shape(in_shape: object) -> tuple[int, int, int]:
    """The channels, height and width that ``in_shape`` has; else an InputError says what is wrong."""
    if not isinstance(in_shape, Sequence) or len(in_shape) != 3 or not all(size in COUNT for size in in_shape):
        raise InputError(f"in_shape must be (channels, height, width), three positive integers, got {shown(in_shape)}")
    channels, height, width = map(int, in_shape)
    return channels, height, width


def as_text(value: object) -> str:
    """An option's value as a person reads it, and types it: ``on``, ``none``, ``0.001``, ``512,1024``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ",".join(map(as_text, value)) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Float settings go up to a number that float32, in which networks compute, still holds.
_LARGEST = 1e38

COUNT = Range(1, 1_000_000_000, whole=True)
INDEX = Range(0, COUNT.most, whole=True)
SEED = Range(0, 2**32 - 1, whole=True)

Width = Annotated[int, Range(1, 65_536, whole=True)]
"""Channels, capsule types, components: how wide a layer is."""
Size = Annotated[int, Range(1, 2**31 - 1, whole=True)]
"""Capsules, classes, channels, as the data have them."""
Pixels = Annotated[int, Range(1, 4096, whole=True)]
"""Sides of images, kernels and strides."""
Padding = Annotated[int, Range(0, 4095, whole=True)]
"""Pixels or positions on each side."""
OddKernel = Annotated[int, Range(1, 255, odd=True, whole=True)]
"""The side of a kernel of a convolution that keeps the size."""
Count = Annotated[int, COUNT]
"""Images, steps, epochs."""
Index = Annotated[int, INDEX]
"""The number of an epoch, a batch, a process."""
Iterations = Annotated[int, Range(0, 1000, whole=True)]
"""Routing iterations."""
AtLeastOneIteration = Annotated[int, Range(1, 1000, whole=True)]
"""Iterations of an algorithm that does nothing without any."""
Processes = Annotated[int, Range(1, 4096, whole=True)]
"""Processes of a run, and machines."""
Seed = Annotated[int, SEED]
"""Of everything random; numpy's generators take no other."""
Factor = Annotated[float, Range(0, _LARGEST)]
"""A weight or a margin, which may be zero."""
PositiveFactor = Annotated[float, Range(0, _LARGEST, above=True)]
"""A scale, a rate, a duration."""
Epsilon = Annotated[float, Range(1e-24, 1)]
"""What is added under a root; the gradient of a smaller root overflows in float32."""
Amount = Annotated[float, Range(0, 1e300)]
"""Seconds, bytes and other amounts that a file holds; NaN is none."""
Finite = Annotated[float, Range(-1e300, 1e300)]
"""Any finite number."""
Degrees = Annotated[float, Range(0, 180)]
"""An angle, either way."""
Share = Annotated[float, Range(0, 1)]
"""A part of a whole, both ends included."""
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
"""A part of a whole of which something is left, such as a probability of dropout."""
ShareAboveZero = Annotated[float, Range(0, 1, above=True)]
"""A part of a whole that is not nothing."""

Fill = Literal["zeros", "edge"]
"""What lies around an image: zeros, or everywhere the nearest pixel of its edge."""
ValidationSplit = Literal["random", "first", "last"]
"""Which of the training images are for validation: a random choice, or the first or the last ones."""
