"""torchcaps: capsule networks with dynamic routing for PyTorch.

The public names below load on first use, so that ``import torchcaps`` costs next to nothing.
"""

from torchcaps._lazy import attach
from torchcaps._version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__)
__all__ += ["__version__"]
