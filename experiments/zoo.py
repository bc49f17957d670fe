"""Compare the routings of the field: one network in which only the head changes, and the published networks.

The learning rate of each head is the best of three on validation images (table ``zoo-search``). It is
:data:`LEARNING_RATE` for all heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from experiments.table import VIEWPOINTS, Row, Table

#: Augmentation of the recipe of `compact` that compared networks do not use.
NOT_TURNED: dict[str, Any] = {"max_rotation": 0.0, "max_scaling": 0.0}
#: The best learning rate of every searched head, on views and on digits, and of both long runs.
LEARNING_RATE = 3e-3
INVERTED = {"name": "inverted-attention", "num_iterations": 2}
#: Heads after the convolutions: a title, and the pooling of a CNN or the routing of a capsule network.
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
    "em-code": ("EM routing as its authors' code, 2 iterations", {"routing": {"name": "em-code", "num_iterations": 2}}),
    "b2i": ("behaviour-to-interest routing, 3 iterations", {"routing": {"name": "b2i", "num_iterations": 3}}),
    "heinsen-matrix": ("Heinsen's routing of matrices", {"routing": "heinsen-matrix"}),
    "heinsen-vector": ("Heinsen's routing of vectors", {"routing": "heinsen-vector"}),
    "hvc": ("the sum of homogeneous vector capsules", {"routing": "hvc"}),
    "grouped": ("grouped routing", {"routing": "grouped"}),
}
#: 8 types of primary capsules, with activations, and a capsule of 16 components for each class.
BACKBONE: dict[str, Any] = {"stack_channels": (32, 64, 64), "stack_kernels": (5, 3, 3), "stack_strides": (2, 2, 1)}
BACKBONE |= {"backbone": "stack", "stack_padding": 1, "stack_norm": "batch"}
PRIMARY: dict[str, Any] = {"primary_types": 8, "primary_dim": 16, "primary_kernel": 3, "primary_stride": 2}
PRIMARY |= {"primary_padding": 1, "primary_output": "squash", "primary_norm": "batch", "primary_activations": True}
LOSS = {"classification_loss": "score-cross-entropy", "score_scale": 10.0, "learn_score_scale": True}
LAYER = {"capsule_dim": 16, "transform": "dense", "weight_init": "balanced", "decoder": False}
CAPSULES: dict[str, Any] = {**BACKBONE, **PRIMARY, **LOSS, **LAYER}

FIVE_CONVOLUTIONS: dict[str, Any] = {"stack_channels": (32, 64, 64, 80, 80), "stack_kernels": (5, 3, 3, 3, 3)}
FIVE_CONVOLUTIONS |= {"stack_strides": (1, 1, 1, 2, 1), "stack_padding": 0}
Network = tuple[str, str, Mapping[str, Any]]
#: Two networks of the same size that are trained long: title, preset, changed options.
LONG: dict[str, Network] = {
    "efficient-capsnet": ("Efficient-CapsNet, 161,824 parameters and a decoder", "efficient-capsnet-mnist", {}),
    "cnn": ("a CNN of 161,226 parameters", "cnn-pooled", FIVE_CONVOLUTIONS),
}
#: These, and a network with each head: ``cnn-pooled``, or ``compact`` with all its options overridden.
NETWORKS: dict[str, Network] = LONG | {
    name: (title, "cnn-pooled", head) if "pooling" in head else (title, "compact", CAPSULES | {**head})
    for name, (title, head) in HEADS.items()
}

RECIPE: dict[str, Any] = NOT_TURNED | {"schedule": "one-cycle", "adam": "torch", "validation": "random"}
VIEWS = {"epochs": 10, "batch_size": 64, "max_shift": 2}
DIGITS = {"epochs": 5, "batch_size": 128, "max_shift": 2}
NORB = {"epochs": 25, "batch_size": 64, "max_shift": 4}
MOVED = "affNIST, trained on MNIST digits that were only moved"
FAMILIAR = {"familiar": None}
#: Groups of rows, by the prefix of their names: heading, data, recipe, additional measures, other fields.
GROUPS: dict[str, tuple[Any, ...]] = {
    "azimuth": ("viewpoints, novel azimuths", "viewpoints-azimuth", VIEWS, FAMILIAR, {"seeds": 5}),
    "elevation": ("viewpoints, novel elevations", "viewpoints-elevation", VIEWS, FAMILIAR, {"seeds": 5}),
    "affnist": (MOVED, "mnist-40", DIGITS | {"max_shift": 6}, {"affnist": 32_000}, {}),
    "mnist": ("MNIST", "mnist", DIGITS, {}, {}),
    "norb-azimuth": ("smallNORB, novel azimuths", "smallnorb-azimuth", NORB, FAMILIAR, {"full": True}),
    "norb-elevation": ("smallNORB, novel elevations", "smallnorb-elevation", NORB, FAMILIAR, {"full": True}),
}


def row_of(name: str, network: str, recipe: Mapping[str, Any], rate: float = LEARNING_RATE, **fields: Any) -> Row:
    """Return a row of one of the networks."""
    title, preset, changes = NETWORKS[network]
    plugins = (VIEWPOINTS,) if fields.get("data", "").startswith("viewpoints") else ()
    words = "" if "first_seed" not in fields else f", learning rate {rate:g}"
    overrides = {**changes, **RECIPE, **recipe, "learning_rate": rate}
    return Row(name, title + words, preset, overrides, plugins=plugins, **fields)


def heads() -> Iterator[Row]:
    """Yield each head on the images of each group."""
    for prefix, (heading, data, recipe, measures, more) in GROUPS.items():
        for name, (_, head) in HEADS.items():
            measured = {**measures, "latency": None} | ({} if "pooling" in head else {"coupling": 1000})
            other = None if name == "uniform" else f"{prefix}-uniform"
            fields = {"data": data, "group": heading, "measures": measured, "compared_to": other, **more}
            yield row_of(f"{prefix}-{name}", name, recipe, **fields)


PUBLISHED = {
    "sabour2017": "dynamic routing (Sabour and others 2017)",
    "efficient-capsnet-mnist": "self-attention (Efficient-CapsNet, Mazzia and others 2021)",
    "hinton2018-paper": "EM routing as the paper has it (Hinton and others 2018)",
    "hinton2018-code": "EM routing as its authors' code has it",
    "vb2020": "variational Bayes routing (De Sousa Ribeiro and others 2020)",
    "hahn2019-smallnet": "self-routing (Hahn and others 2019)",
    "cnn-pooled": "a CNN with the mean of each channel",
}
#: Without the crops and brightness of the smallNORB presets, because MNIST's digits fill their images.
ON_MNIST: dict[str, Any] = NOT_TURNED | {"crop": None, "brightness": 0.0, "contrast": 0.0, "max_shift": 2}
EIGHT_TYPES = {"primary_types": 8, "layer_types": 8, "num_iterations": 2}
#: A large learning rate from the start, because a class whose activation starts near 1 otherwise stays there.
EM_RECIPE: dict[str, Any] = {"learning_rate": 1e-2, "decay_steps": 200, "epochs": 10, "batch_size": 32, "max_shift": 1}
EM_RECIPE |= {"compete_over": "types"}
VB_RECIPE = {"learning_rate": LEARNING_RATE, "schedule": "one-cycle", "epochs": 5, "batch_size": 64, "max_shift": 0}
SIXTEEN = "0.9 % (16 types, 50 epochs, the best on the test images)"
#: Networks with eight types of capsules: preset, routing, recipe, error reported by the source.
EM = ("hinton2018-paper", "EM routing", EM_RECIPE, SIXTEEN)
VB = ("vb2020", "variational Bayes routing", VB_RECIPE, "")


def published() -> Iterator[Row]:
    """Yield the published networks on MNIST, for three epochs and as long as their sources; two with eight types."""
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


TURNED: dict[str, Any] = {"adam_eps": 1e-8, "batch_size": 64, "max_shift": 2, "max_rotation": 15, "max_scaling": 0.1}
BEST_EPOCH = "0.26 % (99.74 % accuracy, the best epoch on the test images)"


def long() -> Iterator[Row]:
    """Yield the two networks that are trained long."""
    fields: dict[str, Any] = {"group": "Efficient-CapsNet beside a CNN of its size on MNIST, 30 epochs"}
    fields |= {"measures": {"latency": None}}
    for name, other, source in (("efficient-capsnet", "long-cnn", BEST_EPOCH), ("cnn", None, "")):
        recipe = TURNED | {"epochs": 30}
        yield row_of(f"long-{name}", name, recipe, compared_to=other, published=source, **fields)


ZOO = Table(name="zoo", title="The field's routings side by side", rows=(*heads(), *published(), *long()))

# ---- the search of the learning rates, on validation images

SEARCHED = (3e-4, 1e-3, 3e-3)
#: Seed of the search, which no run of the tables uses.
ONCE: dict[str, Any] = {"seeds": 1, "first_seed": 100}
FEWER, LONGER = {"limit_train": 12_000}, TURNED | {"epochs": 10}
#: Searches, by the prefix of their rows' names: heading, data, networks, recipe.
SEARCHES: dict[str, tuple[str, str, Iterable[str], dict[str, Any]]] = {
    "views-": ("viewpoints, familiar azimuths", "viewpoints-azimuth", HEADS, VIEWS),
    "digits-": ("12,000 MNIST digits", "mnist", HEADS, DIGITS | FEWER),
    "long-": ("12,000 MNIST digits, turned, shifted and scaled, ten epochs", "mnist", LONG, LONGER | FEWER),
}


def searched() -> Iterator[Row]:
    """Yield each network with each learning rate; only one test image, because tests must not guide the search."""
    for prefix, (heading, data, networks, recipe) in SEARCHES.items():
        for name, rate in itertools.product(networks, SEARCHED):
            row = f"{prefix}{name}-{rate * 1e4:.0f}"
            yield row_of(row, name, recipe | {"limit_test": 1}, rate, data=data, group=heading, **ONCE)


SEARCH = Table(name="zoo-search", title="The learning rates of the routings", rows=tuple(searched()))
