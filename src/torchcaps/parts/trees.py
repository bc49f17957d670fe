"""Trees of options: complete them, change their values by name, and look at them; settings hold options, too."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from torchcaps.checks import check
from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.parts.registry import PARTS, Choice, Option, Spec, Tree, all_parts, find, options, part_of


def complete(kind: str, spec: Spec, before: Mapping[str, Any] | None = None) -> Any:
    """Return the complete tree of a part, with each option checked; return a module unchanged.

    Args:
        kind: Kind of the part.
        spec: Name, mapping or module.
        before: Tree of the part that is replaced. It supplies the name if ``spec`` has none, and the values of the
            options that both parts have.
    """
    if isinstance(spec, nn.Module):
        return spec
    before, changes = before or {}, _mapping(kind, spec)
    name = changes.pop("name", before.get("name"))
    known = options(find(kind, name))
    defaults = {option.name: _checked_value(option, None, option.default) for option in known.values()}
    kept = {key: before[key] for key in known if key in before}
    return override(kind, {"name": name, **defaults, **kept}, changes)


def _mapping(kind: str, spec: Spec) -> Tree:
    if isinstance(spec, str):
        name, colon, first = spec.partition(":")
        return {"name": name} | ({next(iter(options(find(kind, name))), first): first} if colon else {})
    if not isinstance(spec, Mapping):
        raise InputError(f"{kind} must be a name, or a mapping of its name and options, got {shown(spec)}")
    return dict(spec)


def override(kind: str, tree: Tree, changes: Mapping[str, Any], what: str | None = None) -> Tree:
    """Return a tree with other values of some options, of the part itself or of the parts inside it.

    - An option that several parts have is changed in all of them.
    - The name of a part replaces the part, which keeps the values of the options that both have.
    - A mapping changes the options of that part only.
    - False or None removes an optional part, and True adds it.
    - In a sequence, a mapping without "name" modifies the part at its position.

    Args:
        kind: Kind of the part.
        tree: Complete tree of the part.
        changes: New values by the names of options.
        what: Words for an option in error messages.

    Raises:
        InputError: An unknown option (the message suggests the nearest name), or a value that does not fit its option.
    """
    cls = find(kind, tree["name"])
    what = what or f'option of {kind} "{tree["name"]}"'
    return {"name": tree["name"]} | _override(cls, tree, changes, what)


MOVED_OPTIONS = {"voters": 'the layer "conv-types" has votes of types, and the layer "conv" has votes of capsules'}
"""Options of earlier versions, and the sentence that says what replaces each."""


class UnknownOption(InputError):  # noqa: N818  one kind of wrong input
    """A name that is not one of the known options.

    Args:
        what: Words for an option in the message.
        name: The unknown name.
        known: Names of the known options.
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(known)
        #: Kind and name of each registered part that has such an option.
        self.owners = [part_of(cls) for cls in all_parts() if name in options(cls)]
        if name in MOVED_OPTIONS:
            super().__init__(f'there is no {what} "{name}" any more: {MOVED_OPTIONS[name]}')
        elif self.owners:
            owners = " and ".join(f'{kind} "{part}"' for kind, part in self.owners)
            super().__init__(f'there is no {what} "{name}" with the parts that you chose; it belongs to {owners}')
        else:
            super().__init__(str(unknown_name(what, name, self.known)))


def _override(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], what: str) -> Tree:
    matched: set[str] = set()
    changed = _changed(cls, tree, changes, matched)
    for name in changes:
        if name not in matched:
            raise UnknownOption(what, name, flat(changed))
    return changed


def _changed(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], matched: set[str]) -> Tree:
    """Return the options of a part, or of settings, with other values, also in the parts inside it.

    The names of the options that were matched are added to ``matched``.
    """
    out = {}
    for option in options(cls).values():
        value = before = tree[option.name]
        if option.name in changes:
            matched.add(option.name)
            value = _checked_value(option, before, changes[option.name])
            if isinstance(before, Mapping) and value is None:
                matched |= set(flat(before))  # options of a removed part may be named, but have no effect
        inner = functools.partial(_changed_inside, option.choice, changes=changes, matched=matched)
        out[option.name] = _map_parts(value, inner)
    return out


def _changed_inside(choice: Choice | None, held: Any, *, changes: Mapping[str, Any], matched: set[str]) -> Any:
    """Apply the changes to the settings or the part that an option holds; return any other value unchanged."""
    if isinstance(held, Settings):
        return type(held)(**_changed(type(held), held.fields, changes, matched))
    if isinstance(held, Mapping) and choice is not None:
        return {"name": held["name"]} | _changed(find(choice.kind, held["name"]), held, changes, matched)
    return held


def _map_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _checked_value(option: Option, before: Any, new: Any) -> Any:
    """Check the value for an option; return the complete tree if the option holds a part."""
    choice = option.choice
    if isinstance(before, Settings) and isinstance(new, Mapping):
        return before.replace(new)
    if choice is None:
        check(option.name, new, option.hint)
        return tuple(new) if isinstance(new, list) else new
    if not choice.many:
        return _complete_part(choice, before, new, option.default)
    check(option.name, new, tuple[Any, ...])
    # a mapping without "name" modifies the existing part at this position; anything else replaces it
    existing = [*(before or ()), *[None] * len(new)]
    modifies = [isinstance(each, Mapping) and "name" not in each for each in new]
    return tuple(
        _complete_part(choice, old if keep else None, each)
        for old, each, keep in zip(existing, new, modifies, strict=False)
    )


def _complete_part(choice: Choice, before: Any, new: Any, default: Spec = None) -> Any:
    if choice.optional and (new is False or new is None):
        return None
    if new is True:
        new = default or next(iter(PARTS[choice.kind])) if before is None else {}
    return complete(choice.kind, new, before if isinstance(before, Mapping) else None)


def flat(tree: Mapping[str, Any]) -> Tree:
    """Return every option of a tree by its name; a part appears as its name, or as None if it is left out.

    If several parts have an option of the same name with different values, the value is a tuple of them, in the order
    of the parts.
    """
    values: dict[str, list[Any]] = {}

    def collect(held: Any) -> None:
        for each in held if isinstance(held, tuple) else (held,):
            fields = each.fields if isinstance(each, Settings) else each
            for name, value in fields.items() if isinstance(fields, Mapping) else ():
                if name != "name" and not isinstance(value, Settings):
                    names = _map_parts(value, lambda part: part["name"] if isinstance(part, Mapping) else part)
                    values.setdefault(name, []).append(names)
                collect(value)

    collect(tree)
    return {name: held[0] if all(v == held[0] for v in held) else tuple(held) for name, held in values.items()}


def own_parts(kind: str, tree: Mapping[str, Any]) -> list[str]:
    """Return the parts of a tree that do not come with torchcaps: ``["routing mine"]``."""
    cls = find(kind, tree["name"])
    names = [] if cls.__module__.startswith("torchcaps.") else [f"{kind} {tree['name']}"]
    for option in options(cls).values():
        value = tree[option.name]
        for each in value if isinstance(value, tuple) else (value,):
            if option.choice is not None and isinstance(each, Mapping):
                names += own_parts(option.choice.kind, each)
    return list(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of frozen dataclasses whose fields are options: a recipe, a run."""

    kind: typing.ClassVar[str] = "setting"

    def __post_init__(self) -> None:
        for option in options(type(self)).values():
            value = _checked_value(option, None, getattr(self, option.name))
            if isinstance(value, int) and not isinstance(value, bool) and typing.get_args(option.hint)[:1] == (float,):
                value = float(value)
            object.__setattr__(self, option.name, value)

    @property
    def fields(self) -> Tree:
        """Value of each field by its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_dict(self) -> Tree:
        """Return the fields as plain values for JSON."""
        return {name: each.to_dict() if isinstance(each, Settings) else each for name, each in self.fields.items()}

    def replace(self, changes: Mapping[str, Any], what: str | None = None) -> Self:
        """Return a copy with other values by flat names; see :func:`override` for arguments and errors."""
        return type(self)(**_override(type(self), self.fields, changes, what or self.kind))
