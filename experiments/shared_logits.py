"""Accuracy by the number of images that a network is asked about at once, if its routing averages over the batch.

    python experiments/shared_logits.py --data FOLDER     # the four files of MNIST; about five minutes on one core

FixCaps (Woodman718/FixCaps, commit 16d5adc, ``Digits_Caps``) has one logit for each pair of capsules, shared by all
images of a batch, a softmax over the inputs, a squash over the classes, and weights drawn with a standard deviation of
1. The layer is written anew here, once with these logits and once with separate logits for each image. The test images
are asked about in random order, and sorted by class, as a folder for each class is read without shuffling.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

import torchcaps
from torchcaps import fit
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.nn import Routed, Routing
from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.votes import Votes
from torchcaps.training import Recipe

TRAINING_IMAGES, TEST_IMAGES = 5_000, 2_000
TEST_BATCHES = (1, 2, 8, 32, 128, TEST_IMAGES)
"""Numbers of test images that the network is asked about at once."""


@torchcaps.register("routing", "shared-logits")
class SharedLogits(Routing):
    """Dynamic routing as in FixCaps' class layer.

    Args:
        shared: All images of a batch share their logits, which the mean agreement changes.
        num_iterations: Number of times that the coupling is computed.
    """

    softmax_over = "inputs"
    by_row = False

    def __init__(self, *, shared: bool = True, num_iterations: int = 3):
        super().__init__()
        self.shared, self.num_iterations = shared, num_iterations

    def balanced_std(self, size: LayerSize) -> float:  # noqa: ARG002  as all routings
        """Return the standard deviation of FixCaps' weights."""
        return 1.0

    def forward(
        self,
        votes: Votes,
        activations: Tensor | None = None,  # noqa: ARG002  as all routings
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Route."""
        logits: Tensor = votes.zeros()
        for iteration in range(self.num_iterations):
            coupling = logits.softmax(1)  # (B, I, J), over the inputs
            poses = torchcaps.squash(votes.weighted_sum(coupling).mT).mT  # over the classes
            if iteration + 1 < self.num_iterations:
                agreement = votes.agreement(poses)
                logits = logits + (agreement.mean(0, keepdim=True) if self.shared else agreement)
        return Routed(poses, coupling=coupling if return_coupling else None)


@torch.no_grad()
def accuracy(network: torch.nn.Module, images: Tensor, labels: Tensor, batch: int) -> float:
    """Return the share of correct classes in percent, asked about ``batch`` images at once."""
    answers = torch.cat([network(part).scores.argmax(1) for part in images.float().div(255).split(batch)])
    return 100 * float((answers == labels).float().mean())


def main() -> None:
    """Train three networks of each kind, and print the accuracy of each number of images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Folder of the four files of MNIST.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = load_dataset("mnist", data_dir=options.data)
    assert isinstance(data.train, ImageSet)
    train, test = data.train.take(TRAINING_IMAGES), data.test.take(TEST_IMAGES)
    print(f"| logits | order | {' | '.join(map(str, TEST_BATCHES))} |")
    orders = {"random": torch.arange(len(test)), "sorted by class": test.labels.argsort(stable=True)}
    for shared in (True, False):
        rows: dict[str, list[list[float]]] = {order: [] for order in orders}
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            network = torchcaps.create_model(
                "sabour2017", in_shape=(1, 28, 28), num_classes=10, routing="shared-logits", shared=shared,
                conv_channels=32, primary_types=4, decoder=None,
            )  # fmt: skip
            fit(network, train, Recipe(epochs=options.epochs, batch_size=32), seed=seed)
            network.eval()
            for order, index in orders.items():
                images, labels = test.images[index], test.labels[index]
                rows[order].append([accuracy(network, images, labels, batch) for batch in TEST_BATCHES])
        for order, seeds in rows.items():
            columns = zip(*seeds, strict=True)
            cells = (f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in columns)
            print(f"| {'shared by the batch' if shared else 'for each image'} | {order} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
