"""Modules: capsule layers, transforms, routing algorithms and the decoder, usable alone and stacked."""

from torchcaps.nn.backbones import ConvBackbone, SequenceBackbone, StackBackbone, TimmBackbone
from torchcaps.nn.broadcast import BroadcastDecoder
from torchcaps.nn.capsules import Capsules, LayerSize, Routed, RoutingRound
from torchcaps.nn.convolutions import ChannelNorm, Convolution
from torchcaps.nn.decoder import Decoder, mask_capsules, separate_capsules
from torchcaps.nn.interests import interest_scores, interests_of_history, label_aware_attention
from torchcaps.nn.layers import (
    CapsuleHead,
    CapsuleLayer,
    ConvCapsules,
    ConvTypeCapsules,
    DeconvCapsules,
    DenseCapsules,
    join_types,
)
from torchcaps.nn.primary import PositionCapsules, PrimaryCapsules, SequenceCapsules
from torchcaps.nn.routing.b2i import B2IRouting
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.routing.dynamic import DynamicRouting
from torchcaps.nn.routing.em import EMRouting
from torchcaps.nn.routing.em_code import EMCodeRouting
from torchcaps.nn.routing.grouped import GroupedRouting
from torchcaps.nn.routing.heinsen_matrix import HeinsenMatrixRouting
from torchcaps.nn.routing.heinsen_vector import HeinsenVectorRouting
from torchcaps.nn.routing.hvc import HVCRouting
from torchcaps.nn.routing.inverted_attention import InvertedAttentionRouting
from torchcaps.nn.routing.self_attention import SelfAttentionRouting
from torchcaps.nn.routing.self_routing import SelfRouting
from torchcaps.nn.routing.vb import VBRouting
from torchcaps.nn.segmentation import InstanceNorm, PixelBackbone, PixelDecoder
from torchcaps.nn.slots import SlotAttention, SlotMixture
from torchcaps.nn.transforms import Common, Dense, Elementwise, Factored, Identity, Matrix, Shared, Transform
from torchcaps.nn.votes import BuiltVotes, DenseVotes, SharedVotes, Votes

__all__ = [
    "B2IRouting",
    "BroadcastDecoder",
    "BuiltVotes",
    "CapsuleHead",
    "CapsuleLayer",
    "Capsules",
    "ChannelNorm",
    "Common",
]
__all__ += ["ConvBackbone", "ConvCapsules", "ConvTypeCapsules", "Convolution", "Decoder", "DeconvCapsules"]
__all__ += ["Dense", "DenseCapsules", "DenseVotes", "DynamicRouting", "EMCodeRouting", "EMRouting"]
__all__ += ["Elementwise", "Factored", "GroupedRouting", "HVCRouting", "HeinsenMatrixRouting"]
__all__ += ["HeinsenVectorRouting", "Identity", "InstanceNorm", "InvertedAttentionRouting", "LayerSize"]
__all__ += ["Matrix", "PixelBackbone", "PixelDecoder", "PositionCapsules", "PrimaryCapsules", "Routed", "Routing"]
__all__ += ["RoutingRound"]
__all__ += ["SelfAttentionRouting", "SelfRouting", "SequenceBackbone", "SequenceCapsules", "Shared"]
__all__ += ["SharedVotes", "SlotAttention", "SlotMixture", "StackBackbone", "TimmBackbone", "Transform", "VBRouting"]
__all__ += ["Votes", "interest_scores"]
__all__ += ["interests_of_history", "join_types", "label_aware_attention", "mask_capsules", "separate_capsules"]
