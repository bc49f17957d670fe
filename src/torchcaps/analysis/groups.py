"""Combine the answers to several image files of one object, such as frames of a video. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchcaps.analysis.calibration import Calibration, Prediction
from torchcaps.analysis.photos import PhotoAnswers
from torchcaps.analysis.results import Table
from torchcaps.datasets.preparation import Prepared
from torchcaps.files import groups_in_paths, printable
from torchcaps.tasks import Task, task_of
from torchcaps.words import counted, each_of


@dataclass(frozen=True, eq=False)
class GroupAnswers(PhotoAnswers):
    """One answer for each group of image files, by the mean of their scores.

    Takes the arguments of `PhotoAnswers`, for groups: ``files`` are the names of the groups, and ``prepared`` lists
    all changes to files of a group.

    Args:
        members: Files of each group.
        ordered: All files in the order in which they were read.
    """

    members: Sequence[Sequence[Path]] = ()
    ordered: Sequence[Path] = ()

    @property
    def probabilities(self) -> None:
        """None, because the probabilities of single images were measured."""

    @property
    def names(self) -> dict[str, list[str]]:
        groups = {file: printable(name) for name, files in zip(self.files, self.members, strict=True) for file in files}
        return {"names": list(map(printable, self.ordered)), "groups": [groups[file] for file in self.ordered]}

    @property
    def written(self) -> str:
        """Content of :meth:`to_csv`, in words."""
        return f"a line for {each_of(len(self.files), 'group')} of {counted(sum(map(len, self.members)), 'image')}"

    def to_dict(self) -> list[dict[str, Any]]:
        answers = []
        for answer, members in zip(super().to_dict(), self.members, strict=True):
            answers.append({"group": answer.pop("image"), "images": [str(each) for each in members]} | answer)
        return answers

    def to_csv(self) -> str:
        """Return a line for each group: its name, the number of its files, then the columns for single files."""
        head, *rows = csv.reader(io.StringIO(super().to_csv()))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["group", "images", *head[1:]])
        for row, members in zip(rows, self.members, strict=True):
            writer.writerow([row[0], len(members), *row[1:]])
        return text.getvalue()

    def tables(self) -> list[Table]:
        tables = []
        for table, members in zip(super().tables(), self.members, strict=True):
            words = "mean of " * (len(members) > 1) + counted(len(members), "image")
            tables.append(table._replace(title=f"{table.title}  ({words})"))
        return tables


def group_files(files: Sequence[Path], pattern: str) -> dict[str, list[int]]:
    """Return the positions of the files of each group, by its name, in the order of the files.

    Args:
        files: Paths of the files.
        pattern: Regular expression. The part of a path that it matches is the name of the group, or the part that its
            first parentheses match.

    Raises:
        InputError: The pattern is not a regular expression, or does not match a path.
    """
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(groups_in_paths(map(Path.as_posix, files), pattern)):
        groups.setdefault(name, []).append(position)
    return groups


def average_answers(
    answers: PhotoAnswers, groups: dict[str, list[int]], calibration: Calibration | None
) -> GroupAnswers:
    """Return one answer for each group of files, by the mean of their scores.

    Args:
        answers: Answers to single files.
        groups: Positions of the files of each group, from `group_files`.
        calibration: Thresholds of the network, applied to the mean scores.
    """
    members, prepared = list(groups.values()), []
    prediction = mean_prediction(answers.prediction, members, calibration, task_of(answers))
    for each in members:
        changes = dict.fromkeys(change for n in each for change in answers.prepared[n].changes)
        prepared.append(Prepared(answers.prepared[each[0]].image, tuple(changes)))
    return GroupAnswers(
        [Path(name) for name in groups],
        prepared,
        prediction,
        answers.class_names,
        task=answers.task,
        members=[[answers.files[n] for n in each] for each in members],
        ordered=answers.files,
    )


def mean_prediction(
    single: Prediction, members: Sequence[Any], calibration: Calibration | None, task: Task
) -> Prediction:
    """Return a prediction for each list of positions in another one, by the mean of their scores."""
    scores = np.stack([single.scores[each].mean(0) for each in members])
    images: Any = scores  # any array of this length, because there is no reconstruction to compare with images
    classes = task.predict_classes(scores)
    return Prediction.of(images, classes, scores, None, calibration, single.score_name, task)
