"""Return the scores of a network as a tensor, for tools that do not know capsules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import check

if TYPE_CHECKING:
    from torchcaps.models.network import Network


class ScoresOnly(nn.Module):
    """A network that returns only its class scores (B, J); see :meth:`torchcaps.models.Network.scores_only`.

    Args:
        network: The network, which shares its parameters.
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
