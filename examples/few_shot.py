"""Recognise new classes from one or five images of each: induction, the class vector of a few images by routing.

    python examples/few_shot.py --data digits
    python examples/few_shot.py --data folder:photos

In an episode, a network sees K support images of each of five classes, and says to which of them a query image belongs.
The class vector is routing from K capsules to one, with one matrix for all, so that support images that agree with each
other count more. A bilinear score compares it with the query. Half of the classes are trained on, at least five; the
others, which the network never saw, are tested. The script prints the accuracy of 5-way 1-shot and 5-shot episodes,
and that of the mean of the support vectors in place of routing.

Source: Geng et al. 2019, "Induction networks for few-shot text classification" (EMNLP), here for images.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.nn import DenseCapsules, StackBackbone

WAYS, QUERIES, WIDTH, SLICES = 5, 5, 64, 32
"""Classes of an episode, queries of a class, components of an image's vector, slices of the bilinear score."""


class Induction(nn.Module):
    """Encoder, induction of class vectors, and relation of class vectors with queries."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.maps = StackBackbone(
            channels, stack_channels=(32, 64), stack_kernels=(5, 5), stack_strides=(2, 2), stack_padding=2
        )
        self.encode = nn.Linear(64 * 16, WIDTH)
        # one output capsule: support images compete, and all share one matrix
        routing = {"name": "dynamic", "softmax_over": "inputs"}
        self.induce = DenseCapsules(None, WIDTH, 1, WIDTH, transform="common", routing=routing)
        self.compare, self.score = nn.Bilinear(WIDTH, WIDTH, SLICES), nn.Linear(SLICES, 1)

    def vectors(self, images: Tensor) -> Tensor:
        """Return the vector of each image (…, D)."""
        features = F.adaptive_avg_pool2d(self.maps(images.flatten(0, -4)), 4).flatten(1)
        return self.encode(features).unflatten(0, images.shape[:-3])

    def forward(self, support: Tensor, queries: Tensor, *, by_mean: bool = False) -> Tensor:
        """Return scores (Q, W) of queries (Q, C, H, W) for classes of support images (W, K, C, H, W)."""
        vectors = self.vectors(support)  # (W, K, D)
        classes = vectors.mean(1) if by_mean else self.induce(vectors).poses.squeeze(1)
        asked = self.vectors(queries)
        pairs = (len(asked), len(classes), WIDTH)
        related = self.compare(classes.expand(pairs).contiguous(), asked[:, None].expand(pairs).contiguous()).relu()
        return self.score(related).squeeze(2)


def episodes(
    images: ImageSet, classes: Sequence[int], shots: int, number: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield support images (W, K, …), queries (W · Q, …) and the class of each query, 0 to W − 1."""
    random = torch.Generator().manual_seed(seed)
    of_class = {label: (images.labels == label).nonzero().flatten() for label in classes}
    for _ in range(number):
        ways = [classes[way] for way in torch.randperm(len(classes), generator=random)[:WAYS]]
        drawn = [of_class[way][torch.randperm(len(of_class[way]), generator=random)[: shots + QUERIES]] for way in ways]
        pixels = torch.stack([images.images[each] for each in drawn]).float() / 255  # (W, K + Q, C, H, W)
        yield pixels[:, :shots], pixels[:, shots:].flatten(0, 1), torch.arange(WAYS).repeat_interleave(QUERIES)


def accuracy(network: Induction, tests: Iterator[tuple[Tensor, ...]], *, by_mean: bool) -> float:
    """Return the share of correct queries."""
    with torch.no_grad():
        right = [network(*each[:2], by_mean=by_mean).argmax(1) == each[2] for each in tests]
    return float(torch.cat(right).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on the first classes, test on the remaining classes, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="data set with at least 10 classes (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=500, help="training episodes (default: %(default)s)")
    parser.add_argument("--tests", type=int, default=200, help="test episodes (default: %(default)s)")
    options = parser.parse_args(arguments)
    data = load_dataset(options.data)
    known, new = (each.tolist() for each in torch.arange(data.num_classes).tensor_split(2))
    if min(len(known), len(new)) < WAYS:
        raise SystemExit(f"{options.data} has {data.num_classes} classes; few-shot episodes need {2 * WAYS}")
    for shots in (1, 5):
        for by_mean in (False, True):
            torch.manual_seed(0)
            network = Induction(data.in_shape[0])
            optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
            for support, queries, labels in episodes(data.train, known, shots, options.episodes, 1):
                loss = F.cross_entropy(network(support, queries, by_mean=by_mean), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            share = accuracy(network, episodes(data.train, new, shots, options.tests, 2), by_mean=by_mean)
            print(f"{WAYS}-way {shots}-shot, {'mean   ' if by_mean else 'routing'}: {100 * share:.2f} % of new classes")


if __name__ == "__main__":
    main()
