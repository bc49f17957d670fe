"""``torchcaps probe`` and ``detect``: what a pose knows, and whether a network knows what it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.analysis.strengths import EVASION_STEPS, STEPS
from torchcaps.cli.base import Command
from torchcaps.cli.output import (
    add_row,
    count,
    percent,
    print_json,
    print_pairs,
    print_table,
    print_title,
    table,
    write_figure,
)
from torchcaps.cli.runs import (
    FIGURE,
    PATH,
    Which,
    accelerator_option,
    dataset_options,
    images_for,
    json_option,
    names_of,
    open_run,
    optional_run_argument,
    which_option,
)
from torchcaps.cli.values import Numbers, whole_numbers
from torchcaps.errors import InputError
from torchcaps.ranges import COUNT, SEED

if TYPE_CHECKING:
    from torchcaps.analysis import Detection, Probe
    from torchcaps.analysis.detection import Measure
    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run

SHIPPED_NAME = "compact"


@click.command(
    "probe",
    cls=Command,
    examples=(
        ("probe", "rotation, scale, shear and shifts, by the network that comes with torchcaps"),
        ("probe runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
        ("probe runs/compact-smallnorb-1 --data smallnorb-azimuth", "azimuth and elevation of toys"),
    ),
)
@click.argument("run_folders", metavar="[RUN]...", nargs=-1, type=PATH)
@which_option
@dataset_options
@click.option("--limit", type=whole_numbers(COUNT), default=5000, help="The first so many images on either side.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Of the changes of images, and of shuffles.")
@accelerator_option
@click.option("--figure", type=FIGURE, help="Draw bars to this file, .png, .pdf or .svg.")
@json_option
def probe(
    run_folders: tuple[Path, ...],
    which: Which,
    data: str | None,
    data_dir: str | None,
    limit: int,
    seed: int,
    accelerator: str,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Measure how well known factors of images are read off the pose of the class capsule by a linear map.

    A ridge regression is fitted on training images and judged by R² on test images; a CNN is judged by what goes into
    its last layer, and the pixels are judged too. The factors are those of the data set, such as
    smallnorb-azimuth's, or those by which images are changed here: rotation, scale, shear, shifts. RUN as for
    robustness; several are compared; without it, the network that comes with torchcaps.
    """
    from torchcaps.analysis import figure_probe
    from torchcaps.analysis import probe as measure

    names = names_of(run_folders) if run_folders else [SHIPPED_NAME]
    networks: dict[str, list[Probe]] = {}
    described, wheres = [], []
    for folder, name in zip(run_folders or [None], names, strict=True):
        run = open_run(folder, which, accelerator)
        dataset = run.dataset(images_for(run, data), data_dir)
        fitted, held_out = _with_factors(dataset, limit, seed)
        networks[name] = measure(run.model, fitted, held_out, seed=seed)
        wheres.append(f"{count(len(fitted))} training and {count(len(held_out))} test images of {dataset.name}")
        about = {"run": name if folder is None else str(folder), "which": which, "data": dataset.name, "seed": seed}
        images = {"fitted": len(fitted), "held_out": len(held_out)}
        described.append(about | images | {"probes": [each.to_dict() for each in networks[name]]})
    if as_json:
        print_json(described)
    else:
        for (name, probes), where in zip(networks.items(), wheres, strict=True):
            factors = list(probes[0].r2)
            rows = table("R²", "numbers", *factors)
            for each in probes:
                add_row(rows, each.numbers, each.width, *(f"{each.r2[factor]:.3f}" for factor in factors))
                add_row(rows, "  shuffled", "", *(f"{each.shuffled[factor]:.3f}" for factor in factors), style="dim")
            print_table(rows, f"{name}: fitted and judged on {where}")
    if figure is not None:
        write_figure(figure_probe(networks), figure, quiet=as_json)


def _with_factors(dataset: Dataset, limit: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Images to fit and to judge on: the data set's own factors, or those of affine changes."""
    from torchcaps.analysis import with_affine_factors

    train, test = (images.preview(limit) for images in (dataset.train, dataset.test))
    if train.num_objects > 1 or train.factors:
        return train, test
    return with_affine_factors(train, seed=seed), with_affine_factors(test, seed=seed ^ 1)


@click.command(
    "detect",
    cls=Command,
    examples=(
        ("detect --data mnist --against fashion-mnist", "the network that comes with torchcaps"),
        ("detect runs/compact-mnist-1 --against fashion-mnist --against digits", "images of two other data sets"),
        ("detect runs/compact-mnist-1 --epsilons 0.05,0.1 --steps 200", "stronger attacks"),
    ),
)
@optional_run_argument
@dataset_options
@click.option("--against", multiple=True, metavar="NAME", help="Images of another kind; may be given several times.")
@click.option(
    "--measure",
    type=click.Choice(["reconstruction", "score"]),
    help="Distance to the reconstruction, or 1 less the highest score.  [default: reconstruction, with a decoder]",
)
@click.option(
    "--epsilons",
    type=Numbers(float, "0.05,0.1"),
    default="0.1",
    help="Largest changes of a pixel (0..1) by FGSM, PGD and the attack that knows the detector.",
)
@click.option("--steps", type=whole_numbers(STEPS), default=EVASION_STEPS, help="Steps of the attacks but FGSM.")
@click.option("--limit", type=whole_numbers(COUNT), default=500, help="The first so many images of each kind.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Of the attacks' starts.")
@accelerator_option
@json_option
def detect(
    run_folder: Path | None,
    which: Which,
    data: str | None,
    data_dir: str | None,
    against: tuple[str, ...],
    measure: Measure | None,
    epsilons: tuple[float, ...],
    steps: int,
    limit: int,
    seed: int,
    accelerator: str,
    as_json: bool,
) -> None:
    """Measure how well images of another kind, and attacked images, are told by the distance to their reconstruction.

    The limit of each class is what 5 % of its validation images pass. RUN is a run folder, a folder written by
    save_pretrained, or a repository of the hub; without it, the network that comes with torchcaps.
    """
    from torchcaps.analysis import detect as judge
    from torchcaps.analysis import fit_detector

    run = open_run(run_folder, which, accelerator)
    dataset = run.dataset(images_for(run, data), data_dir)
    detector = fit_detector(run.model, dataset.validation, measure=measure)
    others = {name: _other_images(run, name, data_dir).preview(limit) for name in against}
    test = dataset.test.preview(limit)
    found = judge(run.model, test, detector, others=others, epsilons=epsilons, steps=steps, seed=seed)
    if as_json:
        about = {"run": str(run.path), "which": which, "data": dataset.name, "steps": steps, "seed": seed}
        print_json(about | {"detector": detector.to_dict(), "found": [each.to_dict() for each in found]})
    else:
        words = {"reconstruction": "distance to the reconstruction", "score": "1 less the highest score"}
        print_title(f"{run_folder or SHIPPED_NAME}: {words[detector.measure]}, on test images of {dataset.name}")
        false_alarms = percent(found[0].detected / found[0].num_images)
        print_pairs([("Limits", f"of {count(detector.num_images)} validation images"), ("False alarms", false_alarms)])
        _show(found[1:])


def _other_images(run: Run, data: str, data_dir: str | None) -> ImageSet:
    """The test images of a data set of any classes, as a network takes images."""
    from torchcaps.datasets import find_dataset, load_dataset

    own = find_dataset(data)[0].takes_data_dir
    images = load_dataset(data, data_dir=data_dir if own else None, image_size=run.model.in_shape[1:]).test
    if images.in_shape != run.model.in_shape:
        raise InputError(
            f"{data} has images of {images.in_shape[0]} channels, but the network takes {run.model.in_shape[0]}"
        )
    return images


def _show(found: list[Detection]) -> None:
    rows = table("images", "fooled", "AUROC", "detected", "fooled, undetected")
    for each in found:
        shares = (each.fooled / each.num_images, each.detected / each.fooled if each.fooled else None, each.undetected)
        fooled, detected, undetected = ("–" if share is None else percent(share) for share in shares)
        add_row(rows, each.kind, fooled, "–" if each.auroc is None else f"{each.auroc:.3f}", detected, undetected)
    print_table(rows)
