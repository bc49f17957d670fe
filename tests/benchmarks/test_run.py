"""The one command for all ratios of docs/speed.md, run tiny: the numbers mean nothing, everything else is real."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_raises
from torchcaps.ops.dynamic_routing import get_working_memory, set_working_memory

ROOT = Path(__file__).parents[2]

PAGE = """# Speed
<!-- written by benchmarks/run.py -->
old
<!-- end of what benchmarks/run.py writes -->
the end
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import run

    return run


@pytest.fixture
def measuring(run: ModuleType) -> ModuleType:
    import measuring

    return measuring


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


@pytest.fixture
def _no_processes(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks, and the large layer's times, are made up; `test_a_process_of_its_own` has a real one."""
    monkeypatch.setattr(run.routing, "isolated", lambda _, name, *size: (8.0, 2.0) if name == "naive" else (1.0, 1.0))
    monkeypatch.setattr(run.training_step, "isolated", lambda _, name, *rest: 4.0 if name.startswith("naive") else 1.0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("_no_processes")
def test_one_command_checks_times_and_writes_everything(
    run: ModuleType, page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--quick", "--out", str(tmp_path / "out"), "--page", str(page)]) == 0

    found = {path.stem: rows(path) for path in (tmp_path / "out").iterdir()}
    assert found.keys() == {"routing", "training_step", "epoch"}
    for row in (row for part in found.values() for row in part):
        assert float(row["median_ms"] or row["peak_mib"]) > 0
        assert row["torch"] == torch.__version__
        assert row["threads"] == str(torch.get_num_threads())
        assert row["commit"]
    assert {row["contender"] for row in found["routing"]} == {"torchcaps", "naive", "reference"}
    assert {(row["what"], row["batch"]) for row in found["training_step"]} == {
        ("step", "2"),
        ("infer", "1"),
        ("infer", "2"),
    }
    assert {row["images"] for row in found["epoch"]} == {"4"}

    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Speed\n<!-- written by benchmarks/run.py -->\n\n| ratio | measured | goal | reached |")
    assert text.endswith("<!-- end of what benchmarks/run.py writes -->\nthe end\n")
    assert "old" not in text
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    shown = capsys.readouterr().out
    assert all(line[0].removeprefix("| ") in shown for line in table)
    assert {line[3] for line in table} <= {"yes", "**no**"}
    by_name = {line[0].removeprefix("| "): line[1:4] for line in table}
    assert by_name["large layer, peak memory: torchcaps ÷ naive"] == ["0.5", "≤ 0.09", "**no**"]
    assert by_name["large layer, time: torchcaps ÷ naive"] == ["0.125", "≤ 0.12", "**no**"]
    assert by_name["step, peak memory: torchcaps ÷ naive"] == ["0.25", "≤ 0.33", "yes"]
    for what in ("routing, forward + backward, full", "step, bf16 stopped", "one-image inference", "MNIST epoch"):
        assert any(name.startswith(what) for name in by_name), what


def _half(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: 0.5 * function(*arguments)


@pytest.mark.parametrize(
    ("part", "broken", "say"),
    [
        ("routing", "torchcaps", "weights' gradient: torchcaps is"),
        ("routing", "naive", "capsules: the naive formulation computes something else"),
        ("training_step", "naive", "gradients are"),
    ],
)
def test_wrong_results_stop_it(
    run: ModuleType,
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: str,
    broken: str,
    say: str,
) -> None:
    module: Any = getattr(run, part)
    if part == "routing":
        monkeypatch.setitem(module.CONTENDERS, broken, _half(module.CONTENDERS[broken]))
    else:
        monkeypatch.setattr(module, "naive_routing", _half(module.naive_routing))
    assert run.main(["--quick", "--out", str(tmp_path / "out"), "--page", str(page)]) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith("wrong results, nothing was timed:\n")
    assert say in wrong
    assert not (tmp_path / "out").exists()
    assert page.read_text(encoding="utf-8") == PAGE


@pytest.mark.usefixtures("_no_processes")
def test_a_part_alone_leaves_the_page_as_it_is(run: ModuleType, page: Path, tmp_path: Path) -> None:
    arguments = ["routing", "--quick", "--no-large", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert run.main([*arguments, "--page", str(page)]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["routing.csv"]
    assert {row["I"] for row in rows(tmp_path / "out" / "routing.csv")} == {"36"}
    assert page.read_text(encoding="utf-8") == PAGE


def test_a_part_that_is_not_there(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert_raises(SystemExit, run.main, ["routine"], say="2")
    assert "there is no part routine; parts are routing, training_step, epoch" in capsys.readouterr().err


def test_a_page_without_a_place_for_the_table_is_refused_before_anything_is_timed(
    run: ModuleType, page: Path, tmp_path: Path
) -> None:
    page.write_text("# Speed\n", encoding="utf-8")
    assert_raises(
        SystemExit,
        run.main,
        ["--quick", "--out", str(tmp_path / "out"), "--page", str(page)],
        say="the page has no place for the table",
    )
    assert not (tmp_path / "out").exists()


def test_the_page_in_docs_has_a_place_for_the_table(run: ModuleType, measuring: ModuleType) -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert "new table" in measuring.replace_between(text, run.BEGIN, run.END, "new table")


# ---- the statistic


def test_contenders_take_turns_and_change_places(measuring: ModuleType) -> None:
    calls: list[str] = []
    found = measuring.in_turns({name: lambda name=name: calls.append(name) or name for name in "abc"}, 2, warm_up=1)
    assert "".join(calls) == "cbaabccba"
    assert found == {"a": ["a", "a"], "b": ["b", "b"], "c": ["c", "c"]}


def test_a_ratio_within_rounds_does_not_see_a_machine_that_slows_down(measuring: ModuleType) -> None:
    speeds = [1, 1, 1, 9, 9, 9, 9]  # of the machine, by round
    under, over = [10.0 * speed for speed in speeds], [12.0 * speed for speed in speeds]
    over[1] = 300.0  # something struck one of the two
    found = measuring.ratio(over, under)
    assert found.value == pytest.approx(1.2)
    assert (found.low, found.high, found.rounds) == (pytest.approx(1.2), pytest.approx(1.2), 7)
    assert found.of_medians == pytest.approx(1.2)
    under[3] = 10.0  # now the median times come from two halves of the machine's day
    assert measuring.ratio(over, under).of_medians == pytest.approx(10.8)
    assert measuring.ratio(over, under).value == pytest.approx(1.2)
    assert measuring.ratio([2.0], [4.0]) == (0.5, 0.5, 0.5, 0.5, 1)


def test_figures_are_held_against_their_goals(measuring: ModuleType) -> None:
    for value, at_least, reached in ((1.0, True, True), (0.9, True, False), (1.0, False, True), (1.1, False, False)):
        figure = measuring.Figure("what", value, 1.0, at_least)
        assert figure.reached is reached
        assert figure.cells[3] == ("yes" if reached else "**no**")
        assert len(figure.cells) == len(measuring.HEADER)


def test_a_process_of_its_own(run: ModuleType, measuring: ModuleType) -> None:
    """It computes with the same threads and working memory, and its peak is its own."""
    before = get_working_memory()
    try:
        set_working_memory(0.5)
        elapsed, peak = measuring.isolated(run.routing.probe, "torchcaps", 4, 600, 10, 16, 8)
    finally:
        set_working_memory(before)
    assert elapsed > 0
    assert isnan(peak) if sys.platform == "win32" else 3 < peak < 300  # MiB; weights and their gradient are 5.9
