"""The page in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from explorer_support import settle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


HAS_IMAGE = "import('./core.js').then(({ networks }) => networks[0].images)"
CLEAR = "import('./actions.js').then(({ ACTIONS }) => ACTIONS.clear())"


@pytest.fixture
def errors() -> list[str]:
    """What browsers complained of: errors of scripts, and what the page's policy did not let them load."""
    return []


@pytest.fixture
def open_page(browser: Browser, errors: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens pages, and sees to it that none of them asked anybody else for anything, nor met an error."""
    contexts: list[Any] = []
    requests: list[str] = []

    def open_it(address: str, width: int = 1280, height: int = 900, *, fresh: bool = False, **options: Any) -> Page:
        """A page whose image was cleared and whose tour was seen; a fresh one is as who comes first has it."""
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)  # milliseconds
        contexts.append(context)
        context.on("request", lambda request: requests.append(request.url))
        context.on("weberror", lambda error: errors.append(str(error.error)))
        context.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page = context.new_page()
        if not fresh:
            page.add_init_script("localStorage.setItem('torchcaps-tour', 'seen')")
        page.goto(address)
        page.locator(".bar, .vote").first.wait_for()
        if not fresh and "#" not in address and page.evaluate(HAS_IMAGE):
            settle(page)
            page.evaluate(CLEAR)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert requests
    outside = [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
    assert not outside
    assert not errors
