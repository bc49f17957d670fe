"""Routing algorithms as modules, a file for each: from votes to output capsules."""

from torchcaps.nn.routing.attention import InvertedAttentionRouting, SelfAttentionRouting
from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.routing.dynamic import DynamicRouting
from torchcaps.nn.routing.mixtures import EMCodeRouting, EMRouting, VBRouting
from torchcaps.nn.routing.self_routing import SelfRouting

__all__ = [
    "DynamicRouting",
    "EMCodeRouting",
    "EMRouting",
    "InvertedAttentionRouting",
    "Routed",
    "Routing",
    "SelfAttentionRouting",
    "SelfRouting",
    "VBRouting",
]
