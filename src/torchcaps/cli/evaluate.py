"""``torchcaps evaluate``: how good a network is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.cli.base import Command
from torchcaps.cli.output import (
    MOST_CLASSES,
    MOST_SHOWN,
    add_row,
    count,
    fits,
    percent,
    print_json,
    print_pairs,
    print_table,
    print_title,
    table,
    write_figure,
)
from torchcaps.cli.runs import (
    FIGURE,
    Split,
    Which,
    accelerator_option,
    data_options,
    json_option,
    name_of,
    open_images,
    open_run,
    optional_run_argument,
)
from torchcaps.cli.values import whole_numbers
from torchcaps.ranges import COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from torchcaps.analysis import ClassScore, Evaluation, Precision


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
@click.option("--figure", type=FIGURE, help="Draw the confusion matrix to this file too, .png, .pdf or .svg.")
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
    from torchcaps.analysis import evaluate as judge
    from torchcaps.analysis import figure_confusion

    run = open_run(run_folder, which, accelerator)
    images, dataset, where = open_images(run, data, data_dir, split)
    evaluation = judge(run.model, images, batch_size=batch_size, class_names=dataset.class_names, precision=precision)
    if as_json:
        about = {"run": name_of(run_folder), "which": which, "data": dataset.name, "split": split}
        print_json(about | evaluation.to_dict())
    else:
        weights = {"best": "best epoch", "last": "last checkpoint"}[which]
        if run_folder is None:
            weights = "comes with torchcaps"
        _show_evaluation(evaluation, f"{name_of(run_folder)} ({weights}) on the {where}")
    if figure is not None:
        write_figure(figure_confusion(evaluation), figure, quiet=as_json)


def _show_evaluation(evaluation: Evaluation, what: str) -> None:
    print_title(what)
    right, images = evaluation.num_correct, evaluation.num_images
    pairs = [
        ("Accuracy", f"{percent(evaluation.accuracy)}  ({count(right)} of {count(images)} images right)"),
        ("Error", f"{percent(evaluation.error)}  ({count(images - right)} wrong)"),
        ("Loss", f"{evaluation.loss:.4f}"),
    ]
    if evaluation.objects > 1:
        found, objects = int(evaluation.confusion.trace()), int(evaluation.confusion.sum())
        share = percent(evaluation.object_accuracy)
        pairs.insert(
            2, ("Objects", f"{share}  ({count(found)} of {count(objects)} found, {evaluation.objects} an image)")
        )
    print_pairs(pairs)
    scores = evaluation.per_class
    if len(scores) <= MOST_CLASSES:
        print_table(_class_table(scores))
    else:
        worst = sorted(scores, key=lambda score: 1.0 if score["f1"] is None else score["f1"])[:MOST_SHOWN]
        print_table(_class_table(worst), f"The {len(worst)} worst of {len(scores)} classes (--json has all)")
    confusion = _confusion_table(evaluation)
    if len(scores) <= MOST_CLASSES and fits(confusion):
        counted = "Confusion" if evaluation.objects == 1 else "Confusion (objects)"
        print_table(confusion, f"{counted}: true classes down, predicted ones across")
    elif right < images:
        print_table(_most_confused(evaluation), "Most frequent confusions (--json has all)")


def _class_table(scores: Sequence[ClassScore]) -> Table:
    rows = table("class", "images", "precision", "recall", "F1")
    for score in scores:
        shares = (score["precision"], score["recall"], score["f1"])
        add_row(rows, score["name"], count(score["images"]), *("–" if s is None else percent(s) for s in shares))
    return rows


def _confusion_table(evaluation: Evaluation) -> Table:
    from rich.text import Text

    names = evaluation.class_names
    short = all(len(name) <= 3 for name in names)
    rows = table("true", *(names if short else map(str, range(len(names)))))
    for i, name in enumerate(names):
        cells = []
        for j, number in enumerate(evaluation.confusion[i].tolist()):
            style = "dim" if number == 0 else "bold green" if i == j else "bold red"
            cells.append(Text(str(number) if number else "·", style=style))
        add_row(rows, name if short else f"{i} {name}", *cells)
    return rows


def _most_confused(evaluation: Evaluation) -> Table:
    wrong = evaluation.confusion.copy()
    wrong[range(len(wrong)), range(len(wrong))] = 0
    rows = table("true", "predicted", "images" if evaluation.objects == 1 else "objects", left=2)
    for place in wrong.argsort(axis=None, kind="stable")[::-1][:MOST_SHOWN].tolist():
        i, j = divmod(place, len(wrong))
        if wrong[i, j]:
            add_row(rows, evaluation.class_names[i], evaluation.class_names[j], count(int(wrong[i, j])))
    return rows
