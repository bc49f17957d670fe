"""Learning curves of one or several runs, from their metrics.csv."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.figures import COLOURS, MUTED, draw_legend, new_figure, style_axes
from torchcaps.analysis.results import Comparison
from torchcaps.errors import InputError, visible
from torchcaps.files import as_path, read_text, reading
from torchcaps.tasks import TaskName, find_task
from torchcaps.words import capitalised

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES: dict[str, dict[str, Any]] = {
    "validation": {"marker": "o", "markersize": 3.5, "linewidth": 1.8},
    "train": {"marker": ".", "markersize": 3.0, "linewidth": 1.0, "linestyle": "--"},
}
_COLUMNS = ("epoch", *(f"{part}_{what}" for part in _STYLES for what in ("loss", "accuracy")))
_TICKS = (1, 2, 5)  # times powers of ten
_MAX_DIVIDED_POWERS, _MAX_POWERS = 5, 8  # powers of ten with ticks between them, and on an axis

Metrics = dict[str, Float[np.ndarray, "epochs"]]
"""Columns of a metrics.csv by name; NaN for an empty cell."""


def read_metrics(path: str | Path) -> Metrics:
    """Read a run's metrics.csv: a header, and one row of numbers per epoch.

    A last line without a line end is left out, because the run is still writing it.

    Args:
        path: The file, or the folder of the run.

    Returns:
        Columns by name; NaN for an empty cell.

    Raises:
        InputError: The file is missing or damaged, has no row, or lacks a column that is drawn.
    """
    path = as_path("read_metrics: path", path)
    if path.is_dir():
        path = path / "metrics.csv"
    text = read_text(path, "metrics")
    with reading(path, "metrics"):
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), strict=True))
        if not rows:
            raise InputError("it has no rows yet; a run writes one after each epoch")
        names = dict.fromkeys((*rows[0], *_COLUMNS))
        return {name: np.array([float("nan" if row[name] == "" else row[name]) for row in rows]) for name in names}


@dataclasses.dataclass(frozen=True, eq=False)
class Curves(Comparison):
    """Learning curves of one or several runs of one task: the :data:`Metrics` of each.

    Args:
        task: Task of the runs; its metric is drawn.
    """

    task: TaskName = "classes"

    def to_dict(self) -> dict[str, dict[str, list[float | None]]]:
        return {
            name: {key: [x if math.isfinite(x) else None for x in column.tolist()] for key, column in each.items()}
            for name, each in self.networks.items()
        }

    def figures(self) -> dict[str, Figure]:
        """Draw loss and error of each epoch: validation as bold lines, training as thin dashed lines."""
        figure, metric = new_figure(9.0, 3.6, self.title), find_task(self.task).metric
        loss_axes, error_axes = figure.subplots(1, 2)
        for (name, metrics), colour in zip(self.networks.items(), itertools.cycle(COLOURS)):
            for part, style in _STYLES.items():
                label = visible(name) if part == "validation" else None
                loss_axes.plot(metrics["epoch"], metrics[f"{part}_loss"], color=colour, label=label, **style)
                error_axes.plot(metrics["epoch"], metric.errors(metrics[f"{part}_accuracy"]), color=colour, **style)
        for part, style in _STYLES.items():
            loss_axes.plot([], [], color=MUTED, label=part, **style)
        for axes, name, unit in (
            (loss_axes, "Loss", "mean of an image"),
            (error_axes, capitalised(metric.error), metric.unit),
        ):
            style_axes(axes, name, "epoch", unit)
            axes.locator_params(axis="x", integer=True)  # epochs
            _use_powers(axes)
        draw_legend(figure, columns=4)
        return {"": figure}


def _use_powers(axes: Axes) -> None:
    """Use a logarithmic scale if the curves span more than a factor of ten; zeros are drawn at the bottom."""
    from matplotlib.ticker import FixedLocator, NullLocator

    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) == 0 or positive.max() < 10 * positive.min():
        return
    lowest, highest = positive.min(), positive.max()
    axes.set_yscale("symlog", linthresh=lowest, linscale=0.5)
    powers = 10.0 ** np.arange(np.floor(np.log10(lowest)), np.ceil(np.log10(highest)) + 1)
    few = len(powers) <= _MAX_DIVIDED_POWERS
    ticks = np.outer(powers, _TICKS).ravel() if few else powers[:: -(-len(powers) // _MAX_POWERS)]
    ticks = ticks[ticks >= lowest]  # the scale is linear below, where further ticks would touch
    if (values == 0).any():
        axes.set_ylim(bottom=0)
        ticks = np.append(0.0, ticks)
    axes.yaxis.set_major_locator(FixedLocator(ticks.tolist()))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
