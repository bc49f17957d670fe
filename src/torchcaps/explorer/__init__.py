"""A local page on which one draws and watches capsules respond: ``torchcaps explore``.

``state.py`` says what is shown of an image, ``learning.py`` of a network that is trained meanwhile, ``messages.py``
puts both into words for the browser. ``page/`` is the page, which ``server.py`` serves on this machine only, to those
whom ``guard.py`` lets in. Everything loads on first use; the page needs the extra ``torchcaps[explore]``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
