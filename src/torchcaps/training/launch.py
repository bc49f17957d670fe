"""The processes of a run."""

from __future__ import annotations

import logging
import os

from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import InputError
from torchcaps.training.config import TrainConfig


def launch(config: TrainConfig) -> Fabric:
    """Start the processes, or find out that torchrun has started them.

    Raises:
        InputError: The devices that the configuration asks for are not there.
    """
    devices, num_nodes = config.devices, config.num_nodes
    if TorchElasticEnvironment.detect():
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its greetings are not for our users
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy="ddp" if devices * num_nodes > 1 else "auto",
            precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        )
    except (
        RuntimeError,
        ValueError,
        MisconfigurationException,
    ) as error:  # Fabric's own words for a device that is not there
        raise InputError(f"accelerator {config.accelerator} with {devices} devices is not to be had: {error}") from None
    fabric.launch()
    return fabric
