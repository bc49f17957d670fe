"""(b) Routing: softmax axis, initial scale, gradient, iterations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.table import FULL, SMALL, Budget, Row, Table
from experiments.tables.recipes import SHORT

#: Deviations of W at the start; None: the one that suits the layer's sizes and the axis.
SCALES: tuple[float | None, ...] = (0.01, 0.1, 1.0, None)
FEW = SHORT | {"limit_train": 3000, "epochs": 6, "batch_size": 64, "learning_rate": 2e-3}


def combinations(preset: str, recipe: Mapping[str, Any], budgets: tuple[Budget, ...]) -> Iterator[Row]:
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
        yield Row("-".join(name), ", ".join(words), preset, {**recipe, **start, **routing}, budgets=budgets)


TABLE = Table(
    name="routing",
    title="Routing: softmax axis, initial scale, gradient, iterations",
    question="""
        Over which axis should the softmax go, how large should the transformation matrices start, should gradients flow
        through all iterations, and how many iterations should there be?
    """,
    protocol="""
        The rows are every combination of the softmax axis, the initial deviation of W (0.01, 0.1 and 1, which are those
        of `torch-tutorial`, `sabour2017` and `torch-notebook`), the gradient (through all iterations, or through the
        last weighted sum only) and 0 to 4 iterations, without decoder. 0 is the plain sum of the votes, without squash;
        1 is uniform coupling. Where a setting makes no difference there is one row. A deviation that suits one axis
        does not suit the other, so *balanced* rows start each axis with the deviation that torchcaps computes for it.
        All rows have the same learning rate.
    """,
    budgets={
        "small": """
            `compact` is trained on the first 3,000 training images for 6 epochs, which are 276 steps, so that rows show
            how learning starts as much as where it ends: an hour and a quarter on 2 cores for 3 seeds.
        """,
        "full": "The paper's network on all training images, 20 epochs.",
    },
    rows=(*combinations("compact", FEW, SMALL), *combinations("sabour2017", SHORT | {"epochs": 20}, FULL)),
    figures=("iterations", "epochs"),
)
