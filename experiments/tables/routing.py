"""(b) Routing: softmax axis, initial scale, gradient, iterations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.table import Row, Table
from experiments.tables.recipes import SHORT

#: Deviations of W at the start; None: the one that suits the layer's sizes and the axis.
SCALES: tuple[float | None, ...] = (0.01, 0.1, 1.0, None)
FEW = SHORT | {"limit_train": 3000, "epochs": 6, "batch_size": 64, "learning_rate": 2e-3}


def combinations(preset: str, recipe: Mapping[str, Any], full: bool) -> Iterator[Row]:
    """Every combination of the settings that makes a difference."""
    for std, count, axis, stop in itertools.product(SCALES, range(5), ("outputs", "inputs"), (False, True)):
        if (count == 0 and axis == "inputs") or (count <= 1 and stop):
            continue  # nothing is weighted, or there is only one weighted sum: the setting makes no difference
        if std is None and (stop or count == 0):
            continue  # the balanced start is made for routing, with its gradient
        scale = "balanced" if std is None else f"w{std:g}".replace(".", "")
        name = [preset, *[axis] * (count > 0), scale, f"r{count}", *["stop"] * stop]
        words = [
            f"{count} iteration{'s' * (count != 1)}",
            "W balanced" if std is None else f"W of deviation {std:g}",
            *[f"softmax over {axis}"] * (count > 0),
            *["gradient stopped"] * stop,
        ]
        start = {"weight_init": "balanced"} if std is None else {"weight_init": "normal", "weight_std": std}
        routing = {"num_iterations": count, "softmax_over": axis, "stop_gradient": stop, "decoder": False}
        yield Row("-".join(name), ", ".join(words), preset, {**recipe, **start, **routing}, full=full)


TABLE = Table(
    name="routing",
    title="Routing: softmax axis, initial scale, gradient, iterations",
    rows=(*combinations("compact", FEW, full=False), *combinations("sabour2017", SHORT | {"epochs": 20}, full=True)),
    figures=("iterations", "epochs"),
)
