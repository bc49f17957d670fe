"""The run folder: its files and its lock.

```text
RUN/config.json      the complete configuration; torchcaps train --config runs it again
    metrics.csv      one line an epoch
    last.ckpt        everything needed to resume, written atomically
    best/            weights of the best epoch on the validation images, in the form of save_pretrained
    summary.json     results, hardware, versions, command
    figures/         figures
    tensorboard/     files of a logger, if the recipe names one
    .lock.json       the process that is training in the folder
```
"""

from __future__ import annotations

import csv
import errno
import io
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from filelock import FileLock, Timeout
from torch import nn

from torchcaps.checks import check_contents
from torchcaps.errors import InputError
from torchcaps.files import atomic_path, locked, read_json, reading, remove_temporaries, write_json, write_text
from torchcaps.models import Network
from torchcaps.models.files.weights import CLASSES, CONFIG, WEIGHTS, weights_file
from torchcaps.ranges import Amount, Count, Finite, Index, Seed

if TYPE_CHECKING:
    from lightning_fabric import Fabric

METRICS, SUMMARY, CHECKPOINT, BEST, FIGURES = "metrics.csv", "summary.json", "last.ckpt", "best", "figures"
BEST_FILES = tuple(f"{BEST}/{name}" for name in (CONFIG, WEIGHTS, CLASSES))
LOCK, HOLDER = ".lock", ".lock.json"
"""Files while a process writes to the folder: the locked file, and the description of the process."""
RESUMABLE = ("epochs", "stop_at", "patience", "logger")
"""Settings of a recipe that a resumed run may change, because they only change its length or its logs."""


class Part(TypedDict):
    """Results of a network on the test images."""

    accuracy: Finite | None
    error: Finite | None
    loss: Finite


class Parts(TypedDict):
    """Results of the networks of the best and the last epoch."""

    best: Part
    last: Part


class Images(TypedDict):
    """Number of images of each part."""

    train: Index
    validation: Index
    test: Index


class Hardware(TypedDict):
    """Machine of a run."""

    processor: NotRequired[str | None]
    gpu: NotRequired[str | None]
    threads: Count
    processes: NotRequired[Count]


class Summary(TypedDict):
    """Entries of ``summary.json`` that the program reads. The file has more entries for people."""

    seed: Seed
    epochs: Index
    best_epoch: Index
    images: Images
    test: Parts
    seconds: Amount
    hardware: Hardware
    versions: dict[str, str]


@contextmanager
def lock_folder(folder: Path, *, resumes: bool = False) -> Iterator[Path]:
    """Keep other processes from writing to a run folder. Readers need no lock.

    The lock of a killed process ends with the process, and the next process with the lock removes its temporary files.
    On a file system without locks, other processes are not kept out. An empty folder is removed at the end.

    Args:
        folder: The run folder. Created if missing.
        resumes: The folder holds a run. Otherwise files without a checkpoint are those of others, and stay.

    Returns:
        A context manager with the folder as its value.

    Raises:
        InputError: Another process has locked the folder. The message names the process, its machine and start time.
            Or a file of others has the name of a file that a run writes.
        OSError: The folder cannot be written.
    """
    created = [folder, *(each for each in folder.parents if not each.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(_remove_empty, created)
        if (folder / LOCK).is_symlink():
            (folder / LOCK).unlink()
        try:
            stack.enter_context(locked(FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)))
        except Timeout:
            raise InputError(f"{folder} is in use: {_holder(folder)}; wait until it ends, or stop it") from None
        except (NotImplementedError, OSError) as error:
            if getattr(error, "errno", None) not in (None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        stack.callback((folder / HOLDER).unlink, missing_ok=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        write_json(folder / HOLDER, {"process": os.getpid(), "host": socket.gethostname(), "since": since})
        remove_leftovers(folder)
        if not resumes and not (folder / CHECKPOINT).exists():  # which is written before these
            for path in (folder / name for name in (METRICS, SUMMARY, *BEST_FILES)):
                if os.path.lexists(path):
                    raise InputError(
                        f"{path} exists already, and a run would replace it; choose another folder (--out)"
                    )
        yield folder


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # a folder has files or no longer exists
        for each in folders:
            each.rmdir()


def _holder(folder: Path) -> str:
    """Describe the process that has locked a folder."""
    try:
        holder = read_json(folder / HOLDER, "note of who trains there")
    except (InputError, OSError):  # the file is being written or removed
        return "another process trains in it"
    return f"process {holder.get('process')} on {holder.get('host')} has trained in it since {holder.get('since')}"


@contextmanager
def on_main_process(fabric: Fabric, folder: AbstractContextManager[Path | None]) -> Iterator[Path | None]:
    """Lock a run folder in the first process on behalf of all. Its errors are raised in every process."""
    with ExitStack() as held:
        entered: Path | Exception | None = None
        if fabric.is_global_zero:
            try:
                entered = held.enter_context(folder)
            except (InputError, OSError) as error:
                entered = error
        entered = fabric.broadcast(entered)
        if isinstance(entered, Exception):
            raise entered
        yield entered


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of a killed process. Call it only while no process writes to the folder."""
    for name in (CONFIG, METRICS, CHECKPOINT, SUMMARY, *BEST_FILES):
        remove_temporaries(out / name)


def save_network(network: nn.Module, class_names: Sequence[str] | None, folder: Path) -> None:
    """Write the files of a network. For a module without a description, write only its weights."""
    if isinstance(network, Network):
        with suppress(InputError):  # a part of the network is not registered
            return network.save_files(folder, class_names=class_names)
    weights = {name: each.detach().cpu().clone().contiguous() for name, each in network.state_dict().items()}
    with atomic_path(folder / WEIGHTS) as temporary:
        temporary.write_bytes(weights_file(weights))
    return None


def write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.csv`` with a row for each epoch."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json``.

    Raises:
        InputError: The file is missing or damaged, or an entry has a wrong type.
    """
    summary = read_json(path, "summary")
    with reading(path, "summary"):
        check_contents("it", summary, Summary)
    return summary


ADDED_SETTINGS = {"published_augmentation": "none", "average_weights": 0.0}
"""Settings that earlier versions did not have, with the value that their runs had in effect."""


def check_settings(before: Mapping[str, Any], after: Mapping[str, Any], out: Path, others: Sequence[str] = ()) -> None:
    """Raise InputError if the run in ``out`` cannot resume with changed settings.

    Args:
        before: Settings of the run, by flat names.
        after: Changed settings, by flat names.
        out: The run folder.
        others: Settings that may change besides `RESUMABLE`.
    """
    before = {name: value for name, value in ADDED_SETTINGS.items() if name in after} | dict(before)
    for name in {**before, **after}:
        if name not in (*RESUMABLE, *others) and before.get(name) != after.get(name):
            raise InputError(
                f"the run in {out} has {name} = {before.get(name)!r}; it cannot resume with {after.get(name)!r}; only "
                f"{', '.join((*RESUMABLE, *others))} may change"
            )
    if before["schedule"] == "one-cycle" and before["epochs"] != after["epochs"]:
        raise InputError(
            f"the one-cycle schedule of the run in {out} ends with epoch {before['epochs']}; it cannot be "
            f"extended to epoch {after['epochs']}; start a new run from its weights with --init-from {out}, or start "
            "runs that are to be extended with --schedule constant"
        )
