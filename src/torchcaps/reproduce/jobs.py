"""The runs of a table: each a row with one seed, trained or resumed as an ordinary run, measured, and logged."""

from __future__ import annotations

import enum
import itertools
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchcaps.errors import InputError, unknown_name
from torchcaps.files import real
from torchcaps.locks import held
from torchcaps.reproduce.estimate import Timing, time_jobs
from torchcaps.reproduce.logs import (
    CONFIG,
    DIVERGED,
    SUMMARY,
    is_whole,
    log_folder,
    publish,
    publish_divergence,
    same_run,
)
from torchcaps.reproduce.table import Budget, Row, Table
from torchcaps.reproduce.workers import Workers
from torchcaps.training.config import TrainConfig, override, read_config
from torchcaps.training.progress import PlainProgress, Progress, choose_progress


class Outcome(enum.Enum):
    """How the work on a job ended."""

    DONE = "done"
    DIVERGED = "diverged"
    BUSY = "another process works on it"
    STOPPED = "a signal stopped it; the same command goes on from its checkpoint"


@dataclass(frozen=True)
class Job:
    """A run of a table's row with one seed, and the places of its files."""

    table: str
    """The table's name."""
    row: Row
    """What is run."""
    seed: int
    """The run's seed."""
    out: Path
    """Folder of the run folders."""
    results: Path
    """Folder of the logs."""
    data_dir: str | None = None
    """Folder that holds the data sets' files; the usual places if None."""
    accelerator: str = "auto"
    """Where to compute."""
    precision: str = "auto"
    """The numbers to compute with; ``"auto"`` is what is fastest there for most networks."""

    def __str__(self) -> str:
        return f"{self.table}/{self.row.name}, seed {self.seed}"

    @property
    def here(self) -> dict[str, str]:
        """Fields of the configuration that say where and with what the run is computed, not what it is."""
        return {"accelerator": self.accelerator, "precision": self.precision} | (
            {} if self.data_dir is None else {"data_dir": self.data_dir}
        )

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run."""
        return override(self.row.config(self.seed), self.here)

    @property
    def run(self) -> Path:
        """The run folder."""
        return log_folder(self.out, self.table, self.row.name, self.seed)

    @property
    def log(self) -> Path:
        """The folder of the log."""
        return log_folder(self.results, self.table, self.row.name, self.seed)

    @property
    def command(self) -> str:
        """The command that runs it again, with the seeds before it."""
        return row_command(self.table, self.row.name, self.seed + 1 - self.row.first_seed, self.precision)

    @property
    def is_done(self) -> bool:
        """Whether the log is whole."""
        return is_whole(self.log, self.row)

    def check(self) -> None:
        """Check that an existing run and an existing log have the row's configuration.

        Raises:
            InputError: They have another one, or are damaged; the folder is named.
        """
        for folder in (self.log, self.run):
            if (folder / CONFIG).exists() and not same_run(read_config(folder / CONFIG), self.row, self.seed):
                raise InputError(
                    f"{folder} holds a run with other settings than row {self.row.name} of table {self.table} has "
                    "now; move it away to run the row anew"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from the run, and from its log, which another folder of runs may share.

        Raises:
            Timeout: Another process works on one of them.
        """
        with ExitStack() as stack:
            for folder in dict.fromkeys(real(each) for each in (self.run, self.log)):
                folder.parent.mkdir(parents=True, exist_ok=True)
                # the system's own lock: it ends with the process that holds it
                stack.enter_context(held(FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)))
            yield


def row_command(table: str, row: str, seeds: int, precision: str = "auto") -> str:
    """The command that runs a row again, beside the runs and logs that there are."""
    numbers = [] if precision == "auto" else ["--precision", precision]
    again = ["--out", "runs/again", "--results", "runs/again/logs"]
    return shlex.join(["torchcaps", "reproduce", table, "--row", row, "--seeds", str(seeds), *numbers, *again])


class NamedLines(PlainProgress):
    """Lines that begin with the job's name, for jobs that print to one place at a time."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def message(self, text: str) -> None:
        """A line, at once."""
        super().message(f"{self._job}: {text}")


def execute(job: Job, progress: Progress | None = None, *, share_output: bool = False) -> Outcome:
    """Train what is not trained yet, measure it, and write the log. One process at a time works on a job.

    Args:
        job: The job.
        progress: Where to show the training; a live display or plain lines if None.
        share_output: Begin each line with the job's name, as other jobs print to the same place.
    """
    from torchcaps.training import Diverged, Interrupted

    if progress is None:
        progress = NamedLines(job) if share_output else choose_progress()
    try:
        with job.locked():
            if not job.is_done:  # another process may have finished it meanwhile
                progress.message("begins" if share_output else f"\n{job}")
                try:
                    _train(job, progress)
                    publish(job.run, job.log, _measure(job), job.command)
                except Diverged as failure:  # what it says after the first clause names places on this machine
                    publish_divergence(job.run, job.log, str(failure).partition("; ")[0])
            return Outcome.DIVERGED if (job.log / DIVERGED).exists() else Outcome.DONE
    except Timeout:
        return Outcome.BUSY
    except Interrupted:
        return Outcome.STOPPED


def _train(job: Job, progress: Progress) -> None:
    """Train the run to its end."""
    from torchcaps.training import resume, train

    if (job.run / SUMMARY).exists():
        return
    if (job.run / CONFIG).exists():
        resume(job.run, overrides=job.here, progress=progress, figures=False, command=job.command)
    else:
        train(job.config, job.run, progress=progress, figures=False, command=job.command)


def _measure(job: Job) -> dict[str, Any]:
    """What the row asks for beside the test error, on the network of the validation-chosen epoch."""
    if not job.row.measures:
        return {}
    from torchcaps.reproduce.measures import measure
    from torchcaps.training import load_run
    from torchcaps.training.environment import pick_device

    run = load_run(job.run, device=pick_device(job.accelerator))
    return {each.kind: measure(run, each, job.data_dir) for each in job.row.measures}


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
    precision: str = "auto",
) -> Reproduction:
    """The runs of a table.

    Args:
        table: The table.
        budget: The rows of the ``"small"`` budget, or of the ``"full"`` one.
        seeds: How many runs of each row, with seeds from 0; as many as the row says if None, or 3 of a small budget and
            5 of a full one where it says nothing.
        rows: Only the rows of these names, whatever their budget.
        out: Folder of the run folders, ``OUT/TABLE/ROW/seed-N``.
        results: Folder of the logs, ``RESULTS/TABLE/ROW/seed-N``.
        data_dir: Folder that holds the data sets' files.
        accelerator: Where to compute.
        precision: ``"32"``, ``"bf16"`` or ``"auto"``; a run that has begun goes on with its own where it is ``"auto"``.

    Raises:
        InputError: No such row, or none of the budget, a number of seeds below one, or a run or a log that is there
            already but has other settings than its row has now.
    """
    if seeds is not None and seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}")
    by_name = {row.name: row for row in table.rows}
    for name in rows:
        if name not in by_name:
            raise unknown_name(f"row of table {table.name}", name, by_name)
    chosen = [by_name[name] for name in dict.fromkeys(rows)] if rows else table.rows_of(budget)
    if not chosen:
        raise InputError(f"table {table.name} has no rows of the {budget} budget")
    jobs = [
        Job(table.name, row, seed, Path(out), Path(results), data_dir, accelerator, precision)
        for together in itertools.zip_longest(*(row.seeds_of(budget, seeds) for row in chosen))
        for row, seed in zip(chosen, together, strict=True)
        if seed is not None
    ]
    for job in jobs:
        job.check()
    return Reproduction(table, tuple(jobs))
