"""Public names that load on first use, and what to install where a package of an extra is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lazy_loader

from torchcaps.errors import install


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names its stub, ``__init__.pyi``, lists.

    Raises:
        ModuleNotFoundError: On use of a name that needs a package which the base install has not; it says how to get
            it.
    """
    load, names, everything = lazy_loader.attach_stub(package, file)

    def __getattr__(name: str) -> Any:  # noqa: N807  the name that Python asks for
        try:
            return load(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "torchcaps":
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}, which is not installed: {install('app')}", name=error.name
            ) from error

    return __getattr__, names, everything
