"""A local page on which one draws and watches capsules respond: ``torchcaps explore``.

``state.py`` says what is shown of an image, ``messages.py`` puts it into words for the browser, ``page.py`` with
``page.html``, ``page.css`` and ``page.js`` is the page, ``server.py`` serves it on this machine only. Everything loads
on first use; the page needs the extra ``torchcaps[explore]``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
