"""What a split by image promises, beside what a split by patient, record or field promises, and what is true.

    python experiments/run.py leaks
    python experiments/report.py leaks

Each seed draws other data. The truth is measured on new patients, people and fields, which are drawn like them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.cells import Runs, percent
from experiments.table import Row, Table
from torchcaps.analysis import evaluate
from torchcaps.datasets import ImageSet
from torchcaps.training import Run
from torchcaps.training.config import SCENE_DEFAULTS

#: The rest follows from the images, as for a user's own.
RECIPE = {"epochs": 30}
PLUGIN = str(Path(__file__).with_name("drawn_data.py"))
#: Groups of rows: heading, preset and its options, and for each split its title, drawn data and options.
GROUPS: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "cells": (
        "Cells of 24 patients",
        "compact-shared",
        {"decoder": None},
        {"image": ("by image", "drawn:cells", {}), "patient": ("by patient", "drawn:cells", {"group": "patient"})},
    ),
    "signals": (
        "Records of 24 people, in windows of a second",
        "sequences",
        {},
        {"window": ("by window", "drawn:windows", {}), "record": ("by record", "drawn:records", {"window": 128})},
    ),
    "scene": (
        "A scene of 60 fields, in patches of 5×5 pixels",
        "compact-shared",
        SCENE_DEFAULTS,
        {
            "pixel": ("by pixel", "drawn:patches", {}),
            "block": ("by block", "drawn-scene:scene", {"patch": 5, "scale": (0.0, 1.0)}),
            "field": ("by field", "drawn-scene:scene", {"patch": 5, "scale": (0.0, 1.0), "group": "field"}),
        },
    ),
}


def measure_new(run: Run, test: ImageSet) -> Mapping[str, float]:
    """Return the accuracy on the test images and on all images of new data, percent."""
    assert run.config is not None
    kind, _, name = run.config.data.partition(":")
    new = run.part("all", f"{kind}:new-{name}").images
    return {part: 100 * evaluate(run.model, images).accuracy for part, images in (("test", test), ("new", new))}


def leaking() -> Iterator[Row]:
    """Yield each split of each kind of data."""
    for prefix, (heading, preset, options, splits) in GROUPS.items():
        for split, (title, drawn, more) in splits.items():
            yield Row(
                f"{prefix}-{split}",
                f"split {title}",
                preset,
                RECIPE | options | more,
                data=f"{drawn}-{{seed}}",
                plugins=(PLUGIN,),
                group=heading,
                measures={"accuracy": measure_new},
            )


def leak_lines(prefix: str, runs: Mapping[str, Runs]) -> list[str]:
    """Return the rows of a page's table: each split with its accuracy on test images and on new ones, percent."""
    lines = []
    for split, (title, *_) in GROUPS[prefix][3].items():
        measured = [run.measures["accuracy"] for run in runs[f"{prefix}-{split}"]]
        cells = [percent([each[part] for each in measured]).removesuffix(" %") for part in ("test", "new")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


LEAKS = Table(name="leaks", title="Splits that leak, and splits that do not", rows=tuple(leaking()))
