"""``torchcaps reproduce`` on a table of tiny runs, in this process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from torchcaps.files import read_json, write_json
from torchcaps.registry import Registry
from torchcaps.reproduce import (
    Interrupted,
    Job,
    Measure,
    Outcome,
    Reproduction,
    Row,
    Table,
    Workers,
    list_tables,
    workers,
)

Cli = Callable[..., Any]

TINY = {
    "conv_channels": 4,
    "primary_types": 2,
    "decoder": False,
    "limit_train": 100,
    "limit_test": 40,
    "validation_size": 40,
    "batch_size": 50,
    "epochs": 1,
}


def make_table() -> Table:
    common: dict[str, Any] = {"preset": "sabour2017", "data": "digits", "budgets": ("small",)}
    return Table(
        name="tiny",
        title="Tiny networks",
        question="Is it small?",
        protocol="As little as can be.",
        budgets={"small": "Seconds.", "full": "Minutes."},
        rows=(
            Row(name="plain", title="plain", overrides=TINY, measures=(Measure(kind="rotation", images=5),), **common),
            Row(name="wild", title="wild", overrides=TINY | {"learning_rate": 1e30}, **common),
        ),
    )


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = make_table()
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    return table


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(self: Workers, function: Callable[[Any], Any], arguments: Iterable[Any]) -> Generator[Any, None, None]:
        for argument in arguments:
            try:
                yield argument, function(argument)
            except Exception as error:
                yield argument, error

    monkeypatch.setattr(Workers, "each", each)


@pytest.mark.usefixtures("tiny", "in_this_process")
def test_a_table_is_run_logged_and_reported(cli: Cli) -> None:
    result = cli("reproduce", "tiny", "--seeds", "2", "--accelerator", "cpu")
    assert (result.code, result.err) == (0, "")
    before, *parts = re.split(r"\n(?=tiny/)", result.out)
    assert [line.split()[:2] for line in before.splitlines() if line.startswith(("plain", "wild", "all"))] == [
        ["plain", "2"],
        ["wild", "2"],
        ["all", "4"],
    ]
    assert [part.partition("\n")[0] for part in parts] == [
        "tiny/plain, seed 0",
        "tiny/plain, seed 0: done; 3 of 4 runs left",
        "tiny/wild, seed 0",
        "tiny/wild, seed 0: diverged; 2 of 4 runs left",
        "tiny/plain, seed 1",
        "tiny/plain, seed 1: done; 1 of 4 runs left",
        "tiny/wild, seed 1",
        "tiny/wild, seed 1: diverged; 0 of 4 runs left",
    ]
    assert "All 4 runs of tiny are done (4 now, of which 2 diverged)" in result.out
    page = Path("docs/results.md").read_text(encoding="utf-8")
    assert "| `plain`<br>plain |" in page
    assert "| `plain` | 2 |" in page
    assert "| `wild` | 2, of which 2 diverged |" in page
    assert Path("docs/images/results-tiny-small-errors.png").exists()
    assert read_json("results/tiny/plain/seed-1/measures.json", "measures")["rotation"]["num_images"] == 5

    again = cli("reproduce", "tiny", "--seeds", "2", "--accelerator", "cpu")
    assert again.out == "\nAll 4 runs of tiny are done (0 now). Logs: results/tiny, page: docs/results.md\n"


@pytest.mark.usefixtures("tiny", "in_this_process")
def test_what_is_left_is_only_timed(cli: Cli) -> None:
    assert cli("reproduce", "tiny", "--row", "wild", "--seeds", "1", "--accelerator", "cpu").code == 0
    arguments = ("reproduce", "tiny", "--seeds", "1", "--estimate", "--accelerator", "cpu")
    result = cli(*arguments, "--results", "results")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("Times: results/tiny/estimate.json, page: docs/results.md\n")
    assert list(read_json("results/tiny/estimate.json", "estimate")) == ["plain"]
    assert "- `plain`: plain, 1 epoch at batch 50, about " in Path("docs/results.md").read_text(encoding="utf-8")
    assert not Path("runs/reproduce/tiny/plain").exists()
    assert cli("reproduce", "tiny", "--row", "plain", "--seeds", "1", "--accelerator", "cpu").code == 0
    assert cli(*arguments).out == "All 2 runs of tiny are done; there is nothing to time.\n"


@pytest.mark.usefixtures("tiny")
def test_what_others_work_on_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reproduction, "estimate", lambda self, workers: {})
    monkeypatch.setattr(Workers, "each", lambda self, function, jobs: ((job, Outcome.BUSY) for job in jobs))
    result = cli("reproduce", "tiny", "--seeds", "1")
    assert result.code == 0
    assert result.out.endswith("Other processes still work on tiny/plain, seed 0, tiny/wild, seed 0.\n")


def test_the_paper_s_tables_are_listed(cli: Cli) -> None:
    out = cli("reproduce", "--list").out
    for name in list_tables():
        assert re.search(rf"^{name}$", out, re.MULTILINE)
    assert "routing" in out
    assert "53 rows in the small budget, 53 in the full one." in out


@pytest.mark.usefixtures("tiny", "in_this_process")
def test_rows_are_listed_with_what_is_done(cli: Cli) -> None:
    assert cli("reproduce", "tiny", "--row", "wild", "--seeds", "2", "--accelerator", "cpu").code == 0
    lines = [line.split() for line in cli("reproduce", "tiny", "--list").out.splitlines()]
    assert ["plain", "plain", "small", "–"] in lines
    assert ["wild", "wild", "small", "2"] in lines


@pytest.mark.usefixtures("in_this_process")
def test_logs_of_other_settings_are_not_listed_as_done(cli: Cli, tiny: Table) -> None:
    assert cli("reproduce", "tiny", "--row", "wild", "--seeds", "1", "--accelerator", "cpu").code == 0
    config = Path("results/tiny/wild/seed-0/config.json")
    config.write_text(config.read_text().replace('"epochs": 1', '"epochs": 5'))
    lines = [line.split() for line in cli("reproduce", "tiny", "--list").out.splitlines()]
    assert ["wild", "wild", "small", "–"] in lines


@pytest.mark.usefixtures("tiny")
def test_the_report_alone(cli: Cli) -> None:
    result = cli("reproduce", "--report", "--results", "logs")
    assert result.out == f"wrote {Path('logs/results.md')} and 0 figures\n"
    assert "Not run yet" in Path("logs/results.md").read_text(encoding="utf-8")
    assert cli("reproduce", "--report", "--page", "elsewhere.md").out.startswith("wrote elsewhere.md")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tny"], ['no table "tny"', '"tiny"']),
        ([], ["name a table", "tiny", "--list"]),
        (["tiny", "--row", "plane"], ['"plane"', '"plain"']),
        (["tiny", "--report"], ["--report"]),
        (["tiny", "--jobs", "0"], ["--jobs", "0"]),
        (["--report", "--jobs", "2"], ["--jobs is for running a table, not for --report"]),
        (["--list", "--cluster", "x"], ["--cluster is for one table"]),
        (["tiny", "--seeds", "0"], ["--seeds", "0"]),
        (["tiny", "--budget", "large"], ["--budget", "large", "small", "full"]),
        # options that would do nothing
        (["--report", "--row", "plain"], ["--row is for running a table, not for --report", "leave it out"]),
        (["--report", "--seeds", "3"], ["--seeds is for running a table", "--report"]),
        (["--report", "--budget", "small"], ["--budget is for running a table", "--report"]),
        (["--report", "--estimate"], ["--estimate is for running a table, not for --report"]),
        (["tiny", "--list", "--estimate"], ["--estimate is for running a table, not for --list"]),
        (["tiny", "--list", "--row", "plain"], ["--row is for running a table, not for --list"]),
        (["tiny", "--list", "--page", "x.md"], ["--page is for running a table"]),
        (["--list", "--results", "logs"], ["--results is for one table"]),
        (["--list", "--out", "x"], ["--out is for one table"]),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_bad_input(cli: Cli, arguments: list[str], words: list[str]) -> None:
    result = cli("reproduce", *arguments)
    assert result.code == 2
    assert all(word in result.err for word in words), result.err
    assert not list(Path().iterdir()), "nothing is written"


@pytest.mark.usefixtures("in_this_process")
def test_data_that_are_missing_are_seen_before_the_first_run(cli: Cli, tiny: Table, monkeypatch: Any) -> None:
    row = dataclasses.replace(tiny.rows[0], name="missing", data="npz:nowhere.npz")
    table = dataclasses.replace(tiny, rows=(*tiny.rows, row))
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    result = cli("reproduce", "tiny", "--accelerator", "cpu")
    assert (result.code, "nowhere.npz" in result.err) == (2, True)
    assert not Path("runs").exists()


def test_a_stopped_table_says_how_it_goes_on(cli: Cli, tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> Generator[Any, None, None]:
        raise Interrupted(130)
        yield

    monkeypatch.setattr(Workers, "each", stopped)
    result = cli("reproduce", "tiny")
    assert (result.code, result.err) == (130, "stopped; the same command goes on from here\n")
    assert cli("reproduce", "tiny", "--estimate").err == "stopped; nothing was written\n"


@pytest.mark.usefixtures("tiny")
def test_a_run_that_fails_is_said_and_the_others_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def each(self: Workers, function: object, jobs: Iterable[Job]) -> Generator[Any, None, None]:
        for job in jobs:
            if job.row.name == "plain":
                yield job, ChildProcessError("the process was killed")
            else:
                write_json(job.log / "diverged.json", {"reason": "NaN"})
                write_json(job.log / "config.json", job.config.to_dict())
                yield job, Outcome.DIVERGED

    monkeypatch.setattr(Reproduction, "estimate", lambda self, workers: {})
    monkeypatch.setattr(Workers, "each", each)
    result = cli("reproduce", "tiny", "--seeds", "1")
    assert result.code == 2
    assert result.out.endswith("\ntiny/wild, seed 0: diverged; 0 of 2 runs left\n")
    assert result.err == (
        "tiny/plain, seed 0 failed: the process was killed; 1 of 2 runs left\nError: the process was killed\n"
    )
    assert "| `wild` |" in Path("docs/results.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("tiny")
def test_a_run_that_is_stopped_alone_ends_the_command_as_stopped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reproduction, "estimate", lambda self, workers: {})
    monkeypatch.setattr(Workers, "each", lambda self, function, jobs: ((job, Outcome.STOPPED) for job in jobs))
    result = cli("reproduce", "tiny", "--seeds", "1")
    assert (result.code, result.err) == (143, "stopped; the same command goes on from here\n")


@pytest.mark.usefixtures("tiny")
def test_a_cluster_sees_whole_paths_and_needs_no_number_of_jobs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []

    def each(self: Workers, function: object, jobs: Iterable[Job]) -> Generator[Any, None, None]:
        for job in jobs:
            seen.append(job)
            yield job, Outcome.BUSY

    monkeypatch.setattr(workers, "_connect", lambda address: None)
    monkeypatch.setattr(Reproduction, "estimate", lambda self, workers: {})
    monkeypatch.setattr(Workers, "each", each)
    assert cli("reproduce", "tiny", "--seeds", "1", "--cluster", "tcp://x:1", "--data-dir", "data").code == 0
    assert {(job.out, job.results, job.data_dir) for job in seen} == {
        (Path("runs/reproduce").absolute(), Path("results").absolute(), str(Path("data").absolute()))
    }
    result = cli("reproduce", "tiny", "--cluster", "tcp://x:1", "--jobs", "2")
    assert (result.code, "--jobs is for this machine" in result.err) == (2, True)
