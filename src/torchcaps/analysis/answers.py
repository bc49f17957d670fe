"""Answer image files, a few at a time. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchcaps.analysis.calibration import Prediction
from torchcaps.analysis.certainty import CoverageOver
from torchcaps.analysis.groups import average_answers, group_files, mean_prediction
from torchcaps.analysis.photos import MAX_PREVIEW, PhotoAnswers
from torchcaps.datasets.features import Rows, read_rows
from torchcaps.datasets.images import Fit, Photo, read_photo
from torchcaps.datasets.preparation import Preparation, Prepared
from torchcaps.datasets.scaling import alike
from torchcaps.errors import InputError
from torchcaps.files import require_suffix, write_text
from torchcaps.ranges import Pages
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from torchcaps.models import Network

UNUSED_OPTIONS = ("missing",), "is for networks for pixels, which write a file for each image"
"""Options of ``torchcaps predict`` that do nothing for these answers, and why."""
FILES_AT_ONCE, ROWS_AT_ONCE = 32, 1024
"""Number of image files, and of rows of features, that are answered at once."""


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
    coverage: float | None = None
    """Share of new images whose set of classes shall hold the true class; None: no sets."""
    coverage_over: CoverageOver = "all"
    """Images that the coverage holds for."""
    draws: bool = False
    """Keep pictures for a figure."""
    out: Path | None = None
    """File of the table of all answers, or folder of the masks; None: nothing is written."""
    overwrite: bool = False
    """Replace files that are written."""
    targets: Mapping[Path, Path] = field(default_factory=dict)
    """File of the answer to each image file, from `output_files`."""


def output_files(
    out: Path,
    names: Mapping[Path, Path],
    pages: Pages | None = None,  # noqa: ARG001  masks need it
) -> dict[Path, Path]:
    """Return the file that the answer to each image file is written to: the same table for all, a .csv file."""
    require_suffix(out, ".csv", "--out")
    return dict.fromkeys(names, out)


def answer_files(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions
) -> tuple[PhotoAnswers | None, list[str]]:
    """Answer image files, a few at a time: the memory for images does not grow with their number.

    Returns:
        An answer for each image file, or for each group of files, None if none can be read; and a sentence for each
        unreadable file.
    """
    parts, damaged = list[PhotoAnswers](), list[str]()
    if classifier.description.takes_rows:
        for path in paths:
            try:
                parts += [_answer_rows(classifier, rows) for rows in read_rows(path, classifier.description)]
            except InputError as error:
                damaged.append(str(error))
    else:
        for start in range(0, len(paths), FILES_AT_ONCE):
            part = _answer_some(classifier, paths[start : start + FILES_AT_ONCE], options, damaged)
            parts += [] if part is None else [part]
    if not parts:
        return None, damaged
    answers, about, over = _joined(parts), classifier.description, options.coverage_over
    certainty = about.certainty if about.window is None else None  # measured on windows, not on records
    if options.group is not None:
        answers = average_answers(answers, group_files(answers.files, options.group), about.calibration)
        certainty = None if options.coverage is None or about.certainty is None else about.certainty.of_groups()
        over = "all" if over == "group" else over  # each answer is that of a group
    answers = replace(answers, certainty=certainty, coverage=options.coverage, over=over)
    if options.out is not None:
        write_text(options.out, answers.to_csv(), new=not options.overwrite)
    return answers, damaged


def _answer_some(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions, damaged: list[str]
) -> PhotoAnswers | None:
    """Answer files, without images if nothing is drawn; add a sentence to ``damaged`` for each unreadable one."""
    description, files = classifier.description, list[Path]()
    prepared, pictures = list[Prepared](), list[Photo]()
    how: Any = {"preparation": options.preparation, "invert": options.invert, "scale": description.scale}
    how["pages"] = description.pages
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


def _answer_rows(classifier: Classifier, rows: Rows) -> PhotoAnswers:
    """Return the answers to the rows of a file, those of records by the mean scores of their windows."""
    about, parts, (names, inputs, row) = classifier.description, list[Prediction](), rows
    for start in range(0, len(inputs), ROWS_AT_ONCE):
        prediction = classifier.classify(inputs[start:][:ROWS_AT_ONCE])
        parts.append(replace(prediction, reconstruction=None))
    prediction = _joined_predictions(parts)
    if about.window is not None:
        windows = np.split(np.arange(len(row)), np.flatnonzero(np.diff(row)) + 1)
        prediction = mean_prediction(prediction, windows, about.calibration, task_of(about))
    nothing = [Prepared(np.zeros((1, 0, 0), np.uint8))] * len(names)
    return PhotoAnswers([Path(name) for name in names], nothing, prediction, about.class_names, (), about.task)


def _joined_predictions(parts: Sequence[Prediction]) -> Prediction:
    """Return several predictions as one."""
    drawn = [each.reconstruction for each in parts if each.reconstruction is not None]
    return replace(
        parts[0],
        classes=np.concatenate([each.classes for each in parts]),
        scores=np.concatenate([each.scores for each in parts]),
        reconstruction=np.concatenate(drawn) if drawn else None,
        caveats=[caveats for each in parts for caveats in each.caveats],
    )


def _joined(parts: Sequence[PhotoAnswers]) -> PhotoAnswers:
    """Return several answers as one."""
    first, prediction = parts[0], _joined_predictions([part.prediction for part in parts])
    files, prepared, photos = (
        [each for part in parts for each in getattr(part, name)] for name in ("files", "prepared", "photos")
    )
    return PhotoAnswers(files, prepared, prediction, first.class_names, photos, first.task)
