"""The paper's tables, and the tables of the field's routings, as rows.

(a) MNIST; (b) routing; (c) MultiMNIST; (d) affNIST; (e) the tutorials; (f) robustness; (g) the zoo, see ``zoo.py``;
(h) networks for pixels, see ``pixels.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import runpy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.grades import GRADES, GRADES_SEARCH
from experiments.leaks import LEAKS
from experiments.objects import OBJECTS, OBJECTS_SEARCH
from experiments.pixels import PIXELS, PIXELS_SEARCH
from experiments.store import read_runs
from experiments.table import Row, Table
from experiments.zoo import NOT_TURNED, SEARCH, ZOO
from torchcaps.errors import InputError, unknown_name
from torchcaps.models.presets import get_preset
from torchcaps.parts import flat
from torchcaps.training.config import make_config

COMPACT = flat(get_preset("compact").network)
SIZES = """stem_channels stem_strides conv_channels conv_kernel conv_stride conv_norm conv_dropout primary_types
           primary_dim primary_kernel primary_stride capsule_dim decoder_hidden"""
#: What brings another preset to the size of `compact`.
COMPACT_SIZE = {name: COMPACT[name] for name in SIZES.split()}

# Two CNNs with as many parameters as `compact` on the same images, to 1 %. The twin has `compact`'s own convolutions
# before the primary one; then a pooled 5×5 convolution, dense layers and cross-entropy where `compact` has primary
# capsules, class capsules and a decoder. The other is the paper's baseline with fewer channels.
TWIN: dict[str, Any] = {name: COMPACT[name] for name in ("conv_norm", "conv_dropout")}
TWIN |= {"stem_channels": (*COMPACT["stem_channels"], COMPACT["conv_channels"])}
TWIN |= {"stem_strides": (*COMPACT["stem_strides"], COMPACT["conv_stride"])}
TWIN |= {"channels": (64,), "kernel": 5, "pool": 2, "hidden": (563,)}
TWIN_TITLE = "CNN: compact's stem and parameter count, then a 5×5 convolution and dense layers"
SMALL_CNN = {"channels": (32, 32, 16), "hidden": (82, 48)}
SMALL_CNN_TITLE = "the paper's CNN with fewer channels, of compact's parameter count"
MATCHED_TITLE = "CNN that pools, of sabour2017's parameter count"
#: The small rows' recipe on whole MNIST.
ONE_CYCLE = {"schedule": "one-cycle", "learning_rate": 3e-3}
SHORT: dict[str, Any] = NOT_TURNED | ONE_CYCLE | {"epochs": 3, "batch_size": 128, "max_shift": 2}

# ---- (a) MNIST

#: The reconstruction's weight, and 20 times as much: the authors' code shrinks the margin loss to a 20th instead.
WEIGHT: float = flat(get_preset("sabour2017").network)["reconstruction_weight"]
WEIGHTS = {name: {"reconstruction_weight": each} for name, each in (("strong", 20 * WEIGHT), ("weak", WEIGHT / 20))}
#: The authors' 300,000 steps and decay; the paper only mentions an exponential decay.
DECAY = {"schedule": "decay-by-step", "decay": 0.96, "decay_steps": 2000, "min_learning_rate": 1e-6}
AUTHORS: dict[str, Any] = {"epochs": 700} | DECAY
THREE_EPOCHS: dict[str, Any] = {"epochs": 3, "batch_size": 64, "schedule": "one-cycle", "learning_rate": 2e-3}
#: The paper's rows: overrides, words, the published error.
PAPER: dict[str, tuple[dict[str, Any], str, str]] = {
    "r1": ({"num_iterations": 1, "decoder": False}, "1 iteration, no reconstruction", "0.34 ± 0.032 %"),
    "r1-recon": ({"num_iterations": 1}, "1 iteration, reconstruction", "0.29 ± 0.011 %"),
    "r3": ({"decoder": False}, "3 iterations, no reconstruction", "0.35 ± 0.036 %"),
    "r3-recon": ({}, "3 iterations, reconstruction", "0.25 ± 0.005 %"),
}


def family(
    name: str, title: str, preset: str, recipe: Mapping[str, Any], weight: str, full: bool = False
) -> Iterator[Row]:
    """The paper's rows with one network, which may be the paper's own, and a row with another weight."""
    for variant, (overrides, words, published) in PAPER.items():
        fields: dict[str, Any] = {"full": full, "published": published if name == "sabour2017" else ""}
        yield Row(f"{name}-{variant}", f"{title}: {words}", preset, {**recipe, **overrides}, **fields)
    title = f"{title}: 3 iterations, reconstruction 20 times {weight}er"
    yield Row(f"{name}-r3-recon-{weight}", title, preset, {**recipe, **WEIGHTS[weight]}, full=full)


LONG, STRONGER = "compact, its own longer recipe", WEIGHTS["strong"]
PAPERS = "the paper's network, 3 epochs of one-cycle"
PAPERS_STRONG = f"{PAPERS}, reconstruction 20 times stronger"
TWIN_LONG = TWIN | make_config("compact").recipe.to_dict()
UNDER = "0.25 ± 0.005 %, trained to the end"
MNIST = Table(
    name="mnist",
    title="MNIST: routing iterations and reconstruction",
    rows=(
        Row("baseline-small", SMALL_CNN_TITLE, "baseline-cnn", SMALL_CNN | SHORT),
        Row("cnn-twin", TWIN_TITLE, "cnn-matched", TWIN | SHORT),
        *family("compact", "compact", "compact", SHORT, "strong"),
        *family("compact-code", "compact after the authors' code", "sabour2017-code", COMPACT_SIZE | SHORT, "weak"),
        *family("sabour2017", "the paper's network", "sabour2017", AUTHORS, "strong", full=True),
        *family("code", "the authors' code", "sabour2017-code", {}, "weak", full=True),
        Row("compact", f"{LONG}, turned and scaled too", "compact"),
        Row("compact-long-r3", f"{LONG}, no reconstruction", "compact", {"decoder": False}),
        Row("compact-long-r3-recon-strong", f"{LONG}, reconstruction 20 times stronger", "compact", STRONGER),
        Row("cnn-twin-long", f"{TWIN_TITLE}; compact's longer recipe", "cnn-matched", TWIN_LONG),
        Row("sabour2017-3-epochs", PAPERS, "sabour2017", THREE_EPOCHS, published=UNDER),
        Row("sabour2017-3-epochs-strong", PAPERS_STRONG, "sabour2017", THREE_EPOCHS | STRONGER),
        Row("baseline-cnn", "the paper's CNN", "baseline-cnn", AUTHORS, full=True, published="0.39 %"),
        Row("cnn-matched", MATCHED_TITLE, "cnn-matched", AUTHORS, full=True),
    ),
)

# ---- (b) routing

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
        words = [f"{count} iteration{'s' * (count != 1)}", "W balanced" if std is None else f"W of deviation {std:g}"]
        words += [f"softmax over {axis}"] * (count > 0) + ["gradient stopped"] * stop
        start = {"weight_init": "balanced"} if std is None else {"weight_init": "normal", "weight_std": std}
        routing = {"num_iterations": count, "softmax_over": axis, "stop_gradient": stop, "decoder": False}
        yield Row("-".join(name), ", ".join(words), preset, {**recipe, **start, **routing}, full=full)


ROUTING = Table(
    name="routing",
    title="Routing: softmax axis, initial scale, gradient, iterations",
    rows=(*combinations("compact", FEW, full=False), *combinations("sabour2017", SHORT | {"epochs": 20}, full=True)),
)

# ---- (c) MultiMNIST

CAPSULES, CNN = "sabour2017-multimnist", "baseline-cnn-multimnist"
PAIRS = SHORT | {"epochs": 4, "max_shift": 0}  # the digits are shifted where they are put together
MANY = {"epochs": 1000}
ONCE = MANY | {"num_iterations": 1}
RECIPE = make_config(CAPSULES).recipe
AS_CAPSULES = {name: getattr(RECIPE, name) for name in ("schedule", "decay", "decay_steps", "min_learning_rate")}
FEWER_TITLE = "the paper's CNN for MultiMNIST with fewer channels, of compact's parameter count"
FEWER = {"channels": (32, 16), "hidden": (1513,), "learning_rate": 6e-3}
FITTED = {"hidden": (580,), "first_kernel": None, "dropout": 0.5}
two = partial(Row, data="multimnist")
MULTIMNIST = Table(
    name="multimnist",
    title="MultiMNIST: two overlapping digits",
    rows=(
        two("baseline-small", FEWER_TITLE, CNN, PAIRS | FEWER),
        two("cnn-twin", TWIN_TITLE, CNN, TWIN | FITTED | PAIRS),
        two("compact-r1", "compact, 1 iteration", CAPSULES, COMPACT_SIZE | {"num_iterations": 1} | PAIRS),
        two("compact-r3", "compact, 3 iterations", CAPSULES, COMPACT_SIZE | PAIRS),
        two("baseline-cnn", "the paper's CNN for MultiMNIST", CNN, MANY | AS_CAPSULES, full=True, published="8.1 %"),
        two("sabour2017-r1", "the paper's network, 1 iteration", CAPSULES, ONCE, full=True, published="7.5 %"),
        two("sabour2017-r3", "the paper's network, 3 iterations", CAPSULES, MANY, full=True, published="5.2 %"),
    ),
)

# ---- (d) affNIST

#: Training digits lie in the middle of 40×40; those to validate and test by are moved already.
MOVED = NOT_TURNED | {"schedule": "constant", "learning_rate": 1e-3, "batch_size": 128, "max_shift": 6}
UNTIL = MOVED | {"epochs": 8, "stop_at": 0.985}
UNTIL_LONG = MOVED | {"epochs": 300, "stop_at": 0.9923}
small = partial(Row, data="mnist-40", measures={"affnist": 32_000})
full = partial(Row, data="mnist-40", measures={"affnist": None}, full=True)
CNN_PUBLISHED = "66 % affNIST accuracy at 99.22 % (the paper's CNN)"
PUBLISHED = "79 % affNIST accuracy at 99.23 %"
AFFNIST = Table(
    name="affnist",
    title="affNIST: generalisation to affine maps that were never trained on",
    rows=(
        small("cnn-twin", TWIN_TITLE, "cnn-matched", TWIN | {"hidden": (592,)} | UNTIL | {"learning_rate": 3e-4}),
        small("compact-r1", "compact, 1 iteration", "compact", UNTIL | {"num_iterations": 1}),
        small("compact-r3", "compact, 3 iterations", "compact", UNTIL),
        full("cnn-matched", MATCHED_TITLE, "cnn-matched", UNTIL_LONG | {"hidden": (1940,)}, published=CNN_PUBLISHED),
        full("sabour2017", "the paper's network, 3 iterations", "sabour2017", UNTIL_LONG, published=PUBLISHED),
    ),
)

# ---- (e) the tutorials

NOTEBOOK, ARTICLE = "0.47 % (99.53 % accuracy)", "0.34 ± 0.029 % (50 epochs)"
MORE, UNKNOWN = "TensorFlow notebook, 10 epochs more", f"{NOTEBOOK}, earlier epochs unknown"
KERAS = {"-r0": "no routing", "-r1": "1 iteration", "-r2": "2 iterations", "-r3": "3 iterations", "": "4 iterations"}
KERAS |= {"-outputs": "softmax over outputs"}
WORSE = {"-outputs": "significantly worse than over inputs"}
keras = [(f"keras-tutorial{n}", f"Keras tutorial, {words}", WORSE.get(n, "")) for n, words in KERAS.items()]
TUTORIALS = Table(
    name="tutorials",
    title="The tutorials' own runs",
    rows=(
        *(Row(name, title, name, published=worse) for name, title, worse in keras),
        Row("tf-notebook", "TensorFlow notebook", "tf-notebook", published=f"{NOTEBOOK}, with earlier epochs"),
        Row("tf-notebook-20-epochs", MORE, "tf-notebook", {"epochs": 20}, full=True, published=UNKNOWN),
        Row("torch-notebook-1-epoch", "PyTorch notebook: 1 epoch", "torch-notebook", {"epochs": 1}),
        Row("torch-notebook", "PyTorch notebook", "torch-notebook", full=True),
        Row("torch-tutorial-1-epoch", "PyTorch article: 1 epoch", "torch-tutorial", {"epochs": 1}, published=ARTICLE),
        Row("torch-tutorial", "PyTorch article", "torch-tutorial", full=True, published=ARTICLE),
    ),
)

# ---- (f) robustness

ATTACKS = ("fgsm", "pgd", "fgsm-scores", "pgd-scores")
attacked = partial(Row, measures={"rotation": 2000, **dict.fromkeys(ATTACKS, 500)})
attacked_full = partial(Row, measures={"rotation": None, **dict.fromkeys(ATTACKS, 2000)}, full=True)
ROBUSTNESS = Table(
    name="robustness",
    title="Robustness: rotation and adversarial changes",
    rows=(
        attacked("baseline-small", SMALL_CNN_TITLE, "baseline-cnn", SMALL_CNN | SHORT),
        attacked("cnn-twin", TWIN_TITLE, "cnn-matched", TWIN | SHORT),
        attacked("compact-r3", "compact, 3 iterations, reconstruction", "compact", SHORT),
        attacked_full("baseline-cnn", "the paper's CNN", "baseline-cnn"),
        attacked_full("cnn-matched", MATCHED_TITLE, "cnn-matched"),
        attacked_full("sabour2017", "the paper's network", "sabour2017"),
    ),
)

# ---- runs that were started by hand before there were tables: they are their rows


def recorded(name: str) -> Iterator[Row]:
    """A row for each configuration that was recorded under the name of a table."""
    for log in read_runs(Path(__file__).with_name("results")).values():
        if log.table == name and log.seed == 0:
            changed = dict(log.config)
            preset, data = changed.pop("preset"), changed.pop("data", "digits")
            yield Row(log.row, f"{preset} on {log.summary['images']['train']:,} images", preset, changed, data=data)


BY_HAND = Table(name="by-hand", title="Runs before there were tables", rows=tuple(recorded("by-hand")))
SHIPPED = {
    t.name: t
    for t in (
        MNIST,
        ROUTING,
        MULTIMNIST,
        AFFNIST,
        TUTORIALS,
        ROBUSTNESS,
        ZOO,
        SEARCH,
        PIXELS,
        PIXELS_SEARCH,
        GRADES,
        GRADES_SEARCH,
        OBJECTS,
        OBJECTS_SEARCH,
        LEAKS,
        BY_HAND,
    )
}


def load_table(source: str) -> Table:
    """Return the shipped table with a name, or the ``TABLE`` of a Python file.

    Raises:
        InputError: There is no such table.
    """
    if not source.endswith(".py") and source not in SHIPPED:
        raise unknown_name("table", source, SHIPPED)
    table = runpy.run_path(source).get("TABLE") if source.endswith(".py") else SHIPPED[source]
    if not isinstance(table, Table):
        raise InputError(f"{source} has no TABLE = Table(…)")
    return dataclasses.replace(table, source=source)
