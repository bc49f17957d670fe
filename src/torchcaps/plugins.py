"""One's own parts, presets and data sets, from a Python file or from an installed package.

A plugin is code: it runs only where it is named, on the command line by ``--plugin``, from Python by
:func:`load_plugin`; never because a file of a run names it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from torchcaps.errors import InputError, reason_of

GROUP = "torchcaps.plugins"
"""The entry points of installed packages that are plugins."""

_loaded: dict[str, str] = {}  # as it was named → the file, or the entry point, that was run


def load_plugin(source: str | Path) -> None:
    """Run a Python file, or load an entry point, so that what it registers is known. A second time does nothing.

    Args:
        source: A file ``….py``; or the name of an entry point that an installed package has in the group
            ``torchcaps.plugins``.

    Raises:
        InputError: There is none, or it raises an error, which is the cause of this one.
    """
    name = str(source)
    place = os.path.realpath(name) if name.endswith(".py") else name
    if place not in _loaded.values():
        (_run_file if name.endswith(".py") else _load_entry_point)(name)
    _loaded[name] = place


def loaded_plugins() -> tuple[str, ...]:
    """The plugins of this process, as they were named."""
    return tuple(_loaded)


def plugin_options(names: Iterable[str]) -> list[str]:
    """The words of a command line that load plugins."""
    return [word for name in names for word in ("--plugin", name)]


def is_loaded(name: str) -> bool:
    """Whether a plugin that was named so, here or elsewhere, is loaded: the same name, or a file of the same name."""
    return name in _loaded or Path(name).name in {Path(each).name for each in _loaded}


def _run_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise InputError(f"there is no plugin {name}: a Python file that registers parts of your own is meant")
    module = f"torchcaps_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = loaded = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        del sys.modules[module]
        raise _failed(name, error) from error


def _load_entry_point(name: str) -> None:
    known = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in known:
        raise InputError(
            f"there is no plugin {name}: neither a file ….py nor an entry point of an installed package; known entry "
            f"points: {', '.join(sorted(known)) or 'none'}"
        )
    try:
        known[name].load()
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return InputError(f"plugin {name}: {error}")
    return InputError(f"plugin {name} cannot be loaded: {type(error).__name__}: {reason_of(error)}")
