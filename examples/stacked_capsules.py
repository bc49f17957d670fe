"""Stack capsule layers, as your own preset: primary capsules → three hidden layers → class capsules.

    python examples/stacked_capsules.py                      # primary capsules of length one
    python examples/stacked_capsules.py --primary squash     # squashed as in the paper, so short at the start
    torchcaps train stacked --plugin examples/stacked_capsules.py --data digits

A squash makes short capsules much shorter (a length of 0.1 becomes 0.01), so a deep stack that starts from short poses
gets no gradient. Primary capsules of length one avoid this, and the initialisation "balanced" preserves lengths from
layer to layer. The script trains on the embedded digits and prints the mean length of the capsules of every layer
before and after training, and the test accuracy. The preset `compact-deep` has a hidden layer on a map.

Measured on a CPU with torch 2.13, seed 0: primary capsules of length one reach 98.61 %. Squashed primary capsules start
with the lengths 0.100, 0.011, 0.000, 0.000, 0.000 and stay at 10 %, because the loss stays at 0.81 = 0.9². With one
hidden layer less (--hidden 32 16), the convolution lengthens them within two epochs, and both reach 98.33 %.
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
    """Return hidden layers with these numbers of capsules, of 8 components each, and the layer of class capsules."""
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
    """Return the mean length of the primary capsules, and of the capsules of each layer above."""
    flow = network.capsules(images)
    return [float(capsules.scores().mean()) for capsules in (*flow, network.class_capsules(flow[-1]))]


def train(network: CapsNet, image_set: ImageSet, epochs: int, batch_size: int = 64, seed: int = 0) -> None:
    """Minimise the network's own loss with Adam."""
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
    """Build, train and test a network as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", choices=("unit", "squash"), default="unit", help="default: %(default)s")
    parser.add_argument(
        "--hidden", type=int, nargs="*", default=[32, 16, 16], help="capsules of each hidden layer (default: 32 16 16)"
    )
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
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
