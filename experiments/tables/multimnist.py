"""(c) MultiMNIST: two overlapping digits."""

from __future__ import annotations

from functools import partial

from experiments.table import Row, Table
from experiments.tables.recipes import COMPACT_SIZE, SHORT, TWIN, TWIN_TITLE
from torchcaps.training.config import make_config

CAPSULES, CNN = "sabour2017-multimnist", "baseline-cnn-multimnist"
PAIRS = SHORT | {"epochs": 4, "max_shift": 0}  # the digits are shifted where they are put together
LONG = {"epochs": 1000}
LONG_R1 = LONG | {"num_iterations": 1}
_RECIPE = make_config(CAPSULES).recipe
DECAY = {name: getattr(_RECIPE, name) for name in ("schedule", "decay", "decay_steps", "min_learning_rate")}
FEWER_TITLE = "the paper's CNN for MultiMNIST with fewer channels, of compact's parameter count"
FEWER_CHANNELS = {"channels": (32, 16), "hidden": (1513,)}
FITTED_TWIN = TWIN | {"hidden": (580,), "first_kernel": None, "dropout": 0.5}
small = partial(Row, data="multimnist")
full = partial(Row, data="multimnist", full=True)

TABLE = Table(
    name="multimnist",
    title="MultiMNIST: two overlapping digits",
    rows=(
        small("baseline-small", FEWER_TITLE, CNN, FEWER_CHANNELS | PAIRS | {"learning_rate": 6e-3}),
        small("cnn-twin", TWIN_TITLE, CNN, FITTED_TWIN | PAIRS),
        small("compact-r1", "compact, 1 iteration", CAPSULES, COMPACT_SIZE | {"num_iterations": 1} | PAIRS),
        small("compact-r3", "compact, 3 iterations", CAPSULES, COMPACT_SIZE | PAIRS),
        full("baseline-cnn", "the paper's CNN for MultiMNIST", CNN, LONG | DECAY, published_error=8.1),
        full("sabour2017-r1", "the paper's network, 1 iteration", CAPSULES, LONG_R1, published_error=7.5),
        full("sabour2017-r3", "the paper's network, 3 iterations", CAPSULES, LONG, published_error=5.2),
    ),
)
