"""Register drawn images as a data set, and define a table of networks trained on them.

    torchcaps train compact-shared --plugin examples/own_images.py --data drawn:defects --image-size 32
    python experiments/run.py examples/own_images.py --row defects --row defects-cnn --results runs/own
    python experiments/report.py examples/own_images.py --results runs/own

The images are written to a folder and read like your own folder. ``drawn:`` takes the name of a drawing or a folder of
fonts, whose letters are drawn. The docs use 87 fonts: Debian's fonts-dejavu and fonts-liberation, and the .ttf files of
PyPI's font-roboto, font-source-sans-pro, font-source-serif-pro, font-manrope (without the variable one), font-caladea
and font-amatic-sc.
"""

from __future__ import annotations

import colorsys
import dataclasses
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter

sys.path.append(str(Path(__file__).parents[1]))  # the folder of experiments/
from experiments.table import Row, Table
from torchcaps.analysis import evaluate
from torchcaps.datasets import DataRequest, ImageSet, Splits, register_dataset
from torchcaps.datasets.sources.folder import load_folder
from torchcaps.errors import unknown_name
from torchcaps.training import Run

#: Pairs of the name of a class and an image.
Drawn = Iterator[tuple[str, Image.Image]]
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
"""Corners of each shape within a circle of radius 1, as x + iy; the first three make the easier task."""
DEFECTS = {"good": 1_000, "scratch": 100, "hole": 100, "stain": 100}


def draw_shapes(classes: int, number: int, height: int = 48, width: int = 64) -> Drawn:
    """Draw shapes in random colours, positions, sizes and orientations, on noisy backgrounds."""
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
    """Draw woven textures, some of them with a faint defect at a random position."""
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
    """Draw A to Z, white on black, once in each font."""
    for file in sorted(fonts.glob("*.[ot]tf")):
        font = ImageFont.truetype(str(file), 3 * side // 4)
        for letter in string.ascii_uppercase:
            image = Image.new("L", (side, side))
            ImageDraw.Draw(image).text((side / 2, side / 2), letter, 255, font, anchor="mm")
            yield letter, image


DRAWINGS: dict[str, Callable[[], Drawn]] = {
    "shapes": partial(draw_shapes, 3, 150),
    "shapes-of-ten": partial(draw_shapes, 10, 30),
    "defects": draw_defects,
}


@register_dataset(
    "drawn", title="Drawn shapes, textures and letters", source="drawn here", licence="MIT", takes_path=True
)
def load_drawn(request: DataRequest) -> Splits:
    """Draw the images of a drawing, or the letters of a folder of fonts, and read them like a user's folder."""
    name = str(request.path)
    if name not in DRAWINGS and not request.path.is_dir():
        raise unknown_name("drawing or folder of fonts", name, DRAWINGS)
    drawing = DRAWINGS.get(name, partial(draw_letters, request.path))
    with tempfile.TemporaryDirectory() as folder:
        for number, (label, image) in enumerate(drawing()):
            file = Path(folder, label, f"{number:05}.png")
            file.parent.mkdir(exist_ok=True)
            image.save(file)
        return load_folder(dataclasses.replace(request, path=Path(folder)))


def recalls(run: Run, test: ImageSet) -> dict[str, float]:
    """Return the balanced accuracy on the test images, percent."""
    return {"mean": 100 * evaluate(run.model, test).balanced_accuracy}


SMALL = {"image_size": 32}
UNEVEN = SMALL | {"class_weights": "balanced"}
CNN = {"stack_channels": (32, 64, 128), "stack_kernels": (3, 3, 3), "stack_strides": (2, 2, 2)}
defects = partial(Row, data="drawn:defects", measures={"recalls": recalls})
TABLE = Table(
    name="own-images",
    title="Own images at first try",
    rows=(
        Row("shapes", "3 shapes × 150", "compact-shared", SMALL, data="drawn:shapes"),
        Row("shapes-of-ten", "10 shapes × 30", "compact-shared", SMALL, data="drawn:shapes-of-ten"),
        Row("letters", "A to Z, once in each font of the folder fonts", "first", SMALL, data="drawn:fonts"),
        defects("defects", "1,000 textures, and 100 with each of three defects", "compact-shared", UNEVEN),
        defects("defects-cnn", "the same, a CNN of three convolutions", "cnn-pooled", UNEVEN | CNN),
    ),
)
