"""Answers to image files as text, JSON, CSV and figures. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.calibration import Prediction, add_objects
from torchcaps.analysis.figures import MUTED, WRONG, Caption, Cell, tiles
from torchcaps.analysis.results import MAX_CLASSES, MAX_SHOWN, Result, Styled, Table
from torchcaps.datasets.images import Fit, Photo, read_photo
from torchcaps.datasets.preparation import NOTHING, Preparation, Prepared
from torchcaps.datasets.scaling import alike, as_floats
from torchcaps.errors import InputError, visible
from torchcaps.files import printable, write_text
from torchcaps.tasks import TaskName, task_of
from torchcaps.words import counted, each_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchcaps.models import Network

UNUSED_OPTIONS = ("missing",), "is for networks for pixels, which write a file for each image"
"""Options of ``torchcaps predict`` that do nothing for these answers, and why."""
FILES_AT_ONCE = 32
"""Number of image files in memory at once."""
MAX_PREVIEW = 400
"""Longer side of a photo in a figure, pixels."""
_SIDE = 1.6  # longer side of a photo in a figure, inches
_MAX_LINE = 50  # characters


class Classifier(NamedTuple):
    """A network to answer image files."""

    description: Any
    """Its ``torchcaps.export.Description``, or the ``ImageSpec`` of a run."""
    classify: Callable[[np.ndarray], Prediction]
    """Function from images (N, C, H, W), uint8 or float32 of 0..1, to the prediction."""
    model: Network | None = None
    """The network; None for an ONNX file."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options of the answers to image files."""

    preparation: Preparation | None = None
    """Preprocessing of photos of drawings."""
    invert: bool = False
    """Invert the pixels."""
    fit: Fit | None = None
    """Way to resize unprepared images; None: the network's."""
    group: str | None = None
    """Regular expression for groups of files that get one answer, see `torchcaps.analysis.groups`."""
    draws: bool = False
    """Keep pictures for a figure."""
    out: Path | None = None
    """File of the table of all answers, or folder of the masks; None: nothing is written."""


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
    """

    files: Sequence[Path]
    prepared: Sequence[Prepared]
    prediction: Prediction
    class_names: Sequence[str]
    photos: Sequence[Photo] = ()
    task: TaskName = "classes"

    @property
    def objects(self) -> int:
        """Number of objects in an image (P)."""
        return 1 if self.prediction.classes.ndim == 1 else self.prediction.classes.shape[1]

    @property
    def written(self) -> str:
        """Content of :meth:`to_csv`, in words."""
        return f"a line for {each_of(len(self.files), 'image')}"

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
        found: list[dict[str, Any]] = []
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            answer = task_of(self).answer_to_dict(self.given(n))
            answer[task_of(self).score_key] = dict(zip(self.class_names, scores, strict=True))
            about = {"prepared": self.prepared[n].changes, "unsure": self.caveats(n)}
            found.append({"image": str(file)} | answer | about)
        return found

    def to_csv(self) -> str:
        """Return a line for each file: path, classes or labels, reasons to be unsure, and all scores or numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["image", task_of(self).answer_key, "unsure", *self.class_names])
        for n, (file, scores) in enumerate(zip(self.files, self.prediction.scores.tolist(), strict=True)):
            caveats = "; ".join(self.caveats(n))
            writer.writerow(
                [printable(file), " + ".join(self.given(n)), caveats, *(f"{score:.4f}" for score in scores)]
            )
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
                note.append(f"  … and {counted(len(self.class_names) - len(most), 'lower one')} (--json shows all)")
            found.append(Table(title=f"{file}  {' + '.join(given)}", note=note))
        return found

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


def output_files(out: Path, paths: Sequence[Path]) -> dict[Path, Path]:
    """Return the file that the answer to each image file is written to: the same table for all."""
    return dict.fromkeys(paths, out)


def answer_files(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions
) -> tuple[PhotoAnswers | None, list[str]]:
    """Answer image files, a few at a time: the memory for images does not grow with their number.

    Returns:
        An answer for each image file, or for each group of files, None if none can be read; and a sentence for each
        unreadable file.
    """
    from torchcaps.analysis.groups import average_answers, group_files

    parts, damaged = list[PhotoAnswers](), list[str]()
    for start in range(0, len(paths), FILES_AT_ONCE):
        part = _answer_some(classifier, paths[start : start + FILES_AT_ONCE], options, damaged)
        parts += [] if part is None else [part]
    if not parts:
        return None, damaged
    answers = _joined(parts)
    if options.group is not None:
        answers = average_answers(
            answers, group_files(answers.files, options.group), classifier.description.calibration
        )
    if options.out is not None:
        write_text(options.out, answers.to_csv())
    return answers, damaged


def _answer_some(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions, damaged: list[str]
) -> PhotoAnswers | None:
    """Answer files, without images if nothing is drawn; add a sentence to ``damaged`` for each unreadable one."""
    description, files = classifier.description, list[Path]()
    prepared, pictures = list[Prepared](), list[Photo]()
    how: Any = {"preparation": options.preparation, "invert": options.invert, "scale": description.scale}
    how["fit"] = options.fit or description.fit
    for path in paths:
        try:
            photo = read_photo(path, description.in_shape, **how)
        except InputError as error:
            damaged.append(str(error))
            continue
        files.append(path)
        prepared.append(photo.prepared)
        if options.draws:
            pictures.append(photo.shrunk(MAX_PREVIEW))
    if not files:
        return None
    prediction = classifier.classify(np.stack(alike([each.image for each in prepared])))
    if not options.draws:
        nothing = np.zeros((1, 0, 0), np.uint8)
        prepared = [replace(each, image=nothing) for each in prepared]
        prediction = replace(prediction, reconstruction=None)
    return PhotoAnswers(files, prepared, prediction, description.class_names, pictures, description.task)


def _joined(parts: Sequence[PhotoAnswers]) -> PhotoAnswers:
    """Return several answers as one."""
    first, predictions = parts[0], [part.prediction for part in parts]
    drawn = [each.reconstruction for each in predictions if each.reconstruction is not None]
    prediction = replace(
        predictions[0],
        classes=np.concatenate([each.classes for each in predictions]),
        scores=np.concatenate([each.scores for each in predictions]),
        reconstruction=np.concatenate(drawn) if drawn else None,
        caveats=[caveats for each in predictions for caveats in each.caveats],
    )
    files, prepared, photos = (
        [each for part in parts for each in getattr(part, name)] for name in ("files", "prepared", "photos")
    )
    return PhotoAnswers(files, prepared, prediction, first.class_names, photos, first.task)
