"""Training: typed configuration, the loop, checkpoints, and runs read back from their folders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
