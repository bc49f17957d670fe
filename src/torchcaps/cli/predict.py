"""``torchcaps predict``: what a network says of image files. With an ONNX file it does without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from torchcaps.cli.base import Command
from torchcaps.cli.output import MOST_CLASSES, MOST_SHOWN, bar, console, print_json, write_figure
from torchcaps.cli.runs import (
    FIGURE,
    PATH,
    Fit,
    Prepare,
    Which,
    image_options,
    is_given,
    json_option,
    open_run,
    preparation_for,
    which_option,
)
from torchcaps.errors import InputError, visible
from torchcaps.files import could_be_repository

if TYPE_CHECKING:
    import numpy as np

    from torchcaps.export import Description

    Answers: TypeAlias = tuple[np.ndarray, np.ndarray | None]
    Classifier: TypeAlias = Callable[[np.ndarray], Answers]

ONNX, CONFIG = ".onnx", "config.json"


@click.command(
    "predict",
    cls=Command,
    examples=(
        ("predict runs/sabour2017-digits-1 seven.png", "one image, light on dark"),
        ("predict photo.jpg --show seen.png", "and draw what the network sees of it"),
        ("predict runs/sabour2017-digits-1 seven.png --json", "for other programs"),
        ("predict model.onnx seven.png", "by a network that torchcaps export wrote, without torch"),
        ("predict someone/capsnet-digits seven.png", "by a network on the Hugging Face hub"),
        ("predict seven.png", "by the network that comes with torchcaps"),
    ),
)
@click.argument("arguments", metavar="[RUN] IMAGE...", nargs=-1, type=PATH)
@which_option
@image_options
@click.option("--show", type=FIGURE, help="Draw each image beside what the network sees, .png, .pdf or .svg.")
@json_option
def predict(
    arguments: tuple[Path, ...],
    which: Which,
    prepare: Prepare,
    invert: bool,
    fit: Fit | None,
    show: Path | None,
    as_json: bool,
) -> None:
    """Classify image files of any size: the class (or those of several objects) and the score of every class.

    RUN is a run folder, a folder written by save_pretrained, a repository of the hub such as someone/capsnet, or an
    .onnx file written by `torchcaps export`. Without it, the network that comes with torchcaps classifies. For networks
    that were trained on drawings, such as MNIST's digits, a photo of a drawing is first brought to their form; what was
    changed much is said, and so is why an answer is unsure.
    """
    run_path, image_files = split_arguments(arguments)

    import numpy as np

    from torchcaps.analysis.doubt import Calibration, distances, runner_up, whole
    from torchcaps.analysis.photos import MOST_PHOTOS, PREVIEW, SeenPhoto, figure_photos
    from torchcaps.datasets import read_photo
    from torchcaps.datasets.preparation import NOTHING

    if show is not None and len(image_files) > MOST_PHOTOS:
        raise InputError(f"--show draws at most {MOST_PHOTOS} images, got {len(image_files)}")
    description, answers_of = _classifier(run_path, which)
    preparation = preparation_for(prepare, description.preparation, fit)
    shape, fit, names = description.in_shape, fit or description.fit, description.class_names
    prepared, kept = [], []
    for file in image_files:
        photo = read_photo(file, shape, preparation=preparation, invert=invert, fit=fit)
        prepared.append(photo.prepared)
        if show is not None:
            kept.append(photo.shrunk(PREVIEW))  # the photos themselves may be larger than memory
    images = np.stack([each.image for each in prepared])
    scores, reconstructions = answers_of(images)
    off = None if reconstructions is None else distances(images / np.float32(255), reconstructions)
    usual = description.calibration or Calibration()
    # the order of torchcaps.models.output.top_classes, without torch
    highest = (-scores).argsort(axis=1, kind="stable")[:, : description.objects]
    results: list[dict[str, Any]] = []
    seen = []
    for n, (file, chosen, row) in enumerate(zip(image_files, highest.tolist(), scores.tolist(), strict=True)):
        given, lengths = [names[j] for j in chosen], dict(zip(names, row, strict=True))
        changes = prepared[n].changes
        doubts = usual.doubts(row[chosen[-1]], None if off is None else float(off[n]), runner_up(scores[n], chosen))
        if NOTHING in changes:
            doubts = (NOTHING, *doubts)
        found = {"classes": given} if len(given) > 1 else {"class": given[0]}
        said = {"lengths": lengths, "prepared": changes, "unsure": doubts}
        results.append({"image": str(file)} | found | said)
        if show is not None:
            drawn = None if reconstructions is None else whole(reconstructions[n : n + 1])[0]
            seen.append(SeenPhoto(f"{file.name}: {' + '.join(given)}", kept[n], drawn, doubts))
        if not as_json:
            _show_prediction(file, given, lengths, changes, doubts)
    if show is not None:
        write_figure(figure_photos(seen), show, quiet=as_json)
    if as_json:
        print_json(results)


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
    """What is known of a network, and a function from uint8 images (N, C, H, W) to class scores and reconstructions."""
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

    def answers_of(images: np.ndarray) -> Answers:
        found = classify(run.model, torch.from_numpy(images))
        return found.scores, found.reconstructions

    return describe_run(run), answers_of


def _show_prediction(
    file: Path, classes: list[str], lengths: dict[str, float], changes: Sequence[str], doubts: Sequence[str]
) -> None:
    from rich.text import Text

    to = console()
    given = [visible(name) for name in classes]
    to.print(Text.assemble(visible(str(file)), "  ", (" + ".join(given), "bold green")), soft_wrap=True)
    if changes:
        to.print(Text(f"  prepared: {'; '.join(changes)}"), soft_wrap=True)
    if doubts:
        to.print(Text(f"  unsure: {'; '.join(doubts)}", style="yellow"), soft_wrap=True)
    scores: Sequence[tuple[str, float]] = [(visible(name), score) for name, score in lengths.items()]
    if len(scores) > MOST_CLASSES:
        scores = sorted(scores, key=lambda item: -item[1])[:MOST_SHOWN]
    wide = max(len(name) for name, _ in scores)
    for name, score in scores:
        style = "bold green" if name in given else ""
        to.print(Text(f"  {name:>{wide}}  {score:.3f}  {bar(score)}", style=style), soft_wrap=True)
    if len(lengths) > len(scores):
        to.print(f"  … and {len(lengths) - len(scores)} lower ones (--json shows all)")
    to.print()
