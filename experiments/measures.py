"""What is measured on the network of the validation-chosen epoch beside its test error."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from experiments.table import OwnMeasure
from torchcaps.analysis import accuracy_curve, evaluate, routing_statistics
from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.datasets import load_dataset
from torchcaps.datasets.sources.affnist import find_originals
from torchcaps.files import user_path
from torchcaps.training import Run

#: How often one image is classified to time it.
CALLS = 100
PGD_STEPS = 20


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
    data_dir = data_dir or run.config.data_dir
    if kind in ("affnist", "familiar") and not callable(wanted):
        name = "affnist" if kind == "affnist" else f"{run.config.data}-familiar"
        found = evaluate(run.model, load_dataset(name, data_dir=data_dir, limit_test=wanted).test)
        values: dict[str, Any] = {"accuracy": found.accuracy, "error": found.error, "images": found.num_images}
        if kind == "affnist":
            originals = find_originals(None if data_dir is None else user_path(data_dir))
            values["source"] = "made" if originals is None else "original"
        return values
    test = run.dataset(data_dir=data_dir).test
    if callable(wanted):
        return wanted(run, test)
    if wanted is not None and wanted < len(test):
        test = test.select(torch.arange(wanted) * len(test) // wanted)
    if kind == "latency":
        return {"milliseconds": _latency(run, test.images[:1])}
    if kind == "coupling":
        statistic = routing_statistics(run.model, test.images)
        return {"entropy": float(statistic.entropy[-1].mean()), "dead": statistic.dead, "images": len(test)}
    measured: Any = kind
    return accuracy_curve(run.model, test, measured, steps=PGD_STEPS).to_dict()


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
