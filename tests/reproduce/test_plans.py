from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from torchcaps.errors import InputError
from torchcaps.reproduce import Interrupted, Job, Outcome, Reproduction, Table, Timing, Workers, plan

CURVE = {"strengths": [0.0], "accuracy": [0.9]}
#: What the row "measured" asks for.
MEASURES = {
    "rotation": {"kind": "rotation", "num_images": 10, **CURVE},
    "pgd-scores": {"kind": "pgd-scores", "num_images": 5, **CURVE},
}


def test_every_row_gets_its_first_seed_before_any_its_second(tiny: Table) -> None:
    planned = plan(tiny, seeds=2, out="o", results="r", accelerator="cpu", data_dir="d")
    assert [(job.row.name, job.seed) for job in planned.jobs] == [
        ("plain", 0),
        ("measured", 0),
        ("plain", 1),
        ("measured", 1),
    ]
    job = planned.jobs[2]
    assert (job.run, job.log) == (Path("o/tiny/plain/seed-1"), Path("r/tiny/plain/seed-1"))
    assert (job.config.seed, job.config.accelerator, job.config.data_dir) == (1, "cpu", "d")


def test_a_precision_is_that_of_the_run_and_of_the_command_that_runs_it_again(tiny: Table) -> None:
    half, usual = (plan(tiny, seeds=1, precision=precision).jobs[0] for precision in ("bf16", "auto"))
    assert (half.config.precision, usual.config.precision) == ("bf16", "auto")
    assert "--precision bf16" in half.command
    assert "precision" not in usual.command


def test_budgets_have_their_own_rows_and_seeds(tiny: Table) -> None:
    assert len(plan(tiny).jobs) == 2 * 3
    assert [job.row.name for job in plan(tiny, budget="full").jobs] == ["large"] * 5
    named = plan(tiny, rows=("large", "plain", "large"), seeds=1)
    assert [job.row.name for job in named.jobs] == ["large", "plain"]


def test_a_plan_that_cannot_be(tiny: Table) -> None:
    with pytest.raises(InputError, match='no row of table tiny "plane"; did you mean "plain"'):
        plan(tiny, rows=("plane",))
    with pytest.raises(InputError, match="seeds must be at least 1"):
        plan(tiny, seeds=0)


# the order of work, without working


class Here(Workers):
    """A function stands in for the work on a job.

    Args:
        work: What a job, or a list of jobs that are timed, comes to.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        super().__init__()
        self.work = work

    def each(self, function: object, arguments: Iterable[Any]) -> Generator[tuple[Any, Any], None, None]:
        for argument in arguments:
            yield argument, self.work(argument)


def endings(planned: Reproduction, work: Callable[[Any], Any]) -> list[tuple[str, Any]]:
    return [(str(job), outcome) for job, outcome in planned.run(Here(work))]


def test_all_jobs_are_worked_on_and_told_of(tiny: Table, write_log) -> None:
    def work(job: Job) -> Outcome:
        write_log(tiny, job.row.name, job.seed, measures=MEASURES)
        return Outcome.DIVERGED if job.row.name == "measured" else Outcome.DONE

    write_log(tiny, "plain", 0)  # done before
    assert endings(plan(tiny, seeds=2), work) == [
        ("tiny/measured, seed 0", Outcome.DIVERGED),
        ("tiny/plain, seed 1", Outcome.DONE),
        ("tiny/measured, seed 1", Outcome.DIVERGED),
    ]


def test_what_others_work_on_is_left_to_them_and_looked_at_again(tiny: Table, write_log) -> None:
    calls = []

    def work(job: Job) -> Outcome:
        calls.append(str(job))
        if job.row.name == "plain" and len(calls) < 3:
            return Outcome.BUSY
        write_log(tiny, job.row.name, job.seed, measures=MEASURES)
        return Outcome.DONE

    ended = endings(plan(tiny, seeds=1), work)
    assert calls == ["tiny/plain, seed 0", "tiny/measured, seed 0", "tiny/plain, seed 0"]
    assert ended == [("tiny/measured, seed 0", Outcome.DONE), ("tiny/plain, seed 0", Outcome.DONE)]


def test_when_only_others_work_there_is_nothing_to_wait_for(tiny: Table) -> None:
    assert endings(plan(tiny, seeds=1), lambda job: Outcome.BUSY) == [
        ("tiny/plain, seed 0", Outcome.BUSY),
        ("tiny/measured, seed 0", Outcome.BUSY),
    ]


def test_a_run_that_fails_or_is_stopped_leaves_the_others_alone(tiny: Table, write_log) -> None:
    failure = ChildProcessError("killed")

    def work(job: Job) -> Outcome | Exception:
        if job.seed == 1:
            return failure if job.row.name == "plain" else Outcome.STOPPED
        write_log(tiny, job.row.name, job.seed, measures=MEASURES)
        return Outcome.DONE

    ended = [outcome for _, outcome in endings(plan(tiny, seeds=3), work)]
    assert ended == [Outcome.DONE, Outcome.DONE, failure, Outcome.STOPPED, Outcome.DONE, Outcome.DONE]


def test_a_run_whose_log_lies_on_another_machine_has_failed(tiny: Table) -> None:
    (_, error), _ = endings(plan(tiny, seeds=1), lambda job: Outcome.DONE)
    assert isinstance(error, InputError)
    assert "seed-0 is not here: the cluster must share this folder" in str(error)


def test_other_settings_are_seen_before_the_first_run(tiny: Table, write_log) -> None:
    folder = write_log(tiny, "measured", 1)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"epochs": 1', '"epochs": 5'))
    with pytest.raises(InputError, match=r"measured.seed-1 holds a run with other settings"):
        plan(tiny, seeds=2)


def test_the_time_left_is_estimated_for_each_row(tiny: Table, write_log) -> None:
    here = Here(lambda jobs: [Timing(10.0 * job.row.config(0).recipe.epochs, {}, {}) for job in jobs])
    write_log(tiny, "plain", 0)
    planned = plan(tiny, seeds=2)
    found = {name: timing.seconds for name, timing in planned.estimate(here).items()}
    assert found == {"measured": 10.0, "plain": 20.0}
    with pytest.raises(InputError, match="no data"):
        planned.estimate(Here(lambda jobs: InputError("no data")))
    for job in planned.pending:
        write_log(tiny, job.row.name, job.seed, measures=MEASURES)
    assert planned.estimate(here) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
def test_ctrl_c_stops_the_run_in_its_own_process_which_can_go_on(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torchcaps.training.train", lambda *_, **__: pytest.fail("trained in this process"))
    row = dataclasses.replace(tiny.rows[0], overrides={**tiny.rows[0].overrides, "epochs": 1_000_000})
    planned = plan(dataclasses.replace(tiny, rows=(row,)), seeds=1, accelerator="cpu")
    (job,) = planned.jobs

    def interrupt() -> None:
        while not (job.run / "metrics.csv").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as caught:
        list(planned.run(Workers()))
    assert caught.value.exit_code == 130
    assert (job.run / "last.ckpt").exists()
    assert not (job.run / "summary.json").exists()
    with job.locked():
        assert planned.pending == [job]


def test_a_row_may_say_how_many_seeds_it_has_and_where_they_begin(tiny: Table) -> None:
    plain = tiny.rows[0]
    rows = dataclasses.replace(plain, name="a", seeds=1, first_seed=100), dataclasses.replace(plain, name="b", seeds=2)
    table = dataclasses.replace(tiny, rows=rows)
    assert [(job.row.name, job.seed) for job in plan(table).jobs] == [("a", 100), ("b", 0), ("b", 1)]
    assert [(job.row.name, job.seed) for job in plan(table, seeds=2).jobs] == [
        ("a", 100),
        ("b", 0),
        ("a", 101),
        ("b", 1),
    ]
    assert "--row a --seeds 2 " in plan(table, seeds=2).jobs[2].command


def test_a_budget_without_rows(tiny: Table) -> None:
    with pytest.raises(InputError, match="table tiny has no rows of the full budget"):
        plan(dataclasses.replace(tiny, rows=tiny.rows[:1]), budget="full")
