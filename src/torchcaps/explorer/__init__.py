"""A local web page to draw on and to watch capsules respond: ``torchcaps explore``.

``state.py`` computes a network's answers to an image, and ``questions.py`` sends them to the browser as JSON.
``server.py`` serves them and the files of ``page/`` to this machine only; ``static.py`` writes the page for any web
server. Everything is imported on first use.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
