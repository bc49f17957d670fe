"""A table of results: rows, each an ordinary run that is made with several seeds. Its words are in ``findings.md``."""

from __future__ import annotations

import dataclasses
import importlib
import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchcaps.errors import InputError, unknown_name
from torchcaps.training.config import TrainConfig, make_config

if TYPE_CHECKING:
    from torchcaps.datasets import ImageSet
    from torchcaps.training import Run

#: A measure of one's own: numbers by their names, from the trained network and its test images.
OwnMeasure = Callable[["Run", "ImageSet"], Mapping[str, float]]
#: The names of the shipped tables, in the order of the page.
SHIPPED = ("mnist", "routing", "multimnist", "affnist", "tutorials", "robustness", "zoo", "zoo-search")
#: The plugin with the objects of ellipsoids.
VIEWPOINTS = str(Path(__file__).resolve().parents[1] / "examples" / "viewpoints.py")


@dataclass(frozen=True)
class Row:
    """A line of a table: a configuration, run with several seeds."""

    name: str
    """Names its folder: lower-case words with hyphens between them."""
    title: str
    """A few words for the page."""
    preset: str
    """The network and the recipe that it starts from."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Options of the network, the recipe and the run that differ from the preset, by their flat names."""
    _: KW_ONLY
    full: bool = False
    """Whether it has the size of its source and needs a GPU; it is run where ``--full`` or its name is given."""
    data: str = "mnist"
    """The data set."""
    plugins: tuple[str, ...] = ()
    """Files that register what it names; ``run.py`` loads them."""
    published: str = ""
    """The figure that its source reports, in words."""
    published_error: float | None = None
    """The same as a test error, percent, where it is one; it is drawn beside ours."""
    measures: Mapping[str, int | OwnMeasure | None] = field(default_factory=dict)
    """What is measured beside the test error, and on how many test images (all if None); or a function of one's own."""
    group: str = ""
    """Rows of a group have a grid of their own, under this heading."""
    compared_to: str | None = None
    """The row whose test error is subtracted from this one's, seed by seed."""
    seeds: int = 3
    """How many runs."""
    first_seed: int = 0
    """The seed of the first run."""

    def config(self, seed: int) -> TrainConfig:
        """The run of one seed; raise InputError where an override does not fit the preset."""
        return make_config(self.preset, data=self.data, seed=seed, **self.overrides)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that are shown together; ``RESULTS/NAME/findings.md`` has the question, the answer and the protocol."""

    name: str
    """Names its folder in the results."""
    title: str
    rows: tuple[Row, ...]
    """In the order in which they are shown."""
    judged_on: Literal["test", "validation"] = "test"
    """The images whose errors are shown; those of a search are validation images."""
    figures: tuple[str, ...] = ("errors",)
    """The figures of the rows; see ``figures.py``."""
    source: str = ""
    """The word that ``run.py`` takes for it; :func:`load_table` sets it."""

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        for name in [self.name, *names]:
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or names.count(name) > 1:
                raise InputError(f"names are lower-case words with hyphens, each row's another one, got {name!r}")
        for row in self.rows:
            if row.compared_to not in (None, *names):
                raise unknown_name(f"row of table {self.name}", str(row.compared_to), names)


def load_table(source: str) -> Table:
    """The shipped table of a name, or the ``TABLE`` of a Python file of one's own.

    Raises:
        InputError: There is none.
    """
    if source.endswith(".py"):
        found = runpy.run_path(source).get("TABLE")
    elif source in SHIPPED:
        found = importlib.import_module(f"experiments.tables.{source.replace('-', '_')}").TABLE
    else:
        raise unknown_name("table", source, SHIPPED)
    if not isinstance(found, Table):
        raise InputError(f"{source} has no TABLE = Table(…)")
    return dataclasses.replace(found, source=source)
