"""(f) Robustness: rotation and adversarial changes."""

from __future__ import annotations

from functools import partial

from experiments.table import Row, Table
from experiments.tables.recipes import (
    MATCHED_TITLE,
    SHORT,
    SMALL_BASELINE,
    SMALL_BASELINE_TITLE,
    TWIN,
    TWIN_TITLE,
)

ATTACKS = ("fgsm", "pgd", "fgsm-scores", "pgd-scores")
small = partial(Row, measures={"rotation": 2000, **dict.fromkeys(ATTACKS, 500)})
full = partial(Row, measures={"rotation": None, **dict.fromkeys(ATTACKS, 2000)}, full=True)

TABLE = Table(
    name="robustness",
    title="Robustness: rotation and adversarial changes",
    rows=(
        small("baseline-small", SMALL_BASELINE_TITLE, "baseline-cnn", SMALL_BASELINE | SHORT),
        small("cnn-twin", TWIN_TITLE, "cnn-matched", TWIN | SHORT),
        small("compact-r3", "compact, 3 iterations, reconstruction", "compact", SHORT),
        full("baseline-cnn", "the paper's CNN", "baseline-cnn"),
        full("cnn-matched", MATCHED_TITLE, "cnn-matched"),
        full("sabour2017", "the paper's network", "sabour2017"),
    ),
    figures=("robustness",),
)
