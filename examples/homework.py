"""Homework: write the step in which output capsules compete, and pass the checks of a routing.

    python examples/homework.py            # names the first property that is missing, or prints what passed

Fill in ``compete``; change nothing else. The page "For a course" has the task.
"""

from __future__ import annotations

import torch
from torch import Tensor

import torchcaps
from torchcaps.nn import Routed, Routing, Votes
from torchcaps.testing import check_routing


def compete(logits: Tensor) -> Tensor:
    """Return the coupling c_ij of each input capsule with each output capsule.

    Couplings are positive. For each input capsule they sum to one over the output capsules. Equal logits give equal
    couplings, and a larger logit gives a larger coupling.

    Args:
        logits: Summed agreement b_ij, (B, I, J): batch, input capsules, output capsules.

    Returns:
        Couplings of the same shape.
    """
    raise NotImplementedError("fill in compete(), then run this file again")


class Homework(Routing):
    """Dynamic routing with three iterations, except for ``compete``."""

    def forward(
        self,
        votes: Votes,
        activations: Tensor | None = None,  # noqa: ARG002  not needed, because it equals the length of the pose
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Return the output capsules; see :class:`torchcaps.nn.Routing`."""
        logits = votes.zeros()  # b_ij, (B, I, J)
        for _ in range(2):
            capsules = torchcaps.squash(votes.weighted_sum(compete(logits)))  # (B, J, D)
            logits = logits + votes.agreement(capsules)
        coupling = compete(logits)
        capsules = torchcaps.squash(votes.weighted_sum(coupling))
        return Routed(capsules, coupling=coupling if return_coupling else None)


def main() -> None:
    """Check the routing and print what passed."""
    try:
        compete(torch.zeros(1, 2, 3))
        passed = check_routing(Homework())
    except (NotImplementedError, AssertionError) as error:
        raise SystemExit(f"Not yet: {error}") from None
    for name, result in passed.items():
        print(f"{name:20} {result}")


if __name__ == "__main__":
    main()
