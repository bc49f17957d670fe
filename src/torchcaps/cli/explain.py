"""``torchcaps reconstruct``, ``perturb``, ``routing`` and ``curves``: pictures of what a network has learned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from torchcaps.analysis.strengths import DRAWN_ITERATIONS
from torchcaps.cli.base import Command
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
    Prepare,
    Split,
    Which,
    data_options,
    figure_path,
    index_options,
    names_of,
    open_images,
    open_run,
    optional_run_argument,
    out_option,
    preparation_for,
    refuse_options,
    runs_argument,
)
from torchcaps.cli.values import Numbers, whole_numbers
from torchcaps.errors import InputError, unknown_name
from torchcaps.ranges import COUNT, INDEX, MOST_ENTRIES, Range

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from torchcaps.analysis import RoutingStatistics, RoutingTrace
    from torchcaps.datasets import ImageSet
    from torchcaps.training import Run


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
    image_file: Path | None,
    *,
    prepare: Prepare,
    invert: bool,
    fit: Fit | None,
    data: str | None,
    data_dir: str | None,
    split: Split,
) -> list[Picture]:
    """The images that the options name, as the run's network takes them."""
    from torchcaps.analysis import load_image
    from torchcaps.analysis.inference import join_names

    if image_file is not None:  # brought to size as the images of the run's data set were
        pixels = load_image(
            image_file,
            run.model.in_shape,
            preparation=preparation_for(prepare, run.images.preparation, fit),
            invert=invert,
            fit=fit or run.images.fit,
        )
        return [Picture(pixels, str(image_file), [], None, "")]
    images, dataset, where = open_images(run, data, data_dir, split)
    pictures = []
    for number in index:
        if number >= len(images):
            raise InputError(f"--index must be below {len(images)}, the number of {where}, got {number}")
        labels = images.labels[number].reshape(-1)
        words = f"Image {number} of the {where}, class {join_names(dataset.class_names, labels)}"
        pictures.append(Picture(images.images[number], words, labels.tolist(), images, where))
    return pictures


def check_image_options(image_file: Path | None, *more: str) -> None:
    """Refuse the options of a data set, and ``more``, beside --image; and without it those of a file."""
    if image_file is None:
        refuse_options(("prepare", "invert", "fit"), "is for a file given with --image")
    else:
        refuse_options(("index", "data", "data_dir", "split", *more), "is for a data set, not for --image")


@click.command(
    "reconstruct",
    cls=Command,
    examples=(
        ("reconstruct runs/sabour2017-digits-1", "the first 20 test images above their reconstructions"),
        ("reconstruct runs/sabour2017-digits-1 --count 50 --out many.pdf", "more of them, as a PDF"),
    ),
)
@optional_run_argument
@data_options
@click.option("--count", "number", type=whole_numbers(COUNT), default=20, help="How many images.")
@out_option("reconstructions")
def reconstruct(run_folder: Path | None, which: Which, number: int, out: Path | None, **images_of: Any) -> None:
    """Draw images above their reconstructions from class capsules; each of several objects in an image has a colour."""
    from torchcaps.analysis import figure_reconstructions
    from torchcaps.analysis import reconstruct as decode
    from torchcaps.analysis.reconstructions import MOST_SHOWN

    if number > MOST_SHOWN:
        raise InputError(
            f"--count must be at most {count(MOST_SHOWN)}, more do not fit one figure, got {count(number)}"
        )
    run = open_run(run_folder, which)
    images, dataset, where = open_images(run, **images_of)
    images = images.preview(number)
    result = decode(run.model, images.images, images.labels)
    given = "their class" if result.classes.ndim == 1 else "exactly their classes"
    say(
        f"First {count(len(images))} {where}: {count(int(result.right.sum()))} were given {given}; "
        f"squared error {result.squared_error.mean():.2f} an image"
    )
    write_figure(figure_reconstructions(result, dataset.class_names), figure_path(out, run_folder, "reconstructions"))


@click.command(
    "perturb",
    cls=Command,
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
@index_options(several=True)
@click.option(
    "--capsule", metavar="CLASS", help="The class whose capsule is changed, by name or number, instead of --follow."
)
@click.option(
    "--follow",
    type=click.Choice(["longest", "label"]),
    default="longest",
    help="Whose capsule is changed: the longest (or most active), or that of the image's label.",
)
@click.option(
    "--component", type=whole_numbers(INDEX), help="Change this component only; each image has a row.  [default: all]"
)
@click.option(
    "--range",
    "amplitude",
    type=Numbers(float, "0.5, or two such as -0.5,1", most=2),
    default="0.25",
    metavar="A|LOW,HIGH",
    help="Largest change either way, or the lowest and the highest change.",
)
@click.option("--steps", type=int, default=11, help="How many values each component takes.")
@out_option("perturbation")
def perturb(
    run_folder: Path | None,
    which: Which,
    index: tuple[int, ...],
    image_file: Path | None,
    capsule: str | None,
    follow: Literal["longest", "label"],
    component: int | None,
    amplitude: tuple[float] | tuple[float, float],
    steps: int,
    out: Path | None,
    **images_of: Any,
) -> None:
    """Change each component of a class capsule a little, decode, and draw what it encodes.

    With --component, only that component is changed, in the capsule of each image that an --index names.
    """
    from torchcaps.analysis import figure_component, figure_perturbation, perturb_capsule
    from torchcaps.models.output import HIGHEST

    check_image_options(image_file)
    if capsule is not None:
        refuse_options(("follow",), "says whose capsule is changed, and so does --capsule")
    if component is None and len(index) > 1:
        raise click.UsageError("several --index need --component, e.g. --component 0: all components fill a figure")
    run = open_run(run_folder, which)
    target = None if capsule is None else _class_number(capsule, run.class_names)
    pictures = read_pictures(run, index, image_file, **images_of)
    results = [
        perturb_capsule(
            run.model,
            picture.pixels,
            target=_label_of(picture) if follow == "label" else target,
            components=None if component is None else [component],
            amplitude=amplitude if len(amplitude) == 2 else amplitude[0],
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
    write_figure(figure, figure_path(out, run_folder, "perturbation"))


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


@click.command(
    "routing",
    cls=Command,
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
@index_options()
@click.option(
    "--layer",
    type=whole_numbers(Range(1, MOST_ENTRIES, whole=True)),
    help="Which capsule layer, from 1.  [default: the last, of the class capsules]",
)
@click.option(
    "--num-iterations",
    type=whole_numbers(DRAWN_ITERATIONS),
    help="Iterations to follow, of dynamic routing.  [default: the network's]",
)
@click.option("--count", "number", type=whole_numbers(COUNT), default=100, help="Images of the statistics.")
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
    run_folder: Path | None,
    which: Which,
    index: int,
    image_file: Path | None,
    layer: int | None,
    num_iterations: int | None,
    number: int,
    inputs: tuple[int, ...],
    as_json: bool,
    out: Path | None,
    **images_of: Any,
) -> None:
    """Draw where each class takes its input from, iteration by iteration, and whether routing settles.

    The coupling maps of one image are drawn to --out. Unless --image is given, statistics of many images are drawn to
    a file beside it.
    """
    from torchcaps.analysis import figure_coupling, figure_routing_statistics, routing_statistics, trace_routing
    from torchcaps.analysis.routing_maps import output_names

    check_image_options(image_file, "number")
    run = open_run(run_folder, which)
    (picture,) = read_pictures(run, [index], image_file, **images_of)
    trace = trace_routing(run.model, picture.pixels[None], layer=layer, num_iterations=num_iterations)
    there = trace.coupling.shape[2]
    if inputs and max(inputs) >= there:
        raise InputError(
            f"--input-capsule must be below {count(there)}, the number of the network's input capsules, got "
            f"{count(max(inputs))}"
        )
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
        say(
            "Entropy: 1 is uniform coupling, 0 is all to one. Agreement: its mean size, by which dynamic routing "
            "changes its logits.",
            "",
        )
    path = figure_path(out, run_folder, "routing")
    for suffix, figure in figures.items():
        write_figure(figure, path.with_stem(path.stem + suffix), quiet=as_json)


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
    from torchcaps.models.output import HIGHEST, top_classes

    shown: Sequence[int] = range(len(class_names))
    if len(class_names) > MOST_CLASSES:
        shown = sorted(top_classes(torch.from_numpy(trace.scores[-1, 0]), MOST_SHOWN).tolist())
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
    rows = table("iteration", most, trace.score_name, "entropy of coupling", "mean agreement")
    for t, scores in enumerate(trace.scores[:, 0]):
        highest = int(scores.argmax())
        add_row(
            rows,
            t + 1,
            class_names[highest],
            f"{scores[highest]:.3f}",
            f"{trace.entropy[t, 0]:.4f}",
            f"{trace.mean_agreement[t, 0]:.2e}",
        )
    print_table(rows, words)


def _show_statistics(statistics: RoutingStatistics, words: str) -> None:
    rows = table("iteration", "entropy of coupling", "mean agreement")
    for t, (entropy, agreement) in enumerate(
        zip(statistics.entropy.mean(1), statistics.mean_agreement.mean(1), strict=True)
    ):
        add_row(rows, t + 1, f"{entropy:.4f}", f"{agreement:.2e}")
    print_table(rows, words)
    if statistics.dead:
        say(f"{100 * statistics.dead:.1f} % of the output capsules are never longer, or more active, than 0.001.")


@click.command(
    "curves",
    cls=Command,
    examples=(
        ("curves runs/sabour2017-digits-1", "loss and error of each epoch"),
        ("curves runs/* --out compare.png", "several runs in one figure"),
    ),
)
@runs_argument
@click.option(
    "--out",
    type=FIGURE,
    help="Figure, .png, .pdf or .svg.  [default: RUN/figures/curves.png; of several runs a new file here, curves.png, "
    "curves-2.png and so on]",
)
def curves(run_folders: tuple[Path, ...], out: Path | None) -> None:
    """Draw loss and error of each epoch, of one run or of several to compare them."""
    from torchcaps.analysis import figure_curves, read_metrics
    from torchcaps.training.run import METRICS

    named = names_of(run_folders)
    drawn = [folder for folder in run_folders if not folder.is_dir() or (folder / METRICS).exists()] or run_folders
    for folder in run_folders:
        if folder not in drawn:
            say(f"{folder} is left out: it holds no {METRICS}, which is written after the first epoch", err=True)
    metrics = {name: read_metrics(folder) for name, folder in zip(named, run_folders, strict=True) if folder in drawn}
    if out is None and len(drawn) > 1:
        names = itertools.chain(["curves.png"], (f"curves-{n}.png" for n in itertools.count(2)))
        out = next(path for path in map(Path, names) if not path.exists())
    write_figure(figure_curves(metrics), figure_path(out, drawn[0], "curves"))
