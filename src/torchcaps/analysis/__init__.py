"""Judging a network and showing what it does: figures in numbers (arrays) and in pictures (matplotlib).

Every function that computes returns arrays, every ``figure_...`` draws them; nothing here touches matplotlib's global
state. Everything loads on first use.

What holds for all of them: a network is in evaluation mode meanwhile, and afterwards as it was. Images are uint8 of
0..255 or floating-point of 0..1; of another dtype they are a TypeError. Images and labels that the network was not
built for, options out of their range, and a network without the capsules, the decoder or the one object an image that
are needed, are an InputError.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
