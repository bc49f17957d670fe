"""What all commands share: ``--debug``, headings and examples in the help, and a stop with an exit code."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from torchcaps.errors import unknown_name
from torchcaps.plugins import load_plugin

SETTINGS: dict[str, Any] = {"max_content_width": 100, "help_option_names": ["-h", "--help"], "show_default": True}
"""Of all commands; the width is that of the help, columns at most."""


@dataclass
class Session:
    """One call of the command line."""

    arguments: tuple[str, ...]
    """What stood after ``torchcaps``."""
    debug: bool = False
    """Whether errors show their traceback."""


class Stopped(Exception):  # noqa: N818  it may be what the user asked for
    """The end of a command that is neither success nor wrong input.

    Args:
        message: One sentence for the user.
        exit_code: For the shell.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message, self.exit_code = message, exit_code


def debug_option() -> click.Option:
    """``--debug``, which is taken before a command's name and after it."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        session = context.find_object(Session)
        if value and session is not None:
            session.debug = True

    return click.Option(
        ["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=note, help="Show tracebacks of errors."
    )


def plugin_option() -> click.Option:
    """``--plugin``; :meth:`Command.parse_args` has loaded what it names, before other options are read."""
    return click.Option(
        ["--plugin"],
        multiple=True,
        expose_value=False,
        metavar="FILE",
        help="Run this Python file, or load an installed package's entry point, for the parts, presets and data sets "
        "that it registers; may be given several times.",
    )


class SectionOption(click.Option):
    """An option that stands under a heading of its own, ``section``, in the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command with ``--debug``, options under headings, and examples at the end of its help.

    Args:
        *args: See :class:`click.Command`.
        examples: Pairs of a command line (without ``torchcaps``) and what it does.
        **kwargs: See :class:`click.Command`.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [plugin_option(), debug_option()]
        self.context_settings = SETTINGS
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; plugins first, as they add to the options and to what they take."""
        given = args[: args.index("--")] if "--" in args else args
        for word, following in itertools.zip_longest(given, given[1:], fillvalue=""):
            if word == "--plugin" and following:
                load_plugin(following)
            elif word.startswith("--plugin="):
                load_plugin(word.removeprefix("--plugin="))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options under their headings, those without one first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.shown(words, formatter)) for name, words in records], col_max=34)

    def shown(self, words: str, formatter: click.HelpFormatter) -> str:  # noqa: ARG002  a subclass may need it
        """What the help of an option shows of its words."""
        return words

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, each as it is typed."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}torchcaps {line}\n")
                    formatter.write(f"{'':{formatter.current_indent}}    {meaning}\n")


class Group(click.Group):
    """Commands that are imported when they are called; an unknown one brings the nearest name.

    Args:
        *args: See :class:`click.Group`.
        later: The module of each command in this package, and a line of help.
        **kwargs: See :class:`click.Group`.
    """

    def __init__(self, *args: Any, later: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())
        self.context_settings, self.later = SETTINGS, later

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  the signature click has
        """Names, in their order."""
        return list(self.later)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  the same
        """The command of a name, imported."""
        if cmd_name not in self.later:
            return None
        command = getattr(importlib.import_module(f"torchcaps.cli.{self.later[cmd_name][0]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  the same
        """A line for each, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in self.later.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments begin with."""
        if not ctx.resilient_parsing and args[0] not in self.later and not args[0].startswith("-"):
            raise unknown_name("command", args[0], self.later)
        return super().resolve_command(ctx, args)
