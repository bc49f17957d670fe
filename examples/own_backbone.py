"""Define your own backbone in one file, and use it in every command with one option.

    python examples/own_backbone.py                                                      # compare it
    torchcaps train compact --plugin examples/own_backbone.py --backbone residual --data digits  # use it

A backbone is any module that turns images into feature maps. This one has residual blocks (He, Zhang, Ren, Sun 2016,
"Deep Residual Learning for Image Recognition", arXiv:1512.03385). The script trains the same capsules on it and on the
convolutions of the preset, with the same seeds on the embedded digits, and prints parameters and test accuracies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchcaps import create_model, register
from torchcaps.analysis import evaluate
from torchcaps.datasets import Augmentation, BatchLoader, load_dataset
from torchcaps.ranges import Count, Width


class ResidualBlock(nn.Module):
    """Residual block: ReLU(x + f(x)), where f is two convolutions with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map features (B, c, h, w) to features of the same shape."""
        return torch.relu(x + self.change(x))


@register("backbone", "residual")
class ResidualBackbone(nn.Sequential):
    """Backbone of a convolution and residual blocks.

    Args:
        in_channels: Channels of the images.
        residual_width: Channels of the maps.
        residual_blocks: Residual blocks after the first convolution.
    """

    def __init__(self, in_channels: int, *, residual_width: Width = 32, residual_blocks: Count = 2) -> None:
        blocks = [ResidualBlock(residual_width) for _ in range(residual_blocks)]
        super().__init__(nn.Conv2d(in_channels, residual_width, 5), nn.ReLU(), *blocks)
        self.residual_width, self.residual_blocks = residual_width, residual_blocks


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
    given = parser.parse_args(arguments)

    digits = load_dataset("digits", limit_train=given.images)
    for backbone in ("conv", "residual"):
        accuracies = []
        for seed in given.seeds:
            torch.manual_seed(seed)
            loader = BatchLoader(digits.train, 64, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
            network = create_model("compact", backbone=backbone, decoder=False)
            optimizer = torch.optim.Adam(network.parameters())
            for epoch in range(given.epochs):
                for batch in loader.batches(epoch):
                    loss = network.loss(network(batch.images), batch.images, batch.labels).total
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            accuracies.append(f"{100 * evaluate(network, digits.test).accuracy:.2f}")
        parameters = sum(parameter.numel() for parameter in network.parameters())
        print(f"{backbone:<10} {parameters:>9,} parameters; test accuracy {', '.join(accuracies)} %")


if __name__ == "__main__":
    main()
