"""Training images: named data sets, a user's own files, and a loader that keeps them on the device.

Modules load on first use, so importing the package is fast.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, {"PixelSet": "PatchSet"})
