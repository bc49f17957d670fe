"""What the commands that look at a trained network share: which run, which images, where figures go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import click

from torchcaps.cli.show import say
from torchcaps.errors import InputError
from torchcaps.files import real

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torchcaps.cli.options import ImageFiles, ImagesOf, Which
    from torchcaps.datasets import Dataset, ImageSet, Preparation
    from torchcaps.training import Run


def preparation_for(files: ImageFiles, own: Preparation | None) -> Preparation | None:
    """How the command prepares image files, ``own`` being how the network's data were made."""
    if files.prepare == "none" or own is None:
        return None
    if files.fit is not None:
        raise click.UsageError("--fit is for images that are not prepared; leave it out, or add --prepare none")
    return own


def figure_path(figure: Path | None, run: Path | None, name: str) -> Path:
    """Where a figure goes: to --figure, or among the run's own; without a run folder, into the folder one is in."""
    from torchcaps.training.folder import FIGURES

    if figure is not None:
        return figure
    return run / FIGURES / f"{name}.png" if has_folder(run) else Path(f"{name}.png")


def has_folder(run: Path | None) -> TypeGuard[Path]:
    """Whether there is a folder for what is made of a run: neither without RUN, nor of a repository of the hub."""
    return run is not None and run.is_dir()


def open_run(run_folder: Path | None, which: Which, accelerator: str = "cpu") -> Run:
    """The trained network in a run folder or a repository of the hub; without one, that which comes with torchcaps."""
    from torchcaps.models.pretrained import SHIPPED
    from torchcaps.training import load_run
    from torchcaps.training.devices import pick_device

    if run_folder is not None and run_folder.is_file():
        raise InputError(f"{run_folder} is a file; this command needs a run folder")
    return load_run(SHIPPED["compact"] if run_folder is None else run_folder, which, device=pick_device(accelerator))


def name_of(run_folder: Path | None) -> str:
    """What to call the network of :func:`open_run`."""
    return "compact" if run_folder is None else str(run_folder)


def open_runs(
    run_folders: Sequence[Path], which: Which, accelerator: str = "cpu"
) -> Iterator[tuple[str, Path | None, Run]]:
    """Name, folder and network of several runs, opened as they are asked for; or of that which comes with torchcaps."""
    folders: Sequence[Path | None] = run_folders or [None]
    for folder, name in zip(folders, names_of(run_folders) or [name_of(None)], strict=True):
        yield name, folder, open_run(folder, which, accelerator)


def open_images(run: Run, images_of: ImagesOf) -> tuple[ImageSet, Dataset, str]:
    """The images that the options name, the data set they are of, and what they are, in words.

    Of training images that are made as they are asked for, these are always the same ones.
    """
    dataset = run.dataset(images_for(run, images_of.data), images_of.data_dir)
    if images_of.data is None and run.config is None:
        say(
            f"The network that comes with torchcaps was trained on MNIST; {dataset.name} is another data set, which "
            "is here without a download. --data mnist takes MNIST's.",
            err=True,
        )
    images = {"test": dataset.test, "validation": dataset.validation, "train": dataset.train}[images_of.split]
    return images.preview(len(images)), dataset, f"{images_of.split} images of {dataset.name}"


def images_for(run: Run, data: str | None) -> str | None:
    """The data set to look at: the one named, else the run's own, which is None; else what the network shows."""
    return run.shown_data if data is None and run.config is None else data


def names_of(run_folders: Sequence[Path]) -> list[str]:
    """What to call several runs beside each other: their folders' names, or whole paths where two are the same."""
    if len(set(run_folders)) < len(run_folders):
        raise InputError(f"each run may be given once, got {', '.join(map(str, run_folders))}")
    names = [real(folder).name for folder in run_folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in run_folders]


def is_given(parameter: str) -> bool:
    """Whether a parameter of the running command stands on the command line."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.COMMANDLINE


def refuse_options(names: Collection[str], why: str) -> None:
    """Refuse options that would do nothing.

    Args:
        names: Parameters of the running command.
        why: The rest of a sentence that begins with the option.
    """
    for parameter in click.get_current_context().command.params:
        if parameter.name in names and is_given(parameter.name):
            raise click.UsageError(f"{parameter.opts[0]} {why}; leave it out")
