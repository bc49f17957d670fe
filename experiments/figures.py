"""The figures of a table, drawn from its runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.logs import Logs
from torchcaps.analysis import RobustnessCurve, figure_robustness
from torchcaps.analysis.figures import COLOURS, MUTED, SMALL, TITLE, new_figure, style_axes, use_whole_numbers
from torchcaps.analysis.robustness import KINDS
from torchcaps.parts import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Test errors that the sources report, percent, by row.
Published = Mapping[str, float]
Points = dict[float, list[float]]

_AXES = {"outputs": "over outputs", "inputs": "over inputs"}


def draw_errors(logs: Logs, published: Published) -> Figure:
    """A line a row: each run's test error as a dot, their mean as a bar, the published error as an open diamond."""
    figure = new_figure(8.0, 1.0 + 0.27 * len(logs))
    axes = figure.subplots()
    style_axes(axes, "", "test error of the last epoch, %", "")
    for place, (name, runs) in enumerate(logs.items()):
        errors = [run.error("last") for run in runs]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(errors, [place] * len(errors), "o", color=colour, markersize=4, alpha=0.7)
        axes.plot([np.mean(errors)], [place], "|", color=colour, markersize=13, markeredgewidth=2)
        if name in published:
            axes.plot([published[name]], [place], "D", color=MUTED, markersize=6, fillstyle="none")
    if published.keys() & logs.keys():
        axes.plot([], [], "D", color=MUTED, markersize=6, fillstyle="none", label="published")
        figure.legend(fontsize=SMALL, frameon=False, loc="outside lower right")
    axes.set_yticks(range(len(logs)), list(logs), fontsize=SMALL)
    axes.set_ylim(len(logs) - 0.5, -0.5)
    _use_logarithm_where_wide(axes, "x")
    return figure


def draw_iterations(logs: Logs, published: Published) -> Figure | None:
    """Test error against routing iterations: a panel for each scale of W, a line for each softmax axis and gradient.

    Without routing, and with one iteration, some of these settings make no difference; such a run is then part of
    each line that it belongs to.
    """
    networks = _capsules(logs)
    scales = sorted(set(map(_scale, networks.values())))
    if not scales:
        return None
    figure = new_figure(3.1 * len(scales) + 0.5, 3.6)
    figure.suptitle("Error against the number of routing iterations", fontsize=TITLE)
    for panel, scale in zip(figure.subplots(1, len(scales), squeeze=False, sharey=True).ravel(), scales, strict=True):
        style_axes(panel, _scale_words(scale), "routing iterations", "test error of the last epoch, %")
        for (axis, stop), colour in zip(itertools.product(_AXES, (False, True)), COLOURS, strict=False):
            points: Points = {}
            for name, network in networks.items():
                count = network["num_iterations"]
                of_gradient = network["stop_gradient"] == stop or count <= 1
                if _scale(network) == scale and _goes_over(axis, network) and of_gradient:
                    points.setdefault(count, []).extend(run.error("last") for run in logs[name])
            label = f"softmax {_AXES[axis]}, gradient {'stopped' if stop else 'through all iterations'}"
            _draw_mean(panel, points, colour, label if scale == scales[0] else None, dashed=stop)
        use_whole_numbers(panel)
        _use_logarithm_where_wide(panel, "y")
    figure.legend(fontsize=SMALL, frameon=False, loc="outside lower center", ncols=2)
    return figure


def draw_epochs(logs: Logs, published: Published) -> Figure | None:
    """Validation error epoch by epoch: a panel for each scale of W and softmax axis, a line for each iteration count.

    Gradients are those through all iterations.
    """
    shown = {name: net for name, net in _capsules(logs).items() if not net["stop_gradient"]}
    scales = sorted(set(map(_scale, shown.values())))
    if not scales:
        return None
    counts = sorted({net["num_iterations"] for net in shown.values()})
    figure = new_figure(3.1 * len(scales) + 0.5, 6.2)
    figure.suptitle("Error on the validation images, epoch by epoch", fontsize=TITLE)
    panels = figure.subplots(2, len(scales), squeeze=False, sharex=True, sharey=True)
    for (row, axis), (column, scale) in itertools.product(enumerate(_AXES), enumerate(scales)):
        panel = panels[row, column]
        style_axes(panel, f"{_AXES[axis]}, {_scale_words(scale)}", "epoch", "validation error, %")
        of_panel = {name: net for name, net in shown.items() if _scale(net) == scale and _goes_over(axis, net)}
        for count, colour in zip(counts, COLOURS, strict=False):
            points: Points = {}
            names = [name for name, net in of_panel.items() if net["num_iterations"] == count]
            for run in itertools.chain(*(logs[name] for name in names)):
                for epoch, accuracy in zip(run.metrics["epoch"], run.metrics["validation_accuracy"], strict=True):
                    points.setdefault(float(epoch), []).append(100 * (1 - accuracy))
            label = f"{count} iteration{'s' * (count != 1)}"
            _draw_mean(panel, points, colour, label if row == column == 0 else None)
        use_whole_numbers(panel)
        _use_logarithm_where_wide(panel, "y")
    figure.legend(fontsize=SMALL, frameon=False, loc="outside lower center", ncols=5)
    return figure


def draw_affnist(logs: Logs, published: Published) -> Figure:
    """Accuracy on affNIST against the validation accuracy of the epoch tested, a dot a run."""
    figure = new_figure(6.5, 3.8)
    axes = figure.subplots()
    style_axes(axes, "", "validation accuracy reached, %", "accuracy on affNIST, %")
    for (name, runs), colour in zip(logs.items(), itertools.cycle(COLOURS)):
        reached = [100 * run.summary["validation"]["best"]["accuracy"] for run in runs]
        measured = [100 * run.measures["affnist"]["accuracy"] for run in runs]
        axes.plot(reached, measured, "o", color=colour, markersize=5, label=name)
    figure.legend(fontsize=SMALL, frameon=False, loc="outside lower center", ncols=3)
    return figure


def draw_robustness(logs: Logs, published: Published) -> Figure | None:
    """Accuracy against the strength of each disturbance, a line a row: mean and deviation over its seeds."""
    curves = {
        name: [RobustnessCurve.from_dict(run.measures[kind]) for run in runs for kind in KINDS if kind in run.measures]
        for name, runs in logs.items()
    }
    return figure_robustness(curves) if any(curves.values()) else None


#: Each makes a figure of the rows, or None where they have nothing to draw.
DRAW: dict[str, Callable[[Logs, Published], Figure | None]] = {
    "errors": draw_errors,
    "iterations": draw_iterations,
    "epochs": draw_epochs,
    "affnist": draw_affnist,
    "robustness": draw_robustness,
}


def _capsules(logs: Logs) -> dict[str, Mapping[str, Any]]:
    """The options of the networks with dynamic routing, by the names of their rows."""
    options = {name: flat(runs[0].config.model) for name, runs in logs.items()}
    return {name: each for name, each in options.items() if each.get("routing") == "dynamic"}


def _goes_over(axis: str, network: Mapping[str, Any]) -> bool:
    """Whether a network's softmax goes over an axis; without routing it makes no difference."""
    return bool(network["softmax_over"] == axis or network["num_iterations"] == 0)


def _scale(network: Mapping[str, Any]) -> float:
    """The deviation of W at the start; infinity, so that it comes last, where the layer computes its own."""
    return math.inf if network["weight_init"] == "balanced" else float(network["weight_std"])


def _scale_words(scale: float) -> str:
    return "W balanced" if math.isinf(scale) else f"W of deviation {scale:g}"


def _draw_mean(axes: Axes, points: Points, colour: str, label: str | None, *, dashed: bool = False) -> None:
    """The mean at each place within a band of one standard deviation."""
    places = sorted(points)
    mean = np.array([np.mean(points[place]) for place in places])
    spread = np.array([np.std(points[place], ddof=1) if len(points[place]) > 1 else 0.0 for place in places])
    style = "--" if dashed else "-"
    axes.plot(places, mean, color=colour, label=label, marker="o", markersize=3, linewidth=1.5, linestyle=style)
    axes.fill_between(places, np.maximum(mean - spread, 0), mean + spread, color=colour, alpha=0.15, linewidth=0)


def _use_logarithm_where_wide(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic scale where what is drawn spans more than a factor of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    drawn = [line.get_xdata() if which == "x" else line.get_ydata() for line in axes.lines]
    values = np.concatenate([np.asarray(each, dtype=float) for each in drawn])
    if len(values) == 0 or values.min() <= 0 or values.max() < 10 * values.min():
        return
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
