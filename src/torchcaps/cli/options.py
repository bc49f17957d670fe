"""Build commands from functions: each option is declared once, as an argument of the function.

An argument before the ``*`` becomes a positional argument of the command, and one after it an option. The annotation
holds type, range and help, as in ``Annotated[int, Range(1, 9), "Number of images."]``; a function in the annotation
replaces the usual reading of a word. A dataclass gives several commands the same options. This module does not import
torch.
"""

from __future__ import annotations

import collections.abc
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from torchcaps.cli.show import say
from torchcaps.errors import InputError, shown
from torchcaps.files import check_path
from torchcaps.plugins import load_plugin
from torchcaps.ranges import Range

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    ParamType = click.ParamType[Any, Any]
else:  # not generic before click 8.4
    ParamType = click.ParamType

SETTINGS: dict[str, Any] = {"max_content_width": 100, "help_option_names": ["-h", "--help"], "show_default": True}
"""Settings of all commands; help is at most 100 columns wide."""
MAX_SHORT_OPTIONS, MAX_SHORT_EXAMPLES = 10, 3
"""Options and examples in the short help, ``-h``."""
MAX_CHOICES_CHARACTERS = 30
"""Longest list of choices that the help shows; longer ones appear in error messages only."""
RUN = """RUN is a run folder, a folder written by save_pretrained, or a repository of the Hugging Face hub, such as
someone/capsnet. Default: the network that comes with torchcaps."""
"""Help of the argument of commands that take a trained network."""
ARGUMENTS = {"amplitude": "range", "components": "component", "target": "capsule"}
"""Arguments of functions whose option has another name."""
PLUGIN = "Python file or package entry point that registers your own parts; may be repeated."


class Command(click.Command):
    """A command with ``--plugin``, ``--debug``, a short help ``-h``, and examples at the end of its help.

    Args:
        *args: See :class:`click.Command`.
        examples: Pairs of a command line (without ``torchcaps``) and its description.
        **kwargs: See :class:`click.Command`.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings, self.examples = SETTINGS | {"help_option_names": ["--help"]}, examples
        plugin = click.Option(["--plugin"], multiple=True, expose_value=False, metavar="FILE", help=PLUGIN)
        words: Any = {"help": "Show the most used options only.", "callback": self.say_short_help, "is_eager": True}
        self.params += [plugin, debug_option(), click.Option(["-h"], is_flag=True, expose_value=False, **words)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, after loading plugins, which add options and choices."""
        load_plugins(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors name the option that the user typed, not the argument of a function."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            if (words := in_options(str(error), ctx)) == str(error):
                raise
            raise type(error)(words) from error

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's
        """Write the examples at the end of the help."""
        self.write_examples(formatter, self.examples)

    def write_examples(self, formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
        """Write command lines, each with its description below."""
        with formatter.section("Examples"):
            for line, meaning in examples:
                formatter.write(f"  torchcaps {line}\n      {meaning}\n")

    def say_short_help(self, ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        """Print the first paragraph, the most used options (first those in examples) and the first examples."""
        if not asked or ctx.resilient_parsing:
            return
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text((self.help or "").partition("\n\n")[0])
        shown = {word for line, _ in self.examples for word in line.split()}
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and not each.hidden]
        options.sort(key=lambda each: shown.isdisjoint([*each.opts, *each.secondary_opts]))
        most = f" ({MAX_SHORT_OPTIONS} of {len(options)}; --help shows all)" if len(options) > MAX_SHORT_OPTIONS else ""
        write_options(formatter, f"Options{most}", ctx, options[:MAX_SHORT_OPTIONS], first_clause)
        self.write_examples(formatter, self.examples[:MAX_SHORT_EXAMPLES])
        say(*formatter.getvalue().rstrip().split("\n"))
        ctx.exit()


def in_options(words: str, ctx: click.Context) -> str:
    """Replace the argument's name at the beginning of an error by the option that the user typed."""
    argument = re.match(r"(?:\w+: )?(\w+)(?= must )", words)
    name = None if argument is None else ARGUMENTS.get(argument[1], argument[1])
    for each in ctx.command.get_params(ctx):
        is_typed = ctx.get_parameter_source(each.name or "") is click.core.ParameterSource.COMMANDLINE
        if argument is not None and is_typed and each.name == name and isinstance(each, click.Option):
            return each.opts[0] + words[argument.end() :]
    return words


def write_options(
    formatter: click.HelpFormatter,
    heading: str,
    ctx: click.Context,
    options: Iterable[click.Parameter],
    shorten: Callable[[str], str] = str,
) -> None:
    """Write visible options under a heading; long help is continued on the next line."""
    records = filter(None, (each.get_help_record(ctx) for each in options if isinstance(each, click.Option)))
    if lines := [(name, shorten(words)) for name, words in records]:
        with formatter.section(heading):
            formatter.write_dl(lines, col_max=34)


def first_clause(words: str) -> str:
    """Shorten the help of an option to its first clause without parentheses, and the default."""
    text, bracket, note = words.partition("  [")
    return re.split(r"[.;:,](?= |$)", re.sub(r" \([^)]*\)", "", text))[0] + bracket + note


def load_plugins(words: Sequence[str]) -> None:
    """Load the plugins that the words of a command line name by ``--plugin``."""
    options = itertools.takewhile(lambda word: word != "--", words)
    for word, following in itertools.pairwise([*options, ""]):
        if word == "--plugin" and following:
            load_plugin(following)
        elif word.startswith("--plugin="):
            load_plugin(word.removeprefix("--plugin="))


def debug_option() -> click.Option:
    """Return ``--debug``, for :func:`torchcaps.cli.app.main`; allowed before and after the command's name."""
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks of errors.")


def command(*examples: tuple[str, str], cls: type[Command] = Command) -> Callable[[Callable[..., Any]], Command]:
    """Turn a function into a command; its docstring becomes the help.

    Args:
        *examples: Pairs of a command line (without ``torchcaps``) and its description.
        cls: Class of the command.
    """

    def decorate(function: Callable[..., Any]) -> Command:
        params: list[click.Parameter] = []
        groups: dict[str, Any] = {}
        hints = typing.get_type_hints(function, include_extras=True)
        for name, each in inspect.signature(function).parameters.items():
            if is_dataclass(hints[name]):
                groups[name] = kind = hints[name]
                of_group = typing.get_type_hints(kind, include_extras=True)
                params += [option(field.name, of_group[field.name], field.default) for field in fields(kind)]
            elif each.kind is each.KEYWORD_ONLY:
                params.append(option(name, hints[name], each.default))
            elif each.kind is not each.VAR_KEYWORD:
                word, required = Word(hints[name]), each.default is each.empty
                params.append(click.Argument([name], type=word, nargs=-1 if word.many else 1, required=required))

        def call(**values: Any) -> Any:
            for name, kind in groups.items():
                values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            return function(**values)

        words = inspect.cleandoc(function.__doc__ or "")
        if any(each.name == "run" and not each.required for each in params):
            words += f"\n\n{RUN}"
        return cls(function.__name__, params=params, callback=call, help=words, examples=examples)

    return decorate


def option_name(name: str) -> str:
    """Return the option of an argument: ``--num-iterations`` of ``num_iterations``."""
    return "--" + name.replace("_", "-")


def option(name: str, hint: Any, default: Any = None, **more: Any) -> click.Option:
    """Return the option of an argument or a field; required if the default is ``inspect.Parameter.empty``.

    Args:
        name: Name of the argument.
        hint: Annotation with type, range and help.
        default: Default value.
        **more: Further arguments of :class:`click.Option`; ``short`` is a second, shorter name.
    """
    short = [more.pop("short")] if "short" in more else []
    typed, plain, *beside = option_name(name), *typing.get_args(hint if is_annotated(hint) else Annotated[hint, ""])
    more.setdefault("help", next((each for each in beside if isinstance(each, str)), None))
    if plain is bool:
        names = f"{typed}/--no-{typed[2:]}" if default is not False else typed
        return click.Option([names, name], is_flag=True, default=default, **more)
    required, word = default is inspect.Parameter.empty, Word(hint, strict=not more.get("hidden"))
    more |= {"type": word, "metavar": word.name, "multiple": word.many, "required": required}
    if not required:  # click 8.3 and newer accept a default of None
        more["default"] = default
    return click.Option([typed, *short, name], **more)


# ---- reading the words of a command line


class Word(ParamType):
    """Type of an argument or option, from an annotation.

    Args:
        hint: The annotation; a ``Sequence`` takes several words, one at a time.
        strict: Check that numbers are in their ranges.
    """

    def __init__(self, hint: Any, *, strict: bool = True) -> None:
        plain = typing.get_args(hint)[0] if is_annotated(hint) else hint
        self.many = typing.get_origin(plain) is collections.abc.Sequence
        self.hint, self.strict = typing.get_args(plain)[0] if self.many else hint, strict
        self.name = metavar(self.hint)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a word to its value; a default is passed through."""
        try:
            return read(value, self.hint, strict=self.strict) if isinstance(value, str) else value
        except InputError as error:
            self.fail(f"{str(error).removesuffix('.')}.", param, ctx)

    def shell_complete(self, _: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a word to a registered name, a choice, or a file."""
        from click.shell_completion import CompletionItem

        names = [*known_names(param.name or ""), *choices(self.hint)]
        files = [CompletionItem(incomplete, type="file")] if "PATH" in self.name else []
        return files + [CompletionItem(each) for each in names if each.startswith(incomplete)]


def known_names(param: str) -> Iterable[str]:
    """Return the presets, data sets or run folders that complete this argument or option."""
    if param == "preset":
        from torchcaps.models.presets import list_presets

        return list_presets()
    if param == "data":
        from torchcaps.datasets import list_datasets

        return [info.name for info in list_datasets() if not info.takes_path]
    return (
        [str(file.parent) for file in sorted(Path("runs").glob("*/config.json"))] if param in ("run", "resume") else []
    )


def choices(hint: Any) -> list[str]:
    """Return the choices of the ``Literal`` in an annotation."""
    args = typing.get_args(hint)
    return [*args] if typing.get_origin(hint) is Literal else [word for each in args for word in choices(each)]


def read(text: str, hint: Any, *, strict: bool = True) -> Any:
    """Convert a word to a type: ``3``, ``512,1024`` for a tuple; ``none`` for None or an empty tuple.

    ``none`` remains a text or a path where these are allowed, because to a command None means an option that was not
    given. For fields of a run, which None turns off, see :func:`with_none`.

    Raises:
        InputError: The word is no value of the type, or, with ``strict``, a number out of its range.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        reader = next((each for each in args[1:] if callable(each)), None)
        value = read(text, args[0], strict=strict) if reader is None else reader(text)
        for each in args[1:]:
            if isinstance(each, Range) and strict and value is not None:
                each.check("it", value)
        return value
    if origin is Literal:
        if text not in args:
            raise InputError(f"{text!r} is not one of {', '.join(map(repr, args))}")
        return text
    if origin in (typing.Union, types.UnionType):
        *others, last = (arg for arg in args if arg is not type(None))
        if text == "none" and last not in (str, Path):
            return None
        return text if any(text in typing.get_args(each) for each in others) else read(text, last, strict=strict)
    if origin is tuple:
        return () if text == "none" else tuple(read(part, args[0], strict=strict) for part in text.split(","))
    if hint is Path:
        check_path(text)
        return Path(text)
    if hint not in (int, float):
        return text
    try:
        return hint(text)
    except ValueError:
        raise InputError(f"{shown(text)} is no {'whole ' if hint is int else ''}number") from None


def with_none(hint: Any) -> Any:
    """Return the hint of an option that reads the word ``none`` as None if it may be None, also if it is a text."""
    plain = typing.get_args(hint)[0] if is_annotated(hint) else hint
    if type(None) not in typing.get_args(plain):
        return hint
    return Annotated[hint, lambda word: None if word == "none" else read(word, plain, strict=False)]


def is_annotated(hint: Any) -> bool:
    """Return whether a type hint is ``Annotated``."""
    return typing.get_origin(hint) is Annotated


def metavar(hint: Any) -> str:
    """Return the placeholder of a type's values in the help, such as INTEGER."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return metavar(args[0])
    if origin is Literal:
        names = f"[{'|'.join(args)}]"
        return names if len(names) < MAX_CHOICES_CHARACTERS else "NAME"
    if origin is tuple:
        return f"{metavar(args[0])},…"
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        return "|".join(map(metavar, kinds))
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(hint, "TEXT")


# ---- options of several commands


def read_figure(text: str) -> Path:
    """Convert a word to the file of a figure; refuse a wrong format before anything is computed."""
    from torchcaps.analysis.figures import figure_file

    check_path(text)
    return figure_file(text)


def limit_images(text: str) -> float:
    """Limit the size of image files, in megapixels, while the command runs."""
    from torchcaps.datasets import get_max_megapixels, set_max_megapixels

    click.get_current_context().call_on_close(partial(set_max_megapixels, get_max_megapixels()))
    megapixels: float = read(text, float)
    set_max_megapixels(megapixels)
    return megapixels


Which = Literal["best", "last"]
WhichEpoch = Annotated[Which, "Epoch whose weights are used: best on validation images, or last."]
Accelerator = Annotated[Literal["auto", "cpu", "cuda", "mps"], "Device."]
Json = Annotated[bool, "Print JSON."]
CoverageOption = Annotated[
    float | None,
    "Give each image a set of classes that holds the true one with this probability, above 0 and below 1. It is "
    "measured on the validation images of the run.",
]
CoverageOverOption = Annotated[
    Literal["all", "class", "group"],
    "Images that --coverage holds for: all on average; those of each class; or those of new groups, such as patients.",
]
Figure = Annotated[Path | None, read_figure]
"""File of a figure that is drawn only if the option is used; each command adds its own help."""
Drawn = Annotated[Path | None, read_figure, "File of the figure, .png, .pdf or .svg (default: in RUN/figures)."]
"""File of a figure that is always drawn."""
Data = Annotated[str | None, "Use another data set than the run's: a name, folder:PATH, csv:PATH or npz:PATH."]
DataDir = Annotated[str | None, "Folder of the data set's files."]
Split = Literal["test", "validation", "train"]
MaxMegapixels = Annotated[
    float | None, limit_images, "Largest image file to read, in megapixels (default 64, at most 178)."
]


@dataclass(frozen=True, kw_only=True)
class OtherData:
    """Options that choose a data set and match its classes with those of a run."""

    data: Data = None
    data_dir: DataDir = None
    by_number: Annotated[bool, "Match the classes of the data set with those of the run by number, not by name."] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class Source(OtherData):
    """Options that choose an epoch of a run and images of a data set."""

    which: WhichEpoch = "best"
    split: Annotated[
        Literal["test", "validation", "train", "all"],
        "Part of the data set; all: all its images, for a data set on which the network was not trained.",
    ] = "test"


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Options that say how image files become images of a network's size."""

    prepare: Annotated[
        Literal["auto", "none"], "Preprocess photos. auto: like the training drawings; none: use them unchanged."
    ] = "auto"
    invert: Annotated[bool, "Invert images: dark ink on light paper becomes light on dark."] = False
    fit: Annotated[
        Literal["pad", "stretch"] | None, "Pad an unprepared image to the network's shape, or stretch it."
    ] = None
    max_megapixels: MaxMegapixels = None
