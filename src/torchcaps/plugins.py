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
from types import ModuleType

from torchcaps.errors import InputError, reason_of

GROUP = "torchcaps.plugins"
"""The entry points of installed packages that are plugins."""

OWN = ("torchcaps.models.presets", "torchcaps.training.recipe", "torchcaps.datasets.sources")
"""They register what comes with torchcaps, so that no plugin can take its name."""

_loaded: dict[str, str] = {}  # as it was named → the file that was run


def load_plugin(source: str | Path) -> None:
    """Run a Python file, or load an entry point, so that what it registers is known. A second time does nothing.

    A file runs as the module that an ``import`` of it by its neighbours gives, so that plugins may import each other.

    Args:
        source: A file ``….py``; or the name of an entry point that an installed package has in the group
            ``torchcaps.plugins``.

    Raises:
        InputError: There is none, or it raises an error, which is the cause of this one.
    """
    name = str(source)
    for module in OWN:
        importlib.import_module(module)
    try:
        _loaded[name] = _run_file(name) if name.endswith(".py") else _load_entry_point(name)
    except InputError as error:
        raise InputError(f"plugin {name}: {reason_of(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"plugin {name} cannot be loaded: {type(error).__name__}: {reason_of(error)}") from error


def loaded_plugins() -> tuple[str, ...]:
    """The plugins of this process, as they were named."""
    return tuple(_loaded)


def plugin_options(names: Iterable[str]) -> list[str]:
    """The words of a command line that load plugins."""
    return [word for name in names for word in ("--plugin", name)]


def is_loaded(name: str) -> bool:
    """Whether a plugin that was named so, here or elsewhere, is loaded: the same name, or a file of the same name."""
    return Path(name).name in {Path(each).name for each in _loaded}


def place_in_plugin(error: BaseException) -> str | None:
    """The last line of a plugin that an error came through, in words; None if it came through none."""
    names = {file: name for name, file in _loaded.items()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = names.get(os.path.realpath(frame.filename))
        if name is not None:
            return f"plugin {name}, line {frame.lineno}, in {frame.name}"
    return None


def import_file(name: str | Path) -> ModuleType:
    """Run a Python file as the module that an ``import`` of it by its neighbours gives, or return that module.

    Raises:
        InputError: There is no such file.
    """
    file = os.path.realpath(name)
    if not Path(file).is_file():
        raise InputError(f"there is no file {name}")
    folder, stem = str(Path(file).parent), Path(file).stem
    sys.path.append(folder)  # it may import its neighbours
    try:
        found = importlib.util.find_spec(stem) if stem.isidentifier() else None
        if found is not None and os.path.realpath(found.origin or "") == file:
            return importlib.import_module(stem)
        # its name is no module's, or that of another one
        spec = importlib.util.spec_from_file_location(f"torchcaps_plugin_{stem}", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


def _run_file(name: str) -> str:
    file = os.path.realpath(name)
    if file not in _loaded.values():
        import_file(name)
    return file


def _load_entry_point(name: str) -> str:
    known = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in known:
        raise InputError(
            f"it is neither a file ….py nor an entry point of an installed package; known entry points: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    known[name].load()
    return os.path.realpath(getattr(sys.modules.get(known[name].module), "__file__", None) or name)
