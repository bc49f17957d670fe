"""A command is a function, and its arguments are its options: each is declared once, in the signature.

An argument before the ``*`` is a word of the command line, one behind it an option of its name; the annotation says
what it takes, :class:`Given` what the help says. A dataclass among the annotations stands for its fields, options that
several commands have. Nothing here imports torch.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.base import Command
from torchcaps.errors import InputError
from torchcaps.files import check_path
from torchcaps.ranges import Index, Range, as_text

if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
    ClickChoice = click.Choice[str]
else:  # they take no parameters before click 8.4
    ParamType, ClickChoice = click.ParamType, click.Choice

Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """What the help says of an option, beside its type: ``Annotated[int, Given("How many.")]``."""

    help: str = ""
    metavar: str | None = None
    default: str | None = None
    """The default in words, where it is not a value."""
    name: str | None = None
    """How it is typed, where it is not the argument's name."""
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
        made: list[click.Parameter] = []
        groups: dict[str, Any] = {}
        for each in inspect.signature(function).parameters.values():
            if is_dataclass(hints[each.name]):
                groups[each.name] = kind = hints[each.name]
                of_group = typing.get_type_hints(kind, include_extras=True)
                made += [_option(field.name, of_group[field.name], field.default) for field in fields(kind)]
            elif each.kind is each.KEYWORD_ONLY:
                made.append(_option(each.name, hints[each.name], each.default))
            elif each.kind is not each.VAR_KEYWORD:
                made.append(_argument(each, hints[each.name]))
        callback = partial(_call, function, groups) if groups else function
        words = inspect.cleandoc(function.__doc__ or "")
        return cls(function.__name__, params=made, callback=callback, help=words, examples=examples)

    return decorate


def _call(function: Function, groups: Mapping[str, Any], **values: Any) -> Any:
    for name, kind in groups.items():
        values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
    return function(**values)


def _given(hint: Any) -> Given:
    return next((each for each in typing.get_args(hint)[1:] if isinstance(each, Given)), Given())


def _argument(parameter: inspect.Parameter, hint: Any) -> click.Argument:
    kind = option_type(hint)
    count = -1 if isinstance(kind, Several) else 1
    return click.Argument(
        [parameter.name],
        type=kind.inner if isinstance(kind, Several) else kind,
        nargs=count,
        required=parameter.default is parameter.empty,
        metavar=_given(hint).metavar,
    )


def _option(name: str, hint: Any, default: Any) -> click.Option:
    given, kind = _given(hint), option_type(hint)
    typed, words = given.name or "--" + name.replace("_", "-"), given.default
    required = default is inspect.Parameter.empty
    default = None if required else default
    if words is None and default not in (None, False, ()):
        words = as_text(default)
    common: dict[str, Any] = {"help": given.help + (f"  [default: {words}]" if words else ""), "show_default": False}
    if kind is click.BOOL:
        names = f"{typed}/--no-{typed[2:]}" if default is True else typed
        return click.Option([names, name], is_flag=True, default=default, **common)
    several = isinstance(kind, Several)
    common |= {"type": kind.inner if isinstance(kind, Several) else kind, "multiple": several, "required": required}
    callback = None if given.apply is None else partial(_apply, given.apply)
    return click.Option([typed, name], default=default, metavar=given.metavar, callback=callback, **common)


def _apply(function: Callable[[click.Context, Any], None], context: click.Context, _: Any, value: Any) -> Any:
    if value is not None:
        function(context, value)
    return value


# ---- how values are read


def option_type(hint: Any, *, strict: bool = True) -> ParamType:
    """How a value of an annotation is read from the command line.

    Args:
        hint: The annotation.
        strict: Whether numbers are held to their ranges, and ``none`` is no value.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    inner = partial(option_type, strict=strict)
    if origin is Annotated:
        own = next((each for each in args if isinstance(each, click.ParamType)), None)
        within = next((each for each in args if isinstance(each, Range)), None)
        if own is None and within is not None and strict:
            return Within(inner(args[0]), within)
        return own or inner(args[0])
    if origin is Literal:
        return click.Choice(args)
    if origin in (typing.Union, types.UnionType):
        kept, *others = (arg for arg in args if arg is not type(None))
        if others:  # a name, or numbers
            return OrNone(Numbers(float, names=typing.get_args(kept)))
        return inner(kept) if strict or kept is str else OrNone(inner(kept))
    if origin is tuple:
        return Numbers(_number(args[0]))
    if origin is collections.abc.Sequence:
        return Several(inner(args[0]))
    plain: dict[Any, ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING, bool: click.BOOL, Path: PATH}
    return plain[hint]


def _number(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


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
    """Numbers with commas between them, ``512,1024``, at most so many; of integers ``none`` stands for no number.

    In place of numbers, one of some ``names`` is taken as it is.
    """

    def __init__(
        self, kind: type[int] | type[float], example: str | None = None, most: int | None = None, names: Any = ()
    ) -> None:
        self.name = "|".join([*names, "integer,…" if kind is int else "number,…"])
        self.example = example or ("512,1024" if kind is int else "0,0.1,0.2")
        self.kind, self.most, self.names = kind, most, names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """From the command line to a tuple."""
        if isinstance(value, tuple) or value in self.names:
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

Fit = Literal["pad", "stretch"]
Prepare = Literal["auto", "none"]
Split = Literal["test", "validation", "train"]
Which = Literal["best", "last"]
RunFolder = Annotated[Path | None, Given(metavar="[RUN]")]
"""Without it, the network that comes with torchcaps."""
RunFolders = Annotated[collections.abc.Sequence[Path], Given(metavar="[RUN...]")]
WhichEpoch = Annotated[Which, Given("The best epoch on the validation images, or the last checkpoint.")]
Accelerator = Annotated[Literal["auto", "cpu", "cuda", "mps"], Given("Where to compute.")]
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


@dataclass(frozen=True, kw_only=True)
class ImagesOf:
    """Which images of a data set."""

    data: Data = None
    data_dir: DataDir = None
    split: Annotated[Split, Given("Which part of the data set.")] = "test"


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
        "Refuse image files of more megapixels before they are decoded, at most 178.", default="64", apply=_limit_images
    ),
]


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """How image files are brought to the form of a network's images."""

    prepare: Annotated[
        Prepare,
        Given(
            "Bring photos of a drawing to the form of the network's data, light on dark, cut out, scaled and centred, "
            "where these were drawings (MNIST's digits and the like); or take images as they are."
        ),
    ] = "auto"
    invert: Annotated[
        bool,
        Given(
            "Turn dark on light, as ink on paper, into light on dark. Where images are prepared that is found out; "
            "--invert says that it is so."
        ),
    ] = False
    fit: Annotated[
        Fit | None,
        Given(
            "Bring an image that is not prepared to the network's size with a border, or by stretching it.",
            default="stretch for a run on folder: data, whose images were; else pad",
        ),
    ] = None
    max_megapixels: MaxMegapixels = None


ImageFile = Annotated[Path | None, Given("An image file instead.", name="--image")]
ImageIndex = Annotated[Index, Given("Which image of the part.")]


def drawn(name: str) -> Given:
    """``--figure`` of a command that always draws."""
    words = "Figure, .png, .pdf or .svg; never over another file."
    return Given(words, default=f"RUN/figures/{name}.png; {name}.png without a folder RUN")


def draws(words: str) -> Given:
    """``--figure`` of a command that draws where it is asked to."""
    return Given(f"Draw {words} to this file, .png, .pdf or .svg.")
