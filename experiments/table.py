"""A table of results: rows, each an ordinary run that is made with several seeds."""

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

#: A measure of one's own: numbers by their names, from the trained network, a Run, and its test images, an ImageSet.
OwnMeasure = Callable[..., Mapping[str, float]]
#: The plugin with the objects of ellipsoids.
VIEWPOINTS = str(Path(__file__).resolve().parents[1] / "examples" / "viewpoints.py")


@dataclass(frozen=True)
class Row:
    """A line of a table: a configuration, run with several seeds."""

    name: str  # lower-case words with hyphens between them
    title: str
    preset: str  # the network and the recipe that it starts from
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options that differ from it, by their flat names
    _: KW_ONLY
    full: bool = False  # it has the size of its source and needs a GPU; it is run where --full or its name is given
    data: str = "mnist"
    plugins: tuple[str, ...] = ()  # files that register what it names; run.py loads them
    published: str = ""  # what its source reports
    #: What is measured beside the test error, and on how many test images (None: all); or a function of one's own.
    measures: Mapping[str, int | OwnMeasure | None] = field(default_factory=dict)
    group: str = ""  # rows of a group are shown together, under this heading
    compared_to: str | None = None  # the row whose test error is subtracted from this one's, seed by seed
    seeds: int = 3  # how many
    first_seed: int = 0

    def config(self, seed: int) -> TrainConfig:
        """The run of one seed; raise InputError where an override does not fit the preset."""
        return make_config(self.preset, data=self.data, seed=seed, **self.overrides)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that are shown together, in their order."""

    name: str
    title: str
    rows: tuple[Row, ...]
    source: str = ""  # the word that run.py takes for it; load_table sets it

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        for name in [self.name, *names]:
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or names.count(name) > 1:
                raise InputError(f"names are lower-case words with hyphens, each row's another one, got {name!r}")
        for row in self.rows:
            if row.compared_to is not None:
                self[row.compared_to]

    def __getitem__(self, name: str) -> Row:
        """The row of a name; raise InputError if there is none."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise unknown_name(f"row of table {self.name}", name, rows)
        return rows[name]

    def command(self, script: str, *words: object) -> str:
        """The command that calls a script for this table, with the plugins of this process."""
        options = [*map(str, words), *plugin_options(loaded_plugins())]
        return shlex.join(["python", f"experiments/{script}.py", self.source, *options])

    def again(self, row: Row, last_seed: int, precision: str) -> str:
        """The line that makes the runs of a row again, up to that seed, beside those that there are."""
        words = ("--row", row.name, "--seeds", last_seed + 1 - row.first_seed, "--precision", precision)
        return self.command("run", *words, "--results", "runs/again")
