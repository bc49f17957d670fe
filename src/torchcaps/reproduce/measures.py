"""What is measured on a trained network beside its test error."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from torchcaps.analysis import attack_curve, evaluate, rotation_curve, routing_statistics
from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.analysis.robustness import Attack, Objective
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.datasets.sources.affnist import find_originals
from torchcaps.files import user_path
from torchcaps.reproduce.table import Measure
from torchcaps.training import Run

CALLS = 100
"""How often one image is classified to time it."""
PGD_STEPS = 20
"""Of the tables, whatever the default of a single measurement is."""


def measure(run: Run, wanted: Measure, data_dir: str | None = None) -> dict[str, Any]:
    """Measure a trained network, on files in ``data_dir``; in the folder of the run if None, else in the usual places.

    Returns:
        For ``affnist``, ``accuracy``, ``error``, ``images`` and their ``source``, which are made here (``"made"``) or
        read from the ``"original"`` files; for ``familiar`` the first three; for ``latency`` ``milliseconds``, the
        median of :data:`CALLS`; for ``coupling``, of a capsule network, ``entropy``, 0 to 1, and ``dead``, a share;
        else a :class:`~torchcaps.analysis.RobustnessCurve` as a dictionary.

    Raises:
        InputError: Data that cannot be loaded, or that the network was not built for.
    """
    if data_dir is None and run.config is not None:
        data_dir = run.config.data_dir
    if wanted.kind == "affnist":
        source = "made" if find_originals(None if data_dir is None else user_path(data_dir)) is None else "original"
        return _evaluated(run, "affnist", wanted, data_dir) | {"source": source}
    if wanted.kind == "familiar":
        assert run.config is not None
        return _evaluated(run, f"{run.config.data}-familiar", wanted, data_dir)
    test = _spread(run.dataset(data_dir=data_dir).test, wanted.images)
    if wanted.kind == "latency":
        return {"milliseconds": _latency(run, test.images[:1])}
    if wanted.kind == "coupling":
        found = routing_statistics(run.model, test.images)
        return {"entropy": float(found.entropy[-1].mean()), "dead": found.dead, "images": len(test)}
    if wanted.kind == "rotation":
        return rotation_curve(run.model, test).to_dict()
    attack: Attack = "fgsm" if wanted.kind.startswith("fgsm") else "pgd"
    objective: Objective = "scores" if wanted.kind.endswith("-scores") else "loss"
    return attack_curve(run.model, test, attack, objective=objective, steps=PGD_STEPS).to_dict()


def _evaluated(run: Run, data: str, wanted: Measure, data_dir: str | None) -> dict[str, Any]:
    """Accuracy on the test images of another data set."""
    found = evaluate(run.model, load_dataset(data, data_dir=data_dir, limit_test=wanted.images).test)
    return {"accuracy": found.accuracy, "error": found.error, "images": found.num_images}


def _latency(run: Run, image: Shaped[Tensor, "1 C H W"]) -> float:
    """The median time, milliseconds, in which the network classifies one image."""
    times = []
    with inference(run.model):
        pixels = as_pixels(run.model, image)
        for _ in range(10 + CALLS):
            start = time.perf_counter()
            run.model(pixels).scores.cpu()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[10:])


def _spread(images: ImageSet, number: int | None) -> ImageSet:
    """Take a number of images, evenly from all over the set; all if there are fewer or None is given."""
    if number is None or number >= len(images):
        return images
    return images.select(torch.arange(number) * len(images) // number)
