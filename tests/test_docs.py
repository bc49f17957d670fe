"""Every Python block of the README and the documentation runs, each page from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    run_blocks(page.read_text(encoding="utf-8"), str(page))


def test_the_pages_with_code_have_it() -> None:
    counts = {page.name: len(BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert counts["README.md"] >= 1
    assert counts["routing.md"] >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
