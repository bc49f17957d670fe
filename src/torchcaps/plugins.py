"""One's own parts, presets and data sets, from a Python file or from an installed package.

A plugin is code: it runs only where it is named, on the command line by ``--plugin``, from Python by
:func:`load_plugin`; never because a file of a run names it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from torchcaps.errors import InputError, reason_of

GROUP = "torchcaps.plugins"
"""The entry points of installed packages that are plugins."""

OWN = ("torchcaps.models.presets", "torchcaps.training.recipe")
"""They register what comes with torchcaps, so that no plugin can take its name."""

_loaded: dict[str, str] = {}  # as it was named → the file, or the entry point, that was run
_files: dict[str, str] = {}  # a file that was run → its plugin's name


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
        for module in OWN:
            importlib.import_module(module)
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


def place_in_plugin(error: BaseException) -> str | None:
    """The last line of a plugin that an error came through, in words; None if it came through none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = _files.get(os.path.realpath(frame.filename))
        if name is not None:
            return f"plugin {name}, line {frame.lineno}, in {frame.name}"
    return None


def _run_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise InputError(f"there is no plugin {name}: a Python file that registers parts of your own is meant")
    module = f"torchcaps_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = loaded = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    beside = str(Path(os.path.realpath(name)).parent)
    sys.path.append(beside)  # it may import its neighbours
    try:
        spec.loader.exec_module(loaded)
        found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        if found is not None and found.origin == os.path.realpath(name):
            sys.modules.setdefault(path.stem, loaded)  # an import of it is this module, and registers nothing again
    except Exception as error:
        del sys.modules[module]
        raise _failed(name, error) from error
    finally:
        sys.path.remove(beside)
    _files[os.path.realpath(name)] = name


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
    file = getattr(sys.modules.get(known[name].module), "__file__", None)
    if file is not None:
        _files[os.path.realpath(file)] = name


def _failed(name: str, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return InputError(f"plugin {name}: {error}")
    return InputError(f"plugin {name} cannot be loaded: {type(error).__name__}: {reason_of(error)}")
