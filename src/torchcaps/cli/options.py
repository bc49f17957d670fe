"""A command is a function, and its arguments are its options: each is declared once, in the signature.

An argument before the ``*`` is a word of the command line, one behind it an option of its name; the annotation says
what it takes, :class:`Given` what the help says. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.base import Command
from torchcaps.errors import InputError
from torchcaps.files import check_path
from torchcaps.ranges import Range

if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
else:  # it takes no parameters before click 8.4
    ParamType = click.ParamType

Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """What the help says of an option, beside its type: ``Annotated[int, Given("How many.")]``."""

    help: str = ""
    metavar: str | None = None
    default: str | None = None
    """The default in words, where it is not a value."""
    apply: Callable[[click.Context, Any], None] | None = None
    """Called with the value at once."""


def command(*examples: tuple[str, str], cls: type[Command] = Command) -> Callable[[Function], Command]:
    """Make a command of a function, whose docstring is its help.

    Args:
        *examples: Pairs of a command line (without ``torchcaps``) and what it does.
        cls: The kind of command.
    """

    def decorate(function: Function) -> Command:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
        made = [_parameter(each, hints[each.name]) for each in parameters if each.kind is not each.VAR_KEYWORD]
        words = inspect.cleandoc(function.__doc__ or "")
        return cls(function.__name__, params=made, callback=function, help=words, examples=examples)

    return decorate


def _parameter(parameter: inspect.Parameter, hint: Any) -> click.Parameter:
    given = next((each for each in typing.get_args(hint)[1:] if isinstance(each, Given)), Given())
    name, default, kind = parameter.name, parameter.default, option_type(hint)
    several = isinstance(kind, Several)
    common: dict[str, Any] = {"type": kind.inner if isinstance(kind, Several) else kind, "metavar": given.metavar}
    if parameter.kind is not parameter.KEYWORD_ONLY:
        return click.Argument([name], nargs=-1 if several else 1, required=default is parameter.empty, **common)
    typed, words = "--" + name.replace("_", "-"), given.default
    if words is None and default not in (None, False, ()):
        words = "on" if default is True else ",".join(map(str, default)) if several else str(default)
    common |= {"default": default, "help": given.help + (f"  [default: {words}]" if words else "")}
    common |= {"show_default": False}
    if kind is click.BOOL:
        names = f"{typed}/--no-{typed[2:]}" if default is True else typed
        return click.Option([names, name], is_flag=True, default=default, help=common["help"], show_default=False)
    return click.Option(
        [typed, name], multiple=several, callback=given.apply and partial(_apply, given.apply), **common
    )


def _apply(function: Callable[[click.Context, Any], None], context: click.Context, _: Any, value: Any) -> Any:
    if value is not None:
        function(context, value)
    return value


def option_type(hint: Any) -> ParamType:
    """How a value of an annotation is read from the command line."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind = next((each for each in args if isinstance(each, click.ParamType)), None)
        inner = option_type(args[0]) if kind is None else kind
        within = next((each for each in args if isinstance(each, Range)), None)
        if within is None or kind is not None:
            return inner
        return Within(inner, within)
    if origin is Literal:
        return click.Choice(args)
    if origin in (typing.Union, types.UnionType):
        (kept,) = (arg for arg in args if arg is not type(None))
        return option_type(kept)
    if origin in (tuple, list):
        return Several(option_type(args[0]))
    plain: dict[Any, ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING, bool: click.BOOL, Path: PATH}
    return plain[hint]


class Several(ParamType):
    """Values that are given one by one, as words or by an option that stands several times."""

    def __init__(self, inner: ParamType) -> None:
        self.inner, self.name = inner, inner.name


class Within(ParamType):
    """Numbers of a range."""

    def __init__(self, inner: ParamType, within: Range) -> None:
        self.inner, self.within, self.name = inner, within, inner.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """From the command line to a number."""
        number = self.inner.convert(value, param, ctx)
        if number not in self.within:
            self.fail(f"it must be {self.within}, got {number}.", param, ctx)
        return number


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


class GivenPath(click.Path):
    """A file or folder; an empty text, such as a variable of the shell that is not set, names none.

    Args:
        figure: Whether it is a file for a figure, refused before anything is computed if it cannot be one.
    """

    def __init__(self, *, figure: bool = False) -> None:
        super().__init__()
        self.figure = figure

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """From the command line to a path."""
        try:
            check_path(str(value))
            path = str(super().convert(value, param, ctx))
            if not self.figure:
                return Path(path)
            from torchcaps.analysis.figures import figure_file

            return figure_file(path)
        except InputError as error:
            self.fail(f"{error}.", param, ctx)


PATH = GivenPath()
FIGURE = GivenPath(figure=True)

# ---- options that several commands have

Split = Literal["test", "validation", "train"]
Which = Literal["best", "last"]
Json = Annotated[bool, Given("Print JSON.")]
DataDir = Annotated[str | None, Given("Folder that holds the data set's files.", metavar="DIR")]
Data = Annotated[
    str | None,
    Given(
        "Other images: a data set, folder:PATH or npz:PATH.",
        metavar="NAME",
        default="the run's; digits for the network that comes with torchcaps",
    ),
]
WhichEpoch = Annotated[Which, Given("The best epoch on the validation images, or the last checkpoint.")]


def _limit_images(context: click.Context, megapixels: float) -> None:
    """Hold the command's image files to --max-megapixels."""
    from torchcaps.datasets import get_max_megapixels, set_max_megapixels

    context.call_on_close(partial(set_max_megapixels, get_max_megapixels()))
    try:
        set_max_megapixels(megapixels)
    except ValueError:
        raise click.BadParameter(f"{megapixels} is no number of megapixels above 0 and at most 178.") from None


MaxMegapixels = Annotated[
    float | None,
    Given(
        "Refuse image files of more megapixels before they are decoded, at most 178.",
        default="64",
        apply=_limit_images,
    ),
]
