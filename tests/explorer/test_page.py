"""The page in a real browser: drawn on, moved, broken, shared, at a phone's width, by keyboard, and offline."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from explorer_support import browser_path, no_browser, served, small_network
from torchcaps.datasets import ImageSet
from torchcaps.explorer import Explorer, open_explorer
from torchcaps.training import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(no_browser() is not None, reason=no_browser() or "")

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WAIT = 20_000
"""Milliseconds after which something has not happened."""

# A three, in shares of the drawing area.
THREE = [(0.32, 0.28), (0.36, 0.22), (0.44, 0.18), (0.53, 0.18), (0.61, 0.22), (0.65, 0.29), (0.63, 0.37), (0.57, 0.43)]
THREE += [(0.48, 0.47), (0.57, 0.49), (0.65, 0.55), (0.69, 0.63), (0.67, 0.72), (0.6, 0.79), (0.5, 0.82), (0.38, 0.8)]
THREE += [(0.3, 0.74)]

SITES: dict[str, Callable[[], Explorer]] = {
    "cnn": lambda: Explorer(small_network("baseline-cnn"), list("abcd"), no_images="There are no images: none."),
    "no routing": lambda: Explorer(small_network(num_iterations=0)),
    "pairs": lambda: Explorer(
        small_network("sabour2017-multimnist", in_shape=(3, 18, 20)),
        list("abcd"),
        images=ImageSet(torch.full((1, 3, 18, 20), 90, dtype=torch.uint8), torch.tensor([[3, 1]])),
    ),
    "many classes": lambda: Explorer(small_network(num_classes=30)),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed before other modules run: Playwright keeps an event loop in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(run_folder: Path) -> Iterator[str]:
    """The page of the trained run, or of another one for the README's pictures."""
    run = load_run(os.environ.get("TORCHCAPS_SCREENSHOT_RUN") or run_folder)
    with served(open_explorer(run)) as address:
        yield address


@pytest.fixture
def errors() -> list[str]:
    """What browsers complained of: errors of scripts, and what the page's policy did not let them load."""
    return []


@pytest.fixture
def open_page(browser: Browser, errors: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens pages, and sees to it that none of them asked anybody else for anything, nor met an error."""
    contexts: list[Any] = []
    requests: list[str] = []

    def open_it(address: str, width: int = 1280, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        context.on("request", lambda request: requests.append(request.url))
        context.on("weberror", lambda error: errors.append(str(error.error)))
        context.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page = context.new_page()
        page.goto(address)
        page.locator(".bar").first.wait_for()
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert requests
    outside = [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
    assert not outside
    assert not errors


def draw(page: Page, points: list[tuple[float, float]] = THREE) -> None:
    """A stroke of the mouse, and the wait for what the network says of it."""
    area = page.locator(".drawing").bounding_box()
    assert area is not None
    places = [(area["x"] + area["width"] * x, area["y"] + area["height"] * y) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for x, y in places[1:]:
        page.mouse.move(x, y, steps=3)
    page.mouse.up()
    settle(page)


def pick(page: Page, index: int) -> None:
    page.get_by_label("Test image").fill(str(index))
    page.get_by_label("Test image").press("Enter")
    settle(page)


def settle(page: Page) -> None:
    """Wait until nothing is asked or drawn any more."""
    page.locator('.explorer[aria-busy="false"] .verdict strong').wait_for()


def picture(page: Page, of: str = ".whole") -> str:
    return page.locator(of).evaluate("canvas => canvas.toDataURL()")


def pixels(page: Page, of: str) -> np.ndarray:
    """Red, green, blue of a canvas, (H, W, 3)."""
    flat = page.locator(of).evaluate(
        "canvas => [canvas.height, canvas.width, "
        "...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    return np.array(flat[2:]).reshape(flat[0], flat[1], 4)[..., :3]


def message(page: Page) -> str:
    page.locator(".message").wait_for()
    return page.locator(".message").inner_text()


def save_screenshot(page: Page, name: str, *, full_page: bool) -> None:
    """A picture for the README, where TORCHCAPS_SCREENSHOTS names a folder for it."""
    if folder := os.environ.get("TORCHCAPS_SCREENSHOTS"):
        page.evaluate("document.activeElement.blur()")
        page.mouse.move(0, 0)
        page.screenshot(path=Path(folder) / name, full_page=full_page)


def test_a_stroke_is_judged_and_reconstructed(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    assert page.locator(".verdict").inner_text() == "Draw, upload or pick an image."
    assert pixels(page, ".drawing").max() == pixels(page, ".whole").max() == 0
    assert page.get_by_role("button", name="Copy link").is_disabled()
    assert page.get_by_role("slider", name="Component 3", exact=True).is_disabled()
    draw(page)
    seen = page.locator(".verdict strong").inner_text()
    assert seen == "3"
    lengths = [float(text) for text in page.locator(".bar .number").all_inner_texts()]
    assert np.argmax(lengths) == 3
    assert lengths[3] > 0.5
    assert pixels(page, ".drawing").max() == 255
    assert pixels(page, ".whole").max() > 100
    assert page.locator(".whole").get_attribute("aria-label") == "Reconstruction from capsule 3"
    assert page.locator(".routing canvas").count() == 3 * 10
    assert page.locator(".routing tbody tr").last.locator("td span").nth(3).inner_text() == f"{lengths[3]:.2f}"[1:]
    slider = page.get_by_role("slider", name="Component 6", exact=True)
    slider.press("PageUp")
    slider.press("PageUp")
    settle(page)
    save_screenshot(page, "explorer-desktop.png", full_page=True)

    page.get_by_role("button", name="Invert").click()
    settle(page)
    assert pixels(page, ".drawing").min() == 0
    assert (pixels(page, ".drawing")[0, 0] == 255).all()
    page.get_by_role("button", name="Clear").click()
    assert pixels(page, ".drawing").max() == pixels(page, ".whole").max() == 0
    assert page.locator(".routing table").count() == 0


MEASURE = """async (moves) => {
    const area = document.querySelector('.explorer'), whole = document.querySelector('.whole'), times = [];
    const sliders = [...document.querySelectorAll('.slider input')];
    for (let n = 0; n < moves; n++) {
        const slider = sliders[n % sliders.length], before = whole.toDataURL();
        slider.value = Number(slider.value) + (slider.value > 0 ? -0.4 : 0.4);
        const start = performance.now();
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        await new Promise((done, failed) => {
            setTimeout(() => failed(new Error(`slider ${n} redraws nothing`)), 10000);
            const watch = () => area.getAttribute('aria-busy') === 'false' && (observer.disconnect(), done());
            const observer = new MutationObserver(watch);
            observer.observe(area, { attributes: true });
        });
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - start);
        if (whole.toDataURL() === before) throw new Error(`slider ${n} changed nothing`);
    }
    return times;
}"""


def test_a_slider_redraws_the_reconstruction_at_once(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    pick(page, 7)
    before = picture(page)
    times = page.evaluate(MEASURE, 20)
    print(f"slider to picture: median {statistics.median(times):.0f} ms, longest {max(times):.0f} ms")
    assert statistics.median(times) <= 100
    assert "changed by the sliders" in page.locator(".source").inner_text()
    page.get_by_role("button", name="Reset sliders").click()
    settle(page)
    assert picture(page) == before
    assert page.get_by_role("button", name="Reset sliders").is_disabled()

    slider = page.get_by_role("slider", name="Component 3", exact=True)
    value = float(slider.input_value())
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    settle(page)
    assert float(slider.input_value()) > value
    assert picture(page) != before


def test_another_capsule_may_be_chosen(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    pick(page, 7)
    seen, before = page.locator(".verdict strong").inner_text(), picture(page)
    other = str((int(seen) + 1) % 10)
    page.get_by_role("radio", name=f"{other}, length").check()
    settle(page)
    assert picture(page) != before
    assert page.locator("#components-heading").inner_text() == f"Components of capsule {other}"
    assert page.locator(".whole").get_attribute("aria-label") == f"Reconstruction from capsule {other}"
    assert page.locator(".verdict strong").inner_text() == seen
    page.get_by_role("radio", name="the longest").check()
    settle(page)
    assert picture(page) == before


def test_files_are_read_and_broken_ones_refused_in_a_sentence(
    open_page: Callable[..., Page], address: str, tmp_path: Path, errors: list[str]
) -> None:
    page = open_page(address)
    upload = page.get_by_label("Upload image")
    upload.set_input_files({"name": "holiday.png", "mimeType": "image/png", "buffer": b"\x89PNG and no more"})
    assert message(page) == ("“holiday.png” cannot be read as an image; PNG, JPEG, BMP, GIF, WebP and TIFF files can.")
    assert "Traceback" not in page.content()
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    upload.set_input_files(tmp_path / "noise.png")
    settle(page)
    assert page.locator(".message").is_hidden()
    np.testing.assert_array_equal(pixels(page, ".drawing"), noise[..., None].repeat(3, 2))

    pick(page, 100_000)
    assert message(page).startswith("Test images go from 0 to ")
    page.route("**/ask/*", lambda route: route.fulfill(status=500, body="Traceback"))
    page.get_by_role("button", name="Random").click()
    page.get_by_text("The explorer does not answer.").wait_for()
    assert "Traceback" not in page.locator("body").inner_text()
    assert "500" in errors.pop()


def shown(page: Page) -> tuple[Any, ...]:
    """All that a link is to bring back."""
    sliders = [round(float(slider.input_value()), 3) for slider in page.get_by_role("slider").all()]
    chosen = page.locator("[name=capsule]:checked").input_value()
    return picture(page, ".drawing"), picture(page), sliders, chosen, page.locator(".verdict").inner_text()


def test_a_link_brings_everything_back(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address, permissions=["clipboard-read", "clipboard-write"])
    draw(page)
    page.get_by_role("radio", name="5, length").check()
    page.get_by_role("slider", name="Component 2", exact=True).press("End")
    settle(page)
    drawn = shown(page)
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Link copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{address}#pixels=")
    assert page.url == link

    other = open_page(link)
    settle(other)
    assert shown(other) == drawn
    pick(other, 12)
    other.get_by_role("slider", name="Component 1", exact=True).press("Home")
    settle(other)
    picked = shown(other)
    assert picked[3] == "5"
    other.get_by_role("button", name="Copy link").click()
    assert "#test=12&class=5&pose=" in other.url
    page.goto(other.url)  # in the same tab, where only what follows the # changes
    settle(page)
    page.get_by_text("Its label is").wait_for()
    settle(page)
    assert shown(page) == picked

    for broken, sentence in (
        ("test=x", "Give the number of a test image"),
        ("pixels=AAAA", "The link is for another network"),
        ("pixels=%", "The link is broken: its image was cut."),
        ("test=1&class=z", "The link names the class “z”, which this network has not."),
        ("test=1&pose=1,x", "The link is broken: its components are no numbers."),
        ("test=1&pose=1,2", "The link has 2 components, but a capsule of this network has 16."),
    ):
        page.goto(f"{address}#{broken}")
        page.get_by_text(sentence).wait_for()


def test_a_link_whose_image_is_not_there_changes_nothing(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(f"{address}#test=99999&class=5&pose={','.join(['0.4'] * 16)}")
    assert message(page).startswith("Test images go from 0 to ")
    assert page.get_by_role("radio", name="the longest").is_checked()
    draw(page)
    sliders = page.get_by_role("slider").all()
    assert {float(slider.input_value()) for slider in sliders} != {0.4}
    assert "changed by the sliders" not in page.locator(".source").inner_text()


def test_the_picture_can_be_downloaded(open_page: Callable[..., Page], address: str, tmp_path: Path) -> None:
    page = open_page(address)
    draw(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download PNG").click()
    assert download.value.suggested_filename == "torchcaps-3.png"
    download.value.save_as(tmp_path / "picture.png")
    sheet = np.asarray(Image.open(tmp_path / "picture.png"))
    assert sheet.shape[:2] == (280, 280 + 10 + 280)
    np.testing.assert_array_equal(sheet[5:280:10, 5:280:10, :3], pixels(page, ".drawing"))
    np.testing.assert_array_equal(sheet[5::10, 295::10, :3], pixels(page, ".whole"))


# Text whose contrast with what lies behind it is below 4.5 (WCAG 2.2, 1.4.3); disabled controls may be.
LOW_CONTRAST = """() => {
    const rgb = (colour) => {
        const c = new OffscreenCanvas(1, 1).getContext('2d');
        c.fillStyle = colour; c.fillRect(0, 0, 1, 1);
        return [...c.getImageData(0, 0, 1, 1).data];
    };
    const light = (colour) => rgb(colour).slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (node.matches('.sheet')) return 'black';
            if (rgb(colour)[3] > 250) return colour;
        }
        return 'white';
    };
    const low = [];
    let checked = 0;
    for (const node of document.querySelectorAll('.explorer *')) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!own || !node.checkVisibility() || node.matches(':disabled, :disabled *')) continue;
        checked++;
        const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.className || node.tagName}: ${node.textContent.trim()}`);
    }
    return [checked, low];
}"""


def named_controls(page: Page) -> list[tuple[str, str]]:
    """Role and accessible name of every control and picture, as the browser tells a screen reader."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "slider", "radio", "spinbutton", "textbox", "image", "img", "application", "region", "group"}
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_there_can_be_read_and_heard(open_page: Callable[..., Page], address: str, scheme: str) -> None:
    page = open_page(address, color_scheme=scheme)
    draw(page)
    checked, low = page.evaluate(LOW_CONTRAST)
    assert checked > 60
    assert not low
    page.evaluate("document.querySelector('.hint').style.color = '#777f'")
    page.evaluate("document.querySelector('.hint').closest('.explorer').style.setProperty('--surface', '#999')")
    assert page.evaluate(LOW_CONTRAST)[1], "a contrast that is too low is not seen"

    controls = named_controls(page)
    assert not [role for role, name in controls if not name.strip()]
    names = {name.strip() for _, name in controls}
    assert {"Drawing area", "Clear", "Invert", "Random", "Test image", "Reset sliders"} < names
    assert {f"Component {k}" for k in range(16)} < names
    assert any(name.startswith("Upload image") for name in names)
    assert sum(role == "radio" for role, _ in controls) == 11
    page.evaluate("document.querySelector('.slider input').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('.slider label').remove()")
    assert [role for role, name in named_controls(page) if not name.strip()] == ["slider"]


def test_a_digit_is_drawn_by_keyboard_alone(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "drawing"
    for key, times in (("ArrowUp", 9), ("Space", 1), ("ArrowDown", 18)):
        for _ in range(times):
            page.keyboard.press(key)
    settle(page)
    ink = pixels(page, ".drawing")[..., 0]
    assert ink[5:23, 14].min() > 100
    assert ink[:, :10].max() == 0
    page.keyboard.press("Space")
    page.keyboard.press("ArrowLeft")
    np.testing.assert_array_equal(pixels(page, ".drawing")[..., 0], ink)
    name = "({ textContent, name, id }) => textContent || name || id"
    order = []
    for _ in range(30):
        page.keyboard.press("Tab")
        order.append(page.evaluate(f"({name})(document.activeElement)"))
    assert order[:5] == ["Clear", "Invert", "upload", "test", "Random"]
    assert "capsule" in order
    assert "component-15" in order


def test_a_phone_is_wide_enough(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address, 390, 844, has_touch=True, is_mobile=True, device_scale_factor=2)
    draw(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    sticking_out = """() => [...document.querySelectorAll('.explorer *')].filter((node) => node.checkVisibility()
        && node.getBoundingClientRect().right > 390.5).map((node) => node.className || node.tagName)"""
    assert page.evaluate(sticking_out) == []
    area = page.locator(".drawing").bounding_box()
    assert area is not None
    assert area["width"] >= 280
    for control in page.locator("button, .button, .bar, .slider").all():
        box = control.bounding_box()
        assert box is None or box["height"] >= 36
    # the picture stays in sight while the last slider is moved
    slider = page.get_by_role("slider", name="Component 15", exact=True)
    slider.scroll_into_view_if_needed()
    slider.press("End")
    settle(page)
    box = page.locator(".whole").bounding_box()
    assert box is not None
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 844
    page.locator(".pose").evaluate("section => section.scrollIntoView()")
    save_screenshot(page, "explorer-phone.png", full_page=False)
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("button", name="Clear").tap()
    page.touchscreen.tap(area["x"] + 100, area["y"] + 100)
    page.locator(".verdict strong").wait_for()
    assert pixels(page, ".drawing").max() > 200


def test_a_second_finger_draws_nothing(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address, 390, 844, has_touch=True, is_mobile=True)
    area = page.locator(".drawing").bounding_box()
    assert area is not None
    fingers = page.context.new_cdp_session(page)

    def touch(kind: str, *places: tuple[float, float]) -> None:
        points = [
            {"id": n, "x": area["x"] + x * area["width"], "y": area["y"] + y * area["height"]}
            for n, (x, y) in enumerate(places)
        ]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (0.2, 0.2))
    touch("touchStart", (0.2, 0.2), (0.8, 0.8))
    for y in (0.3, 0.4, 0.5):
        touch("touchMove", (0.2, y), (0.8, 0.8 - y / 4))
    touch("touchEnd")
    settle(page)
    ink = pixels(page, ".drawing")[..., 0]
    assert ink[6:14, 5].min() > 100
    assert ink[:, 10:].max() == 0


@pytest.mark.parametrize("site", SITES)
def test_other_networks(open_page: Callable[..., Page], site: str) -> None:
    with served(SITES[site]()) as address:
        page = open_page(address)
        draw(page)
        text = page.locator(".explorer").inner_text()
        if site == "cnn":
            assert "Capsules cannot be decoded: a reconstruction needs a decoder, but a BaselineCNN has" in text
            assert "Routing cannot be followed: " in text
            assert "There are no images: none." in text
            assert page.get_by_role("button", name="Random").is_disabled()
            assert page.get_by_role("slider").count() == 0
        if site == "no routing":
            assert "Routing cannot be followed: num_iterations must be at least 1" in text
            assert pixels(page, ".whole").max() > 0
        if site == "pairs":
            check_pairs(page)
        if site == "many classes":
            assert page.locator(".bar[data-class]:visible").count() == 20
            assert page.locator(".routing thead th").count() == 1 + 10


def check_pairs(page: Page) -> None:
    """Two objects: each in its colour, both overlaid, and only the chosen one moved by the sliders."""
    pick(page, 0)
    assert "Its label is d and b." in page.locator(".label").inner_text()
    first, second = page.locator(".apart figcaption").all_inner_texts()
    assert page.locator(".verdict strong").inner_text() == f"{first} and {second}"
    orange, blue = (pixels(page, f".apart figure:nth-child({n}) canvas") for n in (1, 2))
    assert orange[..., 0].max() > orange[..., 2].max()
    assert blue[..., 2].max() > blue[..., 0].max()
    np.testing.assert_allclose(pixels(page, ".whole"), (orange + blue).clip(0, 255), atol=1)
    assert page.locator("#components-heading").inner_text() == f"Components of capsule {first}"
    page.get_by_role("radio", name=f"{second}, length").check()
    page.get_by_role("slider", name="Component 2", exact=True).press("End")
    page.get_by_role("slider", name="Component 3", exact=True).press("Home")
    settle(page)
    after = [pixels(page, f".apart figure:nth-child({n}) canvas") for n in (1, 2)]
    np.testing.assert_array_equal(after[0], orange)
    assert (after[1] != blue).any()
    absent = next(name for name in "abcd" if name not in (first, second))
    page.get_by_role("radio", name=f"{absent}, length").check()
    settle(page)
    assert page.locator(".apart figcaption").all_inner_texts() == [first, absent]
