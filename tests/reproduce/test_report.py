"""The page follows from the logs, and from nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from torchcaps.errors import InputError
from torchcaps.registry import Registry
from torchcaps.reproduce import Measure, Table, write_report
from torchcaps.reproduce.estimate import Timing, write_timings
from torchcaps.reproduce.report import default_page

ROOT = Path(__file__).parents[2]
CURVE = {"kind": "rotation", "strengths": [-30.0, 0.0, 30.0], "accuracy": [0.5, 0.9, 0.7], "num_images": 10}
ATTACK = {"kind": "pgd-scores", "strengths": [0.0, 0.1], "accuracy": [0.9, 0.25], "num_images": 5}


def page_of(results: str = "results") -> str:
    return write_report(results, "docs/results.md")[0].read_text(encoding="utf-8")


def cells(page: str, row: str) -> dict[str, str]:
    """The cells of a row in all tables, by their headings."""
    found: dict[str, str] = {}
    head: list[str] = []
    for line in page.splitlines():
        values = [cell.strip() for cell in line.strip("|").split("|")]
        if values[0] == "row":
            head = values
        elif values[0].partition("<br>")[0] == f"`{row}`":
            found = dict(zip(head, values, strict=True)) | found
    return found


def test_a_row_is_the_mean_and_deviation_of_its_seeds(only_tiny: Table, write_log) -> None:
    for seed, error in enumerate((2.0, 3.0, 4.0)):
        write_log(only_tiny, "plain", seed, last=error, best=0.5 + error / 10)
    assert cells(page_of(), "plain") == {
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


def test_one_seed_has_no_deviation(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain", last=0.25)
    row = cells(page_of(), "plain")
    assert (row["seeds"], row["test error, last epoch"]) == ("1", "0.25 %")


def test_runs_that_diverged_are_counted_but_not_averaged(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain", 0, last=2.0)
    write_log(only_tiny, "plain", 1, diverged="NaN")
    row = cells(page_of(), "plain")
    assert (row["seeds"], row["test error, last epoch"]) == ("2, of which 1 diverged", "2.00 %")
    write_log(only_tiny, "measured", 0, diverged="NaN")
    row = cells(page_of(), "measured")
    assert (row["seeds"], row["test error, last epoch"]) == ("1, of which 1 diverged", "–")


def test_measures_have_columns(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "measured", measures={"rotation": CURVE, "pgd-scores": ATTACK})
    write_log(only_tiny, "plain")
    page = page_of()
    row = cells(page, "measured")
    assert (row["accuracy, turned by ±30°"], row["PGD on the scores, ε = 0.1"]) == ("60.00 %", "25.00 %")
    assert cells(page, "plain")["accuracy, turned by ±30°"] == "–"


def test_matched_accuracy_and_affnist_have_columns(
    only_tiny: Table, write_log, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchcaps.reproduce import Measure

    plain = only_tiny.rows[0]
    overrides = {**plain.overrides, "stop_at": 0.98}
    row = dataclasses.replace(plain, overrides=overrides, measures=(Measure(kind="affnist"),))
    table = dataclasses.replace(only_tiny, rows=(row,), figures=("affnist",))
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    measures = {"affnist": {"accuracy": 0.79, "images": 320_000, "source": "made"}}
    for seed, epochs in enumerate((3, 5)):
        validation = {"best": {"accuracy": 0.985}, "last": {"accuracy": 0.9, "loss": 0.3}}
        write_log(table, "plain", seed, measures=measures, epochs=epochs, validation=validation)
    found = cells(page_of(), "plain")
    assert found["validation accuracy reached"] == "98.50 ± 0.00 %"
    assert found["affNIST accuracy (made images)"] == "79.00 ± 0.00 %"
    assert found["epochs"] == "3–5"
    validation = {"best": {"accuracy": 0.97}, "last": {"accuracy": 0.99, "loss": 0.1}}
    measures["affnist"] |= {"source": "original", "accuracy": 0.6}
    write_log(table, "plain", 2, measures=measures, validation=validation)
    found = cells(page_of(), "plain")
    assert found["validation accuracy reached"] == "98.00 ± 0.87 %; 2 of 3 reached the target"
    assert found["affNIST accuracy (made images)"] == "79.00 ± 0.00 %; 2 seeds"
    assert found["affNIST accuracy (original images)"] == "60.00 %; 1 seed"
    assert Path("docs/images/results-tiny-small-affnist.png").exists()


def test_the_page_says_what_was_asked_and_how_and_what_it_ran_on(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain")
    page = page_of()
    for words in (
        "## Tiny networks",
        "Is it small?",
        "<summary>Protocol</summary>\n\nAs little as can be.",
        "Seconds.",
        "Minutes.",
    ):
        assert words in page
    assert "torchcaps reproduce tiny --row plain --seeds 1 --out runs/again --results runs/again/logs\n" in page
    assert "Computed on Abacus, 1 thread, float32; torchcaps 9.9, torch 3.1, python 3.14." in page
    assert "- `measured`: the measured, 1 epoch at batch 50" in page
    assert "- `large`: the large, 9 epochs at batch 50; published: 8.1 %" in page


def test_other_hardware_stands_beside_its_rows(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain", 0)
    hardware = {"processor": "x", "cores": 1, "threads": 16, "device": "cuda", "processes": 2, "gpu": "Big GPU"}
    write_log(only_tiny, "plain", 1, hardware=hardware, precision="bf16")
    write_log(only_tiny, "measured", 0, measures={"rotation": CURVE, "pgd-scores": ATTACK})
    page = page_of()
    assert "- Abacus, 1 thread, float32; torchcaps 9.9, torch 3.1, python 3.14: `plain`, `measured`\n" in page
    assert "- Big GPU, 2 processes, bfloat16; torchcaps 9.9, torch 3.1, python 3.14: `plain`\n" in page


def test_many_rows_are_named_in_short(only_tiny: Table, write_log, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(dataclasses.replace(only_tiny.rows[0], name=f"row-{n}") for n in range(40))
    table = dataclasses.replace(only_tiny, rows=rows, figures=())
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    for n in range(20):
        write_log(table, f"row-{n}")
    page = page_of()
    assert "<summary>Not run yet: 20 rows, 3 seeds each</summary>" in page
    assert "Each trains 2 epochs at batch 50; `torchcaps reproduce tiny --list` names them." in page
    assert re.findall(r"torchcaps reproduce tiny --row (\S+)", page) == ["ROW"]


ABACUS = {"processor": "Abacus", "cores": 2, "threads": 1, "device": "cpu"}


def test_how_long_runs_would_take_that_were_not_made(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain")
    assert "extrapolated" not in page_of()
    versions = {"torch": "3.1"}
    timing = Timing(seconds=36_100.0, hardware=ABACUS, versions=versions)
    assert write_timings(Path("results"), only_tiny, {"large": timing, "plain": timing}) == Path(
        "results/tiny/estimate.json"
    )
    page = page_of()
    assert "- `large`: the large, 9 epochs at batch 50, about 10 hours; published: 8.1 %\n" in page
    assert "- `measured`: the measured, 1 epoch at batch 50\n" in page
    assert (
        "extrapolated from a timed step of each row, not measured, on Abacus, 1 thread; torch 3.1 (`torchcaps "
        "reproduce tiny --budget full --estimate`); cores that are shared take longer. All of them with 5 seeds: about "
        "50 hours.\n"
    ) in page
    assert page.count("extrapolated") == 1, "the row of the small budget was run"
    write_timings(Path("results"), only_tiny, {"measured": dataclasses.replace(timing, seconds=60.0)})
    page = page_of()
    assert "- `measured`: the measured, 1 epoch at batch 50, about 1 min 00 s\n" in page
    assert "about 10 hours" in page, "that of the other row is kept"


def test_times_of_two_machines_have_no_sum_and_those_up_to_a_target_are_bounds(
    only_tiny: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, measured, _ = only_tiny.rows
    rows = (dataclasses.replace(plain, overrides={**plain.overrides, "stop_at": 0.98}), measured)
    table = dataclasses.replace(only_tiny, rows=rows)
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    timings = {row.name: Timing(36_000.0, ABACUS, {"torch": "3.1"}) for row in rows}
    write_timings(Path("results"), table, timings)
    page = page_of()
    assert "- `plain`: the plain, up to 2 epochs at batch 50, at most about 10 hours; published" in page
    assert "- `measured`: the measured, 1 epoch at batch 50, about 10 hours\n" in page
    assert "All of them with 3 seeds: at most about 60 hours." in page
    write_timings(Path("results"), table, {"plain": Timing(1.0, ABACUS | {"gpu": "Big GPU"}, {"torch": "3.1"})})
    page = page_of()
    assert "on Big GPU; torch 3.1 and Abacus, 1 thread; torch 3.1 (`" in page
    assert "All of them" not in page


def test_a_time_of_other_settings_is_not_shown(only_tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    write_timings(Path("results"), only_tiny, {"large": Timing(36_100.0, ABACUS, {})})
    assert "about 10 hours" in page_of()
    *others, large = only_tiny.rows
    longer = dataclasses.replace(large, overrides={**large.overrides, "epochs": 10})
    table = dataclasses.replace(only_tiny, rows=(*others, longer))
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    assert "about 10 hours" not in page_of()


def test_half_of_a_character_in_a_log_is_written_out(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain")
    for file in Path("results").rglob("summary.json"):
        summary = json.loads(file.read_text())
        summary["hardware"]["processor"] = "half \ud800"
        file.write_text(json.dumps(summary))
    assert r"half \ud800" in page_of()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"seconds": 1.0', '"seconds": "soon"', "row 'large': \"seconds\" must be a number, got 'soon'"),
        ('"seconds": 1.0', '"seconds": NaN', "row 'large': \"seconds\" must be a number, got nan"),
        ('"seconds": 1.0', f'"seconds": 1{"0" * 400}', "row 'large': \"seconds\" must be a number, got 1"),
        ('"processor"', '"procesor"', "row 'large' has no \"hardware.processor\", which must be a text"),
        ('"versions": {}', '"versions": []', "row 'large': \"versions\" must be an object of texts, got []"),
        ('{\n  "large": {', '{"small": 3, "large": {', "row 'small' has no \"seconds\", which must be a number"),
    ],
)
def test_a_damaged_file_of_times_is_named(only_tiny: Table, before: str, after: str, words: str) -> None:
    file = write_timings(Path("results"), only_tiny, {"large": Timing(1.0, ABACUS, {})})
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(InputError, match=f"estimate {re.escape(str(file))}: {re.escape(words)}.*writes it anew"):
        page_of()


def test_findings_are_taken_over_word_by_word(only_tiny: Table, write_log) -> None:
    folder = write_log(only_tiny, "plain").parents[1]
    assert "Answer." not in page_of().partition("## Tiny")[2]
    (folder / "findings.md").write_text("Capsules do **not** help here.\n", encoding="utf-8")
    page = page_of()
    assert "Is it small?\n\n**Answer.** Capsules do **not** help here.\n\n<details" in page
    assert "What was found" not in page
    (folder / "findings.md").write_text("They do not.\n\n#### Size\n\nIt *is* small.\n", encoding="utf-8")
    words = "**Answer.** They do not.\n\n### What was found\n\n#### Size\n\nIt *is* small.\n\n<details"
    assert words in page_of()


def test_the_best_of_a_column_is_bold(only_tiny: Table, write_log) -> None:
    write_log(only_tiny, "plain", last=2.0, best=1.5)
    assert "**2.00 %**" not in page_of(), "there is nothing to compare with"
    write_log(only_tiny, "measured", last=1.8, best=1.5, measures={"rotation": CURVE, "pgd-scores": ATTACK})
    page = page_of()
    first, second = cells(page, "plain"), cells(page, "measured")
    assert (first["test error, last epoch"], second["test error, last epoch"]) == ("2.00 %", "**1.80 %**")
    assert first["test error, chosen epoch"] == second["test error, chosen epoch"] == "**1.50 %**"
    assert first["memory, MiB"] == second["memory, MiB"] == "500"
    assert second["accuracy, turned by ±30°"] == "60.00 %"
    measured = only_tiny.rows[1]
    again = dataclasses.replace(measured, name="again")
    table = dataclasses.replace(only_tiny, rows=(*only_tiny.rows, again))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
        weak = CURVE | {"accuracy": [0.4, 0.9, 0.4]}
        write_log(table, "again", measures={"rotation": weak, "pgd-scores": ATTACK})
        page = page_of()
    assert cells(page, "measured")["accuracy, turned by ±30°"] == "**60.00 %**"
    assert cells(page, "again")["accuracy, turned by ±30°"] == "40.00 %"


def test_a_run_of_other_settings_is_not_counted(only_tiny: Table, write_log) -> None:
    config = write_log(only_tiny, "plain", 0) / "config.json"
    write_log(only_tiny, "plain", 1, last=5.0)
    values = json.loads(config.read_text())
    values["recipe"]["epochs"] = 100
    config.write_text(json.dumps(values))
    page = page_of()
    assert cells(page, "plain")["seeds"] == "1"
    assert "with other settings than their rows have now, not counted above: `tiny/plain/seed-0`." in page


# from the logs alone


def test_the_same_logs_give_the_same_bytes(drawn_tiny: Table, write_log) -> None:
    for seed in range(2):
        write_log(drawn_tiny, "plain", seed, last=1.0 + seed)
        write_log(drawn_tiny, "measured", seed, measures={"rotation": CURVE, "pgd-scores": ATTACK})
    first = {path: path.read_bytes() for path in write_report("results", "docs/results.md")}
    kinds = ("errors", "iterations", "epochs", "robustness")
    assert [path.name for path in first] == [
        "results.md",
        *(f"results-tiny-small-{kind}.png" for kind in kinds),
    ]
    for path in first:
        path.unlink()
    second = {path: path.read_bytes() for path in write_report("results", "docs/results.md")}
    assert second == first
    for target in re.findall(r"\]\((images/[^)]+)\)", first[Path("docs/results.md")].decode()):
        assert Path("docs", target) in first


def test_a_changed_log_changes_the_page_and_its_figures(drawn_tiny: Table, write_log) -> None:
    write_log(drawn_tiny, "plain", last=1.0)
    before = {path.name: path.read_bytes() for path in write_report("results", "docs/results.md")}
    write_log(drawn_tiny, "plain", last=9.0)
    after = {path.name: path.read_bytes() for path in write_report("results", "docs/results.md")}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"results.md", "results-tiny-small-errors.png", "results-tiny-small-iterations.png"}


def test_only_the_figures_asked_for_are_drawn_again(drawn_tiny: Table, write_log) -> None:
    write_log(drawn_tiny, "plain")
    page, *figures = write_report("results", "docs/results.md")
    for figure in figures:
        figure.write_bytes(b"old")
    figures[0].unlink()
    write_report("results", page, redraw=["another"])
    assert figures[0].stat().st_size > 1000, "a missing figure is drawn"
    assert all(figure.read_bytes() == b"old" for figure in figures[1:])
    write_report("results", page, redraw=["tiny"])
    assert all(figure.stat().st_size > 1000 for figure in figures)


def test_one_process_at_a_time_writes_the_page_from_the_logs_of_then(drawn_tiny: Table, write_log) -> None:
    """So that an older page never takes the place of a newer one."""
    write_log(drawn_tiny, "plain", 0)
    Path("docs").mkdir()
    with ThreadPoolExecutor(1) as other, FileLock("docs/.results.md.lock"):
        written = other.submit(page_of)
        time.sleep(0.3)
        assert not written.done()
        assert not Path("docs/results.md").exists()
        write_log(drawn_tiny, "plain", 1)
    assert cells(written.result(), "plain")["seeds"] == "2"
    assert not list(Path("docs").glob(".*")), "no lock is left"


def test_a_page_that_is_a_folder_is_refused_before_figures_are_drawn(drawn_tiny: Table, write_log) -> None:
    write_log(drawn_tiny, "plain")
    Path("docs/page").mkdir(parents=True)
    with pytest.raises(InputError, match=r"the page docs.page is a folder; name a file"):
        write_report("results", "docs/page")
    assert [path.name for path in Path("docs").iterdir()] == ["page"]


def test_the_command_runs_every_seed_that_is_shown(only_tiny: Table, write_log) -> None:
    for seed in (0, 2):
        write_log(only_tiny, "plain", seed)
    assert "torchcaps reproduce tiny --row plain --seeds 3 " in page_of()


def test_without_logs_the_page_says_what_could_be_run(only_tiny: Table) -> None:
    page = page_of("nowhere")
    assert "- `plain`: the plain, 2 epochs at batch 50; published: 0.25 %" in page
    assert not Path("docs/images").exists()


def test_a_damaged_log_is_named(only_tiny: Table, write_log) -> None:
    (write_log(only_tiny, "plain") / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"plain.seed-0.summary\.json is not valid JSON"):
        page_of()


@pytest.mark.parametrize("damaged", ["estimate.json", "findings.md"])
def test_a_damaged_file_is_found_before_a_figure_is_drawn(drawn_tiny: Table, write_log, damaged: str) -> None:
    folder = write_log(drawn_tiny, "plain", results=Path("again")).parents[1]
    (folder / damaged).write_bytes(b"\xff{")
    with pytest.raises(InputError, match=damaged):
        write_report("again")
    assert not list(Path("again").glob("images/*"))


def test_other_logs_have_a_page_of_their_own_beside_them(drawn_tiny: Table, write_log) -> None:
    assert default_page(Path("results")) == Path("docs/results.md")
    write_log(drawn_tiny, "plain", results=Path("again"))
    page, *figures = write_report("again")
    assert page == Path("again/results.md")
    assert {figure.parent for figure in figures} == {Path("again/images")}


# the page of this repository


def test_the_committed_page_is_what_its_logs_give(tmp_path: Path) -> None:
    if not (ROOT / "results").exists():
        pytest.skip("no results/ here: a source distribution does not hold it")
    committed = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", tmp_path / "docs" / "images")
    page, *figures = write_report(ROOT / "results", tmp_path / "docs" / "results.md", redraw=())
    assert page.read_text(encoding="utf-8") == committed, "write it again: torchcaps reproduce --report"
    for figure in figures:
        assert (ROOT / "docs" / "images" / figure.name).exists(), figure.name


def test_rows_of_a_group_have_a_grid_of_their_own_and_pairs_are_compared(
    tiny: Table, monkeypatch: pytest.MonkeyPatch, write_log
) -> None:
    plain = tiny.rows[0]
    latency = (Measure(kind="latency"), Measure(kind="coupling"))
    rows = (
        dataclasses.replace(plain, name="a", group="Dogs", measures=latency, published="–"),
        dataclasses.replace(plain, name="b", group="Dogs", compared_to="a", measures=latency, published="–"),
        dataclasses.replace(plain, name="c", group="Cats", published="0.25 %"),
    )
    table = dataclasses.replace(tiny, rows=rows)
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    measured = {"latency": {"milliseconds": 1.5}, "coupling": {"entropy": 0.25, "dead": 0.1, "images": 40}}
    for seed, (a, b) in enumerate([(2.0, 3.0), (4.0, 4.0), (3.0, 5.0)]):
        write_log(table, "a", seed, last=a, measures=measured)
        write_log(table, "b", seed, last=b, measures=measured)
    write_log(table, "b", 3, last=90.0, measures=measured)  # a has no such seed
    write_log(table, "c")
    page = page_of()
    dogs, cats = page.index("#### Dogs"), page.index("#### Cats")
    assert dogs < page.index("| `a`<br>") < page.index("| `b`<br>") < cats < page.index("| `c`<br>")
    assert "published" not in page[dogs:cats]
    assert "difference" not in page[cats : page.index("<details", cats)]
    assert cells(page, "a")["difference, 95 % interval"] == "–"
    # differences 1, 0, 2: mean 1, deviation 1; Student's t of two degrees of freedom is 4.303
    assert cells(page, "b")["difference, 95 % interval"] == "+1.00 (-1.48 to +3.48)"
    found = cells(page[page.index("**Dogs**") :], "b")
    assert found["one image, ms"] == "1.50"
    assert (found["entropy of coupling"], found["dead capsules"]) == ("0.25", "0.10")


def test_one_pair_has_no_interval(tiny: Table, monkeypatch: pytest.MonkeyPatch, write_log) -> None:
    rows = (tiny.rows[0], dataclasses.replace(tiny.rows[0], name="other", compared_to="plain"))
    table = dataclasses.replace(tiny, rows=rows)
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    write_log(table, "plain", last=2.5)
    write_log(table, "other", last=2.0)
    assert cells(page_of(), "other")["difference, 95 % interval"] == "-0.50"


def test_a_search_shows_validation_images_only(tiny: Table, monkeypatch: pytest.MonkeyPatch, write_log) -> None:
    table = dataclasses.replace(tiny, rows=(dataclasses.replace(tiny.rows[0], first_seed=7),), judged_on="validation")
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    write_log(table, "plain", 7)
    page = page_of()
    found = cells(page, "plain")
    assert (found["validation error, last epoch"], found["validation loss, last epoch"]) == ("1.50 %", "0.0500")
    assert "test error" not in page[page.index("### Small") :]
    assert "--row plain --seeds 1 " in page


def test_familiar_views_stand_beside_the_novel_ones(tiny: Table, monkeypatch: pytest.MonkeyPatch, write_log) -> None:
    table = dataclasses.replace(tiny, rows=(dataclasses.replace(tiny.rows[0], measures=(Measure(kind="familiar"),)),))
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    write_log(table, "plain", measures={"familiar": {"error": 0.04, "images": 9}})
    assert cells(page_of(), "plain")["error on familiar views"] == "4.00 %"
