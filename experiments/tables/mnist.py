"""(a) MNIST: routing iterations and reconstruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.table import Row, Table
from experiments.tables.recipes import (
    COMPACT_SIZE,
    MATCHED_TITLE,
    SHORT,
    SMALL_BASELINE,
    SMALL_BASELINE_TITLE,
    TWIN,
    TWIN_TITLE,
)
from torchcaps.models.presets import get_preset
from torchcaps.parts import flat
from torchcaps.training.config import make_config

#: The reconstruction's weight, and 20 times as much: the authors' code shrinks the margin loss to a 20th instead.
WEIGHT: float = flat(get_preset("sabour2017").network)["reconstruction_weight"]
STRONG = ("strong", "stronger", {"reconstruction_weight": 20 * WEIGHT})
WEAK = ("weak", "weaker", {"reconstruction_weight": WEIGHT / 20})
#: The authors' 300,000 steps and decay; the paper says of its own only that it decays exponentially.
DECAY = {"schedule": "decay-by-step", "decay": 0.96, "decay_steps": 2000, "min_learning_rate": 1e-6}
AUTHORS: dict[str, Any] = {"epochs": 700} | DECAY
THREE_EPOCHS = {"epochs": 3, "batch_size": 64, "schedule": "one-cycle", "learning_rate": 2e-3}
#: The paper's rows: overrides, words, the published error and its words.
PAPER: dict[str, tuple[dict[str, Any], str, float, str]] = {
    "r1": ({"num_iterations": 1, "decoder": False}, "1 iteration, no reconstruction", 0.34, "0.34 ± 0.032 %"),
    "r1-recon": ({"num_iterations": 1}, "1 iteration, reconstruction", 0.29, "0.29 ± 0.011 %"),
    "r3": ({"decoder": False}, "3 iterations, no reconstruction", 0.35, "0.35 ± 0.036 %"),
    "r3-recon": ({}, "3 iterations, reconstruction", 0.25, "0.25 ± 0.005 %"),
}


def family(
    name: str,
    title: str,
    preset: str,
    recipe: Mapping[str, Any],
    other: tuple[str, str, Mapping[str, Any]],
    full: bool = False,
) -> Iterator[Row]:
    """The paper's rows with one network, which may be the paper's own, and a row with another weight."""
    for variant, (overrides, words, error, text) in PAPER.items():
        published: dict[str, Any] = {"published": text, "published_error": error} if name == "sabour2017" else {}
        yield Row(f"{name}-{variant}", f"{title}: {words}", preset, {**recipe, **overrides}, full=full, **published)
    suffix, comparative, weight = other
    title = f"{title}: 3 iterations, reconstruction 20 times {comparative}"
    yield Row(f"{name}-r3-recon-{suffix}", title, preset, {**recipe, **weight}, full=full)


LONG, PAPERS = "compact, its own longer recipe", "the paper's network, 3 epochs of one-cycle"
STRONGER = "reconstruction 20 times stronger"
SMALL_CODE = COMPACT_SIZE | SHORT
TWIN_LONG = TWIN | make_config("compact").recipe.to_dict()

TABLE = Table(
    name="mnist",
    title="MNIST: routing iterations and reconstruction",
    rows=(
        Row("baseline-small", SMALL_BASELINE_TITLE, "baseline-cnn", SMALL_BASELINE | SHORT),
        Row("cnn-twin", TWIN_TITLE, "cnn-matched", TWIN | SHORT),
        *family("compact", "compact", "compact", SHORT, STRONG),
        *family("compact-code", "compact after the authors' code", "sabour2017-code", SMALL_CODE, WEAK),
        *family("sabour2017", "the paper's network", "sabour2017", AUTHORS, STRONG, full=True),
        *family("code", "the authors' code", "sabour2017-code", {}, WEAK, full=True),
        Row("compact", f"{LONG}, turned and scaled too", "compact", {}),
        Row("compact-long-r3", f"{LONG}, no reconstruction", "compact", {"decoder": False}),
        Row("compact-long-r3-recon-strong", f"{LONG}, {STRONGER}", "compact", STRONG[2]),
        Row("cnn-twin-long", f"{TWIN_TITLE}; compact's longer recipe", "cnn-matched", TWIN_LONG),
        Row("sabour2017-3-epochs", PAPERS, "sabour2017", THREE_EPOCHS, published="0.25 ± 0.005 %, trained to the end"),
        Row("sabour2017-3-epochs-strong", f"{PAPERS}, {STRONGER}", "sabour2017", THREE_EPOCHS | STRONG[2]),
        Row("baseline-cnn", "the paper's CNN", "baseline-cnn", AUTHORS, full=True, published_error=0.39),
        Row("cnn-matched", MATCHED_TITLE, "cnn-matched", AUTHORS, full=True),
    ),
)
