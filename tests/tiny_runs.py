"""A run small enough to train in a second."""

from pathlib import Path

from torchcaps.training import TrainConfig, make_config


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
