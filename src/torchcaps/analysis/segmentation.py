"""Evaluate the classes of pixels: Dice score, intersection over union and Hausdorff distance of each class.

All numbers are computed for each image, then averaged over images. Averages over slices, volumes or batches differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from torchcaps.analysis.collector import Answer, Collector, TaskEvaluation
from torchcaps.analysis.figures import COLOURS, MUTED, WRONG, Caption, Cell, tiles
from torchcaps.analysis.results import Table
from torchcaps.checks import checked
from torchcaps.datasets.splits import FILE
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput
from torchcaps.ops.segmentation import confusions, mean_dice, pixel_classes
from torchcaps.ranges import IGNORED
from torchcaps.tasks import find_task
from torchcaps.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DISTANCES = 1000
"""Largest number of images whose Hausdorff distances are measured; each takes some milliseconds."""
MAX_DRAWN = 8
"""Number of images in the figure."""
MAX_NAMED = 6
"""Number of classes in the legend of the figure."""
SIDE = 1.5
"""Longer side of an image in the figure, inches."""
DARK, GREY = 0.08, 0.6
"""Brightness of the background and of ignored pixels in pictures of masks."""


class Example(NamedTuple):
    """An image with its mask and the answer; of a volume, its middle slice."""

    image: Float[np.ndarray, "C H W"]
    mask: UInt8[np.ndarray, "H W"]
    answer: UInt8[np.ndarray, "H W"]
    dice: float
    """Mean Dice score of the whole image."""
    name: str
    """File of the image, or its number."""


@dataclass(frozen=True, eq=False)
class PixelEvaluation(TaskEvaluation):
    """Results of a network on a set of images with masks.

    Args:
        confusion: Number of pixels of one class (row) with an answer (column), of each image, without ignored pixels.
        distances: 95th percentile of the Hausdorff distance of each class, of the first 1,000 images: NaN if neither
            mask has the class, infinite if only one has it.
        loss: Mean loss per image.
        class_names: Name of each class.
        examples: Images to draw.
        title: Network and images.
        colours: Colour of each class in the figure; None: the usual ones.
        unit: Unit of the distances: pixels, or mm if the images know the distances of their voxels.
    """

    confusion: Int[np.ndarray, "N J J"]
    distances: Float[np.ndarray, "n J"]
    loss: float
    class_names: tuple[str, ...]
    examples: Sequence[Example] = ()
    title: str = ""
    colours: Sequence[str] | None = None
    unit: Literal["pixels", "mm"] = "pixels"
    figure_name: ClassVar[str] = "masks"

    @property
    def num_images(self) -> int:
        return len(self.confusion)

    @cached_property
    def accuracy(self) -> float:
        """Mean over the images of the mean Dice score of their classes except the background, class 0."""
        return float(mean_dice(torch.from_numpy(self.confusion)).double().mean())

    def __str__(self) -> str:
        return (
            f"mean Dice score {100 * self.accuracy:.2f} % of {counted(self.num_images, 'image')}, mean loss "
            f"{self.loss:.4g}"
        )

    @cached_property
    def dice(self) -> Float[np.ndarray, "N J"]:
        """Dice score 2·TP / (2·TP + FP + FN) of each class of each image; NaN if neither mask has the class."""
        return _shares(2 * self._found, self._answered + self._true)

    @cached_property
    def iou(self) -> Float[np.ndarray, "N J"]:
        """Intersection over union TP / (TP + FP + FN); NaN if neither mask has the class."""
        return _shares(self._found, self._answered + self._true - self._found)

    @property
    def _found(self) -> Int[np.ndarray, "N J"]:
        return self.confusion.diagonal(axis1=1, axis2=2)

    @property
    def _answered(self) -> Int[np.ndarray, "N J"]:
        return self.confusion.sum(1)

    @property
    def _true(self) -> Int[np.ndarray, "N J"]:
        return self.confusion.sum(2)

    @property
    def warning(self) -> str | None:
        """Name the classes that no pixel is given although some images have them; None if there are none."""
        never = (self._true.sum(0) > 0) & (self._answered.sum(0) == 0)
        if not never.any():
            return None
        names = ", ".join(name for name, each in zip(self.class_names, never, strict=True) if each)
        advice = "try --class-weights balanced, --loss dice-cross-entropy, more steps, or smaller patches"
        return f"no pixel of {counted(self.num_images, 'test image')} was given to: {names}; {advice}"

    def answers(self) -> Iterator[Answer]:
        for true, answered, dice in zip(self._true, self._answered, self.dice, strict=True):
            truth, answer = (
                " + ".join(name for name, count in zip(self.class_names, each, strict=True) if count)
                for each in (true, answered)
            )
            yield Answer(truth, answer, "", ["" if math.isnan(value) else f"{value:.4f}" for value in dice])

    @property
    def per_class(self) -> list[dict[str, Any]]:
        """Return a row for each class.

        ``images`` is the number of masks with the class, ``pixels`` its share of their pixels. ``dice``, ``iou`` and
        ``hausdorff95`` are means over images, and ``…_sd`` their sample standard deviations. An image without the class
        in both masks does not count. ``missed`` is the number of images with the class in one mask only, whose
        Hausdorff distance is infinite; it is not in the mean. Undefined values are None.
        """
        share, rows = self._true.sum(0) / max(int(self.confusion.sum()), 1), []
        for j, name in enumerate(self.class_names):
            row: dict[str, Any] = {"name": name, "images": int((self._true[:, j] > 0).sum()), "pixels": float(share[j])}
            for key, values in (("dice", self.dice), ("iou", self.iou), ("hausdorff95", self.distances)):
                finite = values[:, j][np.isfinite(values[:, j])]
                row[key] = float(finite.mean()) if len(finite) else None
                row[f"{key}_sd"] = float(finite.std(ddof=1)) if len(finite) > 1 else None
            rows.append(row | {"missed": int(np.isinf(self.distances[:, j]).sum())})
        return rows

    def to_dict(self) -> dict[str, Any]:
        loss = self.loss if math.isfinite(self.loss) else None
        return {"num_images": self.num_images, "accuracy": self.accuracy, "error": self.error, "loss": loss} | {
            "class_names": list(self.class_names),
            "hausdorff95_unit": self.unit,
            "per_class": self.per_class,
            "confusion": self.confusion.sum(0).tolist(),
        }

    def tables(self) -> list[Table]:
        name, value = find_task("pixels").metric.row(self.accuracy)
        note = f"  (mean of {counted(self.num_images, 'image')} over their classes except {self.class_names[0]})"
        rows = [[name, value + note], ["Loss", f"{self.loss:.4f}"]]
        shown = [
            [
                each["name"],
                f"{each['images']:,}",
                f"{100 * each['pixels']:.2f} %",
                *(_with_deviation(each, key) for key in ("dice", "iou", "hausdorff95")),
                f"{each['missed']:,}",
            ]
            for each in self.per_class
        ]
        columns = ("class", "images", "pixels", "Dice", "IoU", f"Hausdorff 95, {self.unit}", "missed")
        first = f" of the first {counted(len(self.distances), 'image')}" * (len(self.distances) < self.num_images)
        words = f"Means ± standard deviations over images; Hausdorff distances{first} where both masks have the class"
        return [Table(rows, title=self.title), Table(shown, columns, words)]

    def figures(self) -> dict[str, Figure]:
        """Draw images beside their masks, the answers, and the pixels that differ (red; ignored pixels are grey).

        They are the images with the lowest mean Dice scores, the worst first.
        """
        rows: list[list[Cell]] = [[Caption(each, MUTED) for each in ("image", "mask", "answer", "difference")]]
        for n, (image, mask, answer, dice, name) in enumerate(self.examples):
            words = [Caption(f"Dice {dice:.3f}"), Caption(name, MUTED)]
            words += legend_of(self.class_names, self.colours) if n == 0 else []
            masks = [coloured(each, self.colours) for each in (mask, answer)]
            rows.append([image, *masks, _difference(mask, answer), words])
        return {"": tiles(rows, title=self.title, side=SIDE)}


def _shares(part: np.ndarray, whole: np.ndarray) -> Float[np.ndarray, "N J"]:
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def _with_deviation(row: dict[str, Any], key: str) -> str:
    value, deviation = row[key], row[f"{key}_sd"]
    digits = 1 if key == "hausdorff95" else 3
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def palette(own: Sequence[str] | None) -> Float[np.ndarray, "256 3"]:
    """Return a colour for each class, pixels 0..1: black for the background, grey for ignored pixels."""
    from matplotlib.colors import to_rgb

    colours = np.array([to_rgb(COLOURS[(j - 1) % (len(COLOURS) - 2)]) for j in range(IGNORED + 1)])
    colours[0], colours[IGNORED] = DARK, GREY
    for number, colour in enumerate(own or ()):
        colours[number] = to_rgb(colour)
    return colours


def legend_of(class_names: Sequence[str], own: Sequence[str] | None) -> list[Caption]:
    """Return lines with the colour of each class, of the first six."""
    from matplotlib.colors import to_hex

    colours = palette(own)
    return [Caption(f"■ {name}", to_hex(colours[j])) for j, name in enumerate(class_names[:MAX_NAMED])]


def middle_slice(values: Shaped[np.ndarray, "C *S"]) -> Shaped[np.ndarray, "C H W"]:
    """Return the middle slice of a volume (C, D, H, W), and an image (C, H, W) unchanged."""
    return values[:, values.shape[1] // 2] if values.ndim == 4 else values


def coloured(mask: UInt8[np.ndarray, "H W"], own: Sequence[str] | None) -> Float[np.ndarray, "3 H W"]:
    """Return a mask as a picture, pixels 0..1, with a colour for each class."""
    return palette(own)[mask].transpose(2, 0, 1)


def _difference(mask: UInt8[np.ndarray, "H W"], answer: UInt8[np.ndarray, "H W"]) -> Float[np.ndarray, "3 H W"]:
    """Return a picture, pixels 0..1: wrong pixels red, ignored ones grey, correct ones dark."""
    from matplotlib.colors import to_rgb

    counted = mask != IGNORED
    kinds = np.where(counted & (mask != answer), 2, 1 * ~counted)
    return np.array([(DARK,) * 3, (GREY,) * 3, to_rgb(WRONG)])[kinds].transpose(2, 0, 1)


@checked
def hausdorff95(
    answer: Bool[np.ndarray, "*S"], truth: Bool[np.ndarray, "*S"], spacing: Sequence[float] | None = None
) -> float:
    """Return the 95th percentile of the Hausdorff distance of two masks of one class.

    It is the larger of two directed distances: the 95th percentile of the distances from the edge pixels of one mask to
    the nearest edge pixel of the other. An erosion removes exactly the edge pixels.

    Args:
        answer: True where the answer has the class.
        truth: True where the mask has the class.
        spacing: Distance of neighbouring pixels along each axis, such as millimetres; None: 1.

    Returns:
        The distance; infinite if only one of the two has the class, NaN if neither has it.

    Source: MONAI's ``compute_hausdorff_distance(percentile=95)`` has the same definition.
    """
    from scipy.ndimage import binary_erosion, distance_transform_edt, find_objects

    if answer.shape != truth.shape:
        raise InputError(f"hausdorff95: both masks must have one shape, got {answer.shape} and {truth.shape}")
    if not (answer.any() and truth.any()):
        return math.inf if answer.any() or truth.any() else math.nan
    (box,) = find_objects((answer | truth).astype(np.uint8))
    edges = [mask[box] & ~binary_erosion(mask[box]) for mask in (answer, truth)]
    distances = [distance_transform_edt(~edge, sampling=spacing) for edge in edges]
    return max(float(np.percentile(distances[1 - n][edges[n]], 95)) for n in (0, 1))


@dataclass
class TaskCollector(Collector):
    """Collector of the task ``pixels``: it keeps counts of each image, and the worst images to draw."""

    max_batch = 8
    _confusions: list[Tensor] = field(default_factory=list)
    _distances: list[list[float]] = field(default_factory=list)
    _examples: list[Example] = field(default_factory=list)

    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:
        answers, classes = pixel_classes(output.scores), range(len(self.class_names))
        spacings = getattr(self.image_set, "spacing", None)
        first, counts = sum(map(len, self._confusions)), confusions(answers, targets, len(classes)).cpu()
        self._confusions.append(counts)
        rows = zip(images, answers.cpu().numpy(), targets.cpu().numpy(), mean_dice(counts).tolist(), strict=True)
        for n, (image, predicted, true, dice) in enumerate(rows, first):
            if len(self._examples) < MAX_DRAWN or dice < self._examples[-1].dice:
                planes = (middle_slice(each) for each in (image.float().cpu().numpy(), true[None], predicted[None]))
                image_plane, mask, answer = planes
                name = self.image_set.names[FILE][n] if FILE in self.image_set.names else f"image {n}"
                self._examples.append(Example(image_plane, mask[0], answer[0], dice, name))
                self._examples = sorted(self._examples, key=lambda each: each.dice)[:MAX_DRAWN]
            if len(self._distances) < MAX_DISTANCES:
                counted, spacing = true != IGNORED, spacings and spacings[len(self._distances)]
                self._distances.append([hausdorff95((predicted == j) & counted, true == j, spacing) for j in classes])

    def result(self, loss: float) -> PixelEvaluation:
        counts, distances = torch.cat(self._confusions).numpy(), np.array(self._distances)
        unit: Any = "pixels" if getattr(self.image_set, "spacing", None) is None else "mm"
        return PixelEvaluation(
            counts, distances, loss, self.class_names, self._examples, colours=self.colours, unit=unit
        )
