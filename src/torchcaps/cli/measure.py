"""``torchcaps evaluate``, ``robustness``, ``probe`` and ``detect``: measure a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from torchcaps.analysis.defaults import ANGLES, EPSILONS, EVASION_STEPS, PGD_STEPS, STEPS
from torchcaps.cli.options import (
    Accelerator,
    CoverageOption,
    CoverageOverOption,
    Figure,
    Json,
    OtherData,
    Source,
    WhichEpoch,
    command,
)
from torchcaps.cli.runs import (
    check_coverage_options,
    data_files,
    files_of,
    name_of,
    open_images,
    open_run,
    open_runs,
    refuse_options,
)
from torchcaps.cli.show import say, show
from torchcaps.files import check_targets, require_suffix, write_text
from torchcaps.ranges import Count, Fill, Seed
from torchcaps.tasks import TaskName, task_of
from torchcaps.words import counted, each_of, first_of

if TYPE_CHECKING:
    from torchcaps.analysis import Probe, RobustnessCurve
    from torchcaps.analysis.collector import TaskEvaluation
    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run

FillOption = Annotated[
    Fill | None, "Pixels that enter moved images: zeros, or the nearest of the edge (default: as in training)."
]
Kind = Literal["rotation", "fgsm", "pgd"]
Objective = Literal["loss", "scores"]
Measure = Literal["reconstruction", "score"] | None


@command(
    ("evaluate runs/first-digits-1", "on the test images of the run's data set"),
    ("evaluate runs/photos-1 --data folder:new --split all", "on all images of another folder, by class names"),
    ("evaluate runs/first-digits-1 --figure confusion.png", "draw the confusion matrix, too"),
    ("evaluate runs/first-digits-1 --coverage 0.9 --out answers.csv", "sets of classes, and a table of all answers"),
    ("evaluate runs/fold-1 runs/fold-2 runs/fold-3", "mean and deviation of runs, and all their test images together"),
    ("evaluate --data mnist", "the network that comes with torchcaps"),
)
def evaluate(
    run: Sequence[Path] = (),
    *,
    source: Source,
    batch_size: Annotated[Count, "Images in a batch."] = 256,
    precision: Annotated[Literal["32", "bf16"], "32: float32; bf16: bfloat16 in convolutions and dense layers."] = "32",
    accelerator: Accelerator = "auto",
    coverage: CoverageOption = None,
    coverage_over: CoverageOverOption = "all",
    group: Annotated[
        str | None, "Column, array or regular expression of paths that names the group of each image of --data."
    ] = None,
    out: Annotated[
        Path | None,
        "Write file, truth, answer, set, group and scores of each image to this .csv file; of masks, Dice scores.",
    ] = None,
    overwrite: Annotated[bool, "Replace the file that --out names."] = False,
    figure: Annotated[Figure, "Draw the confusion matrix to this file, .png, .pdf or .svg."] = None,
    json: Json = False,
) -> None:
    """Measure accuracy, error and loss on test images, for each class, with a confusion matrix.

    Several runs, such as those of the folds of a data set, are shown with their mean and standard deviation, and with
    the confusion matrix of all their images.
    """
    from torchcaps.analysis import evaluate as measure
    from torchcaps.analysis.collector import answers_csv
    from torchcaps.analysis.pooled import PooledEvaluation

    check_coverage_options(coverage)
    if source.data is None:
        refuse_options(("group",), "is for --data, because images of the run's own data set have its groups")
    if out is None:
        refuse_options(("overwrite",), "is for the file of --out, but there is none")
    else:
        require_suffix(out, ".csv", "--out")
        check_targets([out], (file for each in run for file in files_of(each)), overwrite=overwrite)
    results: dict[str, TaskEvaluation] = {}
    words: dict[str, str] = {}
    abouts, answers = list[dict[str, Any]](), dict[str, list[list[str]]]()
    for name, place, opened in open_runs(run, source.which, accelerator):
        if out is not None:
            check_targets([out], data_files(opened, source.data), overwrite=overwrite)
        part = open_images(opened, source, group)
        options: Any = {"batch_size": batch_size, "class_names": part.class_names, "precision": precision}
        options["colours"] = part.colours
        weights = {"best": "best epoch", "last": "last checkpoint"}[source.which]
        if opened.config is None:
            weights = "a saved network" if run else "comes with torchcaps"
        words[name] = f"{weights} on the {part.words}"
        result = measure(opened.model, part.images, **options).titled(f"{place} ({weights}) on the {part.words}")
        results[name] = result.with_certainty(opened.images.certainty, coverage, coverage_over)
        abouts.append({"run": place, "which": source.which, "data": part.name, "split": source.split})
        if out is not None:
            answers[name] = results[name].answers_table(part.images)
    if out is not None:
        write_text(out, answers_csv(answers), new=not overwrite)
    if len(results) == 1:
        show(results[name], json=json, figure=figure, about=abouts[0])
    else:
        show(PooledEvaluation(results, words, task_of(opened.model), abouts), json=json, figure=figure)
    if out is not None:
        say(f"wrote {out}, a line for {each_of(sum(len(each) - 1 for each in answers.values()), 'image')}", err=json)


@command(
    ("robustness runs/sabour2017-mnist-1", "rotations, FGSM and PGD on the first 1,000 test images"),
    ("robustness --data mnist --limit 200", "the network that comes with torchcaps"),
    ("robustness runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
    ("robustness runs/capsules --kind pgd --objective scores --steps 50", "a stronger attack"),
)
def robustness(
    run: Sequence[Path] = (),
    *,
    source: Source,
    kind: Annotated[Sequence[Kind], "Change of the images; may be repeated (default: all)."] = (),
    angles: Annotated[tuple[float, ...], "Angles of rotation, degrees."] = ANGLES,
    epsilons: Annotated[tuple[float, ...], "Largest changes of a pixel by FGSM and PGD, 0 to 1."] = EPSILONS,
    steps: Annotated[int, STEPS, "Steps of PGD."] = PGD_STEPS,
    objective: Annotated[
        Objective, "Function that attacks increase: the training loss, or a loss of the scores without flat regions."
    ] = "loss",
    fill: FillOption = None,
    limit: Annotated[Count, "Use the first images only, this many."] = 1000,
    seed: Annotated[Seed, "Random seed of PGD's starts."] = 0,
    accelerator: Accelerator = "auto",
    figure: Annotated[Figure, "Draw the curves to this file, .png, .pdf or .svg."] = None,
    json: Json = False,
) -> None:
    """Measure accuracy on rotated images and on images attacked by FGSM and PGD, for one network or several.

    PGD takes most of the time, in proportion to --steps.
    """
    kinds = [each for each in get_args(Kind) if not kind or each in kind]
    if "rotation" not in kinds:
        refuse_options(("angles", "fill"), "is for rotations, but --kind excludes them")
    if kinds == ["rotation"]:
        refuse_options(("epsilons", "objective"), "is for attacks, but --kind excludes them")
    if "pgd" not in kinds:
        refuse_options(("steps", "seed"), "is for PGD, but --kind excludes it")

    from torchcaps.analysis import Robustness, accuracy_curve

    networks: dict[str, list[RobustnessCurve]] = {}
    shown, abouts, along = {}, [], "-scores" * (objective == "scores")
    for name, place, opened in open_runs(run, source.which, accelerator):
        part = open_images(opened, source)
        images, networks[name] = part.images.preview(limit), []
        for each in kinds:
            say(f"{name}: {each}", err=True)
            options: Any = {"kind": each, "strengths": angles, "fill": fill or fill_of(opened)}
            if each != "rotation":
                options = {"kind": each + along, "strengths": epsilons, "steps": steps, "seed": seed}
            networks[name].append(accuracy_curve(opened.model, images, **options))
        shown[name] = f"the {first_of(len(images), part.words)}"
        abouts.append({"run": place, "which": source.which, "data": part.name, "split": source.split})
    show(Robustness(networks, shown), json=json, figure=figure, about=abouts)


@command(
    ("probe", "rotation, scale, shear and shifts, for the network that comes with torchcaps"),
    ("probe runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
    ("probe runs/compact-smallnorb-1 --data smallnorb-azimuth", "azimuth and elevation of toys"),
)
def probe(
    run: Sequence[Path] = (),
    *,
    which: WhichEpoch = "best",
    source: OtherData,
    fill: FillOption = None,
    limit: Annotated[Count, "Use this many training and test images, the first ones."] = 5000,
    seed: Annotated[Seed, "Random seed of the changes of images and of shuffles."] = 0,
    accelerator: Accelerator = "auto",
    figure: Annotated[Figure, "Draw R² as bars to this file, .png, .pdf or .svg."] = None,
    json: Json = False,
) -> None:
    """Measure by linear probes how well the pose of the class capsule encodes rotation, scale and other factors.

    A ridge regression is fitted on training images and scored by R² on test images. For a CNN it reads the input of the
    last layer; the pixels are the baseline. The factors come from the data set (such as smallnorb-azimuth), or images
    are transformed here by rotation, scale, shear and shifts. Several networks are compared.
    """
    from torchcaps.analysis import Probing
    from torchcaps.analysis import probe as measure

    networks: dict[str, list[Probe]] = {}
    wheres, abouts = {}, []
    for name, place, opened in open_runs(run, which, accelerator):
        dataset = opened.dataset(source.data, source.data_dir, by_number=source.by_number)
        fitted, held_out = images_with_factors(dataset, limit, seed, fill, fill_of(opened))
        networks[name] = measure(opened.model, fitted, held_out, seed=seed)
        wheres[name] = f"{len(fitted):,} training and {counted(len(held_out), 'test image')} of {dataset.name}"
        about = {"run": place, "which": which, "data": dataset.name, "seed": seed}
        abouts.append(about | {"fitted": len(fitted), "held_out": len(held_out)})
    show(Probing(networks, wheres), json=json, figure=figure, about=abouts)


def fill_of(run: Run) -> Fill:
    """Return the pixels that entered moved images in the training of a network; zeros if it is not known."""
    return "zeros" if run.config is None else run.config.recipe.fill


def images_with_factors(
    dataset: Dataset, limit: int, seed: int, fill: Fill | None, trained: Fill
) -> tuple[ImageSet, ImageSet]:
    """Return images to fit and to test on, with the data set's factors or, if it has none, of affine changes.

    Pixels that enter from outside are ``fill``; None: ``trained``, as in the training of the network.
    """
    from torchcaps.analysis import with_affine_factors

    train, test = (images.preview(limit) for images in (dataset.train, dataset.test))
    if train.num_objects > 1 or any(values.is_floating_point() for values in train.factors.values()):
        refuse_options(("fill",), f"is for images without factors, but {dataset.name} has some")
        return train, test
    train, test = (
        with_affine_factors(images, seed=each, fill=fill or trained)
        for images, each in ((train, seed), (test, seed ^ 1))
    )
    return train, test


@command(
    ("detect --data mnist --against fashion-mnist", "the network that comes with torchcaps"),
    ("detect runs/compact-mnist-1 --against fashion-mnist --against digits", "images of two other data sets"),
    ("detect runs/compact-mnist-1 --epsilons 0.05,0.1 --steps 200", "stronger attacks"),
)
def detect(
    run: Path | None = None,
    *,
    which: WhichEpoch = "best",
    source: OtherData,
    against: Annotated[Sequence[str], "Data set of out-of-distribution images; may be repeated."] = (),
    task: Annotated[
        TaskName | None, "Task to read the targets of --against for (default: chosen by their form)."
    ] = None,
    measure: Annotated[
        Measure, "Detection score: distance to the reconstruction, or 1 − the highest class score."
    ] = None,
    epsilons: Annotated[tuple[float, ...], "Largest changes of a pixel by the attacks, 0 to 1."] = (0.1,),
    steps: Annotated[int, STEPS, "Steps of all attacks except FGSM."] = EVASION_STEPS,
    limit: Annotated[Count, "Use this many images of each kind, the first ones."] = 100,
    seed: Annotated[Seed, "Random seed of the attacks' starts."] = 0,
    accelerator: Accelerator = "auto",
    json: Json = False,
) -> None:
    """Measure how many out-of-distribution and attacked images are detected by their reconstruction error.

    The threshold of each class is exceeded by 5 % of its validation images.
    """
    from torchcaps.analysis import detect as measure_detection
    from torchcaps.analysis import fit_detector

    if not against:
        refuse_options(("task",), "is for the data sets of --against, but there are none")
    opened = open_run(run, which, accelerator)
    dataset = opened.dataset(source.data, source.data_dir, by_number=source.by_number)
    detector = fit_detector(opened.model, dataset.validation, measure=measure)
    others = {name: opened.other_images(name, source.data_dir, task).preview(limit) for name in against}
    test, progress = dataset.test.preview(limit), partial(say, err=True)
    attacks: Any = {"epsilons": epsilons, "steps": steps, "seed": seed}
    result = measure_detection(opened.model, test, detector, others=others, progress=progress, **attacks)
    about = {"run": str(opened.path), "which": which, "data": dataset.name, "steps": steps, "seed": seed}
    result = replace(result, title=f"{name_of(run)}: test images of {dataset.name}, ")
    show(result, json=json, about=about)
