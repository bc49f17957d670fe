"""Evaluate networks and show how they work: numbers as arrays, figures by matplotlib.

Functions that compute return arrays, and every ``figure_...`` draws them. Nothing here touches matplotlib's global
state. Everything loads on first use.

All functions run the network in evaluation mode and restore its mode afterwards. Images are uint8 of 0..255 or
floating-point of 0..1; another dtype raises TypeError. InputError is raised for images and labels that do not fit the
network, for options out of their range, and for a network without the capsules or the decoder that an analysis needs.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
