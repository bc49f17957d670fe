"""``torchcaps presets``: what there is to train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from torchcaps.cli.fields import field_descriptions, option_of
from torchcaps.cli.options import FIGURE, Given, Json, command
from torchcaps.cli.show import add_row, by, count, print_json, print_pairs, print_table, print_title, say, table
from torchcaps.cli.show import write_figure as write
from torchcaps.errors import InputError, unknown_name
from torchcaps.models.presets import Preset, get_preset, list_presets
from torchcaps.parts import OF_ONES_OWN, PARTS, Tree, complete, find, flat, options
from torchcaps.ranges import as_text
from torchcaps.training.config import NO_OPTIONS, TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.table import Table

    from torchcaps.models import Network

REFERENCE = "sabour2017"
"""The preset that the others are compared with."""


@command(
    ("presets", "the published networks, and how they differ"),
    ("presets tf-notebook", "every layer and every option of one of them"),
    ("presets tf-notebook --figure tf-notebook.png", "a drawing of its layers with their sizes"),
    ("presets --json", "all of them, for other programs"),
)
def presets(
    name: str | None = None,
    *,
    figure: Annotated[Path | None, FIGURE, Given("Draw the layers of NAME, with their sizes, to this file.")] = None,
    json: Json = False,
) -> None:
    """List the published networks: where they differ, their sources and parameter counts.

    With NAME, show one in full: its layers, with shapes and parameters, and every option.
    """
    if name is None and figure is not None:
        raise click.UsageError("--figure is for one preset; name it, e.g. torchcaps presets sabour2017 --figure …")
    if name is not None and name not in list_presets():
        raise InputError(f"{unknown_name('preset', name, list_presets())} {OF_ONES_OWN}")
    chosen = [get_preset(each) for each in ([name] if name else list_presets())]
    if json:
        described = [_describe_preset(preset) for preset in chosen]
        print_json(described[0] if name else described)
    elif name:
        _show_preset(chosen[0])
    else:
        _show_presets(chosen)
    if figure is not None:
        from torchcaps.analysis import figure_architecture

        write(figure_architecture(_planned(chosen[0].name), title=chosen[0].name), figure, quiet=json)


@functools.cache
def _planned(name: str) -> Network:
    """A preset's network for its source's images, without memory for its weights."""
    from torchcaps.models import plan_network

    preset = get_preset(name)
    return plan_network(preset.network, preset.in_shape, preset.num_classes)


def variant_of(preset: Preset) -> Preset | None:
    """The preset that another one is a variant of: of the same source, with a name that goes on from its name."""
    others = (get_preset(name) for name in list_presets())
    return next((o for o in others if preset.name.startswith(f"{o.name}-") and preset.source == o.source), None)


def parameter_counts(preset: Preset) -> tuple[int | None, int]:
    """Learned numbers on its source's images with the decoder (None where the network has none) and without."""
    sizes = {name: parameter.numel() for name, parameter in _planned(preset.name).named_parameters()}
    of_decoder = sum(size for name, size in sizes.items() if name.startswith("decoder."))
    total = sum(sizes.values())
    return (total if preset.network.get("decoder") else None), total - of_decoder


def _recipe(preset: Preset) -> Recipe:
    return Recipe().replace(preset.recipe)


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
        "layers": [dataclasses.asdict(layer) for layer in list_layers(_planned(preset.name))],
        "model": preset.network,
        "recipe": _recipe(preset).to_dict(),
    }


def _show_presets(presets: list[Preset]) -> None:
    rows = table("Networks", "data", "parameters", "published", left=2)
    for preset in presets:
        with_decoder, without = parameter_counts(preset)
        published = "" if preset.published == Preset.published else preset.published
        add_row(rows, preset.name, preset.data, count(with_decoder or without), published)
    print_table(rows)
    print_title(f"Where they differ: from the preset that they are a variant of, or {REFERENCE}")
    print_pairs((preset.name, _differences(preset, get_preset(preset.base or REFERENCE))) for preset in presets)
    print_title("Parts that are chosen by name")
    choices = ((option_of(kind), ", ".join(parts)) for kind, parts in PARTS.items())
    print_pairs((option, names) for option, names in choices if option is not None)
    say("Parameters are counted for the images of their data.", "All of one network: torchcaps presets NAME")


def _differences(preset: Preset, base: Preset) -> str:
    """The options in which a preset differs from another, or its source, where it is the other or of another kind."""
    if preset is base or preset.network["name"] != base.network["name"]:
        return preset.source
    ours, theirs = flat(preset.network), flat(base.network)
    changed = [f"{name} {as_text(value)}" for name, value in ours.items() if theirs.get(name) != value]
    ours, theirs = flat(_recipe(preset).fields), flat(_recipe(base).fields)
    changed += [f"{name} {as_text(value)}" for name, value in ours.items() if theirs.get(name) != value]
    return "; ".join(changed) or preset.source


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
    said: Tree = {}
    for heading, tree, words in _parts_of("network", preset.network):
        print_table(_option_table(heading, tree, words, said))
    recipe = _recipe(preset)
    print_table(_option_table("Recipe", recipe.fields, field_descriptions(Recipe), said))
    for heading, tree, words in _parts_of("optimizer", complete("optimizer", recipe.optimizer)):
        print_table(_option_table(heading, tree, words, said))
    run = {name: value for name, value in TrainConfig().fields.items() if name not in NO_OPTIONS}
    print_table(_option_table("Run", run | {"data": preset.data}, field_descriptions(TrainConfig), said))


def _layer_table(preset: Preset) -> Table:
    from torchcaps.analysis import list_layers

    rows = table("Layers", "output", "parameters", left=2)
    before = False
    for layer in list_layers(_planned(preset.name)):
        if layer.in_decoder != before:
            rows.add_section()
            before = layer.in_decoder
        learned = count(layer.parameters) if layer.parameters else "–"
        add_row(rows, ", ".join(layer.steps) or "–", f"{by(layer.shape)} {layer.name}", learned)
    return rows


def _parts_of(kind: str, tree: Tree, place: str = "") -> Iterator[tuple[str, Tree, Mapping[str, str]]]:
    """A part and the parts in it: what each is called, its tree, and the words of its options."""
    known = options(find(kind, tree["name"]))
    title = f"{kind.capitalize()} {tree['name']}" + (f" of {place}" if place else "")
    yield title, tree, {name: option.help for name, option in known.items()}
    for name, option in known.items():
        if option.choice is None:
            continue
        held = tree[name] if isinstance(tree[name], tuple) else (tree[name],)
        for number, each in enumerate(held, 1):
            if isinstance(each, Mapping):
                yield from _parts_of(option.choice.kind, dict(each), f"layer {number}" if option.choice.many else place)


def _option_table(heading: str, tree: Tree, words: Mapping[str, str], said: Tree) -> Table:
    """The options of a part but those that an earlier part has said with the same value; what it says is added."""
    rows = table(heading, "value", "", left=3)
    for name, value in tree.items():
        is_part = isinstance(value, Mapping) or (isinstance(value, tuple) and isinstance(next(iter(value), 0), Mapping))
        if name != "name" and not is_part and (name not in said or said[name] != value):
            add_row(rows, name, as_text(value), words.get(name, ""))
            said[name] = value
    if not rows.row_count:
        add_row(rows, "all as above" if len(tree) > 1 else "no options", "", "")
    return rows
