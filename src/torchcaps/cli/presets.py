"""``torchcaps presets``: list the published networks, or show one in full."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from torchcaps.analysis.results import Result, Table
from torchcaps.cli.options import Figure, Json, command
from torchcaps.cli.runs import refuse_options
from torchcaps.cli.show import by, print_json, print_table, show
from torchcaps.cli.train import field_help, option_of
from torchcaps.models.presets import Preset, get_preset, list_presets
from torchcaps.parts import PARTS, Tree, complete, find, flat, options
from torchcaps.ranges import as_text
from torchcaps.training.config import NOT_ON_COMMAND_LINE, TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from torchcaps.models import Network

NOTHING = "–"
"""Text of a result that is not known."""
REFERENCE = "sabour2017"
"""Preset to compare with if a preset is no variant of another."""
PAPER = re.compile(r"([\w ]+)[,:].*?\b(\d{4})\b")
"""Pattern of the first author and the year of a paper."""
RESULT = re.compile(r"([\d.]+)[ ±\d.]* %[ ±\d.]* test (error|accuracy)")
"""Pattern of an error or an accuracy at the beginning of a source's results."""


@command(
    ("presets", "the published networks, a line each"),
    ("presets tf-notebook", "all layers and options of one network"),
    ("presets --diff", "differences between each network and the one it is based on"),
    ("presets tf-notebook --figure tf-notebook.png", "a drawing of its layers with their sizes"),
    ("presets --json", "all of them as JSON, for other programs"),
)
def presets(
    preset: str | None = None,
    *,
    diff: Annotated[bool, "Show how presets differ, and the parts to choose from."] = False,
    figure: Annotated[Figure, "Draw the layers of PRESET, with their sizes, to this file, .png, .pdf or .svg."] = None,
    json: Json = False,
) -> None:
    """List the published networks and our own: source, number of parameters, and test error.

    With PRESET, show one network in full: its layers, with shapes and parameters, and all options.
    """
    if preset is None:
        refuse_options(("figure",), "is for one preset, as in torchcaps presets sabour2017")
    networks = [Described(get_preset(each)) for each in (list_presets() if preset is None else [preset])]
    if diff:
        refuse_options(("json", "figure"), "does not go with --diff, which prints tables")
        for table in differences(networks):
            print_table(table)
    elif preset is not None:
        show(networks[0], json=json, figure=figure)
    elif json:
        print_json([each.to_dict() for each in networks])
    else:
        print_table(listing(networks))


@dataclass(frozen=True)
class Described(Result):
    """A preset, its network and its recipe."""

    preset: Preset

    @functools.cached_property
    def planned(self) -> Network:
        """Return the network for its source's images, without memory for weights."""
        from torchcaps.models import plan_network

        return plan_network(self.preset.network, self.preset.in_shape, self.preset.num_classes)

    @functools.cached_property
    def parameters(self) -> tuple[int | None, int]:
        """Return the number of parameters with the decoder (None if there is none) and without."""
        sizes = {name: parameter.numel() for name, parameter in self.planned.named_parameters()}
        total, decoder = sum(sizes.values()), sum(n for name, n in sizes.items() if name.startswith("decoder."))
        return (total if self.preset.network.get("decoder") else None), total - decoder

    @property
    def is_own(self) -> bool:
        """True for a network of torchcaps, whose result was measured here."""
        return self.preset.source.startswith("torchcaps")

    @property
    def results(self) -> dict[str, str]:
        """Return the result that the source reports, and the one that was measured here."""
        return {
            "published": NOTHING,
            "measured": NOTHING,
            "measured" if self.is_own else "published": self.preset.published,
        }

    @property
    def recipe(self) -> Recipe:
        """Return the recipe with the preset's values."""
        return Recipe().replace(self.preset.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return all facts about the preset as plain values."""
        from torchcaps.analysis import list_layers

        preset, (with_decoder, without) = self.preset, self.parameters
        about = ("name", "description", "source", "data", "in_shape", "num_classes")
        return {name: getattr(preset, name) for name in about} | {
            **self.results,
            "variant_of": preset.base,
            "parameters": {"with_decoder": with_decoder, "without_decoder": without},
            "layers": [dataclasses.asdict(layer) for layer in list_layers(self.planned)],
            "model": preset.network,
            "recipe": self.recipe.to_dict(),
        }

    def tables(self) -> Iterator[Table]:
        """Yield tables of its source, its layers, and the options of each part, of the recipe and of a run."""
        preset, recipe, (with_decoder, without) = self.preset, self.recipe, self.parameters
        counts = f"{without:,}" if with_decoder is None else f"{with_decoder:,}, {without:,} without the decoder"
        about = [("What", preset.description), ("Source", preset.source)]
        about += [(name.capitalize(), result) for name, result in self.results.items() if result != NOTHING]
        about.append(("Data", f"{preset.data}, {by(preset.in_shape)} in {preset.num_classes} classes"))
        yield Table([*about, ("Parameters", counts)], title=preset.name)
        yield self._layers()
        yield from _options_of("network", preset.network)
        yield _values("Recipe", recipe.fields, field_help(Recipe))
        yield from _options_of("optimizer", complete("optimizer", recipe.optimizer))
        run = {name: value for name, value in TrainConfig().fields.items() if name not in NOT_ON_COMMAND_LINE}
        yield _values("Run", run | {"data": preset.data}, field_help(TrainConfig))

    def _layers(self) -> Table:
        from torchcaps.analysis import list_layers

        rows: list[tuple[str, ...]] = []
        layers = list_layers(self.planned)
        for layer, before in zip(layers, [layers[0], *layers], strict=False):
            if layer.in_decoder != before.in_decoder:
                rows.append(())
            learned = f"{layer.parameters:,}" if layer.parameters else "–"
            rows.append((", ".join(layer.steps) or "–", f"{by(layer.shape)} {layer.name}", learned))
        return Table(rows, ("Layers", "output", "parameters"), text_columns=2)

    def figures(self) -> dict[str, Drawing]:
        """Return a drawing of the layers."""
        from torchcaps.analysis import figure_architecture

        return {"": figure_architecture(self.planned, title=self.preset.name)}


def listing(presets: Sequence[Described]) -> Table:
    """Return a table of presets: source, size, and the test error that the source reports or that was measured here."""
    rows = []
    for each in presets:
        with_decoder, without = each.parameters
        error = ""
        if result := RESULT.match(each.preset.published):
            percent = float(result[1]) if result[2] == "error" else 100 - float(result[1])
            error = f"{round(percent, 2)} % ({each.preset.data}){' *' * each.is_own}"
        rows.append((each.preset.name, cited(each.preset.source), f"{with_decoder or without:,}", error))
    notes = (
        "To see one in full: torchcaps presets PRESET",
        "To see how they differ: torchcaps presets --diff",
        "Test errors are those that the sources report; * was measured with torchcaps.",
    )
    return Table(rows, ("Networks", "source", "parameters", "test error"), text_columns=2, note=notes)


def cited(source: str) -> str:
    """Shorten a source to the first author and the year, or to the text before its first comma or colon."""
    paper = None if source.startswith("torchcaps") else PAPER.match(source)
    return f"{paper[1]} {paper[2]}" if paper else re.split("[,:]", source)[0]


def differences(presets: Sequence[Described]) -> Iterator[Table]:
    """Yield tables of the differences of presets, and of the parts to choose from."""
    title = f"Differences from the preset that each is based on, or from {REFERENCE}"
    yield Table([(each.preset.name, _differences(each)) for each in presets], title=title)
    choices = [(option_of(kind), ", ".join(parts)) for kind, parts in PARTS.items()]
    yield Table([(typed, names) for typed, names in choices if typed], title="Parts to choose by name")


def _differences(described: Described) -> str:
    """Return the options in which a preset differs from its base; its source if the two cannot be compared."""
    preset = described.preset
    base = get_preset(preset.base or REFERENCE)
    if preset is base or preset.network["name"] != base.network["name"]:
        return preset.source
    ours = flat(preset.network) | flat(described.recipe.fields)
    theirs = flat(base.network) | flat(Described(base).recipe.fields)
    changed = (f"{name} {as_text(value)}" for name, value in ours.items() if theirs.get(name) != value)
    return "; ".join(changed) or preset.source


def _options_of(kind: str, tree: Tree, place: str = "") -> Iterator[Table]:
    """Yield tables of the options of a part, and of the parts in it."""
    known = options(find(kind, tree["name"]))
    title = f"{kind.capitalize()} {tree['name']}" + (f" of {place}" if place else "")
    yield _values(title, tree, {name: option.help for name, option in known.items()})
    for name, option in known.items():
        if option.choice is not None:
            held = tree[name] if isinstance(tree[name], tuple) else (tree[name],)
            for number, each in enumerate(held, 1):
                if isinstance(each, Mapping):
                    where = f"layer {number}" if option.choice.many else place
                    yield from _options_of(option.choice.kind, dict(each), where)


def _values(heading: str, tree: Tree, words: Mapping[str, str]) -> Table:
    """Return a table of the options of a part, except nested parts: name, value and help."""
    rows = [
        (name, as_text(value), words.get(name, ""))
        for name, value in tree.items()
        if name != "name" and not isinstance(next(iter(value), 0) if isinstance(value, tuple) else value, Mapping)
    ]
    return Table(rows or [("no options", "", "")], (heading, "value", ""), text_columns=3)
