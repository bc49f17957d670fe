"""Routings as object discovery: one auto-encoder, whose middle layer is slot attention, a mixture, or a routing.

    python experiments/run.py objects
    python experiments/report.py objects

All rows have the encoder, the decoder and the recipe of slots-small, and no labels. The error is 1 − FG-ARI of the test
scenes. K-means clusters the pixels of each scene by their colours, and the features of the trained encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.table import Row, Table
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.datasets import ImageSet
from torchcaps.ops.segmentation import foreground_ari
from torchcaps.training import Run

CLUSTERED = 200
"""Test scenes that K-means clusters."""
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("slot attention from learned queries", {"name": "slots", "start_from": "queries"}),
    "noise": ("slot attention from noise", {"name": "slots"}),
    "mixture": ("slot mixture from learned queries", {"name": "slot-mixture", "start_from": "queries"}),
    **{
        routing: (
            f"{title}, 3 iterations",
            {"name": "dense", "transform": "shared", "capsule_dim": 64, "routing": spec},
        )
        for routing, title, spec in (
            ("dynamic", "dynamic routing", "dynamic"),
            ("em", "EM routing", {"name": "em", "num_iterations": 3}),
            ("inverted-attention", "inverted attention", {"name": "inverted-attention", "num_iterations": 3}),
            ("b2i", "behaviour-to-interest routing", "b2i"),
        )
    },
}


def clustered(run: Run, test: ImageSet) -> dict[str, float]:
    """Return the FG-ARI, percent, of K-means on colours and on features, with as many clusters as slots."""
    from sklearn.cluster import KMeans

    network: Any = run.model
    test = test.take(CLUSTERED)
    with inference(network):
        images = to_pixels(network, test.images)
        maps = network.positions(network.backbone(images))
        features = network.features(maps.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, maps.shape[2:])

    def score(maps: Tensor) -> float:
        labels = [
            KMeans(network.num_slots, n_init=3, random_state=0).fit_predict(each.flatten(1).T.cpu().double().numpy())
            for each in maps
        ]
        small = torch.tensor(np.array(labels)).view(len(maps), 1, *maps.shape[2:])
        pred = F.interpolate(small.float(), test.labels.shape[1:], mode="nearest-exact")[:, 0].to(torch.uint8)
        return 100 * float(foreground_ari(pred, test.labels).nanmean())

    return {"K-means on colours, FG-ARI": score(images), "K-means on features, FG-ARI": score(features)}


CLUSTERS: dict[str, int | Callable[..., dict[str, float]] | None] = {"K-means": clustered}
OBJECTS = Table(
    name="objects",
    title="Objects without labels: slots and routings in one auto-encoder",
    rows=tuple(
        Row(
            name,
            title,
            "slots-small",
            {"layers": (layer,)},
            data="tetrominoes",
            measures=CLUSTERS if name == "slots" else {},
        )
        for name, (title, layer) in LAYERS.items()
    ),
)
