"""Modules: capsule layers, transforms, routing algorithms and the decoder, usable alone and stacked."""

from torchcaps.nn.backbones import ConvBackbone, StackBackbone
from torchcaps.nn.capsules import PrimaryCapsules
from torchcaps.nn.convolutions import ChannelNorm, Convolution, ConvStem
from torchcaps.nn.decoder import Decoder, mask_capsules, separate_capsules
from torchcaps.nn.flow import Capsules, LayerSize
from torchcaps.nn.layers import ConvCapsules, DenseCapsules
from torchcaps.nn.routing import (
    DynamicRouting,
    EMCodeRouting,
    EMRouting,
    InvertedAttentionRouting,
    Routed,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    VBRouting,
)
from torchcaps.nn.transforms import Dense, DenseVotes, Elementwise, Identity, Matrix, Shared, Transform, Votes

__all__ = [
    "Capsules",
    "ChannelNorm",
    "ConvBackbone",
    "ConvCapsules",
    "ConvStem",
    "Convolution",
    "Decoder",
    "Dense",
    "DenseCapsules",
    "DenseVotes",
    "DynamicRouting",
    "EMCodeRouting",
    "EMRouting",
    "Elementwise",
    "Identity",
    "InvertedAttentionRouting",
    "LayerSize",
    "Matrix",
    "PrimaryCapsules",
    "Routed",
    "Routing",
    "SelfAttentionRouting",
    "SelfRouting",
    "Shared",
    "StackBackbone",
    "Transform",
    "VBRouting",
    "Votes",
    "mask_capsules",
    "separate_capsules",
]
