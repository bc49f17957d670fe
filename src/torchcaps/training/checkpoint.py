"""``last.ckpt``: everything needed to go on, written whole or not at all."""

from __future__ import annotations

import dataclasses
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.files import atomic_path, require_file
from torchcaps.models import Network
from torchcaps.ops.checks import FLOATS, INTEGERS
from torchcaps.training.config import TrainConfig
from torchcaps.training.position import Position
from torchcaps.training.step import OLD, TrainStep

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHECKPOINT = "last.ckpt"

#: What Adam keeps of each parameter.
ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


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
        "model": step.network.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "progress": dataclasses.asdict(position),
        "data": data,
    }
    if fabric.is_global_zero:
        _write(out / CHECKPOINT, state)
    fabric.barrier()  # nobody leaves before the checkpoint is whole


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
    """Read ``last.ckpt``; only tensors and plain values are accepted, nothing in it is executed.

    Raises:
        InputError: It is missing, damaged, or not a checkpoint of torchcaps.
    """
    require_file(path, "checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not compare the checksums of what it reads
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise InputError(f"checkpoint {path} is not one of torchcaps, which compresses none of its parts")
            if (damaged := archive.testzip()) is not None:
                raise InputError(f"checkpoint {path} is damaged: the checksum of its part {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of the files of others is for its programmers
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
        whole = isinstance(state, dict) and state.keys() == ADAM_STATE
        if not whole or not all(is_plain(tensor) and tensor.is_floating_point() for tensor in state.values()):
            raise InputError(f"checkpoint {path} is not one of torchcaps: its optimizer must hold Adam's plain tensors")
    Position.from_dict(checkpoint["progress"])
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
    parameters, moments = list(network.parameters()), checkpoint["optimizer"]["state"]
    wanted = {name: tensor.shape for name, tensor in network.state_dict().items()}
    fits = wanted == {name: tensor.shape for name, tensor in checkpoint["model"].items()} and all(
        type(number) is int and number in range(len(parameters)) and _is_state_of(state, parameters[number])
        for number, state in moments.items()
    )
    if not fits:
        raise InputError(f"the run's {CHECKPOINT} is not of the network that its configuration describes")
    tensors = [*checkpoint["model"].values(), *(each for state in moments.values() for each in state.values())]
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise InputError(f"the run's {CHECKPOINT} holds weights or moments that are NaN or infinite")
    found = checkpoint.get("data")
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found) or found != data:
        raise InputError(
            f"the images of {config.data} are not those that the run was trained on; it goes on with the same ones only"
        )
    position, epochs = Position.from_dict(checkpoint["progress"]), config.recipe.epochs
    if position.batch >= steps_per_epoch or position.step != position.epoch * steps_per_epoch + position.batch:
        raise InputError(f"the run's {CHECKPOINT} is not of a run of {steps_per_epoch} steps an epoch, as this one is")
    steps = OLD if config.recipe.adam == "tensorflow" else float(position.step)
    if any(state["step"] != steps for state in moments.values()):
        raise InputError(
            f"the run's {CHECKPOINT} was written with another Adam than {config.recipe.adam}'s, or by a torchcaps that "
            "had one only; start a new run"
        )
    if epochs < position.epoch:
        raise InputError(f"the run has finished {position.epoch} epochs already; it cannot go on to {epochs}")
    if epochs == position.epoch and position.batch > 0:
        raise InputError(
            f"the run is within epoch {epochs + 1} already; it cannot go back to the end of epoch {epochs}"
        )


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor of numbers as networks keep them: not sparse, quantised, nested or without a place."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and tensor.dtype in (*FLOATS, *INTEGERS)
    )


def _is_state_of(state: dict[str, Tensor], parameter: Tensor) -> bool:
    """Whether these may be Adam's moments of a parameter, and its number of steps."""
    return state["step"].ndim == 0 and state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
