"""Outputs of a network. P is the number of objects in an image, all of different classes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxtyping import Float, Int, Shaped
from torch import Tensor

Targets = Int[Tensor, "B"] | Int[Tensor, "B P"] | Shaped[Tensor, "B J"]
"""Targets of images: labels (B,) or (B, 1), multi-hot rows (B, J), or the labels (B, P) of P objects in each image."""

ScoreName = Literal["length", "activation", "probability", "score", "value", "share"]
"""Kind of the scores: lengths or activations of capsules, a CNN's probabilities, scores of grades computed from lengths
or activations, values of a regression, or shares of slots in pixels."""
SUPERLATIVES: dict[ScoreName, str] = {
    "length": "longest",
    "activation": "most active",
    "probability": "most probable",
    "score": "predicted",
    "value": "largest",
    "share": "largest",
}
"""Words for the class with the highest score, by the kind of the scores."""


class ModelOutput(NamedTuple):
    """Output of a network for a batch of images. Fields that the network does not have are None."""

    scores: Float[Tensor, "B J"]
    """Class scores: activations of the capsules, or else their lengths ‖v_j‖; a CNN's probabilities."""
    capsules: Float[Tensor, "B J D"] | None = None
    """Class capsules v_j."""
    reconstruction: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"] | None = None
    """Decoded images, pixels 0..1; with several objects in an image, each object separately."""
    coupling: Float[Tensor, "B I J"] | None = None
    """Coupling c_ij of the last layer's last routing iteration, with ``return_coupling``."""
    logits: Float[Tensor, "B J"] | None = None
    """A CNN's scores before the softmax or sigmoid."""
    decoded: Int[Tensor, "B P"] | None = None
    """With several objects in an image, the decoded classes, in the order of ``reconstruction``."""
    activations: Float[Tensor, "B J"] | None = None
    """Activation of each class capsule, if the routing computes activations; they are then the scores."""

    @property
    def lengths(self) -> Float[Tensor, "B J"]:
        """Another name for ``scores``, for networks whose scores are lengths."""
        return self.scores

    @property
    def score_name(self) -> ScoreName:
        """Kind of the scores."""
        if self.capsules is None:
            return "probability"
        return "length" if self.activations is None else "activation"


class Losses(NamedTuple):
    """Loss of a batch and its terms, scalars."""

    total: Float[Tensor, ""]
    """Loss to minimise: classification + weight · reconstruction."""
    classification: Float[Tensor, ""]
    """Loss of the class scores."""
    reconstruction: Float[Tensor, ""] | None = None
    """Squared reconstruction error of all objects together, before it is weighted."""
