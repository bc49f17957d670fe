"""The page on a slow line, after a reload, in grey, for screen readers and for fingers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from explorer_support import served, settle, shipped
from torchcaps.explorer import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SLOW = {"offline": False, "latency": 50, "downloadThroughput": 200_000, "uploadThroughput": 200_000}
"""A line of 200 kB a second."""
MIN_TARGET = 24
"""Smallest side of a control in pixels (WCAG 2.2, 2.5.8)."""
MIN_GREY_STEP = 12
"""Smallest difference in lightness (0..100) between the colours of the coupling."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page") / "site"
    write_page(shipped(), folder)
    with served(folder) as address:
        yield address


def draw_line(page: Page) -> None:
    """A vertical stroke."""
    box = page.locator(".drawing").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 0.2 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 0.8 * box["height"], steps=8)
    page.mouse.up()


def drawing(page: Page) -> str:
    return page.locator(".drawing").evaluate("canvas => canvas.toDataURL()")


def test_a_slow_line_is_said_and_a_drawing_made_meanwhile_stays(open_page: Callable[..., Page], site: str) -> None:
    page = open_page(site)  # its tour counts as seen
    page.evaluate("sessionStorage.clear(); addEventListener('pagehide', () => sessionStorage.clear())")
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    session.send("Network.emulateNetworkConditions", SLOW)
    page.goto(f"{site}?slow", wait_until="commit")
    page.get_by_text("You can draw already.").wait_for()
    draw_line(page)
    before = drawing(page)
    settle(page)
    assert page.locator(".loading").inner_text() == ""
    assert drawing(page) == before


def test_a_drawing_survives_a_reload_and_the_way_back(open_page: Callable[..., Page], site: str) -> None:
    page = open_page(site)
    draw_line(page)
    settle(page)
    before = drawing(page)
    for leave in (page.reload, lambda: (page.goto(f"{site}playground.html"), page.go_back())):
        leave()
        settle(page)
        assert drawing(page) == before
    page.get_by_role("button", name="Clear").click()
    page.reload()
    settle(page)
    assert drawing(page) != before, "cleared, the page opens with a test image"


def test_sliders_have_names_and_rounded_values_and_the_overlay_has_a_name(
    open_page: Callable[..., Page], site: str
) -> None:
    page = open_page(f"{site}#test=4")
    settle(page)
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    sliders = [node for node in nodes if node.get("role", {}).get("value") == "slider"]
    assert len(sliders) >= 17
    for node in sliders:
        assert node["name"]["value"]
    texts = page.evaluate("[...document.querySelectorAll('[type=range]')].map(each => each.ariaValueText)")
    assert all(text and len(text) <= len("iteration 3 of 3") for text in texts), texts
    names = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "checkbox"]
    assert "Overlay image (orange) and reconstruction (blue)" in names
    controls = {"button", "slider", "checkbox", "radio", "link", "spinbutton", "combobox"}
    unnamed = [
        node for node in nodes if node.get("role", {}).get("value") in controls and not node["name"].get("value")
    ]
    assert unnamed == []


def test_every_control_is_large_enough_for_a_finger(open_page: Callable[..., Page], site: str) -> None:
    """A control or its label; links within a sentence are excepted, as in the guideline."""
    for width, height in ((1280, 800), (390, 844)):
        page = open_page(f"{site}#test=4", width, height)
        settle(page)
        small = page.evaluate(
            """least => [...document.querySelectorAll("button, select, summary, input, a.docs")].filter(each => {
                 const area = (each.closest("label") ?? each).getBoundingClientRect();
                 return area.width && Math.min(area.width, area.height) < least;
               }).map(each => each.outerHTML.slice(0, 80))""",
            MIN_TARGET,
        )
        assert small == [], (width, small)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_less_and_more_than_uniform_differ_in_grey(open_page: Callable[..., Page], site: str, scheme: str) -> None:
    page = open_page(f"{site}#test=4")
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    below, uniform, above = (
        page.locator(".explorer").evaluate(
            """(page, name) => {
                 const probe = document.createElement("i");
                 probe.style.color = `var(${name})`;
                 page.append(probe);
                 const channels = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
                 probe.remove();
                 return channels;
               }""",
            name,
        )
        for name in ("--below", "--uniform", "--above")
    )
    first, middle, last = (lightness(colour) for colour in (below, uniform, above))
    steps = (middle - first, last - middle)
    assert min(map(abs, steps)) >= MIN_GREY_STEP
    assert steps[0] * steps[1] > 0, "more coupling is always darker, or always lighter"


def lightness(colour: list[float]) -> float:
    """L* of a colour in sRGB, 0..100."""
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16


def test_the_page_says_that_a_length_is_no_probability(open_page: Callable[..., Page], site: str) -> None:
    page = open_page(f"{site}#test=4")
    settle(page)
    assert "no probability" in page.locator(".bars legend").inner_text()
