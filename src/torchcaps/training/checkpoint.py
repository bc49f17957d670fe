"""The progress of a run, and ``last.ckpt``: everything needed to go on with it, written whole or not at all."""

from __future__ import annotations

import csv
import dataclasses
import io
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcaps.checks import FLOATS, INTEGERS
from torchcaps.errors import InputError
from torchcaps.files import COUNT, NUMBER, TEXT, TEXTS, atomic_path, optional, require_file
from torchcaps.models import Network
from torchcaps.parts import Spec, build, complete, own_parts
from torchcaps.training.config import TrainConfig
from torchcaps.training.step import SUMS, TrainStep

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHECKPOINT = "last.ckpt"

#: The columns of metrics.csv.
COLUMNS = {
    "epoch": COUNT,
    "step": COUNT,
    "seconds": NUMBER,
    "images_per_second": NUMBER,
    "learning_rate": NUMBER,
    "train_loss": NUMBER,
    "train_classification_loss": NUMBER,
    "train_reconstruction_loss": optional(NUMBER),  # None for a network without a decoder
    "train_accuracy": NUMBER,
    "validation_loss": NUMBER,
    "validation_accuracy": NUMBER,
}


def write_checkpoint(fabric: Fabric, out: Path, step: TrainStep, progress: ProgressState, data: list[int]) -> None:
    """Write the checkpoint of a run into its folder ``out``; all processes must call it, and the first one writes.

    Raises:
        OSError: The folder cannot be written, or the disk is full; an earlier checkpoint is then as it was.
    """
    state = {
        "model": step.network.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "progress": dataclasses.asdict(progress),
        "data": data,
    }
    if fabric.is_global_zero:
        _write(out / CHECKPOINT, state)
    fabric.barrier()  # no process goes on before the checkpoint is whole


def _write(path: Path, state: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch's writer hides the system's reason, such as a full disk
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__cause__ or reason.__context__
            if reason is None:
                raise
            raise OSError(reason.errno, f"the checkpoint could not be written: {reason.strerror}", str(path)) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read ``last.ckpt``; only tensors and plain values are accepted, and nothing in it is executed.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint of torchcaps.
    """
    require_file(path, "checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not compare checksums
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise InputError(f"checkpoint {path} is not one of torchcaps, which compresses none of its parts")
            if (damaged := archive.testzip()) is not None:
                raise InputError(f"checkpoint {path} is damaged: the checksum of its part {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about such files are for programmers
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, InputError):
        raise
    except Exception as error:  # torch.load raises anything from pickle's errors to RuntimeError on damaged files
        reason = str(error).partition("\n")[0]
        raise InputError(f"checkpoint {path} is damaged or no checkpoint: {reason}") from None
    parts = ("model", "optimizer", "progress")
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(part), dict) for part in parts):
        raise InputError(f"checkpoint {path} is not one of torchcaps: it must hold model, optimizer and progress")
    if not all(isinstance(name, str) and is_plain(tensor) for name, tensor in checkpoint["model"].items()):
        raise InputError(f"checkpoint {path} is not one of torchcaps: its model must be made of plain tensors")
    optimizer = checkpoint["optimizer"]
    if not isinstance(optimizer.get("state"), dict) or not isinstance(optimizer.get("param_groups"), list):
        raise InputError(f"checkpoint {path} is not one of torchcaps: its optimizer must hold state and param_groups")
    for state in optimizer["state"].values():
        if not isinstance(state, dict) or not all(value is None or is_plain(value) for value in state.values()):
            raise InputError(f"checkpoint {path} is not one of torchcaps: its optimizer must hold plain tensors")
    steps = ProgressState.from_dict(checkpoint["progress"]).step
    for state in optimizer["state"].values():
        if isinstance(state.get("step"), Tensor) and state["step"].ndim == 0 and state["step"] == 2**24:
            state["step"] = torch.tensor(float(steps))  # version 0.2 kept 2^24 with TensorFlow's Adam, whatever it was
    return checkpoint


def check_fits(
    checkpoint: dict[str, Any], config: TrainConfig, data: list[int], network: Network, steps_per_epoch: int
) -> None:
    """Raise InputError unless a checkpoint is of this network, these data, and no more epochs than asked for.

    Args:
        checkpoint: As :func:`read_checkpoint` returns it.
        config: The run that is to go on.
        data: The fingerprint of its data.
        network: Its network.
        steps_per_epoch: Of the run.
    """
    moments = checkpoint["optimizer"]["state"]
    fits = _kinds(network.state_dict()) == _kinds(checkpoint["model"])
    if not fits or not _are_moments(moments, config.recipe.optimizer, list(network.parameters())):
        raise InputError(f"the run's {CHECKPOINT} is not of the network that its configuration describes")
    tensors = [*checkpoint["model"].values(), *(each for state in moments.values() for each in state.values())]
    if not all(tensor is None or tensor.isfinite().all() for tensor in tensors):
        raise InputError(f"the run's {CHECKPOINT} holds weights or moments that are NaN or infinite")
    found = checkpoint.get("data")
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found) or found != data:
        raise InputError(
            f"the images of {config.data} are not those that the run was trained on; it goes on with the same ones only"
        )
    progress, epochs = ProgressState.from_dict(checkpoint["progress"]), config.recipe.epochs
    if progress.batch >= steps_per_epoch or progress.step != progress.epoch * steps_per_epoch + progress.batch:
        raise InputError(f"the run's {CHECKPOINT} is not of a run of {steps_per_epoch} steps an epoch, as this one is")
    if epochs < progress.epoch:
        raise InputError(f"the run has finished {progress.epoch} epochs already; it cannot go on to {epochs}")
    if epochs == progress.epoch and progress.batch > 0:
        raise InputError(
            f"the run is within epoch {epochs + 1} already; it cannot go back to the end of epoch {epochs}"
        )


def is_plain(tensor: object) -> bool:
    """Whether this is a plain tensor, each number in a place of its own: not sparse, nested or on the meta device."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and tensor.dtype in (*FLOATS, *INTEGERS)
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the numbers lie side by side, none of them shared, in whatever order of the dimensions."""
    sides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    place = 1
    for stride, size in sides:
        if stride != place and tensor.numel():
            return False
        place *= size
    return True


def _kinds(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The shape of each tensor, and whether it holds fractions."""
    return {name: each if each is None else (each.shape, each.is_floating_point()) for name, each in tensors.items()}


def _are_moments(moments: Mapping[Any, Any], optimizer: Spec, parameters: Sequence[Tensor]) -> bool:
    """Whether these may be what an optimizer keeps of parameters; what one of one's own keeps is its own affair."""
    if not all(type(number) is int and number in range(len(parameters)) for number in moments):
        return False
    if own_parts("optimizer", complete("optimizer", optimizer)):
        return True
    scratch = [nn.Parameter(torch.empty_like(each, device="meta")) for each in parameters]
    for each in scratch:
        each.grad = torch.empty_like(each)
    fresh = build("optimizer", optimizer, params=scratch, learning_rate=1.0)
    fresh.step()
    return all(_kinds(state) == _kinds(fresh.state[scratch[number]]) for number, state in moments.items())


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
    """The sums of the running epoch; see :class:`~torchcaps.training.step.Tally`."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The rows of metrics.csv."""
    peak_memory_mib: float | None = None
    """The peak memory of a process over all sittings up to the last checkpoint; None where unknown."""
    commands: list[str] = field(default_factory=list)
    """The command that started the run, and those that resumed it."""
    commits: list[str | None] = field(default_factory=list)
    """The commit of the source tree at each of these starts; None where it is installed or was not noted."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProgressState:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            InputError: The values are not those of a run's progress.
        """
        try:
            sums = values["sums"]
            if not isinstance(sums, Mapping):
                raise TypeError("its sums have no names")
            state = cls(**{**values, "sums": {name: sums[name] for name in SUMS}})
        except (TypeError, KeyError) as error:
            raise InputError(f"the run's checkpoint is not of this version of torchcaps: {error}") from None
        for name, fits in _FITS.items():
            if not fits(getattr(state, name)):
                raise InputError(f"the run's checkpoint is none of torchcaps: its {name} is not valid")
        if len(state.history) != state.epoch:
            raise InputError("the run's checkpoint is none of torchcaps: its history is not valid")
        return state

    def best(self, select: str) -> dict[str, Any]:
        """The row of the epoch that the validation images chose."""
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))

    def note_start(self, command: str, commit: str | None) -> None:
        """Remember the command of a sitting, and its commit: at its end the tree may be at another one."""
        not_noted: list[str | None] = [None] * (len(self.commands) - len(self.commits))  # by an earlier version
        self.commits += [*not_noted, commit]
        self.commands.append(command)

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


def _is_row(row: object, epoch: int) -> bool:
    """Whether this is the row of an epoch, counted from 1."""
    if not isinstance(row, Mapping) or row.keys() != COLUMNS.keys():
        return False
    return all(kind.fits(row[name]) for name, kind in COLUMNS.items()) and row["epoch"] == epoch


def _are_rows(history: object) -> bool:
    return isinstance(history, list) and all(_is_row(row, epoch) for epoch, row in enumerate(history, start=1))


_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "batch", "step"), COUNT.fits),
    **dict.fromkeys(("seconds", "epoch_seconds"), NUMBER.fits),
    "sums": lambda sums: all(map(NUMBER.fits, sums.values())),
    "history": _are_rows,
    "peak_memory_mib": optional(NUMBER).fits,
    "commands": TEXTS.fits,
    "commits": lambda commits: isinstance(commits, list) and all(map(optional(TEXT).fits, commits)),
}
"""Of a state of progress from a file: whether the value of a field is possible."""
