"""Training: typed configuration, the loop, checkpoints, and runs read back from their folders."""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
