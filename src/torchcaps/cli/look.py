"""``torchcaps predict``, ``reconstruct``, ``perturb``, ``routing``, ``curves``: what a network says and has learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import click

from torchcaps.cli.options import Drawn, Figure, ImageFiles, Json, Source, Which, WhichEpoch, command
from torchcaps.cli.runs import figure_path, name_of, names_of, open_images, open_run, preparation_for, refuse_options
from torchcaps.cli.show import say, show
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import could_be_repository, read_json, write_text
from torchcaps.ranges import AtLeastOneIteration, Count, Index

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from torchcaps.analysis import Prediction
    from torchcaps.datasets import ImageSet
    from torchcaps.export import Description
    from torchcaps.training import Run

    Classifier: TypeAlias = Callable[[np.ndarray], Prediction]

CONFIG = "config.json"
MOST_NAMED = 20
"""Files that cannot be read and are named one by one."""
ImageFile = Annotated[Path | None, "An image file instead of one of the data set."]


@command(
    ("predict runs/first-digits-1 examples/digit.png", "one image, light on dark"),
    ("predict runs/first-digits-1 scans --out predictions.csv", "all images of a folder, as a table"),
    ("predict examples/photo.jpg --figure seen.png", "and draw what the network sees of it"),
    ("predict model.onnx examples/digit.png", "by a network that torchcaps export wrote, without torch"),
    ("predict someone/capsnet-digits examples/digit.png", "by a network on the Hugging Face hub"),
    ("predict examples/digit.png", "by the network that comes with torchcaps"),
)
def predict(
    run: Path | None = None,
    image: Sequence[Path] = (),
    *,
    which: WhichEpoch = "best",
    files: ImageFiles,
    out: Annotated[Path | None, "Write a line for each image to this file, .csv, instead of showing it."] = None,
    figure: Annotated[Figure, "Draw each image beside what the network sees to this file, .png, .pdf or .svg."] = None,
    json: Json = False,
) -> None:
    """Classify image files of any size, or all in a folder: the class, or those of several objects, and all scores.

    For networks that were trained on drawings, such as MNIST's digits, a photo of a drawing is first brought to their
    form; what was changed much is said, and so is why an answer is unsure. Files that cannot be read are named at the
    end, with exit code 2. RUN may also be an .onnx file written by `torchcaps export`.
    """
    network, words = split_words([*([] if run is None else [run]), *image])
    paths = image_files(words)
    if out is not None:
        refuse_options(("json", "figure"), "shows what --out writes to a file")
        if out.exists():
            raise InputError(f"there is something at {out} already; choose another place, or remove it first")

    import numpy as np

    from torchcaps.analysis.photos import PREVIEW, PhotoAnswers
    from torchcaps.datasets import read_photo

    description, classify = open_classifier(network, which)
    preparation = preparation_for(files, description.preparation)
    files_read, prepared, kept, damaged = list[Path](), [], [], list[str]()
    for path in paths:
        options: Any = {"preparation": preparation, "invert": files.invert, "fit": files.fit or description.fit}
        try:
            photo = read_photo(path, description.in_shape, **options)
        except InputError as error:
            damaged.append(str(error))
            continue
        files_read.append(path)
        prepared.append(photo.prepared)
        if figure is not None:
            kept.append(photo.shrunk(PREVIEW))  # the photos themselves may be larger than memory
    if prepared:
        prediction = classify(np.stack([each.image for each in prepared]))
        answers = PhotoAnswers(files_read, prepared, prediction, description.class_names, kept, description.task)
        if out is None:
            show(answers, json=json, figure=figure)
        else:
            write_text(out, answers.to_csv())
            say(f"wrote {out}, a line for each of {len(files_read):,} images")
    if damaged:
        lines = [f"{len(damaged)} of {len(paths)} images cannot be read:", *damaged[:MOST_NAMED]]
        raise InputError("\n  ".join(lines) if len(damaged) > 1 else damaged[0])


def split_words(words: Sequence[Path]) -> tuple[Path | None, Sequence[Path]]:
    """The network among the words of the command line, None for the one that comes with torchcaps, and the images.

    The first word is the network if it is a folder with config.json, ends in ``.onnx``, or is nothing here and could be
    a repository of the hub; else it is an image, or a folder of images.
    """
    from torchcaps.datasets.images import SUFFIXES

    if not words:
        raise click.UsageError("Missing argument 'IMAGE...'.")
    first, suffix = words[0], words[0].suffix.lower()
    is_run = (first / CONFIG).exists() or suffix == ".onnx"
    if not (is_run or (could_be_repository(first) and suffix not in SUFFIXES)):
        if not first.exists():
            raise InputError(f"there is no run folder and no image file {first}")
        return None, words
    if len(words) == 1:
        raise click.UsageError("Missing argument 'IMAGE...'.")
    return first, words[1:]


def image_files(words: Sequence[Path]) -> list[Path]:
    """Image files, and those in folders and the folders in these, sorted by their paths."""
    from torchcaps.datasets.images import SUFFIXES

    found: list[Path] = []
    for word in words:
        inside = [word]
        if word.is_dir():
            inside = sorted(each for each in word.rglob("[!.]*") if each.suffix.lower() in SUFFIXES and each.is_file())
        if not inside:
            raise InputError(f"{word} is no run folder: it holds no {CONFIG}, and no images")
        found += inside
    return found


def open_classifier(run: Path | None, which: Which) -> tuple[Description, Classifier]:
    """What is known of a network, and a function from uint8 images (N, C, H, W) to its prediction."""
    if run is not None and run.suffix.lower() == ".onnx":
        from torchcaps.export import OnnxModel

        refuse_options(("which",), "is for a run folder, not for an ONNX file")
        model = OnnxModel(run)
        return model.description, model

    import torch

    from torchcaps.analysis import predict as classify
    from torchcaps.export import describe_run

    opened = open_run(run, which)
    usual = opened.images.calibration
    return describe_run(opened), lambda images: classify(opened.model, torch.from_numpy(images), calibration=usual)


class Picture(NamedTuple):
    """An image to look into: uint8 ``pixels`` (C, H, W), and what it is in ``words``.

    Of a data set it has the ``labels`` of its objects, the ``images`` that it is one of, and ``where`` these are from.
    """

    pixels: Tensor
    words: str
    labels: Sequence[int] = ()
    images: ImageSet | None = None
    where: str = ""


def read_pictures(
    run: Run, index: Sequence[int], image: Path | None, files: ImageFiles, source: Source
) -> list[Picture]:
    """The images that the options name, as the run's network takes them: a file, or some of a data set."""
    from torchcaps.analysis import load_image
    from torchcaps.analysis.inference import join_names

    if image is not None:
        refuse_options(("index", "data", "data_dir", "split", "count"), "is for a data set, not for --image")
        options: Any = {"preparation": preparation_for(files, run.images.preparation), "invert": files.invert}
        pixels = load_image(image, run.model.in_shape, fit=files.fit or run.images.fit, **options)
        return [Picture(pixels, str(image))]
    refuse_options(("prepare", "invert", "fit"), "is for a file given with --image")
    images, dataset, where = open_images(run, source)
    pictures = []
    for number in index:
        if number >= len(images):
            raise InputError(f"--index must be below {len(images)}, the number of {where}, got {number}")
        labels = images.labels[number].reshape(-1)
        words = f"Image {number} of the {where}, class {join_names(dataset.class_names, labels)}"
        pictures.append(Picture(images.images[number], words, labels.tolist(), images, where))
    return pictures


@command(
    ("reconstruct runs/first-digits-1", "the first 20 test images above their reconstructions"),
    ("reconstruct runs/first-digits-1 --count 50 --figure many.pdf", "more of them, as a PDF"),
)
def reconstruct(
    run: Path | None = None,
    *,
    source: Source,
    count: Annotated[Count, "How many images."] = 20,
    figure: Drawn = None,
    json: Json = False,
) -> None:
    """Draw images above their reconstructions from class capsules; each of several objects in an image has a colour."""
    from torchcaps.analysis import reconstruct as decode

    opened = open_run(run, source.which)
    images, dataset, where = open_images(opened, source)
    images = images.preview(count)
    title = f"{name_of(run)}: the first {len(images):,} {where}"
    found = decode(opened.model, images.images, images.labels)
    found = replace(found, class_names=dataset.class_names, title=title)
    show(found, json=json, figure=figure_path(figure, run, "reconstructions"))


@command(
    ("perturb runs/first-digits-1", "the first test image: each component by −0.25…0.25"),
    ("perturb runs/first-digits-1 --index 7 --range 0.5", "another image, larger changes"),
    ("perturb runs/first-digits-1 --image examples/digit.png --capsule 9", "what the capsule of 9 makes of a 7"),
    ("perturb runs/first-digits-1 --component 3 --index 0 --index 1", "one component of two images"),
)
def perturb(
    run: Path | None = None,
    *,
    source: Source,
    index: Annotated[Sequence[Index], "Which image of the part; with --component it may be given several times."] = (
        0,
    ),
    image: ImageFile = None,
    files: ImageFiles,
    capsule: Annotated[str | None, "Change the capsule of this class, by name or number, not of --follow."] = None,
    follow: Annotated[Literal["longest", "label"], "Change the longest capsule, or that of the label."] = "longest",
    component: Annotated[Index | None, "Change this component only, not each one; each image has a row."] = None,
    range: Annotated[tuple[float, ...], "Largest change; or the lowest and the highest, -0.5,1."] = (0.25,),
    steps: Annotated[int, "How many values each component takes."] = 11,
    figure: Drawn = None,
    json: Json = False,
) -> None:
    """Change each component of a class capsule a little, decode, and draw what it encodes.

    With --component, only that component is changed, in the capsule of each image that an --index names.
    """
    from torchcaps.analysis import Perturbations, perturb_capsule
    from torchcaps.models.output import HIGHEST

    if capsule is not None:
        refuse_options(("follow",), "says whose capsule is changed, and so does --capsule")
    if component is None and len(index) > 1:
        raise click.UsageError("several --index need --component, e.g. --component 0: all components fill a figure")
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
    whose = {"longest": f"the {HIGHEST[results[0].score_name]}", "label": "the label's"}[follow]
    words = [picture.words for picture in pictures]
    found = Perturbations(results, names, words, "" if capsule is not None else whose, name_of(run))
    show(found, json=json, figure=figure_path(figure, run, "perturbation"))


def label_of(picture: Picture) -> int:
    """The class of an image of one object, which must be known."""
    if len(picture.labels) != 1:
        raise InputError(
            f"--follow label needs an image of one object whose class is known, which {picture.words} is not; choose a "
            "capsule with --capsule"
        )
    return picture.labels[0]


@command(
    ("routing runs/first-digits-1", "the first test image, and statistics of the first 100"),
    ("routing runs/first-digits-1 --index 7 --num-iterations 5", "another image, more iterations"),
    ("routing runs/first-digits-1 --input-capsule 40", "every number of one input capsule"),
)
def routing(
    run: Path | None = None,
    *,
    source: Source,
    index: Annotated[Index, "Which image of the part."] = 0,
    image: ImageFile = None,
    files: ImageFiles,
    layer: Annotated[Count | None, "Which capsule layer, from 1; by default the last one."] = None,
    num_iterations: Annotated[AtLeastOneIteration | None, "Iterations; by default the network's."] = None,
    count: Annotated[Count, "Images of the statistics."] = 100,
    input_capsule: Annotated[Sequence[Index], "Show this input capsule; may be given several times."] = (),
    json: Annotated[bool, "Print every number as JSON; or those of each --input-capsule."] = False,
    figure: Drawn = None,
) -> None:
    """Draw where each class takes its input from, iteration by iteration, and whether routing settles.

    The coupling maps of one image are drawn to --figure. Unless --image is given, statistics of many images are drawn
    to a file beside it.
    """
    from torchcaps.analysis import RoutingReport, routing_statistics, trace_routing

    opened = open_run(run, source.which)
    (picture,) = read_pictures(opened, [index], image, files, source)
    followed: Any = {"layer": layer, "num_iterations": num_iterations}
    trace = trace_routing(opened.model, picture.pixels[None], **followed)
    there, last = trace.coupling.shape[2], max(input_capsule, default=0)
    if last >= there:
        raise InputError(
            f"--input-capsule must be below {there:,}, the number of the network's input capsules, got {last:,}"
        )
    statistics, words = None, ""
    if picture.images is not None:
        many = picture.images.preview(count)
        statistics = routing_statistics(opened.model, many.images, **followed)
        words = f"Mean of the first {len(many):,} {picture.where}"
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
            say(f"{folder} is left out: it holds no {METRICS}, which is written after the first epoch", err=True)
    metrics = {named[folder]: read_metrics(folder) for folder in drawn}
    configs = [read_json(each / CONFIG, "configuration") if (each / CONFIG).exists() else {} for each in drawn]
    images = [f"trained on {config['data']}" if "data" in config else "" for config in configs]
    found = Curves(metrics, dict(zip(metrics, images, strict=True)))
    show(found, json=json, figure=figure_path(figure, drawn[0] if len(drawn) == 1 else None, "curves"))
