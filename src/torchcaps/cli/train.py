"""``torchcaps train``: every option of a network, of its recipe and of a run is one here."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click

from torchcaps.analysis.results import percent
from torchcaps.cli.base import Command, Session, Stopped
from torchcaps.cli.fields import given_fields, option_name, option_of, part_options, settings_options
from torchcaps.cli.options import Given, command
from torchcaps.cli.show import (
    add_row,
    command_line,
    count,
    is_main_process,
    print_pairs,
    print_table,
    say,
    table,
)
from torchcaps.errors import InputError, unknown_name
from torchcaps.parts import UnknownOption, options
from torchcaps.plugins import loaded_plugins, plugin_options
from torchcaps.training.config import NO_OPTIONS, WHOLE, TrainConfig, make_config, override, read_config
from torchcaps.training.recipe import Recipe

TRAIN_EXAMPLES = (
    ("train", "the paper's network on the embedded digits"),
    ("train tf-notebook --num-iterations 1 --no-decoder", "another preset, changed, on the data set of its source"),
    ("train --data folder:photos --image-size 32", "your own images, one sub-folder a class"),
    ("train --resume runs/sabour2017-digits-1", "resume a run that was stopped"),
)

COLUMN = 39
"""Characters of a line of the help before the words of an option."""
OPTIONS = f"{__name__}.options"
"""Where a call of a command keeps its options for the fields of a run."""


class RunCommand(Command):
    """A command with an option for every field of a run, of its recipe, and of whatever parts are registered."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options; plugins, which are loaded before the first call of this, have added theirs."""
        if OPTIONS not in ctx.meta:  # click asks several times, and compares what it was given
            ctx.meta[OPTIONS] = run_options()
        return [*super().get_params(ctx), *ctx.meta[OPTIONS]]

    def shown(self, words: str, formatter: click.HelpFormatter) -> str:
        """The beginning of an option's words, as many as fit on a line: there are many options."""
        text, bracket, note = words.partition("  [")
        begin, room = re.split(r"[.;:,](?= |$)", text)[0], formatter.width - COLUMN
        note = bracket + note if len(begin + bracket + note) <= room else ""
        return textwrap.shorten(begin, room, placeholder=" …") + note


def run_options() -> list[click.Option]:
    """An option for every field of a run and its recipe; those of parts are not listed in the help."""
    return [
        *settings_options(TrainConfig, "Run", skip=NO_OPTIONS, shown=True),
        *settings_options(Recipe, "Recipe (default: the preset's)", shown=False),
        *part_options(skip={*options(TrainConfig), *options(Recipe)}),
    ]


@command(*TRAIN_EXAMPLES, cls=RunCommand)
def train(
    preset: str | None = None,
    *,
    out: Annotated[Path | None, Given("Run folder, a new one.", default="runs/PRESET-DATA-N")] = None,
    resumed: Annotated[Path | None, Given("Resume the run in this folder.", name="--resume")] = None,
    config_file: Annotated[Path | None, Given("Start from a run's config.json.", name="--config")] = None,
    figures: Annotated[bool, Given("Draw figures at the end.")] = True,
    **fields: Any,
) -> None:
    """Train a network, keep the epoch that is best on the validation images, and test it once, at the end.

    PRESET is a published network, trained on the data set of its source unless --data is given; without PRESET it is
    the paper's, on embedded digits. `torchcaps presets PRESET` lists all options, with the network's, in full.
    """
    context = click.get_current_context()
    overrides = given_fields(context, fields)
    for name, other in (("--out", out), ("--config", config_file)):
        if resumed is not None and other is not None:
            raise InputError(f"--resume goes on in the run's own folder with its own settings; leave {name} out")
    config = build_config(preset, config_file, overrides) if resumed is None else None  # a typo is told at once

    from torchcaps.training import Diverged, Interrupted
    from torchcaps.training import resume as start_again
    from torchcaps.training import train as start
    from torchcaps.training.progress import choose_progress

    session = context.find_object(Session)
    words = command_line(*(session.arguments if session else ()))
    common: dict[str, Any] = {"progress": choose_progress(), "figures": figures, "command": words}
    try:
        if config is not None:
            summary = start(config, out, **common)
        else:
            assert resumed is not None
            summary = start_again(resumed, preset=preset, overrides=overrides, **common)
    except Interrupted as stop:
        raise Stopped(str(stop), stop.exit_code) from stop
    except Diverged as failure:
        raise Stopped(str(failure), 1) from failure
    if is_main_process():
        show_summary(summary)


def build_config(preset: str | None, config_file: Path | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The configuration that the argument PRESET or a file, and the options, describe."""
    base = read_config(config_file) if config_file else make_config(preset)
    if config_file and preset not in (None, base.preset):
        raise InputError(f"{config_file} is a configuration of {base.preset}; leave {preset} or --config out")
    changes = {**overrides, "plugins": loaded_plugins() or base.plugins}
    try:
        return override(base, changes) if config_file else make_config(preset, **changes)
    except UnknownOption as error:
        choices = " or ".join(f"{option_of(kind) or f'the {kind}'} {part}" for kind, part in error.owners)
        if choices:
            raise InputError(f"{option_name(error.name)} is an option of {choices}, which is not chosen") from None
        known = (option_name(name) for name in error.known if name not in WHOLE)
        raise unknown_name(f"option of {base.preset}", option_name(error.name), known) from None


def show_summary(summary: Mapping[str, Any]) -> None:
    """What a run ended with, where it lies, and what to do with it."""
    from torchcaps.models.pretrained import CONFIG
    from torchcaps.training.folder import FIGURES

    out, test = Path(summary["out"]), summary["test"]
    last, best = summary["epochs"], summary["best_epoch"]
    shown = {"best": f"epoch {best}, best on validation", "last": f"epoch {last}, last"}
    if best == last:
        shown = {"best": f"epoch {best}, best on validation and last"}
    rows = table(f"Test ({count(test['best']['images'])} images)", "accuracy", "error", "loss")
    for which, words in shown.items():
        result = test[which]
        cells = percent(result["accuracy"]), percent(result["error"]), f"{result['loss']:.4f}"
        add_row(rows, words, *cells, style="bold" if which == "best" else None)
    say("")
    print_table(rows)
    figures = sorted(file.name for file in (out / FIGURES).glob("*.png"))
    decoder = read_config(out / CONFIG).model.get("decoder") is not None
    options = plugin_options(loaded_plugins())
    following = [command_line(name, out, *options) for name in ("evaluate", "reconstruct", "perturb")]
    print_pairs(
        [
            ("Network", f"{summary['preset']}, {count(summary['parameters'])} parameters"),
            ("Run folder", out),
            *([("Figures", f"{out / FIGURES} ({', '.join(figures)})")] if figures else []),
            ("Next", following if decoder else following[:1]),
        ]
    )
    if summary["warning"]:
        say("", f"Warning: {summary['warning']}")
