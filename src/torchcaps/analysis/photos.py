"""Photos beside what a network sees of them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.figures import GAP, LINE, MARGIN, MUTED, TEXT, WRONG, Sheet, drawable, text_width
from torchcaps.datasets.images import Photo
from torchcaps.datasets.preparation import Box
from torchcaps.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PHOTOS = 100
"""In one figure: so many rows stay below the 65,535 pixels of height that viewers take."""
PREVIEW = 400
"""Pixels a side, at most, in which a photo is drawn."""
_SIDE = 1.6  # of a picture, inches


@dataclass(frozen=True, eq=False)
class SeenPhoto:
    """A photo, and what a network made of it.

    Args:
        title: The file and its class.
        photo: The file, and what the network was given.
        reconstruction: Pixels 0..1; None for a network without decoder.
        doubts: Why the answer is unsure; empty where it is not.
    """

    title: str
    photo: Photo
    reconstruction: Float[np.ndarray, "C H W"] | None
    doubts: tuple[str, ...] = ()


def figure_photos(seen: Sequence[SeenPhoto]) -> Figure:
    """Photos with the place of their ink, each beside what the network sees and what it reconstructs.

    Args:
        seen: 1 to 100 of them; each takes a row.

    Raises:
        InputError: None, or more.
    """
    if not 1 <= len(seen) <= MOST_PHOTOS:
        raise InputError(f"a figure shows 1 to {MOST_PHOTOS} photos, got {len(seen)}")
    titles = drawable([each.title for each in seen])
    words = [[*each.photo.prepared.changes, *(f"unsure: {doubt}" for doubt in each.doubts)] for each in seen]
    columns = ["photo", "what the network sees", "reconstruction"]
    if all(each.reconstruction is None for each in seen):
        columns.pop()
    left = MARGIN + len(columns) * (_SIDE + 2 * GAP)
    wide = left + text_width([line for lines in words for line in lines] + titles) + MARGIN
    row = _SIDE + 3 * GAP
    sheet = Sheet(wide, MARGIN + LINE + len(seen) * row + MARGIN)
    for n, heading in enumerate(columns):
        sheet.text(heading, MARGIN + n * (_SIDE + 2 * GAP), MARGIN, color=MUTED)
    for n, (each, title, lines) in enumerate(zip(seen, titles, words, strict=True)):
        y = MARGIN + LINE + GAP + n * row
        photo = each.photo.shrunk(PREVIEW)
        pictures = [photo.pixels, photo.prepared.image, each.reconstruction]
        for at, picture in enumerate(pictures[: len(columns)]):
            if picture is not None:
                x = MARGIN + at * (_SIDE + 2 * GAP)
                scale = _SIDE / max(picture.shape[1:])
                sheet.image(_pixels(picture), x, y, (picture.shape[2] * scale, picture.shape[1] * scale))
                if at == 0:
                    _outline(sheet, photo.prepared.box, x, y, scale)
        sheet.text(title, left, y, size=TEXT, weight="bold")
        for number, line in enumerate(lines, 1):
            sheet.text(line, left, y + number * LINE, color=WRONG if line.startswith("unsure") else MUTED)
    return sheet.figure


def _pixels(picture: np.ndarray) -> Float[np.ndarray, "C h w"]:
    """Pixels 0..1 of uint8 ones of 0..255, or of 0..1."""
    return picture / 255 if picture.dtype == np.uint8 else picture


def _outline(sheet: Sheet, box: Box | None, x: float, y: float, scale: float) -> None:
    """Draw the box of the ink on a photo whose upper left corner is at (x, y)."""
    if box is not None:
        top, left, bottom, right = (scale * edge for edge in box)
        corners = [(x + a, y + b) for a, b in ((left, top), (right, top), (right, bottom), (left, bottom))]
        for start, end in zip(corners, corners[1:] + corners[:1], strict=True):
            sheet.line(start, end, colour=WRONG)
