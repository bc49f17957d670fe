"""The course material: hosted notebooks and linked files exist, and the sheet's answers are the library's numbers."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import torchcaps

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
HOSTED = REPOSITORY.replace("https://github.com/", "https://colab.research.google.com/github/") + "/blob/main/"
INSTALL = re.compile(r'install "([\w-]+)\[(\w+)\] @ git\+(https://[^"]+)"')


def read(path: Path) -> str:
    """Return the text of a page, or of the cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


PAGES = {path.relative_to(ROOT).as_posix(): read(path) for path in (ROOT / "README.md", *DOCS.glob("*.md"), *NOTEBOOKS)}


def test_addresses_of_files_of_the_repository_name_files() -> None:
    address = re.compile(rf"(?:{re.escape(HOSTED)}|{re.escape(REPOSITORY)}/blob/main/)([\w./-]+)")
    named = {(page, path) for page, text in PAGES.items() for path in address.findall(text)}
    assert {path for _, path in named} >= {"docs/tutorial.ipynb", "examples/homework.py"}
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).is_file()] == []
    assert "colab" not in re.sub(re.escape(HOSTED), "", " ".join(PAGES.values()))  # no address of another form


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_each_notebook_installs_torchcaps_where_it_is_hosted(path: Path) -> None:
    """The page for lecturers has its address, the notebook too, and its first cell of code installs torchcaps."""
    address = f"({HOSTED}{path.relative_to(ROOT).as_posix()})"
    assert address in PAGES["docs/teach.md"]
    assert address in PAGES[f"docs/{path.name}"]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    ((name, extra, repository),) = INSTALL.findall(first)
    assert (name, repository) == (PROJECT["name"], REPOSITORY)
    assert extra in PROJECT["optional-dependencies"]
    assert f'find_spec("{name}") is None' in first


def test_students_are_not_one_click_from_the_answers() -> None:
    linked = [page for page, text in PAGES.items() if "](lesson-answers" in text or 'href="lesson-answers' in text]
    assert linked == []


def test_the_answers_to_the_sheet_are_the_numbers_of_the_library() -> None:
    text = PAGES["docs/lesson-answers.md"]
    votes = torch.tensor([[[[1.0, 0], [0, 1]], [[1, 0], [0, -1]], [[-1, 0], [0, 2]]]])  # the example by hand
    rounds = torchcaps.routing_rounds(votes, num_iterations=3)
    rows = {f"length of output {j}": [each.capsules[0, j].norm() for each in rounds] for j in range(2)}
    rows |= {f"coupling of input {i} with output 1": [each.coupling[0, i, 1] for each in rounds] for i in range(3)}
    for name, numbers in rows.items():
        row = f"| {name} | "
        assert row + " | ".join(f"{number:.2f}" for number in numbers) + " |" in text
        assert row in PAGES["docs/lesson-sheet.md"]
    squashed = [n**2 / (1 + n**2) for n in (0.5, 1, 2, 3)]
    assert f"Squash: {', '.join(f'{number:.2f}' for number in squashed)}." in text


def test_the_page_for_lecturers_counts_the_words_to_read_and_the_blanks() -> None:
    routing = PAGES["docs/routing.md"].split("## What routing does in a trained network")[1].split("\n## ")[0]
    answers = PAGES["docs/lesson-answers.md"].split("## Exercises")[0]
    said = re.search(
        r"about ([\d,]+) words, or (\d+) minutes.*about \d+ actions.* (\d+) blanks", PAGES["docs/teach.md"], re.DOTALL
    )
    assert said
    words, minutes, blanks = (int(number.replace(",", "")) for number in said.groups())
    texts = (PAGES["docs/lesson-sheet.md"], answers, routing)
    assert abs(sum(len(text.split()) for text in texts) - words) <= 100
    assert minutes == round(words / 200)
    parts = PAGES["docs/lesson-sheet.md"].split("## A. ")[1].split("## C. ")[0]
    assert len(re.findall(r"(?:\\_)+", parts)) == blanks
