"""Measure whether the poses of ``compact`` are equivariant: does one matrix say how a change of the image moves them?

    python examples/equivariance.py            # the first 1,000 test digits of MNIST
    python examples/equivariance.py --images 10000

For each change T of the image, it compares the pose v(Tx) of the right class with two predictions from v(x): that the
pose stays (invariance), and that it moves by a matrix and an offset of the class (equivariance), fitted on the first
half of the images and tested on the second. A number is R²: 1 is a perfect prediction, 0 the mean of the class.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcaps import load_pretrained
from torchcaps.datasets import load_dataset
from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.models import CapsNet

BATCH = 250  # images
#: Changes of an image: rotation in degrees, scale, shift to the right in pixels.
CHANGES = {
    "moved by 2 pixels": (0.0, 1.0, 2.0),
    "rotated by 10°": (10.0, 1.0, 0.0),
    "rotated by 20°": (20.0, 1.0, 0.0),
    "rotated by 45°": (45.0, 1.0, 0.0),
    "larger by 15 %": (0.0, 1.15, 0.0),
}


def change(images: Tensor, rotation: float, scale: float, shift: float) -> Tensor:
    """Rotate, scale and move uint8 images (N, 1, H, W)."""
    number = len(images)
    maps = linear_maps(torch.full((number,), rotation), torch.full((number, 2), scale), torch.zeros(number))
    moved = warp(images, inverse_maps(maps, torch.tensor([shift, 0.0]).expand(number, 2)), (28, 28))
    return moved.round().to(torch.uint8)


def poses_of(network: CapsNet, images: Tensor, labels: Tensor) -> Tensor:
    """Return the poses (N, D) of the right classes."""
    with torch.no_grad():
        capsules = torch.cat([network(batch.float() / 255).capsules for batch in images.split(BATCH)])
    return capsules[torch.arange(len(labels)), labels].double()


def components_of(images: Tensor, number: int = 16) -> Callable[[Tensor], Tensor]:
    """Return the projection of images on the first principal components of these."""
    pixels = images.flatten(1).double()
    _, _, axes = torch.pca_lowrank(pixels, number, niter=4)
    return lambda others: (others.flatten(1).double() - pixels.mean(0)) @ axes


def r2_of_predictions(before: Tensor, after: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return R² of the predictions that vectors stay, and that they move by a matrix and an offset of their class."""
    half, spread = len(before) // 2, 0.0
    errors = [0.0, 0.0]
    for label in labels.unique():
        fitted, tested = (labels[:half] == label).nonzero()[:, 0], (labels[half:] == label).nonzero()[:, 0] + half
        inputs = torch.cat([before, torch.ones_like(before[:, :1])], dim=1)
        matrix = torch.linalg.lstsq(inputs[fitted], after[fitted]).solution
        errors[0] += float((after[tested] - before[tested]).square().sum())
        errors[1] += float((after[tested] - inputs[tested] @ matrix).square().sum())
        spread += float((after[tested] - after[fitted].mean(0)).square().sum())
    return 1 - errors[0] / spread, 1 - errors[1] / spread


def main(arguments: Sequence[str] | None = None) -> None:
    """Print R² for each change, of the poses and of as many principal components of the pixels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="Test images, from the first on (default 1000).")
    number = parser.parse_args(arguments).images
    network, test = load_pretrained("compact"), load_dataset("mnist").test
    assert isinstance(network, CapsNet)
    images, labels = test.images[:number], test.labels[:number]
    project = components_of(images)
    before, pixels = poses_of(network, images, labels), project(images)
    for name, numbers in CHANGES.items():
        changed = change(images, *numbers)
        stays, moves = r2_of_predictions(before, poses_of(network, changed, labels), labels)
        pixels_stay, pixels_move = r2_of_predictions(pixels, project(changed), labels)
        print(f"{name}: poses {stays:.2f} {moves:.2f}, pixels {pixels_stay:.2f} {pixels_move:.2f}")


if __name__ == "__main__":
    main()
