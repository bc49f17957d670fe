"""(g) The field's routings side by side: one network in which only the head changes, and the published networks.

The learning rate of each head is the best of three on the validation images, which the table ``zoo-search`` tries; its
logs say that it is :data:`LEARNING_RATE` for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.table import FULL, SMALL, VIEWPOINTS, Budget, Row, Table
from experiments.tables.recipes import NOT_TURNED

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
CAPSULES: dict[str, Any] = {
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
RECIPE: dict[str, Any] = NOT_TURNED | {"schedule": "one-cycle", "adam": "torch", "validation": "random"}
VIEWS = {"epochs": 10, "batch_size": 64, "max_shift": 2}
DIGITS = {"epochs": 5, "batch_size": 128, "max_shift": 2}
NORB = {"epochs": 25, "batch_size": 64, "max_shift": 4}
MOVED = "affNIST, trained on MNIST digits that were only moved"
#: Groups of rows, by what their names begin with: heading, data, recipe, seeds, budgets, measures.
GROUPS: dict[str, tuple[str, str, dict[str, Any], int | None, tuple[Budget, ...], dict[str, int | None]]] = {
    "azimuth": ("viewpoints, novel azimuths", "viewpoints-azimuth", VIEWS, 5, SMALL, {"familiar": None}),
    "elevation": ("viewpoints, novel elevations", "viewpoints-elevation", VIEWS, 5, SMALL, {"familiar": None}),
    "affnist": (MOVED, "mnist-40", DIGITS | {"max_shift": 6}, None, SMALL, {"affnist": 32_000}),
    "mnist": ("MNIST", "mnist", DIGITS, None, SMALL, {}),
    "norb-azimuth": ("smallNORB, novel azimuths", "smallnorb-azimuth", NORB, None, FULL, {"familiar": None}),
    "norb-elevation": ("smallNORB, novel elevations", "smallnorb-elevation", NORB, None, FULL, {"familiar": None}),
}


def head_row(
    name: str, title: str, head: Mapping[str, Any], recipe: Mapping[str, Any], rate: float, **fields: Any
) -> Row:
    """A row of a network with a head: ``cnn-pooled``, or ``compact`` with all its options overridden."""
    preset, network = ("cnn-pooled", head) if "pooling" in head else ("compact", CAPSULES | {**head})
    plugins = (VIEWPOINTS,) if fields["data"].startswith("viewpoints") else ()
    overrides = {**network, **RECIPE, **recipe, "learning_rate": rate}
    return Row(name, title, preset, overrides, plugins=plugins, **fields)


def heads() -> Iterator[Row]:
    """Each head on the images of each group."""
    for prefix, (heading, data, recipe, seeds, budgets, measures) in GROUPS.items():
        for name, (title, head) in HEADS.items():
            yield head_row(
                f"{prefix}-{name}",
                title,
                head,
                recipe,
                LEARNING_RATE,
                data=data,
                budgets=budgets,
                seeds=seeds,
                measures={**measures, "latency": None} | ({} if "pooling" in head else {"coupling": 1000}),
                group=heading,
                compared_to=None if name == "uniform" else f"{prefix}-uniform",
            )


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
EM_STEPS: dict[str, Any] = {"learning_rate": 1e-2, "decay_steps": 200, "compete_over": "types"}
EM_RECIPE = EM_STEPS | {"epochs": 10, "batch_size": 32, "max_shift": 1}
VB_RECIPE = {"learning_rate": LEARNING_RATE, "schedule": "one-cycle", "epochs": 5, "batch_size": 64, "max_shift": 0}
EIGHT = (("hinton2018-paper", "EM routing", EM_RECIPE), ("vb2020", "variational Bayes routing", VB_RECIPE))


def published() -> Iterator[Row]:
    """The published networks on MNIST, for three epochs and for as many as their sources; two with eight types."""
    heading = "The published networks on MNIST, each with its own loss and optimiser"
    for suffix, budgets, length in (("-short", SMALL, {"epochs": 3, "limit_train": 10_000}), ("", FULL, {})):
        for name, title in PUBLISHED.items():
            fields: dict[str, Any] = {"budgets": budgets, "measures": {"latency": None}, "group": heading}
            yield Row(f"{name}{suffix}", title, name, ON_MNIST | length, **fields)
    heading = "Capsules on maps with 8 types in each of three layers (A=64, B=C=D=8) on MNIST"
    for name, title, recipe in EIGHT:
        title = f"{title} ({name}), 2 iterations, {recipe['epochs']} epochs"
        overrides = ON_MNIST | EIGHT_TYPES | recipe
        yield Row(f"{name}-8", title, name, overrides, measures={"latency": None}, group=heading)


FIVE_CONVOLUTIONS: dict[str, Any] = {
    "stack_channels": (32, 64, 64, 80, 80),
    "stack_kernels": (5, 3, 3, 3, 3),
    "stack_strides": (1, 1, 1, 2, 1),
    "stack_padding": 0,
}
#: Title, preset, and what is changed of it, by the names of their rows.
LONG: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "efficient-capsnet": ("Efficient-CapsNet, 161,824 parameters and a decoder", "efficient-capsnet-mnist", {}),
    "cnn": ("a CNN of 161,226 parameters", "cnn-pooled", FIVE_CONVOLUTIONS),
}
TURNED: dict[str, Any] = {"adam_eps": 1e-8, "batch_size": 64, "max_shift": 2, "max_rotation": 15, "max_scaling": 0.1}


def long_row(network: str, suffix: str, title: str, recipe: Mapping[str, Any], rate: float, **fields: Any) -> Row:
    """A row of one of the two networks of a size."""
    _, preset, changes = LONG[network]
    overrides = {**changes, **RECIPE, **TURNED, **recipe, "learning_rate": rate}
    return Row(f"long-{network}{suffix}", title, preset, overrides, **fields)


def long() -> Iterator[Row]:
    """The two networks, trained long."""
    for network, (title, *_) in LONG.items():
        yield long_row(
            network,
            "",
            title,
            {"epochs": 30},
            LEARNING_RATE,
            measures={"latency": None},
            group="Efficient-CapsNet beside a CNN of its size on MNIST, 30 epochs",
            compared_to=None if network == "cnn" else "long-cnn",
        )


TABLE = Table(
    name="zoo",
    title="The field's routings side by side",
    question="""
        Which routing helps, and with what: on objects seen from sides that were never trained on, on digits that are
        turned and sheared as they never were in training, and on plain digits?
    """,
    protocol="""
        Only the head changes. Three convolutions with batch normalisation are the same in all rows, and so is the
        convolution of the primary capsules, 8 types of 16 components, squashed, with activations of their own for those
        routings that use them. Capsule heads have a matrix of 16×16 for each pair of capsules (*one matrix for each
        class* shares it among all input capsules), no decoder, and cross-entropy of the softmax of the scores times a
        learned scale, which starts at 10. A score is the activation of a class capsule, or its length where the routing
        gives none. The other heads pool the same 128 channels, after a ReLU, and classify them by one linear layer.
        *Uniform coupling* is dynamic routing with one iteration. The number of parameters is not the same in all rows;
        it stands below. All rows have Adam, a one-cycle schedule, and the best of the learning rates 3e-4, 1e-3 and
        3e-3, searched on validation images with another seed (table `zoo-search`): once for viewpoints, on familiar
        azimuths, and once for digits. The last epoch counts, and the test images are read once. The difference is that
        to *uniform coupling* with the same seed. Images of viewpoints are shifted by up to 2 pixels in training, those
        of affNIST by up to 6. A familiar view shows a test object from a side that was trained on. The published
        networks are trained on 10,000 images for three epochs, each with the loss, the optimiser and the learning rate
        of its source, which were not searched. EM and variational Bayes with 64 channels and 8 types in each layer
        route twice and are trained on 55,000 digits: EM for ten epochs of digits that are shifted by up to a pixel, in
        batches of 32, with 1e-2, which falls by 4 % each 200 steps, its types competing at each position by themselves
        as in a published re-implementation; variational Bayes for five epochs of digits that are not changed, in
        batches of 64, one-cycle to 3e-3. Of EM three rates and both ways to compete were compared on training images,
        for 200 to 800 steps, and three recipes were trained before this one; of variational Bayes one.
        Efficient-CapsNet has 161,824 parameters without its decoder, and stands beside a CNN of five convolutions with
        batch normalisation and the mean of each channel, of 161,226: 30 epochs of 55,000 digits in batches of 64,
        shifted by up to 2 pixels, turned by up to 15 degrees, scaled by up to 10 %, one-cycle, and the best of the same
        three learning rates for each (table `zoo-search`), in bfloat16 (`--precision bf16`).
    """,
    budgets={
        "small": """
            Ten epochs of 2,430 images of objects, five seeds: 50 minutes on two cores. Five epochs of 55,000 digits,
            three seeds: an hour and three quarters of one core, and three hours on digits that are moved, which are
            tested on 32,000 of the affNIST images. The long runs, in bfloat16 on a CPU that has it, take 20 and 40
            minutes each. Three epochs of 10,000 digits take 10 seconds (the CNN) to 7 minutes (self-routing) for the
            published networks, and 25 to 35 with EM and variational Bayes; five epochs with 8 types an hour.
        """,
        "full": """
            The same heads on smallNORB, 25 epochs, with the learning rates of viewpoints; the published networks on all
            of MNIST, for as many epochs as their sources.
        """,
    },
    rows=(*heads(), *published(), *long()),
)
