"""Routings as object discovery: one auto-encoder, whose middle layer is slot attention, a mixture, or a routing.

    python experiments/run.py objects-search    # the learning rates, on validation scenes
    python experiments/run.py objects
    python experiments/report.py objects
    python -m experiments.objects docs/images/objects.png

All rows have the encoder, the decoder and the recipe of slots-small, but fewer epochs, and no labels. The error is
1 − FG-ARI of the test scenes. K-means clusters the pixels of each scene by their colours, and the features of the
trained encoder. The row slots-small is the preset itself.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.store import RESULTS
from experiments.table import Row, Table
from torchcaps.analysis import predict, save_figure
from torchcaps.analysis.figures import MUTED, Caption, Cell, tiles
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.analysis.segmentation import coloured
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.datasets.scaling import as_floats
from torchcaps.ops.segmentation import foreground_ari
from torchcaps.training import Run, load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCHS = 3
"""Epochs of each row, 1,779 steps."""
SEARCHED = (1e-3, 2e-3, 4e-3)
"""Learning rates tried for each row, with half of the training scenes."""
LEARNING_RATES = {"slots": 2e-3, "mixture": 1e-3, "dynamic": 4e-3, "em": 4e-3, "inverted-attention": 4e-3, "b2i": 4e-3}
"""The best of SEARCHED, by the squared error of the validation scenes."""
CLUSTERED = 200
"""Test scenes that K-means clusters."""
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("slot attention from learned queries", {"name": "slots", "start_from": "queries"}),
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
    rows=(
        *(
            Row(
                name,
                title,
                "slots-small",
                {"layers": (layer,), "epochs": EPOCHS, "learning_rate": LEARNING_RATES[name]},
                data="tetrominoes",
                measures=CLUSTERS if name == "slots" else {},
            )
            for name, (title, layer) in LAYERS.items()
        ),
        Row("slots-small", "slot attention from learned queries, 16 epochs", "slots-small", data="tetrominoes"),
    ),
)

OBJECTS_SEARCH = Table(
    name="objects-search",
    title="The learning rates of objects without labels",
    rows=tuple(
        Row(
            f"{name}-{rate * 1e3:.0f}",
            f"{title}, learning rate {rate:g}",
            "slots-small",
            {"layers": (layer,), "epochs": EPOCHS, "learning_rate": rate, "limit_train": 9500, "limit_test": 1},
            data="tetrominoes",
            seeds=1,
            first_seed=100,
        )
        for (name, (title, layer)), rate in itertools.product(LAYERS.items(), SEARCHED)
    ),
)


def picture(results: Path, scenes: Sequence[int] = (3, 8)) -> Figure:
    """Draw test scenes as the first seed of each finished row redraws and divides them."""
    test = load_dataset("tetrominoes").test
    images, masks = as_floats(test.images[list(scenes)].numpy()), test.labels[list(scenes)].numpy()
    rows: list[list[Cell]] = [
        [*[cell for _ in scenes for cell in (Caption("redrawn", MUTED), Caption("parts", MUTED))]]
    ]
    drawn = [cell for image, mask in zip(images, masks, strict=True) for cell in (image, coloured(mask, None))]
    rows.append([*drawn, Caption("scene and objects")])
    for row in OBJECTS.rows:
        folder = results / OBJECTS.name / row.name / f"seed-{row.first_seed}"
        if not (folder / "summary.json").exists():
            continue
        answer = predict(load_run(folder).model, images)
        assert answer.reconstruction is not None
        pairs = zip(answer.reconstruction.clip(0, 1), answer.classes.astype(np.uint8) + 1, strict=True)
        rows.append([*[cell for image, slots in pairs for cell in (image, coloured(slots, None))], Caption(row.title)])
    return tiles(rows, title="", side=0.9)


if __name__ == "__main__":
    save_figure(picture(RESULTS), sys.argv[1])
