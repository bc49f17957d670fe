"""Numbers with nouns and names with capitals, in messages, tables and figures."""

from __future__ import annotations

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""Names of the axes of lines, planes and volumes, by their number."""
MAP_SIZES = {dims: " and ".join(", ".join(names).rsplit(", ", 1)) for dims, names in AXES.items()}
"""The same as words, such as ``"depth, height and width"``."""


IRREGULAR = {"axis": "axes", "entry": "entries"}
"""Nouns whose plural adds neither s nor es."""


def plural(noun: str) -> str:
    """Return a noun in the plural: ``classes`` for ``class``."""
    *before, last = noun.split(" ")
    suffix = "es" if last.endswith(("s", "x", "tch", "nch")) else "s"
    return " ".join([*before, IRREGULAR.get(last, last + suffix)])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Args:
        number: How many.
        noun: The noun in the singular, maybe with words before it, such as ``"test image"``.

    Examples:
        ::

            assert counted(1, "image") == "1 image"
            assert counted(2_000, "class") == "2,000 classes"
    """
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def each_of(number: int, noun: str) -> str:
    """Return "each of 4 images" for several and "1 image" for one; arguments as in :func:`counted`."""
    return "each of " * (number != 1) + counted(number, noun)


def first_of(number: int, images: str) -> str:
    """Return "first 4 test images of digits" for several and "first test image of digits" for one.

    Args:
        number: How many.
        images: What they are, in the plural, such as ``"test images of digits"``.
    """
    return f"first {images.replace(' images', ' image', 1)}" if number == 1 else f"first {number:,} {images}"


def capitalised(name: str) -> str:
    """Return a name with a capital at the start; others stay, unlike with ``str.capitalize``."""
    return name[:1].upper() + name[1:]
