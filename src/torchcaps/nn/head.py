"""A head of capsules for any backbone: feature maps, tokens or vectors in, a capsule for each class out."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked, refuse_fx
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Capsules
from torchcaps.nn.layers import DenseCapsules, RoutingSpec, TransformSpec
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.ranges import Pixels, Size, Width


class CapsuleHead(nn.Module):
    """Features of any backbone to class capsules: :class:`PrimaryCapsules` of 1×1, and :class:`DenseCapsules`.

    Features are averaged to ``side`` x ``side`` places, whatever the size of the images, and each place becomes
    ``primary_types`` capsules. Tokens are places of a square map, row by row; a vector is what all places have. The
    scores, one of 0..1 for each class, are ``capsules.scores()``; :func:`torchcaps.margin_loss` takes them.

    Args:
        in_channels: C, the channels of the features.
        num_classes: J.
        side: Rows and columns of places.
        primary_types: Capsules that each place becomes, so that I = primary_types x side².
        primary_dim: K.
        capsule_dim: D.
        transform: The transform, as for :class:`DenseCapsules`.
        routing: The routing, as for :class:`DenseCapsules`.

    Examples:
        >>> import torch
        >>> from torchcaps.nn import CapsuleHead
        >>> head = CapsuleHead(64, num_classes=5)
        >>> maps, tokens, vectors = torch.rand(2, 64, 7, 7), torch.rand(2, 196, 64), torch.rand(2, 64)
        >>> [tuple(head(features).scores().shape) for features in (maps, tokens, vectors)]
        [(2, 5), (2, 5), (2, 5)]
    """

    @checked
    def __init__(
        self,
        in_channels: Size,
        num_classes: Size,
        *,
        side: Pixels = 4,
        primary_types: Width = 32,
        primary_dim: Width = 8,
        capsule_dim: Width = 16,
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
    ) -> None:
        super().__init__()
        self.side, in_capsules = side, primary_types * side**2
        self.primary = PrimaryCapsules(
            in_channels, primary_types=primary_types, primary_dim=primary_dim, primary_kernel=1, primary_stride=1
        )
        self.classes = DenseCapsules(
            in_capsules, primary_dim, num_classes, capsule_dim, transform=transform, routing=routing
        )

    def forward(self, features: Float[Tensor, "B C H W"] | Float[Tensor, "B N C"] | Float[Tensor, "B C"]) -> Capsules:
        """Class capsules (B, J, D) of maps, tokens or vectors.

        Raises:
            InputError: Features of another number of axes or channels, or tokens that are not as many as a square map
                has places.
        """
        refuse_fx(features)
        if features.ndim == 2:
            features = features[:, :, None, None]
        elif features.ndim == 3:
            side = math.isqrt(features.shape[1])
            if side**2 != features.shape[1]:
                raise InputError(
                    f"tokens must be as many as a square map has places, without class tokens, got {features.shape[1]}"
                )
            features = features.transpose(1, 2).unflatten(2, (side, side))
        elif features.ndim != 4:
            raise InputError(
                f"features must be maps (B, C, H, W), tokens (B, N, C) or vectors (B, C), got {tuple(features.shape)}"
            )
        return self.classes(self.primary(F.adaptive_avg_pool2d(features, self.side)))
