"""``torchcaps presets``: what there is to train."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchcaps.cli.base import Command
from torchcaps.cli.fields import field_descriptions, part_heading
from torchcaps.cli.output import (
    add_row,
    by,
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
from torchcaps.cli.runs import FIGURE, json_option
from torchcaps.errors import InputError, unknown_name
from torchcaps.models.config import LayerConfig, NetworkConfig
from torchcaps.models.fields import OF_ONES_OWN, PARTS, Described, Part, as_text, flat
from torchcaps.models.presets import Preset, get_preset, list_presets

if TYPE_CHECKING:
    from rich.table import Table

    from torchcaps.models import Network

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
@json_option
def presets(name: str | None, figure: Path | None, as_json: bool) -> None:
    """List the published networks: where they differ, their sources and parameter counts.

    With NAME, show one in full: its layers, with shapes and parameters, and every field.
    """
    if name is None and figure is not None:
        raise click.UsageError("--figure is for one preset; name it, e.g. torchcaps presets sabour2017 --figure …")
    if name is not None and name not in list_presets():
        raise InputError(f"{unknown_name('preset', name, list_presets())} {OF_ONES_OWN}")
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


@functools.cache
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


def parameter_counts(preset: Preset) -> tuple[int | None, int]:
    """Learned numbers on its source's images with the decoder (None where the network has none) and without."""
    sizes = {name: parameter.numel() for name, parameter in _shapes_of(preset).named_parameters()}
    of_decoder = sum(size for name, size in sizes.items() if name.startswith("decoder."))
    total = sum(sizes.values())
    return (total if preset.model.decodes else None), total - of_decoder


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
    variants = [preset for preset in all_presets if variant_of(preset)]
    networks = [preset for preset in all_presets if preset not in variants]
    capsules = [preset for preset in all_presets if preset.model.has_capsules]
    of_other_data = [preset for preset in capsules if preset in variants and preset.data != reference.data]
    compared = {
        f"Capsule networks: where they differ (· as {REFERENCE})": [p for p in capsules if p in networks],
        f"{REFERENCE} for other data (· as {REFERENCE})": [reference, *of_other_data],
        "Convolutional networks": [preset for preset in all_presets if preset not in capsules],
    }
    print_title("Networks")
    print_pairs((p.name, _with_result(p.source, p)) for p in networks)
    for title, presets_compared in compared.items():
        print_title(title)
        for rows in _difference_tables(presets_compared):
            print_table(rows)
    print_title("Variants")
    print_pairs((p.name, _with_result(p.description.partition(". ")[0], p)) for p in variants)
    print_title("Parts that are chosen by name, as by torchcaps train --routing NAME")
    print_pairs((choice, ", ".join(parts)) for choice, parts in PARTS.items() if choice != NetworkConfig.choice)
    say("Parameters are counted for the images in the table.", "All of one network: torchcaps presets NAME")


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


def _difference_table(shown: list[Preset], compared: list[Preset], name_width: int) -> Table:
    """The first preset's values, and those of the others that differ from them."""
    rows = table("", *(_broken(preset.name, 10) for preset in shown), left=len(shown) + 1)
    rows.padding = 0
    for part in ("model", "recipe"):
        fields = {preset.name: flat(getattr(preset, part)) for preset in compared}
        for name in dict.fromkeys(itertools.chain(*fields.values())):
            values = {preset: its.get(name, ABSENT) for preset, its in fields.items()}
            if len(set(values.values())) > 1:
                _add_differences(rows, _broken(name, name_width), [values[preset.name] for preset in shown])
        rows.add_section()
    _add_differences(rows, "data", [preset.data for preset in shown])
    _add_differences(rows, "images", [by(preset.in_shape) for preset in shown])
    with_decoders, without = zip(*map(parameter_counts, shown), strict=True)
    name = "parameters"
    if any(with_decoders):
        add_row(rows, name, *(count(number) if number else "–" for number in with_decoders))
        name = _broken("without_decoder", name_width).replace("_", " ")
    add_row(rows, name, *map(count, without))
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
            ("Data", f"{preset.data}, {by(preset.in_shape)} in {preset.num_classes} classes"),
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
        add_row(rows, ", ".join(layer.steps) or "–", f"{by(layer.shape)} {layer.name}", learned)
    return rows


def _parts_of(config: Described, place: str = "") -> Iterator[tuple[str, Described]]:
    """A configuration and its parts, each with what it is called, in the order in which images go through them.

    ``place`` is the layer that it is of, in words.
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
    """The fields of a part but those that an earlier part has said with the same value; what it says is added."""
    words = field_descriptions(type(config))
    rows = table(heading, "value", "", left=3)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_whole = isinstance(value, Described) or (isinstance(value, tuple) and isinstance(next(iter(value), 0), Part))
        if not is_whole and (field.name not in said or said[field.name] != value):
            shown = "off" if value is None and field.name == "decoder" else as_text(value)
            add_row(rows, field.name, shown, words.get(field.name, ""))
            said[field.name] = value
    if not rows.row_count:
        add_row(rows, "all as above" if dataclasses.fields(config) else "no options", "", "")
    return rows
