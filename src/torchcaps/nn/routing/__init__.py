"""Routing algorithms, a file for each: its derivation, its function, and its module, from votes to output capsules."""

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

__all__ = [
    "B2IRouting",
    "DynamicRouting",
    "EMCodeRouting",
    "EMRouting",
    "GroupedRouting",
    "HVCRouting",
    "HeinsenMatrixRouting",
    "HeinsenVectorRouting",
    "InvertedAttentionRouting",
    "Routing",
    "SelfAttentionRouting",
    "SelfRouting",
    "VBRouting",
]
