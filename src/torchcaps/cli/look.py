"""``torchcaps predict``, ``reconstruct``, ``perturb``, ``routing``, ``curves``: what a network says and has learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import click

from torchcaps.analysis.defaults import DRAWN_ITERATIONS
from torchcaps.cli.options import (
    FIGURE,
    Given,
    ImageFile,
    ImageFiles,
    ImageIndex,
    ImagesOf,
    Json,
    Numbers,
    RunFolder,
    Which,
    WhichEpoch,
    command,
    drawn,
    draws,
)
from torchcaps.cli.runs import (
    figure_path,
    is_given,
    names_of,
    open_images,
    open_run,
    preparation_for,
    refuse_options,
)
from torchcaps.cli.show import count, say, show
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import could_be_repository
from torchcaps.ranges import MOST_ENTRIES, Count, Index, Range

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from torchcaps.analysis import Prediction
    from torchcaps.datasets import ImageSet
    from torchcaps.export import Description
    from torchcaps.training import Run

    Classifier: TypeAlias = Callable[[np.ndarray], Prediction]

ONNX, CONFIG = ".onnx", "config.json"


@command(
    ("predict runs/sabour2017-digits-1 seven.png", "one image, light on dark"),
    ("predict photo.jpg --figure seen.png", "and draw what the network sees of it"),
    ("predict runs/sabour2017-digits-1 seven.png --json", "for other programs"),
    ("predict model.onnx seven.png", "by a network that torchcaps export wrote, without torch"),
    ("predict someone/capsnet-digits seven.png", "by a network on the Hugging Face hub"),
    ("predict seven.png", "by the network that comes with torchcaps"),
)
def predict(
    images: Annotated[Sequence[Path], Given(metavar="[RUN] IMAGE...")] = (),
    *,
    which: WhichEpoch = "best",
    files: ImageFiles,
    figure: Annotated[Path | None, FIGURE, draws("each image beside what the network sees")] = None,
    json: Json = False,
) -> None:
    """Classify image files of any size: the class (or those of several objects) and the score of every class.

    RUN is a run folder, a folder written by save_pretrained, a repository of the hub such as someone/capsnet, or an
    .onnx file written by `torchcaps export`. Without it, the network that comes with torchcaps classifies. For networks
    that were trained on drawings, such as MNIST's digits, a photo of a drawing is first brought to their form; what was
    changed much is said, and so is why an answer is unsure.
    """
    run_path, image_files = split_arguments(images)

    import numpy as np

    from torchcaps.analysis.photos import MOST_PHOTOS, PREVIEW, PhotoAnswers
    from torchcaps.datasets import read_photo

    if figure is not None and len(image_files) > MOST_PHOTOS:
        raise InputError(f"--figure draws at most {MOST_PHOTOS} images, got {len(image_files)}")
    description, classify = _classifier(run_path, which)
    preparation = preparation_for(files, description.preparation)
    prepared, kept = [], []
    for file in image_files:
        options: Any = {"preparation": preparation, "invert": files.invert, "fit": files.fit or description.fit}
        photo = read_photo(file, description.in_shape, **options)
        prepared.append(photo.prepared)
        if figure is not None:
            kept.append(photo.shrunk(PREVIEW))  # the photos themselves may be larger than memory
    prediction = classify(np.stack([each.image for each in prepared]))
    answers = PhotoAnswers(image_files, prepared, prediction, description.class_names, kept)
    show(answers, json=json, figure=figure, about=[{}] * len(image_files))


def split_arguments(arguments: Sequence[Path]) -> tuple[Path | None, Sequence[Path]]:
    """What stands on the command line as the network, None for the one that comes with torchcaps, and the images.

    The first argument is the network if it is a folder, ends in ``.onnx``, or is nothing here and could be a repository
    of the hub; else it is an image.
    """
    from torchcaps.datasets.images import SUFFIXES

    first = arguments[0] if arguments else None
    is_network = first is not None and (
        first.is_dir()
        or first.suffix.lower() == ONNX
        or (could_be_repository(first) and first.suffix.lower() not in SUFFIXES)
    )
    if len(arguments) == is_network:
        raise click.UsageError("Missing argument 'IMAGE...'.")
    assert first is not None
    if is_network:
        if first.is_dir() and not (first / CONFIG).exists():
            raise InputError(f"{first} is no run folder: it holds no {CONFIG}")
        return first, arguments[1:]
    if not first.exists():
        raise InputError(f"there is no run folder and no image file {first}")
    return None, arguments


def _classifier(run_path: Path | None, which: Which) -> tuple[Description, Classifier]:
    """What is known of a network, and a function from uint8 images (N, C, H, W) to its prediction."""
    if run_path is not None and run_path.suffix.lower() == ONNX:
        from torchcaps.export import OnnxModel

        if is_given("which"):
            raise click.UsageError("--which is for a run folder, not for an ONNX file; leave it out")
        model = OnnxModel(run_path)
        return model.description, model

    import torch

    from torchcaps.analysis import predict as classify
    from torchcaps.export import describe_run

    run = open_run(run_path, which)
    return describe_run(run), lambda images: classify(
        run.model, torch.from_numpy(images), calibration=run.images.calibration
    )


class Picture(NamedTuple):
    """An image to look into."""

    pixels: Tensor
    """uint8 (C, H, W)."""
    words: str
    """What it is."""
    labels: list[int]
    """The classes of its objects; of a file they are not known."""
    images: ImageSet | None
    """The set that it is from; None for a file."""
    where: str
    """What the set is, in words."""


def read_pictures(
    run: Run,
    index: Sequence[int],
    image: Path | None,
    files: ImageFiles,
    images_of: ImagesOf,
) -> list[Picture]:
    """The images that the options name, as the run's network takes them."""
    from torchcaps.analysis import load_image
    from torchcaps.analysis.inference import join_names

    if image is not None:  # brought to size as the images of the run's data set were
        pixels = load_image(
            image,
            run.model.in_shape,
            preparation=preparation_for(files, run.images.preparation),
            invert=files.invert,
            fit=files.fit or run.images.fit,
        )
        return [Picture(pixels, str(image), [], None, "")]
    images, dataset, where = open_images(run, images_of)
    pictures = []
    for number in index:
        if number >= len(images):
            raise InputError(f"--index must be below {len(images)}, the number of {where}, got {number}")
        labels = images.labels[number].reshape(-1)
        words = f"Image {number} of the {where}, class {join_names(dataset.class_names, labels)}"
        pictures.append(Picture(images.images[number], words, labels.tolist(), images, where))
    return pictures


def check_image_options(image: Path | None, *more: str) -> None:
    """Refuse the options of a data set, and ``more``, beside --image; and without it those of a file."""
    if image is None:
        refuse_options(("prepare", "invert", "fit"), "is for a file given with --image")
    else:
        refuse_options(("index", "data", "data_dir", "split", *more), "is for a data set, not for --image")


@command(
    ("reconstruct runs/sabour2017-digits-1", "the first 20 test images above their reconstructions"),
    ("reconstruct runs/sabour2017-digits-1 --count 50 --figure many.pdf", "more of them, as a PDF"),
)
def reconstruct(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    images_of: ImagesOf,
    number: Annotated[Count, Given("How many images.", name="--count")] = 20,
    figure: Annotated[Path | None, FIGURE, drawn("reconstructions")] = None,
    json: Json = False,
) -> None:
    """Draw images above their reconstructions from class capsules; each of several objects in an image has a colour."""
    from dataclasses import replace

    from torchcaps.analysis import reconstruct as decode
    from torchcaps.analysis.reconstructions import MOST_DRAWN

    if number > MOST_DRAWN:
        raise InputError(
            f"--count must be at most {count(MOST_DRAWN)}, more do not fit one figure, got {count(number)}"
        )
    run = open_run(run_folder, which)
    images, dataset, where = open_images(run, images_of)
    images = images.preview(number)
    result = decode(run.model, images.images, images.labels)
    result = replace(result, class_names=dataset.class_names, where=where)
    show(result, json=json, figure=figure_path(figure, run_folder, "reconstructions"))


@command(
    ("perturb runs/sabour2017-digits-1", "the first test image: each component by −0.25…0.25"),
    ("perturb runs/sabour2017-digits-1 --index 7 --range 0.5", "another image, larger changes"),
    ("perturb runs/sabour2017-digits-1 --image seven.png --capsule 9", "what the capsule of 9 makes of a 7"),
    (
        "perturb runs/sabour2017-digits-1 --component 3 --index 0 --index 1 --follow label",
        "one component, an image in each row",
    ),
)
def perturb(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    images_of: ImagesOf,
    index: Annotated[
        Sequence[Index], Given("Which image of the part; with --component it may be given several times.")
    ] = (0,),
    image: ImageFile = None,
    files: ImageFiles,
    capsule: Annotated[
        str | None,
        Given("The class whose capsule is changed, by name or number, instead of --follow.", metavar="CLASS"),
    ] = None,
    follow: Annotated[
        Literal["longest", "label"],
        Given("Whose capsule is changed: the longest (or most active), or that of the image's label."),
    ] = "longest",
    component: Annotated[
        Index | None, Given("Change this component only; each image has a row.", default="all")
    ] = None,
    amplitude: Annotated[
        tuple[float, ...],
        Numbers(float, "0.5, or two such as -0.5,1", most=2),
        Given("Largest change either way, or the lowest and the highest change.", "A|LOW,HIGH", name="--range"),
    ] = (0.25,),
    steps: Annotated[int, Given("How many values each component takes.")] = 11,
    figure: Annotated[Path | None, FIGURE, drawn("perturbation")] = None,
    json: Json = False,
) -> None:
    """Change each component of a class capsule a little, decode, and draw what it encodes.

    With --component, only that component is changed, in the capsule of each image that an --index names.
    """
    from torchcaps.analysis import Perturbations, perturb_capsule
    from torchcaps.models.output import HIGHEST

    check_image_options(image)
    if capsule is not None:
        refuse_options(("follow",), "says whose capsule is changed, and so does --capsule")
    if component is None and len(index) > 1:
        raise click.UsageError("several --index need --component, e.g. --component 0: all components fill a figure")
    run = open_run(run_folder, which)
    target = None if capsule is None else _class_number(capsule, run.class_names)
    pictures = read_pictures(run, index, image, files, images_of)
    results = [
        perturb_capsule(
            run.model,
            picture.pixels,
            target=_label_of(picture) if follow == "label" else target,
            components=None if component is None else [component],
            amplitude=amplitude[0] if len(amplitude) == 1 else (amplitude[0], amplitude[1]),
            steps=steps,
        )
        for picture in pictures
    ]
    followed = {"longest": f"the {HIGHEST[results[0].score_name]}", "label": "the label's"}[follow]
    words = [picture.words for picture in pictures]
    whose = "" if capsule is not None else followed
    found = Perturbations(results, run.class_names, words, whose, component)
    about: list[dict[str, Any]] = [{}] * len(words)
    show(found, json=json, figure=figure_path(figure, run_folder, "perturbation"), about=about)


def _class_number(name: str, class_names: tuple[str, ...]) -> int:
    """The number of a class that is given by its name or its number."""
    numbers = [str(number) for number in range(len(class_names))]
    for known in (class_names, numbers):
        if name in known:
            return known.index(name)
    raise unknown_name("class", name, class_names)


def _label_of(picture: Picture) -> int:
    """The class of an image of one object, which must be known."""
    if len(picture.labels) == 1:
        return picture.labels[0]
    if picture.labels:
        needed = f"an image of one object, this one has {len(picture.labels)}"
    else:
        needed = f"an image whose class is known, which that of the file {picture.words} is not"
    raise InputError(f"--follow label needs {needed}; choose a capsule with --capsule")


@command(
    ("routing runs/sabour2017-digits-1", "the first test image, and statistics of the first 100"),
    ("routing runs/sabour2017-digits-1 --index 7 --num-iterations 5", "another image, more iterations"),
    ("routing runs/sabour2017-digits-1 --image seven.png", "an image of your own"),
    ("routing runs/sabour2017-digits-1 --input-capsule 40", "every number of one input capsule"),
    ("routing runs/sabour2017-digits-1 --json", "every number of all of them, for other programs"),
)
def routing(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    images_of: ImagesOf,
    index: ImageIndex = 0,
    image: ImageFile = None,
    files: ImageFiles,
    layer: Annotated[
        int | None,
        Range(1, MOST_ENTRIES, whole=True),
        Given("Which capsule layer, from 1.", default="the last, of the class capsules"),
    ] = None,
    num_iterations: Annotated[
        int | None, DRAWN_ITERATIONS, Given("Iterations to follow, of dynamic routing.", default="the network's")
    ] = None,
    number: Annotated[Count, Given("Images of the statistics.", name="--count")] = 100,
    inputs: Annotated[
        Sequence[Index],
        Given(
            "Also print logits, coupling and agreement of this input capsule in each iteration; may be given several "
            "times.",
            name="--input-capsule",
        ),
    ] = (),
    json: Annotated[
        bool,
        Given(
            "Print every iteration of the image as JSON: logits, coupling, weighted sums, capsules and agreement; with "
            "--input-capsule, of these input capsules only."
        ),
    ] = False,
    figure: Annotated[Path | None, FIGURE, drawn("routing")] = None,
) -> None:
    """Draw where each class takes its input from, iteration by iteration, and whether routing settles.

    The coupling maps of one image are drawn to --figure. Unless --image is given, statistics of many images are drawn
    to a file beside it.
    """
    from torchcaps.analysis import RoutingReport, routing_statistics, trace_routing

    check_image_options(image, "number")
    run = open_run(run_folder, which)
    (picture,) = read_pictures(run, [index], image, files, images_of)
    trace = trace_routing(run.model, picture.pixels[None], layer=layer, num_iterations=num_iterations)
    there = trace.coupling.shape[2]
    if inputs and max(inputs) >= there:
        raise InputError(
            f"--input-capsule must be below {count(there)}, the number of the network's input capsules, got "
            f"{count(max(inputs))}"
        )
    statistics, words = None, ""
    if picture.images is not None:
        many = picture.images.preview(number)
        statistics = routing_statistics(run.model, many.images, layer=layer, num_iterations=num_iterations)
        words = f"Mean of the first {count(len(many))} {picture.where}"
    report = RoutingReport(trace, trace.names(run.class_names), picture.words, tuple(inputs), statistics, words)
    show(report, json=json, figure=figure_path(figure, run_folder, "routing"))


@command(
    ("curves runs/sabour2017-digits-1", "loss and error of each epoch"),
    ("curves runs/* --figure compare.png", "several runs in one figure"),
)
def curves(
    run_folders: Annotated[Sequence[Path], Given(metavar="RUN...")],
    *,
    figure: Annotated[
        Path | None,
        FIGURE,
        Given(
            "Figure, .png, .pdf or .svg; never over another file.",
            default="RUN/figures/curves.png; of several runs curves.png",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Draw loss and error of each epoch, of one run or of several to compare them."""
    from torchcaps.analysis import Curves, read_metrics
    from torchcaps.training.folder import METRICS

    named = names_of(run_folders)
    drawn = [folder for folder in run_folders if not folder.is_dir() or (folder / METRICS).exists()] or run_folders
    for folder in run_folders:
        if folder not in drawn:
            say(f"{folder} is left out: it holds no {METRICS}, which is written after the first epoch", err=True)
    metrics = {name: read_metrics(folder) for name, folder in zip(named, run_folders, strict=True) if folder in drawn}
    show(Curves(metrics), json=json, figure=figure_path(figure, drawn[0] if len(drawn) == 1 else None, "curves"))
