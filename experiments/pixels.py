"""Capsules that answer each pixel beside a U-Net of equal size: overlapping digits, upright and turned at the test.

    python experiments/run.py pixels-search --jobs 2     # the learning rates, on validation images
    python experiments/run.py pixels --jobs 2
    python experiments/report.py pixels

The networks have as many parameters, to within 3 %, the same loss, data and number of steps, and the same search of the
learning rate. ``unet-as-long`` trains for as many seconds as dynamic routing instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from experiments.table import Row, Table
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet
from torchcaps.training import Run

#: Types, components, kernel and stride of each layer; a stride of -2 goes up.
LAYERS = ((4, 8, 5, 2), (8, 8, 5, 1), (8, 8, 5, 2), (8, 8, 5, 1), (4, 8, 4, -2), (4, 8, 5, 1), (2, 8, 4, -2))
#: The last layer has a type of 8 components for each class.
LAST = ((1, 8, 1, 1),)
TRANSFORM = {"name": "shared", "weight_init": "he"}
CAPSULES: dict[str, Any] = {"pixel_channels": (8,), "decoder": False, "classification_loss": "dice-cross-entropy"}
CAPSULES["layers"] = [
    ({"name": "conv", "voters": "types", "layer_padding": "same"} if stride > 0 else {"name": "deconv"})
    | {"layer_types": types, "capsule_dim": dim, "layer_kernel": kernel, "layer_stride": abs(stride)}
    | {"transform": TRANSFORM}
    for types, dim, kernel, stride in LAYERS + LAST
]
UNET: dict[str, Any] = {"channels": (11, 22, 47), "parameters_of": None, "classification_loss": "dice-cross-entropy"}
DYNAMIC, EM = {"name": "dynamic", "capsule_bias": True}, {"name": "em", "num_iterations": 2}
#: Networks: title, preset, changed options.
NETWORKS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "unet": ("U-Net", "unet-twin", UNET),
    "dynamic": ("capsules, dynamic routing, 3 iterations", "segcaps", CAPSULES | {"routing": DYNAMIC}),
    "uniform": ("capsules, uniform coupling", "segcaps", CAPSULES | {"routing": DYNAMIC | {"num_iterations": 1}}),
    "em": ("capsules, EM routing, 2 iterations", "segcaps", CAPSULES | {"routing": EM}),
}
#: 300 steps of 16 pairs. On one core a run takes about 5 minutes with dynamic routing, and 11 with EM.
RECIPE: dict[str, Any] = {"epochs": 2, "batch_size": 16, "limit_train": 2400}
RECIPE |= {"schedule": "one-cycle", "class_weights": None, "limit_test": 2000}
SEARCHED = (1e-3, 3e-3, 1e-2)
#: The learning rate of each network, to be set to the best of the search.
LEARNING_RATES = dict.fromkeys(NETWORKS, 3e-3)
#: Epochs in which the U-Net takes as many seconds as dynamic routing.
AS_LONG = {"epochs": 19}
ANGLES = (45, 180)


def turned(run: Run, test: ImageSet, *, degrees: int) -> dict[str, float]:
    """Return the mean Dice score, percent, on test images turned by random angles of up to ``degrees`` each way."""
    found, model = list[torch.Tensor](), run.model
    loader = BatchLoader(test, 100, shuffle=True, augmentation=Augmentation(max_rotation=degrees))
    with inference(model):
        for batch in loader.batches(0):
            found.append(model.score(model(to_pixels(model, batch.images)).scores, batch.labels))
    return {"Dice": 100 * float(torch.cat(found).mean())}


def row_of(name: str, network: str, rate: float, recipe: Mapping[str, Any] = {}, **fields: Any) -> Row:
    """Return a row of one of the networks."""
    title, preset, changes = NETWORKS[network]
    overrides = {**changes, **RECIPE, "learning_rate": rate, **recipe}
    return Row(name, title + fields.pop("words", ""), preset, overrides, data="multimnist-pixels", **fields)


def compared() -> Iterator[Row]:
    """Yield each network, and the U-Net trained for as many seconds as dynamic routing."""
    measures = {f"turned by ±{angle}°": partial(turned, degrees=angle) for angle in ANGLES}
    for name in NETWORKS:
        other = None if name == "unet" else "unet"
        yield row_of(name, name, LEARNING_RATES[name], measures=measures, compared_to=other)
    words = ", as many seconds as dynamic routing"
    yield row_of("unet-as-long", "unet", LEARNING_RATES["unet"], AS_LONG, words=words, measures=measures)


def searched() -> Iterator[Row]:
    """Yield each network with each learning rate; only one test image, because tests must not guide the search."""
    for name, rate in itertools.product(NETWORKS, SEARCHED):
        fields = {"words": f", learning rate {rate:g}", "seeds": 1, "first_seed": 100}
        yield row_of(f"{name}-{rate * 1e4:.0f}", name, rate, {"limit_test": 1}, **fields)


PIXELS = Table(name="pixels", title="Overlapping digits as pixels", rows=tuple(compared()))
PIXELS_SEARCH = Table(name="pixels-search", title="The learning rates of networks for pixels", rows=tuple(searched()))
