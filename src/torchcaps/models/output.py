"""What a network returns. P is the number of objects in an image, each of another class."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxtyping import Float, Int, Shaped
from torch import Tensor

Targets = Int[Tensor, "B"] | Int[Tensor, "B P"] | Shaped[Tensor, "B J"]
"""What images show: labels (B,) or (B, 1), or multi-hot rows (B, J), or the labels of P objects in each image."""

ScoreName = Literal["length", "activation", "probability", "value"]
"""What scores are: lengths of capsules, activations of capsules, a CNN's probabilities, or values of a regression."""
HIGHEST: dict[ScoreName, str] = {
    "length": "longest",
    "activation": "most active",
    "probability": "most probable",
    "value": "largest",
}
"""What the class of the highest score is called."""


class ModelOutput(NamedTuple):
    """What a network says about a batch of images; what it does not have is None."""

    scores: Float[Tensor, "B J"]
    """Class scores: the capsules' activations, or their lengths ‖v_j‖ where they have none; a CNN's probabilities."""
    capsules: Float[Tensor, "B J D"] | None = None
    """Class capsules v_j."""
    reconstruction: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"] | None = None
    """Decoded images, pixels 0..1; with several objects in an image, each by itself."""
    coupling: Float[Tensor, "B I J"] | None = None
    """Coupling c_ij of the last layer's last routing iteration, where asked for."""
    logits: Float[Tensor, "B J"] | None = None
    """A CNN's scores before the softmax or sigmoid."""
    decoded: Int[Tensor, "B P"] | None = None
    """With several objects in an image, the classes whose capsules were decoded, as ``reconstruction`` has them."""
    activations: Float[Tensor, "B J"] | None = None
    """How certain each class capsule is, where the routing says so; these are the scores then."""

    @property
    def lengths(self) -> Float[Tensor, "B J"]:
        """The scores, by the name that they have where they are lengths."""
        return self.scores

    @property
    def score_name(self) -> ScoreName:
        """What the scores are."""
        if self.capsules is None:
            return "probability"
        return "length" if self.activations is None else "activation"


class Losses(NamedTuple):
    """The loss of a batch and its parts, scalars."""

    total: Float[Tensor, ""]
    """What is minimised: classification + weight · reconstruction."""
    classification: Float[Tensor, ""]
    """The loss of the class scores."""
    reconstruction: Float[Tensor, ""] | None = None
    """Squared error of the reconstruction, of all objects together, before its weight."""
