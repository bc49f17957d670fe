"""(g) The field's routings side by side: one network in which only the head changes, and the published networks.

The learning rate of each head is the best of :data:`SEARCHED` on the validation images, which the table ``zoo-search``
tries: its logs say that it is :data:`LEARNING_RATE` for all (tests/reproduce/test_zoo.py compares them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchcaps.reproduce.table import Budget, Measure, Row, Table
from torchcaps.reproduce.tables.recipes import FULL, NOT_TURNED, SMALL

#: Of every head.
SEARCHED = (3e-4, 1e-3, 3e-3)
#: Of the runs that choose among them; no run of the tables has it.
SEARCH_SEED = 100
#: The best one of every head, on views and on digits, and of both long runs.
LEARNING_RATE = 3e-3

#: 8 types of primary capsules, with activations, and a capsule of 16 components for each class.
_CAPSULES: dict[str, Any] = {
    "backbone": "stack",
    "stack_channels": (32, 64, 64),
    "stack_kernels": (5, 3, 3),
    "stack_strides": (2, 2, 1),
    "stack_padding": 1,
    "stack_norm": "batch",
    "primary_types": 8,
    "primary_dim": 16,
    "primary_kernel": 3,
    "primary_stride": 2,
    "primary_padding": 1,
    "primary_output": "squash",
    "primary_norm": "batch",
    "primary_activations": True,
    "capsule_dim": 16,
    "transform": "dense",
    "weight_init": "balanced",
    "decoder": False,
    "classification_loss": "score-cross-entropy",
    "score_scale": 10.0,
    "learn_score_scale": True,
}
_RECIPE: dict[str, Any] = NOT_TURNED | {"schedule": "one-cycle", "adam": "torch", "validation": "random"}


@dataclass(frozen=True)
class Head:
    """What comes after the convolutions."""

    title: str
    """What it is, in a few words."""
    overrides: Mapping[str, Any]
    """What it changes: the pooling of a CNN, or the routing of a capsule network."""

    @property
    def pools(self) -> bool:
        """Whether it is that of a CNN, which has the primary capsules' convolution in its backbone."""
        return "pooling" in self.overrides

    def row(self, recipe: Mapping[str, Any], learning_rate: float, **fields: Any) -> Row:
        """A row of a network with this head: ``compact`` with all its fields overridden, or ``cnn-pooled``."""
        network = self.overrides if self.pools else _CAPSULES | {**self.overrides}
        overrides = {**network, **_RECIPE, **recipe, "learning_rate": learning_rate}
        return Row(preset="cnn-pooled" if self.pools else "compact", overrides=overrides, **fields)


#: By the names of their rows.
HEADS: dict[str, Head] = {
    "average-pooling": Head("average pooling", {"pooling": "average"}),
    "max-pooling": Head("max pooling", {"pooling": "max"}),
    "fully-connected": Head("fully connected", {"pooling": "none"}),
    "uniform": Head("uniform coupling", {"num_iterations": 1}),
    "dynamic": Head("dynamic routing, 3 iterations", {"num_iterations": 3}),
    "self": Head("self-routing", {"routing": "self"}),
    "self-attention": Head("self-attention routing", {"routing": "self-attention"}),
    "inverted-attention": Head(
        "inverted dot-product attention, 2 iterations",
        {"routing": {"name": "inverted-attention", "num_iterations": 2}},
    ),
    "em": Head("EM routing, 2 iterations", {"routing": {"name": "em", "num_iterations": 2}}),
    "vb": Head("variational Bayes routing, 3 iterations", {"routing": {"name": "vb", "num_iterations": 3}}),
    "shared": Head("one matrix for each class, uniform coupling", {"num_iterations": 1, "transform": "shared"}),
}


@dataclass(frozen=True)
class _Images:
    """The images of a group of rows."""

    heading: str
    data: str
    recipe: Mapping[str, Any]
    seeds: int | None
    budgets: tuple[Budget, ...]
    measures: tuple[Measure, ...] = ()


_VIEWS = {"epochs": 10, "batch_size": 64, "max_shift": 2}
_DIGITS = {"epochs": 5, "batch_size": 128, "max_shift": 2}
_NORB = {"epochs": 25, "batch_size": 64, "max_shift": 4}
_FAMILIAR = (Measure(kind="familiar"),)
#: By what the names of their rows begin with.
_GROUPS: dict[str, _Images] = {
    "azimuth": _Images("viewpoints, novel azimuths", "viewpoints-azimuth", _VIEWS, 5, SMALL, _FAMILIAR),
    "elevation": _Images("viewpoints, novel elevations", "viewpoints-elevation", _VIEWS, 5, SMALL, _FAMILIAR),
    "affnist": _Images(
        "affNIST, trained on MNIST digits that were only moved",
        "mnist-40",
        _DIGITS | {"max_shift": 6},
        None,
        SMALL,
        (Measure(kind="affnist", images=32_000),),
    ),
    "mnist": _Images("MNIST", "mnist", _DIGITS, None, SMALL),
    "norb-azimuth": _Images("smallNORB, novel azimuths", "smallnorb-azimuth", _NORB, None, FULL, _FAMILIAR),
    "norb-elevation": _Images("smallNORB, novel elevations", "smallnorb-elevation", _NORB, None, FULL, _FAMILIAR),
}
#: What the search is made with, by its name.
_SEARCHES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "views": ("viewpoints, familiar azimuths", "viewpoints-azimuth", _VIEWS),
    "digits": ("12,000 MNIST digits", "mnist", _DIGITS | {"limit_train": 12_000}),
}


def _heads() -> Iterator[Row]:
    for prefix, images in _GROUPS.items():
        for name, head in HEADS.items():
            measures = [*images.measures, Measure(kind="latency")]
            if not head.pools:
                measures.append(Measure(kind="coupling", images=1000))
            yield head.row(
                images.recipe,
                LEARNING_RATE,
                name=f"{prefix}-{name}",
                title=head.title,
                data=images.data,
                budgets=images.budgets,
                seeds=images.seeds,
                measures=tuple(measures),
                group=images.heading,
                compared_to=None if name == "uniform" else f"{prefix}-uniform",
            )


_PUBLISHED = {
    "sabour2017": "dynamic routing (Sabour and others 2017)",
    "efficient-capsnet-mnist": "self-attention (Efficient-CapsNet, Mazzia and others 2021)",
    "hinton2018-paper": "EM routing as the paper has it (Hinton and others 2018)",
    "hinton2018-code": "EM routing as its authors' code has it",
    "vb2020": "variational Bayes routing (De Sousa Ribeiro and others 2020)",
    "hahn2019-smallnet": "self-routing (Hahn and others 2019)",
    "cnn-pooled": "a CNN with the mean of each channel",
}
#: Those of smallNORB are not cut and made brighter here: MNIST's digits fill their images.
_ON_MNIST: dict[str, Any] = NOT_TURNED | {"crop": None, "brightness": 0.0, "contrast": 0.0, "max_shift": 2}


def _published() -> Iterator[Row]:
    short = {"epochs": 3, "limit_train": 10_000}
    for suffix, budget, length in (("-short", SMALL, short), ("", FULL, {})):
        for name, title in _PUBLISHED.items():
            yield Row(
                name=f"{name}{suffix}",
                title=title,
                preset=name,
                data="mnist",
                overrides=_ON_MNIST | length,
                budgets=budget,
                measures=(Measure(kind="latency"),),
                group="The published networks on MNIST, each with its own loss and optimiser",
            )


def _eight_types() -> Iterator[Row]:
    recipes: dict[str, dict[str, Any]] = {
        # a large step at once: with a small one a class whose activation starts near one stays there
        "hinton2018-paper": {
            "learning_rate": 1e-2,
            "decay_steps": 200,
            "epochs": 10,
            "batch_size": 32,
            "max_shift": 1,
            "compete_over": "types",
        },
        "vb2020": {
            "learning_rate": LEARNING_RATE,
            "schedule": "one-cycle",
            "epochs": 5,
            "batch_size": 64,
            "max_shift": 0,
        },
    }
    for name, title in (("hinton2018-paper", "EM routing"), ("vb2020", "variational Bayes routing")):
        yield Row(
            name=f"{name}-8",
            title=f"{title} ({name}), 2 iterations, {recipes[name]['epochs']} epochs",
            preset=name,
            data="mnist",
            overrides={
                **_ON_MNIST,
                "primary_types": 8,
                "layer_types": 8,
                "num_iterations": 2,
                **recipes[name],
            },
            budgets=SMALL,
            measures=(Measure(kind="latency"),),
            group="Capsules on maps with 8 types in each of three layers (A=64, B=C=D=8) on MNIST",
        )


#: Title, preset, and what is changed of it, by the names of their rows.
LONG: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "efficient-capsnet": ("Efficient-CapsNet, 161,824 parameters and a decoder", "efficient-capsnet-mnist", {}),
    "cnn": (
        "a CNN of 161,226 parameters",
        "cnn-pooled",
        {
            "stack_channels": (32, 64, 64, 80, 80),
            "stack_kernels": (5, 3, 3, 3, 3),
            "stack_strides": (1, 1, 1, 2, 1),
            "stack_padding": 0,
        },
    ),
}
_TURNED: dict[str, Any] = {"batch_size": 64, "max_shift": 2, "max_rotation": 15, "max_scaling": 0.1}


def _long_row(network: str, suffix: str, recipe: Mapping[str, Any], learning_rate: float, **fields: Any) -> Row:
    _, preset, changes = LONG[network]
    overrides = {**changes, **_RECIPE, "adam_eps": 1e-8, **_TURNED, **recipe, "learning_rate": learning_rate}
    return Row(
        name=f"long-{network}{suffix}", preset=preset, data="mnist", overrides=overrides, budgets=SMALL, **fields
    )


def _long() -> Iterator[Row]:
    for network, (title, *_) in LONG.items():
        yield _long_row(
            network,
            "",
            {"epochs": 30},
            LEARNING_RATE,
            title=title,
            measures=(Measure(kind="latency"),),
            group="Efficient-CapsNet beside a CNN of its size on MNIST, 30 epochs",
            compared_to=None if network == "cnn" else "long-cnn",
        )


def _searched_long() -> Iterator[Row]:
    for network, (title, *_) in LONG.items():
        for rate in SEARCHED:
            yield _long_row(
                network,
                f"-{rate * 1e4:.0f}",
                {"epochs": 10, "limit_train": 12_000, "limit_test": 1},
                rate,
                title=f"{title}, learning rate {rate:g}",
                seeds=1,
                first_seed=SEARCH_SEED,
                group="12,000 MNIST digits, turned, shifted and scaled, ten epochs",
            )


def _searched() -> Iterator[Row]:
    for prefix, (heading, data, recipe) in _SEARCHES.items():
        for name, head in HEADS.items():
            for rate in SEARCHED:
                yield head.row(
                    {**recipe, "limit_test": 1},
                    rate,
                    name=f"{prefix}-{name}-{rate * 1e4:.0f}",
                    title=f"{head.title}, learning rate {rate:g}",
                    data=data,
                    budgets=SMALL,
                    seeds=1,
                    first_seed=SEARCH_SEED,
                    group=heading,
                )


SEARCH = Table(
    name="zoo-search",
    title="The learning rates of the routings",
    question="Which of three learning rates suits each head of the table of the routings?",
    protocol=(
        "Each head of the table `zoo` is trained once with each learning rate, by the same recipe and with a seed that "
        "no run of that table has. The rate with the lowest validation error after the last epoch is taken, and among "
        "equal ones that with the lowest validation loss. These runs are tested on a single image, so that nothing is "
        "learned about the test set."
    ),
    budgets={"small": "Ten epochs of 2,430 images of objects, five of 12,000 digits, ten for the long runs."},
    rows=(*_searched(), *_searched_long()),
    judged_on="validation",
    figures=(),
)

TABLE = Table(
    name="zoo",
    title="The field's routings side by side",
    question=(
        "Which routing helps, and with what: on objects seen from sides that were never trained on, on digits that are "
        "turned and sheared as they never were in training, and on plain digits?"
    ),
    protocol=(
        "Only the head changes. Three convolutions with batch normalisation are the same in all rows, and so is the "
        "convolution of the primary capsules, 8 types of 16 components, squashed, with activations of their own for "
        "those routings that use them. Capsule heads have a matrix of 16×16 for each pair of capsules (*one matrix for "
        "each class* shares it among all input capsules), no decoder, and cross-entropy of the softmax of the scores "
        "times a learned scale, which starts at 10. A score is the activation of a class capsule, or its length where "
        "the routing gives none. The other heads pool the same 128 channels, after a ReLU, and classify them by one "
        "linear layer. *Uniform coupling* is dynamic routing with one iteration. The number of parameters is not the "
        "same in all rows; it stands below. All rows have Adam, a one-cycle schedule, and the best of the learning "
        "rates 3e-4, 1e-3 and 3e-3, searched on validation images with another seed (table `zoo-search`): once for "
        "viewpoints, on familiar azimuths, and once for digits. The last epoch counts, and the test images are read "
        "once. The difference is that to *uniform coupling* with the same seed. Images of viewpoints are shifted by up "
        "to 2 pixels in training, those of affNIST by up to 6. A familiar view shows a test object from a side that "
        "was trained on. The published networks are trained on 10,000 images for three epochs, each with the loss, the "
        "optimiser and the learning rate of its source, which were not searched. EM and variational Bayes with 64 "
        "channels and 8 types in each layer route twice and are trained on 55,000 digits: EM for ten epochs of digits "
        "that are shifted by up to a pixel, in batches of 32, with 1e-2, which falls by 4 % each 200 steps, its types "
        "competing at each position by themselves as in a published re-implementation; variational Bayes for five "
        "epochs of digits that are not changed, in batches of 64, one-cycle to 3e-3. Of EM three rates and both ways "
        "to compete were compared on training images, for 200 to 800 steps, and three recipes were trained before this "
        "one; of variational Bayes one. "
        "Efficient-CapsNet has 161,824 parameters without its decoder, and stands beside a CNN of five convolutions "
        "with batch normalisation and the mean of each channel, of 161,226: 30 epochs of 55,000 digits in batches of "
        "64, shifted by up to 2 pixels, turned by up to 15 degrees, scaled by up to 10 %, one-cycle, and the best of "
        "the same three learning rates for each (table `zoo-search`), in bfloat16 (`--precision bf16`)."
    ),
    budgets={
        "small": (
            "Ten epochs of 2,430 images of objects, five seeds: 50 minutes on two cores. Five epochs of 55,000 digits, "
            "three seeds: an hour and three quarters of one core, and three hours on digits that are moved, which are "
            "tested on 32,000 of the affNIST images. The long runs, in bfloat16 on a CPU that has it, take 20 and 40 "
            "minutes each. Three epochs of 10,000 digits take 10 seconds (the CNN) to 7 minutes (self-routing) for the "
            "published networks, and 25 to 35 with EM and variational Bayes; five epochs with 8 types an hour."
        ),
        "full": (
            "The same heads on smallNORB, 25 epochs, with the learning rates of viewpoints; the published networks on "
            "all of MNIST, for as many epochs as their sources."
        ),
    },
    rows=(*_heads(), *_published(), *_eight_types(), *_long()),
)
