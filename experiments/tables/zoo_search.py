"""The search of the learning rates of the table ``zoo``, on validation images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.table import Row, Table
from experiments.tables.zoo import DIGITS, HEADS, LONG, VIEWS, head_row, long_row

#: Of every head.
SEARCHED = (3e-4, 1e-3, 3e-3)
#: Of the runs that choose among them; no run of the tables has it.
SEED = 100
SEARCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "views": ("viewpoints, familiar azimuths", "viewpoints-azimuth", VIEWS),
    "digits": ("12,000 MNIST digits", "mnist", DIGITS | {"limit_train": 12_000}),
}


def rows() -> Iterator[Row]:
    """Each head, and each network of the long runs, with each learning rate, tested on one image."""
    once: dict[str, Any] = {"seeds": 1, "first_seed": SEED}
    for prefix, (heading, data, recipe) in SEARCHES.items():
        for name, (title, head) in HEADS.items():
            for rate in SEARCHED:
                suffix, words = f"-{rate * 1e4:.0f}", f"{title}, learning rate {rate:g}"
                fields = {"data": data, "group": heading} | once
                yield head_row(f"{prefix}-{name}{suffix}", words, head, recipe | {"limit_test": 1}, rate, **fields)
    heading = "12,000 MNIST digits, turned, shifted and scaled, ten epochs"
    recipe = {"epochs": 10, "limit_train": 12_000, "limit_test": 1}
    for network, (title, *_) in LONG.items():
        for rate in SEARCHED:
            suffix, words = f"-{rate * 1e4:.0f}", f"{title}, learning rate {rate:g}"
            yield long_row(network, suffix, words, recipe, rate, group=heading, **once)


TABLE = Table(
    name="zoo-search",
    title="The learning rates of the routings",
    rows=tuple(rows()),
    judged_on="validation",
    figures=(),
)
