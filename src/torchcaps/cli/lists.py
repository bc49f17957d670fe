"""``torchcaps presets`` and ``torchcaps datasets``: what there is to train, and to train on."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from torchcaps.cli.base import Command
from torchcaps.cli.fields import field_descriptions, part_heading, whole_numbers
from torchcaps.cli.output import (
    add_row,
    count,
    fits,
    print_json,
    print_pairs,
    print_table,
    print_title,
    say,
    table,
    write_figure,
)
from torchcaps.cli.runs import FIGURE, Split, refuse_options
from torchcaps.models.config import LayerConfig, NetworkConfig
from torchcaps.models.fields import Described, Part, as_text, flat, replace
from torchcaps.models.presets import Preset, get_preset, list_presets
from torchcaps.ranges import PIXELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from torchcaps.datasets import Dataset, DatasetInfo, ImageSet, PairSet
    from torchcaps.models import Network

MOST_SAMPLES, SAMPLE_COLUMNS = 1000, 10
REFERENCE = "sabour2017"
"""The preset that the others are compared with."""
ABSENT = "–"
"""In place of a field that a network has not, such as those of a decoder."""


@click.command(
    "presets",
    cls=Command,
    short_help="The published networks and how they differ.",
    examples=(
        ("presets", "how the published networks differ"),
        ("presets tf-notebook", "every layer and every field of one of them"),
        ("presets tf-notebook --figure tf-notebook.png", "a drawing of its layers with their sizes"),
        ("presets --json", "all of them, for other programs"),
    ),
)
@click.argument("name", required=False)
@click.option("--figure", type=FIGURE, help="Draw the layers of NAME, with their sizes, to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def presets(name: str | None, figure: Path | None, as_json: bool) -> None:
    """List the published networks: where they differ, their sources and parameter counts.

    With NAME, show one in full: its layers, with shapes and parameters, and every field.
    """
    if name is None and figure is not None:
        raise click.UsageError("--figure is for one preset; name it, e.g. torchcaps presets sabour2017 --figure …")
    chosen = [get_preset(each) for each in ([name] if name else list_presets())]
    if as_json:
        described = [_describe_preset(preset) for preset in chosen]
        print_json(described[0] if name else described)
    elif name:
        _show_preset(chosen[0])
    else:
        _show_presets(chosen)
    if figure is not None:
        from torchcaps.analysis import figure_architecture

        write_figure(figure_architecture(_shapes_of(chosen[0]), title=chosen[0].name), figure, quiet=as_json)


def _shapes_of(preset: Preset) -> Network:
    """A preset's network for its source's images, without memory for its weights."""
    import torch

    from torchcaps.models import build_model

    with torch.device("meta"):
        return build_model(preset.model, preset.in_shape, preset.num_classes)


def variant_of(preset: Preset) -> Preset | None:
    """The preset that another one is a variant of: of the same source, with a name that goes on from its name."""
    others = (get_preset(name) for name in list_presets())
    return next((o for o in others if preset.name.startswith(f"{o.name}-") and preset.source == o.source), None)


@functools.cache
def count_parameters(model: NetworkConfig, in_shape: tuple[int, int, int], num_classes: int) -> int:
    """Learned numbers of a network, from its shapes alone."""
    import torch

    from torchcaps.models import build_model

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(model, in_shape, num_classes).parameters())


def parameter_counts(preset: Preset) -> tuple[int | None, int]:
    """Learned numbers on its source's images with the decoder (None where the network has none) and without."""
    model, images = preset.model, (preset.in_shape, preset.num_classes)
    if model.decodes:
        return count_parameters(model, *images), count_parameters(replace(model, {"decoder": False}), *images)
    return None, count_parameters(model, *images)


def _describe_preset(preset: Preset) -> dict[str, Any]:
    from torchcaps.analysis import list_layers

    base = variant_of(preset)
    with_decoder, without = parameter_counts(preset)
    return {
        "name": preset.name,
        "variant_of": base.name if base else None,
        "description": preset.description,
        "source": preset.source,
        "published": preset.published,
        "data": preset.data,
        "in_shape": preset.in_shape,
        "num_classes": preset.num_classes,
        "parameters": {"with_decoder": with_decoder, "without_decoder": without},
        "layers": [dataclasses.asdict(layer) for layer in list_layers(_shapes_of(preset))],
        "model": preset.model.to_dict(),
        "recipe": preset.recipe.to_dict(),
    }


def _show_presets(all_presets: list[Preset]) -> None:
    reference = get_preset(REFERENCE)
    networks = [preset for preset in all_presets if variant_of(preset) is None]
    variants = [preset for preset in all_presets if variant_of(preset) is not None]
    capsules, convolutional = (
        [preset for preset in all_presets if preset.model.has_capsules == capsules] for capsules in (True, False)
    )
    compared = {
        f"Capsule networks: where they differ (· as {REFERENCE})": [p for p in capsules if p in networks],
        f"{REFERENCE} for other data (· as {REFERENCE})": [
            reference, *(p for p in capsules if p in variants and p.data != reference.data)
        ],
        "Convolutional networks": convolutional,
    }  # fmt: skip
    print_title("Networks")
    print_pairs((p.name, _with_result(p.source, p)) for p in networks)
    for title, presets_compared in compared.items():
        print_title(title)
        for rows in _difference_tables(presets_compared):
            print_table(rows)
    print_title("Variants")
    print_pairs((p.name, _with_result(p.description.partition(". ")[0], p)) for p in variants)
    say("Parameters are those for the images of the table.", "One in full: torchcaps presets NAME")


def _with_result(text: str, preset: Preset) -> str:
    return text if preset.published == Preset.published else f"{text.removesuffix('.')}. Published: {preset.published}."


def _difference_tables(compared: list[Preset]) -> list[Table]:
    """As few tables as the width of the terminal allows, each with the first preset at its left."""
    reference, *others = compared
    for blocks in range(1, len(others) + 1):
        size = -(-len(others) // blocks)
        shares = [others[start : start + size] for start in range(0, len(others), size)]
        for name_width in (26, 18, 14):
            tables = [_difference_table([reference, *share], compared, name_width) for share in shares]
            if all(map(fits, tables)):
                return tables
    return tables


def differing_fields(compared: list[Preset]) -> list[tuple[str, str]]:
    """The fields, as (part, name), that are not the same in all of the networks or their recipes."""
    found = []
    for part in ("model", "recipe"):
        values = [flat(getattr(preset, part)) for preset in compared]
        names = dict.fromkeys(name for each in values for name in each)
        found += [(part, name) for name in names if len({each.get(name, ABSENT) for each in values}) > 1]
    return found


def _difference_table(shown: list[Preset], compared: list[Preset], name_width: int) -> Table:
    """The first preset's values, and those of the others that differ from them."""
    rows = table("", *(_broken(preset.name, 10) for preset in shown), left=len(shown) + 1)
    rows.padding = 0
    last = "model"
    for part, name in differing_fields(compared):
        if part != last:
            rows.add_section()
            last = part
        _add_differences(
            rows, _broken(name, name_width), [flat(getattr(preset, part)).get(name, ABSENT) for preset in shown]
        )
    rows.add_section()
    _add_differences(rows, "data", [preset.data for preset in shown])
    _add_differences(rows, "images", [_shape(preset.in_shape) for preset in shown])
    counts = [parameter_counts(preset) for preset in shown]
    if any(with_decoder is not None for with_decoder, _ in counts):
        with_decoders = [with_decoder for with_decoder, _ in counts]
        add_row(rows, "parameters", *("–" if number is None else count(number) for number in with_decoders))
        add_row(
            rows, _broken("without_decoder", name_width).replace("_", " "), *(count(number) for _, number in counts)
        )
    else:
        add_row(rows, "parameters", *(count(number) for _, number in counts))
    return rows


def _add_differences(rows: Table, name: str, values: list[Any]) -> None:
    """A row of the first value, and of those others that differ from it."""
    from rich.text import Text

    first, *others = (as_text(value) for value in values)
    cells = [Text("·", style="dim") if text == first else Text(_broken(text, 10), style="bold") for text in others]
    add_row(rows, name, Text(_broken(first, 10)), *cells)


def _broken(text: str, width: int) -> str:
    """Text with line breaks after hyphens, underscores and commas where it is longer than ``width``."""
    lines = [""]
    for piece in re.findall(r"[^-_,]+[-_,]?", text):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _show_preset(preset: Preset) -> None:
    with_decoder, without = parameter_counts(preset)
    counts = count(without) if with_decoder is None else f"{count(with_decoder)}, {count(without)} without the decoder"
    print_title(preset.name)
    print_pairs(
        [
            ("What", preset.description),
            ("Source", preset.source),
            ("Published", preset.published),
            ("Data", f"{preset.data}, {_shape(preset.in_shape)} in {preset.num_classes} classes"),
            ("Parameters", counts),
        ]
    )
    print_table(_layer_table(preset))
    said: dict[str, Any] = {}
    for heading, config in [*_parts_of(preset.model), ("Recipe", preset.recipe)]:
        print_table(_field_table(heading, config, said))


def _layer_table(preset: Preset) -> Table:
    from torchcaps.analysis import list_layers

    rows = table("Layers", "output", "parameters", left=2)
    before = False
    for layer in list_layers(_shapes_of(preset)):
        if layer.in_decoder != before:
            rows.add_section()
            before = layer.in_decoder
        learned = count(layer.parameters) if layer.parameters else "–"
        add_row(rows, ", ".join(layer.steps) or "–", f"{_shape(layer.shape)} {layer.name}", learned)
    return rows


def _parts_of(config: Described, place: str = "") -> Iterator[tuple[str, Described]]:
    """A configuration and its parts, each with what it is called, in the order in which images go through them.

    Args:
        config: The whole.
        place: The layer that it is of, in words.
    """
    yield _heading(config, place), config
    for field in dataclasses.fields(config):
        held = getattr(config, field.name)
        if isinstance(held, tuple):
            for number, item in enumerate(held, 1):
                if isinstance(item, Described):
                    yield from _parts_of(item, f"layer {number}")
        elif isinstance(held, Described):
            yield from _parts_of(held, place)


def _heading(config: Described, place: str) -> str:
    """``Routing dynamic of layer 1``, ``Layer 1: dense``, ``Decoder``."""
    if isinstance(config, LayerConfig):
        return f"{place.capitalize()}: {config.name}"
    if not isinstance(config, Part) or isinstance(config, NetworkConfig):
        return config.heading
    return part_heading(type(config)) + (f" of {place}" if place else "")


def _field_table(heading: str, config: Described, said: dict[str, Any]) -> Table:
    """The fields of a part that no earlier part has with the same value.

    Args:
        heading: Of the table.
        config: The part.
        said: Fields of earlier parts by their names; those of this part are added.
    """
    words = field_descriptions(type(config))
    rows = table(heading, "value", "", left=3)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_whole = isinstance(value, Described) or (isinstance(value, tuple) and isinstance(next(iter(value), 0), Part))
        if not is_whole and (field.name not in said or said[field.name] != value):
            shown = "off" if value is None and field.name == "decoder" else as_text(value)
            add_row(rows, field.name, shown, words.get(field.name, ""))
            said[field.name] = value
    return rows


@click.command(
    "datasets",
    cls=Command,
    short_help="The data sets and which of them are here.",
    examples=(
        ("datasets", "all data sets, and which are on this machine"),
        ("datasets mnist --data-dir data/mnist", "one of them, read and counted"),
        ("datasets digits --sample 20", "a sheet of its first 20 training images, and their labels"),
        ("datasets mnist --sample 5 --split test --out five.pdf", "the first five test images"),
        ("datasets mnist --sample 5 --validation first", "those after the first 5,000, which validate: 7 3 4 6 1"),
        ("datasets folder:photos --image-size 32", "check your own images"),
    ),
)
@click.argument("name", required=False)
@click.option("--data-dir", metavar="DIR", help="Folder that holds the data set's files.")
@click.option("--image-size", type=whole_numbers(PIXELS), help="Resize images to this height and width, pixels.")
@click.option(
    "--sample",
    type=click.IntRange(1, MOST_SAMPLES),
    metavar="N",
    help=f"Draw the first N images, at most {count(MOST_SAMPLES)}, and print their labels; downloads what is missing.",
)
@click.option(
    "--split",
    type=click.Choice(["train", "validation", "test"]),
    default="train",
    show_default=True,
    help="Of which part --sample draws the first images.",
)
@click.option(
    "--validation",
    type=click.Choice(["random", "first", "last"]),
    default="random",
    show_default=True,
    help="Which training images are set apart for validation, as in train.",
)
@click.option("--out", type=FIGURE, help="Where --sample draws, .png, .pdf or .svg.  [default: NAME-sample.png]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def datasets(
    name: str | None,
    data_dir: str | None,
    image_size: int | None,
    sample: int | None,
    split: Split,
    validation: Literal["random", "first", "last"],
    out: Path | None,
    as_json: bool,
) -> None:
    """List the data sets: sizes, terms, and whether they are on this machine.

    With NAME (or folder:PATH, npz:PATH), read that one and count its images; --sample draws the first of them.
    """
    if sample is None:
        refuse_options(("split", "validation", "out"), "is for --sample N")
    from torchcaps.datasets import list_datasets, load_dataset
    from torchcaps.datasets.registry import look_up

    if name is None:
        for option, value in (("--data-dir", data_dir), ("--image-size", image_size), ("--sample", sample)):
            if value is not None:
                raise click.UsageError(
                    f"{option} is for one data set; name it, e.g. torchcaps datasets digits {option} …"
                )
        if as_json:
            print_json([_describe_dataset(info, info.locate()) for info in list_datasets()])
        else:
            _show_datasets(list_datasets())
        return
    info, path = look_up(name)
    out = out or Path(f"{path.name if path else info.name}-sample.png")
    found = path if info.takes_path else info.locate(data_dir)
    dataset = None
    if found is not None or data_dir is not None or sample is not None:  # a folder that lacks files is said to
        dataset = load_dataset(name, data_dir=data_dir, image_size=image_size, validation=validation)
        found = path if info.takes_path else info.locate(data_dir)
    shown = None if sample is None or dataset is None else Sample(dataset, split, sample)
    if as_json:
        loaded = {} if dataset is None else {"loaded": _describe_loaded(dataset)}
        print_json(_describe_dataset(info, found) | loaded | ({"sample": shown.labels} if shown else {}))
    else:
        _show_dataset(info, found, dataset)
    if shown is not None:
        if not as_json:
            print_pairs([("Sample", shown.title), ("Labels", ", ".join(shown.labels))])
        write_figure(shown.figure(), out, quiet=as_json)


class Sample:
    """The first images of a part of a data set.

    Args:
        dataset: The data set.
        split: Its part.
        number: How many; all where there are fewer.
    """

    def __init__(self, dataset: Dataset, split: Split, number: int) -> None:
        from torchcaps.analysis.inference import join_names

        part = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}[split]
        self.images, self.class_names = part.preview(number), dataset.class_names
        self.labels = [join_names(dataset.class_names, labels) for labels in self.images.labels]
        words = {"train": "training", "validation": "validation", "test": "test"}[split]
        self.title = f"the first {len(self.images)} {words} images of {dataset.name}"

    def figure(self) -> Figure:
        """A sheet of them, each with its label."""
        from torchcaps.analysis import figure_samples

        rows = -(-len(self.images) // SAMPLE_COLUMNS)
        title = self.title[0].upper() + self.title[1:]
        return figure_samples(self.images, self.class_names, rows=rows, columns=SAMPLE_COLUMNS, title=title)


def _describe_dataset(info: DatasetInfo, found: Path | None) -> dict[str, Any]:
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
    }


def _describe_loaded(dataset: Dataset) -> dict[str, Any]:
    return {
        "in_shape": dataset.in_shape,
        "objects": dataset.num_objects,
        "class_names": dataset.class_names,
        **{part: {"images": len(images), "per_class": _per_class(images, dataset)} for part, images in _parts(dataset)},
    }


def _parts(dataset: Dataset) -> list[tuple[str, ImageSet | PairSet]]:
    return [("train", dataset.train), ("validation", dataset.validation), ("test", dataset.test)]


def _per_class(images: ImageSet | PairSet, dataset: Dataset) -> list[int]:
    """How many objects of each class there are: in the images, or for them to be made of."""
    return images.labels.flatten().bincount(minlength=dataset.num_classes).tolist()


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _show_datasets(infos: list[DatasetInfo]) -> None:
    from rich.text import Text

    rows = table("data set", "what", "train", "test", "shape", "classes", "here", left=2)
    for info in infos:
        known = ["–" if n is None else count(n) for n in (info.num_train, info.num_test)]
        shape = "–" if info.in_shape is None else _shape(info.in_shape)
        here = Text("–", style="dim")
        if not info.takes_path:
            here = Text("yes", style="green") if info.locate() else Text("no", style="dim")
        classes = "–" if info.num_classes is None else str(info.num_classes)
        add_row(rows, Text(info.spec, style="bold"), info.title, *known, shape, classes, here)
    print_table(rows)
    say(
        "What is not here is downloaded when it is first trained on, or read from",
        "--data-dir or $TORCHCAPS_DATA.",
        "One of them, counted: torchcaps datasets NAME",
    )


def _show_dataset(info: DatasetInfo, found: Path | None, dataset: Dataset | None) -> None:
    print_title(info.title)
    here = str(found) if found else f"not on this machine; torchcaps train --data {info.name} downloads it"
    pairs = [("Source", info.source), ("Terms", info.licence), ("Files", here)]
    shape = info.in_shape if dataset is None else dataset.in_shape
    if shape is not None:
        pairs.append(("Shape", f"{_shape(shape)} (channels × height × width)"))
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
    if dataset.num_objects > 1:
        say(
            f"Each image holds {dataset.num_objects} objects, and all of them are counted; of images that are",
            "made in training, the objects that they are made of.",
        )
