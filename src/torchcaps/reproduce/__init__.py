"""The paper's tables, run again: typed tables of rows, each (row, seed) an ordinary run, and a page made from the logs.

Everything loads on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
