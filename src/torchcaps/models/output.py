"""What a network returns, and the classes of several objects in one image.

P is the number of objects in an image, each of another class.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchcaps.checks import check_classes, checked
from torchcaps.errors import InputError
from torchcaps.ops.precision import full_dtype
from torchcaps.tracing import can_look

Targets = Int[Tensor, "B"] | Int[Tensor, "B P"] | Shaped[Tensor, "B J"]
"""What images show: labels (B,) or (B, 1), or multi-hot rows (B, J), or the labels of P objects in each image."""

Task = Literal["classes", "labels", "regression"]
"""What is asked of an image: its class, or those of its objects; which of several labels it has, any number of them,
zeros and ones in the shape (B, L); or numbers, (B, T)."""
PRESENT = 0.5
"""A label is given where its score is above this: half way between the margins of the margin loss."""

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


def top_classes(scores: Float[Tensor, "*B J"], objects: int) -> Int[Tensor, "*B P"]:
    """The classes of the P highest scores, the highest first; of equal ones the first class comes first.

    ``topk`` leaves the order of equal numbers open, and ONNX has no stable sort; both have this argmax.
    """
    left, found = scores.detach(), []
    for _ in range(objects):
        found.append(left.argmax(-1, keepdim=True))
        left = left.scatter(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def is_correct(scores: Float[Tensor, "B J"], labels: Int[Tensor, "B"] | Int[Tensor, "B P"]) -> Bool[Tensor, "B"]:
    """Whether an image's highest score is its class's, or its P highest scores are exactly those of its P classes.

    Source: Sabour, Frosst, Hinton 2017, section 6 (arXiv:1710.09829).
    """
    if labels.ndim == 1:
        return scores.argmax(-1) == labels
    return (top_classes(scores, labels.shape[1]).sort(-1).values == labels.sort(-1).values).all(-1)


def order(given: Int[Tensor, "B P"], labels: Int[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """The permutation of an image's labels that puts each beside the class that it is to be compared with.

    ``labels.gather(1, order(given, labels))`` stands beside ``given``: a class that is in both beside itself, the
    others in the order in which either came. The classes of a row are all different.
    """
    same = given.unsqueeze(2) == labels.unsqueeze(1)  # (B, P given, P labels)
    # both in one order: the classes that are in both by their number, then the others as they came
    last = torch.iinfo(torch.int32).max + torch.arange(given.shape[1], device=given.device)
    first = torch.where(same.any(2), given, last).argsort(1)
    second = torch.where(same.any(1), labels, last).argsort(1)
    return second.gather(1, first.argsort(1))


@checked
def label_rows(scores: Float[Tensor, "B J"], targets: Int[Tensor, "B ..."], objects: int) -> Float[Tensor, "B J"]:
    """The labels of P different objects in each image as one row of zeros and ones.

    Values are looked at on the CPU only: on a GPU that would wait for the device.

    Raises:
        InputError: Another number of objects, labels that are no classes, or two objects of one class in an image.
    """
    if targets.shape[1:] != (objects,):
        raise InputError(
            f"this network sees {objects} objects in an image, so targets must be their labels, of shape "
            f"({len(scores)}, {objects}), got {tuple(targets.shape)}"
        )
    check_classes("labels", targets, scores.shape[1])
    rows = torch.zeros(scores.shape, dtype=full_dtype(scores.dtype), device=scores.device)
    rows.scatter_(1, targets.long(), 1)
    if can_look(targets) and (rows.sum(1) < objects).any():
        image = int((rows.sum(1) < objects).nonzero()[0])
        raise InputError(
            f"the objects of an image must be of different classes, got {targets[image].tolist()} for image {image}"
        )
    return rows


@checked
def squared_error(
    values: Float[Tensor, "B J"], targets: Float[Tensor, "B J"], scale: Float[Tensor, "J"]
) -> Float[Tensor, ""]:
    """The mean over images and numbers of ((value − target) / scale)², the loss of a regression."""
    return ((values - targets) / scale).square().mean()
