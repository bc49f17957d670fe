"""Modules: capsule layers, transforms, routing algorithms and the decoder, usable alone and stacked."""

from torchcaps.nn.backbones import ConvBackbone, SequenceBackbone, StackBackbone, TimmBackbone
from torchcaps.nn.capsules import Capsules, LayerSize, Routed, RoutingRound
from torchcaps.nn.convolutions import ChannelNorm, Convolution
from torchcaps.nn.decoder import Decoder, mask_capsules, separate_capsules
from torchcaps.nn.head import CapsuleHead
from torchcaps.nn.interests import interest_scores, interests_of_history, label_aware_attention
from torchcaps.nn.layers import CapsuleLayer, ConvCapsules, DenseCapsules
from torchcaps.nn.primary import PrimaryCapsules, SequenceCapsules
from torchcaps.nn.routing import (
    B2IRouting,
    DynamicRouting,
    EMCodeRouting,
    EMRouting,
    GroupedRouting,
    HeinsenMatrixRouting,
    HeinsenVectorRouting,
    HVCRouting,
    InvertedAttentionRouting,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    VBRouting,
)
from torchcaps.nn.transforms import Common, Dense, Elementwise, Identity, Matrix, Shared, Transform
from torchcaps.nn.votes import BuiltVotes, DenseVotes, Votes

__all__ = [
    "B2IRouting",
    "BuiltVotes",
    "CapsuleHead",
    "CapsuleLayer",
    "Capsules",
    "ChannelNorm",
    "Common",
    "ConvBackbone",
    "ConvCapsules",
    "Convolution",
    "Decoder",
    "Dense",
    "DenseCapsules",
    "DenseVotes",
    "DynamicRouting",
    "EMCodeRouting",
    "EMRouting",
    "Elementwise",
    "GroupedRouting",
    "HVCRouting",
    "HeinsenMatrixRouting",
    "HeinsenVectorRouting",
    "Identity",
    "InvertedAttentionRouting",
    "LayerSize",
    "Matrix",
    "PrimaryCapsules",
    "Routed",
    "Routing",
    "RoutingRound",
    "SelfAttentionRouting",
    "SelfRouting",
    "SequenceBackbone",
    "SequenceCapsules",
    "Shared",
    "StackBackbone",
    "TimmBackbone",
    "Transform",
    "VBRouting",
    "Votes",
    "interest_scores",
    "interests_of_history",
    "label_aware_attention",
    "mask_capsules",
    "separate_capsules",
]
