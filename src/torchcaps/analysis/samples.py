"""The first look at a data set: a sheet of its images with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchcaps.analysis.figures import Caption, draw_tiles
from torchcaps.analysis.inference import class_labels
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_samples(
    image_set: ImageSet,
    class_names: Sequence[str] | None = None,
    *,
    rows: int = 4,
    columns: int = 10,
    title: str | None = None,
) -> Figure:
    """The first images of a set, each with its label under it.

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
    shown = image_set.take(min(max(rows * columns, 1), len(image_set)))
    highest = int(shown.labels.max())
    names = class_labels(None, highest + 1) if class_names is None else list(class_names)
    if highest >= len(names):
        raise InputError(f"a label is {highest}, but there are only {len(names)} class names")
    captions = [Caption(names[label]) for label in shown.labels.tolist()]
    return draw_tiles({"": shown.images.cpu().numpy() / 255}, {"": captions}, columns, title)
