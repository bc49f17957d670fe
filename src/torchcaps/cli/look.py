"""``torchcaps reconstruct``, ``perturb``, ``routing`` and ``curves``: draw a trained network's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click

from torchcaps.cli.options import Drawn, ImageFiles, Json, Source, command
from torchcaps.cli.runs import figure_path, name_of, names_of, open_images, open_run, preparation_for, refuse_options
from torchcaps.cli.show import say, show
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import read_json
from torchcaps.ranges import AtLeastOneIteration, Count, Index
from torchcaps.tasks import Task, find_task
from torchcaps.words import first_of

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.datasets import ImageSet
    from torchcaps.training import Run

CONFIG = "config.json"
ImageFile = Annotated[Path | None, "Use this image file instead of an image of the data set."]


class Picture(NamedTuple):
    """An image to analyse: ``pixels`` (C, H, W), uint8 or float32 of 0..1, and its description, ``words``.

    An image of a data set also has the ``labels`` of its objects, all ``images`` and, in ``where``, their origin.
    """

    pixels: Tensor
    words: str
    labels: Sequence[int] = ()
    images: ImageSet | None = None
    where: str = ""


def read_pictures(
    run: Run, index: Sequence[int], image: Path | None, files: ImageFiles, source: Source
) -> list[Picture]:
    """Return the images that the options name, in the network's shape: a file, or images of a data set."""
    from torchcaps.analysis import load_image
    from torchcaps.analysis.inference import join_names

    if image is not None:
        refuse_options(
            ("index", "data", "data_dir", "by_number", "split", "count"), "is for images of a data set, not for --image"
        )
        run.images.require_pixels("--image")
        options: Any = {"preparation": preparation_for(files, run.images.preparation), "invert": files.invert}
        options |= {"scale": run.images.scale, "pages": run.images.pages}
        pixels = load_image(image, run.model.in_shape, fit=files.fit or run.images.fit, **options)
        return [Picture(pixels, str(image))]
    refuse_options(("prepare", "invert", "fit"), "is for a file given with --image")
    part = open_images(run, source)
    images: Any = part.images
    pictures = []
    for number in index:
        if number >= len(images):
            raise InputError(f"--index must be below {len(images)}, the number of {part.words}, got {number}")
        labels = images.labels[number].reshape(-1)
        words = f"Image {number} of the {part.words}, {part.task.output} {join_names(part.class_names, labels)}"
        pictures.append(Picture(images.images[number], words, labels.tolist(), images, part.words))
    return pictures


@command(
    ("reconstruct runs/first-digits-1", "the first 20 test images above their reconstructions"),
    ("reconstruct runs/first-digits-1 --count 50 --figure many.pdf", "50 images, as a PDF"),
)
def reconstruct(
    run: Path | None = None,
    *,
    source: Source,
    count: Annotated[Count, "Number of images."] = 20,
    figure: Drawn = None,
    json: Json = False,
) -> None:
    """Draw images above their reconstructions; with several objects in an image, each object has a colour."""
    from torchcaps.analysis import reconstruct as decode

    opened = open_run(run, source.which)
    part = open_images(opened, source)
    images = part.images.preview(count)
    title = f"{name_of(run)}: the {first_of(len(images), part.words)}"
    result = decode(opened.model, images.images, images.labels)
    result = replace(result, class_names=part.class_names, title=title)
    show(result, json=json, figure=figure_path(figure, run, "reconstructions"))


@command(
    ("perturb runs/first-digits-1", "the first test image: each component changed by −0.25 to 0.25"),
    ("perturb runs/first-digits-1 --index 7 --range 0.5", "another image, larger changes"),
    ("perturb runs/first-digits-1 --image examples/digit.png --capsule 9", "decode a 7 from the capsule of 9"),
    ("perturb runs/first-digits-1 --component 3 --index 0 --index 1", "one component of two images"),
)
def perturb(
    run: Path | None = None,
    *,
    source: Source,
    index: Annotated[Sequence[Index], "Number of the image, from 0; may be repeated with --component."] = (0,),
    image: ImageFile = None,
    files: ImageFiles,
    capsule: Annotated[str | None, "Change the capsule of this class (name or number) instead of --follow's."] = None,
    follow: Annotated[
        Literal["longest", "label"], "Change the longest capsule, or the capsule of the label."
    ] = "longest",
    component: Annotated[
        Index | None, "Change this component only, numbered from 0; draw one row for each image."
    ] = None,
    range: Annotated[tuple[float, ...], "Largest change; or lowest and highest change, such as -0.5,1."] = (0.25,),
    steps: Annotated[int, "Number of values of each component."] = 11,
    figure: Drawn = None,
    json: Json = False,
) -> None:
    """Change each component of a class capsule, decode, and draw the images.

    With --component, change this component only, in the capsule of each image that an --index names.
    """
    from torchcaps.analysis import Perturbations, perturb_capsule
    from torchcaps.models.output import SUPERLATIVES

    if capsule is not None:
        refuse_options(("follow",), "chooses a capsule, and so does --capsule")
    if component is None and len(index) > 1:
        raise click.UsageError(
            "several --index need --component, e.g. --component 0: all components of one image fill a figure"
        )
    opened = open_run(run, source.which)
    names = opened.class_names
    numbers = [str(number) for number, _ in enumerate(names)]
    if capsule is not None and capsule not in (*names, *numbers):
        raise unknown_name("class", capsule, names)
    named = None if capsule is None else (names if capsule in names else numbers).index(capsule)
    pictures = read_pictures(opened, index, image, files, source)
    options: Any = {"components": () if component is None else (component,), "steps": steps}
    options["amplitude"] = range[0] if len(range) == 1 else range
    targets = [label_of(each) if follow == "label" else named for each in pictures]
    results = [
        perturb_capsule(opened.model, picture.pixels, target=target, **options)
        for picture, target in zip(pictures, targets, strict=True)
    ]
    whose = {"longest": f"the {SUPERLATIVES[results[0].score_name]}", "label": "the label's"}[follow]
    words = [picture.words for picture in pictures]
    result = Perturbations(results, names, words, "" if capsule is not None else whose, name_of(run))
    show(result, json=json, figure=figure_path(figure, run, "perturbation"))


def label_of(picture: Picture) -> int:
    """Return the class of an image; InputError unless it shows one object of a known class."""
    if len(picture.labels) != 1:
        raise InputError(
            f"--follow label needs an image of one object with a known class, got {picture.words}; choose a capsule "
            "with --capsule"
        )
    return picture.labels[0]


@command(
    ("routing runs/first-digits-1", "the first test image, and statistics of the first 100"),
    ("routing runs/first-digits-1 --index 7 --num-iterations 5", "another image, more iterations"),
    ("routing runs/first-digits-1 --input-capsule 40", "all numbers of one input capsule"),
)
def routing(
    run: Path | None = None,
    *,
    source: Source,
    index: Annotated[Index, "Number of the image, from 0."] = 0,
    image: ImageFile = None,
    files: ImageFiles,
    layer: Annotated[Count | None, "Number of the capsule layer, from 1 (default: the last)."] = None,
    num_iterations: Annotated[AtLeastOneIteration | None, "Routing iterations (default: the network's)."] = None,
    count: Annotated[Count, "Number of images for the statistics."] = 100,
    input_capsule: Annotated[Sequence[Index], "Show this input capsule, numbered from 0; may be repeated."] = (),
    json: Annotated[bool, "Print all numbers as JSON, or only the numbers of each --input-capsule."] = False,
    figure: Drawn = None,
) -> None:
    """Draw how each class couples to the input capsules, iteration by iteration, and whether routing settles.

    --figure gets the coupling maps of one image. Without --image, a second file beside it gets statistics of many
    images.
    """
    from torchcaps.analysis import RoutingReport, routing_statistics, trace_routing

    opened = open_run(run, source.which)
    (picture,) = read_pictures(opened, [index], image, files, source)
    followed: Any = {"layer": layer, "num_iterations": num_iterations}
    trace = trace_routing(opened.model, picture.pixels[None], **followed)
    input_count, last = trace.coupling.shape[2], max(input_capsule, default=0)
    if last >= input_count:
        raise InputError(
            f"--input-capsule must be below {input_count:,}, the number of the network's input capsules, got {last:,}"
        )
    statistics, words = None, ""
    if picture.images is not None:
        many = picture.images.preview(count)
        statistics = routing_statistics(opened.model, many.images, **followed)
        words = f"Mean of the {first_of(len(many), picture.where)}"
    inputs = tuple(input_capsule)
    report = RoutingReport(trace, opened.class_names, picture.words, inputs, statistics, words, name_of(run))
    show(report, json=json, figure=figure_path(figure, run, "routing"))


@command(
    ("curves runs/first-digits-1", "loss and error of each epoch"),
    ("curves runs/* --figure compare.png", "several runs in one figure"),
)
def curves(run: Sequence[Path], *, figure: Drawn = None, json: Json = False) -> None:
    """Draw loss and error of each epoch, of one run or of several to compare them."""
    from torchcaps.analysis import Curves, read_metrics
    from torchcaps.training.folder import METRICS

    named = dict(zip(run, names_of(run), strict=True))
    drawn = [folder for folder in run if not folder.is_dir() or (folder / METRICS).exists()] or run
    for folder in run:
        if folder not in drawn:
            say(f"{folder} is left out: it has no {METRICS}, which is written after the first epoch", err=True)
    metrics = {named[folder]: read_metrics(folder) for folder in drawn}
    configs = [read_json(each / CONFIG, "configuration") if (each / CONFIG).exists() else {} for each in drawn]
    images = [f"trained on {config['data']}" if "data" in config else "" for config in configs]
    tasks = {task_of_config(config).name: folder for config, folder in zip(configs, drawn, strict=True)}
    if len(tasks) > 1:
        words = " and ".join(f"{folder} ({name})" for name, folder in tasks.items())
        raise InputError(
            f"runs of different tasks have no common error to draw: {words}; draw the runs of each task by themselves"
        )
    result = Curves(metrics, dict(zip(metrics, images, strict=True)), *tasks)
    show(result, json=json, figure=figure_path(figure, drawn[0] if len(drawn) == 1 else None, "curves"))


def task_of_config(config: Any) -> Task:
    """Return the task in the contents of a config.json, or the default task."""
    model = config.get("model") if isinstance(config, dict) else None
    return find_task(model.get("task") if isinstance(model, dict) else None)
