"""Images to train on: named data sets, a user's own files, and a loader that keeps them on the device.

Everything here loads on first use, so that importing the package costs nothing.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
