"""Losses of the class scores. A loss is a part, chosen by its name: ``classification_loss="spread"``.

A loss is a module. It is called with scores (B, J) and targets (labels, or rows of zeros and ones) and returns a
scalar. A loss for pixels is called with scores (B, J, H, W), masks (B, H, W) and, if the network has them, its logits.
Register your own class with ``@register("loss", "mine")``; its constructor may have an argument ``num_classes``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from torchcaps.models.output import Targets
from torchcaps.ops.losses import margin_loss, normalised_cross_entropy, score_cross_entropy, spread_loss
from torchcaps.ops.segmentation import dice_loss, pixel_cross_entropy, pixel_logits, pixel_margin_loss
from torchcaps.parts import register
from torchcaps.ranges import Count, Factor, PositiveFactor, Range, Share
from torchcaps.tracing import needs_torch_operations


@register("loss", "margin")
class MarginLoss(nn.Module):
    """Margin loss of the paper, :func:`torchcaps.margin_loss`.

    Args:
        m_plus: Margin loss: length above which a present class costs nothing.
        m_minus: Margin loss: length below which an absent class costs nothing.
        margin_lambda: Margin loss: weight of the absent classes.
        margin_power: Margin loss: 2 for squared margins, 1 for plain ones.
        margin_scale: Factor on the margin loss.
        margin_over_classes: Margin loss summed over classes (the paper) or averaged.
    """

    def __init__(
        self,
        *,
        m_plus: Factor = 0.9,
        m_minus: Factor = 0.1,
        margin_lambda: Factor = 0.5,
        margin_power: Annotated[int, Range(1, 10, whole=True)] = 2,
        margin_scale: PositiveFactor = 1.0,
        margin_over_classes: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__()
        self.m_plus, self.m_minus, self.margin_lambda, self.margin_power = m_plus, m_minus, margin_lambda, margin_power
        self.margin_scale, self.margin_over_classes = margin_scale, margin_over_classes

    def forward(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, ""]:
        """Return the loss of a batch."""
        loss = self.margin_scale * margin_loss(
            scores,
            targets,
            m_plus=self.m_plus,
            m_minus=self.m_minus,
            lam=self.margin_lambda,
            power=self.margin_power,
        )
        return loss / scores.shape[1] if self.margin_over_classes == "mean" else loss


@register("loss", "cross-entropy")
class CrossEntropy(nn.Module):
    """Cross-entropy of the scores divided by their sum, :func:`torchcaps.normalised_cross_entropy`."""

    def forward(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, ""]:
        """Return the loss of a batch."""
        return normalised_cross_entropy(scores, targets)


@register("loss", "score-cross-entropy")
class ScoreCrossEntropy(nn.Module):
    """Cross-entropy of the softmax of the scores times a scale, :func:`torchcaps.score_cross_entropy`.

    Args:
        score_scale: Factor on the scores before their softmax; the initial value if it is learned.
        learn_score_scale: Learn the factor ``score_scale``.
    """

    def __init__(self, *, score_scale: PositiveFactor = 1.0, learn_score_scale: bool = False) -> None:
        super().__init__()
        self.score_scale, self.learn_score_scale = score_scale, learn_score_scale
        self.scale = nn.Parameter(torch.empty(())) if learn_score_scale else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned factor to its initial value."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.score_scale)

    def forward(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, ""]:
        """Return the loss of a batch."""
        return score_cross_entropy(scores, targets, scale=self.score_scale if self.scale is None else self.scale)


@register("loss", "spread")
class SpreadLoss(nn.Module):
    """Spread loss, :func:`torchcaps.spread_loss`, with a margin that can grow during training.

    Args:
        spread_margin: Spread loss: final margin between the score of the present class and each other score.
        spread_growth: Spread loss: steps in a unit of the margin's growth, m = 0.2 + (spread_margin -
            0.2)·sigmoid(step/spread_growth - 4); none: a constant margin.
    """

    steps: Tensor

    def __init__(self, *, spread_margin: Share = 0.9, spread_growth: Count | None = None) -> None:
        super().__init__()
        self.spread_margin, self.spread_growth = spread_margin, spread_growth
        if spread_growth is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # training steps so far

    def reset_parameters(self) -> None:
        """Set the number of training steps to zero."""
        if self.spread_growth is not None:
            self.steps.zero_()

    def forward(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, ""]:
        """Return the loss of a batch. In training the margin then grows by one step, except under ``torch.func``."""
        return spread_loss(scores, targets, margin=self._margin())

    def _margin(self) -> float | Float[Tensor, ""]:
        if self.spread_growth is None:
            return self.spread_margin
        grown = (self.steps.float() / self.spread_growth).clamp_max(14) - 4
        if self.training and not needs_torch_operations():  # torch.func does not allow a change of a buffer
            self.steps += 1
        return 0.2 + (self.spread_margin - 0.2) * grown.sigmoid()


class PixelLoss(nn.Module):
    """Base class of losses of the softmax of each pixel.

    Args:
        score_scale: Factor on the lengths of capsules before their softmax; the logits of a network without capsules
            have none.
    """

    def __init__(self, *, score_scale: PositiveFactor = 10.0) -> None:
        super().__init__()
        self.score_scale = score_scale

    def forward(
        self,
        scores: Float[Tensor, "B J *S"],
        targets: UInt8[Tensor, "B *S"],
        logits: Float[Tensor, "B J *S"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the loss of a batch; pixels with the target 255 do not count."""
        return self.of_logits(pixel_logits(scores, logits, self.score_scale), targets)

    def of_logits(self, logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"]) -> Float[Tensor, ""]:
        """Return the loss of logits of at least two classes."""
        raise NotImplementedError


@register("loss", "dice")
class DiceLoss(PixelLoss):
    """Dice loss of each class of each image, :func:`torchcaps.ops.segmentation.dice_loss`."""

    def of_logits(self, logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"]) -> Float[Tensor, ""]:
        return dice_loss(logits, targets)


@register("loss", "pixel-cross-entropy")
class PixelCrossEntropy(PixelLoss):
    """Cross-entropy of each pixel, :func:`torchcaps.ops.segmentation.pixel_cross_entropy`."""

    def of_logits(self, logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"]) -> Float[Tensor, ""]:
        return pixel_cross_entropy(logits, targets)


@register("loss", "dice-cross-entropy")
class DiceCrossEntropy(PixelLoss):
    """Sum of the Dice loss and the cross-entropy, as MONAI's ``DiceCELoss``."""

    def of_logits(self, logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"]) -> Float[Tensor, ""]:
        return dice_loss(logits, targets) + pixel_cross_entropy(logits, targets)


@register("loss", "pixel-margin")
class PixelMarginLoss(nn.Module):
    """Margin loss of each pixel, summed over classes and averaged over pixels.

    Args:
        m_plus: Margin loss: length above which the pixel's class costs nothing.
        m_minus: Margin loss: length below which another class costs nothing.
        margin_lambda: Margin loss: weight of the other classes.
    """

    def __init__(self, *, m_plus: Factor = 0.9, m_minus: Factor = 0.1, margin_lambda: Factor = 0.5) -> None:
        super().__init__()
        self.m_plus, self.m_minus, self.margin_lambda = m_plus, m_minus, margin_lambda

    def forward(
        self,
        scores: Float[Tensor, "B J *S"],
        targets: UInt8[Tensor, "B *S"],
        logits: Tensor | None = None,  # noqa: ARG002  all losses of pixels have the same arguments
    ) -> Float[Tensor, ""]:
        """Return the loss of a batch; probabilities of a network without capsules count as lengths."""
        options = {"m_plus": self.m_plus, "m_minus": self.m_minus, "lam": self.margin_lambda}
        return pixel_margin_loss(scores, targets, **options)
