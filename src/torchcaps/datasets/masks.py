"""Read masks from image files: numbers of classes, or colours that stand for classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image, ImageColor, UnidentifiedImageError

from torchcaps.datasets.images import check_size
from torchcaps.datasets.reading import one_sentence
from torchcaps.errors import InputError, shown
from torchcaps.files import read_text
from torchcaps.ranges import IGNORED

MAX_COLOURS = 64
"""Largest number of values of a mask; photos have more."""
COLOUR = 1 << 24
"""Added to the code 65,536·R + 256·G + B of a colour, so that it differs from numbers of classes."""


def read_mask(path: Path, name: str) -> Int64[np.ndarray, "H W"]:
    """Read the value of each pixel: the number of its class, or the code of its colour, :data:`COLOUR` and above.

    Raises:
        InputError: The file cannot be read, or it has as many values as a photo; errors begin with ``name``.
    """
    with one_sentence(f"{name} cannot be read as a mask"):
        try:
            image = Image.open(path, formats=("PNG", "BMP", "GIF", "TIFF"))
        except UnidentifiedImageError:
            raise InputError(f"{name} cannot be read as a mask; PNG, BMP, GIF and TIFF files can") from None
        with image:
            check_size(image, name)
            image.load()
            is_coloured = image.mode in ("RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
            values = np.asarray(image.convert("RGB") if is_coloured else image)
    if is_coloured and (values == values[..., :1]).all():  # numbers that were saved in colour
        is_coloured, values = False, values[..., 0]
    if is_coloured:
        red, green, blue = np.moveaxis(values.astype(np.int64), -1, 0)
        values = COLOUR + (red << 16) + (green << 8) + blue
    if values.ndim != 2 or values.dtype.kind not in "iub":
        raise InputError(
            f"{name} has {values.dtype} values of the shape {shown(values.shape)}; save masks as 8-bit PNG"
        )
    distinct = np.unique(values)
    if len(distinct) > MAX_COLOURS:
        raise InputError(
            f"{name} holds {len(distinct)} {'colours' if is_coloured else f'values up to {distinct[-1]}'}, as a photo "
            f"does; {RIGHT}"
        )
    return values.astype(np.int64)


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
    masks: Mapping[str, Int64[np.ndarray, "H W"]], names: Sequence[str] | None, colours: Mapping[int, int]
) -> tuple[dict[str, UInt8[np.ndarray, "H W"]], tuple[str, ...]]:
    """Replace the values of all masks of a data set by numbers of classes; return them and the names of the classes.

    Colours without a list of classes are numbered in the order of red, green and blue, so black is class 0. If all
    values are 0 and 255, class 1 is 255.

    Raises:
        InputError: A value is no class.
    """
    held = {name: np.unique(mask).tolist() for name, mask in masks.items()}
    values = sorted({value for each in held.values() for value in each})
    table = {value: value for value in values if value < COLOUR}
    if values == [0, IGNORED] or (values == [IGNORED] and names is None):
        table = {0: 0, IGNORED: 1}
    if colours:
        table = dict(colours)
    elif values and values[-1] >= COLOUR:
        table = {value: number for number, value in enumerate(values)}
    count = len(names) if names is not None else max([2, *(j + 1 for j in table.values() if j != IGNORED)])
    distinct = len([value for value in values if value != IGNORED])
    for name, each in held.items():
        wrong = [value for value in each if table.get(value, IGNORED + 1) > IGNORED or count <= table[value] < IGNORED]
        too_high = (
            names is None and not colours and table.get(max(each), 0) > 2 * max(distinct, 4) and max(each) < IGNORED
        )
        if wrong or too_high:
            raise InputError(_wrong_value(name, wrong[0] if wrong else max(each), each, names, colours))
    numbered = {}
    for name, mask in masks.items():
        keys, positions = np.unique(mask, return_inverse=True)
        numbered[name] = np.array([table[key] for key in keys.tolist()], np.uint8)[positions.reshape(mask.shape)]
    if names is None:
        codes = {number: value for value, number in table.items() if value >= COLOUR}
        names = [f"#{codes[j] - COLOUR:06x}" if j in codes else str(j) for j in range(count)]
    return numbered, tuple(names)


def _wrong_value(
    name: str, value: int, held: Sequence[int], names: Sequence[str] | None, colours: Mapping[int, int]
) -> str:
    if value >= COLOUR:
        known = "has no line in classes.txt" if colours else "is no number of a class"
        return (
            f"{name} has the colour #{value - COLOUR:06x}, which {known}; add a line such as vein #{value - COLOUR:06x}"
        )
    if names is not None and not colours:
        return f"{name} has the class {value}, but classes.txt names the classes 0 to {len(names) - 1}"
    return f"{name} holds {len(held)} values up to {max(held)}, as a photo does; {RIGHT}"
