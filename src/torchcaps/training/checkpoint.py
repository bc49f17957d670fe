"""``last.ckpt``: everything needed to go on, written whole or not at all."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.files import commit
from torchcaps.models import Model
from torchcaps.training.config import TrainConfig
from torchcaps.training.position import Position
from torchcaps.training.step import TrainStep

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHECKPOINT = "last.ckpt"

#: What torch's writer says instead of the operating system's reason, such as a full disk.
WRITER_ERRORS = ("PytorchStreamWriter", "cannot be opened", "does not exist")


def write_checkpoint(fabric: Fabric, out: Path, step: TrainStep, position: Position, data: list[int]) -> None:
    """Write the checkpoint of a run; all processes must call it.

    Args:
        fabric: Whose first process writes.
        out: The run folder.
        step: Holds weights and Adam's moments.
        position: Where the run is.
        data: The fingerprint of its data.

    Raises:
        OSError: The folder cannot be written, or the disk is full; an earlier checkpoint is then as it was.
    """
    state = {
        "model": step.model,
        "optimizer": step.optimizer,
        "progress": dataclasses.asdict(position),
        "data": data,
    }
    final, temporary = out / CHECKPOINT, out / f".{CHECKPOINT}.tmp"
    try:
        fabric.save(temporary, state)
        if fabric.is_global_zero:
            commit(temporary, final)
        fabric.barrier()  # nobody leaves before the checkpoint is whole
    except RuntimeError as error:
        if not any(words in str(error) for words in WRITER_ERRORS):
            raise
        raise OSError(f"the checkpoint {final} could not be written: {str(error).partition(chr(10))[0]}") from error
    finally:
        if fabric.is_global_zero:
            temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read ``last.ckpt``; only tensors and plain values are accepted, nothing in it is executed.

    Raises:
        InputError: It is missing, damaged, or not a checkpoint of torchcaps.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not compare the checksums of what it reads
            if (damaged := archive.testzip()) is not None:
                raise InputError(f"checkpoint {path} is damaged: the checksum of its part {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"there is no checkpoint {path}") from None
    except (OSError, InputError):
        raise
    except Exception as error:  # torch.load raises anything from pickle's errors to RuntimeError on damaged files
        reason = str(error).partition("\n")[0]
        raise InputError(f"checkpoint {path} is damaged or no checkpoint: {reason}") from None
    parts = ("model", "optimizer", "progress")
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(part), dict) for part in parts):
        raise InputError(f"checkpoint {path} is not one of torchcaps: it must hold model, optimizer and progress")
    if not all(isinstance(tensor, Tensor) for tensor in checkpoint["model"].values()):
        raise InputError(f"checkpoint {path} is not one of torchcaps: its model must be made of tensors")
    if not {"state", "param_groups"} <= checkpoint["optimizer"].keys():
        raise InputError(f"checkpoint {path} is not one of torchcaps: its optimizer must hold state and param_groups")
    Position.from_dict(checkpoint["progress"])
    return checkpoint


def check_fits(checkpoint: dict[str, Any], config: TrainConfig, data: list[int], network: Model) -> None:
    """Raise InputError unless a checkpoint is of this network, these data, and no more epochs than asked for.

    Args:
        checkpoint: As :func:`read_checkpoint` returns it.
        config: The run that is to go on.
        data: The fingerprint of its data.
        network: Its network.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}:
        raise InputError(f"the run's {CHECKPOINT} is not of the network that its configuration describes")
    if checkpoint.get("data") != data:
        raise InputError(
            f"the images of {config.data} are not those that the run was trained on; it goes on with the same ones only"
        )
    position, epochs = Position.from_dict(checkpoint["progress"]), config.recipe.epochs
    if epochs < position.epoch:
        raise InputError(f"the run has finished {position.epoch} epochs already; it cannot go on to {epochs}")
    if epochs == position.epoch and position.batch > 0:
        raise InputError(
            f"the run is within epoch {epochs + 1} already; it cannot go back to the end of epoch {epochs}"
        )
