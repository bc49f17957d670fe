"""``torchcaps datasets``: list data sets, and count or draw the images of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from torchcaps.analysis.results import Result, Styled, Table
from torchcaps.cli.options import DataDir, Figure, Json, Split, command
from torchcaps.cli.runs import refuse_options
from torchcaps.cli.show import by, print_json, print_table, say, show
from torchcaps.ranges import Count, Pages, Pixels, Spacing, ValidationSplit
from torchcaps.tasks import TaskName
from torchcaps.words import first_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from torchcaps.datasets import Dataset, DatasetInfo, ImageSet
    from torchcaps.datasets.image_set import Images


@command(
    ("datasets", "all data sets, and which are on this machine"),
    ("datasets mnist --data-dir data/mnist", "read one data set and count its images"),
    ("datasets digits --sample 20", "draw the first 20 training images and print their labels"),
    ("datasets mnist --sample 5 --split test --figure five.pdf", "the first five test images"),
    (
        "datasets mnist --sample 5 --validation first",
        "training images when the first 5,000 are for validation: 7 3 4 6 1",
    ),
    ("datasets folder:photos --image-size 32", "check your own images"),
)
def datasets(
    data: str | None = None,
    *,
    data_dir: DataDir = None,
    image_size: Annotated[Pixels | None, "Resize images to this height and width, in pixels."] = None,
    skip_damaged: Annotated[bool, "Leave out images that cannot be used, instead of an error."] = False,
    scale: Annotated[
        tuple[float, float] | None, "Pixel values that become 0 and 1, for pixels of more than 8 bits, such as 0,4095."
    ] = None,
    pages: Annotated[
        Pages | None, "Meaning of the pages of image files: channels of an image, or the depth of a volume."
    ] = None,
    patch: Annotated[Pixels | None, "Side of the patches of images with masks, which may differ in size."] = None,
    sample: Annotated[Count | None, "Draw this many images, the first ones, and print their labels."] = None,
    split: Annotated[Split, "Part of the data set that --sample draws."] = "train",
    validation: Annotated[ValidationSplit, "Choice of the validation images, as in train."] = "random",
    group: Annotated[
        str | None, "Column, array or regular expression of paths by which images are split in groups, as in train."
    ] = None,
    fold: Annotated[str | None, "Part K of N that is tested, as K/N, for data without test images."] = None,
    window: Annotated[Count | None, "Steps of the windows that sequences are cut into."] = None,
    stride: Annotated[Count | None, "Steps between two windows (default: --window)."] = None,
    spacing: Annotated[
        Spacing | None, "Resample volumes to these distances of voxels, mm: depth, height and width, such as 1,1,1."
    ] = None,
    pca: Annotated[Count | None, "Principal components that replace the bands of a scene."] = None,
    task: Annotated[TaskName | None, "Task to read the targets for (default: chosen by their form)."] = None,
    figure: Annotated[Figure, "File of --sample's figure, .png, .pdf or .svg (default: DATA-sample.png)."] = None,
    json: Json = False,
) -> None:
    """List the data sets: sizes, terms, and whether they are on this machine.

    With DATA (a name, folder:PATH, csv:PATH or npz:PATH), read that data set and count its images. --sample draws the
    first images.
    """
    if data is None:
        of_one = click.get_current_context().params.keys() - {"data", "json"}
        refuse_options(of_one, "is for one data set, as in torchcaps datasets digits")
    elif sample is None:
        refuse_options(("split", "validation", "figure"), "is for --sample N")
    from torchcaps.datasets import find_dataset, list_datasets, load_dataset

    if data is None:
        if json:
            return print_json([Described(info, info.locate()).to_dict() for info in list_datasets()])
        print_table(listing(list_datasets()))
        return say(
            "Missing data sets are downloaded at the first training,",
            "or read from --data-dir or $TORCHCAPS_DATA.",
            "To count the images of one: torchcaps datasets DATA",
        )
    info, path = find_dataset(data)
    here, location = info.is_downloaded(data_dir), path if info.takes_path else info.locate(data_dir)
    if not here and data_dir is None and sample is None:  # with --data-dir, an error names the missing files
        return show(Described(info, location), json=json)
    dataset = load_dataset(
        data,
        data_dir=data_dir,
        image_size=image_size,
        validation=validation,
        skip_damaged=skip_damaged,
        scale=scale,
        pages=pages,
        task=task,
        patch=patch,
        group=group,
        fold=fold,
        window=window,
        stride=stride,
        spacing=spacing,
        pca=pca,
    )
    location = path if info.takes_path else info.locate(data_dir)  # a download may have added it
    file = figure or Path(f"{path.name if path else info.name}-sample.png")
    drawn = None if sample is None else dataset.parts[split].preview(sample)
    part = "training" if split == "train" else split
    title = first_of(len(drawn or ()), f"{part} images of {dataset.name}")
    return show(Described(info, location, dataset, drawn, title), json=json, figure=None if drawn is None else file)


def listing(infos: Sequence[DatasetInfo]) -> Table:
    """Return a table of data sets: their sizes, and whether they are on this machine."""
    rows: list[Sequence[str | Styled]] = []
    for info in infos:
        sizes = [
            "–" if n is None else f"{n:,}"
            for n in (info.num_train, info.num_test, info.class_names and len(info.class_names))
        ]
        sizes.insert(2, "–" if info.in_shape is None else by(info.in_shape))
        here = Styled("yes", "green") if info.is_downloaded() else Styled("no", "dim")
        rows.append((Styled(info.spec, "bold"), *sizes, Styled("–", "dim") if info.takes_path else here))
        rows.append((Styled(info.title, "dim"),))
    return Table(rows, ("data set", "train", "test", "shape", "classes", "here"))


@dataclass(frozen=True)
class Described(Result):
    """A data set: its entry in the list, the path of its files and, after they were read, its images.

    Args:
        info: Its entry in the list of data sets.
        location: Path of its files; None if it needs none, or if they are missing.
        dataset: Its images, if they were read.
        sample: Images to draw.
        title: Description of ``sample``.
    """

    info: DatasetInfo
    location: Path | None
    dataset: Dataset | None = None
    sample: ImageSet | None = None
    title: str = ""

    @property
    def labels(self) -> list[str]:
        """Return the label of each image of the sample, in words."""
        assert self.dataset is not None
        names, task = self.dataset.class_names, self.dataset.task
        return [task.describe(names, each) for each in self.sample.labels] if self.sample else []

    def to_dict(self) -> dict[str, Any]:
        """Return all facts and counts as plain values."""
        info, dataset = self.info, self.dataset
        names = ("title", "source", "licence", "in_shape", "num_train", "num_test", "class_names")
        entry = {"name": info.spec} | {name: getattr(info, name) for name in names}
        entry |= {"found": None if self.location is None else str(self.location)}
        entry |= {"here": dataset is not None or info.is_downloaded()}
        if dataset is None:
            return entry
        loaded = {"in_shape": dataset.in_shape, "objects": dataset.num_objects, "class_names": dataset.class_names}
        loaded |= {"task": dataset.task.name}
        counts = {
            part: {"images": len(images), f"per_{dataset.task.output}": statistics_to_dict(images, dataset)}
            for part, images in dataset.parts.items()
        }
        sample = {"sample": self.labels} if self.sample else {}
        loaded |= {} if dataset.num_groups is None else {"groups": dataset.num_groups}
        return entry | {"loaded": {**loaded, "skipped": dataset.skipped, **counts}} | sample

    def tables(self) -> Iterator[Table]:
        """Yield tables of its facts, of the images in each class, and of the sample's labels."""
        info, dataset = self.info, self.dataset
        here = str(self.location or "none (made from other data)")
        if self.location is None and not info.is_downloaded():
            here = f"not on this machine; torchcaps train --data {info.name} downloads it"
        about = [("Source", info.source), ("Terms", info.licence), ("Files", here)]
        if (shape := info.in_shape if dataset is None else dataset.in_shape) is not None:
            about.append(("Shape", f"{by(shape)} (channels × height × width)"))
        yield Table(about, title=info.title)
        if dataset is None:
            return
        task, parts = dataset.task, dataset.parts
        statistics = [task.statistics(each.labels, dataset.num_classes) for each in parts.values()]
        names = list(statistics[0])
        rows: list[Sequence[str | Styled]] = [
            (name, *cells(numbers))
            for name, *numbers in zip(
                dataset.class_names, *(column for each in statistics for column in each.values()), strict=True
            )
        ]
        totals = {"images": [len(each) for each in parts.values()]}
        if dataset.num_groups is not None:
            totals["groups"] = list(dataset.num_groups.values())
        rows.append(())
        for name, numbers in totals.items():
            in_columns = [cell for n in numbers for cell in (f"{n:,}", *[""] * (len(names) - 1))]
            rows.append([Styled(cell, "bold") for cell in (name, *in_columns)])
        columns = [f"{part * (n == 0)}\n{name}" for part in parts for n, name in enumerate(names)]
        columns = list(parts) if len(names) == 1 else columns
        yield Table(rows, (task.output, *columns))
        if dataset.skipped:
            yield Table(note=("Left out:", *(f"  {why}" for why in dataset.skipped)))
        if dataset.num_objects > 1:
            words = f"Each image shows {dataset.num_objects} objects; the table counts objects."
            yield Table(
                note=(words, "For images that are composed during training, the table counts their components.")
            )
        if self.sample:
            yield Table([("Sample", f"the {self.title}"), ("Labels", ", ".join(self.labels))])

    def figures(self) -> dict[str, Drawing]:
        """Return a figure of the sample."""
        from torchcaps.analysis import figure_samples

        assert self.sample is not None
        assert self.dataset is not None
        shown: Any = {"count": len(self.sample), "title": f"The {self.title}", "colours": self.dataset.colours}
        return {"": figure_samples(self.sample, self.dataset.class_names, **shown)}


def cells(numbers: Sequence[int | float]) -> list[str]:
    """Return statistics of one output as cells of a table."""
    return [f"{n:,}" if isinstance(n, int) else f"{n:.4g}" for n in numbers]


def statistics_to_dict(images: Images, dataset: Dataset) -> list[Any]:
    """Return the number of images (or objects) of each output, or its statistics."""
    columns = dataset.task.statistics(images.labels, dataset.num_classes)
    if len(columns) == 1:
        return next(iter(columns.values()))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
