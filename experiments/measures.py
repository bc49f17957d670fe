"""Additional measures of a trained network, at the epoch that validation chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.benchmark import Timer

from experiments.table import OwnMeasure
from torchcaps.analysis import accuracy_curve, evaluate, routing_statistics
from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.datasets import load_dataset
from torchcaps.datasets.sources.affnist import find_originals
from torchcaps.files import user_path
from torchcaps.training import Run


def measure(run: Run, kind: str, wanted: int | OwnMeasure | None, data_dir: str | None) -> Mapping[str, Any]:
    """Measure a trained network.

    Args:
        run: The loaded run.
        kind: ``"affnist"``: ``accuracy``, ``error``, ``images`` and their ``source`` (made here or original files);
            ``"familiar"``: the same for test objects from sides that were trained on; ``"latency"``: ``milliseconds``
            for one image; ``"coupling"``: ``entropy`` of the last layer's coupling, 0 to 1, and the share of its
            ``dead`` capsules; ``"rotation"``, ``"fgsm"``, ``"pgd"``, ``"fgsm-scores"`` or ``"pgd-scores"``: a
            :class:`~torchcaps.analysis.RobustnessCurve`.
        wanted: Number of test images, evenly spaced in the set; None: all. Or a function that measures.
        data_dir: Folder of the data sets; None: as in the run.
    """
    assert run.config is not None
    model, data_dir = run.model, data_dir or run.config.data_dir
    if callable(wanted):
        return wanted(run, run.dataset(data_dir=data_dir).test)
    if kind in ("affnist", "familiar"):
        name = "affnist" if kind == "affnist" else f"{run.config.data}-familiar"
        size = None if kind == "affnist" else run.config.image_size
        found = evaluate(model, load_dataset(name, data_dir=data_dir, image_size=size, limit_test=wanted).test)
        values = {"accuracy": found.accuracy, "error": found.error, "images": found.num_images}
        original = kind == "affnist" and find_originals(None if data_dir is None else user_path(data_dir))
        return values | ({"source": "original" if original else "made"} if kind == "affnist" else {})
    test = run.dataset(data_dir=data_dir).test
    if wanted is not None and wanted < len(test):
        test = test.select(torch.arange(wanted) * len(test) // wanted)
    if kind == "latency":
        with inference(model):
            given = {"model": model, "pixels": as_pixels(model, test.images[:1])}
            timer = Timer("model(pixels).scores", globals=given, num_threads=torch.get_num_threads())
            return {"milliseconds": 1e3 * timer.blocked_autorange(min_run_time=1.0).median}
    if kind == "coupling":
        statistic = routing_statistics(model, test.images)
        return {"entropy": float(statistic.entropy[-1].mean()), "dead": statistic.dead, "images": len(test)}
    measured: Any = kind
    return accuracy_curve(model, test, measured, steps=20).to_dict()
