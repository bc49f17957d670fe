"""``torchcaps predict``: what a network says of image files. With an ONNX file it does without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.cli.base import Command
from torchcaps.cli.output import MOST_CLASSES, MOST_SHOWN, bar, console, print_json
from torchcaps.cli.runs import PATH, Fit, Which, image_options, is_given, json_option, open_run, which_option
from torchcaps.errors import InputError, visible
from torchcaps.files import could_be_repository

if TYPE_CHECKING:
    import numpy as np

    from torchcaps.export import Description

ONNX, CONFIG = ".onnx", "config.json"


@click.command(
    "predict",
    cls=Command,
    short_help="Classify image files.",
    examples=(
        ("predict runs/sabour2017-digits-1 seven.png", "one image, light on dark"),
        ("predict runs/sabour2017-digits-1 scans/*.jpg --invert", "ink on paper"),
        ("predict runs/sabour2017-digits-1 seven.png --json", "for other programs"),
        ("predict model.onnx seven.png", "by a network that torchcaps export wrote, without torch"),
        ("predict someone/capsnet-digits seven.png", "by a network on the Hugging Face hub"),
        ("predict seven.png", "by the network that comes with torchcaps"),
    ),
)
@click.argument("arguments", metavar="[RUN] IMAGE...", nargs=-1, type=PATH)
@which_option
@image_options
@json_option
def predict(arguments: tuple[Path, ...], which: Which, invert: bool, fit: Fit | None, as_json: bool) -> None:
    """Classify image files of any size: the class (or those of several objects) and the score of every class.

    RUN is a run folder, a folder written by save_pretrained, a repository of the hub such as someone/capsnet, or an
    .onnx file written by `torchcaps export`. Without it, the network that comes with torchcaps classifies.
    """
    run_path, image_files = split_arguments(arguments)

    import numpy as np

    from torchcaps.datasets import read_image

    description, scores_of = _classifier(run_path, which)
    shape, fit = description.in_shape, fit or description.fit
    images = np.stack([read_image(file, shape, invert=invert, fit=fit) for file in image_files])
    scores = scores_of(images)
    # the order of torchcaps.models.objects.longest, without torch
    highest = (-scores).argsort(axis=1, kind="stable")[:, : description.objects]
    names = description.class_names
    results = []
    for file, chosen, row in zip(image_files, highest.tolist(), scores.tolist(), strict=True):
        given, lengths = [names[j] for j in chosen], dict(zip(names, row, strict=True))
        found = {"classes": given} if len(given) > 1 else {"class": given[0]}
        results.append({"image": str(file)} | found | {"lengths": lengths})
        if not as_json:
            _show_prediction(file, given, lengths)
    if as_json:
        print_json(results)


def split_arguments(arguments: Sequence[Path]) -> tuple[Path | None, Sequence[Path]]:
    """What stands on the command line as the network, None for the one that comes with torchcaps, and the images.

    The first argument is the network if it is a folder, ends in ``.onnx``, or is nothing here and could be a repository
    of the hub; else it is an image.
    """
    from torchcaps.datasets.formats.image_files import SUFFIXES

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


def _classifier(run_path: Path | None, which: Which) -> tuple[Description, Callable[[np.ndarray], np.ndarray]]:
    """What is known of a network, and a function from uint8 images (N, C, H, W) to class scores (N, J)."""
    if run_path is not None and run_path.suffix.lower() == ONNX:
        from torchcaps.export import OnnxModel

        if is_given("which"):
            raise click.UsageError("--which is for a run folder, not for an ONNX file; leave it out")
        model = OnnxModel(run_path)
        return model.description, lambda images: model(images)[0]

    import torch

    from torchcaps.analysis import predict as classify
    from torchcaps.export import describe_run

    run = open_run(run_path, which)
    return describe_run(run), lambda images: classify(run.model, torch.from_numpy(images)).scores


def _show_prediction(file: Path, classes: list[str], lengths: dict[str, float]) -> None:
    from rich.text import Text

    to = console()
    given = [visible(name) for name in classes]
    to.print(Text.assemble(visible(str(file)), "  ", (" + ".join(given), "bold green")), soft_wrap=True)
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
