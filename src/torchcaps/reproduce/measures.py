"""What is measured on a trained network beside its test error."""

from __future__ import annotations

from typing import Any

import torch

from torchcaps.analysis import attack_curve, evaluate, rotation_curve
from torchcaps.analysis.robustness import Attack, Objective
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.datasets.sources.affnist import find_originals
from torchcaps.files import user_path
from torchcaps.reproduce.table import Measure
from torchcaps.training import Run

PGD_STEPS = 20
"""Of the tables, whatever the default of a single measurement is."""


def measure(run: Run, wanted: Measure, data_dir: str | None = None) -> dict[str, Any]:
    """Measure a trained network, on files in ``data_dir``; in the folder of the run if None, else in the usual places.

    Returns:
        For ``affnist``, ``accuracy``, ``error``, ``images`` and their ``source``, which are made here (``"made"``) or
        read from the ``"original"`` files; else a :class:`~torchcaps.analysis.RobustnessCurve` as a dictionary.

    Raises:
        InputError: Data that cannot be loaded, or that the network was not built for.
    """
    if data_dir is None and run.config is not None:
        data_dir = run.config.data_dir
    if wanted.kind == "affnist":
        dataset = load_dataset("affnist", data_dir=data_dir, limit_test=wanted.images)
        found = evaluate(run.model, dataset.test)
        source = "made" if find_originals(None if data_dir is None else user_path(data_dir)) is None else "original"
        return {"accuracy": found.accuracy, "error": found.error, "images": found.num_images, "source": source}
    test = _spread(run.dataset(data_dir=data_dir).test, wanted.images)
    if wanted.kind == "rotation":
        return rotation_curve(run.model, test).to_dict()
    attack: Attack = "fgsm" if wanted.kind.startswith("fgsm") else "pgd"
    objective: Objective = "scores" if wanted.kind.endswith("-scores") else "loss"
    return attack_curve(run.model, test, attack, objective=objective, steps=PGD_STEPS).to_dict()


def _spread(images: ImageSet, number: int | None) -> ImageSet:
    """Take a number of images, evenly from all over the set; all if there are fewer or None is given."""
    if number is None or number >= len(images):
        return images
    return images.select(torch.arange(number) * len(images) // number)
