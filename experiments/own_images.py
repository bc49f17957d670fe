"""Own images at first try: drawn ones, trained on by the command line, several seeds; accuracy and processor time.

    python experiments/own_images.py shapes --image-size 32        # 3 classes × 150 images
    python experiments/own_images.py shapes-of-ten --image-size 32 --npz       # 10 × 30, as a file
    python experiments/own_images.py defects --class-weights balanced --cnn    # 1,000 good, 100 of each of 3 defects
    python experiments/own_images.py letters --fonts FOLDER --preset first     # A to Z, once in each font of it
    python experiments/own_images.py defects --draw defects        # only draw

Other options are train's. ``--cnn`` also trains a CNN such as one writes first, with balanced class weights; the
balanced accuracy of the same validation images chooses its epoch. The test images are looked at once. The 87 fonts of
the docs are Debian's fonts-dejavu and fonts-liberation, and the .ttf files of PyPI's font-roboto, font-source-sans-pro,
font-source-serif-pro, font-manrope (without the variable one), font-caladea and font-amatic-sc.
"""

from __future__ import annotations

import argparse
import colorsys
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter
from torch import nn

from torchcaps import fit
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.files import read_json
from torchcaps.training import Progress, Recipe

Drawn = Iterator[tuple[str, Image.Image]]
"""Images with the names of their classes."""
CIRCLE, ARC = np.exp(2j * np.pi * np.arange(41) / 40), np.exp(1j * np.pi * np.linspace(0.5, 1.5, 21))
SHAPES = {
    "circle": CIRCLE,
    "square": CIRCLE[5::10],
    "triangle": -1j * np.exp(2j * np.pi * np.arange(3) / 3),
    "cross": np.outer(1j ** np.arange(4), (0.3 - 1j, 0.3 - 0.3j, 1 - 0.3j)).flatten(),
    "star": -1j * np.exp(2j * np.pi * np.arange(10) / 10) * np.tile((1, 0.4), 5),
    "ring": np.append(CIRCLE, 0.55 * CIRCLE[::-1]),
    "bar": np.array((-1 - 0.25j, 1 - 0.25j, 1 + 0.25j, -1 + 0.25j)),
    "moon": np.append(ARC, (0.45 * ARC.real + 1j * ARC.imag)[::-1]),
    "arrow": np.array((-1 - 0.2j, -0.2j, -0.8j, 1, 0.8j, 0.2j, -1 + 0.2j)),
    "hourglass": np.array((-0.8 - 0.8j, 0.8 - 0.8j, -0.8 + 0.8j, 0.8 + 0.8j)),
}
"""Their corners within a circle of radius 1, x + iy; the first three are the easier task."""
DEFECTS = {"good": 1_000, "scratch": 100, "hole": 100, "stain": 100}


def draw_shapes(classes: int, number: int, height: int = 48, width: int = 64) -> Drawn:
    """Each shape in random colours, places, sizes and tilts, on a noisy ground of another colour."""
    random = np.random.default_rng(0)

    def colour(saturation: tuple[float, float], value: tuple[float, float]) -> tuple[int, ...]:
        parts = colorsys.hsv_to_rgb(random.random(), random.uniform(*saturation), random.uniform(*value))
        return tuple(round(255 * part) for part in parts)

    for shape in list(SHAPES)[:classes]:
        for _ in range(number):
            ground, ink = colour((0, 1), (0.05, 0.4)), colour((0.2, 1), (0.8, 1))
            noise = random.normal(0, 12, (height, width, 3))
            image, radius = Image.new("RGB", (4 * width, 4 * height), ground), random.uniform(10, 18)
            centre = random.uniform(radius, width - radius) + 1j * random.uniform(radius, height - radius)
            corners = 4 * (centre + radius * SHAPES[shape] * np.exp(1j * random.uniform(-0.3, 0.3)))
            ImageDraw.Draw(image).polygon([(each.real, each.imag) for each in corners], fill=ink)
            smooth = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), float)
            yield shape, Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def draw_defects(side: int = 64) -> Drawn:
    """Woven textures, some of them with a faint defect at a random place."""
    random, (y, x) = np.random.default_rng(0), np.mgrid[:side, :side].astype(float)
    for kind, number in DEFECTS.items():
        for _ in range(number):
            turn, period, phases = random.uniform(0, np.pi), random.uniform(4, 7), random.uniform(0, 2 * np.pi, 2)
            along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
            threads = sum(np.sin(2 * np.pi * (along, across)[n] / period + phases[n]) for n in (0, 1))
            image = 120 + 14 * threads + 150 * gaussian_filter(random.normal(size=(side, side)), 6)
            image += random.normal(0, 12, (side, side))
            (down, right), turn = random.uniform(14, side - 14, 2), random.uniform(0, np.pi)
            off = np.hypot(y - down, x - right)
            if kind == "scratch":
                far = abs((y - down) * np.cos(turn) - (x - right) * np.sin(turn))
                image += random.uniform(50, 80) * np.exp(-(far**2) / 1.5) * (off < random.uniform(10, 18))
            elif kind == "hole":
                image -= random.uniform(50, 80) * np.exp(-((off / random.uniform(2, 4)) ** 2))
            elif kind == "stain":
                image += random.uniform(30, 50) * np.exp(-((off / random.uniform(6, 10)) ** 2))
            yield kind, Image.fromarray(image.clip(0, 255).astype(np.uint8))


def draw_letters(fonts: Path, side: int = 64) -> Drawn:
    """A to Z, white on black, once in each of the fonts."""
    for file in sorted(fonts.glob("*.[ot]tf")):
        font = ImageFont.truetype(str(file), 3 * side // 4)
        for letter in string.ascii_uppercase:
            image = Image.new("L", (side, side))
            ImageDraw.Draw(image).text((side / 2, side / 2), letter, 255, font, anchor="mm")
            yield letter, image


def write(images: Drawn, path: Path) -> str:
    """Write a folder, or a file if its name ends in .npz; the name that train knows them by."""
    if path.suffix == ".npz":
        labels, pixels = zip(*images, strict=True)
        names, numbers = np.unique(labels, return_inverse=True)
        np.savez_compressed(path, x=np.stack(pixels), y=numbers, class_names=names)
        return f"npz:{path}"
    for number, (label, image) in enumerate(images):
        (path / label).mkdir(parents=True, exist_ok=True)
        image.save(path / label / f"{number:05}.png")
    return f"folder:{path}"


class PlainCNN(nn.Sequential):
    """The kind of network that one writes first: three convolutions with pooling, and a linear layer."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in ((in_channels, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))
        self.num_classes = num_classes


def train_cnn(data: Dataset, seed: int) -> dict[str, float]:
    """Accuracy and balanced accuracy of the plain CNN on the test images."""
    torch.manual_seed(seed)
    network = PlainCNN(data.in_shape[0], data.num_classes)
    how = {"class_weights": "balanced", "select": "balanced-accuracy", "batch_size": 32, "epochs": 30}
    fit(network, data, Recipe().replace(how), seed=seed, accelerator="cpu", progress=Progress())
    with torch.no_grad():
        right = (network(data.test.images / 255).argmax(1) == data.test.labels).double()
    recalls = [right[data.test.labels == j].mean() for j in range(data.num_classes)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(torch.stack(recalls).mean())}


def train_preset(preset: str, data: str, seed: int, out: Path, options: Sequence[str]) -> dict[str, float]:
    """The results of a run of the command line on the test images."""
    command = [sys.executable, "-m", "torchcaps", "train", preset, "--data", data, "--seed", str(seed)]
    subprocess.run([*command, "--out", str(out), "--no-figures", *options], check=True)
    summary = read_json(out / "summary.json", "summary")
    test = summary["test"]["best"]
    return {**{name: test[name] for name in ("accuracy", "balanced_accuracy")}, "epochs": summary["epochs"]}


def main() -> None:
    """Read the options, draw, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("shapes", "shapes-of-ten", "defects", "letters"))
    parser.add_argument("--draw", type=Path, metavar="PATH", help="only draw: a folder, or a file if it ends in .npz")
    parser.add_argument("--npz", action="store_true", help="train on a file instead of a folder")
    parser.add_argument("--fonts", type=Path, help="a folder of .ttf and .otf files")
    parser.add_argument("--preset", default="compact-shared", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--image-size", type=int, metavar="SIDE")
    parser.add_argument("--cnn", action="store_true", help="train a plain CNN too")
    given, options = parser.parse_known_args()
    options += [] if given.image_size is None else ["--image-size", str(given.image_size)]
    drawings: dict[str, Callable[[], Drawn]] = {
        "shapes": lambda: draw_shapes(3, 150),
        "shapes-of-ten": lambda: draw_shapes(10, 30),
        "defects": draw_defects,
        "letters": lambda: draw_letters(given.fonts),
    }
    if given.draw is not None:
        write(drawings[given.task](), given.draw)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = write(drawings[given.task](), Path(folder) / (f"{given.task}.npz" if given.npz else given.task))
        trainings: dict[str, Callable[[int], dict[str, float]]] = {
            given.preset: lambda seed: train_preset(given.preset, data, seed, Path(folder) / f"run-{seed}", options)
        }
        if given.cnn:
            trainings["plain CNN"] = lambda seed: train_cnn(
                load_dataset(data, image_size=given.image_size, seed=seed), seed
            )
        for name, run in trainings.items():
            results = []
            for seed in range(given.seeds):
                before = sum(os.times()[:4])
                results.append(run(seed))
                words = ", ".join(f"{key} {value:.4g}" for key, value in results[-1].items())
                print(f"{name}, seed {seed}: {words}, {sum(os.times()[:4]) - before:.0f} s of CPU", flush=True)
            for key in ("accuracy", "balanced_accuracy"):
                each = [result[key] for result in results]
                print(f"{name}: {key} {np.mean(each):.2%} ± {np.std(each, ddof=len(each) > 1):.2%}", flush=True)


if __name__ == "__main__":
    main()
