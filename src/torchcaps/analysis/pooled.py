"""Results of several networks together, such as those of the folds of a data set."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from torchcaps.analysis.certainty import Certainty
from torchcaps.analysis.collector import TaskEvaluation
from torchcaps.analysis.results import Comparison, Styled, Table, percent
from torchcaps.errors import InputError
from torchcaps.tasks import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EvaluationT = TypeVar("EvaluationT", bound=TaskEvaluation)


def pooled(evaluations: Sequence[EvaluationT]) -> EvaluationT:
    """Return evaluations of several sets of images as one: arrays are joined, and numbers averaged over all images.

    A certainty is that of one network, so they have none together.

    Raises:
        InputError: The evaluations differ in task or classes.
    """
    first, changed = evaluations[0], dict[str, Any]()
    if len({(type(each), each.class_names) for each in evaluations}) > 1:
        raise InputError("the networks differ in task or classes, so their results are not joined; evaluate them alone")
    for field in fields(first):  # type: ignore[arg-type]  # all evaluations are dataclasses
        values = [getattr(each, field.name) for each in evaluations]
        if any(each is None for each in values):  # such as records, which have one answer only if labels are theirs
            changed[field.name] = None
        elif isinstance(values[0], np.ndarray):
            changed[field.name] = np.concatenate(values)
        elif isinstance(values[0], TaskEvaluation):
            changed[field.name] = pooled(values)
        elif isinstance(values[0], Certainty):
            changed[field.name] = None
        elif isinstance(values[0], float):
            changed[field.name] = float(np.average(values, weights=[each.num_images for each in evaluations]))
    return replace(first, title="", **changed)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class PooledEvaluation(Comparison):
    """Evaluations of several networks, their mean and standard deviation, and their images together.

    Args:
        networks: Evaluation of each network by its name.
        images: Description of the images of each network.
        task: Task of the networks.
        about: Further entries of each network for JSON.
    """

    task: Task
    about: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def together(self) -> TaskEvaluation:
        """The evaluations of all networks as one."""
        return pooled(list(self.networks.values()))

    @cached_property
    def numbers(self) -> dict[str, list[float]]:
        """Values of each number that all evaluations have, such as the accuracy."""
        dicts = [each.to_dict() for each in self.networks.values()]
        names = [name for name, value in dicts[0].items() if isinstance(value, float)]
        columns = {name: [each[name] for each in dicts] for name in names}
        return {name: values for name, values in columns.items() if all(isinstance(each, float) for each in values)}

    @cached_property
    def covered(self) -> dict[str, float]:
        """Coverage and mean size of the sets of all images, each by the certainty of its own network; or nothing."""
        weights = [each.num_images for each in self.networks.values()]
        names = [name for name in ("covered", "mean_set_size") if name in self.numbers]
        return {name: float(np.average(self.numbers[name], weights=weights)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        runs = [each.to_dict() for each in self.networks.values()]
        about = self.about or [{}] * len(runs)
        return {
            "runs": [{**words, **values} for words, values in zip(about, runs, strict=True)],
            "mean": {name: statistics.mean(values) for name, values in self.numbers.items()},
            "sd": {name: statistics.stdev(values) for name, values in self.numbers.items()},
            "pooled": self.together.to_dict() | self.covered,
        }

    def tables(self) -> list[Table]:
        metric, rows = self.task.metric, list[list[str | Styled]]()
        for name, each in self.networks.items():
            cells = metric.cells(each.accuracy, each.balanced_accuracy)
            if self.covered:
                values = each.to_dict()
                cells |= {"covered": percent(values["covered"]), "set size": f"{values['mean_set_size']:.2f}"}
            rows.append([name, f"{each.num_images:,}", *cells.values(), f"{each.loss:.4f}"])
        errors = [1 - each.accuracy for each in self.networks.values()]
        spread = f"{metric.error}: mean ± standard deviation {metric.spread(errors)}"
        first, *others = self.together.tables()
        if self.covered:
            words = f"{percent(self.covered['covered'])}  (sets that hold the true class, each by its own run)"
            sizes = f"{self.covered['mean_set_size']:.2f}  (mean size)"
            first = first._replace(rows=[*first.rows, ["Covered", words], ["Set size", sizes]])
        return [
            Table(rows, ("run", "images", *cells, "loss"), self.title, note=[spread]),
            first._replace(title=f"All images of the {len(self.networks)} runs"),
            *others,
        ]

    def figures(self) -> Mapping[str, Figure]:
        """Draw the figures of all images together."""
        return self.together.titled(f"{len(self.networks)} runs").figures()
