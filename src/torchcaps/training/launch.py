"""The processes of a run."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import InputError
from torchcaps.training.config import TrainConfig
from torchcaps.training.device import resolve_precision


class Processes(NamedTuple):
    """How many processes a run has; its batches are shared out among them."""

    devices: int
    """On this machine, one a device."""
    num_nodes: int
    """Machines."""

    @property
    def total(self) -> int:
        """On all machines."""
        return self.devices * self.num_nodes


def count_processes(config: TrainConfig) -> Processes:
    """Those that the configuration asks for, or those that torchrun has started."""
    if not TorchElasticEnvironment.detect():
        return Processes(config.devices, config.num_nodes)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Processes(devices, int(os.environ["WORLD_SIZE"]) // devices)


def launch(config: TrainConfig) -> Fabric:
    """Start the processes, or find out that torchrun has started them.

    Raises:
        InputError: The devices that the configuration asks for are not there.
    """
    processes, precision = count_processes(config), resolve_precision(config).precision
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its greetings are not for our users
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=processes.devices,
            num_nodes=processes.num_nodes,
            strategy="ddp" if processes.total > 1 else "auto",
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )
    except (
        RuntimeError,
        ValueError,
        MisconfigurationException,
    ) as error:  # Fabric's own words for a device that is not there
        wanted = f"accelerator {config.accelerator} with {processes.devices} devices"
        raise InputError(f"{wanted} is not to be had: {error}") from None
    fabric.launch()
    return fabric
