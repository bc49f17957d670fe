"""``torchcaps datasets``: what there is to train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.options import FIGURE, DataDir, Given, Json, Split, command
from torchcaps.cli.runs import refuse_options
from torchcaps.cli.show import (
    add_row,
    by,
    count,
    print_json,
    print_pairs,
    print_table,
    print_title,
    say,
    table,
    write_figure,
)
from torchcaps.ranges import Pixels, Range

if TYPE_CHECKING:
    from torchcaps.datasets import Dataset, DatasetInfo, ImageSet, PairSet

MOST_SAMPLES, SAMPLE_COLUMNS = 1000, 10


@command(
    ("datasets", "all data sets, and which are on this machine"),
    ("datasets mnist --data-dir data/mnist", "one of them, read and counted"),
    ("datasets digits --sample 20", "a sheet of its first 20 training images, and their labels"),
    ("datasets mnist --sample 5 --split test --figure five.pdf", "the first five test images"),
    ("datasets mnist --sample 5 --validation first", "those after the first 5,000, which validate: 7 3 4 6 1"),
    ("datasets folder:photos --image-size 32", "check your own images"),
)
def datasets(
    name: str | None = None,
    *,
    data_dir: DataDir = None,
    image_size: Annotated[Pixels | None, Given("Resize images to this height and width, pixels.")] = None,
    skip_damaged: Annotated[bool, Given("Leave out the image files of a folder that cannot be read.")] = False,
    sample: Annotated[
        int | None,
        Range(1, MOST_SAMPLES, whole=True),
        Given(f"Draw the first N images, at most {count(MOST_SAMPLES)}, and print their labels.", metavar="N"),
    ] = None,
    split: Annotated[Split, Given("Of which part --sample draws the first images.")] = "train",
    validation: Annotated[
        Literal["random", "first", "last"],
        Given("Which training images are set apart for validation, as in train."),
    ] = "random",
    figure: Annotated[
        Path | None, FIGURE, Given("Where --sample draws, .png, .pdf or .svg.", default="NAME-sample.png")
    ] = None,
    json: Json = False,
) -> None:
    """List the data sets: sizes, terms, and whether they are on this machine.

    With NAME (or folder:PATH, npz:PATH), read that one and count its images; --sample draws the first of them.
    """
    if sample is None:
        refuse_options(("split", "validation", "figure"), "is for --sample N")
    from torchcaps.datasets import find_dataset, list_datasets, load_dataset

    if name is None:
        given = {"--data-dir": data_dir, "--image-size": image_size, "--sample": sample}
        for option, value in {**given, "--skip-damaged": skip_damaged or None}.items():
            if value is not None:
                raise click.UsageError(
                    f"{option} is for one data set; name it, e.g. torchcaps datasets digits {option} …"
                )
        if json:
            print_json([_describe_dataset(info, info.locate(), info.is_downloaded()) for info in list_datasets()])
        else:
            _show_datasets(list_datasets())
        return
    info, path = find_dataset(name)
    file = figure or Path(f"{path.name if path else info.name}-sample.png")
    found = path if info.takes_path else info.locate(data_dir)
    dataset = None
    here = info.is_downloaded(data_dir)
    if here or data_dir is not None or sample is not None:  # a folder that lacks files is said to
        dataset = load_dataset(
            name, data_dir=data_dir, image_size=image_size, validation=validation, skip_damaged=skip_damaged
        )
        found, here = path if info.takes_path else info.locate(data_dir), True
    described, drawn = _describe_dataset(info, found, here), None
    pairs: list[tuple[str, str]] = []
    if dataset is not None:
        described["loaded"] = _describe_loaded(dataset)
    if dataset is not None and sample is not None:
        from torchcaps.analysis import figure_samples
        from torchcaps.analysis.inference import join_names

        images, names = dict(_parts(dataset))[split].preview(sample), dataset.class_names
        title = f"the first {len(images)} {'training' if split == 'train' else split} images of {dataset.name}"
        labels = described["sample"] = [join_names(names, each) for each in images.labels]
        pairs = [("Sample", title), ("Labels", ", ".join(labels))]
        layout = {"rows": -(-len(images) // SAMPLE_COLUMNS), "columns": SAMPLE_COLUMNS}
        drawn = figure_samples(images, names, title=title[0].upper() + title[1:], **layout)
    if json:
        print_json(described)
    else:
        _show_dataset(info, found, dataset)
        if pairs:
            print_pairs(pairs)
    if drawn is not None:
        write_figure(drawn, file, quiet=json)


def _describe_dataset(info: DatasetInfo, found: Path | None, here: bool) -> dict[str, Any]:
    return {
        "name": info.spec,
        "title": info.title,
        "source": info.source,
        "licence": info.licence,
        "in_shape": info.in_shape,
        "num_train": info.num_train,
        "num_test": info.num_test,
        "class_names": info.class_names,
        "found": None if found is None else str(found),
        "here": here,
    }


def _describe_loaded(dataset: Dataset) -> dict[str, Any]:
    return {
        "in_shape": dataset.in_shape,
        "objects": dataset.num_objects,
        "class_names": dataset.class_names,
        "skipped": dataset.skipped,
        **{part: {"images": len(images), "per_class": _per_class(images, dataset)} for part, images in _parts(dataset)},
    }


def _parts(dataset: Dataset) -> list[tuple[str, ImageSet | PairSet]]:
    return [("train", dataset.train), ("validation", dataset.validation), ("test", dataset.test)]


def _per_class(images: ImageSet | PairSet, dataset: Dataset) -> list[int]:
    """How many objects of each class there are: in the images, or for them to be made of."""
    return images.labels.flatten().bincount(minlength=dataset.num_classes).tolist()


def _show_datasets(infos: list[DatasetInfo]) -> None:
    from rich.text import Text

    rows = table("data set", "train", "test", "shape", "classes", "here", left=1)
    for info in infos:
        known = ["–" if n is None else count(n) for n in (info.num_train, info.num_test)]
        shape = "–" if info.in_shape is None else by(info.in_shape)
        here = Text("–", style="dim")
        if not info.takes_path:
            here = Text("yes", style="green") if info.is_downloaded() else Text("no", style="dim")
        classes = "–" if info.class_names is None else str(len(info.class_names))
        what = Text.assemble((info.spec, "bold"), "\n", (info.title, "dim"))
        add_row(rows, what, *known, shape, classes, here)
    print_table(rows)
    say(
        "What is not here is downloaded when it is first trained on,",
        "or read from --data-dir or $TORCHCAPS_DATA.",
        "The images of one, counted: torchcaps datasets NAME",
    )


def _show_dataset(info: DatasetInfo, found: Path | None, dataset: Dataset | None) -> None:
    print_title(info.title)
    if found is not None:
        here = str(found)
    elif info.is_downloaded():
        here = "none of its own"
    else:
        here = f"not on this machine; torchcaps train --data {info.name} downloads it"
    pairs = [("Source", info.source), ("Terms", info.licence), ("Files", here)]
    shape = info.in_shape if dataset is None else dataset.in_shape
    if shape is not None:
        pairs.append(("Shape", f"{by(shape)} (channels × height × width)"))
    print_pairs(pairs)
    if dataset is None:
        return
    rows = table("class", "train", "validation", "test")
    counts = [_per_class(images, dataset) for _, images in _parts(dataset)]
    for class_name, *numbers in zip(dataset.class_names, *counts, strict=True):
        add_row(rows, class_name, *map(count, numbers))
    rows.add_section()
    add_row(rows, "all", *(count(len(images)) for _, images in _parts(dataset)), style="bold")
    print_table(rows)
    if dataset.skipped:
        say("Left out:", *(f"  {why}" for why in dataset.skipped))
    if dataset.num_objects > 1:
        say(
            f"Each image holds {dataset.num_objects} objects, and all of them are counted. For images that are made",
            "in training, the objects that they are made of are counted.",
        )
