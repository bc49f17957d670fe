"""Whole networks, and the registry of the published ones ("presets")."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
