"""The scores of a network as a plain tensor, for tools that know nothing of capsules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import check

if TYPE_CHECKING:
    from torchcaps.models.network import Network


class ScoresOnly(nn.Module):
    """A network that returns its class scores (B, J) alone; :meth:`torchcaps.models.Network.scores_only` makes it.

    Args:
        network: The network; it is called as it is, and its parameters are shared.
    """

    def __init__(self, network: Network) -> None:
        from torchcaps.models.network import Network

        super().__init__()
        check("network", network, Network)
        self.network = network
        self.train(network.training)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B J"]:
        """Return the scores of images."""
        scores: Tensor = self.network(images).scores
        return scores
