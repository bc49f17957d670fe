"""Photos of MNIST's digits, drawn on paper or a board by this script, and how many of them a network gets right.

    python experiments/photos.py --seeds 0 1 2 --out photos.json

Each photo shows one digit in ink on paper: uneven light, noise, JPEG, any place, 10 to 60 % of the frame, 300 to 1,000
pixels a side. Rows beyond the plain one: chalk on a blackboard, ruled paper, squared paper, a thin pen, a sheet of
paper on a desk, the shadow of a hand. Settings were chosen on photos of training digits (``--split train``); the
figures in the documentation are of test digits.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from torchcaps.analysis import predict
from torchcaps.datasets import load_dataset, read_image
from torchcaps.datasets.images import read_pixels
from torchcaps.datasets.preparation import Preparation, prepare_image
from torchcaps.models import Network, load_pretrained

KINDS = ("paper", "chalk", "ruled", "squared", "thin pen", "desk", "shadow")
INKS = ((20, 20, 25), (25, 35, 120), (30, 60, 170), (150, 25, 30), (20, 95, 50), (85, 30, 110), (90, 55, 30))
PAPERS = ((250, 250, 248), (245, 240, 225), (225, 225, 222), (230, 238, 245), (205, 195, 175))
CHALKS = ((240, 240, 235), (235, 225, 150), (235, 190, 195))
BOARDS = ((40, 48, 45), (30, 70, 50), (25, 25, 28))


def photograph(digit: np.ndarray, random: np.random.Generator, kind: str = "paper") -> bytes:
    """A photo of a drawn digit.

    Args:
        digit: Pixels 0..255 (28, 28), light on dark.
        random: Chooses everything else.
        kind: One of ``KINDS``.

    Returns:
        The contents of a JPEG file.
    """
    height, width = random.integers(300, 1001, 2)
    ink = _ink(digit, (height, width), random.uniform(0.1, 0.6), random, thin=kind == "thin pen")
    grounds, colours = (BOARDS, CHALKS) if kind == "chalk" else (PAPERS, INKS)
    ground = np.array(grounds[random.integers(len(grounds))], float) * np.ones((height, width, 1))
    if kind in ("ruled", "squared"):
        _rule(ground, random, squared=kind == "squared")
    colour = np.array(colours[random.integers(len(colours))], float)
    strength = random.uniform(0.8, 1.0)
    if kind == "chalk":  # chalk leaves gaps
        grain = ndimage.gaussian_filter(random.normal(size=(height, width)), 1.0)
        ink = ink * np.clip(0.9 + grain, 0.3, 1)
    scene = ground + strength * ink[:, :, None] * (colour - ground)
    if kind == "desk":
        _lay(scene, ink, random)
    light = _light((height, width), random)
    if kind == "shadow":
        light *= _shade((height, width), random)
    scene = scene * light[:, :, None]
    scene = ndimage.gaussian_filter(scene, (random.uniform(0, 1.2),) * 2 + (0,))
    scene += random.normal(size=scene.shape) * random.uniform(1, 10)
    file = io.BytesIO()
    pixels = np.clip(scene, 0, 255).round().astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=int(random.integers(40, 96)))
    return file.getvalue()


def _ink(
    digit: np.ndarray, frame: tuple[int, int], share: float, random: np.random.Generator, *, thin: bool
) -> np.ndarray:
    """Where there is ink, 0..1: the digit's longer side takes ``share`` of the frame's shorter one, at any place."""
    rows, columns = np.flatnonzero(digit.max(1)), np.flatnonzero(digit.max(0))
    crop = digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = share * min(frame) / max(crop.shape)
    size = [max(round(side * scale), 1) for side in crop.shape[::-1]]
    large = (
        np.asarray(
            Image.fromarray(np.pad(crop, 2)).resize(
                [round(side * scale) for side in np.pad(crop, 2).shape[::-1]], Image.Resampling.BICUBIC
            )
        )
        / 255
    )
    edge = 8 if scale > 2 else 4  # a pen's edges are sharp, however large the digit
    sharp = 1 / (1 + np.exp(-edge * 2 * (large - 0.45)))
    sharp = (sharp - sharp.min()) / max(np.ptp(sharp), 1e-9)
    if thin:  # the middle of the stroke, a twenty-fifth of the digit wide
        inside = sharp > 0.5
        depth = ndimage.distance_transform_edt(inside)
        ridge = inside & (depth >= ndimage.maximum_filter(depth, 3) - 0.5)
        radius = max(max(size) / 50, 0.6)
        sharp = np.clip(radius + 0.5 - ndimage.distance_transform_edt(~ridge), 0, 1)
    ink = np.zeros(frame)
    top, left = (random.integers(0, max(side - inner, 0) + 1) for side, inner in zip(frame, sharp.shape, strict=True))
    part = sharp[: frame[0], : frame[1]]
    ink[top : top + part.shape[0], left : left + part.shape[1]] = part
    return ink


def _rule(ground: np.ndarray, random: np.random.Generator, *, squared: bool) -> None:
    """Draw the lines of a writing pad, a fifteenth to a thirtieth of the frame apart."""
    colour = np.array(((150, 180, 215), (175, 175, 180), (190, 160, 165))[random.integers(3)], float)
    apart = min(ground.shape[:2]) / random.uniform(8, 25)
    wide = max(1, round(apart / 25))
    for axis in range(2 if squared else 1):
        for at in np.arange(random.uniform(0, apart), ground.shape[axis], apart):
            lines = slice(int(at), int(at) + wide)
            ground[(lines,) if axis == 0 else (slice(None), lines)] = colour


def _light(frame: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """How bright each place is: a slope, a bright spot and darker corners."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, side) for side in frame), indexing="ij")
    angle = random.uniform(0, 2 * np.pi)
    slope = 1 + random.uniform(0, 0.35) * (np.cos(angle) * x + np.sin(angle) * y) / np.sqrt(2)
    at = random.uniform(-1, 1, 2)
    spot = 1 + random.uniform(0, 0.25) * np.exp(-((y - at[0]) ** 2 + (x - at[1]) ** 2) / random.uniform(0.2, 1.0))
    corners = 1 - random.uniform(0, 0.2) * (x**2 + y**2) / 2
    return slope * spot * corners * random.uniform(0.6, 1.0)


def _lay(scene: np.ndarray, ink: np.ndarray, random: np.random.Generator) -> None:
    """Show a desk beyond one or two edges of the paper, each a little askew and clear of the ink."""
    colour = np.array(((90, 60, 40), (60, 60, 65), (160, 120, 80), (25, 25, 28))[random.integers(4)], float)
    rows, columns = np.flatnonzero(ink.max(1) > 0.1), np.flatnonzero(ink.max(0) > 0.1)
    for flipped, edge, size in ((False, rows[0], ink.shape[0]), (True, columns[0], ink.shape[1])):
        room = edge - 0.03 * size
        if room <= 0 or (flipped and random.random() < 0.5):
            continue
        across = np.linspace(-1, 1, ink.shape[0 if flipped else 1])
        far = random.uniform(0.2, 0.8) * room * (1 + random.uniform(-0.2, 0.2) * across)
        place = np.arange(size)[:, None] < far[None]
        scene[place.T if flipped else place] = colour


def _shade(frame: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """The shadow of a hand or a head: half of the frame, with a soft edge."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, side) for side in frame), indexing="ij")
    angle, depth = random.uniform(0, 2 * np.pi), random.uniform(0.2, 0.5)
    across = np.cos(angle) * x + np.sin(angle) * y - random.uniform(-0.6, 0.6)
    return 1 - depth / (1 + np.exp(-across / random.uniform(0.02, 0.1)))


def photos(
    images: np.ndarray, labels: np.ndarray, count: int, seed: int, kind: str = "paper"
) -> list[tuple[bytes, int]]:
    """So many photos of randomly chosen digits, and their labels."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    chosen = random.choice(len(images), count, replace=False)
    return [(photograph(images[i, 0], random, kind), int(labels[i])) for i in chosen]


def judge(model: Network, taken: Sequence[tuple[bytes, int]], failures: Path | None) -> dict[str, int]:
    """How many photos the network gets right: as they are, with dark and light changed, and prepared."""
    ways: dict[str, list[np.ndarray]] = {"unprepared": [], "inverted": [], "prepared": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "photo.jpg"
        for contents, _ in taken:
            path.write_bytes(contents)
            ways["unprepared"].append(read_image(path, model.in_shape))
            ways["inverted"].append(read_image(path, model.in_shape, invert=True))
            ways["prepared"].append(prepare_image(read_pixels(path), model.in_shape, Preparation()).image)
    labels = np.array([label for _, label in taken])
    classes = {way: predict(model, torch.from_numpy(np.stack(images))).classes for way, images in ways.items()}
    if failures is not None:
        failures.mkdir(parents=True, exist_ok=True)
        for i in np.flatnonzero(classes["prepared"] != labels):
            name = f"{i}-{labels[i]}-as-{classes['prepared'][i]}"
            (failures / f"{name}.jpg").write_bytes(taken[int(i)][0])
            Image.fromarray(ways["prepared"][i][0]).save(failures / f"{name}.png")
    return {way: int((found == labels).sum()) for way, found in classes.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="compact", help="what load_pretrained takes")
    parser.add_argument("--split", choices=("test", "train"), default="test")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=200, help="photos of each kind and seed")
    parser.add_argument("--failures", type=Path, help="folder for the photos that the network gets wrong")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    options = parser.parse_args(arguments)
    model, part = load_pretrained(options.network), getattr(load_dataset("mnist"), options.split)
    results = []
    for kind in options.kinds:
        for seed in options.seeds:
            taken = photos(part.images.numpy(), part.labels.numpy(), options.count, seed, kind)
            right = judge(model, taken, options.failures and options.failures / f"{kind}-{seed}".replace(" ", "-"))
            results.append({"kind": kind, "seed": seed, "photos": options.count} | right)
            print(results[-1], flush=True)
        for way in right:
            shares = [row[way] / options.count for row in results if row["kind"] == kind]
            mean, lowest, highest = (100 * value for value in (statistics.mean(shares), min(shares), max(shares)))
            print(f"{kind}, {way}: {mean:.2f} % ({lowest:.1f} to {highest:.1f})")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
