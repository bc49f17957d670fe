"""The pages of the API reference, built as on the site: every public name stands on one, and is linked to."""

import importlib
import pkgutil
import re
import types
import zlib
from pathlib import Path

import griffe
import pytest

import torchcaps

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "mkdocs.yml"
PAGES = ROOT / "docs" / "api"
PACKAGES = [
    "torchcaps",
    *(f"torchcaps.{module.name}" for module in pkgutil.iter_modules(torchcaps.__path__)),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CONFIG.exists(), reason="no mkdocs.yml: a source distribution does not hold it"),
]


def names_on_pages(site: Path) -> set[str]:
    """Everything that has a place of its own on a page, from the inventory that other sites link by."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().partition(b"zlib.\n")[2]).decode().splitlines()
    return {line.split()[0] for line in lines}


def public_names() -> list[str]:
    found = []
    for package in PACKAGES:
        if package != "torchcaps.cli":
            module = importlib.import_module(package)
            names = [name for name in getattr(module, "__all__", ()) if not name.startswith("_")]
            found += [f"{package}.{name}" for name in names if not isinstance(getattr(module, name), types.ModuleType)]
    return found


def test_every_public_name_stands_on_a_page(site: Path) -> None:
    there, package = names_on_pages(site), griffe.load("torchcaps", search_paths=[ROOT / "src"])
    public = public_names()
    assert {"torchcaps.InputError", "torchcaps.export.share", "torchcaps.datasets.read_image"} <= set(public)
    places = {name: {name, package[name.partition(".")[2]].canonical_path} for name in public}
    assert [name for name in public if not places[name] & there] == []
    assert "torchcaps.errors.unknown_name" not in there


def test_every_page_is_in_the_index_and_the_navigation() -> None:
    index, navigation = (PAGES / "index.md").read_text(encoding="utf-8"), CONFIG.read_text(encoding="utf-8")
    for page in PAGES.glob("*.md"):
        assert f"api/{page.name}" in navigation
        assert page.name == "index.md" or f"({page.name})" in index


def test_examples_are_sections_and_no_quotations(site: Path) -> None:
    """A section under an unknown heading, such as "Example:", is rendered as a nested quotation."""
    for page in (site / "api").glob("*.html"):
        assert "<blockquote>" not in page.read_text(encoding="utf-8"), page.name


def test_roles_in_docstrings_are_links(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r":(attr|class|func|meth|mod):", text), page.name
        assert "<autoref" not in text, page.name
    there = r'href="ops.html#[\w.]+\.margin_loss"[^>]*><code>torchcaps.margin_loss</code>'
    assert re.search(there, (site / "api" / "models.html").read_text(encoding="utf-8"))
