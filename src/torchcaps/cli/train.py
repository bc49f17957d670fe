"""``torchcaps train``, whose options are made from the arguments of networks, recipe and run."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click

from torchcaps.analysis.results import Styled, Table
from torchcaps.cli.options import Command, command, load_plugins, option, option_name, with_none, write_options
from torchcaps.cli.runs import refuse_options
from torchcaps.cli.show import command_line, is_main_process, print_table, say, show, typed
from torchcaps.errors import InputError, unknown_name
from torchcaps.parts import Choice, Option, Settings, UnknownOption, all_parts, find, options
from torchcaps.plugins import loaded_plugins, plugin_options
from torchcaps.ranges import as_text
from torchcaps.tasks import find_task
from torchcaps.training.config import (
    NESTED_FIELDS,
    NOT_ON_COMMAND_LINE,
    TrainConfig,
    make_config,
    override,
    read_config,
)
from torchcaps.training.recipe import Recipe
from torchcaps.words import counted

SHORT_NAMES = {"classification_loss": "--loss"}
"""Second names of options."""


class RunCommand(Command):
    """A command with an option for every field of a run, of its recipe, and of all registered parts."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options, including plugins' options: plugins are loaded before the first call."""
        if __name__ not in ctx.meta:  # click calls this several times and compares the returned objects
            ctx.meta[__name__] = run_options()
        return [*super().get_params(ctx), *itertools.chain.from_iterable(ctx.meta[__name__].values())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; ``--no-decoder`` is short for ``--decoder none``."""
        load_plugins(args)
        absent = {f"--no-{name}" for name, each in known_options().items() if each.choice and each.choice.optional}
        return super().parse_args(ctx, [f"--{word[5:]}=none" if word in absent else word for word in args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the command, of the run and of the recipe, one a line."""
        for heading, listed in ({"Options": super().get_params(ctx)} | ctx.meta[__name__]).items():
            write_options(formatter, heading, ctx, listed)


def known_options() -> dict[str, Option]:
    """Return the options of a run, of its recipe and of all registered parts, by their names."""
    known = {name: each for owner in all_parts() for name, each in options(owner).items()}
    known |= {**options(Recipe), **options(TrainConfig)}
    return {  # an option that holds several parts cannot be given on the command line
        name: each
        for name, each in known.items()
        if name not in NOT_ON_COMMAND_LINE and not (each.choice and each.choice.many)
    }


def run_options() -> dict[str, list[click.Option]]:
    """Return the options of :func:`known_options` by heading; options of parts are hidden from the help."""
    made: dict[str, list[click.Option]] = {"Run": [], "Recipe (default: the preset's)": [], "Parts": []}
    run, recipe, parts = made.values()
    helps = field_help(TrainConfig) | field_help(Recipe)
    for name, each in known_options().items():
        if name in options(TrainConfig):
            run.append(field_option(each, helps[name], as_text(each.default)))
        elif name in options(Recipe):
            recipe.append(field_option(each, helps[name]))
        else:
            parts.append(field_option(each, each.help, hidden=True))
    return made


def field_option(field: Option, words: str, default: str = "none", **more: Any) -> click.Option:
    """Return the option of a field, without a default: only options that were given change a run.

    For every field that may be None, the word is ``none``.
    """
    hint, choice = with_none(field.hint), field.choice
    if choice is not None:
        hint = Annotated[str, partial(read_part, choice)]
        if choice.optional:  # --decoder adds the default part of the network; --decoder NAME
            more |= {"is_flag": False, "flag_value": True}
    if field.name in SHORT_NAMES:
        more["short"] = SHORT_NAMES[field.name]
    note = "" if default == "none" else f"  [default: {default}]"
    return option(field.name, hint, None, help=words + note, show_default=False, **more)


def read_part(choice: Choice, name: str) -> str | None:
    """Check the name of a part, or NAME:VALUE with its first option; None for ``none`` if the part is optional."""
    if name == "none" and choice.optional:
        return None
    find(choice.kind, name.partition(":")[0])  # raises InputError for an unknown name
    return name


def option_of(kind: str) -> str | None:
    """Return the option that chooses a part of a kind, such as ``--routing``; None if there is none."""
    choosing = [name for name, each in known_options().items() if each.choice and each.choice.kind == kind]
    return option_name(kind if kind in choosing else choosing[0]) if choosing else None


def field_help(kind: type[Settings]) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, on one line (PEP 258, "attribute docstrings")."""
    texts = {name: each.help for name, each in options(kind).items()}
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(defined, ast.ClassDef)
    for field, text in itertools.pairwise(defined.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


@command(
    (
        "train compact --data mnist --epochs 5 --batch-size 64 --learning-rate 0.002 --seed 1",
        "a preset, a data set and your own settings",
    ),
    ("train --data folder:photos --image-size 32", "your own images, one sub-folder for each class"),
    ("train segcaps --data folder:leaves --patch 96", "images with masks: the class of each pixel"),
    ("train --resume runs/first-digits-1", "continue a stopped run"),
    cls=RunCommand,
)
def train(
    preset: str | None = None,
    *,
    out: Annotated[Path | None, "New run folder (default: runs/PRESET-DATA-N)."] = None,
    resume: Annotated[Path | None, "Continue the run in this folder."] = None,
    config: Annotated[Path | None, "Take the settings from a run's config.json."] = None,
    figures: Annotated[bool, "Draw figures at the end."] = True,
    find_learning_rate: Annotated[bool, "Run a learning-rate range test, print a suggestion, and exit."] = False,
    **fields: Any,
) -> None:
    """Train a network, keep the best epoch on validation images, and test it once.

    Without --data, PRESET is trained on its own data set. The default preset is `first`, on digits, which takes about a
    minute. `torchcaps presets PRESET` lists all options of a preset.
    """
    context = click.get_current_context()
    typed_source = click.core.ParameterSource.COMMANDLINE  # an option may be given the value None
    overrides = {name: value for name, value in fields.items() if context.get_parameter_source(name) is typed_source}
    if resume is not None:
        refuse_options(("out", "config", "find_learning_rate"), "is for a new run, and --resume continues one")
    if find_learning_rate:
        from torchcaps.training.rates import UNUSED_SETTINGS

        unused = ("out", "figures", *UNUSED_SETTINGS)
        refuse_options(unused, "is not used by --find-learning-rate, which writes nothing and sets the rates itself")
    described = build_config(preset, config, overrides) if resume is None else None  # report a typo before torch loads

    from torchcaps import training
    from torchcaps.training.progress import choose_progress

    if described is not None and find_learning_rate:
        return show(training.learning_rates(described))
    common: dict[str, Any] = {"progress": choose_progress(), "figures": figures, "command": typed()}
    if described is not None:
        summary = training.train(described, out, **common)
    else:
        assert resume is not None
        summary = training.resume(resume, preset=preset, overrides=overrides, **common)
    return show_summary(summary) if is_main_process() else None


def build_config(preset: str | None, file: Path | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration that PRESET or a file, and the options, describe."""
    base = read_config(file) if file else make_config(preset)
    if file and preset not in (None, base.preset):
        raise InputError(f"{file} is a configuration of {base.preset}; leave {preset} or --config out")
    changes = {**overrides, "plugins": loaded_plugins() or base.plugins}
    try:
        return override(base, changes) if file else make_config(preset, **changes)
    except UnknownOption as error:
        choices = " or ".join(f"{option_of(kind) or f'the {kind}'} {part}" for kind, part in error.owners)
        if choices:
            raise InputError(f"{option_name(error.name)} is an option of {choices}, which is not chosen") from None
        known = (option_name(name) for name in error.known if name not in NESTED_FIELDS)
        raise unknown_name(f"option of {base.preset}", option_name(error.name), known) from None


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the test results of a run, its folder, and commands to go on with."""
    from torchcaps.models.files import CONFIG
    from torchcaps.training.folder import FIGURES
    from torchcaps.training.run import analyses_of_decoder

    out, test, task = Path(summary["out"]), summary["test"], find_task(summary["task"])
    last, best = summary["epochs"], summary["best_epoch"]
    shown = {"best": f"epoch {best}, best on validation", "last": f"epoch {last}, last"}
    if best == last:
        shown = {"best": f"epoch {best}, best on validation and last"}
    rows = []
    for which, words in shown.items():
        result = test[which]
        numbers = {f"Test ({counted(result['images'], 'image')})": words}
        numbers |= task.metric.cells(result["accuracy"], result["balanced_accuracy"])
        numbers["loss"] = f"{result['loss']:.4f}"
        rows.append([Styled(cell, "bold" if which == "best" else "") for cell in numbers.values()])
    say("")
    print_table(Table(rows, tuple(numbers)))
    figures = ", ".join(sorted(file.name for file in (out / FIGURES).glob("*.png")))
    network = f"{summary['preset']}, {summary['parameters']:,} parameters"
    print_table(
        Table(
            [
                ("Network", network),
                ("Run folder", str(out)),
                *([("Figures", f"{out / FIGURES} ({figures})")] if figures else []),
            ]
        )
    )
    has_decoder = read_config(out / CONFIG).model.get("decoder") is not None
    decoding = analyses_of_decoder(task, summary["in_shape"]) if has_decoder else []
    options = plugin_options(loaded_plugins())
    say("Next:", *(f"  {command_line(name, out, *options)}" for name in ("evaluate", *decoding)))
    if summary["warning"]:
        say("", f"Warning: {summary['warning']}")
