"""Answers to image files as text, JSON, CSV and figures. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.calibration import Prediction, add_objects
from torchcaps.analysis.certainty import NOT_MEASURED, Certainty, CoverageOver
from torchcaps.analysis.figures import MUTED, WRONG, Caption, Cell, tiles
from torchcaps.analysis.results import MAX_CLASSES, MAX_SHOWN, Result, Styled, Table
from torchcaps.datasets.images import Photo
from torchcaps.datasets.preparation import NOTHING, Prepared
from torchcaps.datasets.scaling import as_floats
from torchcaps.errors import InputError, visible
from torchcaps.files import printable
from torchcaps.tasks import TaskName, task_of
from torchcaps.words import counted, each_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PREVIEW = 400
"""Longer side of a photo in a figure, pixels."""
_SIDE = 1.6  # longer side of a photo in a figure, inches
_MAX_LINE = 50  # characters


@dataclass(frozen=True, eq=False)
class PhotoAnswers(Result):
    """Answers of a network to image files.

    Args:
        files: Paths of the files.
        prepared: Image that the network received of each file, and the changes that were made.
        prediction: Predictions for these images.
        class_names: Name of each class.
        photos: Original pixels of the files; needed only for the figure.
        task: Task of the network.
        certainty: Probabilities and sets of classes, measured on validation images; None: not measured.
        coverage: Share of new images whose set of classes shall hold the true class; None: no sets.
        over: Images that the coverage holds for.

    Raises:
        InputError: There is a coverage, but nothing was measured, or the network has no sets of classes.
    """

    files: Sequence[Path]
    prepared: Sequence[Prepared]
    prediction: Prediction
    class_names: Sequence[str]
    photos: Sequence[Photo] = ()
    task: TaskName = "classes"
    certainty: Certainty | None = None
    coverage: float | None = None
    over: CoverageOver = "all"

    def __post_init__(self) -> None:
        if self.coverage is not None:
            task_of(self).require("calibrate", "--coverage")
            if self.objects > 1:
                raise InputError("--coverage is for one class or grade in each image")
            if self.certainty is None:
                raise InputError(NOT_MEASURED)

    @cached_property
    def probabilities(self) -> Float[np.ndarray, "N"] | None:
        """Probability that each answer is right; None without a certainty."""
        if self.certainty is None:
            return None
        return self.certainty.probabilities(self.prediction.scores, self.prediction.classes)

    @cached_property
    def sets(self) -> list[list[str]] | None:
        """Names of the classes in the set of each image; None without a coverage."""
        if self.certainty is None or self.coverage is None:
            return None
        held = self.certainty.sets(self.prediction.scores, self.coverage, self.over)
        return [[self.class_names[j] for j in np.flatnonzero(row)] for row in held]

    @property
    def objects(self) -> int:
        """Number of objects in an image (P)."""
        return 1 if self.prediction.classes.ndim == 1 else self.prediction.classes.shape[1]

    @property
    def written(self) -> str:
        """Content of :meth:`to_csv`, in words."""
        return f"a line for {each_of(len(self.files), 'image')}"

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of the images, and of their groups if they have groups."""
        return {"names": list(map(printable, self.files))}

    def given(self, n: int) -> list[str]:
        """Return the answer for image n: names of classes, the highest score first; labels; or numbers with names."""
        classes = self.prediction.classes[n].reshape(-1).tolist()
        return task_of(self).answer(self.class_names, self.prediction.scores[n].tolist(), classes)

    def caveats(self, n: int) -> tuple[str, ...]:
        """Return the reasons why the answer to image n is unsure."""
        nothing = (NOTHING,) if NOTHING in self.prepared[n].changes else ()
        return (*nothing, *self.prediction.caveats[n])

    def highest(self, n: int) -> list[tuple[str, float]]:
        """Return the classes and their scores for image n; the ten highest if there are more than 20 classes."""
        scores = list(zip(self.class_names, self.prediction.scores[n].tolist(), strict=True))
        return scores if len(scores) <= MAX_CLASSES else sorted(scores, key=lambda each: -each[1])[:MAX_SHOWN]

    def to_dict(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            answer = task_of(self).answer_to_dict(self.given(n))
            key = "values" if self.prediction.score_name == "value" else "lengths"
            answer[key] = dict(zip(self.class_names, scores, strict=True))
            about: dict[str, Any] = {"prepared": self.prepared[n].changes, "unsure": self.caveats(n)}
            about |= {} if self.probabilities is None else {"probability": float(self.probabilities[n])}
            about |= {} if self.sets is None else {"set": self.sets[n]}
            answers.append({"image": str(file)} | answer | about)
        return answers

    def to_csv(self) -> str:
        """Return a line for each file: path, classes or labels, reasons to be unsure, and all scores or numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        task, held = task_of(self), [] if self.sets is None else ["set"]
        writer.writerow(
            ["image", *(list(task.answer_to_dict([""])) or [task.name]), "unsure", *held, *self.class_names]
        )
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            caveats = "; ".join(self.caveats(n))
            writer.writerow(
                [printable(file), " + ".join(self.given(n)), caveats]
                + ([] if self.sets is None else [" + ".join(self.sets[n])])
                + [f"{score:.4f}" for score in scores]
            )
        return text.getvalue()

    def tables(self) -> list[Table]:
        tables = []
        for n, file in enumerate(self.files):
            labels, changes, caveats = self.given(n), self.prepared[n].changes, self.caveats(n)
            note: list[str | Styled] = [f"  prepared: {'; '.join(changes)}"] if changes else []
            note += [Styled(f"  unsure: {'; '.join(caveats)}", "yellow")] if caveats else []
            if self.probabilities is not None:
                note.append(f"  right with probability {self.probabilities[n]:.2f}, as measured on validation images")
            if self.sets is not None:
                note.append(f"  set of coverage {self.coverage:g}: {', '.join(map(visible, self.sets[n])) or 'empty'}")
            most = self.highest(n)
            wide = max(len(visible(name)) for name, _ in most)
            for name, score in most:
                style = "green" if name in labels else ""
                note.append(Styled(f"  {visible(name):>{wide}}  {self._shown(score)}", style))
            if len(most) < len(self.class_names):
                note.append(f"  … and {counted(len(self.class_names) - len(most), 'lower one')} (--json shows all)")
            tables.append(Table(title=f"{file}  {' + '.join(labels)}", note=note))
        return tables

    def _shown(self, score: float) -> str:
        """Format a score of 0..1 as a number and a bar, and any other number as such."""
        return f"{score:.4g}" if self.prediction.score_name == "value" else f"{score:.3f}  {bar(score)}"

    def figures(self) -> dict[str, Figure]:
        """Draw each photo with a frame around its ink, the network's input, the reconstruction and the scores."""
        headings = ["photo", "network input", "reconstruction"]
        drawn, in_lines = self.prediction.reconstruction, partial(wrap, width=_MAX_LINE)
        if drawn is None:
            headings.pop()
        headings.append(self.prediction.score_name)
        rows: list[list[Cell]] = [[Caption(heading, MUTED) for heading in headings]]
        for n, (file, photo) in enumerate(zip(self.files, self.photos, strict=True)):
            photo = photo.shrunk(MAX_PREVIEW)
            words = [Caption(f"{file.name}: {' + '.join(self.given(n))}", bold=True)]
            words += [Caption(line, MUTED) for change in photo.prepared.changes for line in in_lines(change)]
            words += [Caption(line, WRONG) for reason in self.caveats(n) for line in in_lines(f"unsure: {reason}")]
            scores = [Caption(f"{name}  {score:.2f}", None, name in self.given(n)) for name, score in self.highest(n)]
            pictures: list[Cell] = [_outlined(photo), as_floats(photo.prepared.image)]
            rows.append([*pictures, *([] if drawn is None else add_objects(drawn[n : n + 1])), scores, words])
        return {"": tiles(rows, side=_SIDE)}


def _outlined(photo: Photo) -> Float[np.ndarray, "C H W"]:
    """Return a photo, pixels 0..1, with a red frame around its ink."""
    box, pixels = photo.prepared.box, as_floats(photo.pixels)
    if box is None:
        return pixels
    pixels = np.broadcast_to(pixels if len(pixels) == 3 else pixels.mean(0), (3, *pixels.shape[1:])).copy()
    inside, line = np.zeros(pixels.shape[1:], dtype=bool), -(-max(pixels.shape[1:]) // 130)
    top, left, bottom, right = (int(edge) for edge in box)
    inside[max(top - line, 0) : bottom + line, max(left - line, 0) : right + line] = True
    inside[top:bottom, left:right] = False
    pixels[:, inside] = np.array([[0.757], [0.153], [0.176]])  # WRONG
    return pixels


def bar(share: float, width: int = 30) -> str:
    """Return a horizontal bar of ``share`` (0..1) times ``width`` characters, in steps of an eighth."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
