"""Spatial broadcast decoder: it draws each slot by itself, and says where each lies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import check_one_each
from torchcaps.parts import Device, Dtype, placed, register
from torchcaps.ranges import Frequencies, OddKernel, Pixels, Size, Width


class Positions(nn.Module):
    """Add a learned linear map of the position to the features there.

    A position is y, x, 1 − y and 1 − x, each from 0 to 1 over the map, and sine and cosine of πky and πkx for
    k = 1 … ``frequencies``.

    Args:
        channels: Channels of the maps.
        frequencies: Number of frequencies. With several, nearby positions are easier to tell apart.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Locatello et al. 2020 (arXiv:2006.15055), without frequencies; Tancik et al. 2020, "Fourier features"
    (arXiv:2006.10739).
    """

    @placed
    def __init__(
        self, channels: Size, frequencies: Frequencies = 0, *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.linear = nn.Linear(4 * (1 + frequencies), channels)

    def forward(self, maps: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        height, width = maps.shape[2:]
        y, x = (torch.linspace(0, 1, size, device=maps.device, dtype=maps.dtype) for size in (height, width))
        y, x = y[:, None].expand(height, width), x.expand(height, width)
        position = [y, x, 1 - y, 1 - x]
        for angle in (math.pi * k * side for k in range(1, self.frequencies + 1) for side in (y, x)):
            position += [angle.sin(), angle.cos()]
        return maps + self.linear(torch.stack(position, 2)).permute(2, 0, 1)


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
        broadcast_frequencies: Frequencies of the positions that are added to the map of slots, see :class:`Positions`.
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
        broadcast_frequencies: Frequencies = 0,
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
        self.broadcast_frequencies = broadcast_frequencies
        self.positions, layers = Positions(slot_dim, broadcast_frequencies), list[nn.Module]()
        pairs = itertools.pairwise([slot_dim, *broadcast_channels, out_shape[0] + 1])
        for (before, after), kernel, stride in zip(pairs, broadcast_kernels, broadcast_strides, strict=True):
            padding = max(0, (kernel - stride + 1) // 2)
            rest = stride - kernel + 2 * padding
            layers += [nn.ConvTranspose2d(before, after, kernel, stride, padding, rest), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, slots: Float[Tensor, "B J D"]) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B J H W"]]:
        """Return the image, and the mask m_j of each slot; the masks of a pixel sum to one."""
        slots = slots.to(next(self.parameters()).dtype)
        maps = self._first_maps(slots.flatten(0, 1))
        drawn = self.layers[1:](maps).unflatten(0, slots.shape[:2])  # (B, J, C + 1, h, w)
        drawn = drawn[..., : self.out_shape[1], : self.out_shape[2]]
        masks = drawn[:, :, -1].softmax(1)
        return (masks.unsqueeze(2) * drawn[:, :, :-1]).sum(1), masks

    def _first_maps(self, slots: Float[Tensor, "N D"]) -> Float[Tensor, "N C h w"]:
        """Return the first layer's maps of slots that are copied to every position.

        The copies of a slot are equal and the layer is linear, so its maps are a product of the slot and the layer's
        answer to a map of ones. This takes a fraction of the time of a convolution of all copies.
        """
        first: Any = self.layers[0]
        taps = math.prod(first.kernel_size)
        one_each = torch.eye(taps, dtype=slots.dtype, device=slots.device).view(1, taps, *first.kernel_size)
        ones = slots.new_ones(1, 1, *self.map_size)
        reached = F.conv_transpose2d(ones, one_each, None, first.stride, first.padding, first.output_padding)
        answers = first.weight.flatten(2) @ reached.view(taps, -1)  # (D, C, h · w)
        of_positions = first(self.positions(slots.new_zeros(1, slots.shape[1], *self.map_size)))
        return (slots @ answers.flatten(1)).view(-1, *of_positions.shape[1:]) + of_positions
