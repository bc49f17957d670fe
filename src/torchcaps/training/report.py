"""The pictures of a finished run: curves, mistakes, and what its capsules encode."""

from __future__ import annotations

from pathlib import Path

from torchcaps.analysis import (
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
from torchcaps.datasets import Dataset
from torchcaps.files import remove_temporaries
from torchcaps.models import Network
from torchcaps.training.run import FIGURES

#: Test images in the sheet of reconstructions, and behind the mean figures of routing.
SHOWN, MEASURED = 20, 100


def draw_figures(run: Path, model: Network, dataset: Dataset, evaluation: Evaluation) -> list[Path]:
    """Draw what there is to see of a run into its folder ``figures``.

    Args:
        run: The run folder, with its metrics.csv.
        model: The network of the epoch chosen on the validation images.
        dataset: What it was trained and tested on.
        evaluation: Its result on the test images.

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
