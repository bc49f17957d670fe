"""The built site: links and anchors lead somewhere, the search finds what users ask, pages do not repeat each other."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"
#: Seven-word strings that two pages may share, such as a sentence about what equals whose code.
SHARED = 40
#: What users search, and a page that must answer.
SEARCHED = {
    "segmentation": "segmentation.html",
    "my own images": "own-data.html",
    "how many iterations": "answers.html",
    "masking": "sequences.html",
    "equivariance": "answers.html",
    "equivariant": "answers.html",
    "imbalance": "own-data.html",
    "multi-label": "own-data.html",
    "attention": "answers.html",
    "batch size 1": "batch-size-1.html",
    "photo": "explorer.html",
    "recommenders": "sequences.html",
    "memory": "speed.html",
    "cite": "paper.html",
    "precision": "speed.html",
    "grades": "own-data.html",
    "calibration": "own-data.html",
    "patient": "own-data.html",
    "DICOM": "own-data.html",
    "slot attention": "slots.html",
    "new patient": "medical-images.html",
    "EEG": "signals.html",
    "hyperspectral": "scenes.html",
    "uncertainty": "own-data.html",
    "confidence": "own-data.html",
    "leakage": "own-data.html",
    "cross-validation": "own-data.html",
    "transfer learning": "own-data.html",
    "fine-tuning": "own-data.html",
    "tabular": "own-data.html",
    "MRI": "segmentation.html",
    "overfitting": "commands.html",
    "anomaly": "commands.html",
    "jupyter": "teach.html",
}


class Targets(HTMLParser):
    """The links of a page, and the anchors that links may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links += [value for name in ("href", "src", "srcset") if (value := values.get(name))]
        if values.get("http-equiv") == "refresh":
            self.links.append((values.get("content") or "").partition("url=")[2])


def broken_links(site: Path, address: str, repository: str) -> list[str]:
    """Return the links of all pages that lead to no file or anchor of the site, or to no file of the repository."""
    pages = {
        path.relative_to(site).as_posix(): Targets(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    broken = []
    for page, targets in pages.items():
        for link in dict.fromkeys(targets.links):
            if link.startswith(f"{repository}/blob/main/"):
                if not (ROOT / unquote(urldefrag(link)[0]).partition("/blob/main/")[2]).exists():
                    broken.append(f"{page}: {link}")
                continue
            path, anchor = urldefrag(urljoin(address + page, link))
            if not path.startswith(address):
                continue  # elsewhere
            name = unquote(path.removeprefix(address)).partition("?")[0]
            name += "index.html" * (not name or name.endswith("/"))
            if not (site / name).is_file() or (anchor and name in pages and unquote(anchor) not in pages[name].anchors):
                broken.append(f"{page}: {link}")
    return broken


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    config = yaml.load(CONFIG.read_text(encoding="utf-8"), yaml.BaseLoader)
    assert broken_links(site, config["site_url"], config["repo_url"]) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">', encoding="utf-8")
    links = (
        "b.html#here",
        "b.html#gone",
        "c.html",
        "https://x.org/b.html#gone",
        "https://x.org/y",
        "https://git/blob/main/z",
    )
    page = "".join(f'<a href="{link}">' for link in (*links, "https://git/blob/main/README.md"))
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    broken = broken_links(tmp_path, "https://x.org/", "https://git")
    assert [each.partition(": ")[2] for each in broken] == [links[n] for n in (1, 2, 3, 4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("query", "page"), SEARCHED.items())
def test_the_search_finds(site: Path, query: str, page: str) -> None:
    """All words of the query stand in one entry of the index, which is a section of the page."""
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = [
        entry["location"]
        for entry in entries
        if all(re.search(rf"\b{word}", f"{entry['title']} {entry['text']}", re.IGNORECASE) for word in query.split())
    ]
    assert page in {location.partition("#")[0] for location in found}


@pytest.mark.slow
def test_a_list_that_goes_on_after_a_table_keeps_its_numbers(site: Path) -> None:
    """The answers to the lesson name these numbers."""
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    for path, text in pages.items():
        begun = [number for number in re.findall(r"^\n(\d+)\. .*$", text, re.MULTILINE) if number != "1"]
        page = (site / f"{path.stem}.html").read_text(encoding="utf-8")
        assert re.findall(r'<ol start="(\d+)">', page) == begun, path.name
    assert any(re.search(r"^\n2\. ", text, re.MULTILINE) for text in pages.values())


@pytest.mark.slow
def test_students_do_not_find_the_answers(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location":"lesson-sheet.html"' in index
    assert '"location":"lesson-answers' not in index


#: Widths of what a reader of a phone would have to scroll to the side: the page itself, tables and formulas.
TOO_WIDE = """() => {
    const wide = [...document.querySelectorAll("article .md-typeset__scrollwrap, article .formula")];
    const over = [document.documentElement, ...wide].map((part) => part.scrollWidth - part.clientWidth);
    return over.filter((pixels) => pixels > 1);
}"""


@pytest.mark.slow
@pytest.mark.browser
def test_a_phone_scrolls_no_page_to_the_side(site: Path, browser: "Browser") -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    paths = [path for path in sorted(site.glob("*.html")) if "http-equiv" not in path.read_text(encoding="utf-8")]
    wide = {}
    for path in paths:
        page.goto(path.as_uri())
        if pixels := page.evaluate(TOO_WIDE):
            wide[path.name] = pixels
    page.close()
    assert len(paths) > 25
    assert wide == {}


def shared_strings(pages: dict[str, str]) -> dict[tuple[str, str], int]:
    """Count the strings of seven words that two texts share, for each pair."""
    words = {name: re.findall(r"[^\W_]+", text.lower()) for name, text in pages.items()}
    strings = {name: {tuple(each[n : n + 7]) for n in range(len(each) - 6)} for name, each in words.items()}
    return {(a, b): len(strings[a] & strings[b]) for a, b in itertools.combinations(strings, 2)}


def test_no_two_pages_say_the_same() -> None:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    shared = shared_strings({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})
    assert {pair: number for pair, number in shared.items() if number > SHARED} == {}


def test_what_two_pages_share_is_counted() -> None:
    shared = "one two three four five six seven eight"
    counts = shared_strings({"a": f"x {shared}", "b": f"{shared.title()}. y", "c": "one two three"})
    assert counts == {("a", "b"): 2, ("a", "c"): 0, ("b", "c"): 0}


def test_the_navigation_and_the_pages_stay_short() -> None:
    entries = re.findall(
        r"^ +- .*\.(?:md|ipynb)$", CONFIG.read_text(encoding="utf-8").partition("\nnav:")[2], re.MULTILINE
    )
    assert len(entries) <= 47
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in DOCS.rglob("*.md")) <= 32_400
