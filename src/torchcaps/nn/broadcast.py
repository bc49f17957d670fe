"""Spatial broadcast decoder: it draws each slot by itself, and says where each lies."""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import check_one_each
from torchcaps.parts import Device, Dtype, placed, register
from torchcaps.ranges import OddKernel, Pixels, Size, Width


class Positions(nn.Module):
    """Add a learned linear map of y, x, 1 − y and 1 − x, each from 0 to 1 over the map, to the features there.

    Args:
        channels: Channels of the maps.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    @placed
    def __init__(self, channels: Size, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, channels)

    def forward(self, maps: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        height, width = maps.shape[2:]
        y, x = (torch.linspace(0, 1, size, device=maps.device, dtype=maps.dtype) for size in (height, width))
        y, x = y[:, None].expand(height, width), x.expand(height, width)
        return maps + self.linear(torch.stack([y, x, 1 - y, 1 - x], 2)).permute(2, 0, 1)


@register("decoder", "broadcast")
class BroadcastDecoder(nn.Module):
    """Spatial broadcast decoder: each slot, copied to a small map with positions, is drawn by transposed convolutions.

        image = Σ_j m_j ∘ y_j,    m = softmax_j of the last channel of slot j's maps, y_j the other channels

    The map of slots is smaller than the image by the product of the strides. All layers but the last have a ReLU.

    Args:
        slot_dim: Components of a slot (D).
        out_shape: Shape of an image (C, H, W).
        broadcast_channels: Channels of the broadcast decoder's transposed convolutions, except the last, which has one
            channel more than the image.
        broadcast_kernels: Kernels of these convolutions, pixels, one for each, and one for the last.
        broadcast_strides: Factors by which these convolutions enlarge a map, one for each, and one for the last.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Watters et al. 2019, "Spatial broadcast decoder" (arXiv:1901.11389); Locatello et al. 2020
    (arXiv:2006.15055) for the masks.
    """

    def __init__(
        self,
        slot_dim: Size,
        out_shape: tuple[Size, ...],
        *,
        broadcast_channels: tuple[Width, ...] = (32, 32),
        broadcast_kernels: tuple[OddKernel, ...] = (3, 3, 5),
        broadcast_strides: tuple[Pixels, ...] = (1, 1, 3),
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.out_shape, self.broadcast_channels = tuple(out_shape), tuple(broadcast_channels)
        self.broadcast_kernels, self.broadcast_strides = tuple(broadcast_kernels), tuple(broadcast_strides)
        names = ("broadcast_kernels", "broadcast_strides")
        check_one_each(len(broadcast_channels) + 1, "layer", **{name: getattr(self, name) for name in names})
        factor = math.prod(broadcast_strides)
        self.map_size = tuple(-(-side // factor) for side in out_shape[1:])
        """Height and width of the map that slots are copied to."""
        self.positions, layers = Positions(slot_dim), list[nn.Module]()
        pairs = itertools.pairwise([slot_dim, *broadcast_channels, out_shape[0] + 1])
        for (before, after), kernel, stride in zip(pairs, broadcast_kernels, broadcast_strides, strict=True):
            padding = max(0, (kernel - stride + 1) // 2)
            rest = stride - kernel + 2 * padding
            layers += [nn.ConvTranspose2d(before, after, kernel, stride, padding, rest), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, slots: Float[Tensor, "B J D"]) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B J H W"]]:
        """Return the image, and the mask m_j of each slot; the masks of a pixel sum to one."""
        slots = slots.to(self.positions.linear.weight.dtype)
        maps = slots.flatten(0, 1)[:, :, None, None].expand(-1, -1, *self.map_size)
        drawn = self.layers(self.positions(maps)).unflatten(0, slots.shape[:2])  # (B, J, C + 1, h, w)
        drawn = drawn[..., : self.out_shape[1], : self.out_shape[2]]
        masks = drawn[:, :, -1].softmax(1)
        return (masks.unsqueeze(2) * drawn[:, :, :-1]).sum(1), masks
