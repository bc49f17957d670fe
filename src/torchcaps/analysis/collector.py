"""Base classes of evaluations, and of the collectors that gather their batches."""

from __future__ import annotations

import copy
import csv
import dataclasses
import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor

from torchcaps.analysis.certainty import Certainty, CoverageOver
from torchcaps.analysis.results import Result, Table
from torchcaps.datasets import ImageSet
from torchcaps.datasets.splits import FILE, PLACE, RECORD, START, group_names
from torchcaps.errors import InputError
from torchcaps.files import printable
from torchcaps.models import ModelOutput, Network
from torchcaps.tasks import Task
from torchcaps.words import counted

NEEDS_CLASSES = "is for one class or grade in each image, but this network has other answers"
"""End of the error about sets of classes for another task."""


class Answer(NamedTuple):
    """Answer to an image in a table."""

    truth: str
    answer: str
    set: str
    """Classes that hold the true one with the chosen coverage; empty without a coverage."""
    numbers: Sequence[str]
    """Score of each output; for masks its Dice score, empty if neither mask has the class; or the other columns."""


class TaskEvaluation(Result):
    """Base class of the results of a network on a set of images, one class for each task.

    A subclass is a dataclass with ``loss``, ``accuracy``, ``class_names`` and ``title``, and with a ``figure_name``.
    """

    loss: float
    """Mean loss per image."""
    accuracy: Any
    """Metric of the task, at most 1."""
    class_names: Any
    """Name of each output."""
    figure_name: ClassVar[Any]
    """Name of the figure in a run folder."""
    balanced_accuracy: Any = None
    """Mean recall over the classes; None without one class per image."""
    records: Any = None
    """Evaluation of one answer for each record, by the mean of the scores of its windows; None without records."""

    @property
    def num_images(self) -> int:
        """Number of images."""
        raise NotImplementedError

    @property
    def error(self) -> float:
        """1 − accuracy."""
        return 1 - float(self.accuracy)

    @property
    def warning(self) -> str | None:
        """Warning about the answers; None if there is none."""
        return None

    def record_tables(self) -> list[Table]:
        """Return the first table of the records, if there are some."""
        if self.records is None:
            return []
        title = f"One answer for each of {counted(self.records.num_images, 'record')}: the mean scores of its windows"
        return [next(iter(self.records.tables()))._replace(title=title)]

    def with_certainty(self, certainty: Certainty | None, coverage: float | None, over: CoverageOver) -> Self:  # noqa: ARG002
        """Return the same results with probabilities, and with sets of classes if there is a coverage.

        Raises:
            InputError: Nothing was measured on validation images, or the task has no sets of classes.
        """
        if coverage is not None:
            raise InputError(f"--coverage {NEEDS_CLASSES}")
        return self

    def answers(self) -> Iterator[Answer]:
        """Yield the answer to each image."""
        raise NotImplementedError

    @property
    def answer_columns(self) -> Sequence[str]:
        """Name of each number of an answer."""
        names: Sequence[str] = self.class_names
        return names

    def answers_table(self, images: ImageSet) -> list[list[str]]:
        """Return a head, and file, truth, answer, set, group and the numbers of each image.

        Windows have their record and first step as well, and pixels of a scene their row and column. Images without
        files are numbered from 0.
        """
        names, nothing = images.names, [""] * self.num_images
        places: dict[str, Sequence[Any]] = {RECORD: names[RECORD]} if RECORD in names else {}
        places |= {name: images.factors[name].tolist() for name in (START, *PLACE) if name in images.factors}
        files = names.get(FILE) or [str(n) for n in range(self.num_images)]
        about = zip(files, self.answers(), group_names(names) or nothing, *places.values(), strict=True)
        head = ["file", "truth", "answer", "set", "group", *places, *self.answer_columns]
        return [head] + [
            [printable(Path(file)), each.truth, each.answer, each.set, group, *map(str, place), *each.numbers]
            for file, each, group, *place in about
        ]

    def titled(self, title: str) -> Self:
        """Return the same results with another title."""
        fields: Any = self
        return cast(Self, dataclasses.replace(fields, title=title))


def answers_csv(tables: Mapping[str, list[list[str]]]) -> str:
    """Return the tables of the answers of runs as one, with a column for the run if there are several.

    Raises:
        InputError: The tables differ in their columns.
    """
    (head, *_), *others = tables.values()
    if any(other[0] != head for other in others):
        raise InputError("the networks differ in task or classes, so --out cannot list their answers together")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run"] * bool(others) + head)
    for name, (_, *rows) in tables.items():
        writer.writerows([name] * bool(others) + row for row in rows)
    return text.getvalue()


@dataclasses.dataclass
class Collector(ABC):
    """Base class of collectors: gather the batches of an evaluation. A task may keep sums instead of all scores.

    The module that a task names as its ``evaluation`` has a subclass called ``TaskCollector``.

    Args:
        model: The network.
        class_names: Name of each class.
        image_set: The images, whose batches are added in their order.
        colours: Colour of each class in figures of masks; None: the usual ones.
    """

    model: Network
    class_names: tuple[str, ...]
    image_set: ImageSet
    colours: Sequence[str] | None = None

    max_batch: ClassVar[int] = 1_000_000_000
    """Largest number of images in a batch, because the scores of pixels take much memory."""

    @abstractmethod
    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:
        """Add a batch: the output for images of pixels 0..1, and their targets."""

    @abstractmethod
    def result(self, loss: float) -> TaskEvaluation:
        """Return the evaluation of all batches; ``loss`` is the mean over the images."""

    def of_records(self, loss: float) -> TaskEvaluation | None:  # noqa: ARG002  for collectors that keep scores
        """Return the evaluation of one answer for each record; ``loss`` remains that of the windows.

        None without records, or if the windows of a record have several targets.
        """
        return None


def collector_of(task: Task) -> type[Collector]:
    """Return the collector of a task."""
    collector: type[Collector] = importlib.import_module(task.evaluation).TaskCollector
    return collector


@dataclasses.dataclass
class ScoreCollector(Collector):
    """Base class of collectors that keep all scores."""

    _scores: list[Tensor] = dataclasses.field(default_factory=list)
    _targets: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:  # noqa: ARG002  as the base class
        self._scores.append(output.scores.float())
        self._targets.append(targets)

    def of_records(self, loss: float) -> TaskEvaluation | None:
        if RECORD not in self.image_set.names:
            return None
        _, first, numbers = np.unique(self.image_set.names[RECORD], return_index=True, return_inverse=True)
        scores, targets = torch.cat(self._scores), torch.cat(self._targets)
        record = torch.from_numpy(numbers).to(scores.device)
        sums = scores.new_zeros(len(first), scores.shape[1], dtype=torch.float64).index_add_(0, record, scores.double())
        target = targets[torch.from_numpy(first).to(scores.device)]
        if not torch.equal(target[record], targets):
            return None
        answers = copy.copy(self)
        answers._scores, answers._targets = [(sums / record.bincount()[:, None]).to(scores)], [target]
        return answers.result(loss)
