"""An option of ``torchcaps train`` for every option of a part and every field of settings, made of what declares it."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any

import click

from torchcaps.cli.base import SectionOption
from torchcaps.cli.options import ClickChoice, OrNone, option_type
from torchcaps.errors import unknown_name
from torchcaps.parts import OF_ONES_OWN, PARTS, Choice, Option, Settings, all_parts, options
from torchcaps.ranges import as_text
from torchcaps.training.recipe import Recipe

WIDEST = 16
"""Characters of choices that the help names; of more, ``torchcaps presets NAME`` and errors do."""


def option_name(field: str) -> str:
    """``num_iterations`` as it is typed: ``--num-iterations``."""
    return "--" + field.replace("_", "-")


def settings_options(kind: type[Settings], section: str, *, skip: tuple[str, ...] = (), shown: bool) -> list[Any]:
    """Options for the fields of settings but ``skip``; ``shown``: with their own defaults, not a preset's."""
    words = field_descriptions(kind)
    found = []
    for option in options(kind).values():
        if option.name not in skip:
            found += _options(option._replace(help=words.get(option.name, "")), section, shown)
    return found


def part_options(*, skip: set[str]) -> list[click.Option]:
    """Options for those of all registered parts, which the help does not list."""
    found: dict[str, list[click.Option]] = {}
    for part in all_parts():
        for option in options(part).values():
            if option.name not in found and option.name not in skip and not (option.choice and option.choice.many):
                found[option.name] = _options(option, "", False, hidden=True)
    return list(itertools.chain.from_iterable(found.values()))


def option_of(kind: str) -> str | None:
    """The option that chooses a part of a kind, ``--routing``; None where there is none, as for a network."""
    known = itertools.chain.from_iterable(options(each).values() for each in (Recipe, *all_parts()))
    names = (each.name for each in known if each.choice and each.choice.kind == kind and not each.choice.many)
    return next(map(option_name, names), None)


def _options(option: Option, section: str, with_default: bool, *, hidden: bool = False) -> list[click.Option]:
    typed, choice = option_name(option.name), option.choice
    note = f"  [default: {as_text(option.default)}]" if with_default and option.default is not None else ""
    common: dict[str, Any] = {
        "default": None,
        "help": option.help + note,
        "section": section,
        "hidden": hidden,
    }
    if option.hint is bool:
        return [SectionOption([f"{typed}/--no-{typed[2:]}", option.name], **common)]
    if choice is not None and choice.optional:  # --decoder, --decoder NAME, --no-decoder
        usual = option.default if isinstance(option.default, str) else next(iter(PARTS[choice.kind]))
        named = SectionOption([typed, option.name], type=PartName(choice), is_flag=False, flag_value=usual, **common)
        return [named, SectionOption([f"--no-{typed[2:]}", f"no_{option.name}"], is_flag=True, **common)]
    kind = option_type(option.hint, strict=False) if choice is None else PartName(choice)
    # click writes names of types in capitals, which "none" must not be typed in
    metavar = f"{kind.inner.name.upper()}|none" if isinstance(kind, OrNone) else None
    if isinstance(kind, click.Choice) and len("|".join(kind.choices)) > WIDEST:
        metavar = "NAME"
    return [SectionOption([typed, option.name], type=kind, metavar=metavar, **common)]


def given_fields(context: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that stand on the command line; None among them is a value, not an absence."""
    source = click.core.ParameterSource.COMMANDLINE
    given = {name: value for name, value in values.items() if context.get_parameter_source(name) is source}
    left_out = {name: name.removeprefix("no_") for name in given if name.removeprefix("no_") in values.keys() - {name}}
    return {left_out.get(name, name): None if name in left_out else value for name, value in given.items()}


def field_descriptions(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass and of those that it derives from, on one line.

    Source: PEP 258, "attribute docstrings".
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Settings):
            found |= _own_descriptions(each)
    return found


def _own_descriptions(kind: type) -> dict[str, str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # without a source file, as at a prompt: the options work, their help has no words
        return {}
    (class_definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(class_definition, ast.ClassDef)
    found = {}
    for statement, following in itertools.pairwise(class_definition.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


class PartName(ClickChoice):
    """The name of a part, or ``none`` where it may be left out; the nearest one stands in the error."""

    def __init__(self, choice: Choice) -> None:
        super().__init__([*PARTS[choice.kind], *["none"] * choice.optional])
        self.kind = choice.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """From the command line to a name."""
        if value not in self.choices:
            self.fail(f"{unknown_name(self.kind, value, self.choices)} {OF_ONES_OWN}", param, ctx)
        return None if value == "none" else value
