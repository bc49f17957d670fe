"""Capsules that answer each pixel beside a U-Net of equal size, on several tests.

    python experiments/run.py pixels-search     # the learning rates, on validation images
    python experiments/run.py pixels
    python experiments/report.py pixels

In each test the networks have as many parameters, to within 3 %, the same loss, images and number of steps, and the
same search of the learning rate. The rows ``…-unet-as-long`` train for about as many seconds as dynamic routing
instead. The learning rates are searched on overlapping digits only, in half as many steps; the other tests use them
unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.table import VIEWPOINTS, OwnMeasure, Row, Table
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet
from torchcaps.training import Run

FEW_DIGITS = str(Path(__file__).with_name("few_digits.py"))
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
SEARCHED = (3e-3, 1e-2, 3e-2)
#: The learning rate of each network, to be set to the best of the search.
LEARNING_RATES = dict.fromkeys(NETWORKS, 1e-2)
ANGLES = (45, 180)


def turned(run: Run, test: ImageSet, *, degrees: int) -> dict[str, float]:
    """Return the mean Dice score, percent, on test images turned by random angles of up to ``degrees`` each way."""
    found, model = list[torch.Tensor](), run.model
    loader = BatchLoader(test, 100, shuffle=True, augmentation=Augmentation(max_rotation=degrees))
    with inference(model):
        for batch in loader.batches(0):
            found.append(model.score(model(to_pixels(model, batch.images)).scores, batch.labels))
    return {"Dice": 100 * float(torch.cat(found).mean())}


TURNED: Mapping[str, OwnMeasure] = {f"turned by ±{angle}°": partial(turned, degrees=angle) for angle in ANGLES}


@dataclass(frozen=True, kw_only=True)
class PixelTest:
    """Images on which all networks are compared."""

    title: str
    data: str
    plugin: str
    recipe: Mapping[str, Any]
    epochs_as_long: int  # epochs in which the U-Net takes about as many seconds as dynamic routing
    measures: Mapping[str, int | OwnMeasure | None] = field(default_factory=dict)

    def row(self, name: str, network: str, rate: float, recipe: Mapping[str, Any] = {}, **fields: Any) -> Row:
        """Return a row of one of the networks."""
        title, preset, changes = NETWORKS[network]
        overrides = {**changes, **RECIPE, **self.recipe, "learning_rate": rate, **recipe}
        place: dict[str, Any] = {"data": self.data, "plugins": (self.plugin,), "group": self.title}
        return Row(name, title + fields.pop("words", ""), preset, overrides, **place, **fields)


RECIPE: dict[str, Any] = {"batch_size": 8, "schedule": "one-cycle", "class_weights": None}
TESTS = {
    # 300 steps; on one core a run takes 2 minutes with dynamic routing, and 4 with EM
    "digits": PixelTest(
        title="Overlapping digits",
        data="few-digits",
        plugin=FEW_DIGITS,
        recipe={"epochs": 1, "limit_train": 2400, "limit_test": 1000},
        epochs_as_long=7,
        measures=TURNED,
    ),
    # 608 steps at 32×32
    "azimuth": PixelTest(
        title="Silhouettes of objects from novel azimuths",
        data="silhouettes-azimuth",
        plugin=VIEWPOINTS,
        recipe={"epochs": 1, "image_size": 32, "limit_test": 1000},
        epochs_as_long=7,
        measures={"familiar": 1000},
    ),
}


def compared() -> Iterator[Row]:
    """Yield each network on each test, and the U-Net trained for as many seconds as dynamic routing."""
    for name, test in TESTS.items():
        for network in NETWORKS:
            other = None if network == "unet" else f"{name}-unet"
            fields: dict[str, Any] = {"measures": test.measures, "compared_to": other}
            yield test.row(f"{name}-{network}", network, LEARNING_RATES[network], **fields)
        words, more = ", as many seconds as dynamic routing", {"epochs": test.epochs_as_long}
        as_long: dict[str, Any] = {"words": words, "measures": test.measures, "compared_to": f"{name}-unet"}
        yield test.row(f"{name}-unet-as-long", "unet", LEARNING_RATES["unet"], more, **as_long)


def searched() -> Iterator[Row]:
    """Yield each network with each learning rate; only one test image, because tests must not guide the search."""
    half = {"limit_train": 1200, "limit_test": 1}
    for name, rate in itertools.product(NETWORKS, SEARCHED):
        fields = {"words": f", learning rate {rate:g}", "seeds": 1, "first_seed": 100}
        yield TESTS["digits"].row(f"{name}-{rate * 1e3:.0f}", name, rate, half, **fields)


PIXELS = Table(name="pixels", title="Capsules for pixels beside a U-Net", rows=tuple(compared()))
PIXELS_SEARCH = Table(name="pixels-search", title="The learning rates of networks for pixels", rows=tuple(searched()))
