"""Define your own data sets in one file: simulated photos of MNIST's test digits on paper or a board.

    torchcaps evaluate --plugin examples/photos.py --data photos-paper              # prepared, as predict does it
    torchcaps evaluate --plugin examples/photos.py --data photos-desk-inverted      # only inverted
    torchcaps evaluate --plugin examples/photos.py --data photos-desk-as-they-are

Each photo shows one digit in ink on paper, at any position, 10 to 60 % of the frame, with uneven light, noise and JPEG
compression, 300 to 1,000 pixels per side. The other kinds are chalk on a blackboard, ruled paper, squared paper, a thin
pen, a sheet of paper on a desk, and the shadow of a hand. The settings of the preparation were chosen on photos of
training digits.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt, gaussian_filter, maximum_filter

from torchcaps.datasets import DataRequest, ImageSet, Preparation, Splits, load_dataset, read_image, register_dataset

KINDS = ("paper", "chalk", "ruled", "squared", "thin-pen", "desk", "shadow")
#: Options that bring the photos to the form of MNIST's digits, by suffix of the data set's name.
WAYS: dict[str, dict[str, Any]] = {
    "": {"preparation": Preparation()},
    "-as-they-are": {},
    "-inverted": {"invert": True},
}
NUMBER, SEEDS = 200, range(3)  # photos, with each seed
INKS = ((20, 20, 25), (25, 35, 120), (30, 60, 170), (150, 25, 30), (20, 95, 50), (85, 30, 110), (90, 55, 30))
PAPERS = ((250, 250, 248), (245, 240, 225), (225, 225, 222), (230, 238, 245), (205, 195, 175))
CHALKS = ((240, 240, 235), (235, 225, 150), (235, 190, 195))
BOARDS = ((40, 48, 45), (30, 70, 50), (25, 25, 28))
LINES = ((150, 180, 215), (175, 175, 180), (190, 160, 165))
DESKS = ((90, 60, 40), (60, 60, 65), (160, 120, 80), (25, 25, 28))


def photograph(digit: np.ndarray, random: np.random.Generator, kind: str = "paper") -> bytes:
    """Return a JPEG file of a digit (28, 28), pixels 0..255, light on dark; everything but the kind is random."""
    frame = random.integers(300, 1001, 2)
    ink = _ink(digit, frame, random, thin=kind == "thin-pen")
    grounds, colours = (BOARDS, CHALKS) if kind == "chalk" else (PAPERS, INKS)
    scene = _one(grounds, random) * np.ones((*frame, 1))
    if kind in ("ruled", "squared"):
        _rule(scene, random, squared=kind == "squared")
    colour, strength = _one(colours, random), random.uniform(0.8, 1.0)
    if kind == "chalk":  # chalk leaves gaps
        ink *= np.clip(0.9 + gaussian_filter(random.normal(size=frame), 1.0), 0.3, 1)
    scene += strength * ink[:, :, None] * (colour - scene)
    if kind == "desk":
        _lay(scene, ink, random)
    y, x = np.meshgrid(*(np.linspace(-1, 1, side) for side in frame), indexing="ij")
    light = _light(y, x, random)
    if kind == "shadow":
        light *= _shade(y, x, random)
    scene = gaussian_filter(scene * light[:, :, None], (random.uniform(0, 1.2),) * 2 + (0,))
    scene += random.normal(size=scene.shape) * random.uniform(1, 10)
    file = io.BytesIO()
    Image.fromarray(scene.clip(0, 255).round().astype(np.uint8)).save(
        file, "JPEG", quality=int(random.integers(40, 96))
    )
    return file.getvalue()


def _one(colours: Sequence[Sequence[int]], random: np.random.Generator) -> np.ndarray:
    return np.array(colours, float)[random.integers(len(colours))]


def _ink(digit: np.ndarray, frame: np.ndarray, random: np.random.Generator, *, thin: bool) -> np.ndarray:
    """Return the amount of ink, 0..1; the longer side of the digit is 10 to 60 % of the frame's shorter side."""
    rows, columns = np.flatnonzero(digit.max(1)), np.flatnonzero(digit.max(0))
    crop = digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    longest = random.uniform(0.1, 0.6) * min(frame)
    scale, crop = longest / max(crop.shape), np.pad(crop, 2)
    size = [round(side * scale) for side in crop.shape[::-1]]
    large = np.asarray(Image.fromarray(crop).resize(size, Image.Resampling.BICUBIC)) / 255
    sharp = 1 / (1 + np.exp((-16 if scale > 2 else -8) * (large - 0.45)))  # a pen has sharp edges at any size
    sharp = (sharp - sharp.min()) / max(np.ptp(sharp), 1e-9)
    if thin:  # the middle of the stroke, 4 % of the digit wide
        depth = distance_transform_edt(sharp > 0.5)
        ridge = (sharp > 0.5) & (depth >= maximum_filter(depth, 3) - 0.5)
        sharp = np.clip(max(round(longest) / 50, 0.6) + 0.5 - distance_transform_edt(~ridge), 0, 1)
    ink = np.zeros(frame)
    top, left = (random.integers(0, max(side - inner, 0) + 1) for side, inner in zip(frame, sharp.shape, strict=True))
    part = ink[top : top + sharp.shape[0], left : left + sharp.shape[1]]
    part[:] = sharp[: part.shape[0], : part.shape[1]]
    return ink


def _rule(ground: np.ndarray, random: np.random.Generator, *, squared: bool) -> None:
    """Draw the lines of a writing pad, 4 to 12.5 % of the frame apart."""
    colour, apart = _one(LINES, random), min(ground.shape[:2]) / random.uniform(8, 25)
    for lined in (ground, ground.swapaxes(0, 1))[: 2 if squared else 1]:
        for at in np.arange(random.uniform(0, apart), len(lined), apart):
            lined[int(at) : int(at) + max(1, round(apart / 25))] = colour


def _light(y: np.ndarray, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the brightness of each pixel: a slope, a bright spot and darker corners."""
    angle = random.uniform(0, 2 * np.pi)
    slope = 1 + random.uniform(0, 0.35) * (np.cos(angle) * x + np.sin(angle) * y) / np.sqrt(2)
    at = random.uniform(-1, 1, 2)
    spot = 1 + random.uniform(0, 0.25) * np.exp(-((y - at[0]) ** 2 + (x - at[1]) ** 2) / random.uniform(0.2, 1.0))
    corners = 1 - random.uniform(0, 0.2) * (x**2 + y**2) / 2
    return slope * spot * corners * random.uniform(0.6, 1.0)


def _lay(scene: np.ndarray, ink: np.ndarray, random: np.random.Generator) -> None:
    """Draw a desk beyond one or two edges of the paper, slightly rotated and away from the ink."""
    colour = _one(DESKS, random)
    for flipped, view, inked in ((False, scene, ink), (True, scene.swapaxes(0, 1), ink.T)):
        room = np.flatnonzero(inked.max(1) > 0.1)[0] - 0.03 * len(inked)
        if room <= 0 or (flipped and random.random() < 0.5):
            continue
        across = np.linspace(-1, 1, inked.shape[1])
        far = random.uniform(0.2, 0.8) * room * (1 + random.uniform(-0.2, 0.2) * across)
        view[np.arange(len(inked))[:, None] < far] = colour


def _shade(y: np.ndarray, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the shadow of a hand or a head: about half of the frame, with a soft edge."""
    angle, depth = random.uniform(0, 2 * np.pi), random.uniform(0.2, 0.5)
    across = np.cos(angle) * x + np.sin(angle) * y - random.uniform(-0.6, 0.6)
    return 1 - depth / (1 + np.exp(-across / random.uniform(0.02, 0.1)))


def load_photos(kind: str, way: str, _: DataRequest) -> Splits:
    """Return photos of random test digits, with MNIST's training images."""
    mnist = load_dataset("mnist")
    images, chosen = [], []
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder, "photo.jpg")
        for seed in SEEDS:
            random = np.random.default_rng([seed, KINDS.index(kind)])
            for i in random.choice(len(mnist.test), NUMBER, replace=False):
                chosen.append(i)
                photo.write_bytes(photograph(mnist.test.images[i, 0].numpy(), random, kind))
                images.append(read_image(photo, mnist.in_shape, **WAYS[way]))
    test = ImageSet(torch.from_numpy(np.stack(images)), mnist.test.labels[chosen])
    return Splits(mnist.train, test, mnist.class_names, mnist.validation)


for kind in KINDS:
    for way in WAYS:
        about = {"title": f"photos of MNIST's test digits, {kind}{way}", "source": "drawn here", "licence": "MNIST's"}
        register_dataset(f"photos-{kind}{way}", **about)(partial(load_photos, kind, way))
