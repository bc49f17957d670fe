"""The run folder: its files, its lock, and ``last.ckpt``, with which a run goes on exactly.

```text
RUN/config.json      the complete configuration; torchcaps train --config runs it again
    metrics.csv      one line an epoch
    last.ckpt        everything needed to go on, written whole or not at all
    best/            weights of the epoch chosen on the validation images, as save_pretrained writes them
    summary.json     results, hardware, versions, command
    figures/         pictures
    tensorboard/     what a logger writes, if the recipe names one
    .lock.json       the process that trains in it, while one does
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
from torchcaps.models.pretrained import CLASSES, CONFIG, WEIGHTS, weights_file
from torchcaps.ranges import Amount, Count, Finite, Index, Seed

if TYPE_CHECKING:
    from lightning_fabric import Fabric

METRICS, SUMMARY, CHECKPOINT, BEST, FIGURES = "metrics.csv", "summary.json", "last.ckpt", "best", "figures"
BEST_FILES = tuple(f"{BEST}/{name}" for name in (CONFIG, WEIGHTS, CLASSES))
#: Files in a run folder while a process writes to it: the one that is locked, and the one that names the process.
LOCK, HOLDER = ".lock", ".lock.json"
#: Settings of a recipe that may change when a run goes on: they do not change what is computed, only how long.
RESUMABLE = ("epochs", "stop_at", "patience", "logger")


class Part(TypedDict):
    """The results of a network on the test images, in a summary."""

    accuracy: Finite
    error: Finite
    loss: Finite


class Parts(TypedDict):
    """The results of the network of the best epoch, and of the last one."""

    best: Part
    last: Part


class Images(TypedDict):
    """The number of images."""

    train: Index
    validation: Index
    test: Index


class Hardware(TypedDict):
    """The machine that a run was computed on."""

    processor: NotRequired[str | None]
    gpu: NotRequired[str | None]
    threads: Count
    processes: NotRequired[Count]


class Summary(TypedDict):
    """The entries of ``summary.json`` that are read again; it has others for people."""

    seed: Seed
    epochs: Index
    best_epoch: Index
    images: Images
    test: Parts
    seconds: Amount
    hardware: Hardware
    versions: dict[str, str]


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Keep other processes from writing to a run folder; readers need no lock.

    The lock of a killed process ends with it; its temporary files are removed by the next one that has the lock. A file
    system without locks keeps no process out. If the folder is empty at the end, it is removed.

    Args:
        folder: It is made if it is not there.

    Returns:
        A context, whose value is the folder.

    Raises:
        InputError: Another process has locked it; the error says which one, on which machine and since when.
        OSError: The folder cannot be written.
    """
    made = [folder, *(each for each in folder.parents if not each.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        if (folder / LOCK).is_symlink():
            (folder / LOCK).unlink()
        try:
            stack.enter_context(locked(FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)))
        except Timeout:
            raise InputError(f"{folder} is in use: {_holder(folder)}; wait for its end, or stop it") from None
        except (NotImplementedError, OSError) as error:
            if getattr(error, "errno", None) not in (None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        stack.callback((folder / HOLDER).unlink, missing_ok=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        write_json(folder / HOLDER, {"process": os.getpid(), "host": socket.gethostname(), "since": since})
        remove_leftovers(folder)
        yield folder


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # one has files, or is gone
        for each in folders:
            each.rmdir()


def _holder(folder: Path) -> str:
    """The process that has locked a folder, in words."""
    try:
        holder = read_json(folder / HOLDER, "note of who trains there")
    except (InputError, OSError):  # it is just being written, or removed
        return "another process trains in it"
    return f"process {holder.get('process')} on {holder.get('host')} has trained in it since {holder.get('since')}"


@contextmanager
def on_main_process(fabric: Fabric, folder: AbstractContextManager[Path | None]) -> Iterator[Path | None]:
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
        yield taken


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of a killed process; no process may be writing to the folder now."""
    for name in (CONFIG, METRICS, CHECKPOINT, SUMMARY, *BEST_FILES):
        remove_temporaries(out / name)


def save_network(network: nn.Module, class_names: Sequence[str] | None, folder: Path) -> None:
    """Write the files of a network, or only the weights of a module that no description could bring back."""
    if isinstance(network, Network):
        with suppress(InputError):  # a part is not registered
            return network.save_files(folder, class_names=class_names)
    weights = {name: each.detach().cpu().clone().contiguous() for name, each in network.state_dict().items()}
    with atomic_path(folder / WEIGHTS) as temporary:
        temporary.write_bytes(weights_file(weights))
    return None


def write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.csv``, a row for each epoch."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json``.

    Raises:
        InputError: The file is missing or damaged, or one of its entries is not what a run writes.
    """
    summary = read_json(path, "summary")
    with reading(path, "summary"):
        check_contents("it", summary, Summary)
    return summary


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
