"""The first look at a data set: a sheet of its images with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchcaps.analysis.figures import Caption, draw_tiles, drawable
from torchcaps.analysis.inference import class_labels, join_names
from torchcaps.datasets import ImageSet, PairSet
from torchcaps.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_samples(
    image_set: ImageSet | PairSet,
    class_names: Sequence[str] | None = None,
    *,
    rows: int = 4,
    columns: int = 10,
    title: str | None = None,
) -> Figure:
    """The first images of a set, each with its label, or those of all its objects, under it.

    Args:
        image_set: Images and their classes; the first ``rows`` · ``columns`` are shown, or all if there are fewer.
        class_names: The name of each class; its number if None.
        rows: Images below each other.
        columns: Images side by side.
        title: Above the figure.

    Raises:
        InputError: ``rows`` or ``columns`` below one, or a label without a name.
    """
    if rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")
    shown = image_set.preview(max(rows * columns, 1))
    highest = int(shown.labels.max())
    names = drawable(class_labels(None, highest + 1) if class_names is None else class_names)
    if highest >= len(names):
        raise InputError(f"a label is {highest}, but there are only {len(names)} class names")
    captions = [Caption(join_names(names, labels)) for labels in shown.labels]
    return draw_tiles({"": shown.images.cpu().numpy() / 255}, {"": captions}, columns, title)
