"""How fast the explorer answers in a browser: the first answer, and a bar after a stroke of the pen.

    python benchmarks/browser.py            # needs playwright and its Chromium, or CHROMIUM=/path/to/one
    python benchmarks/browser.py --runs 3   # fewer page views

Two pages with the network that comes with torchcaps are measured: "site", where the browser computes
(`torchcaps explore --save`), and "server" (`torchcaps explore`). Both run on this machine, so the time of a download is
not included. The first answer counts from the request for the page to the verdict, with an empty cache. A stroke counts
from a movement of the pen to the new lengths of the capsules. Times are by the clock: medians, with their middle half.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from measuring import environment
from playwright.sync_api import Browser, sync_playwright

from torchcaps.explorer import Explorer, open_explorer, serving, write_page
from torchcaps.models.files import SHIPPED
from torchcaps.training import load_run

CLOCKS = """
localStorage.setItem('torchcaps-tour', 'seen');
addEventListener('DOMContentLoaded', () => {
  window.strokes = [];
  let moved = null;
  const changed = (selector, act) => new MutationObserver(act).observe(document.querySelector(selector),
    { childList: true, subtree: true, characterData: true, attributes: true });
  changed('.verdict', () => (window.first ??= document.querySelector('.verdict strong') && performance.now()));
  document.querySelector('.drawing').addEventListener('pointermove', ({ buttons }) => {
    if (buttons) moved ??= performance.now();
  }, true);
  changed('.bars', () => {
    if (moved !== null) window.strokes.push(performance.now() - moved);
    moved = null;
  });
});
"""
STROKE = [(0.3 + 0.012 * n, 0.2 + 0.02 * n) for n in range(30)]
"""Places of the pen, in shares of the side of the drawing."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def site(explorer: Explorer) -> Iterator[str]:
    """Serve the page that computes in the browser."""
    with tempfile.TemporaryDirectory() as folder:
        write_page(explorer, Path(folder) / "page")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/page"
        finally:
            server.shutdown()


def visit(browser: Browser, address: str) -> tuple[float, list[float]]:
    """Return the time of the first answer and of each movement of a stroke, in milliseconds."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.add_init_script(CLOCKS)
    page = context.new_page()
    page.goto(f"{address}/")
    page.locator(".verdict strong").wait_for()
    first = page.evaluate("window.first")
    box = page.get_by_label("Drawing area").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in STROKE]
    page.mouse.move(*places[0])
    page.mouse.down()
    page.wait_for_timeout(300)
    for place in places[1:]:
        page.mouse.move(*place)
        page.wait_for_timeout(150)  # one movement, one answer
    strokes = page.evaluate("window.strokes")
    context.close()
    return first, strokes


def said(times: list[float]) -> str:
    """Return the median and the middle half."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f}; {len(times)} times)"


def main() -> None:
    """Print both times of both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="page views of each page (10; at least 2)")
    runs = parser.parse_args().runs
    print(environment())
    explorer = open_explorer(load_run(SHIPPED["compact"]))
    with sync_playwright() as playwright, site(explorer) as saved, serving([explorer], 0) as served:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        visits = [
            {name: visit(browser, address) for name, address in pages}
            for pages in [(("site", saved), ("server", served))] * runs
        ]
        for name in ("site", "server"):
            print(
                f"{name}: first answer {said([each[name][0] for each in visits])},",
                f"stroke to bar {said([time for each in visits for time in each[name][1]])}",
            )
        browser.close()


if __name__ == "__main__":
    main()
