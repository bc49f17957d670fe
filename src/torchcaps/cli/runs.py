"""What the commands that look at a trained network share: which run, which images, where figures go."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import click

from torchcaps.cli.base import Decorator, compose
from torchcaps.cli.fields import whole_numbers
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import check_path
from torchcaps.ranges import INDEX

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from torchcaps.datasets import Dataset, ImageSet
    from torchcaps.training import Run

Which = Literal["best", "last"]
Split = Literal["test", "validation", "train"]
Fit = Literal["pad", "stretch"]


class GivenPath(click.Path):
    """A file or folder; an empty text, such as a variable of the shell that is not set, names none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """From the command line to a path."""
        try:
            check_path(str(value))
        except InputError as error:
            self.fail(f"{error}.", param, ctx)
        return Path(str(super().convert(value, param, ctx)))


class FigurePath(GivenPath):
    """A file for a figure, refused before anything is computed if it cannot be one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """From the command line to a path."""
        from torchcaps.analysis.figures import figure_file

        try:
            return figure_file(super().convert(value, param, ctx))
        except InputError as error:
            self.fail(f"{error}.", param, ctx)


PATH = GivenPath()
FIGURE = FigurePath()

which_option = click.option(
    "--which",
    type=click.Choice(["best", "last"]),
    default="best",
    show_default=True,
    help="The epoch that the validation images chose, or the last checkpoint.",
)

run_argument = compose(click.argument("run_folder", metavar="RUN", type=PATH), which_option)

# without RUN, the network that comes with torchcaps
optional_run_argument = compose(click.argument("run_folder", metavar="[RUN]", required=False, type=PATH), which_option)

runs_argument = click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=PATH)

accelerator_option = click.option(
    "--accelerator",
    type=click.Choice(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    show_default=True,
    help="Where to compute.",
)

dataset_options = compose(
    click.option(
        "--data", metavar="NAME", help="Other images: a data set, folder:PATH or npz:PATH.  [default: the run's]"
    ),
    click.option("--data-dir", metavar="DIR", help="Folder that holds the data set's files."),
)

data_options = compose(
    dataset_options,
    click.option(
        "--split",
        type=click.Choice(["test", "validation", "train"]),
        default="test",
        show_default=True,
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
    click.option("--invert", is_flag=True, help="Turn dark on light, as ink on paper, into light on dark."),
    click.option(
        "--fit",
        type=click.Choice(["pad", "stretch"]),
        help="Bring an image to the network's size with a border, or by stretching it.  "
        "[default: stretch for a run on folder: data, whose images were; else pad]",
    ),
    max_megapixels_option,
)

_file_options = compose(click.option("--image", "image_file", type=PATH, help="An image file instead."), image_options)

index_options = compose(
    click.option(
        "--index",
        type=whole_numbers(INDEX),
        default=0,
        show_default=True,
        help="Which image of the part.",
    ),
    _file_options,
)

several_index_options = compose(
    click.option(
        "--index",
        type=whole_numbers(INDEX),
        default=[0],
        show_default="0",
        multiple=True,
        help="Which image of the part; with --component several, each by an --index of its own.",
    ),
    _file_options,
)


def out_option(name: str) -> Decorator:
    """``--out`` of a command that draws a figure."""
    default = f"RUN/figures/{name}.png; {name}.png without a folder RUN"
    return click.option("--out", type=FIGURE, help=f"Figure, .png, .pdf or .svg.  [default: {default}]")


def figure_path(out: Path | None, run: Path | None, name: str) -> Path:
    """Where a figure goes: to --out, or among the run's own; without a run folder, into the folder one is in."""
    from torchcaps.training.run import FIGURES

    if out is not None:
        return out
    return run / FIGURES / f"{name}.png" if has_folder(run) else Path(f"{name}.png")


def has_folder(run: Path | None) -> TypeGuard[Path]:
    """Whether there is a folder for what is made of a run: neither without RUN, nor of a repository of the hub."""
    return run is not None and run.is_dir()


def open_run(run_folder: Path | None, which: Which, accelerator: str = "cpu") -> Run:
    """The trained network in a run folder or a repository of the hub; without one, that which comes with torchcaps.

    Raises:
        InputError: There is none, or it is damaged; or this machine has no such accelerator.
    """
    from torchcaps.models.pretrained import shipped_folder
    from torchcaps.training import load_run
    from torchcaps.training.environment import pick_device

    if run_folder is not None and run_folder.is_file():
        raise InputError(f"{run_folder} is a file; this command needs a run folder")
    return load_run(shipped_folder() if run_folder is None else run_folder, which, device=pick_device(accelerator))


def open_images(run: Run, data: str | None, data_dir: str | None, split: Split) -> tuple[ImageSet, Dataset, str]:
    """The images that the options name, the data set they are of, and what they are, in words.

    Of training images that are made as they are asked for, these are always the same ones.

    Raises:
        InputError: Data that do not fit the network, or cannot be read.
    """
    dataset = run.dataset(images_for(run, data), data_dir)
    images = {"test": dataset.test, "validation": dataset.validation, "train": dataset.train}[split]
    return images.preview(len(images)), dataset, f"{split} images of {dataset.name}"


def images_for(run: Run, data: str | None) -> str | None:
    """The data set to look at: the one named, else the run's own, which is None; else what the network shows."""
    return run.shown_data if data is None and run.config is None else data


def names_of(run_folders: Sequence[Path]) -> list[str]:
    """What to call several runs beside each other: their folders' names, or whole paths where two are the same.

    Raises:
        InputError: One is given twice.
    """
    if len(set(run_folders)) < len(run_folders):
        raise InputError(f"each run may be given once, got {', '.join(map(str, run_folders))}")
    names = [folder.resolve().name for folder in run_folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in run_folders]


def read_image(run: Run, file: Path, *, invert: bool, fit: Fit | None) -> Tensor:
    """An image file as the run's network takes it, uint8 (C, H, W).

    Args:
        run: Whose network.
        file: The image.
        invert: The option --invert.
        fit: The option --fit; None brings the image to size as the images of the run's data set were.

    Raises:
        InputError: The file is missing, or no image.
    """
    from torchcaps.analysis import load_image

    return load_image(file, run.model.in_shape, invert=invert, fit=fit or run.image_fit)


def check_image_options(image_file: Path | None, *more: str) -> None:
    """Refuse options that would do nothing: those of a data set beside --image, those of a file without it.

    Args:
        image_file: The option --image.
        *more: Parameters of the running command, beside the usual ones, that have no meaning for an image file.

    Raises:
        UsageError: One of them stands on the command line.
    """
    if image_file is None:
        refuse_options(("invert", "fit"), "is for a file given with --image")
    else:
        refuse_options(("index", "data", "data_dir", "split", *more), "is for a data set, not for --image")


def refuse_options(names: Collection[str], why: str) -> None:
    """Refuse options that would do nothing.

    Args:
        names: Parameters of the running command.
        why: The rest of a sentence that begins with the option.

    Raises:
        UsageError: One of them stands on the command line.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            raise click.UsageError(f"{parameter.opts[0]} {why}; leave it out")


def image_at(images: ImageSet, index: int, class_names: tuple[str, ...], where: str) -> tuple[Tensor, str, list[int]]:
    """An image (C, H, W) of a set, uint8, what it is, in words, and the classes of its objects.

    Args:
        images: The set.
        index: Which one, from 0.
        class_names: Of the set.
        where: What the set is.

    Raises:
        InputError: An index beyond the images.
    """
    from torchcaps.analysis.inference import join_names

    if index >= len(images):
        raise InputError(f"--index must be below {len(images)}, the number of {where}, got {index}")
    labels = images.labels[index].reshape(-1)
    return (
        images.images[index],
        f"Image {index} of the {where}, class {join_names(class_names, labels)}",
        labels.tolist(),
    )


def class_number(name: str, class_names: tuple[str, ...]) -> int:
    """The number of a class that is given by its name or its number.

    Raises:
        InputError: There is none such.
    """
    if name in class_names:
        return class_names.index(name)
    numbers = list(map(str, range(len(class_names))))
    if name in numbers:
        return numbers.index(name)
    raise unknown_name("class", name, class_names)
