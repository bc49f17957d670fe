"""``torchcaps robustness``: accuracy on turned images, and on images that an adversary has changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchcaps.analysis.strengths import ANGLES, EPSILONS, PGD_STEPS, STEPS
from torchcaps.cli.base import Command
from torchcaps.cli.fields import Numbers, whole_numbers
from torchcaps.cli.output import add_row, count, percent, print_json, print_table, table, write_figure
from torchcaps.cli.runs import (
    FIGURE,
    Split,
    Which,
    accelerator_option,
    data_options,
    json_option,
    names_of,
    open_images,
    open_run,
    refuse_options,
    runs_argument,
    which_option,
)
from torchcaps.ranges import COUNT, SEED

if TYPE_CHECKING:
    from rich.table import Table

    from torchcaps.analysis import RobustnessCurve
    from torchcaps.analysis.robustness import Attack, Objective
    from torchcaps.datasets import ImageSet
    from torchcaps.models import Network

_KINDS = ("rotation", "fgsm", "pgd")


@click.command(
    "robustness",
    cls=Command,
    short_help="Accuracy on rotated and on adversarially changed images.",
    examples=(
        ("robustness runs/sabour2017-mnist-1", "rotations, FGSM and PGD on the first 1,000 test images"),
        ("robustness runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
        ("robustness runs/capsules --kind pgd --objective scores --steps 50", "a stronger attack"),
    ),
)
@runs_argument
@which_option
@data_options
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="What is done to the images; may be given several times.  [default: all]",
)
@click.option("--angles", type=Numbers(float, "-30,0,30"), default=",".join(map(str, ANGLES)), help="Degrees.")
@click.option(
    "--epsilons",
    type=Numbers(float, "0,0.1,0.2"),
    default=",".join(f"{epsilon:g}" for epsilon in EPSILONS),
    help="Largest changes of a pixel (0..1) by FGSM and PGD.",
)
@click.option("--steps", type=whole_numbers(STEPS), default=PGD_STEPS, help="Steps of PGD.")
@click.option(
    "--objective",
    type=click.Choice(["loss", "scores"]),
    default="loss",
    help="What the attacks follow: the network's own loss, which is flat where an image is classified with enough "
    "margin, or the scores, which are not.",
)
@click.option("--limit", type=whole_numbers(COUNT), default=1000, help="The first so many images.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Of PGD's random starts.")
@accelerator_option
@click.option("--figure", type=FIGURE, help="Draw the curves to this file, .png, .pdf or .svg.")
@json_option
def robustness(
    run_folders: tuple[Path, ...],
    which: Which,
    data: str | None,
    data_dir: str | None,
    split: Split,
    kinds: tuple[str, ...],
    limit: int,
    seed: int,
    accelerator: str,
    figure: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how accuracy falls when images are turned, or changed along the network's gradient (FGSM and PGD).

    RUN is a run folder, a folder written by save_pretrained, or a repository of the hub such as someone/capsnet;
    several are compared.
    """
    kinds = kinds or _KINDS
    if "rotation" not in kinds:
        refuse_options(("angles",), "is for rotations, which --kind leaves out")
    if "fgsm" not in kinds and "pgd" not in kinds:
        refuse_options(("epsilons", "objective"), "is for attacks, which --kind leaves out")
    if "pgd" not in kinds:
        refuse_options(("steps", "seed"), "is for PGD, which --kind leaves out")

    from torchcaps.analysis import figure_robustness

    networks: dict[str, list[RobustnessCurve]] = {}
    shown: dict[str, str] = {}
    described = []
    for folder, name in zip(run_folders, names_of(run_folders), strict=True):
        run = open_run(folder, which, accelerator)
        images, dataset, where = open_images(run, data, data_dir, split)
        images = images.preview(limit)
        networks[name] = _measure(run.model, images, kinds, seed=seed, **options)
        shown[name] = f"the first {count(len(images))} {where}"
        about = {"run": str(folder), "which": which, "data": dataset.name, "split": split}
        described.append(about | {"curves": [curve.to_dict() for curve in networks[name]]})
    differ = len(set(shown.values())) > 1
    if as_json:
        print_json(described)
    else:
        each = [f"of {name} on {words}" for name, words in shown.items()]
        _show(networks, f"Accuracy {', '.join(each)}" if differ else f"Accuracy on {shown[name]}")
    if figure is not None:
        title = "\n".join(f"{name}: {words}" for name, words in shown.items()) if differ else None
        write_figure(figure_robustness(networks, title=title), figure, quiet=as_json)


def _measure(
    model: Network,
    images: ImageSet,
    kinds: Sequence[str],
    *,
    angles: tuple[float, ...],
    epsilons: tuple[float, ...],
    steps: int,
    objective: Objective,
    seed: int,
) -> list[RobustnessCurve]:
    from torchcaps.analysis import attack_curve, rotation_curve

    found = [rotation_curve(model, images, angles=angles)] if "rotation" in kinds else []
    attacks: tuple[Attack, ...] = ("fgsm", "pgd")
    return found + [
        attack_curve(model, images, attack, epsilons=epsilons, steps=steps, objective=objective, seed=seed)
        for attack in attacks
        if attack in kinds
    ]


def _show(networks: dict[str, list[RobustnessCurve]], title: str) -> None:
    from torchcaps.analysis.robustness import KINDS

    for curves in zip(*networks.values(), strict=True):
        name, unit = KINDS[curves[0].kind]
        rows: Table = table(unit, *networks, left=0)
        for n, strength in enumerate(curves[0].strengths):
            add_row(rows, f"{strength:g}", *(percent(curve.accuracy[n]) for curve in curves))
        print_table(rows, f"{name}. {title}")
