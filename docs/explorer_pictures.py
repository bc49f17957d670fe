"""The explorer's pictures in the documentation, taken in a browser of what `torchcaps explore` serves.

    python docs/explorer_pictures.py                  # needs playwright and its Chromium, or CHROMIUM=/path/to/one

The network that comes with torchcaps at a desktop's and at a phone's width, and in motion while a digit is drawn;
and a network trained on the embedded digits beside a CNN. The two trainings take some minutes; ``--only moving`` leaves
them out.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
TORCHCAPS = (sys.executable, "-m", "torchcaps")
WATCHED, TWIN = "runs/first-digits-1", "runs/cnn-matched-digits-1"


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures (docs/images)")
    parser.add_argument("--only", choices=["moving"], help="only the moving pictures, light and dark")
    given = parser.parse_args()
    out = given.out.absolute()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        with explorer(folder) as address:
            moving(browser, address, out / "explorer.webp", "light")
            moving(browser, address, out / "explorer-dark.webp", "dark")
            if given.only:
                return
            desktop(browser, address, out / "explorer-desktop.png")
            phone(browser, address, out / "explorer-phone.png")
            playground(browser, address, out / "playground.png")
        for words in (["first", "--data", "digits"], ["cnn-matched", "--data", "digits", "--epochs", "7"]):
            subprocess.run([*TORCHCAPS, "train", *words], cwd=folder, check=True)
        with explorer(folder, WATCHED, TWIN) as address:
            beside(browser, address, out / "explorer-beside.png")
        browser.close()


@contextmanager
def explorer(folder: str, *arguments: str) -> Iterator[str]:
    """The address of `torchcaps explore` with these arguments, run in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*TORCHCAPS, "explore", *arguments, "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder) as process:
        address = f"http://127.0.0.1:{port}/"
        try:
            wait(address)
            yield address
        finally:
            process.terminate()


def wait(address: str, seconds: int = 60) -> None:
    """Until somebody answers there."""
    end = time.monotonic() + seconds
    while True:
        try:
            urlopen(address).close()
        except URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


STROKES = (  # a 4, and what makes a 9 of it; in shares of the side of the drawing
    ((0.34, 0.2), (0.3, 0.35), (0.3, 0.5), (0.45, 0.53), (0.66, 0.48)),
    ((0.68, 0.18), (0.66, 0.45), (0.62, 0.65), (0.58, 0.85)),
    ((0.34, 0.2), (0.45, 0.16), (0.57, 0.15), (0.68, 0.18)),
)
PAUSE = 1500  # milliseconds for which a finished figure is shown
HERO = (960, 420)  # pixels
HERO_STYLE = """
header, .beside, .routing, .components, .help, .tools, .more, .hint, .check, .bars legend, .bar:not([data-class]),
.bar input { display: none !important }
body { padding: 10px; overflow: hidden }
.explorer { max-width: none; grid-template-columns: repeat(3, 1fr); grid-template-areas: "image capsules pose" }
.explorer section { height: 398px; margin: 0; font-size: 20px }
.explorer h2 { font-size: 20px }
.explorer .pose { display: block }
.explorer .verdict { font-size: 13px; line-height: 30px; white-space: nowrap }
.explorer .bar { grid-template-columns: 1em 1fr 2.6em; min-height: 27px; font-size: 18px }
.explorer .track { height: 14px }
.explorer :is(.sheet, .whole) { max-width: 270px; margin: 14px auto }
"""  # three panels of the page: the drawing, the lengths, the redrawn digit


def moving(browser: Browser, address: str, path: Path, scheme: Literal["light", "dark"]) -> None:
    """A 4 becomes a 9; then the 4 is drawn anew, so that the first picture is a finished figure."""
    page = opened(browser, address, *HERO, bypass_csp=True, color_scheme=scheme)
    page.add_style_tag(content=HERO_STYLE)
    page.locator("#pose-heading").evaluate("heading => heading.textContent = 'Redrawn'")
    page.locator("#capsules-heading").evaluate("heading => heading.textContent = 'Lengths of capsules'")
    page.locator("#image-heading").evaluate("heading => heading.textContent = 'Drawn'")
    frames: list[tuple[bytes, int]] = []

    def shoot(milliseconds: int) -> None:
        page.locator('.explorer[aria-busy="false"]').wait_for()
        frames.append((page.screenshot(), milliseconds))

    def clear() -> None:
        page.evaluate("import('./actions.js').then(({ ACTIONS }) => ACTIONS.clear())")
        shoot(300)

    clear()
    box = page.get_by_label("Drawing area").bounding_box()
    assert box is not None
    for number, stroke in enumerate(STROKES):
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for (x0, y0), (x1, y1) in itertools.pairwise(places):
            for share in (1 / 3, 2 / 3, 1):
                page.mouse.move(x0 + share * (x1 - x0), y0 + share * (y1 - y0), steps=3)
                shoot(80)
        page.mouse.up()
        settle(page)
        shoot(PAUSE if number else 200)
        if number == 1:
            finished = len(frames) - 1
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data, _ in frames]
    lengths = [length for _, length in frames]
    first, *others = pictures[finished:] + pictures[:finished]
    lengths = lengths[finished:] + lengths[:finished]
    first.save(path, save_all=True, append_images=others, duration=lengths, loop=0, quality=70, method=6)


def desktop(browser: Browser, address: str, path: Path) -> None:
    """A test image, its reconstruction with one slider moved, its routing, and the votes of one cell."""
    page = opened(browser, address, 1280, 900)
    pick(page, 25)
    move(page, 3)
    page.locator(".present .map").click(position={"x": 40, "y": 16})
    settle(page)
    page.screenshot(path=path, full_page=True)


def playground(browser: Browser, address: str, path: Path) -> None:
    """The playground of votes in its last iteration."""
    page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme="light")
    page.goto(f"{address}playground.html")
    for _ in range(2):
        page.get_by_role("button", name="Step").click()
    page.locator(".stage").screenshot(path=path)
    page.close()


def phone(browser: Browser, address: str, path: Path) -> None:
    """The sliders, with the picture above them."""
    page = opened(browser, address, 390, 844, has_touch=True, is_mobile=True, device_scale_factor=2)
    pick(page, 25)
    move(page, 15)
    page.locator(".pose").evaluate("section => section.scrollIntoView()")
    page.screenshot(path=path)


def beside(browser: Browser, address: str, path: Path) -> None:
    """What two networks make of one test image."""
    page = opened(browser, address, 1280, 900)
    pick(page, 7)
    page.screenshot(path=path, full_page=True)


def opened(browser: Browser, address: str, width: int, height: int, **options: Any) -> Page:
    """A new page of that size."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.add_init_script("localStorage.setItem('torchcaps-tour', 'seen')")
    page.goto(address)
    page.locator(".bar").first.wait_for()
    return page


def pick(page: Page, index: int) -> None:
    """Show a test image."""
    page.get_by_label("Test image").fill(str(index))
    page.get_by_label("Test image").press("Enter")
    settle(page)


def move(page: Page, component: int) -> None:
    """Make a component of the chosen capsule larger."""
    slider = page.get_by_role("slider", name=f"Component {component}", exact=True)
    slider.press("PageUp")
    slider.press("PageUp")
    settle(page)


def settle(page: Page) -> None:
    """Wait until nothing is asked or drawn any more."""
    page.locator('.explorer[aria-busy="false"] .verdict strong').wait_for()
    page.evaluate("document.activeElement.blur()")


if __name__ == "__main__":
    main()
