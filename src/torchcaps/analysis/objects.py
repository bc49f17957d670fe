"""Evaluate the task ``objects``: the adjusted Rand index of foreground pixels, and the error of redrawn images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.analysis.collector import Answer, Collector, TaskEvaluation
from torchcaps.analysis.figures import MUTED, Caption, Cell, tiles
from torchcaps.analysis.results import Table
from torchcaps.analysis.segmentation import MAX_DRAWN, SIDE, coloured
from torchcaps.models import ModelOutput
from torchcaps.ops.segmentation import foreground_ari as foreground_ari
from torchcaps.tasks import find_task
from torchcaps.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Example(NamedTuple):
    """An image to draw."""

    image: Float[np.ndarray, "C H W"]
    redrawn: Float[np.ndarray, "C H W"]
    masks: Float[np.ndarray, "J H W"]
    """Mask m_j of each slot, 0..1."""


@dataclass(frozen=True, eq=False)
class ObjectEvaluation(TaskEvaluation):
    """Results of a network with slots on a set of images.

    Args:
        ari: Adjusted Rand index of the foreground pixels of each image; NaN without a mask, or without objects in it.
        squared_errors: Mean squared error of each redrawn image, of pixels 0..1.
        loss: Mean loss per image.
        class_names: Names of the slots.
        examples: Images to draw.
        title: Network and images.
    """

    ari: Float[np.ndarray, "N"]
    squared_errors: Float[np.ndarray, "N"]
    loss: float
    class_names: tuple[str, ...]
    examples: Sequence[Example] = ()
    title: str = ""
    figure_name: ClassVar[str] = "objects"

    @property
    def num_images(self) -> int:
        return len(self.ari)

    @property
    def is_known(self) -> bool:
        """True if an image has a mask with objects."""
        return bool(np.isfinite(self.ari).any())

    @property
    def accuracy(self) -> float:
        """Mean FG-ARI of the images with objects in their masks; NaN if there are none."""
        return float(np.nanmean(self.ari)) if self.is_known else math.nan

    @property
    def warning(self) -> str | None:
        """Say that FG-ARI is not known, if no image has a mask with objects."""
        if self.is_known:
            return None
        return "no image has a mask with objects, so FG-ARI is unknown, and epochs show 0; look at the squared error"

    def __str__(self) -> str:
        ari = f"FG-ARI {100 * self.accuracy:.2f} %, " if self.is_known else ""
        return f"{ari}squared error {self.squared_errors.mean():.4g} of {counted(self.num_images, 'image')}"

    @property
    def answer_columns(self) -> Sequence[str]:
        return "FG-ARI", "squared error"

    def answers(self) -> Iterator[Answer]:
        for ari, error in zip(self.ari, self.squared_errors, strict=True):
            yield Answer("", "", "", ["" if np.isnan(ari) else f"{ari:.4f}", f"{error:.6g}"])

    def to_dict(self) -> dict[str, Any]:
        ari = {"accuracy": self.accuracy, "error": self.error} if self.is_known else {"accuracy": None, "error": None}
        return (
            {"num_images": self.num_images}
            | ari
            | {
                "images_with_objects": int(np.isfinite(self.ari).sum()),
                "squared_error": float(self.squared_errors.mean()),
                "loss": self.loss,
                "class_names": list(self.class_names),
            }
        )

    def tables(self) -> list[Table]:
        rows = []
        if self.is_known:
            known = self.ari[np.isfinite(self.ari)]
            name, value = find_task("objects").metric.row(self.accuracy)
            rows.append([name, f"{value}  (mean of {counted(len(known), 'image')}; chance 0)"])
        rows.append(["Squared error", f"{self.squared_errors.mean():.4g}  (mean over pixels of 0..1)"])
        return [Table(rows, title=self.title)]

    def figures(self) -> dict[str, Figure]:
        """Draw each image, the redrawn image, the slot of each pixel, and the part that each slot draws."""
        slots = range(len(self.examples[0].masks)) if self.examples else ()
        headings = ("image", "redrawn", "slots", *(f"slot {number}" for number in slots))
        rows: list[list[Cell]] = [[Caption(each, MUTED) for each in headings]]
        for (image, redrawn, masks), ari in zip(self.examples, self.ari, strict=False):
            answer = coloured(masks.argmax(0).astype(np.uint8) + 1, None)
            parts = [np.clip(mask * redrawn, 0, 1) for mask in masks]
            words = [Caption(f"FG-ARI {ari:.2f}")] if np.isfinite(ari) else []
            rows.append([image, np.clip(redrawn, 0, 1), answer, *parts, words])
        return {"": tiles(rows, title=self.title, side=SIDE)}


@dataclass
class TaskCollector(Collector):
    """Collector of the task ``objects``: it keeps two numbers of each image, and a few images to draw."""

    max_batch = 64
    _ari: list[Tensor] = field(default_factory=list)
    _errors: list[Tensor] = field(default_factory=list)
    _examples: list[Example] = field(default_factory=list)

    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:
        self._ari.append(foreground_ari(find_task("objects").predict_classes(output.scores), targets).cpu())
        redrawn = images if output.reconstruction is None else output.reconstruction
        self._errors.append((redrawn.float() - images.float()).square().flatten(1).mean(1).cpu())
        for drawn in zip(images, redrawn, output.scores, strict=True):
            if len(self._examples) < MAX_DRAWN:
                self._examples.append(Example(*(each.float().cpu().numpy() for each in drawn)))

    def result(self, loss: float) -> ObjectEvaluation:
        ari, errors = (torch.cat(each).double().numpy() for each in (self._ari, self._errors))
        names = tuple(map(str, range(self.model.num_outputs)))  # those of the data are of its objects
        return ObjectEvaluation(ari, errors, loss, names, self._examples)
