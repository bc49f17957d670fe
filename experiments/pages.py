"""Write the pages that follow from records, and the figures of the paper.

    python experiments/pages.py

These are docs/public-code.md and docs/paper.md, from the templates beside this script, docs/audit.csv,
docs/leaderboard.csv, docs/presets.csv and docs/references.bib. Their numbers come from the files in
experiments/results and from CITATION.cff.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for imports of experiments

import jinja2
import yaml

from experiments.audit import Audit
from experiments.leaderboard import beside_sources, leaderboard
from experiments.page import Page
from experiments.paper import EQUAL, FIGURES, Records, bibliography, software
from experiments.store import RESULTS
from experiments.zoo import HEADS
from torchcaps.analysis import save_figure
from torchcaps.files import write_text

ROOT = Path(__file__).parents[1]
PAGES = ("public-code", "paper")
#: Other files that are written, and the functions that give their text.
DATA: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "audit.csv": lambda values: values["audit"].csv(),
    "references.bib": lambda values: bibliography(values["citation"]),
    "presets.csv": lambda values: beside_sources(values["page"]),
    "leaderboard.csv": lambda values: leaderboard(values["page"]),
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of records."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def values(results: Path) -> dict[str, Any]:
    """Return what the templates use, by name."""
    page = Page(results)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return {
        "audit": Audit(read_lines(results / "audit.jsonl")),
        "page": page,
        "heads": HEADS,
        "records": Records(page, read_lines(results / "sources.jsonl"), read_lines(results / "speed.jsonl")),
        "equal": EQUAL,
        "citation": citation,
        "own": software(citation),
    }


def render(template: str, given: Mapping[str, Any]) -> str:
    """Return the text of a page."""
    source = Path(__file__).with_name(f"{template}.md.jinja").read_text(encoding="utf-8")
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    text = jinja2.Template(source, undefined=jinja2.StrictUndefined, **options).render(**given)
    return re.sub(r"\n{3,}", "\n\n", text)


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Write the pages and other files into a folder and the figures into ``images`` in it; return the paths."""
    given = values(results)
    written = [docs / f"{name}.md" for name in PAGES]
    for name, path in zip(PAGES, written, strict=True):
        write_text(path, render(name, given))
    for name, text_of in DATA.items():
        write_text(docs / name, text_of(given))
    figures = [save_figure(draw(given), docs / "images" / f"paper-{name}.png") for name, draw in FIGURES.items()]
    return [*written, *(docs / name for name in DATA), *figures]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=f"of the records ({RESULTS})")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR", help="of the pages (docs)")
    given = parser.parse_args(arguments)
    print("wrote", *write_pages(given.results, given.docs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
