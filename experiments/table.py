"""Tables of results: each row is a configuration that is run with several seeds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError, unknown_name
from torchcaps.plugins import loaded_plugins, plugin_options
from torchcaps.training.config import TrainConfig, make_config

#: A measure defined by the user: a function of the Run and its test images (an ImageSet) that returns numbers by name.
OwnMeasure = Callable[..., Mapping[str, float]]
#: The plugin with the objects of ellipsoids.
VIEWPOINTS = str(Path(__file__).resolve().parents[1] / "examples" / "viewpoints.py")


@dataclass(frozen=True)
class Row:
    """A line of a table: a configuration, run with several seeds."""

    name: str  # lower-case words with hyphens between them
    title: str
    preset: str  # network and recipe to start from
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options that differ from it, by their flat names
    _: KW_ONLY
    full: bool = False  # needs a GPU; run only with --full or by name
    data: str = "mnist"  # {seed} stands for the seed of a run, for data that are drawn
    plugins: tuple[str, ...] = ()  # Python files that register parts; run.py loads them
    published: str = ""  # error reported by the source
    #: Additional measures, and the number of test images of each (None: all) or a function.
    measures: Mapping[str, int | OwnMeasure | None] = field(default_factory=dict)
    group: str = ""  # heading above the rows of a group
    compared_to: str | None = None  # row whose test error is subtracted, seed by seed
    seeds: int = 3  # number of runs
    first_seed: int = 0

    def config(self, seed: int) -> TrainConfig:
        """Return the configuration of one seed; raise InputError if an override does not fit the preset."""
        return make_config(self.preset, data=self.data.replace("{seed}", str(seed)), seed=seed, **self.overrides)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of rows, in their order."""

    name: str
    title: str
    rows: tuple[Row, ...]
    source: str = ""  # argument of run.py that names the table; set by load_table

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        for name in [self.name, *names]:
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or names.count(name) > 1:
                raise InputError(f"names must be lower-case words with hyphens, different for each row, got {name!r}")
        for row in self.rows:
            if row.compared_to is not None:
                self[row.compared_to]

    def __getitem__(self, name: str) -> Row:
        """Return the row with a name; raise InputError if there is none."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise unknown_name(f"row of table {self.name}", name, rows)
        return rows[name]

    def command(self, script: str, *words: object) -> str:
        """Return the command that calls a script for this table, with the plugins of this process."""
        options = [*map(str, words), *plugin_options(loaded_plugins())]
        return shlex.join(["python", f"experiments/{script}.py", self.source, *options])

    def again(self, row: Row, last_seed: int, precision: str) -> str:
        """Return the command that repeats the runs of a row up to a seed, in a new folder."""
        words = ("--row", row.name, "--seeds", last_seed + 1 - row.first_seed, "--precision", precision)
        return self.command("run", *words, "--results", "runs/again")
