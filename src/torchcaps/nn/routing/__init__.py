"""Routing algorithms as modules, a file for each: from votes to output capsules."""

from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.routing.dynamic import DynamicRouting

__all__ = ["DynamicRouting", "Routed", "Routing"]
