"""Capsules that answer each pixel beside a U-Net of equal size, on several tests.

    python experiments/run.py pixels-search     # the learning rates, on validation images
    python experiments/run.py pixels
    python experiments/report.py pixels

In each test the networks have as many parameters, to within 3 %, the same loss, images and number of steps, and the
same search of the learning rate, on half of the training images. The rows ``…-unet-as-long`` train for about as many
seconds as dynamic routing instead.
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
BRAIN = str(Path(VIEWPOINTS).with_name("brain_tissue.py"))
#: Types and stride of each layer of capsules of 8 components; a stride of -2 goes up, the last layer has a type for
#: each class.
LAYERS = ((4, 2), (8, 1), (8, 2), (8, 1), (4, -2), (4, 1), (2, -2))
LAST = {"layer_types": 1, "layer_kernel": 1}
#: Kernel of the convolutions, and of the transposed convolutions, by the number of axes.
KERNELS = {2: (5, 4), 3: (3, 2)}
#: Channels of the U-Net, by the number of axes.
CHANNELS = {2: (11, 22, 47), 3: (7, 13, 27)}
LOSS: dict[str, Any] = {"classification_loss": "dice-cross-entropy"}
#: Networks: title, preset, routing.
NETWORKS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "unet": ("U-Net", "unet-twin", None),
    "dynamic": ("capsules, dynamic routing, 3 iterations", "segcaps", {"name": "dynamic", "capsule_bias": True}),
    "uniform": (
        "capsules, uniform coupling",
        "segcaps",
        {"name": "dynamic", "capsule_bias": True, "num_iterations": 1},
    ),
    "em": ("capsules, EM routing, 2 iterations", "segcaps", {"name": "em", "num_iterations": 2}),
}


def network_of(routing: dict[str, Any] | None, axes: int) -> dict[str, Any]:
    """Return the options of capsules with a routing, or of the U-Net, for planes or volumes."""
    if routing is None:
        return {"channels": CHANNELS[axes], "parameters_of": None, **LOSS}
    kernel, up = KERNELS[axes]
    down = {"name": "conv-types", "layer_padding": "same"}
    common = {"capsule_dim": 8, "transform": {"name": "shared", "weight_init": "he"}}
    layers = [
        common
        | ({**down, "layer_kernel": kernel} if stride > 0 else {"name": "deconv", "layer_kernel": up})
        | {"layer_types": types, "layer_stride": abs(stride)}
        for types, stride in LAYERS
    ]
    layers.append(common | down | {"layer_stride": 1} | LAST)
    return {"pixel_channels": (8,), "decoder": False, "layers": layers, "routing": routing, **LOSS}


SEARCHED = (3e-3, 1e-2, 3e-2)
#: The learning rate of each network with the largest Dice score on validation images, by test.
LEARNING_RATES = {
    "digits": {"unet": 3e-2, "dynamic": 3e-3, "uniform": 3e-2, "em": 3e-3},
    "azimuth": {"unet": 3e-3, "dynamic": 1e-2, "uniform": 3e-2, "em": 1e-2},
    "slices": {"unet": 3e-2, "dynamic": 1e-2, "uniform": 3e-2, "em": 1e-2},
    "blocks": {"unet": 1e-2, "dynamic": 1e-2, "uniform": 3e-2, "em": 1e-2},
}
ANGLES = (45, 180)
#: How many times as many epochs the U-Net has in about the seconds that dynamic routing takes.
AS_LONG = 7


def turned(run: Run, test: ImageSet, *, degrees: int) -> dict[str, float]:
    """Return the mean Dice score, percent, on test images turned by random angles of up to ``degrees`` each way."""
    found, model = list[torch.Tensor](), run.model
    size, changes = min(100, len(test)), Augmentation(max_rotation=degrees)
    loader = BatchLoader(test, size, shuffle=True, augmentation=changes)
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
    searched_with: int
    """Training images of the search, about half of all."""
    axes: int = 2
    measures: Mapping[str, int | OwnMeasure | None] = field(default_factory=dict)

    def row(self, name: str, network: str, rate: float, recipe: Mapping[str, Any] = {}, **fields: Any) -> Row:
        """Return a row of one of the networks."""
        title, preset, routing = NETWORKS[network]
        overrides = {**network_of(routing, self.axes), **RECIPE, **self.recipe, "learning_rate": rate, **recipe}
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
        searched_with=1200,
        measures=TURNED,
    ),
    # 1,500 steps at 24×24
    "azimuth": PixelTest(
        title="Silhouettes of objects from novel azimuths",
        data="silhouettes-azimuth",
        plugin=VIEWPOINTS,
        recipe={"epochs": 5, "batch_size": 4, "image_size": 24, "limit_train": 1200, "limit_test": 500},
        searched_with=600,
        measures={"familiar": 500},
    ),
    # 80 steps at 96×72
    "slices": PixelTest(
        title="Tissue in slices of one head",
        data="brain-slices",
        plugin=BRAIN,
        recipe={"epochs": 10, "batch_size": 4},
        searched_with=16,
        measures=TURNED,
    ),
    # 144 steps of 20×20×20
    "blocks": PixelTest(
        title="Tissue in blocks of one head",
        data="brain-blocks",
        plugin=BRAIN,
        recipe={"epochs": 8, "batch_size": 4},
        searched_with=36,
        axes=3,
    ),
}


def compared() -> Iterator[Row]:
    """Yield each network on each test, and the U-Net trained for as many seconds as dynamic routing."""
    for name, test in TESTS.items():
        for network in NETWORKS:
            other = None if network == "unet" else f"{name}-unet"
            fields: dict[str, Any] = {"measures": test.measures, "compared_to": other}
            yield test.row(f"{name}-{network}", network, LEARNING_RATES[name][network], **fields)
        words, more = ", as many seconds as dynamic routing", {"epochs": AS_LONG * test.recipe["epochs"]}
        as_long: dict[str, Any] = {"words": words, "measures": test.measures, "compared_to": f"{name}-unet"}
        yield test.row(f"{name}-unet-as-long", "unet", LEARNING_RATES[name]["unet"], more, **as_long)


def searched() -> Iterator[Row]:
    """Yield each network with each learning rate; only one test image, because tests must not guide the search."""
    for (name, test), network, rate in itertools.product(TESTS.items(), NETWORKS, SEARCHED):
        few = {"limit_train": test.searched_with, "limit_test": 1}
        fields = {"words": f", learning rate {rate:g}", "seeds": 1, "first_seed": 100}
        yield test.row(f"{name}-{network}-{rate * 1e3:.0f}", network, rate, few, **fields)


PIXELS = Table(name="pixels", title="Capsules for pixels beside a U-Net", rows=tuple(compared()))
PIXELS_SEARCH = Table(name="pixels-search", title="The learning rates of networks for pixels", rows=tuple(searched()))
