"""The page follows from the runs, and from nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.report import main, write_report
from experiments.table import SHIPPED, Row, Table, load_table
from torchcaps.errors import InputError

ROOT = Path(__file__).parents[2]
CURVE = {"kind": "rotation", "strengths": [-30.0, 0.0, 30.0], "accuracy": [0.5, 0.9, 0.7], "num_images": 10}
ATTACK = {"kind": "pgd-scores", "strengths": [0.0, 0.1], "accuracy": [0.9, 0.25], "num_images": 5}
MEASURES = {"rotation": CURVE, "pgd-scores": ATTACK}


def page_of(*tables: Table) -> str:
    return write_report(tables, Path("results"), Path("page.md"))[0].read_text(encoding="utf-8")


def with_rows(table: Table, *rows: Row, **fields: Any) -> Table:
    return dataclasses.replace(table, rows=rows, **fields)


def cells(page: str, row: str) -> dict[str, str]:
    """The cells of a row in all tables, by their headings."""
    found: dict[str, str] = {}
    head: Sequence[str] = []
    for line in page.splitlines():
        values = [cell.strip() for cell in line.strip("|").split("|")]
        if values[0] == "row":
            head = values
        elif values[0].partition("<br>")[0] == f"`{row}`":
            found = dict(zip(head, values, strict=True)) | found
    return found


def test_a_row_is_the_mean_and_deviation_of_its_seeds(tiny: Table, write_log) -> None:
    for seed, error in enumerate((2.0, 3.0, 4.0)):
        write_log(tiny, "plain", seed, last=error, best=0.5 + error / 10)
    assert cells(page_of(tiny), "plain") == {
        "row": "`plain`<br>the plain",
        "seeds": "3",
        "test error, last epoch": "3.00 ± 1.00 %",
        "test error, chosen epoch": "0.800 ± 0.100 %",
        "epochs": "2",
        "parameters": "1,234,567",
        "time": "1 min 01 s",
        "of an epoch": "30 s",
        "memory, MiB": "502",
        "published": "0.25 %",
    }


def test_runs_that_diverged_are_counted_but_not_averaged(tiny: Table, write_log) -> None:
    write_log(tiny, "plain", 0, last=2.0)
    write_log(tiny, "plain", 1, diverged=True)
    write_log(tiny, "measured", 0, diverged=True)
    row = cells(page_of(tiny), "plain")
    assert (row["seeds"], row["test error, last epoch"]) == ("2, of which 1 diverged", "2.00 %")
    row = cells(page_of(tiny), "measured")
    assert (row["seeds"], row["test error, last epoch"]) == ("1, of which 1 diverged", "–")


def test_measures_have_columns_and_the_best_is_bold(tiny: Table, write_log) -> None:
    plain, measured, large = tiny.rows
    own = dataclasses.replace(measured, name="own", measures={"colour": lambda run, test: {"share": 0.5}})
    again = dataclasses.replace(measured, name="again")
    table = with_rows(tiny, plain, measured, large, again, own)
    write_log(table, "plain", last=2.0)
    write_log(table, "measured", last=1.8, measures=MEASURES)
    write_log(table, "again", last=1.9, measures=MEASURES | {"rotation": CURVE | {"accuracy": [0.4, 0.9, 0.4]}})
    for seed, share in enumerate((0.25, 0.75)):
        write_log(table, "own", seed, measures={"colour": {"share": share}})
    page = page_of(table)
    row = cells(page, "measured")
    assert (row["accuracy, turned by ±30°"], row["PGD on the scores, ε = 0.1"]) == ("**60.00 %**", "**25.00 %**")
    assert row["test error, last epoch"] == "**1.80 %**"
    assert cells(page, "again")["accuracy, turned by ±30°"] == "40.00 %"
    assert cells(page, "plain")["accuracy, turned by ±30°"] == "–"
    assert cells(page, "own")["colour: share"] == "0.5 ± 0.35"


def test_matched_accuracy_and_affnist_have_columns(tiny: Table, write_log) -> None:
    plain = tiny.rows[0]
    row = dataclasses.replace(plain, overrides={**plain.overrides, "stop_at": 0.98}, measures={"affnist": None})
    table = with_rows(tiny, row, figures=("affnist", "errors", "iterations", "epochs", "robustness"))
    for seed, (source, best) in enumerate([("made", 0.985), ("made", 0.985), ("original", 0.97)]):
        validation = {"best": {"accuracy": best}, "last": {"accuracy": 0.9, "loss": 0.3}}
        measures = {"affnist": {"accuracy": 0.79, "images": 320_000, "source": source}}
        write_log(table, "plain", seed, measures=measures, validation=validation)
    found = cells(page_of(table), "plain")
    assert found["validation accuracy reached"] == "98.00 ± 0.87 %; 2 of 3 reached the target"
    assert found["affNIST accuracy (made images)"] == "79.00 ± 0.00 %; 2 seeds"
    assert found["affNIST accuracy (original images)"] == "79.00 %; 1 seed"
    drawn = sorted(file.name for file in Path("images").iterdir())
    assert drawn == [f"results-tiny-{kind}.png" for kind in ("affnist", "epochs", "errors", "iterations")]


def test_rows_of_a_group_have_a_grid_of_their_own_and_pairs_are_compared(tiny: Table, write_log) -> None:
    plain = dataclasses.replace(tiny.rows[0], group="Dogs", measures={"latency": None, "coupling": 40})
    a = dataclasses.replace(plain, name="a", published_error=None)
    b = dataclasses.replace(a, name="b", compared_to="a")
    table = with_rows(tiny, a, b, dataclasses.replace(tiny.rows[0], name="c", group="Cats"))
    measured = {"latency": {"milliseconds": 1.5}, "coupling": {"entropy": 0.25, "dead": 0.1, "images": 40}}
    for seed, (one, other) in enumerate([(2.0, 3.0), (4.0, 4.0), (3.0, 5.0)]):
        write_log(table, "a", seed, last=one, measures=measured)
        write_log(table, "b", seed, last=other, measures=measured)
    write_log(table, "b", 3, last=90.0, measures=measured)  # a has no such seed
    write_log(table, "c")
    page = page_of(table)
    dogs, cats = page.index("#### Dogs"), page.index("#### Cats")
    assert dogs < page.index("| `a`<br>") < page.index("| `b`<br>") < cats < page.index("| `c`<br>")
    assert "published" not in page[dogs:cats]
    # differences 1, 0, 2: mean 1, deviation 1; Student's t of two degrees of freedom is 4.303
    assert cells(page, "b")["difference, 95 % interval"] == "+1.00 (-1.48 to +3.48)"
    found = cells(page[page.index("**Dogs**") :], "b")
    assert [found[name] for name in ("one image, ms", "entropy of coupling", "dead capsules")] == [
        "1.50",
        "0.25",
        "0.10",
    ]


def test_a_search_shows_validation_images_only(tiny: Table, write_log) -> None:
    table = with_rows(tiny, dataclasses.replace(tiny.rows[0], first_seed=7), judged_on="validation")
    write_log(table, "plain", 7)
    page = page_of(table)
    found = cells(page, "plain")
    assert (found["validation error, last epoch"], found["validation loss, last epoch"]) == ("1.50 %", "0.0500")
    assert "test error" not in page[page.index("### Runs") :]


def test_the_page_has_the_words_the_commands_and_what_the_rows_ran_on(tiny: Table, write_log) -> None:
    write_log(tiny, "plain", 0)
    gpu = {"processor": "x", "cores": 1, "threads": 16, "device": "cuda", "processes": 2, "gpu": "Big GPU"}
    folder = write_log(tiny, "plain", 2, hardware=gpu, precision="bf16")
    (folder.parents[1] / "findings.md").write_text("Is it small?\n\n**Answer.** It **is**.\n", encoding="utf-8")
    page, versions = page_of(tiny), "torchcaps 9.9, torch 3.1, python 3.14"
    for words in (
        "## Tiny networks\n\nIs it small?\n\n**Answer.** It **is**.\n\n### Runs\n\n",
        "`python experiments/run.py tiny.py` makes those of the small rows.",
        "`python experiments/run.py tiny.py --row ROW --seeds 3 --results runs/again` makes the runs of a row again.",
        f"Computed on Abacus, 1 thread, float32, {versions}; Big GPU, 2 processes, bfloat16, {versions}.",
        "Not run yet: 2 rows, which `python experiments/run.py tiny.py --list` names.",
    ):
        assert words in page


def test_a_run_of_other_settings_is_not_counted(tiny: Table, write_log) -> None:
    config = write_log(tiny, "plain", 0) / "config.json"
    write_log(tiny, "plain", 1, last=5.0)
    values = json.loads(config.read_text())
    values["recipe"]["epochs"] = 100
    config.write_text(json.dumps(values))
    page = page_of(tiny)
    assert cells(page, "plain")["seeds"] == "1"
    assert "with other settings than their rows have now, not counted above: `tiny/plain/seed-0`." in page


def test_runs_that_are_not_finished_or_measured_on_fewer_images_are_left_out(tiny: Table, write_log) -> None:
    (write_log(tiny, "plain") / "measures.json").unlink()
    write_log(tiny, "measured", measures=MEASURES | {"rotation": CURVE | {"num_images": 9}})
    assert "Not run yet: 3 rows" in page_of(tiny)


def test_a_damaged_log_is_named_and_the_page_left_as_it_was(tiny: Table, write_log) -> None:
    folder = write_log(tiny, "plain")
    page_of(tiny)
    before = Path("page.md").read_bytes()
    (folder / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"plain.seed-0.summary\.json is damaged or no summary"):
        page_of(tiny)
    assert Path("page.md").read_bytes() == before


def test_the_same_runs_give_the_same_bytes(tiny: Table, write_log) -> None:
    table = dataclasses.replace(tiny, figures=("errors", "iterations", "epochs", "robustness"))
    for seed in range(2):
        write_log(table, "plain", seed, last=1.0 + seed)
        write_log(table, "measured", seed, measures=MEASURES)
    first, second = (
        {path: path.read_bytes() for path in write_report([table], Path("results"), Path("page.md"))} for _ in range(2)
    )
    assert second == first
    assert len(first) == 5
    write_log(table, "plain", last=9.0)
    third = {path: path.read_bytes() for path in write_report([table], Path("results"), Path("page.md"))}
    assert {path.stem for path in first if first[path] != third[path]} == {
        "page",
        "results-tiny-errors",
        "results-tiny-iterations",
    }


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="a source distribution does not hold the results")
def test_the_committed_page_is_what_its_logs_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(ROOT / "results"), "--page", "page.md"]) == 0
    assert capsys.readouterr().out == "wrote page.md and 7 figures\n"
    committed = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert Path("page.md").read_text(encoding="utf-8") == committed, "write it again: python experiments/report.py"
    assert {file.name for file in Path("images").iterdir()} <= {file.name for file in (ROOT / "docs/images").iterdir()}
    assert all(load_table(name).title in committed for name in SHIPPED)
