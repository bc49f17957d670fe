"""Every page of the README and the documentation: its code runs, its links lead somewhere, its tables are the code's.

And so do the examples in docstrings, and those for contributors.
"""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

from support import assert_close, registered_for_now
from torchcaps import create_model
from torchcaps.datasets import DataRequest, list_datasets
from torchcaps.plugins import import_file

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [name for name, text in TEXTS.items() if BLOCK.search(text)]
assert {"README.md", "docs/routing.md", "docs/own-network.md", "docs/own-routing.md"} <= set(WITH_CODE)


def run_blocks(text: str, name: str) -> dict[str, object]:
    """Run the Python blocks of a page; the names they make. Tracebacks have the lines of the page."""
    namespace: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block.group(1), name, "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with registered_for_now():
        run_blocks(TEXTS[page], str(PAGES[page]))


@pytest.mark.slow
def test_the_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader would run them: with no names but those that they bring themselves."""
    monkeypatch.chdir(tmp_path)
    assert {"torchcaps.models.presets.create", "torchcaps.sklearn"} <= set(MODULES)
    for name in MODULES:
        assert doctest.testmod(importlib.import_module(name), globs={}).failed == 0, name


def test_the_examples_for_contributors_are_listed_built_and_loaded() -> None:
    with registered_for_now():
        names = run_blocks(CONTRIBUTING.read_text(encoding="utf-8"), str(CONTRIBUTING))
        assert_close(names["routed"].coupling.sum(2), torch.ones(2, 32))
        assert create_model("my-variant").class_capsules.routing.num_iterations == 2
        (info,) = (info for info in list_datasets() if info.name == "my-data")
        splits = info.load(DataRequest())
        assert (len(splits.train), len(splits.test)) == (info.num_train, info.num_test)
        assert splits.train.in_shape == info.in_shape


def test_links_within_the_repository_lead_somewhere() -> None:
    """To files; `mkdocs build --strict` looks for the headings, too. Pages of scripts have the address of the site."""
    wrong = []
    for page in [*PAGES.values(), CONTRIBUTING]:
        for target in re.findall(r"(?:\]\(|<a href=\")([^)#\s\"]+)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.name}: {target}")
    assert wrong == []


def test_the_gallery_shows_its_pictures_and_they_are_small() -> None:
    pictures = sorted((DOCS / "images" / "gallery").iterdir())
    assert [each.name for each in pictures if f"(images/gallery/{each.name})" not in TEXTS["docs/commands.md"]] == []
    assert sum(each.stat().st_size for each in pictures) <= 1_000_000


def test_tables_are_those_of_the_code() -> None:
    tables = import_file(DOCS / "tables.py")
    for name in tables.TABLES:
        text = TEXTS[f"docs/{name}.md"]
        assert tables.TABLES[name]() in text, "python docs/tables.py writes the tables again"
        assert tables.with_tables(text) == text
