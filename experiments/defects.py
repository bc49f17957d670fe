"""Uneven classes: 1,000 textures without and 100 with each of three defects; capsules beside a plain CNN.

    python experiments/defects.py                                  # three seeds of compact-shared, and of the CNN
    python experiments/defects.py --draw defects.npz               # only draw
    python experiments/defects.py --seeds 1 --preset compact --image-size 32    # other options are train's

Both train with balanced class weights on the same images, the balanced accuracy of the same validation images chooses
their epoch, and the test images are looked at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import nn

from torchcaps import fit
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.files import read_json
from torchcaps.training import Progress, Recipe

SIDE, GOOD, EACH = 64, 1_000, 100
KINDS = ("good", "scratch", "hole", "stain")


def draw(kind: str, random: np.random.Generator) -> np.ndarray:
    """A woven texture, uint8 (64, 64), with a faint defect at a random place."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(float)
    turn, period, phase = random.uniform(0, np.pi), random.uniform(4, 7), random.uniform(0, 2 * np.pi, 2)
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    waves = [np.sin(2 * np.pi * each / period + phase[n]) for n, each in enumerate((along, across))]
    image = 120 + 14 * (waves[0] + waves[1])
    image += 150 * gaussian_filter(random.normal(size=(SIDE, SIDE)), 6) + random.normal(0, 12, (SIDE, SIDE))
    place, turn = random.uniform(14, SIDE - 14, 2), random.uniform(0, np.pi)
    off = np.hypot(y - place[0], x - place[1])
    if kind == "scratch":
        far = abs((y - place[0]) * np.cos(turn) - (x - place[1]) * np.sin(turn))
        image += random.uniform(50, 80) * np.exp(-(far**2) / 1.5) * (off < random.uniform(10, 18))
    elif kind == "hole":
        image -= random.uniform(50, 80) * np.exp(-((off / random.uniform(2, 4)) ** 2))
    elif kind == "stain":
        image += random.uniform(30, 50) * np.exp(-((off / random.uniform(6, 10)) ** 2))
    return image.clip(0, 255).astype(np.uint8)


def write(path: Path) -> Path:
    """All images as an .npz file."""
    random, labels = np.random.default_rng(0), np.repeat(np.arange(4), (GOOD, EACH, EACH, EACH))
    images = np.stack([draw(KINDS[label], random) for label in labels])
    order = random.permutation(len(labels))
    np.savez(path, x=images[order], y=labels[order], class_names=np.array(KINDS))
    return path


class PlainCNN(nn.Sequential):
    """The kind of network that one writes first: three convolutions with pooling, and a linear layer."""

    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))
        self.num_classes = num_classes


def train_cnn(data: Dataset, seed: int) -> tuple[float, float]:
    """Balanced accuracy and accuracy of the plain CNN on the test images."""
    torch.manual_seed(seed)
    network = PlainCNN(data.num_classes)
    how = {"class_weights": "balanced", "select": "balanced-accuracy", "batch_size": 32, "epochs": 30}
    fit(network, data, Recipe().replace(how), seed=seed, accelerator="cpu", progress=Progress())
    with torch.no_grad():
        given = network(data.test.images / 255).argmax(1)
    recalls = [(given[data.test.labels == j] == j).double().mean() for j in range(data.num_classes)]
    return float(torch.stack(recalls).mean()), float((given == data.test.labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", default="compact-shared")
    arguments, options = parser.parse_known_args()
    if arguments.draw is not None:
        write(arguments.draw)
        return
    with tempfile.TemporaryDirectory() as folder:
        file, found = write(Path(folder) / "defects.npz"), dict[str, list[float]]()
        for seed in range(arguments.seeds):
            begin = time.monotonic()
            scores = train_cnn(load_dataset(f"npz:{file}", seed=seed), seed)
            found.setdefault("plain CNN", []).append(scores[0])
            words = f"balanced {scores[0]:.1%}, accuracy {scores[1]:.1%}, {time.monotonic() - begin:.0f} s"
            print(f"plain CNN, seed {seed}: {words}", flush=True)
            out, begin = Path(folder) / f"{seed}", time.monotonic()
            command = [sys.executable, "-m", "torchcaps", "train", arguments.preset, "--data", f"npz:{file}", "--seed"]
            command += [str(seed), "--class-weights", "balanced", "--out", str(out), "--no-figures", *options]
            subprocess.run(command, check=True)
            test = read_json(out / "summary.json", "summary")["test"]["best"]
            found.setdefault(arguments.preset, []).append(test["balanced_accuracy"])
            words = f"balanced {test['balanced_accuracy']:.1%}, accuracy {test['accuracy']:.1%}"
            print(f"{arguments.preset}, seed {seed}: {words}, {time.monotonic() - begin:.0f} s", flush=True)
        for name, each in found.items():
            print(f"{name}: balanced {np.mean(each):.1%} ± {np.std(each, ddof=1) if len(each) > 1 else 0:.1%}")


if __name__ == "__main__":
    main()
