"""Every Python block of the README, the documentation and CONTRIBUTING runs, each page from top to bottom.

And so does every example in a docstring.
"""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import registered_for_now

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_blocks(text: str, name: str) -> int:
    namespace: dict[str, object] = {}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), name, "exec"), namespace)
    return len(blocks)


def test_a_wrong_block_is_seen() -> None:
    with pytest.raises(AssertionError):
        run_blocks("```python\nassert 1 + 1 == 3\n```\n", "page")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with registered_for_now():
        run_blocks(page.read_text(encoding="utf-8"), str(page))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader would run them: with no names but those that they bring themselves."""
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(name), globs={})
    assert attempted
    assert not failed


def test_there_are_examples_in_docstrings() -> None:
    assert {"torchcaps.models.presets", "torchcaps.sklearn"} <= set(MODULES)


# what the page says of its examples: they are listed, built, loaded
REGISTERED = """
from torchcaps.datasets import list_datasets

assert "my-variant" in torchcaps.list_presets()
assert torchcaps.create_model("my-variant").class_capsules.routing.num_iterations == 2
assert torch.allclose(routed.coupling.sum(2), torch.ones(2, 32))
assert "my-data" in [info.spec for info in list_datasets()]
assert load_dataset("my-data").class_names == ("empty", "square")
(info,) = (info for info in list_datasets() if info.name == "my-data")
splits = info.load(DataRequest())
assert (len(splits.train), len(splits.test)) == (info.num_train, info.num_test)
assert splits.train.in_shape == info.in_shape
print("registered")
"""


def test_the_examples_for_contributors_run(tmp_path: Path) -> None:
    """In a process of their own: what they register must not be there for the other tests."""
    blocks = BLOCK.findall(CONTRIBUTING.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    script = "\n".join([*blocks, REGISTERED])
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout == "registered\n", run.stderr[-3000:]


def test_contributors_are_told_what_registers_a_new_file() -> None:
    place = "src/torchcaps/datasets/sources/__init__.py"
    assert f"`{place}`" in CONTRIBUTING.read_text(encoding="utf-8")
    assert "from torchcaps.datasets.sources import digits, " in (ROOT / place).read_text(encoding="utf-8")


def test_the_pages_with_code_have_it() -> None:
    counts = {page.name: len(BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert counts["README.md"] >= 1
    assert counts["routing.md"] >= 8


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
