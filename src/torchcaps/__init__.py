"""torchcaps: capsule networks with dynamic routing for PyTorch.

The public names below load on first use, so that ``import torchcaps`` costs next to nothing.
"""

import lazy_loader

from torchcaps._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
