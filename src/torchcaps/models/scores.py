"""Return the scores of a network as a tensor, for tools that do not know capsules."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import check
from torchcaps.models.saving import SavedNetwork


class ScoresOnly(nn.Module):
    """A network that returns only its class scores (B, J); see :meth:`torchcaps.models.Network.scores_only`.

    Args:
        network: A :class:`torchcaps.models.Network`, which shares its parameters.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        check("network", network, SavedNetwork)
        self.network = network
        self.train(network.training)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B J"]:
        """Return the scores of images."""
        scores: Tensor = self.network(images).scores
        return scores
