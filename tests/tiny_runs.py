"""Images, and a run small enough to train in a second."""

import csv
import json
import signal
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from torchcaps.datasets import ImageSet
from torchcaps.datasets.sources import mnist
from torchcaps.training import Progress, TrainConfig, make_config, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.state import VALIDATION_COLUMNS


def image_set(n: int = 12, shape: tuple[int, int, int] = (1, 6, 5), classes: int = 3) -> ImageSet:
    """Random images, every pixel at least 1 so that zeros can only come from a shift."""
    random = torch.Generator().manual_seed(n)
    images = torch.randint(1, 256, (n, *shape), generator=random, dtype=torch.uint8)
    return ImageSet(images, torch.arange(n) % classes)


def save_image(path: Path, pixels: np.ndarray | None = None, mode: str | None = None) -> Path:
    """Write an array as an image file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.full((6, 5), 9, np.uint8) if pixels is None else pixels)
    (image.convert(mode) if mode else image).save(path)
    return path


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files of these names into a folder."""
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    return folder


def mnist_files(
    monkeypatch: pytest.MonkeyPatch, images: Sequence[np.ndarray], labels: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """Four files that pass for MNIST's, of images and labels to train on and to test."""
    files = {}
    for part, pixels, own in zip(("train", "t10k"), images, labels, strict=True):
        for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", own.astype(np.uint8))):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            files[f"{part}-{name}"] = header + array.tobytes()
            monkeypatch.setitem(mnist.SHAPES, f"{part}-{name}", array.shape)
    return files


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


class StopAt(Heard):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.at, self.number = step, number

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


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
    """Return results on the validation images after an epoch."""
    return dict(zip(VALIDATION_COLUMNS, (loss, accuracy, accuracy if balanced is None else balanced), strict=True))


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


NARROW: dict[str, Any] = {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (16,)}
"""Options that make a network like sabour2017 small."""


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
    if preset != "baseline-cnn" and not preset.startswith("hvc2021"):
        fields |= NARROW
        if overrides.get("decoder") is False:
            del fields["decoder_hidden"]
    return make_config(preset, **(fields | overrides))
