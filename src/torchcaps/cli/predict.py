"""``torchcaps predict``: classify image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import click

from torchcaps.cli.options import Figure, ImageFiles, Json, Which, WhichEpoch, command
from torchcaps.cli.runs import open_run, preparation_for, refuse_options
from torchcaps.cli.show import say, show
from torchcaps.errors import InputError
from torchcaps.files import could_be_repository
from torchcaps.tasks import TaskName, task_of

if TYPE_CHECKING:
    import numpy as np

    from torchcaps.analysis import PhotoAnswers, Prediction
    from torchcaps.analysis.mask_answers import MaskAnswers
    from torchcaps.export import Description
    from torchcaps.models import Network

    Classifier: TypeAlias = Callable[[np.ndarray], Prediction]

CONFIG = "config.json"
MAX_NAMED_FILES = 20
"""Unreadable files that an error names one by one."""


@command(
    ("predict runs/first-digits-1 examples/digit.png", "one image, light on dark"),
    ("predict runs/first-digits-1 scans --out predictions.csv", "all images of a folder, as a table"),
    (r"predict runs/first-digits-1 frames --group 'shoe\d+'", "one answer for all frames of a shoe"),
    ("predict examples/photo.jpg --figure seen.png", "draw the photo beside the image that the network gets"),
    ("predict model.onnx examples/digit.png", "use a file written by torchcaps export, without torch"),
    ("predict someone/capsnet-digits examples/digit.png", "use a network of the Hugging Face hub"),
    ("predict runs/leaves new --out masks", "a mask for each image of a folder, from a network for pixels"),
    ("predict examples/digit.png", "use the network that comes with torchcaps"),
)
def predict(
    run: Path | None = None,
    image: Sequence[Path] = (),
    *,
    which: WhichEpoch = "best",
    files: ImageFiles,
    out: Annotated[
        Path | None,
        "Write one line for each image to this .csv file instead of printing; of networks for pixels, a mask for each "
        "image into this folder.",
    ] = None,
    group: Annotated[
        str | None,
        "Average the scores of images whose paths share the text that this regular expression (or its first group in "
        "parentheses) matches, and give one answer for them.",
    ] = None,
    figure: Annotated[
        Figure, "Draw each file beside the image that the network gets, to this .png, .pdf or .svg."
    ] = None,
    json: Json = False,
) -> None:
    """Classify image files of any size, or all in a folder; print classes and scores.

    Networks that were trained on drawings, such as MNIST's digits, get photos of drawings preprocessed like their
    training images. The output lists large changes and the reasons why an answer is unsure. Unreadable files are named
    at the end, with exit code 2. RUN may also be an .onnx file written by `torchcaps export`.

    Networks for pixels answer images of any size with a mask: the share of each class is printed, and --out writes a
    .png file of class numbers for each image, or a .nii.gz file for a volume. Their ONNX files need torch too.
    """
    from torchcaps.analysis.groups import group_files

    network, words = split_words([*([] if run is None else [run]), *image])
    paths = image_files(words)
    if group is not None:
        refuse_options(("figure",), "draws single images, but --group averages their scores")
        group_files(paths, group)
    if out is not None:
        refuse_options(("json", "figure"), "prints or draws answers that --out writes to a file")
        if out.is_file() or (out.suffix and out.exists()):
            raise InputError(f"{out} exists already; choose another file or remove it first")

    classifier = open_classifier(network, which)
    options = Options(files, group, figure is not None)
    answers, damaged = ANSWERS[classifier.description.task](classifier, paths, options)
    if answers is not None and out is not None:
        task_of(answers).write(out, answers)
        say(f"wrote {out}, {answers.written}")
    elif answers is not None:
        show(answers, json=json, figure=figure)
    if damaged:
        lines = [f"{len(damaged)} of {len(paths)} images cannot be read:", *damaged[:MAX_NAMED_FILES]]
        raise InputError("\n  ".join(lines) if len(damaged) > 1 else damaged[0])


class OpenClassifier(NamedTuple):
    """A network to answer image files."""

    description: Description
    classify: Classifier
    """Function from images (N, C, H, W), uint8 or float32 of 0..1, to the prediction."""
    model: Network | None
    """The network; None for an ONNX file."""


class Options(NamedTuple):
    """Options of the command that the answers depend on."""

    files: ImageFiles
    group: str | None
    draws: bool
    """Answers are drawn."""


def answer_photos(
    classifier: OpenClassifier, paths: Sequence[Path], options: Options
) -> tuple[PhotoAnswers | None, list[str]]:
    """Return an answer for each image file, or for each group of files; and a sentence for each unreadable file."""
    import numpy as np

    from torchcaps.analysis.groups import average_answers, group_files
    from torchcaps.analysis.photos import MAX_PREVIEW, PhotoAnswers
    from torchcaps.datasets import read_photo
    from torchcaps.datasets.scaling import alike

    description, files = classifier.description, options.files
    preparation = preparation_for(files, description.preparation)
    how: Any = {
        "preparation": preparation,
        "invert": files.invert,
        "fit": files.fit or description.fit,
        "scale": description.scale,
    }
    files_read, prepared, kept, damaged = list[Path](), [], [], list[str]()
    for path in paths:
        try:
            photo = read_photo(path, description.in_shape, **how)
        except InputError as error:
            damaged.append(str(error))
            continue
        files_read.append(path)
        prepared.append(photo.prepared)
        if options.draws:
            kept.append(photo.shrunk(MAX_PREVIEW))  # all photos in full size might not fit the memory
    if not prepared:
        return None, damaged
    prediction = classifier.classify(np.stack(alike([each.image for each in prepared])))
    answers = PhotoAnswers(files_read, prepared, prediction, description.class_names, kept, description.task)
    if options.group is not None:
        answers = average_answers(answers, group_files(files_read, options.group), description.calibration)
    return answers, damaged


def answer_pixels(
    classifier: OpenClassifier, paths: Sequence[Path], options: Options
) -> tuple[MaskAnswers | None, list[str]]:
    """Return a mask for each image file, and a sentence for each unreadable file."""
    from torchcaps.analysis.mask_answers import answer_masks, exported_mask, predict_mask

    refuse_options(("group", "prepare", "fit"), "is for networks that give one answer for each image")
    spec = classifier.description
    if classifier.model is None:
        answer = partial(exported_mask, lambda images: classifier.classify(images).scores, spec.in_shape)
    else:
        answer = partial(predict_mask, classifier.model)
    answers, damaged = answer_masks(
        answer,
        paths,
        spec.class_names,
        channels=spec.in_shape[0],
        scale=spec.scale,
        invert=options.files.invert,
    )
    if not answers.files:
        return None, damaged
    answers.names()  # raises an error before anything is written
    return answers, damaged


ANSWERS: dict[TaskName, Callable[[OpenClassifier, Sequence[Path], Options], Any]] = {
    "classes": answer_photos,
    "labels": answer_photos,
    "regression": answer_photos,
    "pixels": answer_pixels,
}
"""The function that answers image files, for each task."""


def split_words(words: Sequence[Path]) -> tuple[Path | None, Sequence[Path]]:
    """Split the words of the command line into the network (None: the one of torchcaps) and the images.

    The first word is the network if it is a folder with config.json, if it ends in ``.onnx``, or if no such file exists
    and it could be a repository of the hub. Otherwise it is an image, or a folder of images.
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
    """Return image files, with those in folders and sub-folders (except hidden ones), sorted by path."""
    from torchcaps.datasets.images import image_files_in
    from torchcaps.datasets.nifti import volumes_in

    found: list[Path] = []
    for word in words:
        inside = image_files_in(word, deep=True) or volumes_in(word) if word.is_dir() else [word]
        if not inside:
            raise InputError(f"{word} is no run folder: it holds no {CONFIG}, and no images")
        found += inside
    return found


def open_classifier(run: Path | None, which: Which) -> OpenClassifier:
    """Open the network of a run folder or of an ONNX file."""
    if run is not None and run.suffix.lower() == ".onnx":
        from torchcaps.export import OnnxModel

        refuse_options(("which",), "is for a run folder, not for an ONNX file")
        model = OnnxModel(run)
        return OpenClassifier(model.description, model, None)

    import torch

    from torchcaps.analysis import predict as classify
    from torchcaps.export import describe_run

    opened = open_run(run, which)
    usual = opened.images.calibration
    return OpenClassifier(
        describe_run(opened),
        lambda images: classify(opened.model, torch.from_numpy(images), calibration=usual),
        opened.model,
    )
