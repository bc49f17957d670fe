"""Results of analyses: numbers for programs, tables for the terminal, and figures. This file does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from matplotlib.figure import Figure

MAX_CLASSES, MAX_SHOWN = 20, 10
"""Tables show all of up to MAX_CLASSES classes; of more classes, the MAX_SHOWN with the most errors."""


class Styled(NamedTuple):
    """A cell of a table with a style of the terminal, such as ``"bold red"``."""

    text: str
    style: str


class Table(NamedTuple):
    """A table of text and numbers.

    Without ``columns``, a row is a name and its value. The first ``text_columns`` columns hold text, the rest numbers.
    An empty row draws a line between two parts of the table. The lines of ``note`` stand under the title.
    """

    rows: Sequence[Sequence[str | Styled]] = ()
    columns: Sequence[str] = ()
    title: str = ""
    text_columns: int = 1
    note: Sequence[str | Styled] = ()


class Result:
    """Base class of results: dataclasses that can be shown as numbers, tables and figures."""

    def to_dict(self) -> Any:
        """Return the numbers for JSON; a list with an entry per network or image if the result has several."""
        fields: Any = self
        return dataclasses.asdict(fields)

    def tables(self) -> Iterable[Table]:
        """Return the numbers as tables for people."""
        return ()

    def figures(self) -> Mapping[str, Figure]:
        """Return the figures; a key is appended to the name of the file, ``""`` for the first."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Results of several networks.

    Args:
        networks: Result of each network by its name.
        images: Description of the images that each network was given.
    """

    networks: Mapping[str, Any]
    images: Mapping[str, str]

    @property
    def title(self) -> str:
        """The network and its images; for several networks the images, with names if the images differ."""
        words = set(self.images.values())
        if len(self.images) > 1 and len(words) == 1:
            return words.pop()
        return "\n".join(f"{name}: {each}" if each else name for name, each in self.images.items())


class Scored(Result):
    """A result with class scores."""

    scores: Any

    @property
    def lengths(self) -> Float[np.ndarray, "... J"]:
        """The scores, under their name for lengths ‖v_j‖."""
        scores: np.ndarray = self.scores
        return scores


def percent(share: float | None) -> str:
    """Format a share of 0..1 as ``99.44 %``; None as a dash."""
    return "–" if share is None else f"{100 * share:.2f} %"


def lower_first(words: str) -> str:
    """Write the first letter small, to continue a sentence with these words."""
    return words[:1].lower() + words[1:]
