"""What is measured on the network of the validation-chosen epoch beside its test error."""

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
        run: A run that is read back.
        kind: ``"affnist"``: ``accuracy``, ``error``, ``images`` and their ``source``, made here or original files;
            ``"familiar"``: the same on test objects seen from sides that were trained on; ``"latency"``:
            ``milliseconds`` for one image; ``"coupling"``: ``entropy``, 0 to 1, of the last layer's coupling, and the
            share of its ``dead`` capsules; ``"rotation"``, ``"fgsm"``, ``"pgd"``, ``"fgsm-scores"`` or
            ``"pgd-scores"``: a :class:`~torchcaps.analysis.RobustnessCurve`.
        wanted: On how many test images, evenly from all over the set; all if None. Or a function, which measures.
        data_dir: Folder that holds the data sets' files; the run's if None.
    """
    assert run.config is not None
    model, data_dir = run.model, data_dir or run.config.data_dir
    if callable(wanted):
        return wanted(run, run.dataset(data_dir=data_dir).test)
    if kind in ("affnist", "familiar"):
        name = "affnist" if kind == "affnist" else f"{run.config.data}-familiar"
        found = evaluate(model, load_dataset(name, data_dir=data_dir, limit_test=wanted).test)
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
