"""(f) Robustness: rotation and adversarial changes."""

from __future__ import annotations

from functools import partial

from experiments.table import FULL, Row, Table
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
full = partial(Row, measures={"rotation": None, **dict.fromkeys(ATTACKS, 2000)}, budgets=FULL)

TABLE = Table(
    name="robustness",
    title="Robustness: rotation and adversarial changes",
    question="Do capsules withstand rotated digits and adversarial changes better than CNNs?",
    protocol="""
        Networks are trained on MNIST with shifts of up to 2 pixels. (Those of the small budget are trained as
        `baseline-small`, `cnn-twin` and `compact-r3-recon` of the table MNIST, with the same seeds, so their test
        errors are the same.) They are tested on test images that are rotated by −90° to 90°, or changed by FGSM and PGD
        (20 steps, random start) by at most ε in each pixel (0..1). The attacks follow the gradient of the network's own
        loss; those *on the scores* follow that of the difference between the best wrong score and the right one. The
        margin loss is flat, without gradient, where an image is classified with enough margin. An attack along a
        capsule network's own loss then stands still or, where there is a decoder, increases the reconstruction error
        instead, which looks like robustness and is none. Take the attacks on the loss as upper bounds of the accuracy,
        and compare networks by those on the scores.
    """,
    budgets={
        "small": """
            Networks of `compact`'s size, 3 epochs; rotations of 2,000, attacks on 500 test images: about an hour on 2
            cores for 3 seeds.
        """,
        "full": "The paper's network and CNN, and a CNN of its parameter count; attacks on 2,000 test images.",
    },
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
