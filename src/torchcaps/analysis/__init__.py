"""Judging a network and showing what it does: figures in numbers (arrays) and in pictures (matplotlib).

Every function that computes returns arrays, every ``figure_...`` draws them; nothing here touches matplotlib's global
state. Everything loads on first use.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
