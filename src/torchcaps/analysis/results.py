"""What an analysis returns: numbers for programs, tables for the terminal, figures. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from matplotlib.figure import Figure

MOST_CLASSES, MOST_SHOWN = 20, 10
"""So many classes at most are shown as a whole; of more, so many of the most telling ones."""


class Styled(NamedTuple):
    """A cell of a table in a style of the terminal, such as ``"bold red"``."""

    text: str
    style: str


class Table(NamedTuple):
    """Rows of words and numbers.

    Without ``columns``, a row is a name and its value. The first ``left`` columns hold words, the others numbers. An
    empty row is a line between two parts of the table. The lines of ``note`` stand under the title.
    """

    rows: Sequence[Sequence[str | Styled]] = ()
    columns: Sequence[str] = ()
    title: str = ""
    left: int = 1
    note: Sequence[str | Styled] = ()


class Result:
    """A dataclass with the result of an analysis, in each form in which it is shown."""

    def to_dict(self) -> Any:
        """The numbers, as JSON takes them; a list of one entry a network, or an image, where there are several."""
        fields: Any = self
        return dataclasses.asdict(fields)

    def tables(self) -> Iterable[Table]:
        """The numbers as a person reads them."""
        return ()

    def figures(self) -> Mapping[str, Figure]:
        """Figures by what is added to the name of their file: ``""`` for the first."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Networks beside each other.

    Args:
        networks: What was found of each, by the name to show.
        images: The images that each was looked at with, in words.
    """

    networks: Mapping[str, Any]
    images: Mapping[str, str]

    @property
    def title(self) -> str:
        """The network and its images; of several networks the images, with the networks where these differ."""
        words = set(self.images.values())
        if len(self.images) > 1 and len(words) == 1:
            return words.pop()
        return "\n".join(f"{name}: {each}" if each else name for name, each in self.images.items())


class Scored(Result):
    """A result with class scores."""

    scores: Any

    @property
    def lengths(self) -> Float[np.ndarray, "... J"]:
        """The scores, by the name that they have where they are lengths ‖v_j‖."""
        scores: np.ndarray = self.scores
        return scores


def percent(share: float | None) -> str:
    """0..1 as ``99.44 %``; a dash where it is not defined."""
    return "–" if share is None else f"{100 * share:.2f} %"


def lower_first(words: str) -> str:
    """Words that stood at the beginning of a sentence, as they go on in one."""
    return words[:1].lower() + words[1:]
