"""Define your own study in one file: a data set, a preset, and a table that sweeps two options.

It needs a clone of the repository, because ``experiments/`` is not part of the package:
``torchcaps train striped --plugin examples/own_study.py`` trains the network once,
``python experiments/run.py examples/own_study.py --results runs/study`` makes the runs of all rows, and
``python experiments/report.py examples/own_study.py --results runs/study`` prints their table.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder of experiments/
from experiments.table import Row, Table
from torchcaps.datasets import DataRequest, ImageSet, Splits, register_dataset
from torchcaps.models import register_preset

CLASSES = ("horizontal", "vertical")


@register_dataset(
    "stripes",
    title="Noisy stripes of two directions",
    source="drawn here",
    licence="none",
    num_train=400,
    num_test=200,
    in_shape=(1, 28, 28),
    class_names=CLASSES,
)
def load_stripes(_: DataRequest) -> Splits:
    """Draw the images."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 2
    images = torch.randint(0, 200, (600, 1, 28, 28), generator=random)
    images[labels == 0, :, ::4] += 55
    images[labels == 1, :, :, ::4] += 55
    train = ImageSet(images[:400].byte(), labels[:400])
    test = ImageSet(images[400:].byte(), labels[400:])
    return Splits(train, test, class_names=CLASSES)


register_preset(
    "striped",
    "A small network for stripes.",
    base="compact-shared",
    network={"primary_types": 4, "decoder": False},
    recipe={"epochs": 4, "batch_size": 32, "max_rotation": 0.0},
    data="stripes",
    num_classes=2,
)

TABLE = Table(
    name="stripes",
    title="Do routing iterations help with stripes?",
    rows=tuple(
        Row(
            f"iterations-{n}-rate-{rate}",
            f"iterations: {n}, learning rate: {rate}e-3",
            "striped",
            {"num_iterations": n, "learning_rate": rate * 1e-3},
            data="stripes",
            compared_to=f"iterations-1-rate-{rate}" if n > 1 else None,
        )
        for n, rate in product((1, 3), (1, 4))
    ),
)
