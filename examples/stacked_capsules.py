"""Capsule layers on top of each other, as a preset of one's own: primary → three hidden layers → class capsules.

    python examples/stacked_capsules.py                      # primary capsules of length one
    python examples/stacked_capsules.py --primary squash     # the paper's, which are short at the start
    torchcaps train stacked --plugin examples/stacked_capsules.py --data digits

A squash makes short capsules much shorter (a length of 0.1 becomes 0.01), so a deep stack that starts from short poses
has no gradient to learn from. Primary capsules of length one start it well, and the initialisation "balanced" keeps the
lengths from layer to layer. Trains on the embedded digits; prints the mean length of the capsules of every layer before
and after, and the test accuracy. `torchcaps train compact-deep` has a layer on a map in the middle.

Measured on a CPU with torch 2.13, seed 0: primary capsules of length one reach 98.61 %; squashed ones start at the
lengths 0.100, 0.011, 0.000, 0.000, 0.000 and stay at 10 %, the loss never leaving 0.81 = 0.9². With one hidden layer
less (--hidden 32 16) the convolution lengthens them within two epochs, and both reach 98.33 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps import CapsNet, create_model
from torchcaps.analysis import evaluate
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, load_dataset
from torchcaps.models import register_preset


def hidden_and_class_layers(hidden: Sequence[int]) -> list[dict[str, Any]]:
    """Layers of so many capsules of 8 components, and the last one, which has a capsule for each class."""
    return [*({"name": "dense", "num_capsules": width, "capsule_dim": 8} for width in hidden), {"name": "dense"}]


STACKED = register_preset(
    "stacked",
    "Three hidden layers of capsules between primary capsules of length one and the classes.",
    source="examples/stacked_capsules.py",
    network={
        "conv_channels": 32,
        "primary_types": 8,
        "primary_output": "unit",
        "decoder": False,
        "layers": hidden_and_class_layers((32, 16, 16)),
    },
    recipe={"epochs": 10, "batch_size": 64, "max_shift": 2},
    data="digits",
)


@torch.no_grad()
def mean_lengths(network: CapsNet, images: Tensor) -> list[float]:
    """Of the primary capsules, and of the capsules of each layer above."""
    flow = network.capsules(images)
    return [float(capsules.scores().mean()) for capsules in (*flow, network.class_capsules(flow[-1]))]


def train(network: CapsNet, image_set: ImageSet, epochs: int, batch_size: int = 64, seed: int = 0) -> None:
    """Adam on the network's own loss."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = BatchLoader(image_set, batch_size, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
    for epoch in range(epochs):
        losses = []
        for batch in loader.batches(epoch):
            loss = network.loss(network(batch.images), batch.images, batch.labels).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


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
    layers = hidden_and_class_layers(given.hidden)
    network = create_model(STACKED.name, primary_output=given.primary, layers=layers)
    assert isinstance(network, CapsNet)
    print("mean lengths at the start:", *(f"{length:.3f}" for length in mean_lengths(network, sample)))
    train(network, digits.train, given.epochs)
    print("mean lengths at the end:  ", *(f"{length:.3f}" for length in mean_lengths(network, sample)))
    print(f"test accuracy {100 * evaluate(network, digits.test).accuracy:.2f} %")


if __name__ == "__main__":
    main()
