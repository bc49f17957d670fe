"""Modules: capsule layers, the decoder, and routing algorithms, usable alone and stacked."""

from torchcaps.nn.capsules import DenseCapsules, PrimaryCapsules
from torchcaps.nn.convolutions import ChannelNorm, Convolution, ConvStem
from torchcaps.nn.decoder import Decoder, mask_capsules, separate_capsules
from torchcaps.nn.routing import DynamicRouting, Routing

__all__ = [
    "ChannelNorm",
    "ConvStem",
    "Convolution",
    "Decoder",
    "DenseCapsules",
    "DynamicRouting",
    "PrimaryCapsules",
    "Routing",
    "mask_capsules",
    "separate_capsules",
]
