"""A run small enough to train in a second."""

import os
import signal
from pathlib import Path

from torchcaps.training import TrainConfig, make_config
from torchcaps.training.progress import Silence


class StopAt(Silence):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.at, self.number = step, number

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float | None) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


def tiny_config(bars: Path, preset: str = "sabour2017", **overrides: object) -> TrainConfig:
    """The configuration of a tiny run; other values by name."""
    fields: dict[str, object] = {
        "data": f"npz:{bars}",
        "epochs": 3,
        "batch_size": 16,
        "validation_size": 12,
        "max_shift": 1,
        "accelerator": "cpu",
    }
    if preset != "baseline-cnn":
        fields |= {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (16,)}
    return make_config(preset, **(fields | overrides))
