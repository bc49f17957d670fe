"""``torchcaps reconstruct``, ``perturb``, ``routing`` and ``curves``: pictures of what a network has learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from torchcaps.analysis.strengths import DRAWN_ITERATIONS
from torchcaps.cli.base import Command
from torchcaps.cli.fields import whole_numbers
from torchcaps.cli.output import add_row, count, print_table, table, write_figure
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
    runs_argument,
)
from torchcaps.errors import InputError
from torchcaps.ranges import COUNT

if TYPE_CHECKING:
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
class ChosenImage(Chosen):
    """What the options name: a run, and one image of a data set, or an image file."""

    index: int
    image_file: Path | None
    invert: bool
    fit: Fit | None

    def read(self, run: Run) -> Picture:
        """The image as the run's network takes it.

        Raises:
            InputError: There is none, or it does not fit the network.
        """
        if self.image_file is not None:
            pixels = read_image(run, self.image_file, invert=self.invert, fit=self.fit)
            return Picture(pixels, str(self.image_file), None, "")
        images, dataset, where = self.open_images(run)
        return Picture(*image_at(images, self.index, dataset.class_names, where), images, where)


class Picture(NamedTuple):
    """An image to look into."""

    pixels: Tensor
    """uint8 (C, H, W)."""
    words: str
    """What it is."""
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
    click.echo(
        f"First {count(len(images))} {where}: {count(int(result.right.sum()))} were given {given}; "
        f"squared error {result.squared_error.mean():.2f} an image"
    )
    path = figure_path(out, chosen.run_folder, "reconstructions")
    write_figure(figure_reconstructions(result, dataset.class_names), path)


@click.command(
    "perturb",
    cls=Command,
    short_help="What each component of a capsule encodes.",
    examples=(
        ("perturb runs/sabour2017-digits-1", "the first test image: each component by −0.25…0.25"),
        ("perturb runs/sabour2017-digits-1 --index 7 --range 0.5", "another image, larger changes"),
        ("perturb runs/sabour2017-digits-1 --image seven.png --capsule 9", "what the capsule of 9 makes of a 7"),
    ),
)
@optional_run_argument
@data_options
@index_options
@click.option("--capsule", metavar="CLASS", help="Whose capsule, by name or number.  [default: the longest]")
@click.option("--range", "amplitude", type=float, default=0.25, show_default=True, help="Largest change.")
@click.option("--steps", type=int, default=11, show_default=True, help="Values of each component.")
@out_option("perturbation")
def perturb(capsule: str | None, amplitude: float, steps: int, out: Path | None, **options: Any) -> None:
    """Change each component of a class capsule a little, decode, and draw what it encodes."""
    from torchcaps.analysis import figure_perturbation, perturb_capsule

    chosen = ChosenImage(**options)
    check_image_options(chosen.image_file)
    run = chosen.open_run()
    target = None if capsule is None else class_number(capsule, run.class_names)
    picture = chosen.read(run)
    result = perturb_capsule(run.model, picture.pixels, target=target, amplitude=amplitude, steps=steps)
    length = result.lengths[result.target]
    click.echo(f"{picture.words}: capsule {run.class_names[result.target]}, length {length:.3f}")
    path = figure_path(out, chosen.run_folder, "perturbation")
    write_figure(figure_perturbation(result, run.class_names), path)


@click.command(
    "routing",
    cls=Command,
    short_help="Where each class takes its input from.",
    examples=(
        ("routing runs/sabour2017-digits-1", "the first test image, and statistics of the first 100"),
        ("routing runs/sabour2017-digits-1 --index 7 --num-iterations 5", "another image, more iterations"),
        ("routing runs/sabour2017-digits-1 --image seven.png", "an image of your own"),
    ),
)
@optional_run_argument
@data_options
@index_options
@click.option(
    "--num-iterations",
    type=whole_numbers(DRAWN_ITERATIONS),
    help="Iterations to follow.  [default: the network's]",
)
@click.option(
    "--count", "number", type=whole_numbers(COUNT), default=100, show_default=True, help="Images of the statistics."
)
@out_option("routing")
def routing(num_iterations: int | None, number: int, out: Path | None, **options: Any) -> None:
    """Draw where each class takes its input from, iteration by iteration, and whether routing settles.

    The coupling maps of one image go to --out; the statistics of many, unless --image is given, to a file beside it.
    """
    from torchcaps.analysis import (
        figure_coupling,
        figure_routing_statistics,
        routing_statistics,
        trace_routing,
    )

    chosen = ChosenImage(**options)
    check_image_options(chosen.image_file, "number")
    run = chosen.open_run()
    picture = chosen.read(run)
    trace = trace_routing(run.model, picture.pixels[None], num_iterations=num_iterations)
    _show_trace(trace, run.class_names, picture.words)
    statistics = None
    if picture.images is not None:
        many = picture.images.preview(number)
        statistics = routing_statistics(run.model, many.images, num_iterations=num_iterations)
        _show_statistics(statistics, f"Mean of the first {count(len(many))} {picture.where}")
    click.echo("Entropy: 1 is uniform coupling, 0 is all to one. Change: what the iteration adds to the logits.\n")
    path = figure_path(out, chosen.run_folder, "routing")
    write_figure(figure_coupling(trace, class_names=run.class_names), path)
    if statistics is not None:
        write_figure(figure_routing_statistics(statistics), path.with_stem(path.stem + "-statistics"))


def _show_trace(trace: RoutingTrace, class_names: tuple[str, ...], words: str) -> None:
    rows = table("iteration", "longest capsule", "length", "entropy of coupling", "change of logits")
    for t, lengths in enumerate(trace.lengths[:, 0]):
        longest = int(lengths.argmax())
        add_row(
            rows,
            t + 1,
            class_names[longest],
            f"{lengths[longest]:.3f}",
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
