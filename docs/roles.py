"""Sphinx's roles in docstrings, such as :func:`torchcaps.route`, as links of the documentation site.

Editors know roles; mkdocstrings takes docstrings for Markdown, which does not.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`(~?)([^`]+)`")


class Roles(griffe.Extension):
    """Makes each role in a docstring a link to what it names, or code where no page shows that."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called for every module, class, function and attribute of a package once all of it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(lambda role: _link(role, obj, loader), obj.docstring.value)


def _link(role: re.Match[str], scope: griffe.Object, loader: griffe.GriffeLoader) -> str:
    tilde, name = role.groups()
    shown = name.rpartition(".")[2] if tilde or name.startswith(".") else name
    path = _find(name, scope, loader)
    return f"`{shown}`" if path is None else f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'


def _find(name: str, scope: griffe.Object, loader: griffe.GriffeLoader) -> str | None:
    """The full path of what a name means in the docstring of ``scope``; None for what is not of this package."""
    first, dot, rest = name.partition(".")
    try:
        path = scope.resolve(first) + dot + rest if first else scope.path + name
    except griffe.NameResolutionError:
        path = name
    try:
        return str(loader.modules_collection[path].canonical_path)
    except (KeyError, griffe.AliasResolutionError):
        return None
