"""Plugins: your own parts, presets and data sets, from a Python file or an installed package.

A plugin is code. It runs only if the user names it: with ``--plugin`` on the command line, or with :func:`load_plugin`
in Python. It never runs because a file of a run names it.
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
from types import ModuleType

from torchcaps.errors import InputError, reason_of

GROUP = "torchcaps.plugins"
"""Group of the entry points that are plugins."""

BUILT_IN = ("torchcaps.models.presets", "torchcaps.training.recipe", "torchcaps.datasets.sources")
"""Modules that register torchcaps' own parts. They are imported first, so that no plugin can take a name of theirs."""

_loaded: dict[str, str] = {}  # name of a plugin as the user typed it → the file that was run


def load_plugin(source: str | Path) -> None:
    """Run a Python file or load an entry point, which registers its parts, presets and data sets.

    Loading a plugin again does nothing. Plugins in one folder may import each other.

    Args:
        source: A file ``….py``, or the name of an entry point of an installed package in the group
            ``torchcaps.plugins``.

    Raises:
        InputError: There is no such file or entry point, or the plugin raises an error (``__cause__``).
    """
    name = str(source)
    for module in BUILT_IN:
        importlib.import_module(module)
    try:
        _loaded[name] = _run_file(name) if name.endswith(".py") else _load_entry_point(name)
    except InputError as error:
        raise InputError(f"plugin {name}: {reason_of(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"plugin {name} cannot be loaded: {type(error).__name__}: {reason_of(error)}") from error


def loaded_plugins() -> tuple[str, ...]:
    """Return the plugins of this process, by the names that the user typed."""
    return tuple(_loaded)


def plugin_options(names: Iterable[str]) -> list[str]:
    """Return the options of a command line that load plugins."""
    return [word for name in names for word in ("--plugin", name)]


def is_loaded(name: str) -> bool:
    """Return True if a plugin of this name, or a file of the same name in any folder, is loaded."""
    return Path(name).name in {Path(each).name for each in _loaded}


def place_in_plugin(error: BaseException) -> str | None:
    """Return the last line of a plugin in an error's traceback, in words; None if no plugin is in it."""
    names = {file: name for name, file in _loaded.items()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = names.get(os.path.realpath(frame.filename))
        if name is not None:
            return f"plugin {name}, line {frame.lineno}, in {frame.name}"
    return None


def import_file(name: str | Path) -> ModuleType:
    """Import a Python file, as an ``import`` in the same folder would; return the module if it is imported already.

    No byte code is left beside the file.

    Raises:
        InputError: There is no such file.
    """
    file = os.path.realpath(name)
    if not Path(file).is_file():
        raise InputError(f"there is no file {name}")
    folder, stem = str(Path(file).parent), Path(file).stem
    writes_nothing, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.append(folder)  # the file may import other files of its folder
    try:
        spec_on_path = importlib.util.find_spec(stem) if stem.isidentifier() else None
        if spec_on_path is not None and os.path.realpath(spec_on_path.origin or "") == file:
            return importlib.import_module(stem)
        # the file's name is not a module name, or belongs to another module
        spec = importlib.util.spec_from_file_location(f"torchcaps_plugin_{stem}", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes_nothing


def _run_file(name: str) -> str:
    file = os.path.realpath(name)
    if file not in _loaded.values():
        import_file(name)
    return file


def _load_entry_point(name: str) -> str:
    known = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in known:
        raise InputError(
            "it is neither a file ….py nor an entry point of an installed package; known entry points: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    known[name].load()
    return os.path.realpath(getattr(sys.modules.get(known[name].module), "__file__", None) or name)
