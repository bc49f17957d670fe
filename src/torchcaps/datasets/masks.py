"""Read masks from image files: numbers of classes, or a colour for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt, UInt8
from PIL import ImageColor

from torchcaps.datasets.image_files import MASK_FORMATS, opened_pages
from torchcaps.errors import InputError, shown
from torchcaps.files import one_sentence, read_text
from torchcaps.ranges import IGNORED

MAX_COLOURS = 64
"""Largest number of different values in a mask. A file with more is taken for a photo."""
MAX_FEW_VALUES = 5
"""Most values of a mask that are named in an error."""
COLOUR = 1 << 24
"""Added to the code 65,536·R + 256·G + B of a colour, so that it differs from numbers of classes."""


def read_mask(path: Path, name: str, *, is_volume: bool = False) -> UInt[np.ndarray, "*S"]:
    """Read the value of each pixel: the number of its class, or the code of its colour, :data:`COLOUR` and above.

    If ``is_volume``, the pages of the file are slices, (D, H, W).

    Raises:
        InputError: The file cannot be read, or it has more than ``MAX_COLOURS`` values; errors begin with ``name``.
    """
    with opened_pages(path, name, several=is_volume, what="a mask", formats=MASK_FORMATS) as pages:
        are_coloured = {page.mode in ("RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV") for page in pages}
        is_coloured = True in are_coloured
        if len(are_coloured) > 1:
            raise ValueError("some of its pages are in colour, but not all")
        slices = []
        for page in pages:
            plain = {"LA": "L", "PA": "P"}.get(page.mode, "RGB" if is_coloured else page.mode)  # without transparency
            slices.append(np.asarray(page if plain == page.mode else page.convert(plain)))
        values = np.stack(slices) if is_volume else slices[0]
    if is_coloured and (values == values[..., :1]).all():  # numbers that were saved in colour
        is_coloured, values = False, values[..., 0]
    if is_coloured:
        red, green, blue = np.moveaxis(values.astype(np.uint32), -1, 0)
        values = COLOUR + (red << 16) + (green << 8) + blue
    if values.ndim != 2 + is_volume or values.dtype.kind not in "iub":
        raise InputError(
            f"{name} has {values.dtype} values of the shape {shown(values.shape)}; save masks as 8-bit PNG"
        )
    distinct = np.unique(values)
    if len(distinct) > MAX_COLOURS:
        raise InputError(
            f"{name} holds {len(distinct)} {'colours' if is_coloured else f'values up to {distinct[-1]}'}, as a photo "
            f"does; {RIGHT}"
        )
    if distinct[0] < 0:
        raise InputError(f"{name} holds the value {distinct[0]}; {RIGHT}")
    return values.astype(np.min_scalar_type(int(distinct[-1])))  # one byte for numbers, which may be many


RIGHT = f"a mask holds the number of a class in each pixel ({IGNORED}: ignored)"


def read_classes(path: Path) -> tuple[tuple[str, ...] | None, dict[int, int]]:
    """Read classes.txt: a class on each line, from 0, optionally with its colour, such as ``vein #00ff00``.

    Returns:
        Names of the classes, None without a file; and the number of each code of :func:`read_mask`.

    Raises:
        InputError: A line is empty, or only some of the lines have colours.
    """
    if not path.exists():
        return None, {}
    names, colours = list[str](), dict[int, int]()
    lines = read_text(path, "list of classes").splitlines()
    for number, line in enumerate(lines):
        name, space, colour = line.strip().rpartition(" #")
        if space:
            with one_sentence(f"{path}: line {number + 1}, {shown(line)}, has no colour such as #00ff00"):
                red, green, blue = ImageColor.getrgb(f"#{colour}")[:3]
            colours[COLOUR + (red << 16) + (green << 8) + blue] = number
        names.append((name if space else line).strip())
    if not all(names) or len(names) < 2 or len(names) > IGNORED or len(colours) not in (0, len(names)):
        raise InputError(
            f"{path} must have 2 to {IGNORED} lines, the name of each class from 0, and a different colour such as "
            "#00ff00 after all names or none"
        )
    return tuple(names), colours


def number_masks(
    masks: Mapping[str, UInt[np.ndarray, "..."]], names: Sequence[str] | None, colours: Mapping[int, int]
) -> tuple[dict[str, UInt8[np.ndarray, "..."]], tuple[str, ...], list[str]]:
    """Replace the values of all masks of a data set by numbers of classes.

    Colours without a list of classes are numbered in the order of red, green and blue, so black is class 0. If all
    values are 0 and 255, class 1 is 255.

    Args:
        masks: Values of each mask by its name in errors.
        names: Names of the classes; None: their numbers or colours.
        colours: Number of the class of each code of a colour; empty: unknown.

    Returns:
        The masks, the names of the classes, and a sentence for each mask that is left out, because a value is no class.

    Raises:
        InputError: The masks hold no numbers of classes, or some are in colour and others are not.
    """
    held = {name: np.unique(mask).tolist() for name, mask in masks.items()}
    values = set().union(*held.values())
    if max(values) >= COLOUR or (colours and {_colour_of(each) for each in values} <= colours.keys()):
        masks = {
            name: np.where(mask < COLOUR, _colour_of(mask.astype(np.uint32)), mask) for name, mask in masks.items()
        }
        held = {name: sorted(map(_colour_of, each)) for name, each in held.items()}
        if not colours:
            _check_greys(held)
    else:
        colours = {}
    values = set().union(*held.values())
    table = _numbers(sorted(values), colours)
    highest = max((number for number in table.values() if number != IGNORED), default=0)
    count = max(highest + 1, 2) if names is None else len(names)
    faults = dict[str, str]()
    for name, each in held.items():
        if wrong := [value for value in each if not _is_class(table.get(value), count)]:
            faults[name] = _wrong_value(name, wrong[0], names)
        grey = [value for value in each if value < COLOUR and value != IGNORED]
        if names is None and grey and grey[-1] > 2 * max(len(values), 4) and table[grey[-1]] == grey[-1]:
            raise InputError(_large_values(name, each))
    numbered = {}
    for name, mask in masks.items():
        if name in faults:
            continue
        keys, positions = np.unique(mask, return_inverse=True)
        numbered[name] = np.array([table[key] for key in keys.tolist()], np.uint8)[positions.reshape(mask.shape)]
    if names is None:
        codes = {number: value for value, number in table.items() if value >= COLOUR}
        names = [f"#{codes[j] - COLOUR:06x}" if j in codes else str(j) for j in range(count)]
    return numbered, tuple(names), list(faults.values())


def _numbers(values: Sequence[int], colours: Mapping[int, int]) -> Mapping[int, int]:
    """Return the number of the class of each value of the masks of a data set."""
    if colours:
        return colours
    if values and values[-1] >= COLOUR:
        return {value: number for number, value in enumerate(values)}
    if values == [0, IGNORED]:
        return {0: 0, IGNORED: 1}
    return {value: value for value in values}


def _colour_of(value: Any) -> Any:
    """Return the code of a colour. A brightness up to 255 is a grey: a mask in colour may be all grey or all black."""
    return value if np.ndim(value) == 0 and value >= COLOUR else COLOUR + value * 0x010101


def _is_class(number: int | None, count: int) -> bool:
    return number == IGNORED or (number is not None and number < count)


def _check_greys(held: Mapping[str, Sequence[int]]) -> None:
    """Raise InputError if some masks are in colour, and others have numbers of classes, which would become greys."""
    greys = {COLOUR + value * 0x010101 for value in range(1, IGNORED)}
    coloured = {name for name, codes in held.items() if not set(codes) <= greys | {COLOUR, COLOUR + 0xFFFFFF}}
    known = set().union(*(held[name] for name in coloured))
    for name in sorted(held.keys() - coloured):
        if wrong := sorted(greys.intersection(held[name]) - known):
            raise InputError(
                f"{min(coloured)} is in colour, but {name} has the number {(wrong[0] - COLOUR) & 255}; save all masks "
                "in one way, or name each colour in classes.txt"
            )


def _large_values(name: str, values: Sequence[int]) -> str:
    """Return the error about a mask whose values are too large to be numbers of classes."""
    if len(values) > MAX_FEW_VALUES:
        return f"{name} holds {len(values)} values up to {values[-1]}, as a photo does; {RIGHT}"
    return (
        f"{name} has the values {', '.join(map(str, values))}, but {RIGHT}; number the classes 0, 1, 2 and so on, or "
        f"name them in classes.txt with these greys, on lines such as vein #{values[-1] * 0x010101:06x}"
    )


def _wrong_value(name: str, value: int, names: Sequence[str] | None) -> str:
    """Return the error for a value of a mask that belongs to no class."""
    if value >= COLOUR:
        colour = f"#{value - COLOUR:06x}"
        return f"{name} has the colour {colour}, which has no line in classes.txt; add a line such as vein {colour}"
    if names is None:
        return f"{name} has the value {value}; {RIGHT}"
    return f"{name} has the class {value}, but classes.txt names the classes 0 to {len(names) - 1}"
