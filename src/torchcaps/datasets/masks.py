"""Masks from files and arrays: numbers of classes, or a colour for each class. One rule, whatever they come from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt, UInt8
from PIL import Image, ImageColor

from torchcaps.datasets.image_files import MASK_FORMATS, WHITE, opened_pages
from torchcaps.datasets.scaling import MAX_16_BIT
from torchcaps.errors import InputError, shown
from torchcaps.files import one_sentence, read_text
from torchcaps.ranges import IGNORED

MAX_COLOURS = 64
"""Largest number of different values in a mask. A file with more is taken for a photo."""
MAX_FEW_VALUES = 5
"""Most values of a mask that are named in an error."""
COLOUR = 1 << 32
"""Added to the code 65,536·R + 256·G + B of a colour, so that it differs from numbers of classes."""
MIN_INSTANCES = 8
"""Masks are compared with masks of instances if they hold at least this many numbers."""


class Mask(NamedTuple):
    """Masks of one size, as every reader and every array gives them."""

    positions: UInt[np.ndarray, "..."]
    """Value of each pixel, as a position in ``values``."""
    values: tuple[int, ...]
    """Ascending: numbers of classes, below :data:`COLOUR`, or codes of colours."""


def as_mask(array: Shaped[np.ndarray, "..."], size: Sequence[int], where: str) -> Mask:
    """Return masks of any form in one form.

    The array holds whole numbers of the shape ``size``, or has a further axis, first (after the images) or last: one
    channel, three or four of a colour, or a channel for each class (one-hot). For several masks, ``size`` begins with
    their number.

    Raises:
        InputError: The array has another shape, or it holds negative numbers, fractions or numbers above 2³².
    """
    size = tuple(size)
    sizes = "×".join(map(str, size))
    axis = None if array.shape == size else channel_axis(array.shape, size)
    if array.shape != size and axis is None:
        raise InputError(
            f"{where} has the shape {shown(tuple(array.shape))}, but its image {sizes}; a mask has the size of its "
            "image"
        )
    if array.dtype.kind not in "iubf" or (array.dtype.kind == "f" and not (array == np.floor(array)).all()):
        raise InputError(f"{where} holds fractions or no numbers; {RIGHT}")
    if array.size and (array.min() < 0 or array.max() >= COLOUR):
        raise InputError(f"{where} holds the value {array.min() if array.min() < 0 else array.max():g}; {RIGHT}")
    is_coloured = False
    if axis is not None:
        array, is_coloured = _without_channels(np.moveaxis(array, axis, -1), where)
    values = np.unique(array)
    if array.dtype == np.uint8:
        positions = np.searchsorted(values, np.arange(256)).astype(np.uint8)[array]
    else:
        positions = np.searchsorted(values, array).astype(np.min_scalar_type(max(len(values) - 1, 0)))
    return Mask(positions, tuple(int(value) + COLOUR * is_coloured for value in values))


def size_fault(file: Path, size: Sequence[int], image: Path, expected: Sequence[int]) -> str:
    """Return the error about a mask, or a channel, whose size is not that of its image."""
    sizes = ["×".join(map(str, each)) for each in (size, expected)]
    axes = " (height × width)" * (len(size) == 2)
    rule = "a mask has the size of its image" + ", and so has a channel" * (len(size) > 2)
    return f"{file} is {sizes[0]}, but {image} {sizes[1]}{axes}; {rule}"


def channel_axis(shape: Sequence[int], size: Sequence[int]) -> int | None:
    """Return the axis of ``shape`` that ``size`` lacks: the last one, the first one, or the first after the images."""
    axes = [axis for axis in (len(shape) - 1, 1, 0) if len(shape) == len(size) + 1]
    return next((axis for axis in axes if (*shape[:axis], *shape[axis + 1 :]) == tuple(size)), None)


def _without_channels(array: Shaped[np.ndarray, "... C"], where: str) -> tuple[np.ndarray, bool]:
    """Return numbers of classes, or codes of colours, for an array with channels last; and True for colours."""
    channels = array.shape[-1]
    if channels == 1 or (channels in (3, 4) and (array[..., :3] == array[..., :1]).all()):  # grey
        return array[..., 0], False
    if array.max() <= 1 and (array.sum(-1) == 1).all():  # one-hot
        return array.argmax(-1), False
    if channels not in (3, 4) or array.max() > IGNORED:
        raise InputError(
            f"{where} has {channels} channels, but {RIGHT}; a mask may have one channel, three of a colour of 0..255, "
            "or one for each class, of which one is 1 in each pixel"
        )
    red, green, blue = np.moveaxis(array[..., :3].astype(np.uint32), -1, 0)
    return (red << 16) + (green << 8) + blue, True


def read_mask(path: Path, name: str, *, is_volume: bool = False) -> Mask:
    """Read a mask from an image file.

    If ``is_volume``, the pages of the file are slices, (D, H, W).

    Raises:
        InputError: The file cannot be read, or it has more than ``MAX_COLOURS`` values; errors begin with ``name``.
    """
    with opened_pages(path, name, several=is_volume, what="a mask", formats=MASK_FORMATS) as pages:
        slices = [pillow_mask(page) for page in pages]
        if len({each.ndim for each in slices}) > 1:
            raise ValueError("some of its pages are in colour, but not all")
        values = np.stack(slices) if is_volume else slices[0]
    mask = as_mask(values, values.shape[: 2 + is_volume], name)
    if len(mask.values) > MAX_COLOURS:
        last = mask.values[-1]
        kind = "colours" if last >= COLOUR else f"values up to {last}"
        raise InputError(f"{name} holds {len(mask.values)} {kind}, as a photo does; {RIGHT}")
    return mask


def pillow_mask(image: Image.Image) -> Shaped[np.ndarray, "..."]:
    """Return the numbers of a mask (H, W), or its colours (H, W, 3), without transparency; of a palette the numbers."""
    plain = {"LA": "L", "PA": "P"} | dict.fromkeys(("RGBA", "CMYK", "YCbCr", "LAB", "HSV"), "RGB")
    mode = plain.get(image.mode, image.mode)
    numbers = np.asarray(image if mode == image.mode else image.convert(mode))
    if WHITE in image.info and mode != "RGB":  # the numbers in the file, not stretched
        numbers = np.rint(numbers * (image.info[WHITE] / (MAX_16_BIT if mode == "I" else 255)))
    return numbers


RIGHT = f"a mask holds the number of a class in each pixel ({IGNORED}: ignored)"


def read_classes(path: Path) -> tuple[tuple[str, ...] | None, dict[int, int]]:
    """Read classes.txt: a class on each line, from 0.

    All lines may end with the colour of the class in the masks, such as ``vein #00ff00``, or with its number there,
    such as ``vein =300``.

    Returns:
        Names of the classes, None without a file; and the number of the class of each colour or number in the masks.

    Raises:
        InputError: A line is empty, or only some of the lines have colours or numbers.
    """
    if not path.exists():
        return None, {}
    names, table = list[str](), dict[int, int]()
    lines = read_text(path, "list of classes").splitlines()
    for number, line in enumerate(lines):
        name, mark, value = line.strip().rpartition(" #" if " #" in line else " =")
        if mark == " #":
            with one_sentence(f"{path}: line {number + 1}, {shown(line)}, has no colour such as #00ff00"):
                red, green, blue = ImageColor.getrgb(f"#{value.strip()}")[:3]
            table[COLOUR + (red << 16) + (green << 8) + blue] = number
        elif value.strip().isdecimal() and len(value.strip()) <= len(str(COLOUR)) and mark:
            table[int(value)] = number
        else:
            name = line
        names.append(name.strip())
    is_mixed = any(value < COLOUR for value in table) and any(value >= COLOUR for value in table)
    if not all(names) or not 2 <= len(names) <= IGNORED or len(table) not in (0, len(names)) or is_mixed:
        raise InputError(
            f"{path} must have 2 to {IGNORED} lines, the name of each class from 0, and after all names or none a "
            "different colour such as #00ff00, or a different number such as =300"
        )
    return tuple(names), table


def colours_of(table: Mapping[int, int]) -> tuple[str, ...] | None:
    """Return the colour of each class, such as ``#00ff00``; None if the values of ``table`` are no colours."""
    codes = {number: value - COLOUR for value, number in table.items() if value >= COLOUR}
    return tuple(f"#{codes[j]:06x}" for j in range(len(codes))) if codes else None


class Numbered(NamedTuple):
    """Masks of a data set as numbers of classes."""

    masks: dict[str, UInt8[np.ndarray, "..."]]
    """The masks whose values are all classes, by their names in errors."""
    names: tuple[str, ...]
    """Names of the classes, or their colours or numbers."""
    colours: tuple[str, ...] | None
    """Colours of the classes in classes.txt or in the masks; None: these hold numbers."""
    faults: list[str]
    """A sentence for each mask that is left out, because a value is no class."""


def number_masks(masks: Mapping[str, Mask], names: Sequence[str] | None, listed: Mapping[int, int]) -> Numbered:
    """Replace the values of all masks of a data set, by their names in errors, by numbers of classes.

    ``names`` and ``listed`` are those of :func:`read_classes`. :func:`number_values` gives the rule.

    Raises:
        InputError: The masks hold no numbers of classes, or some are in colour and others are not.
    """
    masks, table = number_values(masks, listed)
    values = set().union(*(mask.values for mask in masks.values()))
    highest = max((number for number in table.values() if number != IGNORED), default=0)
    count = max(highest + 1, 2) if names is None else len(names)
    faults = dict[str, str]()
    for name, mask in masks.items():
        classes = {value: table.get(value, -1) for value in mask.values}
        if wrong := [value for value, j in classes.items() if j != IGNORED and not 0 <= j < count]:
            faults[name] = _wrong_value(name, wrong[0], names, listed)
        numbers = [value for value in mask.values if value < COLOUR and value != IGNORED]
        is_large = numbers and (numbers[-1] > IGNORED or numbers[-1] > 2 * max(len(values), 4))
        if names is None and is_large and table[numbers[-1]] == numbers[-1]:
            raise InputError(_large_values(name, mask.values))
    numbered = {name: number_array(mask, table) for name, mask in masks.items() if name not in faults}
    colours = colours_of(listed or table)
    if names is None and colours is None:
        _note_instances(masks)
    return Numbered(numbered, tuple(names or colours or map(str, range(count))), colours, list(faults.values()))


def number_values(
    masks: Mapping[str, Mask], listed: Mapping[int, int] | None = None
) -> tuple[dict[str, Mask], dict[int, int]]:
    """Decide once for all masks of a data set which class each value is.

    - Colours or numbers in classes.txt have the class of their line.
    - Colours without a list are numbered in the order of red, green and blue, so black is class 0. Greys count as
      colours beside them.
    - If all values are 0 and 255, 255 is class 1. Otherwise 255 is ignored.
    - Other numbers are numbers of classes.

    Returns:
        The masks, in which greys beside colours are colours, and the class of each value.

    Raises:
        InputError: Some masks are in colour, and others hold numbers of classes.
    """
    masks, listed = dict(masks), listed or {}
    values: set[int] = set().union(*(mask.values for mask in masks.values()))
    if max(values) >= COLOUR or (listed and {_colour_of(each) for each in values} <= listed.keys()):
        masks = _in_colour(masks)
        if not listed:
            _check_greys({name: mask.values for name, mask in masks.items()})
        coloured: set[int] = set().union(*(mask.values for mask in masks.values()))
        return masks, dict(listed) if listed else {value: number for number, value in enumerate(sorted(coloured))}
    if listed and min(listed) < COLOUR:  # numbers
        return masks, {IGNORED: IGNORED} | dict(listed)
    if values == {0, IGNORED}:
        return masks, {0: 0, IGNORED: 1}
    _note_ignored(masks)
    return masks, {value: value for value in values}


def with_table(masks: Mapping[str, Mask], table: Mapping[int, int]) -> dict[str, Mask]:
    """Return masks for the ``table`` of :func:`number_values` that the training masks decided.

    Raises:
        InputError: They hold a colour that the training masks lack, or these hold numbers.
    """
    is_coloured, masks = max(table) >= COLOUR, dict(masks)
    masks = _in_colour(masks) if is_coloured else masks
    for name, mask in masks.items():
        if unknown := [value for value in mask.values if value >= COLOUR and value not in table]:
            lack = "the training masks lack" if is_coloured else "is no number, as the training masks hold"
            raise InputError(f"{name}: a mask has the colour #{unknown[0] - COLOUR:06x}, which {lack}")
    if table.get(IGNORED, IGNORED) == IGNORED and not is_coloured:
        _note_ignored(masks)
    return masks


def _in_colour(masks: Mapping[str, Mask]) -> dict[str, Mask]:
    return {name: mask._replace(values=tuple(map(_colour_of, mask.values))) for name, mask in masks.items()}


def _note_ignored(masks: Mapping[str, Mask]) -> None:
    """Say that 255 is ignored, if no mask holds it beside a class, as masks of 0 and 255 do not."""
    marked = {name: mask.values for name, mask in masks.items() if IGNORED in mask.values}
    if marked and all({*values} <= {0, IGNORED} for values in marked.values()):
        warnings.warn(
            f"{min(marked)} holds no number but 0 and {IGNORED}, but other masks hold numbers of classes, so {IGNORED} "
            f"is ignored. If it is a class, save its number in place of {IGNORED}.",
            stacklevel=2,
        )


def number_array(mask: Mask, table: Mapping[int, int]) -> Shaped[np.ndarray, "..."]:
    """Return masks with the class of each value; values that ``table`` lacks stay."""
    numbers = [table.get(value, value) for value in mask.values]
    return np.array(numbers, np.min_scalar_type(max(numbers, default=0)))[mask.positions]


def _note_instances(masks: Mapping[str, Mask]) -> None:
    """Say that masks look like masks of instances: 1 to n in each, with another n in most of them."""
    objects = [[value for value in mask.values if value not in (0, IGNORED)] for mask in masks.values()]
    counts = {len(numbers) for numbers in objects}
    if max(counts) < MIN_INSTANCES or len(counts) < min(3, len(objects)) or len(objects) == 1:
        return
    if all(numbers == list(range(1, len(numbers) + 1)) for numbers in objects):
        warnings.warn(
            f"Each mask holds the numbers from 1 to another last number, up to {max(counts)}, as masks do that number "
            "the objects of an image. They are read as numbers of classes. If they number objects, save 1 for every "
            "object.",
            stacklevel=2,
        )


def _colour_of(value: int) -> int:
    """Return the code of a colour. A brightness up to 255 is a grey: a mask in colour may be all grey or all black."""
    return value if value > IGNORED else COLOUR + value * 0x010101


def _check_greys(held: Mapping[str, Sequence[int]]) -> None:
    """Raise InputError if some masks are in colour, and others have numbers of classes, which would become greys."""
    greys = {COLOUR + value * 0x010101 for value in range(1, IGNORED)}
    plain = greys | {COLOUR, COLOUR + 0xFFFFFF}
    coloured = {name for name, codes in held.items() if any(code >= COLOUR and code not in plain for code in codes)}
    known = set().union(*(held[name] for name in coloured))
    for name in sorted(held.keys() - coloured):
        numbers = {value for value in held[name] if value < COLOUR}
        if wrong := sorted((greys.intersection(held[name]) - known) | numbers):
            number = wrong[0] if wrong[0] < COLOUR else (wrong[0] - COLOUR) & 255
            raise InputError(
                f"{min(coloured)} is in colour, but {name} has the number {number}; save all masks "
                "in one way, or name each colour in classes.txt"
            )


def _large_values(name: str, values: Sequence[int]) -> str:
    """Return the error about a mask whose values are too large to be numbers of classes."""
    if len(values) > MAX_FEW_VALUES:
        return f"{name} holds {len(values)} values up to {values[-1]}, as a photo does; {RIGHT}"
    return (
        f"{name} has the values {', '.join(map(str, values))}, but {RIGHT}; number the classes 0, 1, 2 and so on, or "
        f"name them in classes.txt with these numbers, on lines such as vein ={values[-1]}"
    )


def _wrong_value(name: str, value: int, names: Sequence[str] | None, listed: Mapping[int, int]) -> str:
    """Return the error for a value of a mask that belongs to no class."""
    if value >= COLOUR:
        colour = f"#{value - COLOUR:06x}"
        return f"{name} has the colour {colour}, which has no line in classes.txt; add a line such as vein {colour}"
    if listed and min(listed) < COLOUR:
        return f"{name} has the number {value}, which has no line in classes.txt; add a line such as vein ={value}"
    if names is None:
        return f"{name} has the value {value}; {RIGHT}"
    return f"{name} has the class {value}, but classes.txt names the classes 0 to {len(names) - 1}"
