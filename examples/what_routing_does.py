"""Measure the effect of dynamic routing in the trained network ``compact``, on MNIST's test images.

    python examples/what_routing_does.py            # the first 50 digits
    python examples/what_routing_does.py --images 10000

Prints the accuracy and the length of the longest class capsule after one to ten iterations, the largest coupling, and
how strongly each row of the map of primary capsules is coupled with the winning class.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps import load_pretrained
from torchcaps.datasets import load_dataset
from torchcaps.models import CapsNet

BATCH = 250  # images


def route(network: CapsNet, images: Tensor, num_iterations: int) -> tuple[Tensor, Tensor]:
    """Return the lengths of the class capsules (B, J), and the coupling (B, I, J) of the last iteration."""
    network.layers[-1].routing.num_iterations = num_iterations
    with torch.no_grad():
        parts = [network(batch, return_coupling=True) for batch in images.split(BATCH)]
    return torch.cat([part.lengths for part in parts]), torch.cat([part.coupling for part in parts])


def row_means(network: CapsNet, values: Tensor) -> Tensor:
    """Average numbers of primary capsules (..., I) over types and columns: (..., rows of the map)."""
    return values.unflatten(-1, network.flow[-2].grid).mean((-3, -1))


def bottom_row_wins(network: CapsNet, lengths: Tensor, coupling: Tensor) -> int:
    """Count the images whose bottom row is coupled with the winning class more strongly than any other row."""
    winner = lengths.argmax(1)
    of_winner = coupling[torch.arange(len(winner)), :, winner]  # (B, I)
    rows = row_means(network, of_winner)
    return int((rows.argmax(1) == rows.shape[1] - 1).sum())


def longer_than_others(rows: Tensor) -> float:
    """Return how far the last number exceeds the mean of the other numbers, percent."""
    return 100 * (float(rows[-1] / rows[:-1].mean()) - 1)


def measure(images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return all figures by name."""
    network = load_pretrained("compact")
    assert isinstance(network, CapsNet)
    figures: dict[str, Any] = {"images": len(images)}
    for num_iterations in (1, 2, 5, 10, 3):  # 3 last: the figures below are about its coupling
        lengths, coupling = route(network, images, num_iterations)
        figures[f"accuracy after {num_iterations}, %"] = 100 * float((lengths.argmax(1) == labels).double().mean())
        figures[f"mean length of the winner after {num_iterations}"] = float(lengths.amax(1).double().mean())
    winners = coupling.gather(2, lengths.argmax(1)[:, None, None].expand(-1, coupling.shape[1], 1))
    figures["uniform coupling"] = 1 / coupling.shape[2]
    figures["mean coupling with the winner"] = float(winners.double().mean())
    figures["largest coupling with the winner, mean over images"] = float(winners.amax(1).double().mean())
    figures["capsules coupled with the winner at twice uniform or more, %"] = 100 * float(
        (winners >= 2 / coupling.shape[2]).double().mean()
    )
    figures["largest coupling of all"] = float(coupling.max())
    figures["bottom row strongest, images"] = bottom_row_wins(network, lengths, coupling)
    turned = images.flip(2, 3)
    figures["the same, images turned by 180°"] = bottom_row_wins(network, *route(network, turned, 3))
    matrices = network.layers[-1].transform.matrices.detach()  # (I, J, D, K)
    figures["matrices of the bottom row longer by, %"] = longer_than_others(
        row_means(network, matrices.flatten(2).norm(dim=2).mean(1))
    )
    with torch.no_grad():
        poses = network.capsules(images[:BATCH])[0].poses
    votes = torch.einsum("ijdk,bik->bijd", matrices, poses).norm(dim=3).mean((0, 2))
    figures["votes of the bottom row longer by, %"] = longer_than_others(row_means(network, votes))
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the measurements, one per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50, help="Test images, from the first on (default 50).")
    given = parser.parse_args(arguments)
    test = load_dataset("mnist").test
    images = test.images[: given.images].float() / 255
    for name, figure in measure(images, test.labels[: given.images]).items():
        print(f"{name}: {figure:.4g}")


if __name__ == "__main__":
    main()
