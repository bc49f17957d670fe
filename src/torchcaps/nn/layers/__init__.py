"""Capsule layers."""

# ruff: noqa: I001  the layers are registered, and listed, in this order
from torchcaps.nn.layers.base import CapsuleLayer
from torchcaps.nn.layers.dense import DenseCapsules
from torchcaps.nn.layers.conv import ConvCapsules, current_tree
from torchcaps.nn.layers.head import CapsuleHead
from torchcaps.nn.layers.maps import MapLayer, join_types
from torchcaps.nn.layers.types import ConvTypeCapsules, DeconvCapsules, TypesLayer

__all__ = ["CapsuleHead", "CapsuleLayer", "ConvCapsules", "ConvTypeCapsules", "DeconvCapsules", "DenseCapsules"]
__all__ += ["MapLayer", "TypesLayer", "current_tree", "join_types"]
