"""Whole networks, and the registry of the published ones ("presets")."""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
