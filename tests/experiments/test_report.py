"""What is shown follows from the recorded runs, and from nothing else."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.report import main, show
from experiments.store import RESULTS
from experiments.table import Table

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / RESULTS
CURVE = {"kind": "rotation", "strengths": [-30.0, 0.0, 30.0], "accuracy": [0.5, 0.9, 0.7], "num_images": 10}
ATTACK = {"kind": "pgd-scores", "strengths": [0.0, 0.1], "accuracy": [0.9, 0.25], "num_images": 5}
MEASURES = {"rotation": CURVE, "pgd-scores": ATTACK}
LAST, CHOSEN = "test error, last epoch", "test error, chosen epoch"


def page_of(table: Table, results: Path = RESULTS) -> str:
    return "\n\n".join(show(table, results))


def cells(page: str, row: str) -> dict[str, str]:
    """The cells of a row, by their headings."""
    head: Sequence[str] = []
    for line in page.splitlines():
        values = [cell.strip() for cell in line.strip("|").split("|")]
        if values[0] == "row":
            head = values
        elif values[0] == f"`{row}`":
            return dict(zip(head, values, strict=True))
    return {}


def test_a_row_is_the_mean_and_deviation_of_its_seeds(tiny: Table, record) -> None:
    for seed, error in enumerate((2.0, 3.0, 4.0)):
        record(tiny.rows[0], seed, last=error, best=0.5 + error / 10)
    assert cells(page_of(tiny), "plain") == {
        "row": "`plain`",
        "": "the plain",
        "seeds": "3",
        LAST: "3.00 ± 1.00 %",
        CHOSEN: "0.800 ± 0.100 %",
        "epochs": "2",
        "parameters": "1,234,567",
        "time": "1 min 01 s",
        "of an epoch": "30 s",
        "memory, MiB": "502",
        "difference, 95 % interval": "–",
        "published": "0.25 %",
    }


def test_runs_that_diverged_are_counted_and_runs_of_other_settings_left_out(tiny: Table, record) -> None:
    plain, measured, _ = tiny.rows
    record(plain, 0, last=2.0)
    record(plain, 1, diverged="NaN")
    record(dataclasses.replace(plain, overrides={**plain.overrides, "epochs": 100}), 2, last=5.0)
    record(measured, measures=MEASURES | {"rotation": CURVE | {"num_images": 9}})
    page = page_of(tiny)
    assert (cells(page, "plain")["seeds"], cells(page, "plain")[LAST]) == ("1 and 1 diverged", "2.00 %")
    assert "Not run yet: measured, large." in page, "measured on fewer images"


def test_measures_have_columns_one_s_own_too(tiny: Table, record) -> None:
    _, measured, _ = tiny.rows
    own = dataclasses.replace(measured, name="own", measures={"colour": lambda run, test: {"share": 0.5}})
    moved = dataclasses.replace(measured, name="moved", measures={"affnist": None})
    table = dataclasses.replace(tiny, rows=(measured, own, moved))
    record(measured, measures=MEASURES)
    for seed, share in enumerate((0.25, 0.75)):
        record(own, seed, measures={"colour": {"share": share}})
    for seed, source in enumerate(("made", "made", "original")):
        record(moved, seed, measures={"affnist": {"accuracy": 0.79, "images": 320_000, "source": source}})
    page = page_of(table)
    row = cells(page, "measured")
    assert (row["accuracy, turned by ±30°"], row["PGD on the scores, ε = 0.1"]) == ("60.00 %", "25.00 %")
    assert cells(page, "own")["accuracy, turned by ±30°"] == "–"
    assert cells(page, "own")["colour: share"] == "0.5 ± 0.35"
    assert cells(page, "moved")["affNIST accuracy (made images)"] == "79.00 ± 0.00 %; 2 seeds"


def test_rows_of_a_group_are_together_and_pairs_of_seeds_are_compared(tiny: Table, record) -> None:
    plain = dataclasses.replace(tiny.rows[0], group="Dogs", measures={"latency": None, "coupling": 40})
    a = dataclasses.replace(plain, name="a")
    b = dataclasses.replace(a, name="b", compared_to="a")
    c = dataclasses.replace(tiny.rows[0], name="c", group="Cats")
    measured = {"latency": {"milliseconds": 1.5}, "coupling": {"entropy": 0.25, "dead": 0.1, "images": 40}}
    for seed, (one, other) in enumerate([(2.0, 3.0), (4.0, 4.0), (3.0, 5.0)]):
        record(a, seed, last=one, measures=measured)
        record(b, seed, last=other, measures=measured)
    record(b, 3, last=90.0, measures=measured)  # a has no such seed
    record(c)
    page = page_of(dataclasses.replace(tiny, rows=(a, b, c)))
    places = [page.index(each) for each in ("## Dogs", "| `a`", "| `b`", "## Cats", "| `c`")]
    assert places == sorted(places)
    # differences 1, 0, 2: mean 1, deviation 1; Student's t of two degrees of freedom is 4.303
    found = cells(page, "b")
    assert found["difference, 95 % interval"] == "+1.00 (-1.48 to +3.48)"
    assert (found["one image, ms"], found["entropy of coupling"], found["dead capsules"]) == ("1.50", "0.25", "0.10")


def test_a_search_shows_validation_images_only(tiny: Table, record) -> None:
    record(tiny.rows[0], 7, images={"train": 100, "validation": 40, "test": 1})
    found = cells(page_of(tiny), "plain")
    assert (found["validation error, last epoch"], found["validation loss, last epoch"]) == ("1.50 %", "0.0500")
    assert LAST not in found


def test_the_line_that_makes_a_row_again_what_it_ran_on_and_what_is_missing_are_shown(tiny: Table, record) -> None:
    record(tiny.rows[0], 0)
    gpu = {"processor": "x", "cores": 1, "threads": 16, "device": "cuda", "processes": 2, "gpu": "Big GPU"}
    record(tiny.rows[0], 2, hardware=gpu, precision="bf16")
    page, versions = page_of(tiny), "torchcaps 9.9, torch 3.1, python 3.14"
    for words in (
        "\npython experiments/run.py tiny.py --row plain --seeds 3 --precision bf16 --results runs/again\n",
        f"Computed on Abacus, 1 thread, float32, {versions}; Big GPU, 2 processes, bfloat16, {versions}.",
        "Not run yet: measured, large.",
    ):
        assert words in page


@pytest.mark.slow
def test_the_committed_page_is_what_the_recorded_runs_give(
    recorded: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.page.Page", lambda _: recorded["page"])
    assert main(["--results", str(RECORDED), "--page", "docs/results.md"]) == 0
    committed = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert Path("docs/results.md").read_text(encoding="utf-8") == committed, "write it: python experiments/report.py"
    drawn = {file.name for file in Path("docs/images").iterdir()}
    assert drawn == {"results-differences.png", "results-curves.png", "results-pgd.png"}
    assert all(f"(images/{name})" in committed and (ROOT / "docs/images" / name).exists() for name in drawn)
