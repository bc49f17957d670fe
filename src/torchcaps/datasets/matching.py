"""Match the outputs of a data set with those of a network, by name or by number."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torchcaps.errors import InputError, names_shown
from torchcaps.files import composed
from torchcaps.tasks import Task
from torchcaps.words import counted, plural

if TYPE_CHECKING:
    from torchcaps.datasets.dataset import Dataset, Part

Loaded = TypeVar("Loaded", "Dataset", "Part")


class Named(Protocol):
    """A network or a data set with a name for each output."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each output."""

    @property
    def has_names(self) -> bool:
        """False if the names are only numbers."""

    @property
    def colours(self) -> tuple[str, ...] | None:
        """Colour of each class in masks; None: not known."""


def match_outputs(data: Loaded, network: Named, *, by_number: bool = False) -> Loaded:
    """Return a data set with the outputs of a network: its classes, labels or numbers, in its order.

    If both have names, or those of the data set are numbers of the network's outputs, outputs of equal names belong
    together, unless ``by_number``. Otherwise their order decides, and a warning names the pairs if the names differ. A
    data set may lack classes of the network. Colours of masks are those of the network, or of the data set if the
    network has none.

    Raises:
        InputError: The data set has an output that the network does not know, or lacks a number of a regression.
    """
    numbers = _numbers_of(data, network, data.task, data.name, by_number=by_number)
    known = network.class_names
    colours = network.colours
    if colours is None and data.colours is not None and len(numbers) == len(known):
        colours = tuple(data.colours[numbers.index(j)] for j in range(len(known)))
    changed: dict[str, Any] = {"class_names": known, "has_names": network.has_names, "colours": colours}
    if numbers != list(range(len(known))):
        renumber = data.task.renumbering(numbers, known, data.name)
        changed |= {part: images.with_labels(renumber) for part, images in data.parts.items()}
    return replace(data, **changed)


def _numbers_of(data: Named, network: Named, task: Task, where: str, *, by_number: bool) -> list[int]:
    """Return the number in the network of each output of a data set."""
    names = tuple(map(composed, task.matched_names(data.class_names)))
    known = tuple(map(composed, network.class_names))
    unknown = [name for name in names if name not in known]
    is_larger = len(names) > len(known)
    if data.has_names and not by_number and (network.has_names or not unknown):
        if not unknown:
            return [known.index(name) for name in names]
        advice = f"leave {'them' if len(unknown) > 1 else 'it'} out"
        if not is_larger:
            advice += " or, if the order is the same, match by number with by_number (--by-number)"
        noun = plural(task.output) if len(unknown) > 1 else task.output
        raise InputError(
            f"{where} has the {noun} {names_shown(unknown)}, but the network knows {names_shown(known)}; {advice}"
        )
    if is_larger:
        sizes = [counted(len(each), task.output) for each in (names, known)]
        raise InputError(f"{where} has {sizes[0]}, but the network has {sizes[1]}")
    if not by_number and names != known[: len(names)]:
        which = "the network" if data.has_names else where
        pairs = (f"{name} is {own}" for name, own in zip(names, known, strict=False))
        words = names_shown(pairs, "; ")
        warnings.warn(f"{which} has no names of {plural(task.output)}, so numbers match them: {words}", stacklevel=3)
    return list(range(len(names)))


def note_order(names: Sequence[str] | None, known: Sequence[str] | None, where: str, noun: str = "channel") -> None:
    """Warn that the order of channels decides, because the data or the network has no names of them.

    Args:
        names: Names of the channels of the data, called ``where``.
        known: Those of the network.
        where: Name of the data.
        noun: Word for a channel.
    """
    named = names or known
    if named is not None and len(named) > 1 and (names is None or known is None):
        which = where if names is None else "the network"
        words = names_shown(f"{n} is {name}" for n, name in enumerate(named, 1))
        warnings.warn(f"{which} has no names of {plural(noun)}, so their order decides: {words}", stacklevel=3)
