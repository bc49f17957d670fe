"""The results of a finished run: ``summary.json``, and pictures of its curves, its mistakes and its capsules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.analysis import (
    Calibration,
    Evaluation,
    figure_confusion,
    figure_coupling,
    figure_curves,
    figure_perturbation,
    figure_reconstructions,
    figure_routing_statistics,
    figure_samples,
    layers_with_coupling,
    perturb_capsule,
    read_metrics,
    reconstruct,
    routing_statistics,
    save_figure,
    trace_routing,
)
from torchcaps.datasets import Dataset, ImageSet
from torchcaps.files import remove_temporaries
from torchcaps.models import Network
from torchcaps.training.checkpoint import ProgressState
from torchcaps.training.config import TrainConfig
from torchcaps.training.data import FOR_FEW, LEAST_STEPS
from torchcaps.training.environment import hardware, versions
from torchcaps.training.recipe import Recipe
from torchcaps.training.run import FIGURES

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: Test images in the sheet of reconstructions, and behind the mean figures of routing.
SHOWN, MEASURED = 20, 100


def summarise(
    config: TrainConfig,
    dataset: Dataset,
    network: Network,
    state: ProgressState,
    judged: Mapping[str, Evaluation],
    fabric: Fabric,
    *,
    out: Path,
    calibration: Calibration,
    warning: str | None,
) -> dict[str, Any]:
    """The results of a run in the folder ``out``, and all that a table of results needs besides.

    ``judged`` has the results of the weights of the ``best`` and the ``last`` epoch on the test images, ``calibration``
    what is usual for the best ones; ``warning`` says that nothing was learned.
    """
    best, last, peak = state.best(config.recipe.select), state.history[-1], state.peak_memory_mib
    return {
        "preset": config.preset,
        "data": config.data,
        "out": str(out),
        "seed": config.seed,
        "precision": config.precision,
        "epochs": state.epoch,
        "best_epoch": best["epoch"],
        "select": config.recipe.select,
        "parameters": sum(p.numel() for p in network.parameters()),
        "images": {part: len(getattr(dataset, part)) for part in ("train", "validation", "test")},
        "in_shape": list(dataset.in_shape),
        "classes": dataset.num_classes,
        "objects": dataset.num_objects,
        "validation": {
            name: {"accuracy": row["validation_accuracy"], "loss": row["validation_loss"]}
            for name, row in (("best", best), ("last", last))
        },
        "test": {
            name: {"accuracy": each.accuracy, "error": each.error, "loss": each.loss, "images": each.num_images}
            for name, each in judged.items()
        },
        "calibration": dataclasses.asdict(calibration),
        "warning": warning,
        "skipped": list(dataset.skipped),
        "seconds": round(state.seconds, 1),
        "images_per_second": last["images_per_second"],
        "peak_memory_mib": None if peak is None else round(peak, 1),
        "hardware": hardware(fabric.device) | {"processes": fabric.world_size},
        "versions": versions(fabric.device),
        "commit": state.commits[-1],
        "earlier_commits": state.commits[:-1],
        "command": state.commands[0],
        "resumed_with": state.commands[1:],
    }


def chance(images: ImageSet) -> float:
    """The accuracy that a network must exceed to be better than one that gives every image the most frequent class.

    It is that class's share p of the N images, and one standard error, √(p·(1 − p) / N).
    """
    share = float(images.labels.bincount().max()) / len(images)
    return share + math.sqrt(share * (1 - share) / len(images))


def warning_of_chance(judged: Evaluation, recipe: Recipe, preset: str, steps: int) -> str:
    """A sentence that a network is no better than chance on the validation images, and what to try.

    Args:
        judged: The network on the validation images.
        recipe: How it was trained.
        preset: The preset of which it is.
        steps: Steps an epoch.
    """
    another = "" if preset == FOR_FEW else f"the network {FOR_FEW}, which learns from few images, "
    epochs = max(4 * recipe.epochs, math.ceil(LEAST_STEPS / steps))
    given = judged.confusion.sum(0)
    is_one = np.count_nonzero(given) == 1
    what = f'takes every validation image for "{judged.class_names[given.argmax()]}"' if is_one else "guesses"
    return (
        f"the network has learned nothing: it {what}, {judged.accuracy:.1%} right, which is no better than chance. Try "
        f"{another}more steps (--epochs {epochs}), a smaller --learning-rate ({recipe.learning_rate / 3:.1g}), or "
        "more and clearer images of each class"
    )


def draw_figures(run: Path, model: Network, dataset: Dataset, evaluation: Evaluation) -> list[Path]:
    """Draw the pictures of a run folder, of its metrics and of its best network, into its folder ``figures``.

    Returns:
        The files written.

    Raises:
        InputError: The folder cannot be written.
    """
    names, test = dataset.class_names, dataset.test
    figures = {
        "samples": figure_samples(dataset.train, names),
        "curves": figure_curves({run.name: read_metrics(run)}),
        "confusion": figure_confusion(evaluation),
    }
    if model.decoder is not None:
        first = test.preview(SHOWN)
        figures["reconstructions"] = figure_reconstructions(reconstruct(model, first.images, first.labels), names)
        figures["perturbation"] = figure_perturbation(perturb_capsule(model, test.images[0]), names)
    for number in layers_with_coupling(model):
        name = "routing" if number == len(model.layers) else f"routing-layer-{number}"
        trace = trace_routing(model, test.images[:1], layer=number)
        figures[name] = figure_coupling(trace, class_names=names if number == len(model.layers) else None)
        statistics = routing_statistics(model, test.images[:MEASURED], layer=number)
        figures[name.replace("routing", "routing-statistics")] = figure_routing_statistics(statistics)
    paths = {name: run / FIGURES / f"{name}.png" for name in figures}
    for path in paths.values():
        remove_temporaries(path)  # of an earlier sitting
    return [save_figure(figure, paths[name]) for name, figure in figures.items()]
