"""The audit, the leaderboard and the paper follow from the records."""

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.audit import KINDS, Audit
from experiments.leaderboard import leaderboard
from experiments.page import TESTS
from experiments.pages import DATA, PAGES, main
from experiments.paper import EQUAL, FIGURES
from experiments.store import RESULTS
from experiments.zoo import HEADS
from torchcaps.testing.mistakes import LOOKS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / RESULTS


@pytest.mark.slow
def test_the_committed_pages_are_what_the_records_give(
    tmp_path: Path, recorded: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pages.Page", lambda _: recorded["page"])
    assert main(["--results", str(RECORDED), "--docs", str(tmp_path)]) == 0
    for name in PAGES:
        committed = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") == committed, (
            "write it: python experiments/pages.py"
        )
    for name in DATA:
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / "docs" / name).read_text(encoding="utf-8")
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for name in FIGURES:
        assert f"(images/paper-{name}.png)" in text + (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")
        assert (ROOT / f"docs/images/paper-{name}.png").exists()


def test_the_audit_counts_repositories_by_finding() -> None:
    lines = [
        {"repository": "a/b", "commit": "1", "field": "images", "layer": "src/x.py", "findings": {}},
        {
            "repository": "c/d",
            "commit": "2",
            "field": "text",
            "layer": "y.py",
            "findings": {
                "nan-at-zero": {"where": "u_v.py:3", "gradients_only": True},
                "mixes-images": {"where": "7", "change": [0.5]},
            },
        },
        {
            "repository": "e/f",
            "commit": "3",
            "field": "text",
            "layer": "z.py",
            "findings": {"nan-at-zero": {"where": "4–5"}},
        },
    ]
    audit = Audit(lines)
    assert (audit.number, audit.without, audit.wrong) == (3, 1, 1)
    assert audit.count("nan-at-zero") == 2
    assert list(audit.rows()) == [
        "| [c/<wbr>d](https://github.com/c/d) 2 | `nan-at-zero` (gradients only), `mixes-images` (0.50) "
        "| y.py, line 7; u\\_<wbr>v.py, line 3 |",
    ]
    assert audit.csv().splitlines() == [
        "repository,commit,field,findings,where",
        "a/b,1,images,none,x.py",
        'c/d,2,text,"nan-at-zero (gradients only), mixes-images (0.50)","y.py, line 7; u_v.py, line 3"',
        'e/f,3,text,nan-at-zero,"z.py, lines 4–5"',
    ]


def test_every_recorded_finding_is_one_of_diagnose(recorded: Mapping[str, Any]) -> None:
    found = {kind for line in recorded["audit"].lines for kind in line["findings"]}
    assert found <= KINDS.keys() <= LOOKS.keys()
    names = [line["repository"] for line in recorded["audit"].lines]
    assert len(set(names)) == len(names) >= 20


def test_counts_on_pages_that_are_written_by_hand_are_those_of_the_audit(recorded: Mapping[str, Any]) -> None:
    audit = recorded["audit"]
    for page in ("README.md", "docs/index.md"):
        assert f"{audit.wrong} of {audit.number} public" in (ROOT / page).read_text(encoding="utf-8")
    assert f"in {audit.number} repositories" in (ROOT / "docs/own-routing.md").read_text(encoding="utf-8")


def test_every_routing_has_a_row_on_each_board_and_the_best_are_first(recorded: Mapping[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(leaderboard(recorded["page"]))))
    titles = {title for title, _ in HEADS.values()}
    for test in TESTS.values():
        board = [row for row in rows if row["test"] == test]
        assert {row["head"] for row in board} == titles
        errors = [float(row["error, chosen epoch"].split()[0]) for row in board if int(row["seeds"])]
        assert errors == sorted(errors)
        assert errors
        for row in board:
            assert row["command"].endswith("--results runs/again") == (row["error, chosen epoch"] != "not run yet")


def test_the_board_shows_mean_and_deviation_of_both_epochs(recorded: Mapping[str, Any]) -> None:
    runs = recorded["page"].rows["zoo/mnist-em"]
    rows = csv.DictReader(io.StringIO(leaderboard(recorded["page"])))
    (row,) = (row for row in rows if row["test"] == "MNIST" and row["head"].startswith("EM routing, 2"))
    last, chosen = (float(row[name].split()[0]) for name in ("error, last epoch", "error, chosen epoch"))
    assert last == pytest.approx(sum(run.error() for run in runs) / len(runs), abs=1e-3)
    assert chosen == pytest.approx(sum(run.error("best") for run in runs) / len(runs), abs=1e-3)
    assert row["command"] == "python experiments/run.py zoo --row mnist-em --seeds 3 --results runs/again"


def test_the_readme_has_the_numbers_of_the_records(recorded: Mapping[str, Any]) -> None:
    """Of the comparisons with sources, of MNIST, and of a step beside common code."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    records = recorded["records"]
    for number, presets in (("{} comparisons", EQUAL), ("({})", ["torch-notebook"]), ("({})", ["keras-tutorial"])):
        assert number.format(records.comparisons(*presets)) in readme
    page = recorded["page"]
    accuracies = {f"{100 - float(page.error(row).split()[0]):.2f}" for row in ("mnist/compact", "mnist/cnn-twin-long")}
    assert all(f"{accuracy} ± 0.03 %" in readme for accuracy in accuracies)
    ratios = [records.ratio("step, full: naive ÷ torchcaps", isa) for isa in ("avx2", "avx512")]
    assert all(5 <= ratio < 6.5 for ratio in ratios), "5 to 6 times faster"
    assert f"{records.compiled().split()[0]} times faster" in readme


def test_the_presets_that_equal_their_sources_are_those_of_the_table() -> None:
    table = (ROOT / "docs/networks.md").read_text(encoding="utf-8").partition("## Compared with")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \| original code \|", table, re.MULTILINE)) == set(EQUAL)


def test_each_paper_has_bibtex_and_ours_is_that_of_the_citation_file(recorded: Mapping[str, Any]) -> None:
    text = (ROOT / "docs/references.bib").read_text(encoding="utf-8")
    citation = recorded["citation"]
    for words in (citation["title"], f"version = {{{citation['version']}}}", citation["repository-code"]):
        assert words in text
        assert words in (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    keys = re.findall(r"^@article\{([a-z]+\d{4}\w+),$", text, re.MULTILINE)
    assert len(set(keys)) == len(keys) == len(citation["references"])
    assert "others" not in text
    assert text.count("{") == text.count("}")
