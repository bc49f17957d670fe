"""The processes of a run: how many there are, whether they can be started, and their start."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lsf import LSFEnvironment
from lightning_fabric.plugins.environments.mpi import MPIEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import InputError, shown
from torchcaps.machine import usable_cores
from torchcaps.ranges import COUNT, PROCESSES, Range
from torchcaps.training.config import TrainConfig
from torchcaps.training.environment import pick_device, resolve_precision

#: How long processes wait for each other, at the start and later at any step.
PATIENCE = timedelta(minutes=30)
#: Programs that start processes themselves, as Fabric knows them: torchrun and those of clusters.
STARTED_ELSEWHERE = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
#: Environment variables that name the meeting place of the machines and the number of this one.
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class Processes(NamedTuple):
    """How many processes a run has; they share its batches."""

    devices: int
    """How many processes this machine has, one a device."""
    num_nodes: int
    """How many machines there are."""

    @property
    def total(self) -> int:
        """How many processes all machines have."""
        return self.devices * self.num_nodes


def count_processes(config: TrainConfig) -> Processes:
    """Count the processes that the configuration asks for, or those that torchrun has started.

    Raises:
        InputError: torchrun's environment variables are not the numbers that torchrun writes.
    """
    if not TorchElasticEnvironment.detect():
        return Processes(config.devices, config.num_nodes)
    devices = _environment_number("LOCAL_WORLD_SIZE", PROCESSES)
    return Processes(devices, _environment_number("WORLD_SIZE", COUNT) // devices)


def check_processes(config: TrainConfig) -> None:
    """Raise unless this machine can start its processes, and the processes of several machines can meet.

    Processes that torchrun or a cluster's own program has started are not checked.

    Raises:
        InputError: There are fewer devices on this machine, or, on a CPU, fewer cores that this process may use; or
            there are several machines, and the environment does not say where they meet.
    """
    if any(environment.detect() for environment in STARTED_ELSEWHERE):
        return
    device = pick_device(config.accelerator).type
    there, words = {
        "cuda": (torch.cuda.device_count(), "the CUDA devices of this machine"),
        "mps": (1, "as there is one MPS device"),
        "cpu": (usable_cores(), "the processor cores that this process may use"),
    }[device]
    if config.devices > there:
        raise InputError(f"devices must be at most {there}, {words}, got {config.devices}")
    if config.num_nodes > 1:
        missing = [name for name in MEETING_PLACE if name not in os.environ]
        if missing:
            raise InputError(
                f"num_nodes is {config.num_nodes}, but the environment does not say where the machines meet: set "
                f"{', '.join(missing)} on each of them, or start with torchrun"
            )
        _environment_number("MASTER_PORT", Range(1, 65_535))
        _environment_number("NODE_RANK", Range(0, config.num_nodes - 1))


def launch(config: TrainConfig) -> Fabric:
    """Start the processes, unless they have been started already, and wait for all of them.

    Raises:
        InputError: The devices that the configuration asks for are not there, or the processes did not meet in time.
    """
    check_processes(config)
    processes, precision = count_processes(config), resolve_precision(config).precision
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it greets its own users
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=processes.devices,
            num_nodes=processes.num_nodes,
            strategy=DDPStrategy(timeout=PATIENCE) if processes.total > 1 else "auto",
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )
    except (RuntimeError, ValueError, MisconfigurationException) as error:  # devices that are not there
        wanted = f"{processes.devices} devices with accelerator {config.accelerator}"
        raise InputError(f"this machine cannot give {wanted}: {error}") from None
    if processes.num_nodes > 1:
        _announce(processes)
    try:
        fabric.launch()
    except (RuntimeError, ValueError) as error:  # torch: no other process came; Fabric: the cluster has other numbers
        if processes.total == 1:
            raise
        reason = str(error).partition("\n")[0]
        raise InputError(f"the {processes.total} processes of the run did not find each other: {reason}") from error
    return fabric


def _announce(processes: Processes) -> None:
    """Print what this machine waits for, unless another program has started its processes."""
    if any(environment.detect() for environment in STARTED_ELSEWHERE) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    address, port, rank = (os.environ[name] for name in MEETING_PLACE)
    minutes = PATIENCE.total_seconds() / 60
    print(
        f"Machine {rank} of 0 to {processes.num_nodes - 1}: waiting for all {processes.num_nodes} machines, "
        f"{processes.total} processes together, to meet at {address}:{port}, {minutes:g} minutes at most",
        file=sys.stderr,
        flush=True,
    )


def _environment_number(name: str, within: Range) -> int:
    """A whole number from an environment variable; InputError if it holds none, or one out of its range."""
    text = os.environ.get(name, "")
    if not (text.isdecimal() and len(text) < 20 and int(text) in within):
        raise InputError(f"the environment variable {name} must be {within}, got {shown(text)}")
    return int(text)
