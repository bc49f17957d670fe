"""``torchcaps evaluate``, ``robustness``, ``probe`` and ``detect``: how good a network is, and what it withstands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from torchcaps.analysis.defaults import ANGLES, EPSILONS, EVASION_STEPS, PGD_STEPS, STEPS
from torchcaps.cli.base import Command
from torchcaps.cli.runs import (
    Split,
    Which,
    accelerator_option,
    data_options,
    dataset_options,
    figure_option,
    images_for,
    json_option,
    name_of,
    names_of,
    open_images,
    open_run,
    optional_run_argument,
    optional_runs_argument,
    refuse_options,
    which_option,
)
from torchcaps.cli.show import count, say, show
from torchcaps.cli.values import Numbers, whole_numbers
from torchcaps.errors import InputError
from torchcaps.ranges import COUNT, SEED

if TYPE_CHECKING:
    from torchcaps.analysis import Precision, Probe, RobustnessCurve
    from torchcaps.analysis.attacks import Objective
    from torchcaps.analysis.detection import Measure
    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run

_KINDS: tuple[Literal["rotation", "fgsm", "pgd"], ...] = ("rotation", "fgsm", "pgd")


@click.command(
    "evaluate",
    cls=Command,
    examples=(
        ("evaluate runs/sabour2017-digits-1", "the test images of the run's data set"),
        ("evaluate runs/sabour2017-digits-1 --json > test.json", "the same for other programs"),
        ("evaluate runs/sabour2017-mnist-1 --data kmnist", "on other images of the same shape and class count"),
        ("evaluate runs/sabour2017-digits-1 --figure confusion.png", "with the confusion matrix as a figure"),
        ("evaluate --data mnist", "the network that comes with torchcaps"),
    ),
)
@optional_run_argument
@data_options
@click.option("--batch-size", type=whole_numbers(COUNT), default=256, help="Images at a time.")
@click.option(
    "--precision",
    type=click.Choice(["32", "bf16"]),
    default="32",
    help="float32, or bfloat16 convolutions and dense layers.",
)
@accelerator_option
@figure_option("the confusion matrix")
@json_option
def evaluate(
    run_folder: Path | None,
    which: Which,
    data: str | None,
    data_dir: str | None,
    split: Split,
    batch_size: int,
    precision: Precision,
    accelerator: str,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Judge a network on the test images: accuracy, error, loss, each class, and the confusion matrix.

    RUN is a run folder, a folder written by save_pretrained, or a repository of the hub such as someone/capsnet;
    without it, the network that comes with torchcaps is judged.
    """
    from dataclasses import replace

    from torchcaps.analysis import evaluate as judge

    run = open_run(run_folder, which, accelerator)
    images, dataset, where = open_images(run, data, data_dir, split)
    found = judge(run.model, images, batch_size=batch_size, class_names=dataset.class_names, precision=precision)
    weights = {"best": "best epoch", "last": "last checkpoint"}[which]
    weights = "comes with torchcaps" if run_folder is None else weights
    title = f"{name_of(run_folder)} ({weights}) on the {where}"
    about = {"run": name_of(run_folder), "which": which, "data": dataset.name, "split": split}
    show(replace(found, title=title), json=as_json, figure=figure, about=about)


@click.command(
    "robustness",
    cls=Command,
    examples=(
        ("robustness runs/sabour2017-mnist-1", "rotations, FGSM and PGD on the first 1,000 test images"),
        ("robustness --data mnist --limit 200", "the network that comes with torchcaps"),
        ("robustness runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
        ("robustness runs/capsules --kind pgd --objective scores --steps 50", "a stronger attack"),
    ),
)
@optional_runs_argument
@which_option
@data_options
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="How the images are changed; may be given several times.  [default: all]",
)
@click.option("--angles", type=Numbers(float, "-30,0,30"), default=",".join(map(str, ANGLES)), help="Degrees.")
@click.option(
    "--epsilons",
    type=Numbers(float, "0,0.1,0.2"),
    default=",".join(f"{epsilon:g}" for epsilon in EPSILONS),
    help="Largest changes of a pixel (0..1) by FGSM and PGD.",
)
@click.option("--steps", type=whole_numbers(STEPS), default=PGD_STEPS, help="Steps of PGD.")
@click.option(
    "--objective",
    type=click.Choice(["loss", "scores"]),
    default="loss",
    help="What the attacks follow: the network's own loss, which is flat where an image is classified with enough "
    "margin, or the scores, which are not.",
)
@click.option("--limit", type=whole_numbers(COUNT), default=1000, help="Use this many images, the first ones.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Seed of PGD's random starts.")
@accelerator_option
@figure_option("the curves")
@json_option
def robustness(
    run_folders: tuple[Path, ...],
    which: Which,
    data: str | None,
    data_dir: str | None,
    split: Split,
    kinds: tuple[str, ...],
    angles: tuple[float, ...],
    epsilons: tuple[float, ...],
    steps: int,
    objective: Objective,
    limit: int,
    seed: int,
    accelerator: str,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Measure how accuracy falls when images are turned, or changed along the network's gradient (FGSM and PGD).

    RUN is a run folder, a folder written by save_pretrained, or a repository of the hub such as someone/capsnet;
    several are compared. Without it, the network that comes with torchcaps is measured. PGD takes most of the time, in
    proportion to --steps.
    """
    kinds = kinds or _KINDS
    if "rotation" not in kinds:
        refuse_options(("angles",), "is for rotations, which --kind leaves out")
    if "fgsm" not in kinds and "pgd" not in kinds:
        refuse_options(("epsilons", "objective"), "is for attacks, which --kind leaves out")
    if "pgd" not in kinds:
        refuse_options(("steps", "seed"), "is for PGD, which --kind leaves out")

    from torchcaps.analysis import Robustness, attack_curve, rotation_curve

    networks: dict[str, list[RobustnessCurve]] = {}
    shown, abouts = {}, []
    folders: Sequence[Path | None] = run_folders or [None]
    for folder, name in zip(folders, names_of(run_folders) or [name_of(None)], strict=True):
        run = open_run(folder, which, accelerator)
        images, dataset, where = open_images(run, data, data_dir, split)
        images = images.preview(limit)
        curves = networks[name] = []
        for kind in _KINDS:
            if kind in kinds:
                say(f"{name}: {kind}", err=True)
                if kind == "rotation":
                    curves.append(rotation_curve(run.model, images, angles=angles))
                else:
                    options: Any = {"epsilons": epsilons, "steps": steps, "objective": objective, "seed": seed}
                    curves.append(attack_curve(run.model, images, kind, **options))
        shown[name] = f"the first {count(len(images))} {where}"
        abouts.append({"run": name_of(folder), "which": which, "data": dataset.name, "split": split})
    show(Robustness(networks, shown), json=as_json, figure=figure, about=abouts)


@click.command(
    "probe",
    cls=Command,
    examples=(
        ("probe", "rotation, scale, shear and shifts, by the network that comes with torchcaps"),
        ("probe runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
        ("probe runs/compact-smallnorb-1 --data smallnorb-azimuth", "azimuth and elevation of toys"),
    ),
)
@optional_runs_argument
@which_option
@dataset_options
@click.option("--limit", type=whole_numbers(COUNT), default=5000, help="The first so many images on either side.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Of the changes of images, and of shuffles.")
@accelerator_option
@figure_option("bars")
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
    from torchcaps.analysis import Probing
    from torchcaps.analysis import probe as measure

    networks: dict[str, list[Probe]] = {}
    wheres, abouts = {}, []
    folders: Sequence[Path | None] = run_folders or [None]
    for folder, name in zip(folders, names_of(run_folders) or [name_of(None)], strict=True):
        run = open_run(folder, which, accelerator)
        dataset = run.dataset(images_for(run, data), data_dir)
        fitted, held_out = _with_factors(dataset, limit, seed)
        networks[name] = measure(run.model, fitted, held_out, seed=seed)
        wheres[name] = f"{count(len(fitted))} training and {count(len(held_out))} test images of {dataset.name}"
        about = {"run": name_of(folder), "which": which, "data": dataset.name, "seed": seed}
        abouts.append(about | {"fitted": len(fitted), "held_out": len(held_out)})
    show(Probing(networks, wheres), json=as_json, figure=figure, about=abouts)


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
@click.option("--limit", type=whole_numbers(COUNT), default=100, help="The first so many images of each kind.")
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
    from torchcaps.analysis import Detections, fit_detector
    from torchcaps.analysis import detect as judge

    run = open_run(run_folder, which, accelerator)
    dataset = run.dataset(images_for(run, data), data_dir)
    detector = fit_detector(run.model, dataset.validation, measure=measure)
    others = {name: _other_images(run, name, data_dir).preview(limit) for name in against}
    test, progress = dataset.test.preview(limit), partial(say, err=True)
    attacks: Any = {"epsilons": epsilons, "steps": steps, "seed": seed}
    found = judge(run.model, test, detector, others=others, progress=progress, **attacks)
    about = {"run": str(run.path), "which": which, "data": dataset.name, "steps": steps, "seed": seed}
    title = f"{name_of(run_folder)}: test images of {dataset.name}, "
    show(Detections(detector, found, title), json=as_json, about=about)


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
