"""Capsule layers on top of each other: primary → three hidden layers → class capsules.

    python examples/stacked_capsules.py                      # primary capsules of length one
    python examples/stacked_capsules.py --primary squash     # the paper's, which are short at the start

A squash makes short capsules much shorter (a length of 0.1 becomes 0.01), so a deep stack that starts from short poses
has no gradient to learn from. Primary capsules of length one start it well, and the initialisation of DenseCapsules,
"balanced" unless you choose another, keeps the lengths from layer to layer. Trains on the embedded digits; prints the
mean length of the capsules of every layer before and after, the loss of each epoch and the test accuracy.

Measured on a CPU with torch 2.13, seed 0: primary capsules of length one reach 98.06 %; squashed ones start at the
lengths 0.098, 0.011, 0.000, 0.000, 0.000 and stay at 10 %, the loss never leaving 0.81 = 0.9². With one hidden layer
less (--hidden 32 16) the convolution lengthens them within two epochs, and both reach 98.33 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchcaps import margin_loss, safe_norm
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, load_dataset
from torchcaps.nn import DenseCapsules, PrimaryCapsules


class StackedCapsules(nn.Module):
    """Images (B, 1, 28, 28) to class capsules (B, 10, 16) through ``hidden`` layers of capsules of 8 components."""

    def __init__(self, hidden: Sequence[int], primary_output: str) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 9), nn.ReLU())
        self.primary = PrimaryCapsules(32, num_types=8, dim=8, output=primary_output)
        layers: list[nn.Module] = []
        num_capsules = 8 * 6 * 6  # 28 → 20 → 6 pixels
        for width in hidden:
            layers.append(DenseCapsules(num_capsules, 8, width, 8))
            num_capsules = width
        self.capsules = nn.Sequential(*layers, DenseCapsules(num_capsules, 8, 10, 16))

    def forward(self, images: Tensor) -> Tensor:
        """Class capsules."""
        return self.capsules(self.primary(self.features(images)))

    @torch.no_grad()
    def mean_lengths(self, images: Tensor) -> list[float]:
        """Of the primary capsules, and of the capsules of each layer above."""
        poses = self.primary(self.features(images))
        lengths = [float(safe_norm(poses).mean())]
        for layer in self.capsules:
            poses = layer(poses)
            lengths.append(float(safe_norm(poses).mean()))
        return lengths


def train(network: nn.Module, image_set: ImageSet, epochs: int, batch_size: int = 64, seed: int = 0) -> None:
    """Adam on the margin loss."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = BatchLoader(image_set, batch_size, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
    for epoch in range(epochs):
        losses = []
        for batch in loader.batches(epoch):
            loss = margin_loss(safe_norm(network(batch.images)), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


@torch.no_grad()
def accuracy(network: nn.Module, image_set: ImageSet) -> float:
    """Share of the images whose longest capsule is that of their class."""
    batches = BatchLoader(image_set, 256, shuffle=False).batches(0)
    right = sum(int((safe_norm(network(batch.images)).argmax(1) == batch.labels).sum()) for batch in batches)
    return right / len(image_set)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, build, train, test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", choices=("unit", "squash"), default="unit", help="default: %(default)s")
    parser.add_argument(
        "--hidden", type=int, nargs="*", default=[32, 16, 16], help="capsules a layer (default: 32 16 16)"
    )
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    given = parser.parse_args(arguments)
    digits = load_dataset("digits", limit_train=given.images)
    sample = digits.validation.images[:64].float() / 255
    torch.manual_seed(0)
    network = StackedCapsules(given.hidden, given.primary)
    print("mean lengths at the start:", *(f"{length:.3f}" for length in network.mean_lengths(sample)))
    train(network, digits.train, given.epochs)
    print("mean lengths at the end:  ", *(f"{length:.3f}" for length in network.mean_lengths(sample)))
    print(f"test accuracy {100 * accuracy(network, digits.test):.2f} %")


if __name__ == "__main__":
    main()
