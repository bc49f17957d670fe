"""An option of ``torchcaps train`` for every field of a configuration, made from the dataclass itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.base import SectionOption
from torchcaps.models.fields import Described, as_text
from torchcaps.ranges import Range, ranges_in

if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
else:
    ParamType = click.ParamType  # takes no parameters before click 8.4


def option_name(field: str) -> str:
    """``num_iterations`` as it is typed: ``--num-iterations``."""
    return "--" + field.replace("_", "-")


def field_options(
    config_type: type[Described], section: str, *, skip: Collection[str] = (), show_defaults: bool = False
) -> list[click.Option]:
    """Options for the fields of a configuration: the words under a field and its range are the help.

    Args:
        config_type: The dataclass.
        section: The heading of its options in the help.
        skip: Fields to leave out.
        show_defaults: Show the fields' own defaults; a preset has others.
    """
    hints = typing.get_type_hints(config_type, include_extras=True)
    words = field_descriptions(config_type)
    options: list[click.Option] = []
    for field in dataclasses.fields(config_type):
        if field.name in skip:
            continue
        name, hint = option_name(field.name), hints[field.name]
        kind = None if hint is bool else option_type(hint)
        notes = [f"default: {as_text(field.default)}"] if show_defaults and field.default is not None else []
        notes += map(str, ranges_in(hint))
        text = words.get(field.name, "") + (f"  [{'; '.join(notes)}]" if notes else "")
        options.append(
            SectionOption(
                [f"{name}/--no-{name[2:]}" if hint is bool else name, field.name],
                type=kind,
                # click writes names of types in capitals, which "none" must not be typed in
                metavar=f"{kind.inner.name.upper()}|none" if isinstance(kind, OrNone) else None,
                default=None,
                help=text,
                section=section,
            )
        )
    return options


def given_fields(context: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that stand on the command line; None among them is a value, not an absence."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name: value for name, value in values.items() if context.get_parameter_source(name) is source}


def field_descriptions(config_type: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line.

    Source: PEP 258, "attribute docstrings".
    """
    try:
        source = inspect.getsource(config_type)
    except OSError:  # installed without sources: the options work, their help has no words
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
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        return OrNone(option_type(inner)) if inner is not str else click.STRING
    if origin is tuple:
        return Integers()
    plain: dict[Any, ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return plain[hint]


def whole_numbers(within: Range) -> click.IntRange:
    """The type of an option for whole numbers of a range; click shows it in the help."""
    return click.IntRange(int(within.least), int(within.most))


class Integers(ParamType):
    """Integers with commas between them, ``512,1024``; ``none`` is no integer at all."""

    name = "integer,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """From the command line to a tuple."""
        if value == "none":
            return ()
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of integers such as 512,1024.", param, ctx)


class OrNone(ParamType):
    """Another type, or ``none``.

    Args:
        inner: The other type.
    """

    def __init__(self, inner: ParamType) -> None:
        self.inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """None for ``none``, else as the other type has it."""
        return None if value == "none" else self.inner.convert(value, param, ctx)
