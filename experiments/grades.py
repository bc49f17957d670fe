"""Grades learned as thresholds, as classes and as a number, by one network.

    python experiments/run.py grades-search     # the learning rates, on validation images
    python experiments/run.py grades
    python experiments/report.py grades

The network is `compact` without its decoder; only its task changes. A number is rounded to the nearest grade.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.table import VIEWPOINTS, Row, Table
from experiments.zoo import NOT_TURNED
from torchcaps.analysis import predict
from torchcaps.analysis.confusion import kappas
from torchcaps.datasets import ImageSet
from torchcaps.training import Run

PLUGINS = (VIEWPOINTS, str(Path(__file__).with_name("graded_images.py")))
#: Tests: title, data set, other settings.
TESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "turned-digits": ("Digits turned by 0, 15, 30, 45 or 60°", {}),
    "elevations": (
        "Objects seen from 30 to 70° above the ground, in nine steps; objects of validation and test are new",
        {"image_size": 28, "group": "object", "validation_size": 1620},
    ),
}
TASKS = {"ordinal": "thresholds", "classes": "classes", "regression": "a number, rounded"}
RECIPE: dict[str, Any] = NOT_TURNED | {
    "decoder": False,
    "schedule": "one-cycle",
    "batch_size": 64,
    "epochs": 8,
    "max_shift": 2,
    "limit_train": 4000,
    "limit_test": 2000,
    "validation_size": 800,
}
SEARCHED = (1e-3, 2e-3, 4e-3)
#: The best of SEARCHED by the validation loss of the last epoch, for each test and task.
LEARNING_RATES: dict[str, dict[str, float]] = {
    "turned-digits": {"ordinal": 2e-3, "classes": 4e-3, "regression": 4e-3},
    "elevations": {"ordinal": 2e-3, "classes": 2e-3, "regression": 2e-3},
}


def measure_grades(run: Run, test: ImageSet) -> Mapping[str, float]:
    """Return quadratic weighted kappa, mean absolute error in grades, and accuracy of the test images."""
    predicted, labels = predict(run.model, test.images), test.labels.numpy()
    grades = predicted.classes
    if run.model.task == "regression":
        values = np.unique(labels)
        grades, labels = (np.abs(each - values).argmin(1) for each in (predicted.scores, labels))
    confusion = np.zeros((labels.max() + 1,) * 2, int)
    np.add.at(confusion, (labels, grades), 1)
    return {
        "kappa": float(kappas(confusion, 2)),
        "mean_absolute_error": float(np.abs(grades - labels).mean()),
        "accuracy": float((grades == labels).mean()),
    }


def row(test: str, task: str, rate: float, name: str, words: str = "", **fields: Any) -> Row:
    """Return a row of a test and a task."""
    title, settings = TESTS[test]
    overrides = RECIPE | settings | {"task": task, "learning_rate": rate} | fields.pop("recipe", {})
    place: dict[str, Any] = {"data": test, "plugins": PLUGINS, "group": title}
    return Row(name, f"grades as {TASKS[task]}{words}", "compact", overrides, **place, **fields)


def compared() -> Iterator[Row]:
    """Yield each task on each test."""
    for test, rates in LEARNING_RATES.items():
        for task, rate in rates.items():
            yield row(test, task, rate, f"{test}-{task}", measures={"grades": measure_grades})


def searched() -> Iterator[Row]:
    """Yield each task with each learning rate, on half of the training images; only one test image."""
    few = {"limit_train": RECIPE["limit_train"] // 2, "limit_test": 1}
    for test, task, rate in itertools.product(TESTS, TASKS, SEARCHED):
        name = f"{test}-{task}-{rate * 1e3:.0f}"
        yield row(test, task, rate, name, f", learning rate {rate:g}", recipe=few, seeds=1, first_seed=100)


GRADES = Table(name="grades", title="Grades as thresholds, classes or a number", rows=tuple(compared()))
GRADES_SEARCH = Table(name="grades-search", title="The learning rates of grades", rows=tuple(searched()))
