"""Numbers with nouns, in messages and tables."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Args:
        number: How many.
        noun: The noun in the singular, maybe with words before it, such as ``"test image"``.
        plural: The noun in the plural; None: with an added s.

    Examples:
        ::

            assert counted(1, "image") == "1 image"
            assert counted(2_000, "class", "classes") == "2,000 classes"
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
