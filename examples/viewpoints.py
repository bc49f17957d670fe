"""Define your own data set in one file: objects of ellipsoids, rendered from all sides.

    python examples/viewpoints.py                                                          # a sheet of its images
    torchcaps train compact --plugin examples/viewpoints.py --data viewpoints-azimuth      # use it

The decorator registers the data set ``viewpoints``. ``register_views`` adds four data sets that train on some sides and
test on other sides. ``silhouettes`` has the same images with the category of each pixel. Nothing is downloaded: the
images are rendered on first use and cached in a file.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8
from torch import Tensor

from torchcaps.datasets import DataRequest, ImageSet, Splits, data_folders, register_dataset, register_views
from torchcaps.files import atomic_path

AZIMUTHS = tuple(range(0, 360, 20))  # degrees; 0 is the front
ELEVATIONS = tuple(range(30, 75, 5))  # degrees above the ground
LIGHTS = ((-2, 2, 1), (2, 1, 2))  # direction of the light, 3 × unit vector: right, up, towards the camera
INSTANCES = 10  # objects of each category: the first half for training, the second half for the test
SIDE = 48  # height and width of an image, pixels

_SAMPLES = 2  # rays along each side of a pixel
_AMBIENT = 0.25  # share of ambient light
_REACH = 1.05  # half the width of an image; the farthest point of an object is at most 1 from its centre
_FILE = "viewpoints-1.bin"  # the number changes if the images change
_VIEWS = len(AZIMUTHS) * len(ELEVATIONS) * len(LIGHTS)


class _Part(NamedTuple):
    """An ellipsoid, or two mirrored ones; coordinates: forwards, left, up."""

    centre: tuple[float, float, float]
    axes: tuple[float, float, float]
    """Half of the length along each axis."""
    twice: bool = False
    """True for two ellipsoids, one on the left and one on the right."""
    optional: bool = False
    """True if only half of the objects have it."""


_CATEGORIES: dict[str, tuple[_Part, ...]] = {
    "animal": (
        _Part((0, 0, 0.1), (0.55, 0.2, 0.22)),  # trunk
        _Part((0.66, 0, 0.36), (0.22, 0.15, 0.16)),  # head
        _Part((0.38, 0.14, -0.32), (0.08, 0.08, 0.32), twice=True),  # legs
        _Part((-0.38, 0.14, -0.32), (0.08, 0.08, 0.32), twice=True),
        _Part((-0.68, 0, 0.24), (0.26, 0.05, 0.06)),  # tail
        _Part((0.58, 0.1, 0.55), (0.05, 0.05, 0.14), twice=True, optional=True),  # ears
    ),
    "human": (
        _Part((0, 0, 0.12), (0.15, 0.25, 0.38)),  # trunk
        _Part((0, 0, 0.68), (0.15, 0.14, 0.18)),  # head
        _Part((0, 0.33, 0.12), (0.08, 0.08, 0.38), twice=True),  # arms
        _Part((0, 0.13, -0.55), (0.1, 0.1, 0.42), twice=True),  # legs
        _Part((0, 0, 0.84), (0.24, 0.22, 0.05), optional=True),  # hat
        _Part((-0.24, 0, 0.2), (0.13, 0.19, 0.24), optional=True),  # rucksack
    ),
    "airplane": (
        _Part((0, 0, 0), (0.9, 0.12, 0.13)),  # hull
        _Part((0.05, 0.48, 0), (0.19, 0.48, 0.03), twice=True),  # wings
        _Part((-0.76, 0, 0.05), (0.12, 0.34, 0.03)),  # tail, across
        _Part((-0.76, 0, 0.2), (0.14, 0.03, 0.22)),  # and upright
        _Part((0.15, 0.36, -0.1), (0.18, 0.08, 0.08), twice=True, optional=True),  # engines
        _Part((0.5, 0, 0.11), (0.2, 0.09, 0.1), optional=True),  # cockpit
    ),
    "car": (
        _Part((0, 0, -0.05), (0.75, 0.34, 0.18)),  # body
        _Part((-0.1, 0, 0.15), (0.4, 0.29, 0.24)),  # cabin
        _Part((0.45, 0.32, -0.2), (0.18, 0.07, 0.18), twice=True),  # wheels
        _Part((-0.45, 0.32, -0.2), (0.18, 0.07, 0.18), twice=True),
        _Part((0.1, 0, 0.38), (0.22, 0.18, 0.05), optional=True),  # roof box
        _Part((-0.78, 0, 0.05), (0.1, 0.16, 0.16), optional=True),  # spare wheel
    ),
    "chair": (
        _Part((0, 0, 0), (0.38, 0.36, 0.08)),  # seat
        _Part((-0.34, 0, 0.42), (0.07, 0.34, 0.42)),  # back
        _Part((0.26, 0.25, -0.4), (0.06, 0.06, 0.38), twice=True),  # legs
        _Part((-0.26, 0.25, -0.4), (0.06, 0.06, 0.38), twice=True),
        _Part((0.02, 0.36, 0.24), (0.32, 0.06, 0.06), twice=True, optional=True),  # arms
        _Part((0.02, 0, 0.1), (0.3, 0.28, 0.1), optional=True),  # cushion
    ),
}
CLASS_NAMES = tuple(_CATEGORIES)


class _Ellipsoids(NamedTuple):
    """An object."""

    centres: Float64[np.ndarray, "E 3"]
    axes: Float64[np.ndarray, "E 3"]
    albedo: Float64[np.ndarray, "E"]


def find_viewpoints(data_dir: Path | None) -> Path:
    """Return the folder of the cached images, or where to cache them."""
    folders = [root / "viewpoints" for root in data_folders(data_dir)]
    return next((folder for folder in folders if (folder / _FILE).is_file()), folders[-1])


_INFO = {
    "source": "rendered here: 50 objects of 5 to 9 ellipsoids, as smallNORB's toys are seen",
    "licence": "MIT, as torchcaps",
    "num_train": len(CLASS_NAMES) * INSTANCES * _VIEWS // 2,
    "num_test": len(CLASS_NAMES) * INSTANCES * _VIEWS // 2,
    "in_shape": (1, SIDE, SIDE),
    "class_names": CLASS_NAMES,
    "find": find_viewpoints,
}


@register_dataset("viewpoints", title="Objects of ellipsoids, from all sides", **_INFO)
def load_viewpoints(request: DataRequest) -> Splits:
    """16,200 images of 50 objects: five categories, 18 azimuths, 9 elevations, two lights.

    Each object has the ellipsoids of its category in random proportions, and some of them are optional. Training and
    test images show different objects. Each image has the factors ``"azimuth"`` and ``"elevation"``,
    degrees, ``"light"`` (0: from the left, 1: from the right) and ``"instance"`` (0 to 4 in training, 5 to 9 in the
    test).

    The images are rendered on first use and cached in a file with a checksum; a damaged file is replaced. Rendering
    uses only operations that IEEE 754 rounds correctly in float64 (sums, products, quotients, roots), and rounds sines
    and cosines to 2⁻³⁰, so every machine should get the same pixels.

    Raises:
        OSError: The folder cannot be written.
    """
    path = find_viewpoints(request.data_dir) / _FILE
    pixels = _read(path)
    if pixels is None:
        pixels = _made(path)
    # in random order, so that the first n are a sample of all
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(pixels)))
    train, test = (order[of_test == (order // _VIEWS % INSTANCES >= INSTANCES // 2)] for of_test in (False, True))
    labels, factors = _known()
    full = ImageSet(torch.from_numpy(pixels)[:, None], labels, factors=factors)
    return Splits(full.select(train), full.select(test), CLASS_NAMES)


register_views("viewpoints", "Objects of ellipsoids", load_viewpoints, **_INFO)


def load_silhouettes(request: DataRequest) -> Splits:
    """Load the same images with the category of each pixel: class 0 is the background, class j + 1 the category j."""

    def outlined(images: ImageSet) -> ImageSet:
        masks = (images.images[:, 0] > 0) * (1 + images.labels[:, None, None])
        return ImageSet(images.images, masks.to(torch.uint8), factors=images.factors)

    splits = load_viewpoints(request)
    assert splits.test is not None
    return Splits(outlined(splits.train), outlined(splits.test), ("background", *CLASS_NAMES))


_OF_PIXELS = _INFO | {"class_names": ("background", *CLASS_NAMES)}
register_dataset("silhouettes", title="Objects of ellipsoids, their pixels by category", **_OF_PIXELS)(load_silhouettes)
register_views("silhouettes", "Pixels of objects of ellipsoids", load_silhouettes, **_OF_PIXELS)


def _known() -> tuple[Int64[Tensor, "N"], dict[str, Tensor]]:
    """Return label and factors of every image, in the order of rendering."""
    axes = (range(len(CLASS_NAMES)), range(INSTANCES), AZIMUTHS, ELEVATIONS, range(len(LIGHTS)))
    label, instance, azimuth, elevation, light = torch.tensor(list(itertools.product(*axes))).unbind(1)
    factors = {"azimuth": azimuth.float(), "elevation": elevation.float(), "light": light, "instance": instance}
    return label, factors


def _read(path: Path) -> UInt8[np.ndarray, "N H W"] | None:
    """Read the pixels from a file that begins with their SHA-256; None if it is missing or damaged."""
    shape = (len(CLASS_NAMES) * INSTANCES * _VIEWS, SIDE, SIDE)
    length = hashlib.sha256().digest_size
    if not path.is_file() or path.stat().st_size != length + math.prod(shape):
        return None
    contents = np.fromfile(path, np.uint8)
    if hashlib.sha256(contents[length:].data).digest() != contents[:length].tobytes():
        return None
    return contents[length:].reshape(shape)


def _made(path: Path) -> UInt8[np.ndarray, "N H W"]:
    """Render all images, and write them to a file."""
    random = np.random.RandomState(0)
    pixels = np.concatenate([_render(_draw(parts, random)) for parts in _CATEGORIES.values() for _ in range(INSTANCES)])
    with atomic_path(path) as temporary:
        temporary.write_bytes(hashlib.sha256(pixels.data).digest() + pixels.tobytes())
    return pixels


def _draw(parts: tuple[_Part, ...], random: np.random.RandomState) -> _Ellipsoids:
    """Draw an object of a category: random proportions and a random choice of the optional parts."""
    stretch = 0.9 + 0.2 * random.random_sample(3)
    centres, axes, albedo = [], [], []
    for part in parts:
        absent, grey, *more = random.random_sample(8)
        shift, factors = 0.04 * np.array(more[:3]) - 0.02, 0.85 + 0.3 * np.array(more[3:])
        if part.optional and absent < 0.5:
            continue
        for side in (1, -1)[: 1 + part.twice]:
            # a part without a twin stays in the middle plane
            moved = (np.array(part.centre) + shift * (1, part.twice, 1)) * stretch
            centres.append(moved * (1, side, 1))
            axes.append(np.array(part.axes) * factors * stretch)
            albedo.append(0.6 + 0.4 * grey)
    placed, half = np.array(centres), np.array(axes)
    placed -= (np.min(placed - half, 0) + np.max(placed + half, 0)) / 2
    reach = np.sqrt(_dot(np.abs(placed) + half, np.abs(placed) + half)).max()  # of a box around each ellipsoid
    return _Ellipsoids(placed / reach, half / reach, np.array(albedo))


def _render(scene: _Ellipsoids) -> UInt8[np.ndarray, "V H W"]:
    """Render an object from all sides under all lights: parallel rays, Lambert's law, no shadows."""
    made = np.empty((len(AZIMUTHS), len(ELEVATIONS), len(LIGHTS), SIDE, SIDE), np.uint8)
    for n, azimuth in enumerate(AZIMUTHS):
        for m, elevation in enumerate(ELEVATIONS):
            fine = _shade(scene, _camera(azimuth, elevation))
            rows = fine.reshape(len(LIGHTS), SIDE, _SAMPLES, SIDE, _SAMPLES)
            total = sum(rows[:, :, y, :, x] for y in range(_SAMPLES) for x in range(_SAMPLES))
            made[n, m] = np.floor(total * (255 / _SAMPLES**2) + 0.5)
    return made.reshape(_VIEWS, SIDE, SIDE)


def _camera(azimuth: float, elevation: float) -> Float64[np.ndarray, "3 3"]:
    """Return the directions right, up and towards the camera in coordinates of the object."""
    round_, high = math.radians(azimuth), math.radians(elevation)
    # rounded, because libraries differ in the last bit
    c, s, ce, se = (
        round(value * 2**30) / 2**30 for value in (math.cos(round_), math.sin(round_), math.cos(high), math.sin(high))
    )
    return np.array([[-s, c, 0], [-se * c, -se * s, ce], [ce * c, ce * s, se]])


def _shade(scene: _Ellipsoids, camera: Float64[np.ndarray, "3 3"]) -> Float64[np.ndarray, "L h w"]:
    """Return the brightness 0..1 along each ray, under each light.

    A ray is u·right + v·up + t·d with the direction d towards the camera. Relative to the centre of an ellipsoid and
    divided by its axes, it is q(t) = u·R + v·U + t·D. It meets the ellipsoid where ‖q‖² = a·t² + 2b·t + c = 1. The
    camera sees the nearer of the two points, t = (-b + √(b² - a·(c - 1)))/a. The normal is q divided by the axes again.
    """
    rays = SIDE * _SAMPLES
    across = _REACH * (2 * np.arange(rays) + 1 - rays) / rays  # (w,), from left to right
    nearest = np.full((rays, rays), -np.inf)
    bright = np.zeros((len(LIGHTS), rays, rays))
    lights = [_sum_of(camera, light) / 3 for light in LIGHTS]
    for centre, axes, albedo in zip(*scene, strict=True):
        place = [_dot(centre, direction) for direction in camera]
        right, up, towards = (direction / axes for direction in camera)
        u, v = across - place[0], -across[:, None] - place[1]
        a = _dot(towards, towards)
        b = u * _dot(right, towards) + v * _dot(up, towards)
        c = u * u * _dot(right, right) + 2 * _dot(right, up) * (u * v) + v * v * _dot(up, up)
        root = b * b - a * (c - 1)
        y, x = np.nonzero(root > 0)
        t = (np.sqrt(root[y, x]) - b[y, x]) / a
        seen = t + place[2] > nearest[y, x]
        y, x, t = y[seen], x[seen], t[seen]
        nearest[y, x] = t + place[2]
        normal = [(u[x] * right[k] + v[y, 0] * up[k] + t * towards[k]) / axes[k] for k in range(3)]
        length = np.sqrt(normal[0] * normal[0] + normal[1] * normal[1] + normal[2] * normal[2])
        for n, light in enumerate(lights):
            cosine = (normal[0] * light[0] + normal[1] * light[1] + normal[2] * light[2]) / length
            bright[n, y, x] = albedo * (_AMBIENT + (1 - _AMBIENT) * np.maximum(cosine, 0))
    return bright


def _dot(one: Float64[np.ndarray, "... 3"], other: Float64[np.ndarray, "... 3"]) -> Float64[np.ndarray, "..."]:
    """Return Σ_k one_k·other_k, summed in this order on every machine."""
    return one[..., 0] * other[..., 0] + one[..., 1] * other[..., 1] + one[..., 2] * other[..., 2]


def _sum_of(rows: Float64[np.ndarray, "3 3"], weights: tuple[int, ...]) -> Float64[np.ndarray, "3"]:
    return rows[0] * weights[0] + rows[1] * weights[1] + rows[2] * weights[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Render the images, and draw some of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder to cache the images in")
    parser.add_argument("--out", type=Path, default=Path("viewpoints.png"))
    given = parser.parse_args(arguments)
    from torchcaps.analysis import figure_samples

    splits = load_viewpoints(DataRequest(data_dir=given.data_dir))
    figure_samples(splits.train, CLASS_NAMES, count=50).savefig(given.out)
    print(f"wrote {given.out}: 50 of {len(splits.train) + len(splits.test):,} images")


if __name__ == "__main__":
    main()
