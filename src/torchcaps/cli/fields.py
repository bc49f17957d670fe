"""An option of ``torchcaps train`` for every field of a configuration, made from the dataclass itself."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.base import SectionOption
from torchcaps.errors import unknown_name
from torchcaps.models.fields import OF_ONES_OWN, PARTS, Described, Part, as_text, hints_of, is_choice, is_part, tree
from torchcaps.ranges import Range, ranges_in

if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
    Choice = click.Choice[str]
else:  # they take no parameters before click 8.4
    ParamType, Choice = click.ParamType, click.Choice


def option_name(field: str) -> str:
    """``num_iterations`` as it is typed: ``--num-iterations``."""
    return "--" + field.replace("_", "-")


def field_options(
    config_type: type[Described], section: str, *, skip: Collection[str] = (), show_defaults: bool = False
) -> list[click.Option]:
    """Options for the fields of a configuration but ``skip``: the words under a field and its range are the help.

    With ``show_defaults``, the fields' own defaults are shown; a preset has others.
    """
    hints = hints_of(config_type)
    return [
        _option(config_type, field.name, hints[field.name], section, field.default if show_defaults else None)
        for field in dataclasses.fields(config_type)
        if field.name not in skip
    ]


def part_options(config_type: type[Described], section: str) -> list[click.Option]:
    """Options for the fields of all kinds of a part, and of the parts that it has; ``section`` has a place for each.

    A name that several parts have is one option. A part that is chosen by its name, and one that may be left out, are
    options too.
    """
    options: dict[str, click.Option] = {}
    for owner, name, hint in tree(config_type):
        if name not in options and is_option(hint):
            options[name] = _option(owner, name, hint, section.format(owner.heading or part_heading(owner)))
    return list(options.values())


def is_option(hint: Any) -> bool:
    """Whether a field of an annotation is given on the command line: not layers, nor a part that is always there."""
    if typing.get_origin(hint) is tuple:
        return not is_part(typing.get_args(hint)[0])
    return not is_part(hint) or is_choice(hint) or type(None) in typing.get_args(hint)


def part_heading(part: type[Described]) -> str:
    """What stands over the fields of a part that has no heading of its own: ``Routing dynamic``."""
    return f"{part.choice.capitalize()} {part.name}" if issubclass(part, Part) else part.__name__


def _option(owner: type[Described], name: str, hint: Any, section: str, default: Any = None) -> click.Option:
    typed = option_name(name)
    is_flag = hint is bool or (is_part(hint) and not is_choice(hint))
    kind = None if is_flag else option_type(hint)
    notes = [f"default: {as_text(default)}"] if default is not None and default is not dataclasses.MISSING else []
    notes += map(str, ranges_in(hint))
    return SectionOption(
        [f"{typed}/--no-{typed[2:]}" if is_flag else typed, name],
        type=kind,
        # click writes names of types in capitals, which "none" must not be typed in
        metavar=f"{kind.inner.name.upper()}|none" if isinstance(kind, OrNone) else None,
        default=None,
        help=field_descriptions(owner).get(name, "") + (f"  [{'; '.join(notes)}]" if notes else ""),
        section=section,
    )


def given_fields(context: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that stand on the command line; None among them is a value, not an absence."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name: value for name, value in values.items() if context.get_parameter_source(name) is source}


def field_descriptions(config_type: type) -> dict[str, str]:
    """The string under each field of a dataclass and of those that it derives from, on one line.

    Source: PEP 258, "attribute docstrings".
    """
    found: dict[str, str] = {}
    for each in filter(dataclasses.is_dataclass, reversed(config_type.__mro__)):
        found |= _own_descriptions(each)
    return found


@functools.cache
def _own_descriptions(config_type: type) -> dict[str, str]:
    try:
        source = inspect.getsource(config_type)
    except (OSError, TypeError):  # without a source file, as at a prompt: the options work, their help has no words
        return {}
    (class_definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(class_definition, ast.ClassDef)
    body = class_definition.body
    found = {}
    for statement, following in itertools.pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def option_type(hint: Any) -> ParamType:
    """How a field of an annotation is read from the command line; its range is checked by the configuration."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return option_type(args[0])
    if origin is Literal:
        return click.Choice(args)
    if is_choice(hint):
        return PartName(hint.choice)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        return OrNone(option_type(inner)) if inner is not str else click.STRING
    if origin is tuple:
        return Numbers(int, "512,1024")
    plain: dict[Any, ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return plain[hint]


def whole_numbers(within: Range) -> click.IntRange:
    """The type of an option for whole numbers of a range; click shows it in the help."""
    return click.IntRange(int(within.least), int(within.most))


class PartName(Choice):
    """The name of a kind of part of a choice; the nearest one stands in the error."""

    def __init__(self, choice: str) -> None:
        super().__init__(list(PARTS[choice]))
        self.choice = choice

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """From the command line to a name."""
        if value not in self.choices:
            self.fail(f"{unknown_name(self.choice, value, self.choices)} {OF_ONES_OWN}", param, ctx)
        return str(value)


class Numbers(ParamType):
    """Numbers with commas between them, ``512,1024``, at most so many; of integers ``none`` stands for no number."""

    def __init__(self, kind: type[int] | type[float], example: str, most: int | None = None) -> None:
        self.name = "integer,…" if kind is int else "number,…"
        self.kind, self.example, self.most = kind, example, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """From the command line to a tuple."""
        if isinstance(value, tuple):
            return value
        if value == "none" and self.kind is int:
            return ()
        try:
            numbers = tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or len(numbers) > (self.most or len(numbers)):
            words = "integers" if self.kind is int else "numbers"
            self.fail(f"{value!r} is no list of {words} such as {self.example}.", param, ctx)
        return numbers


class OrNone(ParamType):
    """Another type, or ``none``."""

    def __init__(self, inner: ParamType) -> None:
        self.inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """None for ``none``, else as the other type has it."""
        return None if value == "none" else self.inner.convert(value, param, ctx)
