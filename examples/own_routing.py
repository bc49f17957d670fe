"""A routing algorithm of your own in thirty lines, checked, and trained in the place of routing by agreement.

    python examples/own_routing.py

The algorithm is self-attention routing (Mazzia, Salvetti, Chiaberge 2021, "Efficient-CapsNet", arXiv:2101.12491), which
does not iterate: a vote is coupled to an output as strongly as it agrees with all other votes for that output. Copy the
class, change its forward, and let check_routing say what is wrong with it. Prints what the checks found, then the test
accuracy and training time of the same network with each routing, trained from the same seeds on the embedded digits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps import CapsNet, compute_votes, create_model, safe_norm
from torchcaps.analysis import evaluate
from torchcaps.datasets import Augmentation, BatchLoader, Dataset, load_dataset
from torchcaps.nn import DynamicRouting, Routing
from torchcaps.testing import check_routing


class SelfAttentionRouting(Routing):
    r"""Coupling by attention among the votes.

    .. code-block:: text

        a_ij = Σ_k ⟨û_j|i, û_j|k⟩ / √D,   c_ij = softmax_j(a_ij + prior_ij)
        s_j = Σ_i c_ij û_j|i + bias_j,    v_j = (1 − e^−‖s_j‖) s_j / ‖s_j‖

    Source: arXiv:2101.12491, section 3. There a learned prior is added to c after the softmax; here it starts the
    logits, which is what ``prior`` means to a capsule layer, so that c keeps summing to one.
    """

    softmax_over = "outputs"  # check_routing looks whether that is so

    def forward(
        self,
        poses: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        prior: Tensor | None = None,
        return_coupling: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Poses (B, I, K) and weight (I, J, D, K) to capsules (B, J, D), and if asked for coupling (B, I, J)."""
        votes = compute_votes(poses, weight)  # (B, I, J, D)
        attention = torch.einsum("bijd,bjd->bij", votes, votes.sum(1)) / votes.shape[3] ** 0.5
        coupling = (attention if prior is None else attention + prior).softmax(2)
        total = torch.einsum("bij,bijd->bjd", coupling, votes)
        if bias is not None:
            total = total + bias
        length = safe_norm(total, keepdim=True)  # with its epsilon, so that a zero vector has a gradient
        capsules = (1 - torch.exp(-length)) * total / length
        return capsules, coupling if return_coupling else None


def make_network(routing: Routing, seed: int) -> CapsNet:
    """A small network of the paper's kind with another routing."""
    torch.manual_seed(seed)
    network = create_model("sabour2017", conv_channels=32, primary_types=8, decoder=False)
    assert isinstance(network, CapsNet)
    network.class_capsules.routing = routing
    return network


def train(network: CapsNet, digits: Dataset, epochs: int, seed: int) -> None:
    """Adam on the network's own loss."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = BatchLoader(digits.train, 64, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
    for epoch in range(epochs):
        for batch in loader.batches(epoch):
            loss = network.loss(network(batch.images), batch.images, batch.labels).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    given = parser.parse_args(arguments)

    for name, found in check_routing(SelfAttentionRouting()).items():
        print(f"{name:<20} {found}")

    digits = load_dataset("digits", limit_train=given.images)
    for routing in (SelfAttentionRouting(), DynamicRouting()):
        accuracies, begin = [], time.monotonic()
        for seed in given.seeds:
            network = make_network(routing, seed)
            train(network, digits, given.epochs, seed)
            accuracies.append(f"{100 * evaluate(network, digits.test).accuracy:.2f}")
        seconds = (time.monotonic() - begin) / len(given.seeds)
        print(f"{type(routing).__name__:<20} test accuracy {', '.join(accuracies)} %; {seconds:.1f} s a run")


if __name__ == "__main__":
    main()
