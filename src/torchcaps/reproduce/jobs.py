"""One (row, seed) of a table: trained or resumed as an ordinary run, measured, and logged."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchcaps.errors import InputError
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
from torchcaps.reproduce.table import Row
from torchcaps.reproduce.timings import Timing
from torchcaps.training.config import TrainConfig, override, read_config
from torchcaps.training.progress import Progress, choose_progress


class Outcome(enum.Enum):
    """How working on a job ended."""

    DONE = "done"
    DIVERGED = "diverged"
    BUSY = "another process works on it"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, eq=False)
class Job:
    """A run of a table's row with one seed, and where it goes."""

    table: str
    """The table's name."""
    row: Row
    """What to run."""
    seed: int
    """Of the run."""
    out: Path
    """Folder of the run folders."""
    results: Path
    """Folder of the logs."""
    data_dir: str | None = None
    """Folder that holds the data sets' files; the usual places if None."""
    accelerator: str = "auto"
    """Where to compute."""

    def __str__(self) -> str:
        return f"{self.table}/{self.row.name}, seed {self.seed}"

    @property
    def here(self) -> dict[str, str]:
        """Fields of the run that say where it is computed, not what."""
        return {"accelerator": self.accelerator} | ({} if self.data_dir is None else {"data_dir": self.data_dir})

    @property
    def config(self) -> TrainConfig:
        """What is trained."""
        return override(self.row.config(self.seed), self.here)

    @property
    def run(self) -> Path:
        """Its run folder."""
        return log_folder(self.out, self.table, self.row.name, self.seed)

    @property
    def log(self) -> Path:
        """The folder of its log."""
        return log_folder(self.results, self.table, self.row.name, self.seed)

    @property
    def command(self) -> str:
        """What runs it again, with the seeds before it."""
        return row_command(self.table, self.row.name, self.seed + 1)

    @property
    def is_done(self) -> bool:
        """Whether its log is whole."""
        return is_whole(self.log, self.row)

    @property
    def is_locked(self) -> bool:
        """Whether another process works on it now."""
        try:
            with self._lock():
                return False
        except Timeout:
            return True

    def check(self) -> None:
        """See that what is there of it already is of the same configuration.

        Raises:
            InputError: It is not, or it is damaged; the folder is named.
        """
        for folder in (self.log, self.run):
            if not (folder / CONFIG).exists():
                continue
            if not same_run(read_config(folder / CONFIG), self.row, self.seed):
                raise InputError(
                    f"{folder} holds a run with other settings than row {self.row.name} of table {self.table} has "
                    "now; move it away to run the row anew"
                )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other processes from the run, and from its log, which that of another folder of runs may be as well.

        Raises:
            Timeout: Another process works on one of them.
        """
        with ExitStack() as held:
            for folder in dict.fromkeys(each.resolve() for each in (self.run, self.log)):
                folder.parent.mkdir(parents=True, exist_ok=True)
                # the system's own lock: it ends with the process that holds it, so none is ever left behind
                held.enter_context(FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0))
            yield


def row_command(table: str, row: str, seeds: int) -> str:
    """The command that runs a row again, beside the runs and logs that there are."""
    again = ["--out", "runs/again", "--results", "runs/again/logs"]
    return shlex.join(["torchcaps", "reproduce", table, "--row", row, "--seeds", str(seeds), *again])


def execute(job: Job, progress: Progress | None = None) -> Outcome:
    """Train what is not trained yet, measure it, and write its log. One process at a time works on a job.

    Args:
        job: What to do.
        progress: Where to show the training; a live display or plain lines if None.

    Raises:
        InputError: Data or settings that do not fit.
    """
    try:
        with job._lock():
            # without a look at the log, what another process has just finished would be done again
            return _outcome(job) if job.is_done else _work(job, choose_progress() if progress is None else progress)
    except Timeout:
        return Outcome.BUSY


def _work(job: Job, progress: Progress) -> Outcome:
    from torchcaps.training import Diverged, Interrupted

    try:
        _train(job, progress)
        publish(job.run, job.log, _measure(job), job.command)
    except Diverged as failure:
        publish_divergence(job.run, job.log, str(failure).partition("; ")[0])  # the rest names places on this machine
    except Interrupted:
        return Outcome.INTERRUPTED
    return _outcome(job)


def _outcome(job: Job) -> Outcome:
    return Outcome.DIVERGED if (job.log / DIVERGED).exists() else Outcome.DONE


def estimate_jobs(jobs: list[Job]) -> list[Timing]:
    """How long jobs will take here, see :func:`torchcaps.reproduce.estimate.estimate_seconds`."""
    from torchcaps.reproduce.estimate import estimate_seconds
    from torchcaps.training.device import pick_device
    from torchcaps.training.environment import hardware, versions

    devices = [pick_device(job.accelerator) for job in jobs]
    seconds = estimate_seconds([job.config for job in jobs])
    return [
        Timing(round(each, 1), hardware(device), versions(device))
        for each, device in zip(seconds, devices, strict=True)
    ]


def _train(job: Job, progress: Progress) -> None:
    """Bring the run to its end."""
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
    from torchcaps.training.device import pick_device

    run = load_run(job.run, device=pick_device(job.accelerator))
    return {each.kind: measure(run, each, job.data_dir) for each in job.row.measures}
