"""A whole table: the runs that are left, how long they will take, and the work on them until all are logged."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchcaps.errors import InputError, unknown_name
from torchcaps.reproduce.estimate import Timing, time_jobs
from torchcaps.reproduce.jobs import Job, Outcome, execute
from torchcaps.reproduce.table import SEEDS, Budget, Table
from torchcaps.reproduce.workers import Workers


@dataclass(frozen=True)
class Reproduction:
    """The runs of a table that are asked for, every row's first seed before any row's second."""

    table: Table
    """The table."""
    jobs: tuple[Job, ...]
    """All of its runs, in their order."""

    @property
    def pending(self) -> list[Job]:
        """The runs whose log is not whole."""
        return [job for job in self.jobs if not job.is_done]

    def estimate(self, workers: Workers) -> dict[str, Timing]:
        """Estimate how long a run of each row takes that has pending runs, and check that their data can be loaded.

        Args:
            workers: Where steps are timed, one after the other.

        Returns:
            The times, by the name of the row.

        Raises:
            InputError: Data that are not there, or that do not fit.
            Interrupted: A signal stopped it.
        """
        first = {job.row.name: job for job in reversed(self.pending)}
        jobs = [first[row.name] for row in self.table.rows if row.name in first]
        if not jobs:
            return {}
        ((_, times),) = workers.each(time_jobs, [jobs])
        if isinstance(times, Exception):
            raise times
        return dict(zip([job.row.name for job in jobs], times, strict=True))

    def run(self, workers: Workers) -> Generator[tuple[Job, Outcome | Exception], None, None]:
        """Work on the pending runs until all are logged, have failed, or are in the hands of other processes.

        Args:
            workers: Where the runs are made.

        Yields:
            A run with its outcome or with what it raised, as soon as it ends; at last those that other processes still
            work on.

        Raises:
            Interrupted: A signal stopped it; the same call goes on.
        """
        waiting = self.pending
        while waiting:
            busy: list[Job] = []
            with closing(workers.each(partial(execute, share_output=workers.share_output), waiting)) as ended:
                for job, outcome in ended:
                    if outcome is Outcome.BUSY:
                        busy.append(job)
                    elif isinstance(outcome, Exception) or outcome is Outcome.STOPPED or job.is_done:
                        yield job, outcome
                    else:
                        yield job, InputError(f"its log {job.log} is not here: the cluster must share this folder")
            if len(busy) == len(waiting):
                yield from ((job, Outcome.BUSY) for job in busy)
                return
            waiting = [job for job in busy if not job.is_done]  # what another process gave up is taken over


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
        table: The table.
        budget: The rows of the ``"small"`` budget, or of the ``"full"`` one.
        seeds: How many runs of each row, with seeds from 0; 3 of a small budget and 5 of a full one if None.
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
    jobs = [
        Job(table.name, row, seed, Path(out), Path(results), data_dir, accelerator)
        for seed in range(number)
        for row in chosen
    ]
    for job in jobs:
        job.check()
    return Reproduction(table, tuple(jobs))
