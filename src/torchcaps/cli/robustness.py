"""``torchcaps robustness``: accuracy on turned images, and on images that an adversary has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from torchcaps.analysis.strengths import ANGLES, EPSILONS, PGD_STEPS, STEPS
from torchcaps.cli.base import Command
from torchcaps.cli.output import add_row, count, percent, print_json, print_table, say, table, write_figure
from torchcaps.cli.runs import (
    FIGURE,
    Split,
    Which,
    accelerator_option,
    data_options,
    json_option,
    name_of,
    names_of,
    open_images,
    open_run,
    optional_runs_argument,
    refuse_options,
    which_option,
)
from torchcaps.cli.values import Numbers, whole_numbers
from torchcaps.ranges import COUNT, SEED

if TYPE_CHECKING:
    from rich.table import Table

    from torchcaps.analysis import RobustnessCurve
    from torchcaps.analysis.robustness import Attack, Objective
    from torchcaps.datasets import ImageSet
    from torchcaps.models import Network

_ATTACKS: tuple[Attack, ...] = ("fgsm", "pgd")
_KINDS = ("rotation", *_ATTACKS)
_BATCH = 256
_INTERVAL = 10.0  # seconds between two lines about progress


@click.command(
    "robustness",
    cls=Command,
    examples=(
        ("robustness runs/sabour2017-mnist-1", "rotations, FGSM and PGD on the first 1,000 test images"),
        ("robustness --data mnist --limit 200", "the network that comes with torchcaps"),
        ("robustness runs/capsules runs/cnn --figure compare.png", "two networks side by side"),
        ("robustness runs/capsules --kind pgd --objective scores --steps 50", "a stronger attack"),
    ),
)
@optional_runs_argument
@which_option
@data_options
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="How the images are changed; may be given several times.  [default: all]",
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
@click.option("--limit", type=whole_numbers(COUNT), default=1000, help="Use this many images, the first ones.")
@click.option("--seed", type=whole_numbers(SEED), default=0, help="Seed of PGD's random starts.")
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
    several are compared. Without it, the network that comes with torchcaps is measured. The command first says, on
    stderr, how long it will take; most of that is PGD's, in proportion to --steps.
    """
    kinds = kinds or _KINDS
    if "rotation" not in kinds:
        refuse_options(("angles",), "is for rotations, which --kind leaves out")
    if "fgsm" not in kinds and "pgd" not in kinds:
        refuse_options(("epsilons", "objective"), "is for attacks, which --kind leaves out")
    if "pgd" not in kinds:
        refuse_options(("steps", "seed"), "is for PGD, which --kind leaves out")

    from torchcaps.analysis import figure_robustness

    tasks: dict[str, list[_Task]] = {}
    shown: dict[str, str] = {}
    abouts = []
    folders: Sequence[Path | None] = run_folders or [None]
    for folder, name in zip(folders, names_of(run_folders) or [name_of(None)], strict=True):
        run = open_run(folder, which, accelerator)
        images, dataset, where = open_images(run, data, data_dir, split)
        images = images.preview(limit)
        tasks[name] = _tasks(run.model, images, kinds, seed=seed, **options)
        shown[name] = f"the first {count(len(images))} {where}"
        abouts.append({"run": name_of(folder), "which": which, "data": dataset.name, "split": split})
    networks = _measure(tasks)
    described = [
        about | {"curves": [curve.to_dict() for curve in curves]}
        for about, curves in zip(abouts, networks.values(), strict=True)
    ]
    differ = len(set(shown.values())) > 1
    if as_json:
        print_json(described)
    else:
        each = [f"of {name} on {words}" for name, words in shown.items()]
        _show(networks, f"Accuracy {', '.join(each)}" if differ else f"Accuracy on {shown[name]}")
    if figure is not None:
        title = "\n".join(f"{name}: {words}" for name, words in shown.items()) if differ else None
        write_figure(figure_robustness(networks, title=title), figure, quiet=as_json)


class _Task(NamedTuple):
    """A curve to measure."""

    measure: Callable[..., RobustnessCurve]
    """Takes ``progress``, which is called after each batch at each strength."""
    calls: int
    """How often it will be called."""
    seconds: float
    """Between two calls, estimated."""


def _tasks(
    model: Network,
    images: ImageSet,
    kinds: Sequence[str],
    *,
    angles: tuple[float, ...],
    epsilons: tuple[float, ...],
    steps: int,
    objective: Objective,
    seed: int,
) -> list[_Task]:
    """The curves of a network; how long they take is estimated from one batch."""
    from torchcaps.analysis import attack_curve, rotation_curve

    def timed(curve: Callable[..., RobustnessCurve], *attack: str, **options: Any) -> float:
        begin = time.perf_counter()
        curve(model, images.preview(_BATCH), *attack, batch_size=_BATCH, **options)
        return time.perf_counter() - begin

    batches = -(-len(images) // _BATCH)
    found = []
    if "rotation" in kinds:
        for _ in range(2):  # the first batch takes longer
            look = timed(rotation_curve, angles=angles[:1])
        turn = partial(rotation_curve, model, images, angles=angles, batch_size=_BATCH)
        found.append(_Task(turn, batches * len(angles), look))
    attacks: list[Attack] = [attack for attack in _ATTACKS if attack in kinds]
    if attacks:
        strongest = sorted(epsilons)[-1:]
        for _ in range(2):
            step = timed(attack_curve, "fgsm", epsilons=strongest, objective=objective)
    for attack in attacks:
        each = partial(attack_curve, model, images, attack, epsilons=epsilons, steps=steps, seed=seed)
        change = partial(each, objective=objective, batch_size=_BATCH)
        if attack == "pgd":
            few = min(steps, 3)
            step = timed(attack_curve, "pgd", epsilons=strongest, objective=objective, steps=few) * steps / few
        found.append(_Task(change, batches * len(epsilons), step))
    return found


def _measure(tasks: Mapping[str, Sequence[_Task]]) -> dict[str, list[RobustnessCurve]]:
    """Measure all curves, and say on stderr how long it will take and how far it is."""
    from torchcaps.training.progress import duration

    total = sum(task.calls * task.seconds for each in tasks.values() for task in each)
    say(f"Measuring will take about {duration(total)}.", err=True)
    done = 0.0
    begin = last = time.monotonic()

    def advance(seconds: float) -> None:
        nonlocal done, last
        done += seconds
        now = time.monotonic()
        if now - last >= _INTERVAL:
            last = now
            say(
                f"{100 * done / total:.0f} % measured, {duration((now - begin) / done * (total - done))} left", err=True
            )

    return {
        name: [task.measure(progress=partial(advance, task.seconds)) for task in each] for name, each in tasks.items()
    }


def _show(networks: dict[str, list[RobustnessCurve]], title: str) -> None:
    from torchcaps.analysis.robustness import KINDS

    for curves in zip(*networks.values(), strict=True):
        name, unit = KINDS[curves[0].kind]
        rows: Table = table(unit, *networks, left=0)
        for n, strength in enumerate(curves[0].strengths):
            add_row(rows, f"{strength:g}", *(percent(curve.accuracy[n]) for curve in curves))
        print_table(rows, f"{name}. {title}")
