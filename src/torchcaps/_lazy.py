"""Public names that load on first use, and what to install where a package of an extra is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lazy_loader

from torchcaps.errors import install


def attach(
    package: str, file: str, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names its stub, ``__init__.pyi``, lists.

    Args:
        package: Name of the package.
        file: Its ``__init__.py``.
        renamed: Present name of each name of earlier versions.

    Raises:
        ImportError: On use of an earlier name; it says the present one.
        ModuleNotFoundError: On use of a name that needs a package which the base install has not; it says how to get
            it.
    """
    load, names, everything = lazy_loader.attach_stub(package, file)

    def __getattr__(name: str) -> Any:  # noqa: N807  the name that Python asks for
        if renamed and name in renamed:
            raise ImportError(f"{package}.{name} is now called {renamed[name]}")
        try:
            return load(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "torchcaps":
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}, which is not installed: {install('app')}", name=error.name
            ) from error

    return __getattr__, names, everything
