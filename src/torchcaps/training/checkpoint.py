"""What a run needs to go on exactly: the lock of its folder, its progress, and ``last.ckpt``, whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import os
import socket
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from torchcaps.errors import InputError
from torchcaps.files import atomic_path, locked, read_json, reading, write_json

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHECKPOINT = "last.ckpt"
#: Files in a run folder while a process writes to it: the one that is locked, and the one that names the process.
LOCK, HOLDER = ".lock", ".lock.json"
#: The errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
#: The sums over the images of an epoch: losses times images, and the correctly classified images.
SUMS = ("loss", "classification_loss", "reconstruction_loss", "correct")
#: Settings of a recipe that may change when a run goes on: they do not change what is computed, only how long.
RESUMABLE = ("epochs", "stop_at", "patience", "logger")


# ---- the lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Keep other processes from writing to a run folder; readers need no lock.

    The lock of a killed process ends with it; the files that it left are removed when the next lock is released. A file
    system without locks keeps no process out.

    Args:
        folder: It is made if it is not there.

    Returns:
        A context, whose value is the folder.

    Raises:
        InputError: Another process has locked it; the error says which one, on which machine and since when.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOCK).is_symlink():  # what a link leads to would be emptied
        (folder / LOCK).unlink()
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)))
        except Timeout:
            raise InputError(f"{folder} is in use: {_holder(folder)}; wait for its end, or stop it") from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            yield folder
            return
        stack.callback((folder / HOLDER).unlink, missing_ok=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        write_json(folder / HOLDER, {"process": os.getpid(), "host": socket.gethostname(), "since": since})
        yield folder


def _holder(folder: Path) -> str:
    """The process that has locked a folder, in words."""
    try:
        holder = read_json(folder / HOLDER, "note of who trains there")
    except (InputError, OSError):  # it is just being written, or removed
        return "another process trains in it"
    return f"process {holder.get('process')} on {holder.get('host')} has trained in it since {holder.get('since')}"


@contextmanager
def lock_on_main_process(fabric: Fabric, folder: AbstractContextManager[Path]) -> Iterator[Path]:
    """Let the first process enter the context of a run folder for all processes; all of them raise its errors."""
    with ExitStack() as held:
        taken: Path | Exception | None = None
        if fabric.is_global_zero:
            try:
                taken = held.enter_context(folder)
            except (InputError, OSError) as error:
                taken = error
        taken = fabric.broadcast(taken)
        if isinstance(taken, Exception):
            raise taken
        assert taken is not None
        yield taken


# ---- the progress


@dataclass
class ProgressState:
    """The progress of a run: its place, and its results so far. A checkpoint holds it beside weights and moments."""

    epoch: int = 0
    """How many epochs are finished."""
    batch: int = 0
    """How many batches of the running epoch are finished."""
    step: int = 0
    """How many steps are finished."""
    seconds: float = 0.0
    """The time spent in training and validation, over all sittings."""
    epoch_seconds: float = 0.0
    """The time spent in the training steps of the running epoch."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    """The sums of the running epoch; see :class:`~torchcaps.training.loop.EpochSums`."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The rows of metrics.csv."""
    peak_memory_mib: float | None = None
    """The peak memory of a process over all sittings up to the last checkpoint; None where unknown."""
    commands: list[str] = field(default_factory=list)
    """The command that started the run, and those that resumed it."""
    commits: list[str | None] = field(default_factory=list)
    """The commit of the source tree at each of these starts; None where it is installed."""

    def best(self, select: str) -> dict[str, Any]:
        """The row of the epoch that the validation images chose; without validation images the last one."""
        if self.history[-1]["validation_loss"] is None:
            return self.history[-1]
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))

    def note_peak(self, mib: float | None) -> None:
        """Remember the peak memory of this sitting's process."""
        known = [each for each in (self.peak_memory_mib, mib) if each is not None]
        self.peak_memory_mib = max(known, default=None)

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Add the row of the finished epoch, and begin the next one."""
        self.history.append(row)
        self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_seconds, self.sums = 0.0, dict.fromkeys(SUMS, 0.0)

    def metrics(self) -> str:
        """The text of metrics.csv, a line an epoch."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self.history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.history)
        return text.getvalue()


# ---- last.ckpt


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values.

    Raises:
        OSError: The folder cannot be written, or the disk is full; an earlier checkpoint is then as it was.
    """
    with atomic_path(path) as temporary:
        try:
            with temporary.open("wb") as file:
                torch.save(dict(state), file)
        except (OSError, RuntimeError) as error:  # torch's writer hides the system's reason, such as a full disk
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__cause__ or reason.__context__
            if reason is None:
                raise
            raise OSError(reason.errno, f"the checkpoint could not be written: {reason.strerror}", str(path)) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read ``last.ckpt``, made of tensors and plain values; nothing in it is executed.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint of torchcaps.
    """
    with reading(path, "checkpoint"):
        with zipfile.ZipFile(path) as archive:  # torch does not compare checksums
            if (damaged := archive.testzip()) is not None:
                raise InputError(f"the checksum of its part {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about such files are for programmers
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        ProgressState(**checkpoint["progress"])
        parts = {part: checkpoint[part] for part in ("model", "optimizer", "progress", "data")}
        return parts | {"settings": checkpoint.get("settings", {})}  # that of a run has a config.json beside it


def check_settings(before: Mapping[str, Any], after: Mapping[str, Any], out: Path, others: Sequence[str] = ()) -> None:
    """Raise InputError if the run in ``out`` cannot go on with settings, by flat names, in place of those it has.

    ``others`` may change, besides those of `RESUMABLE`.
    """
    for name in {**before, **after}:
        if name not in (*RESUMABLE, *others) and before.get(name) != after.get(name):
            raise InputError(
                f"the run in {out} has {name} = {before.get(name)!r}; it cannot go on with {after.get(name)!r}, only "
                f"{', '.join((*RESUMABLE, *others))} may change"
            )
    if before["schedule"] == "one-cycle" and before["epochs"] != after["epochs"]:
        raise InputError(
            f"the one-cycle schedule of the run in {out} ends with epoch {before['epochs']}; it cannot go on to epoch "
            f"{after['epochs']}: take the constant schedule (--schedule constant) in a new run"
        )


def check_progress(progress: ProgressState, steps_per_epoch: int, epochs: int) -> None:
    """Raise InputError unless a run of so many steps an epoch can go on from here to so many epochs."""
    if progress.batch >= steps_per_epoch or progress.step != progress.epoch * steps_per_epoch + progress.batch:
        raise InputError(f"the run's {CHECKPOINT} is not of a run of {steps_per_epoch} steps an epoch, as this one is")
    if epochs < progress.epoch:
        raise InputError(f"the run has finished {progress.epoch} epochs already; it cannot go on to {epochs}")
    if epochs == progress.epoch and progress.batch > 0:
        raise InputError(
            f"the run is within epoch {epochs + 1} already; it cannot go back to the end of epoch {epochs}"
        )
