"""Convolutions before the capsules, a stem of small ones, and normalisations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ops.convolution import compute
from torchcaps.ops.precision import check_one_dtype
from torchcaps.ranges import Padding, Pixels, Size
from torchcaps.tracing import is_fake
from torchcaps.words import counted

ConvInit = Literal["torch", "glorot", "he", "truncated-normal"]
"""Initial distribution of weights; see :func:`draw_layers`."""
KEPT_BY_CUT = 0.87962566103423978
"""Standard deviation of a normal distribution cut at two standard deviations, relative to the uncut one."""
ConvNorm = Literal["none", "channel"]
"""Normalisation before an activation: none, or :class:`ChannelNorm`."""


class Convolution(nn.Conv2d):
    """:class:`torch.nn.Conv2d` with the fastest algorithm for its sizes, :func:`torchcaps.ops.convolution.convolve`.

    Parameters have the names, shapes, memory layout and initial values of :class:`torch.nn.Conv2d`.

    Args:
        in_channels: Input channels (C).
        out_channels: Output channels (O).
        kernel_size: Height and width of the kernel, pixels.
        stride: Stride in pixels, one number or (down, across).
        padding: Zero padding on each side, pixels.
        bias: Add a learned number to each output channel.
        relu: Also apply a ReLU, in place, so that it needs no extra memory.
    """

    @checked
    def __init__(
        self,
        in_channels: Size,
        out_channels: Size,
        kernel_size: Pixels,
        stride: Pixels | tuple[Pixels, Pixels] = 1,
        padding: Padding = 0,
        *,
        bias: bool = True,
        relu: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.relu = relu
        down, across = self.stride
        self._windows = (down, across), (padding, padding)

    @checked
    def forward(self, input: Float[Tensor, "B {self.in_channels} H W"]) -> Float[Tensor, "B O h w"]:
        """Convolve."""
        return compute(input, self.weight, self.bias, *self._windows, self.relu)


CONVOLUTIONS = {1: nn.Conv1d, 2: Convolution, 3: nn.Conv3d}
"""Convolutions of lines, planes and volumes."""
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
"""Batch normalisations of lines, planes and volumes."""


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each location, with a learned scale and shift for each channel.

    Unlike batch normalisation it treats each image separately, also in training. The result for an image depends
    neither on the other images of its batch nor on how the batch is divided among processes.

    Args:
        channels: Number of channels (C).

    Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450), placed as in Liu et al. 2022 (arXiv:2201.03545).
    """

    @checked
    def __init__(self, channels: Size) -> None:
        super().__init__(channels)
        self.channels = channels

    @checked
    def forward(self, input: Float[Tensor, "B {self.channels} H W"]) -> Float[Tensor, "B C H W"]:
        """Normalise feature maps."""
        if torch.float64 in (input.dtype, self.weight.dtype):  # half precision may be mixed with float32
            check_one_dtype("ChannelNorm: input and weight", input, self.weight)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def normalise(norm: nn.Module, maps: Tensor) -> Tensor:
    """Apply batch normalisation in the dtype of the maps, which is float32 in a network of half precision."""
    if next(norm.buffers(), maps).dtype == maps.dtype:
        return norm(maps)
    state = norm.state_dict(keep_vars=True)
    state = {name: value.to(maps.dtype) if value.is_floating_point() else value for name, value in state.items()}
    out: Tensor = functional_call(norm, state, maps)
    if norm.training:
        for name, running in norm.named_buffers():
            running.copy_(state[name])
    return out


def conv_stem(
    in_channels: int,
    stem_channels: Sequence[int],
    stem_strides: Sequence[int],
    conv_norm: ConvNorm,
    conv_dropout: float,
    stem_strides_across: Sequence[int] = (),
) -> nn.Module:
    """Build 3×3 convolutions without padding, each with a ReLU; an identity if ``stem_channels`` is empty.

    The arguments are the options of :class:`ConvBackbone` with the same names.
    """
    across = stem_strides_across or stem_strides
    for name, strides in (("stem_strides", stem_strides), ("stem_strides_across", across)):
        if len(strides) != len(stem_channels):
            raise InputError(
                f"{name} must be {counted(len(stem_channels), 'number')}, one for each of stem_channels, got "
                f"{len(strides)}"
            )
    if not stem_channels:
        return nn.Identity()
    layers: list[nn.Module] = []
    widths = itertools.pairwise([in_channels, *stem_channels])
    for (before, width), stride in zip(widths, zip(stem_strides, across, strict=True), strict=True):
        layers.append(Convolution(before, width, 3, stride, bias=conv_norm == "none"))
        layers += [nn.ReLU()] if conv_norm == "none" else [ChannelNorm(width), nn.ReLU()]
    if conv_dropout:
        layers.append(nn.Dropout2d(conv_dropout))
    return nn.Sequential(*layers)


@torch.no_grad()
def draw_layers(module: nn.Module, init: ConvInit, std: float, bias: float = 0.1) -> None:
    """Draw the weights of every convolution and dense layer in a module.

    Args:
        module: Module that contains the layers.
        init: ``"torch"``: keep PyTorch's initial weights; ``"glorot"``: Keras's, Glorot uniform with biases of 0;
            ``"he"``: Keras's he_normal, a truncated normal of variance 2 / fan-in with biases of 0; or
            ``"truncated-normal"``.
        std: Standard deviation of the truncated normal, which is cut at two standard deviations.
        bias: Initial biases with the truncated normal; 0.1 in Sabour et al.'s code.
    """
    if init == "torch":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            if init == "glorot":
                nn.init.xavier_uniform_(layer.weight)
            else:
                he = math.sqrt(2 / layer.weight[0].numel()) / KEPT_BY_CUT
                draw_truncated(layer.weight, he if init == "he" else std)
            if layer.bias is not None:
                layer.bias.fill_(bias if init == "truncated-normal" else 0.0)


def draw_truncated(tensor: Tensor, std: float) -> None:
    """Fill a tensor with normal numbers, cut at two standard deviations. Skip fake tensors, which hold no numbers."""
    if not is_fake(tensor):  # trunc_normal_ reads the numbers, because it draws some of them again
        nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
