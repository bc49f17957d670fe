"""``torchcaps evaluate``, ``robustness``, ``probe`` and ``detect``: how good a network is, and what it withstands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchcaps.analysis.defaults import ANGLES, EPSILONS, EVASION_STEPS, PGD_STEPS, STEPS
from torchcaps.cli.options import (
    FIGURE,
    Accelerator,
    Data,
    DataDir,
    Given,
    ImagesOf,
    Json,
    RunFolder,
    RunFolders,
    WhichEpoch,
    command,
    draws,
)
from torchcaps.cli.runs import images_for, name_of, open_images, open_run, open_runs, refuse_options
from torchcaps.cli.show import count, say, show
from torchcaps.errors import InputError
from torchcaps.ranges import Count, Seed

if TYPE_CHECKING:
    from torchcaps.analysis import Probe, RobustnessCurve
    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run

Kind = Literal["rotation", "fgsm", "pgd"]
_KINDS: tuple[Kind, ...] = ("rotation", "fgsm", "pgd")


@command(
    ("evaluate runs/sabour2017-digits-1", "the test images of the run's data set"),
    ("evaluate runs/sabour2017-digits-1 --json > test.json", "the same for other programs"),
    ("evaluate runs/sabour2017-mnist-1 --data kmnist", "on other images of the same shape and class count"),
    ("evaluate runs/sabour2017-digits-1 --figure confusion.png", "with the confusion matrix as a figure"),
    ("evaluate --data mnist", "the network that comes with torchcaps"),
)
def evaluate(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    images_of: ImagesOf,
    batch_size: Annotated[Count, Given("Images at a time.")] = 256,
    precision: Annotated[Literal["32", "bf16"], Given("float32, or bfloat16 convolutions and dense layers.")] = "32",
    accelerator: Accelerator = "auto",
    figure: Annotated[Path | None, FIGURE, draws("the confusion matrix")] = None,
    json: Json = False,
) -> None:
    """Judge a network on the test images: accuracy, error, loss, each class, and the confusion matrix.

    RUN is a run folder, a folder written by save_pretrained, or a repository of the hub such as someone/capsnet;
    without it, the network that comes with torchcaps is judged.
    """
    from dataclasses import replace

    from torchcaps.analysis import evaluate as judge

    run = open_run(run_folder, which, accelerator)
    images, dataset, where = open_images(run, images_of)
    found = judge(run.model, images, batch_size=batch_size, class_names=dataset.class_names, precision=precision)
    weights = {"best": "best epoch", "last": "last checkpoint"}[which]
    weights = "comes with torchcaps" if run_folder is None else weights
    title = f"{name_of(run_folder)} ({weights}) on the {where}"
    about = {"run": name_of(run_folder), "which": which, "data": dataset.name, "split": images_of.split}
    show(replace(found, title=title), json=json, figure=figure, about=about)


@command(
    ("robustness runs/sabour2017-mnist-1", "rotations, FGSM and PGD on the first 1,000 test images"),
    ("robustness --data mnist --limit 200", "the network that comes with torchcaps"),
    ("robustness runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
    ("robustness runs/capsules --kind pgd --objective scores --steps 50", "a stronger attack"),
)
def robustness(
    run_folders: RunFolders = (),
    *,
    which: WhichEpoch = "best",
    images_of: ImagesOf,
    kinds: Annotated[
        Sequence[Kind],
        Given("How the images are changed; may be given several times.", default="all", name="--kind"),
    ] = (),
    angles: Annotated[tuple[float, ...], Given("Degrees.")] = ANGLES,
    epsilons: Annotated[tuple[float, ...], Given("Largest changes of a pixel (0..1) by FGSM and PGD.")] = EPSILONS,
    steps: Annotated[int, STEPS, Given("Steps of PGD.")] = PGD_STEPS,
    objective: Annotated[
        Literal["loss", "scores"],
        Given(
            "What the attacks follow: the network's own loss, which is flat where an image is classified with enough "
            "margin, or the scores, which are not."
        ),
    ] = "loss",
    limit: Annotated[Count, Given("Use this many images, the first ones.")] = 1000,
    seed: Annotated[Seed, Given("Seed of PGD's random starts.")] = 0,
    accelerator: Accelerator = "auto",
    figure: Annotated[Path | None, FIGURE, draws("the curves")] = None,
    json: Json = False,
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
    for name, folder, run in open_runs(run_folders, which, accelerator):
        images, dataset, where = open_images(run, images_of)
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
        abouts.append({"run": name_of(folder), "which": which, "data": dataset.name, "split": images_of.split})
    show(Robustness(networks, shown), json=json, figure=figure, about=abouts)


@command(
    ("probe", "rotation, scale, shear and shifts, by the network that comes with torchcaps"),
    ("probe runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
    ("probe runs/compact-smallnorb-1 --data smallnorb-azimuth", "azimuth and elevation of toys"),
)
def probe(
    run_folders: RunFolders = (),
    *,
    which: WhichEpoch = "best",
    data: Data = None,
    data_dir: DataDir = None,
    limit: Annotated[Count, Given("The first so many images on either side.")] = 5000,
    seed: Annotated[Seed, Given("Of the changes of images, and of shuffles.")] = 0,
    accelerator: Accelerator = "auto",
    figure: Annotated[Path | None, FIGURE, draws("bars")] = None,
    json: Json = False,
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
    for name, folder, run in open_runs(run_folders, which, accelerator):
        dataset = run.dataset(images_for(run, data), data_dir)
        fitted, held_out = _with_factors(dataset, limit, seed)
        networks[name] = measure(run.model, fitted, held_out, seed=seed)
        wheres[name] = f"{count(len(fitted))} training and {count(len(held_out))} test images of {dataset.name}"
        about = {"run": name_of(folder), "which": which, "data": dataset.name, "seed": seed}
        abouts.append(about | {"fitted": len(fitted), "held_out": len(held_out)})
    show(Probing(networks, wheres), json=json, figure=figure, about=abouts)


def _with_factors(dataset: Dataset, limit: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Images to fit and to judge on: the data set's own factors, or those of affine changes."""
    from torchcaps.analysis import with_affine_factors

    train, test = (images.preview(limit) for images in (dataset.train, dataset.test))
    if train.num_objects > 1 or train.factors:
        return train, test
    return with_affine_factors(train, seed=seed), with_affine_factors(test, seed=seed ^ 1)


@command(
    ("detect --data mnist --against fashion-mnist", "the network that comes with torchcaps"),
    ("detect runs/compact-mnist-1 --against fashion-mnist --against digits", "images of two other data sets"),
    ("detect runs/compact-mnist-1 --epsilons 0.05,0.1 --steps 200", "stronger attacks"),
)
def detect(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    data: Data = None,
    data_dir: DataDir = None,
    against: Annotated[
        Sequence[str], Given("Images of another kind; may be given several times.", metavar="NAME")
    ] = (),
    measure: Annotated[
        Literal["reconstruction", "score"] | None,
        Given("Distance to the reconstruction, or 1 less the highest score.", default="reconstruction, with a decoder"),
    ] = None,
    epsilons: Annotated[
        tuple[float, ...],
        Given("Largest changes of a pixel (0..1) by FGSM, PGD and the attack that knows the detector."),
    ] = (0.1,),
    steps: Annotated[int, STEPS, Given("Steps of the attacks but FGSM.")] = EVASION_STEPS,
    limit: Annotated[Count, Given("The first so many images of each kind.")] = 100,
    seed: Annotated[Seed, Given("Of the attacks' starts.")] = 0,
    accelerator: Accelerator = "auto",
    json: Json = False,
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
    show(Detections(detector, found, title), json=json, about=about)


def _other_images(run: Run, data: str, data_dir: str | None) -> ImageSet:
    """The test images of a data set of any classes, as a network takes images."""
    from torchcaps.datasets import find_dataset, load_dataset

    own = find_dataset(data)[0].find is not None
    images = load_dataset(data, data_dir=data_dir if own else None, image_size=run.model.in_shape[1:]).test
    if images.in_shape != run.model.in_shape:
        raise InputError(
            f"{data} has images of {images.in_shape[0]} channels, but the network takes {run.model.in_shape[0]}"
        )
    return images
