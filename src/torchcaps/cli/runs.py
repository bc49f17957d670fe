"""Helpers of commands for trained networks: open runs and images, choose the files of figures."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.cli.show import say
from torchcaps.errors import InputError
from torchcaps.files import real
from torchcaps.ranges import COVERAGE
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torchcaps.cli.options import ImageFiles, Source, Which
    from torchcaps.datasets import Preparation
    from torchcaps.datasets.dataset import Part
    from torchcaps.training import Run


def open_run(run: Path | None, which: Which, accelerator: str = "cpu") -> Run:
    """Open the network of a run folder or of a repository of the hub (None: the one of torchcaps).

    Raises:
        InputError: There is no such network, or its task does not support the running command.
    """
    from torchcaps.models.files import SHIPPED
    from torchcaps.training import load_run
    from torchcaps.training.devices import pick_device

    if run is not None and run.is_file():
        raise InputError(f"{run} is a file; this command needs a run folder")
    opened = load_run(SHIPPED["compact"] if run is None else run, which, device=pick_device(accelerator))
    command = click.get_current_context().info_name
    task_of(opened.model).require(str(command), f"torchcaps {command}")
    return opened


def files_of(run: Path | None) -> list[Path]:
    """Return the files of a network, which no result replaces: those of a run folder, or the ONNX file itself."""
    if run is None or run.is_file():
        return [] if run is None else [run]
    from torchcaps.models.files import CLASSES, CONFIG, WEIGHTS
    from torchcaps.training.folder import BEST_FILES, CHECKPOINT, METRICS, SUMMARY

    return [run / name for name in (CONFIG, CLASSES, WEIGHTS, METRICS, SUMMARY, CHECKPOINT, *BEST_FILES)]


def data_files(run: Run, data: str | None) -> list[Path]:
    """Return the file, or the folder, of the data set ``data``, or of the run's own: a result does not replace it."""
    from torchcaps.datasets import find_dataset

    spec = run.shown_data if data is None else data
    path = None if spec is None else find_dataset(spec)[1]
    return [] if path is None else [path]


def open_runs(runs: Sequence[Path], which: Which, accelerator: str = "cpu") -> Iterator[tuple[str, str, Run]]:
    """Yield name, folder and network of each run, or of the network of torchcaps if there is no run.

    Warnings about several runs are shown at the end, each once, with the names of its runs.
    """
    folders: Sequence[Path | None] = runs or [None]
    warned: dict[str, list[str]] = {}
    for folder, name in zip(folders, names_of(runs) or [name_of(None)], strict=True):
        with warnings.catch_warnings(record=True) if len(runs) > 1 else nullcontext(()) as caught:
            yield name, name_of(folder), open_run(folder, which, accelerator)
        for text in dict.fromkeys(str(each.message) for each in caught or ()):
            warned.setdefault(text, []).append(name)
    for text, names in warned.items():
        warnings.warn(f"{', '.join(names)}: {text}", stacklevel=2)


def name_of(run: Path | None) -> str:
    """Return the name of the network of :func:`open_run` in titles."""
    return "compact" if run is None else str(run)


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return short names of runs: the names of their folders, or whole paths if two names are equal."""
    if len(set(runs)) < len(runs):
        raise InputError(f"each run may be given once, got {', '.join(map(str, runs))}")
    names = [real(folder).name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder) for folder in runs]


def open_images(run: Run, source: Source, group: str | None = None) -> Part:
    """Return the images that the options choose; ``group`` names those of another data set than the run's."""
    part = run.part(source.split, source.data, source.data_dir, by_number=source.by_number, group=group)
    if source.data is None and run.config is None:
        say(
            f"This network was trained on MNIST. These images are {part.name}, which come with scikit-learn: "
            "smaller digits by other writers. To use MNIST, which is downloaded, add --data mnist.",
            err=True,
        )
    if part.note is not None:
        say(part.note, err=True)
    return part


def preparation_for(files: ImageFiles, own: Preparation | None) -> Preparation | None:
    """Return how to prepare image files: ``own``, the preparation of the network's data, unless options say no."""
    if files.prepare == "none" or own is None:
        return None
    if files.fit is not None:
        raise click.UsageError("--fit is for unprepared images; leave it out, or add --prepare none")
    return own


def figure_path(figure: Path | None, run: Path | None, name: str) -> Path:
    """Return the file of a figure: --figure, or a file in RUN/figures, or in the current folder without a run."""
    from torchcaps.training.folder import FIGURES

    return figure or (run / FIGURES / f"{name}.png" if run is not None and run.is_dir() else Path(f"{name}.png"))


def check_coverage_options(coverage: float | None) -> None:
    """Raise an error unless a coverage is a share, and --coverage-over has one to refine."""
    if coverage is None:
        refuse_options(("coverage_over",), "refines --coverage, but there is none")
    else:
        COVERAGE.check("--coverage", coverage)


def refuse_options(names: Collection[str], why: str) -> None:
    """Refuse options of the running command that would do nothing; ``why`` follows the option's name."""
    context = click.get_current_context()
    for parameter in context.command.get_params(context):
        is_typed = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and is_typed:
            off = context.params.get(parameter.name) is False and parameter.secondary_opts
            raise click.UsageError(f"{(parameter.secondary_opts if off else parameter.opts)[0]} {why}; leave it out")
