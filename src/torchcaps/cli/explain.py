"""``torchcaps reconstruct``, ``perturb``, ``routing`` and ``curves``: pictures of what a network has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from torchcaps.analysis.strengths import DRAWN_ITERATIONS
from torchcaps.cli.base import Command
from torchcaps.cli.fields import ParamType, whole_numbers
from torchcaps.cli.output import (
    MOST_CLASSES,
    MOST_SHOWN,
    add_row,
    count,
    print_json,
    print_table,
    say,
    table,
    write_figure,
)
from torchcaps.cli.runs import (
    FIGURE,
    Fit,
    Split,
    Which,
    check_image_options,
    class_number,
    data_options,
    figure_path,
    image_at,
    index_options,
    names_of,
    open_images,
    open_run,
    optional_run_argument,
    out_option,
    read_image,
    refuse_options,
    runs_argument,
    several_index_options,
)
from torchcaps.errors import InputError
from torchcaps.ranges import COUNT, INDEX, LAYERS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from torchcaps.analysis import RoutingStatistics, RoutingTrace
    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run


@dataclass(frozen=True)
class Chosen:
    """What the options name: a run, and a part of a data set."""

    run_folder: Path | None
    which: Which
    data: str | None
    data_dir: str | None
    split: Split

    def open_run(self) -> Run:
        """The trained network.

        Raises:
            InputError: There is none, or it is damaged.
        """
        return open_run(self.run_folder, self.which)

    def open_images(self, run: Run) -> tuple[ImageSet, Dataset, str]:
        """The images, the data set they are of, and what they are, in words.

        Raises:
            InputError: Data that do not fit the network, or cannot be read.
        """
        return open_images(run, self.data, self.data_dir, self.split)


@dataclass(frozen=True)
class ChosenImages(Chosen):
    """What the options name: a run, and some images of a data set, or an image file."""

    index: tuple[int, ...]
    image_file: Path | None
    invert: bool
    fit: Fit | None

    def read(self, run: Run) -> list[Picture]:
        """The images as the run's network takes them.

        Raises:
            InputError: There is none, or they do not fit the network.
        """
        if self.image_file is not None:
            pixels = read_image(run, self.image_file, invert=self.invert, fit=self.fit)
            return [Picture(pixels, str(self.image_file), [], None, "")]
        images, dataset, where = self.open_images(run)
        return [Picture(*image_at(images, index, dataset.class_names, where), images, where) for index in self.index]


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


@click.command(
    "reconstruct",
    cls=Command,
    short_help="Images over what the decoder makes of their capsules.",
    examples=(
        ("reconstruct runs/sabour2017-digits-1", "the first 20 test images over their reconstructions"),
        ("reconstruct runs/sabour2017-digits-1 --count 50 --out many.pdf", "more of them, as a PDF"),
    ),
)
@optional_run_argument
@data_options
@click.option("--count", "number", type=whole_numbers(COUNT), default=20, show_default=True, help="How many images.")
@out_option("reconstructions")
def reconstruct(number: int, out: Path | None, **options: Any) -> None:
    """Draw images over what the decoder makes of their capsules; several objects in an image each in its colour."""
    from torchcaps.analysis import figure_reconstructions
    from torchcaps.analysis import reconstruct as decode
    from torchcaps.analysis.reconstructions import MOST_SHOWN

    if number > MOST_SHOWN:
        raise InputError(
            f"--count must be at most {count(MOST_SHOWN)}, more do not fit one figure, got {count(number)}"
        )
    chosen = Chosen(**options)
    run = chosen.open_run()
    images, dataset, where = chosen.open_images(run)
    images = images.preview(number)
    result = decode(run.model, images.images, images.labels)
    given = "their class" if result.classes.ndim == 1 else "exactly their classes"
    say(
        f"First {count(len(images))} {where}: {count(int(result.right.sum()))} were given {given}; "
        f"squared error {result.squared_error.mean():.2f} an image"
    )
    path = figure_path(out, chosen.run_folder, "reconstructions")
    write_figure(figure_reconstructions(result, dataset.class_names), path)


class Changes(ParamType):
    """The largest change either way, or the lowest and the highest change with a comma between them."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """From the command line to a number or two."""
        if not isinstance(value, str):
            return value
        try:
            numbers = tuple(map(float, value.split(",")))
        except ValueError:
            numbers = ()
        if not 1 <= len(numbers) <= 2:
            self.fail(f"{value!r} is no range: it must be a number such as 0.5, or two such as -0.5,1.", param, ctx)
        return numbers if len(numbers) == 2 else numbers[0]


@click.command(
    "perturb",
    cls=Command,
    short_help="What each component of a capsule encodes.",
    examples=(
        ("perturb runs/sabour2017-digits-1", "the first test image: each component by −0.25…0.25"),
        ("perturb runs/sabour2017-digits-1 --index 7 --range 0.5", "another image, larger changes"),
        ("perturb runs/sabour2017-digits-1 --image seven.png --capsule 9", "what the capsule of 9 makes of a 7"),
        (
            "perturb runs/sabour2017-digits-1 --component 3 --index 0 --index 1 --follow label",
            "one component, an image in each row",
        ),
    ),
)
@optional_run_argument
@data_options
@several_index_options
@click.option("--capsule", metavar="CLASS", help="Whose capsule, by name or number, in place of --follow.")
@click.option(
    "--follow",
    type=click.Choice(["longest", "label"]),
    default="longest",
    show_default=True,
    help="Whose capsule is changed: the longest (or most active), or that of the image's label.",
)
@click.option(
    "--component",
    type=whole_numbers(INDEX),
    help="This component only, each image in a row.  [default: all]",
)
@click.option(
    "--range",
    "amplitude",
    type=Changes(),
    default=0.25,
    show_default=True,
    metavar="A|LOW,HIGH",
    help="Largest change either way, or the lowest and the highest change.",
)
@click.option("--steps", type=int, default=11, show_default=True, help="Values of each component.")
@out_option("perturbation")
def perturb(
    capsule: str | None,
    follow: Literal["longest", "label"],
    component: int | None,
    amplitude: float | tuple[float, float],
    steps: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Change each component of a class capsule a little, decode, and draw what it encodes.

    With --component, that component alone, of as many images as there are --index.
    """
    from torchcaps.analysis import figure_component, figure_perturbation, perturb_capsule
    from torchcaps.models.output import HIGHEST

    chosen = ChosenImages(**options)
    check_image_options(chosen.image_file)
    if capsule is not None:
        refuse_options(("follow",), "says whose capsule is changed, and so does --capsule")
    if component is None and len(chosen.index) > 1:
        raise click.UsageError("several --index need --component, e.g. --component 0: all components fill a figure")
    run = chosen.open_run()
    target = None if capsule is None else class_number(capsule, run.class_names)
    pictures = chosen.read(run)
    results = [
        perturb_capsule(
            run.model,
            picture.pixels,
            target=_label_of(picture) if follow == "label" else target,
            components=None if component is None else [component],
            amplitude=amplitude,
            steps=steps,
        )
        for picture in pictures
    ]
    highest = HIGHEST[results[0].score_name]
    whose = "" if capsule is not None else {"longest": f"the {highest}", "label": "the label's"}[follow]
    if component is None:
        figure = figure_perturbation(results[0], run.class_names)
    else:
        title = f"Component {component} of {whose} capsule" if whose else None
        figure = figure_component(results, run.class_names, title=title)
    for picture, result in zip(pictures, results, strict=True):
        part = "" if component is None else f"component {component} of "
        name = run.class_names[result.target] + (f" ({whose})" if whose else "")
        say(f"{picture.words}: {part}capsule {name}, {result.score_name} {result.scores[result.target]:.3f}")
    write_figure(figure, figure_path(out, chosen.run_folder, "perturbation"))


def _label_of(picture: Picture) -> int:
    """The class of an image of one object.

    Raises:
        InputError: It is not known, or there are several.
    """
    if not picture.labels:
        raise InputError(
            f"--follow label needs an image whose class is known, which that of the file {picture.words} is not; "
            "choose a capsule with --capsule"
        )
    if len(picture.labels) > 1:
        raise InputError(
            f"--follow label needs an image of one object, this one has {len(picture.labels)}; choose a capsule with "
            "--capsule"
        )
    return picture.labels[0]


@click.command(
    "routing",
    cls=Command,
    short_help="Where each class takes its input from.",
    examples=(
        ("routing runs/sabour2017-digits-1", "the first test image, and statistics of the first 100"),
        ("routing runs/sabour2017-digits-1 --index 7 --num-iterations 5", "another image, more iterations"),
        ("routing runs/sabour2017-digits-1 --image seven.png", "an image of your own"),
        ("routing runs/sabour2017-digits-1 --input-capsule 40", "every number of one input capsule"),
        ("routing runs/sabour2017-digits-1 --json", "every number of all of them, for other programs"),
    ),
)
@optional_run_argument
@data_options
@index_options
@click.option(
    "--layer",
    type=whole_numbers(LAYERS),
    help="Which capsule layer, from 1.  [default: the last, of the class capsules]",
)
@click.option(
    "--num-iterations",
    type=whole_numbers(DRAWN_ITERATIONS),
    help="Iterations to follow, of dynamic routing.  [default: the network's]",
)
@click.option(
    "--count", "number", type=whole_numbers(COUNT), default=100, show_default=True, help="Images of the statistics."
)
@click.option(
    "--input-capsule",
    "inputs",
    type=whole_numbers(INDEX),
    multiple=True,
    help="Also print logits, coupling and agreement of this input capsule in each iteration; may be given several "
    "times.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print every iteration of the image as JSON: logits, coupling, weighted sums, capsules and agreement; with "
    "--input-capsule, of these input capsules only.",
)
@out_option("routing")
def routing(
    layer: int | None,
    num_iterations: int | None,
    number: int,
    inputs: tuple[int, ...],
    as_json: bool,
    out: Path | None,
    index: int,
    **options: Any,
) -> None:
    """Draw where each class takes its input from, iteration by iteration, and whether routing settles.

    The coupling maps of one image go to --out; the statistics of many, unless --image is given, to a file beside it.
    """
    from torchcaps.analysis import (
        figure_coupling,
        figure_routing_statistics,
        routing_statistics,
        trace_routing,
    )
    from torchcaps.analysis.routing_maps import output_names

    chosen = ChosenImages(index=(index,), **options)
    check_image_options(chosen.image_file, "number")
    run = chosen.open_run()
    (picture,) = chosen.read(run)
    trace = trace_routing(run.model, picture.pixels[None], layer=layer, num_iterations=num_iterations)
    _check_inputs(inputs, trace)
    names = tuple(output_names(trace, run.class_names if trace.outputs == "class" else None))
    figures = {"": figure_coupling(trace, class_names=names)}
    statistics = None
    if picture.images is not None:
        many = picture.images.preview(number)
        statistics = routing_statistics(run.model, many.images, layer=layer, num_iterations=num_iterations)
        figures["-statistics"] = figure_routing_statistics(statistics)
    if as_json:
        print_json(_describe_trace(trace, names, picture.words, inputs))
    else:
        _show_trace(trace, names, picture.words)
        for capsule in inputs:
            _show_input(trace, names, capsule)
        if statistics is not None:
            _show_statistics(statistics, f"Mean of the first {count(len(many))} {picture.where}")
        say("Entropy: 1 is uniform coupling, 0 is all to one. Change: what the iteration adds to the logits.", "")
    path = figure_path(out, chosen.run_folder, "routing")
    for suffix, figure in figures.items():
        write_figure(figure, path.with_stem(path.stem + suffix), quiet=as_json)


def _check_inputs(inputs: tuple[int, ...], trace: RoutingTrace) -> None:
    """Raise unless the network has these input capsules.

    Raises:
        InputError: It has not.
    """
    there = trace.coupling.shape[2]
    for capsule in inputs:
        if capsule >= there:
            raise InputError(
                f"--input-capsule must be below {count(there)}, the number of the network's input capsules, got "
                f"{count(capsule)}"
            )


def _describe_trace(
    trace: RoutingTrace, class_names: tuple[str, ...], words: str, inputs: tuple[int, ...]
) -> dict[str, Any]:
    """The numbers of the first image of a trace, of these input capsules or, if there are none, of all."""
    chosen = list(inputs) or list(range(trace.coupling.shape[2]))
    return {
        "image": words,
        "class_names": class_names,
        "softmax_over": trace.softmax_over,
        "leaky": trace.leaky,
        "layer": trace.layer,
        "in_space": trace.in_space,
        "grid": trace.grid,
        "input_capsules": chosen,
        "rounds": [
            {
                "round": t + 1,
                "logits": _numbers(trace.logits[t, 0, chosen]),
                "coupling": _numbers(trace.coupling[t, 0, chosen]),
                "weighted_sum": _numbers(trace.weighted_sum[t, 0]),
                "capsules": _numbers(trace.capsules[t, 0]),
                "lengths": _numbers(trace.scores[t, 0]),
                "agreement": _numbers(trace.agreement[t, 0, chosen]),
            }
            for t in range(len(trace.coupling))
        ],
    }


def _numbers(values: np.ndarray) -> Any:
    """Float32 numbers in lists, each with as few digits as tell it from its neighbours."""
    return values.astype(str).astype(float).tolist()


def _show_input(trace: RoutingTrace, class_names: tuple[str, ...], capsule: int) -> None:
    """What one input capsule and each output capsule make of each other, iteration by iteration."""
    import torch

    from torchcaps.analysis.routing_maps import PLURALS
    from torchcaps.models.objects import longest
    from torchcaps.models.output import HIGHEST

    shown: Sequence[int] = range(len(class_names))
    if len(class_names) > MOST_CLASSES:
        shown = sorted(longest(torch.from_numpy(trace.scores[-1, 0]), MOST_SHOWN).tolist())
    score = f"{trace.score_name} of the {trace.outputs} capsule" if trace.outputs != "capsule" else trace.score_name
    rows = table("iteration", trace.outputs, "logit", "coupling", "agreement", score, left=2)
    for t in range(len(trace.coupling)):
        for j in shown:
            values = [part[t, 0, capsule, j] for part in (trace.logits, trace.coupling, trace.agreement)]
            cells = (f"{value:z.4f}" for value in (*values, trace.scores[t, 0, j]))
            add_row(rows, t + 1 if j == shown[0] else "", class_names[j], *cells)
        rows.add_section()
    _, height, width = trace.grid
    place = ""
    if trace.in_space:
        kind, rest = divmod(capsule, height * width)
        place = f": type {kind}, row {rest // width}, column {rest % width}"
    fewer = (
        f" (the {len(shown)} {HIGHEST[trace.score_name]} of {len(class_names)} {PLURALS[trace.outputs]})"
        if len(shown) < len(class_names)
        else ""
    )
    print_table(rows, f"Input capsule {capsule}{place}{fewer}")


def _show_trace(trace: RoutingTrace, class_names: tuple[str, ...], words: str) -> None:
    from torchcaps.models.output import HIGHEST

    most = f"{HIGHEST[trace.score_name]} {'type' if trace.outputs == 'type' else 'capsule'}"
    rows = table("iteration", most, trace.score_name, "entropy of coupling", "change of logits")
    for t, scores in enumerate(trace.scores[:, 0]):
        highest = int(scores.argmax())
        add_row(
            rows,
            t + 1,
            class_names[highest],
            f"{scores[highest]:.3f}",
            f"{trace.entropy[t, 0]:.4f}",
            f"{trace.logit_change[t, 0]:.2e}",
        )
    print_table(rows, words)


def _show_statistics(statistics: RoutingStatistics, words: str) -> None:
    rows = table("iteration", "entropy of coupling", "change of logits")
    for t, (entropy, change) in enumerate(
        zip(statistics.entropy.mean(1), statistics.logit_change.mean(1), strict=True)
    ):
        add_row(rows, t + 1, f"{entropy:.4f}", f"{change:.2e}")
    print_table(rows, words)
    if statistics.dead:
        say(f"{100 * statistics.dead:.1f} % of the output capsules are never longer, or more active, than 0.001.")


@click.command(
    "curves",
    cls=Command,
    short_help="Loss and error of each epoch, of one run or several.",
    examples=(
        ("curves runs/sabour2017-digits-1", "loss and error of each epoch"),
        ("curves runs/* --out compare.png", "several runs in one figure"),
    ),
)
@runs_argument
@click.option(
    "--out", type=FIGURE, help="Figure, .png, .pdf or .svg.  [default: RUN/figures/curves.png of the first run]"
)
def curves(run_folders: tuple[Path, ...], out: Path | None) -> None:
    """Draw loss and error of each epoch, of one run or of several to compare them."""
    from torchcaps.analysis import figure_curves, read_metrics

    metrics = {name: read_metrics(folder) for name, folder in zip(names_of(run_folders), run_folders, strict=True)}
    write_figure(figure_curves(metrics), figure_path(out, run_folders[0], "curves"))
