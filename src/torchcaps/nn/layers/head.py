"""A capsule head for any backbone: it turns feature maps, tokens or vectors into a capsule for each class."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked, refuse_fx
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Capsules
from torchcaps.nn.layers.base import RoutingSpec, TransformSpec
from torchcaps.nn.layers.dense import DenseCapsules
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.parts import Device, Dtype, placed
from torchcaps.ranges import Pixels, Size, Width


class CapsuleHead(nn.Module):
    """Capsule head on the features of any backbone: :class:`PrimaryCapsules` of 1×1, and :class:`DenseCapsules`.

    Feature maps of any size are averaged to a grid of ``side`` x ``side`` cells, and each cell becomes
    ``primary_types`` capsules. Tokens are read as a square map, row by row. A vector is repeated for all cells.
    ``capsules.scores()`` returns a score of 0..1 for each class, for :func:`torchcaps.margin_loss`.

    Args:
        in_channels: Channels of the features (C).
        num_classes: Number of classes (J).
        side: Rows and columns of the grid.
        primary_types: Capsules for each cell of the grid, so that I = primary_types x side².
        primary_dim: Components of a primary capsule (K).
        capsule_dim: Components of a class capsule (D).
        transform: The transform, as for :class:`DenseCapsules`.
        routing: The routing, as for :class:`DenseCapsules`.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Examples:
        >>> import torch
        >>> from torchcaps.nn import CapsuleHead
        >>> head = CapsuleHead(64, num_classes=5)
        >>> maps, tokens, vectors = torch.rand(2, 64, 7, 7), torch.rand(2, 196, 64), torch.rand(2, 64)
        >>> [tuple(head(features).scores().shape) for features in (maps, tokens, vectors)]
        [(2, 5), (2, 5), (2, 5)]
    """

    __call__: Callable[..., Capsules]

    @checked
    @placed
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
        device: Device = None,
        dtype: Dtype = None,
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
        """Return class capsules (B, J, D) of maps, tokens or vectors.

        Raises:
            InputError: Features of another number of axes or channels, or a number of tokens that is not a square.
        """
        refuse_fx(features)
        if features.ndim == 2:
            features = features[:, :, None, None]
        elif features.ndim == 3:
            side = math.isqrt(features.shape[1])
            if side**2 != features.shape[1]:
                raise InputError(
                    f"the number of tokens must be a square, without class tokens, got {features.shape[1]}"
                )
            features = features.transpose(1, 2).unflatten(2, (side, side))
        elif features.ndim != 4:
            raise InputError(
                f"features must be maps (B, C, H, W), tokens (B, N, C) or vectors (B, C), got {tuple(features.shape)}"
            )
        return self.classes(self.primary(F.adaptive_avg_pool2d(features, self.side)))
