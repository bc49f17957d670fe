"""Own images at first try: drawn shapes, trained on by the defaults, several seeds; prints accuracy and CPU seconds.

    python experiments/own_images.py                   # 3 classes × 150 and 10 × 30, as folders and as .npz files
    python experiments/own_images.py --draw shapes     # only draw the first
    python experiments/own_images.py --preset sabour2017 --seeds 1 --learning-rate 0.0003    # other options are train's

The goal: ``torchcaps train compact --data folder:shapes --image-size 32`` with nothing else gives at least 95 % of the
test images in at most three minutes of two cores.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

HEIGHT, WIDTH = 48, 64
#: The first three are the three of the goal.
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring", "bar", "moon", "arrow", "hourglass")


def _corners(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape within a circle of radius 1."""
    polar = {
        "circle": [(1.0, n / 40) for n in range(40)],
        "square": [(1.0, (2 * n + 1) / 8) for n in range(4)],
        "triangle": [(1.0, n / 3 - 0.25) for n in range(3)],
        "star": [(1.0 if n % 2 == 0 else 0.4, n / 10 - 0.25) for n in range(10)],
    }
    if shape in polar:
        return [(r * math.cos(math.tau * turn), r * math.sin(math.tau * turn)) for r, turn in polar[shape]]
    others: dict[str, list[tuple[float, float]]] = {
        "cross": [
            (-0.3, -1),
            (0.3, -1),
            (0.3, -0.3),
            (1, -0.3),
            (1, 0.3),
            (0.3, 0.3),
            (0.3, 1),
            (-0.3, 1),
            (-0.3, 0.3),
            (-1, 0.3),
            (-1, -0.3),
            (-0.3, -0.3),
        ],
        "bar": [(-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)],
        "arrow": [(-1, -0.2), (0, -0.2), (0, -0.8), (1, 0), (0, 0.8), (0, 0.2), (-1, 0.2)],
        "hourglass": [(-0.8, -0.8), (0.8, -0.8), (-0.8, 0.8), (0.8, 0.8)],
        "ring": [(math.cos(math.tau * n / 40), math.sin(math.tau * n / 40)) for n in range(41)]
        + [(0.55 * math.cos(math.tau * n / 40), 0.55 * math.sin(math.tau * n / 40)) for n in range(40, -1, -1)],
        "moon": [(math.cos(math.pi * (n / 20 + 0.5)), math.sin(math.pi * (n / 20 + 0.5))) for n in range(21)]
        + [(0.45 * math.cos(math.pi * (1.5 - n / 20)), math.sin(math.pi * (1.5 - n / 20))) for n in range(21)],
    }
    return others[shape]


def draw(shape: str, random: np.random.Generator) -> Image.Image:
    """One image: the shape in a random colour, place, size and tilt on a noisy ground of another colour."""
    ground, colour = (
        tuple(
            round(255 * part)
            for part in colorsys.hsv_to_rgb(random.random(), random.uniform(*tint), random.uniform(*light))
        )
        for tint, light in (((0, 1), (0.05, 0.4)), ((0.2, 1), (0.8, 1)))
    )
    noise = random.normal(0, 12, (HEIGHT, WIDTH, 3))
    image = Image.new("RGB", (4 * WIDTH, 4 * HEIGHT), ground)
    radius = random.uniform(10, 18)
    x, y = random.uniform(radius, WIDTH - radius), random.uniform(radius, HEIGHT - radius)
    tilt = random.uniform(-0.3, 0.3)
    corners = [
        (
            4 * (x + radius * (a * math.cos(tilt) - b * math.sin(tilt))),
            4 * (y + radius * (a * math.sin(tilt) + b * math.cos(tilt))),
        )
        for a, b in _corners(shape)
    ]
    ImageDraw.Draw(image).polygon(corners, fill=colour)
    smooth = np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), float)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def images_of(classes: int, number: int, seed: int = 0) -> Iterator[tuple[str, int, Image.Image]]:
    """Shape, number and image, ``number`` of each of the first ``classes`` shapes; the same for the same seed."""
    random = np.random.default_rng(seed)
    for shape in SHAPES[:classes]:
        for n in range(number):
            yield shape, n, draw(shape, random)


def draw_folder(folder: Path, classes: int, number: int, seed: int = 0) -> None:
    """Write them as PNG files, a sub-folder a class."""
    for shape, n, image in images_of(classes, number, seed):
        (folder / shape).mkdir(parents=True, exist_ok=True)
        image.save(folder / shape / f"{n:03}.png")


def draw_npz(file: Path, classes: int, number: int, seed: int = 0) -> None:
    """Write them as arrays."""
    shapes, _, images = zip(*images_of(classes, number, seed), strict=True)
    labels = [SHAPES.index(shape) for shape in shapes]
    np.savez_compressed(file, x=np.stack(images), y=labels, class_names=SHAPES[:classes])


def measure(data: str, preset: str, seed: int, out: Path, options: Sequence[str] = ()) -> str:
    """Train by the command of the goal; what came of it, in a line."""
    options = ["--image-size", "32", "--seed", str(seed), "--out", str(out), "--no-figures", *options]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "torchcaps", "train", preset, "--data", data, *options], check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads((out / "summary.json").read_text())
    accuracies = [f"{part} {summary[part]['best']['accuracy']:.2%}" for part in ("validation", "test")]
    return f"{preset} {data} seed {seed}: {', '.join(accuracies)}, {cpu:.0f} s of CPU, {wall:.0f} s"


def main() -> None:
    """Read the options, draw, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="only draw 3 classes × 150 there")
    parser.add_argument("--preset", default="compact", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    given, options = parser.parse_known_args()
    if given.draw is not None:
        draw_folder(given.draw, 3, 150)
        return
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        found: list[str] = []
        for name, sizes in (("shapes", (3, 150)), ("ten", (10, 30))):
            draw_folder(here / name, *sizes)
            draw_npz(here / f"{name}.npz", *sizes)
        for data in ("folder:{}/shapes", "folder:{}/ten", "npz:{}/shapes.npz", "npz:{}/ten.npz"):
            for seed in range(given.seeds):
                out = here / f"run-{len(found)}"
                found.append(measure(data.format(here), given.preset, seed, out, options).replace(f"{here}/", ""))
        print("", *found, sep="\n")


if __name__ == "__main__":
    main()
