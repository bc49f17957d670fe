"""How values of options are read. It imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from torchcaps.ranges import Range

if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
    ClickChoice = click.Choice[str]
else:  # they take no parameters before click 8.4
    ParamType, ClickChoice = click.ParamType, click.Choice


def whole_numbers(within: Range) -> click.IntRange:
    """The type of an option for whole numbers of a range; click shows it in the help."""
    return click.IntRange(int(within.least), int(within.most))


class Numbers(ParamType):
    """Numbers with commas between them, ``512,1024``, at most so many; of integers ``none`` stands for no number.

    In place of numbers, one of some ``names`` is taken as it is.
    """

    def __init__(
        self, kind: type[int] | type[float], example: str, most: int | None = None, names: tuple[str, ...] = ()
    ) -> None:
        self.name = "|".join([*names, "integer,…" if kind is int else "number,…"])
        self.kind, self.example, self.most, self.names = kind, example, most, names

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
