"""The field's routings side by side: one network in which only the head changes, and the published networks.

The learning rate of each head is the best of three on validation images, which the table ``zoo-search`` tries; its runs
say that it is :data:`LEARNING_RATE` for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.table import VIEWPOINTS, Row, Table

#: What networks that are compared leave out, though `compact`'s own recipe has it.
NOT_TURNED: dict[str, Any] = {"max_rotation": 0.0, "max_scaling": 0.0}
#: The best one of every head, on views and on digits, and of both long runs.
LEARNING_RATE = 3e-3
INVERTED = {"name": "inverted-attention", "num_iterations": 2}
#: What comes after the convolutions: a title, and the pooling of a CNN or the routing of a capsule network.
HEADS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "average-pooling": ("average pooling", {"pooling": "average"}),
    "max-pooling": ("max pooling", {"pooling": "max"}),
    "fully-connected": ("fully connected", {"pooling": "none"}),
    "uniform": ("uniform coupling", {"num_iterations": 1}),
    "dynamic": ("dynamic routing, 3 iterations", {"num_iterations": 3}),
    "self": ("self-routing", {"routing": "self"}),
    "self-attention": ("self-attention routing", {"routing": "self-attention"}),
    "inverted-attention": ("inverted dot-product attention, 2 iterations", {"routing": INVERTED}),
    "em": ("EM routing, 2 iterations", {"routing": {"name": "em", "num_iterations": 2}}),
    "vb": ("variational Bayes routing, 3 iterations", {"routing": {"name": "vb", "num_iterations": 3}}),
    "shared": ("one matrix for each class, uniform coupling", {"num_iterations": 1, "transform": "shared"}),
}
#: 8 types of primary capsules, with activations, and a capsule of 16 components for each class.
BACKBONE: dict[str, Any] = {"stack_channels": (32, 64, 64), "stack_kernels": (5, 3, 3), "stack_strides": (2, 2, 1)}
BACKBONE |= {"backbone": "stack", "stack_padding": 1, "stack_norm": "batch"}
PRIMARY: dict[str, Any] = {
    "primary_types": 8,
    "primary_dim": 16,
    "primary_kernel": 3,
    "primary_stride": 2,
    "primary_padding": 1,
}
PRIMARY |= {"primary_output": "squash", "primary_norm": "batch", "primary_activations": True}
LOSS = {"classification_loss": "score-cross-entropy", "score_scale": 10.0, "learn_score_scale": True}
LAYER = {"capsule_dim": 16, "transform": "dense", "weight_init": "balanced", "decoder": False}
CAPSULES: dict[str, Any] = {**BACKBONE, **PRIMARY, **LOSS, **LAYER}

RECIPE: dict[str, Any] = NOT_TURNED | {"schedule": "one-cycle", "adam": "torch", "validation": "random"}
VIEWS = {"epochs": 10, "batch_size": 64, "max_shift": 2}
DIGITS = {"epochs": 5, "batch_size": 128, "max_shift": 2}
NORB = {"epochs": 25, "batch_size": 64, "max_shift": 4}
MOVED = "affNIST, trained on MNIST digits that were only moved"
FAMILIAR = {"familiar": None}
#: Groups of rows, by what their names begin with: heading, data, recipe, what else is measured; then other fields.
GROUPS: dict[str, tuple[Any, ...]] = {
    "azimuth": ("viewpoints, novel azimuths", "viewpoints-azimuth", VIEWS, FAMILIAR, {"seeds": 5}),
    "elevation": ("viewpoints, novel elevations", "viewpoints-elevation", VIEWS, FAMILIAR, {"seeds": 5}),
    "affnist": (MOVED, "mnist-40", DIGITS | {"max_shift": 6}, {"affnist": 32_000}, {}),
    "mnist": ("MNIST", "mnist", DIGITS, {}, {}),
    "norb-azimuth": ("smallNORB, novel azimuths", "smallnorb-azimuth", NORB, FAMILIAR, {"full": True}),
    "norb-elevation": ("smallNORB, novel elevations", "smallnorb-elevation", NORB, FAMILIAR, {"full": True}),
}


def head_row(name: str, title: str, head: str, recipe: Mapping[str, Any], rate: float, **fields: Any) -> Row:
    """A row of a network with a head: ``cnn-pooled``, or ``compact`` with all its options overridden."""
    changed = HEADS[head][1]
    preset, network = ("cnn-pooled", changed) if "pooling" in changed else ("compact", CAPSULES | {**changed})
    plugins = (VIEWPOINTS,) if fields["data"].startswith("viewpoints") else ()
    return Row(name, title, preset, {**network, **RECIPE, **recipe, "learning_rate": rate}, plugins=plugins, **fields)


def heads() -> Iterator[Row]:
    """Each head on the images of each group."""
    for prefix, (heading, data, recipe, measures, more) in GROUPS.items():
        for name, (title, head) in HEADS.items():
            measured = {**measures, "latency": None} | ({} if "pooling" in head else {"coupling": 1000})
            other = None if name == "uniform" else f"{prefix}-uniform"
            fields = {"data": data, "group": heading, "measures": measured, "compared_to": other, **more}
            yield head_row(f"{prefix}-{name}", title, name, recipe, LEARNING_RATE, **fields)


PUBLISHED = {
    "sabour2017": "dynamic routing (Sabour and others 2017)",
    "efficient-capsnet-mnist": "self-attention (Efficient-CapsNet, Mazzia and others 2021)",
    "hinton2018-paper": "EM routing as the paper has it (Hinton and others 2018)",
    "hinton2018-code": "EM routing as its authors' code has it",
    "vb2020": "variational Bayes routing (De Sousa Ribeiro and others 2020)",
    "hahn2019-smallnet": "self-routing (Hahn and others 2019)",
    "cnn-pooled": "a CNN with the mean of each channel",
}
#: Those of smallNORB are not cut and made brighter here: MNIST's digits fill their images.
ON_MNIST: dict[str, Any] = NOT_TURNED | {"crop": None, "brightness": 0.0, "contrast": 0.0, "max_shift": 2}
EIGHT_TYPES = {"primary_types": 8, "layer_types": 8, "num_iterations": 2}
#: A large step at once: with a small one a class whose activation starts near one stays there.
EM_RECIPE: dict[str, Any] = {"learning_rate": 1e-2, "decay_steps": 200, "epochs": 10, "batch_size": 32, "max_shift": 1}
EM_RECIPE |= {"compete_over": "types"}
VB_RECIPE = {"learning_rate": LEARNING_RATE, "schedule": "one-cycle", "epochs": 5, "batch_size": 64, "max_shift": 0}
SIXTEEN = "0.9 % (16 types, 50 epochs, the best on the test images)"
#: Networks with eight types of capsules: preset, routing, recipe, what its source reports.
EM = ("hinton2018-paper", "EM routing", EM_RECIPE, SIXTEEN)
VB = ("vb2020", "variational Bayes routing", VB_RECIPE, "")


def published() -> Iterator[Row]:
    """The published networks on MNIST, for three epochs and for as many as their sources; two with eight types."""
    heading = "The published networks on MNIST, each with its own loss and optimiser"
    for suffix, length in (("-short", {"epochs": 3, "limit_train": 10_000}), ("", {})):
        for name, title in PUBLISHED.items():
            fields: dict[str, Any] = {"full": not suffix, "measures": {"latency": None}, "group": heading}
            yield Row(f"{name}{suffix}", title, name, ON_MNIST | length, **fields)
    heading = "Capsules on maps with 8 types in each of three layers (A=64, B=C=D=8) on MNIST"
    for name, title, recipe, source in (EM, VB):
        fields = {"measures": {"latency": None}, "group": heading, "published": source}
        title = f"{title} ({name}), 2 iterations, {recipe['epochs']} epochs"
        yield Row(f"{name}-8", title, name, ON_MNIST | EIGHT_TYPES | recipe, **fields)


FIVE_CONVOLUTIONS: dict[str, Any] = {"stack_channels": (32, 64, 64, 80, 80), "stack_kernels": (5, 3, 3, 3, 3)}
FIVE_CONVOLUTIONS |= {"stack_strides": (1, 1, 1, 2, 1), "stack_padding": 0}
EFFICIENT = "Efficient-CapsNet, 161,824 parameters and a decoder"
BEST_EPOCH = "0.26 % (99.74 % accuracy, the best epoch on the test images)"
#: Title, preset, what is changed of it, and what its source reports, by the names of their rows.
LONG: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "efficient-capsnet": (EFFICIENT, "efficient-capsnet-mnist", {}, BEST_EPOCH),
    "cnn": ("a CNN of 161,226 parameters", "cnn-pooled", FIVE_CONVOLUTIONS, ""),
}
TURNED: dict[str, Any] = {"adam_eps": 1e-8, "batch_size": 64, "max_shift": 2, "max_rotation": 15, "max_scaling": 0.1}


def long_row(name: str, title: str, network: str, recipe: Mapping[str, Any], rate: float, **fields: Any) -> Row:
    """A row of one of the two networks of a size."""
    _, preset, changes, _ = LONG[network]
    overrides = {**changes, **RECIPE, **TURNED, **recipe, "learning_rate": rate}
    return Row(f"long-{name}", title, preset, overrides, **fields)


def long() -> Iterator[Row]:
    """The two networks, trained long."""
    heading = "Efficient-CapsNet beside a CNN of its size on MNIST, 30 epochs"
    for network, (title, _, _, source) in LONG.items():
        fields = {"group": heading, "compared_to": None if network == "cnn" else "long-cnn", "published": source}
        yield long_row(network, title, network, {"epochs": 30}, LEARNING_RATE, measures={"latency": None}, **fields)


ZOO = Table(name="zoo", title="The field's routings side by side", rows=(*heads(), *published(), *long()))

# ---- the search of the learning rates, on validation images

SEARCHED = (3e-4, 1e-3, 3e-3)
#: Of the runs that choose among them; no run of the tables has it.
SEED = 100
SEARCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "views": ("viewpoints, familiar azimuths", "viewpoints-azimuth", VIEWS),
    "digits": ("12,000 MNIST digits", "mnist", DIGITS | {"limit_train": 12_000}),
}
LONGER = "12,000 MNIST digits, turned, shifted and scaled, ten epochs"


def searched() -> Iterator[Row]:
    """Each head, and each network of the long runs, with each learning rate, tested on one image."""
    once: dict[str, Any] = {"seeds": 1, "first_seed": SEED}
    for prefix, (heading, data, recipe) in SEARCHES.items():
        for (name, (title, _)), rate in itertools.product(HEADS.items(), SEARCHED):
            row, words = f"{prefix}-{name}-{rate * 1e4:.0f}", f"{title}, learning rate {rate:g}"
            yield head_row(row, words, name, recipe | {"limit_test": 1}, rate, data=data, group=heading, **once)
    recipe = {"epochs": 10, "limit_train": 12_000, "limit_test": 1}
    for (network, (title, *_)), rate in itertools.product(LONG.items(), SEARCHED):
        row, words = f"{network}-{rate * 1e4:.0f}", f"{title}, learning rate {rate:g}"
        yield long_row(row, words, network, recipe, rate, group=LONGER, **once)


SEARCH = Table(name="zoo-search", title="The learning rates of the routings", rows=tuple(searched()))
