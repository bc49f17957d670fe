"""What a network says of image files, and photos beside what it sees of them. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.calibration import Prediction, full
from torchcaps.analysis.figures import MUTED, WRONG, Caption, Cell, tiles
from torchcaps.analysis.results import MOST_CLASSES, MOST_SHOWN, Result, Styled, Table
from torchcaps.datasets.images import Photo
from torchcaps.datasets.preparation import NOTHING, Prepared
from torchcaps.errors import visible
from torchcaps.tasks import TaskName, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREVIEW = 400
"""Pixels a side, at most, in which a photo is drawn."""
_SIDE = 1.6  # of a picture, inches
_LINE = 50  # characters


@dataclass(frozen=True, eq=False)
class PhotoAnswers(Result):
    """What a network says of image files.

    Args:
        files: The files.
        prepared: What the network was given of each.
        prediction: What it says.
        class_names: The name of each class.
        photos: The files' own pixels, for the figure; none without one.
        task: The network's task.
    """

    files: Sequence[Path]
    prepared: Sequence[Prepared]
    prediction: Prediction
    class_names: Sequence[str]
    photos: Sequence[Photo] = ()
    task: TaskName = "classes"

    @property
    def objects(self) -> int:
        """Objects in an image: P."""
        return 1 if self.prediction.classes.ndim == 1 else self.prediction.classes.shape[1]

    def given(self, n: int) -> list[str]:
        """The names of the classes that image n was given, the most certain first; its labels; or numbers and names."""
        classes = self.prediction.classes[n].reshape(-1).tolist()
        return task_of(self).answer(self.class_names, self.prediction.scores[n].tolist(), classes)

    def caveats(self, n: int) -> tuple[str, ...]:
        """Why the answer to image n is unsure."""
        nothing = (NOTHING,) if NOTHING in self.prepared[n].changes else ()
        return (*nothing, *self.prediction.caveats[n])

    def highest(self, n: int) -> list[tuple[str, float]]:
        """Each class and its score for image n; of more than 20, the ten highest."""
        scores = list(zip(self.class_names, self.prediction.scores[n].tolist(), strict=True))
        return scores if len(scores) <= MOST_CLASSES else sorted(scores, key=lambda each: -each[1])[:MOST_SHOWN]

    def to_dict(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            answer = task_of(self).answer_to_dict(self.given(n))
            answer[task_of(self).score_key] = dict(zip(self.class_names, scores, strict=True))
            about = {"prepared": self.prepared[n].changes, "unsure": self.caveats(n)}
            found.append({"image": str(file)} | answer | about)
        return found

    def to_csv(self) -> str:
        """A line for each file: its path, its classes or labels, why they are unsure, and all scores or numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["image", task_of(self).answer_key, "unsure", *self.class_names])
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            caveats = "; ".join(self.caveats(n))
            writer.writerow([file, " + ".join(self.given(n)), caveats, *(f"{score:.4f}" for score in scores)])
        return text.getvalue()

    def tables(self) -> list[Table]:
        found = []
        for n, file in enumerate(self.files):
            given, changes, caveats = self.given(n), self.prepared[n].changes, self.caveats(n)
            note: list[str | Styled] = [f"  prepared: {'; '.join(changes)}"] if changes else []
            note += [Styled(f"  unsure: {'; '.join(caveats)}", "yellow")] if caveats else []
            most = self.highest(n)
            wide = max(len(visible(name)) for name, _ in most)
            for name, score in most:
                style = "green" if name in given else ""
                note.append(Styled(f"  {visible(name):>{wide}}  {task_of(self).score_text(score)}", style))
            if len(most) < len(self.class_names):
                note.append(f"  … and {len(self.class_names) - len(most)} lower ones (--json shows all)")
            found.append(Table(title=f"{file}  {' + '.join(given)}", note=note))
        return found

    def figures(self) -> dict[str, Figure]:
        """Photos with the place of their ink, each beside what the network sees, what it draws, and its scores."""
        headings = ["photo", "what the network sees", "reconstruction"]
        drawn, in_lines = self.prediction.reconstruction, partial(wrap, width=_LINE)
        if drawn is None:
            headings.pop()
        headings.append(self.prediction.score_name)
        rows: list[list[Cell]] = [[Caption(heading, MUTED) for heading in headings]]
        for n, (file, photo) in enumerate(zip(self.files, self.photos, strict=True)):
            photo = photo.shrunk(PREVIEW)
            words = [Caption(f"{file.name}: {' + '.join(self.given(n))}", bold=True)]
            words += [Caption(line, MUTED) for change in photo.prepared.changes for line in in_lines(change)]
            words += [Caption(line, WRONG) for reason in self.caveats(n) for line in in_lines(f"unsure: {reason}")]
            scores = [Caption(f"{name}  {score:.2f}", None, name in self.given(n)) for name, score in self.highest(n)]
            pictures: list[Cell] = [_outlined(photo), photo.prepared.image / 255]
            rows.append([*pictures, *([] if drawn is None else full(drawn[n : n + 1])), scores, words])
        return {"": tiles(rows, side=_SIDE)}


def _outlined(photo: Photo) -> Float[np.ndarray, "C H W"]:
    """A photo, pixels 0..1, with a red line round the box of its ink."""
    box, pixels = photo.prepared.box, photo.pixels / 255
    if box is None:
        return pixels
    pixels = np.broadcast_to(pixels if len(pixels) == 3 else pixels.mean(0), (3, *pixels.shape[1:])).copy()
    inside, line = np.zeros(pixels.shape[1:], dtype=bool), -(-max(pixels.shape[1:]) // 130)
    top, left, bottom, right = (int(edge) for edge in box)
    inside[max(top - line, 0) : bottom + line, max(left - line, 0) : right + line] = True
    inside[top:bottom, left:right] = False
    pixels[:, inside] = np.array([[0.757], [0.153], [0.176]])  # WRONG
    return pixels
