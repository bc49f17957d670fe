"""A run small enough to train in a second."""

import csv
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from torchcaps.training import Progress, TrainConfig, make_config, resume, train
from torchcaps.training.folder import read_checkpoint
from torchcaps.training.loop import JUDGED


class StopAt(Progress):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.at, self.number = step, number

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


class Heard(Progress):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[int] = []
        self.rows: list[Mapping[str, Any]] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        self.steps.append(step)

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


def run(config: TrainConfig, out: Path | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Train, and draw nothing; the summary."""
    return train(config, out, progress=progress or Progress(), figures=False)


def go_on(out: Path, progress: Progress | None = None, **overrides: Any) -> dict[str, Any]:
    """Resume, and draw nothing; the summary."""
    return resume(out, overrides=overrides, progress=progress or Progress(), figures=False)


def rows(out: Path) -> list[dict[str, str]]:
    """The lines of metrics.csv without their times."""
    found = list(csv.DictReader((out / "metrics.csv").open()))
    return [{name: row[name] for name in row if name not in ("seconds", "images_per_second")} for row in found]


def is_same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, moments, metrics, test results and files."""
    found = []
    for out in (one, other):
        end = read_checkpoint(out / "last.ckpt")
        moments = {f"{n} {key}": each for n, own in end["optimizer"]["state"].items() for key, each in own.items()}
        summary = json.loads((out / "summary.json").read_text())
        files = {path.relative_to(out) for path in out.rglob("*")}
        weights = end["model"], moments, load_file(out / "best" / "model.safetensors")
        found.append((weights, rows(out), summary["test"], files))
    (weights, *rest), (others, *their_rest) = found
    return rest == their_rest and all(map(same_weights, weights, others))


def judged(loss: float, accuracy: float, balanced: float | None = None) -> dict[str, float]:
    """What the validation images say after an epoch."""
    return dict(zip(JUDGED, (loss, accuracy, accuracy if balanced is None else balanced), strict=True))


def write_bars(path: Path) -> Path:
    """Write 18×18 images of three classes: a bar on top, in the middle, or at the bottom, in noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(150) % 3
    images = rng.integers(0, 80, (150, 18, 18))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    np.savez(path, x=images.astype(np.uint8), y=labels)
    return path


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two networks have the same weights, to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
        fields |= {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4}
        fields |= {} if overrides.get("decoder") is False else {"decoder_hidden": (16,)}
    return make_config(preset, **(fields | overrides))
