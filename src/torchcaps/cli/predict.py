"""``torchcaps predict``: classify image files."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from torchcaps.cli.options import (
    CoverageOption,
    CoverageOverOption,
    Figure,
    ImageFiles,
    Json,
    Which,
    WhichEpoch,
    command,
)
from torchcaps.cli.runs import check_coverage_options, files_of, open_run, preparation_for, refuse_options
from torchcaps.cli.show import draw, say, show
from torchcaps.errors import InputError
from torchcaps.files import atomic_path, check_targets, could_be_repository, require_suffix
from torchcaps.tasks import task_of
from torchcaps.words import counted

if TYPE_CHECKING:
    from torchcaps.analysis.answers import Classifier

CONFIG = "config.json"
KINDS = ("csv", "folder", "nifti", "npz", "scene")
"""Names of data sets with a path, which may stand before the path of images."""
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
        "image into this folder, with the sub-folders of the images. Nothing that exists is replaced.",
    ] = None,
    overwrite: Annotated[bool, "Replace files that --out names, but never the images themselves."] = False,
    missing: Annotated[bool, "Predict only images whose mask is not in the folder of --out yet."] = False,
    group: Annotated[
        str | None,
        "Average the scores of images whose paths share the text that this regular expression (or its first group in "
        "parentheses) matches, and give one answer for them.",
    ] = None,
    coverage: CoverageOption = None,
    coverage_over: CoverageOverOption = "all",
    poses: Annotated[
        Path | None,
        "Write the class capsules of each image to this .npz file: poses (N, J, D), lengths (N, J), names (N,).",
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
    .png file of class numbers for each image, or a .nii.gz file for a volume. A volume is a NIfTI file, the folder of
    a DICOM series, or the folder of a subject with its channels. Their ONNX files need torch too.

    Networks for features answer each row of .npz files with an array `features`, and of .csv and .tsv tables. Networks
    for sequences answer each record of .npz files with an array `x`, by the mean scores of its windows. Networks for
    scenes answer each pixel of an .npz file with an array `cube`; --out writes the map as an .npy or .png file.
    """
    from torchcaps.analysis.answers import AnswerOptions
    from torchcaps.analysis.groups import group_files
    from torchcaps.datasets.features import SUFFIXES
    from torchcaps.datasets.reading import list_arrays
    from torchcaps.datasets.volumes import channel_of

    network, words = split_words([*([] if run is None else [run]), *map(plain_path, image)])
    if group is not None:
        refuse_options(("figure",), "is for single images, but --group averages their scores")
    check_coverage_options(coverage)
    if out is None:
        refuse_options(("missing",), "is for files, but there is no --out")
    else:
        refuse_options(("json",), "prints answers that --out writes to a file")
    if out is None and poses is None:
        refuse_options(("overwrite",), "is for files, but there is neither --out nor --poses")
    if overwrite:
        refuse_options(("missing",), "keeps files that --overwrite replaces")

    classifier = open_classifier(network, which)
    paths = image_files(words, classifier.description)
    about, are_arrays = classifier.description, all(path.suffix.lower() == ".npz" for path in paths)
    module: Any = importlib.import_module(task_of(about).answers)
    if are_arrays and len(about.in_shape) == 3 and any("cube" in list_arrays(path) for path in paths):
        module = importlib.import_module("torchcaps.analysis.maps")
    elif about.takes_rows and (are_arrays or all(path.suffix.lower() in SUFFIXES for path in paths)):
        of_pictures = ("prepare", "invert", "fit", "max_megapixels", "figure")
        refuse_options(of_pictures, "is for pictures, but these files hold features or sequences")
        if about.window is not None:
            refuse_options(("poses",), "is for single inputs, but the answers of records are those of several windows")
            if group is None:
                why = "was measured for windows, but these answers are of records; evaluate --out has sets of windows"
                refuse_options(("coverage",), why)
    else:
        about.require_pixels("predict")
        if group is not None:
            group_files(paths, group)
    inputs = [*paths, *(file for path in paths if path.is_dir() for file in path.iterdir())]
    refuse_options(*module.UNUSED_OPTIONS)
    masks = [path for path in getattr(module, "masks_in", lambda _: ())(paths) if path not in words]
    if masks:
        paths = [path for path in paths if path not in masks]
        kept = counted(len(paths), "image")
        say(f"{masks[0]} is a mask by its name: {counted(len(masks), 'mask')} left out, {kept} predicted", err=True)
    targets: dict[Path, Path] = {}
    if out is not None:
        names = {path: name_below(path, words) for path in paths}
        numbered = {path: channel_of(path) for path in paths if channel_of(path) in (about.channels or ())}
        for path, channel in numbered.items():  # one of the files of an image, whose mask lacks the number
            names[path] = names[path].with_name(names[path].name.replace(f"_{channel}.", "."))
        targets = module.output_files(out, names, about.pages)
        there = [path for path in paths if missing and os.path.lexists(targets[path])]
        if there:
            say(f"{out} has the masks of {len(there)} of {counted(len(paths), 'image')} already")
        paths = [path for path in paths if path not in there]
        chosen = dict.fromkeys(targets[path] for path in paths)
        check_targets(chosen, [*inputs, *files_of(network)], overwrite=overwrite)
    if poses is not None:
        require_suffix(poses, ".npz", "--poses")
        check_targets([poses], [*inputs, *files_of(network)], option="--poses", overwrite=overwrite)
        classifier, read_poses = collect_poses(classifier)
    options: Any = {
        "coverage": coverage,
        "coverage_over": coverage_over,
        "invert": files.invert,
        "fit": files.fit,
        "group": group,
        "draws": figure is not None,
        "out": out,
        "overwrite": overwrite,
        "targets": targets,
    }
    options["preparation"] = preparation_for(files, about.preparation)
    answers, damaged = module.answer_files(classifier, paths, AnswerOptions(**options))
    if answers is not None and out is not None:
        say(f"wrote {out}, {answers.written}")
        if figure is not None:
            draw(answers, figure)
    elif answers is not None:
        show(answers, json=json, figure=figure)
    if answers is not None and poses is not None:
        texts = answers.names | {"class_names": list(answers.class_names)}
        with atomic_path(poses, new=not overwrite) as temporary:
            temporary.write_bytes(npz_bytes(read_poses() | texts))
        say(f"wrote {poses}, the capsules of {counted(len(texts['names']), 'image')}", err=json)
    if damaged:
        lines = [f"{len(damaged)} of {len(paths)} images cannot be read:", *damaged[:MAX_NAMED_FILES]]
        raise InputError("\n  ".join(lines) if len(damaged) > 1 else damaged[0])


def collect_poses(classifier: Classifier) -> tuple[Classifier, Callable[[], dict[str, Any]]]:
    """Return a classifier that keeps the class capsules of its images, and a function that returns them.

    Raises:
        InputError: The network has no capsules, or is an ONNX file, which returns scores only.
    """
    import numpy as np

    if classifier.model is None:
        raise InputError("an ONNX file returns scores, but no poses; name the run folder for --poses")
    from torchcaps.analysis import class_poses

    model, kept = classifier.model, list[tuple[Any, Any]]()
    class_poses(model, np.zeros((1, *model.in_shape), np.uint8))  # raises an error before the work

    def classify(images: Any) -> Any:
        kept.append(class_poses(model, images))
        return classifier.classify(images)

    def read() -> dict[str, Any]:
        poses, lengths = (np.concatenate(each) for each in zip(*kept, strict=True))
        return {"poses": poses, "lengths": lengths}

    return classifier._replace(classify=classify), read


def npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Return the contents of an .npz file."""
    import numpy as np

    contents = io.BytesIO()
    np.savez(contents, **arrays)
    return contents.getvalue()


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


def plain_path(word: Path) -> Path:
    """Return the path of a word such as scene:new.npz, as data sets are named."""
    kind, _, path = str(word).partition(":")
    return Path(path) if kind in KINDS and path and not word.exists() else word


def image_files(words: Sequence[Path], description: Any) -> list[Path]:
    """Return image files, with those in folders and sub-folders (except hidden ones), sorted by path.

    A network of volumes, which ``description`` describes, gets a folder of a DICOM series or of a subject as one input.
    """
    from torchcaps.datasets.images import image_files_in, is_hidden
    from torchcaps.datasets.volumes import inputs_in

    files: list[Path] = []
    for word in words:
        inside = [word]
        if word.is_dir():
            takes_volumes = len(description.in_shape) > 3 and description.pages is None
            inside = inputs_in(word, description.channels) if takes_volumes else []
            inside = inside or image_files_in(word, deep=True) or inputs_in(word, None)
            if not inside and (description.takes_rows or not description.are_pixels):
                inside = sorted(file for file in word.glob("**/*.npz") if not is_hidden(file))
        if not inside:
            raise InputError(f"{word} is no run folder: it holds no {CONFIG}, and no images")
        files += inside
    return files


def name_below(path: Path, folders: Sequence[Path]) -> Path:
    """Return the name of an image file below the first of these folders that holds it, such as subject-1/scan.png."""
    holding = (each for each in folders if path != each and path.is_relative_to(each))
    return next((path.relative_to(each) for each in holding), Path(path.name))


def open_classifier(run: Path | None, which: Which) -> Classifier:
    """Open the network of a run folder or of an ONNX file."""
    from torchcaps.analysis.answers import Classifier

    if run is not None and run.suffix.lower() == ".onnx":
        from torchcaps.export import OnnxModel

        refuse_options(("which",), "is for a run folder, not for an ONNX file")
        model = OnnxModel(run)
        return Classifier(model.description, model)

    import torch

    from torchcaps.analysis import predict as classify
    from torchcaps.export import describe_run

    def scale_of(images: Any) -> Any:  # floats were scaled when they were read, or keep their values
        return "auto" if images.dtype == "uint8" else "none"

    opened = open_run(run, which)
    usual = opened.images.calibration
    return Classifier(
        describe_run(opened),
        lambda images: classify(opened.model, torch.from_numpy(images), calibration=usual, scale=scale_of(images)),
        opened.model,
    )
