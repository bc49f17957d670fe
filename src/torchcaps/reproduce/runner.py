"""A whole table: which runs are left, how long they will take, and one after the other until all are logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchcaps.errors import InputError, unknown_name
from torchcaps.reproduce.jobs import Job, Outcome, estimate_jobs, execute
from torchcaps.reproduce.processes import Interrupted, in_process
from torchcaps.reproduce.table import SEEDS, Budget, Row, Table
from torchcaps.reproduce.timings import Timing


@dataclass(frozen=True)
class Estimate:
    """What is left of a row."""

    row: Row
    """The row."""
    runs: int
    """Runs that are not logged yet."""
    timing: Timing
    """How long one run takes, about."""

    @property
    def seconds(self) -> float:
        """Of one run."""
        return self.timing.seconds


@dataclass
class Tally:
    """How the runs of a reproduction ended."""

    done: list[Job] = field(default_factory=list)
    diverged: list[Job] = field(default_factory=list)
    busy: list[Job] = field(default_factory=list)
    """Those that other processes still worked on."""


@dataclass(frozen=True, eq=False)
class Reproduction:
    """The runs of a table that are asked for, every row's first seed before any row's second."""

    table: Table
    """Whose."""
    jobs: tuple[Job, ...]
    """All of them, in their order."""

    @property
    def pending(self) -> list[Job]:
        """Those whose log is not whole."""
        return [job for job in self.jobs if not job.is_done]

    def estimate(self) -> list[Estimate]:
        """How long the pending runs will take; also sees that their data are there.

        Raises:
            InputError: Data that are not there, or that do not fit.
            Interrupted: A signal stopped it.
        """
        by_row: dict[str, list[Job]] = {}
        for job in self.pending:
            by_row.setdefault(job.row.name, []).append(job)
        timings = in_process(estimate_jobs, [jobs[0] for jobs in by_row.values()]) if by_row else []
        return [Estimate(jobs[0].row, len(jobs), each) for jobs, each in zip(by_row.values(), timings, strict=True)]

    def run(
        self,
        *,
        before: Callable[[Job, int], None] = lambda _job, _left: None,
        after: Callable[[Job, Outcome], None] = lambda _job, _outcome: None,
    ) -> Tally:
        """Work on the pending runs, each in a process of its own, until all are logged or in others' hands.

        Args:
            before: Called before a run, with the number of runs that are left, itself among them.
            after: Called after a run that was logged.

        Raises:
            InputError: Data that are not there, or that do not fit.
            Interrupted: A signal stopped it; the same call goes on.
        """
        tally = Tally()
        progress = True
        while progress:  # a run that another process gave up is taken over in the next round
            progress = False
            tally.busy.clear()
            for job in self.pending:
                if job.is_done:
                    continue  # by another process, meanwhile
                if job.is_locked:
                    tally.busy.append(job)
                    continue
                before(job, len(self.pending))
                outcome = in_process(execute, job)
                if outcome is Outcome.INTERRUPTED:
                    raise Interrupted(143)
                if outcome is Outcome.BUSY:
                    tally.busy.append(job)
                    continue
                progress = True
                (tally.diverged if outcome is Outcome.DIVERGED else tally.done).append(job)
                after(job, outcome)
        return tally


def plan(
    table: Table,
    *,
    budget: Budget = "small",
    seeds: int | None = None,
    rows: Sequence[str] = (),
    out: str | Path = "runs/reproduce",
    results: str | Path = "results",
    data_dir: str | None = None,
    accelerator: str = "auto",
) -> Reproduction:
    """The runs of a table.

    Args:
        table: Which.
        budget: The rows of the ``"small"`` budget, or of the ``"full"`` one.
        seeds: How many of each row, from seed 0; 3 of a small budget and 5 of a full one if None.
        rows: Only the rows of these names, whatever their budget.
        out: Folder of the run folders, ``OUT/TABLE/ROW/seed-N``.
        results: Folder of the logs, ``RESULTS/TABLE/ROW/seed-N``.
        data_dir: Folder that holds the data sets' files.
        accelerator: Where to compute.

    Raises:
        InputError: No such row, a number of seeds below one, or a run or a log that is there already but has other
            settings than its row has now.
    """
    number = SEEDS[budget] if seeds is None else seeds
    if number < 1:
        raise InputError(f"seeds must be at least 1, got {number}")
    by_name = {row.name: row for row in table.rows}
    for name in rows:
        if name not in by_name:
            raise unknown_name(f"row of table {table.name}", name, by_name)
    chosen = [by_name[name] for name in dict.fromkeys(rows)] if rows else table.rows_of(budget)
    folders = Path(out), Path(results)
    jobs = [
        Job(table.name, row, seed, *folders, data_dir=data_dir, accelerator=accelerator)
        for seed in range(number)
        for row in chosen
    ]
    for job in jobs:
        job.check()
    return Reproduction(table, tuple(jobs))
