"""What a table of results is: a question, a protocol, and rows that are ordinary runs. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchcaps.training.config import TrainConfig, make_config

Budget = Literal["small", "full"]
BUDGETS: tuple[Budget, ...] = ("small", "full")
#: Seeds of each row where the user names no number.
SEEDS: dict[Budget, int] = {"small": 3, "full": 5}

MeasureKind = Literal[
    "affnist", "familiar", "latency", "coupling", "rotation", "fgsm", "fgsm-scores", "pgd", "pgd-scores"
]
#: Figures that a table can ask for; :mod:`torchcaps.reproduce.figures` draws them.
FigureKind = Literal["errors", "iterations", "epochs", "affnist", "robustness"]

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured on the network of the validation-chosen epoch, beside the test error, once training is over."""

    kind: MeasureKind
    """Accuracy on affNIST, or on test objects seen from familiar sides; milliseconds for one image; entropy of the last
    layer's coupling and share of its dead capsules; or one of the curves of :mod:`torchcaps.analysis.robustness`."""
    images: int | None = None
    """The number of test images that it takes; all of them if None."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: a configuration, run with several seeds."""

    name: str
    """Names its folder: lower-case words with hyphens between them; no two rows of a table share it."""
    title: str
    """What it is, in a few words."""
    preset: str
    """The network and the recipe that it starts from."""
    data: str
    """The data set that it is trained and tested on."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the network, the recipe and the run that differ from the preset."""
    budgets: tuple[Budget, ...]
    """The budgets that the row is part of."""
    published: str = "–"
    """The figure that its source reports, in words."""
    published_error: float | None = None
    """The same as a test error, percent, where it is one: drawn beside ours."""
    measures: tuple[Measure, ...] = ()
    """What is measured after training."""
    group: str = ""
    """Rows of a group have a grid of their own, under this heading."""
    compared_to: str | None = None
    """The row whose test error is subtracted from this one's, seed by seed."""
    seeds: int | None = None
    """Runs of the row where the user names no number; the budget's number if None."""
    first_seed: int = 0
    """The seed of its first run; the others follow."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"a row's name is lower-case words with hyphens between them, got {self.name!r}")
        if not self.budgets:
            raise ValueError(f"row {self.name} must be part of a budget")

    def seeds_of(self, budget: Budget, wanted: int | None = None) -> range:
        """The seeds of its runs in a budget, as many as ``wanted`` if given."""
        number = wanted or self.seeds or SEEDS[budget]
        return range(self.first_seed, self.first_seed + number)

    def config(self, seed: int) -> TrainConfig:
        """The run of one seed.

        Raises:
            InputError: An unknown preset or field, or a value that does not fit.
        """
        return make_config(self.preset, data=self.data, seed=seed, **self.overrides)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A question, and the rows that answer it."""

    name: str
    """The word that the user types."""
    title: str
    """The subject of the table, in a few words."""
    question: str
    """The question that the rows answer."""
    protocol: str
    """How the rows are run: data, choice of the epoch, what is counted."""
    budgets: Mapping[Budget, str]
    """The cost of each budget, in words."""
    rows: tuple[Row, ...]
    """The rows, in the order in which they are shown."""
    judged_on: Literal["test", "validation"] = "test"
    """The images whose errors are shown; those of a search are validation images."""
    figures: tuple[FigureKind, ...] = ("errors",)
    """The figures that are drawn from the table's logs."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"a table's name is lower-case words with hyphens between them, got {self.name!r}")
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError(f"two rows of table {self.name} share a name: {', '.join(names)}")
        for row in self.rows:
            if row.compared_to is not None and row.compared_to not in names:
                raise ValueError(f"row {row.name} is compared to {row.compared_to}, which table {self.name} has not")

    def rows_of(self, budget: Budget) -> tuple[Row, ...]:
        """The rows that are part of a budget."""
        return tuple(row for row in self.rows if budget in row.budgets)
