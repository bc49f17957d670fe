"""Figures of images: a data set with its labels, and images with their reconstructions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.calibration import Decoded, Prediction, squared_errors
from torchcaps.analysis.figures import COLOURS, MUTED, WRONG, Caption, Cell, in_bands, tiles
from torchcaps.analysis.inference import Labels, as_pixels, check_labels, class_labels, join_names, require_decoder
from torchcaps.analysis.predictions import predict
from torchcaps.analysis.results import Table
from torchcaps.analysis.segmentation import coloured, middle_slice
from torchcaps.checks import checked
from torchcaps.datasets.image_set import Images
from torchcaps.datasets.scaling import as_floats
from torchcaps.models import Network
from torchcaps.ranges import COUNT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERLAID = ("#00ff00", "#ff00ff")
"""Colours of the first two objects of an image; colour-blind readers can tell them apart, and their sum is white."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Reconstructions(Prediction):
    """Images and their reconstructions, each from one capsule; with P objects in an image, one per object.

    Args:
        images: Pixels 0..1.
        labels: Classes of the images; None if unknown.
        decoded: Class of each decoded capsule, in the order of ``reconstruction``.
        class_names: Name of each class; None: its number.
        title: Network and images.
    """

    images: Float[np.ndarray, "N C H W"]
    reconstruction: Decoded
    labels: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"] | None
    decoded: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]
    class_names: Sequence[str] | None = None
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        right = None if self.right is None else int(self.right.sum())
        off = squared_errors(self.images, self.reconstruction).tolist()
        return {"num_images": len(self.images), "num_correct": right, "squared_error": off}

    def tables(self) -> list[Table]:
        classes = "class" if self.classes.ndim == 1 else "classes"
        right = "" if self.right is None else f"{int(self.right.sum()):,} with the right {classes}; "
        error = f"squared error {squared_errors(self.images, self.reconstruction).mean():.2f} per image"
        return [Table(title=self.title, note=[right + error])]

    def figures(self) -> dict[str, Figure]:
        """Draw images over their reconstructions, with label, predicted class and score under each.

        With several objects in an image, each object has its own row and colour, and one more row adds them up: where
        two objects overlap, green and magenta add to white. A wrong class is red.
        """
        names = class_labels(self.class_names, self.scores.shape[1])
        classes = self.classes.reshape(len(self.classes), -1)  # (N, P)
        right = itertools.repeat(True) if self.right is None else self.right
        scores = [" ".join(f"{score:.2f}" for score in row) for row in np.take_along_axis(self.scores, classes, 1)]
        rows: dict[str, Sequence[Cell]] = {"image": [*self.images], **_drawn(self)}
        if self.labels is not None:
            rows["label"] = [join_names(names, row) for row in self.labels]
        rows["class"] = [
            Caption(join_names(names, row), None if is_right else WRONG)
            for row, is_right in zip(classes, right, strict=False)
        ]
        rows[self.score_name] = [Caption(score, MUTED) for score in scores]
        if (self.decoded != self.classes).any():
            rows["decoded"] = [Caption(join_names(names, row), MUTED) for row in self.decoded]
        return {"": tiles(in_bands(rows), title=self.title)}

    @property
    def right(self) -> Bool[np.ndarray, "N"] | None:
        """True for images whose predicted classes are exactly their labels; None without labels."""
        if self.labels is None:
            return None
        classes, labels = (np.sort(each.reshape(len(each), -1), 1) for each in (self.classes, self.labels))
        return (classes == labels).all(1)


@checked
def reconstruct(model: Network, images: Shaped[Tensor, "N C H W"], labels: Labels | None = None) -> Reconstructions:
    """Decode each image from one capsule; with several objects in an image, decode each object from its capsule alone.

    The capsule is the one that the network's source decodes at inference: the label's if ``decoder_mask`` is
    ``"label"`` and labels are given, else the longest (or most active). :func:`torchcaps.analysis.predict` decodes
    other capsules.

    Args:
        model: A network with a decoder.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: Classes of the images, if known.

    Source: Sabour, Frosst, Hinton 2017, figures 3 and 5 (arXiv:1710.09829).
    """
    network = require_decoder(model, "a reconstruction", "reconstruct")
    pixels = as_pixels(network, images)
    if labels is not None:
        check_labels(network, labels, len(images))
    targets = labels if getattr(network.decoder, "decoder_mask", "") == "label" else None
    prediction = predict(network, images, targets)
    return Reconstructions(
        **vars(prediction),
        images=pixels.float().cpu().numpy(),
        labels=None if labels is None else labels.cpu().numpy(),
        decoded=prediction.classes if targets is None else targets.cpu().numpy(),
    )


def _drawn(result: Reconstructions) -> dict[str, Sequence[Cell]]:
    """Return the rows under the images by heading: the reconstruction, or one row per object and their sum."""
    from matplotlib.colors import to_rgb

    if result.reconstruction.ndim == 4:
        return {"reconstruction": [*result.reconstruction]}
    greys = result.reconstruction.mean(2)  # (N, P, H, W)
    objects = greys.shape[1]
    colours = itertools.islice(itertools.cycle((*OVERLAID, *COLOURS)), objects)
    tints = np.array([to_rgb(colour) for colour in colours])
    tinted = greys[:, :, None] * tints[:, :, None, None]  # (N, P, 3, H, W)
    each: dict[str, Sequence[Cell]] = {f"object {p + 1}": [*tinted[:, p]] for p in range(objects)}
    return each | {"together": [*tinted.sum(1).clip(max=1)]}


@checked
def figure_samples(
    image_set: Images,
    class_names: Sequence[str] | None = None,
    *,
    count: int = 40,
    title: str = "",
    colours: Sequence[str] | None = None,
) -> Figure:
    """Draw the first images of a set with their labels; of volumes, the middle slice.

    Args:
        image_set: Images and their classes.
        class_names: Name of each class; None: its number.
        count: Number of images to draw, at most.
        title: Above the figure.
        colours: Colour of each class in masks; None: the usual ones.
    """
    COUNT.check("count", count)
    shown = image_set.preview(count)
    names = shown.task.names(shown.labels, complete=False) if class_names is None else class_names
    shown.task.check_targets(shown.labels, len(names), "a label")
    labels: list[Cell] = [shown.task.describe(names, each) for each in shown.labels]
    rows: dict[str, Sequence[Cell]] = {"": [as_floats(middle_slice(each.cpu().numpy())) for each in shown.images]}
    if shown.masks is not None:
        rows["mask"] = [coloured(middle_slice(each[None].cpu().numpy())[0], colours) for each in shown.masks]
    cells = in_bands(rows | {" ": labels})
    return tiles([row[1:] for row in cells], title=title)
