"""A local page on which one draws and watches capsules respond: ``torchcaps explore``.

``state.py`` has a network's answers to an image, ``learning.py`` those of a network that is trained meanwhile,
``questions.py`` brings both to the browser as JSON, and ``server.py`` serves them and ``page/`` to this machine only.
Everything loads on first use.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
