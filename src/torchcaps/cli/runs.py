"""What the commands that look at a trained network share: which run, which images, where figures go."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import click

from torchcaps.cli.base import Decorator, compose
from torchcaps.cli.show import say
from torchcaps.cli.values import whole_numbers
from torchcaps.errors import InputError
from torchcaps.files import check_path, real
from torchcaps.ranges import INDEX

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchcaps.datasets import Dataset, ImageSet, Preparation
    from torchcaps.training import Run

Which = Literal["best", "last"]
Split = Literal["test", "validation", "train"]
Fit = Literal["pad", "stretch"]
Prepare = Literal["auto", "none"]


class GivenPath(click.Path):
    """A file or folder; an empty text, such as a variable of the shell that is not set, names none.

    Args:
        figure: Whether it is a file for a figure, refused before anything is computed if it cannot be one.
    """

    def __init__(self, *, figure: bool = False) -> None:
        super().__init__()
        self.figure = figure

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """From the command line to a path."""
        try:
            check_path(str(value))
            path = str(super().convert(value, param, ctx))
            if not self.figure:
                return Path(path)
            from torchcaps.analysis.figures import figure_file

            return figure_file(path)
        except InputError as error:
            self.fail(f"{error}.", param, ctx)


PATH = GivenPath()
FIGURE = GivenPath(figure=True)

which_option = click.option(
    "--which",
    type=click.Choice(["best", "last"]),
    default="best",
    help="The best epoch on the validation images, or the last checkpoint.",
)
run_argument = compose(click.argument("run_folder", metavar="RUN", type=PATH), which_option)
# without RUN, the network that comes with torchcaps
optional_run_argument = compose(click.argument("run_folder", metavar="[RUN]", required=False, type=PATH), which_option)
runs_argument = click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=PATH)
optional_runs_argument = click.argument("run_folders", metavar="[RUN...]", nargs=-1, type=PATH)

accelerator_option = click.option(
    "--accelerator", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", help="Where to compute."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
data_dir_option = click.option("--data-dir", metavar="DIR", help="Folder that holds the data set's files.")
dataset_options = compose(
    click.option(
        "--data",
        metavar="NAME",
        help="Other images: a data set, folder:PATH or npz:PATH.  [default: the run's; digits for the network that "
        "comes with torchcaps]",
    ),
    data_dir_option,
)
data_options = compose(
    dataset_options,
    click.option(
        "--split",
        type=click.Choice(["test", "validation", "train"]),
        default="test",
        help="Which part of the data set.",
    ),
)


def _limit_images(context: click.Context, _: click.Parameter, megapixels: float | None) -> None:
    """Hold the command's image files to --max-megapixels."""
    if megapixels is None:
        return
    from torchcaps.datasets import get_max_megapixels, set_max_megapixels

    context.call_on_close(partial(set_max_megapixels, get_max_megapixels()))
    try:
        set_max_megapixels(megapixels)
    except ValueError:  # click's ranges let NaN pass
        raise click.BadParameter(f"{megapixels} is no number of megapixels above 0 and at most 178.") from None


max_megapixels_option = click.option(
    "--max-megapixels",
    type=float,
    callback=_limit_images,
    expose_value=False,
    help="Refuse image files of more megapixels before they are decoded, at most 178.  [default: 64]",
)
image_options = compose(
    click.option(
        "--prepare",
        type=click.Choice(["auto", "none"]),
        default="auto",
        help="Bring photos of a drawing to the form of the network's data, light on dark, cut out, scaled and centred, "
        "where these were drawings (MNIST's digits and the like); or take images as they are.",
    ),
    click.option(
        "--invert",
        is_flag=True,
        help="Turn dark on light, as ink on paper, into light on dark. Where images are prepared that is found out; "
        "--invert says that it is so.",
    ),
    click.option(
        "--fit",
        type=click.Choice(["pad", "stretch"]),
        help="Bring an image that is not prepared to the network's size with a border, or by stretching it.  "
        "[default: stretch for a run on folder: data, whose images were; else pad]",
    ),
    max_megapixels_option,
)


def preparation_for(prepare: Prepare, own: Preparation | None, fit: Fit | None) -> Preparation | None:
    """How the command prepares image files, ``own`` being how the network's data were made."""
    if prepare == "none" or own is None:
        return None
    if fit is not None:
        raise click.UsageError("--fit is for images that are not prepared; leave it out, or add --prepare none")
    return own


def index_options(*, several: bool = False) -> Decorator:
    """The options of one image of a data set, or of several; or of an image file."""
    more = "; with --component it may be given several times" if several else ""
    index = click.option(
        "--index",
        type=whole_numbers(INDEX),
        default=[0] if several else 0,
        show_default="0" if several else None,
        multiple=several,
        help=f"Which image of the part{more}.",
    )
    return compose(
        index, click.option("--image", "image_file", type=PATH, help="An image file instead."), image_options
    )


def figure_option(words: str) -> Decorator:
    """``--figure`` of a command that draws where it is asked to."""
    return click.option("--figure", type=FIGURE, help=f"Draw {words} to this file, .png, .pdf or .svg.")


def drawing_option(name: str) -> Decorator:
    """``--figure`` of a command that always draws."""
    default = f"RUN/figures/{name}.png; {name}.png without a folder RUN"
    return click.option(
        "--figure", type=FIGURE, help=f"Figure, .png, .pdf or .svg; never over another file.  [default: {default}]"
    )


def figure_path(figure: Path | None, run: Path | None, name: str) -> Path:
    """Where a figure goes: to --figure, or among the run's own; without a run folder, into the folder one is in."""
    from torchcaps.training.run import FIGURES

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


def open_images(run: Run, data: str | None, data_dir: str | None, split: Split) -> tuple[ImageSet, Dataset, str]:
    """The images that the options name, the data set they are of, and what they are, in words.

    Of training images that are made as they are asked for, these are always the same ones.
    """
    dataset = run.dataset(images_for(run, data), data_dir)
    if data is None and run.config is None:
        say(
            f"The network that comes with torchcaps was trained on MNIST; {dataset.name} is another data set, which "
            "is here without a download. --data mnist takes MNIST's.",
            err=True,
        )
    images = {"test": dataset.test, "validation": dataset.validation, "train": dataset.train}[split]
    return images.preview(len(images)), dataset, f"{split} images of {dataset.name}"


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
