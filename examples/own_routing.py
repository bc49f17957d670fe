"""Define your own routing algorithm in one file, check it, train it, and use it in every command with one option.

    python examples/own_routing.py                                                  # check it, compare it
    torchcaps train compact --plugin examples/own_routing.py --routing mine --data digits  # use it

The algorithm is self-attention routing (Mazzia, Salvetti, Chiaberge 2021, "Efficient-CapsNet", arXiv:2101.12491), which
does not iterate: the coupling of a vote grows with its agreement with all other votes for the same output. Copy the
file, change ``forward``, and run check_routing to find mistakes. The script prints the results of the checks, then test
accuracy and training time of one network with each routing, trained with the same seeds on the embedded digits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps import CapsNet, create_model, register, safe_norm
from torchcaps.analysis import evaluate
from torchcaps.datasets import Augmentation, BatchLoader, Dataset, load_dataset
from torchcaps.nn import Routed, Routing, Votes
from torchcaps.ranges import PositiveFactor
from torchcaps.testing import check_routing


@register("routing", "mine")
class SelfAttentionRouting(Routing):
    r"""Self-attention routing, with a temperature T.

    .. code-block:: text

        a_ij = Σ_k ⟨û_j|i, û_j|k⟩ / (T √D),   c_ij = softmax_j(a_ij)
        s_j = Σ_i c_ij û_j|i,                 v_j = (1 − e^−‖s_j‖) s_j / ‖s_j‖

    Args:
        temperature: Divisor of the attention before the softmax (T).

    Source: arXiv:2101.12491, section 3, without its learned prior.
    """

    def __init__(self, temperature: PositiveFactor = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(
        self,
        votes: Votes,
        activations: Tensor | None = None,  # noqa: ARG002  not needed, because it equals the length of the pose
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Route votes to output capsules (B, J, D), and return the coupling (B, I, J) if asked."""
        attention = votes.agreement(votes.weighted_sum(None)) / (self.temperature * votes.size.out_dim**0.5)
        coupling = votes.compete(attention)
        total = votes.weighted_sum(coupling)
        length = safe_norm(total, keepdim=True)  # safe_norm, because the gradient of a plain norm at zero is NaN
        poses = (1 - torch.exp(-length)) * total / length
        return Routed(poses, coupling=coupling if return_coupling else None)


def train(network: CapsNet, digits: Dataset, epochs: int, seed: int) -> None:
    """Minimise the network's own loss with Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = BatchLoader(digits.train, 64, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
    for epoch in range(epochs):
        for batch in loader.batches(epoch):
            loss = network.loss(network(batch.images), batch.images, batch.labels).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the routing, and compare it with dynamic routing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
    given = parser.parse_args(arguments)

    for name, measured in check_routing(SelfAttentionRouting()).items():
        print(f"{name:<20} {measured}")

    digits = load_dataset("digits", limit_train=given.images)
    for routing in ("mine", "dynamic"):
        accuracies, begin = [], time.monotonic()
        for seed in given.seeds:
            torch.manual_seed(seed)
            network = create_model("sabour2017", routing=routing, conv_channels=32, primary_types=8, decoder=False)
            assert isinstance(network, CapsNet)
            train(network, digits, given.epochs, seed)
            accuracies.append(f"{100 * evaluate(network, digits.test).accuracy:.2f}")
        seconds = (time.monotonic() - begin) / len(given.seeds)
        print(f"{routing:<20} test accuracy {', '.join(accuracies)} %; {seconds:.1f} s a run")


if __name__ == "__main__":
    main()
