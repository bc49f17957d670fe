"""The page in a real browser: drawn on, moved, played, broken, shared, by keyboard and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from explorer_support import png, settle, shipped, small_network
from torchcaps.datasets import ImageSet
from torchcaps.explorer import Explorer, serving
from torchcaps.explorer.state import shipped_images

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# A three, in shares of the drawing area.
THREE = [(0.32, 0.28), (0.36, 0.22), (0.44, 0.18), (0.53, 0.18), (0.61, 0.22), (0.65, 0.29), (0.63, 0.37), (0.57, 0.43)]
THREE += [(0.48, 0.47), (0.57, 0.49), (0.65, 0.55), (0.69, 0.63), (0.67, 0.72), (0.6, 0.79), (0.5, 0.82), (0.38, 0.8)]
THREE += [(0.3, 0.74)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page of the network that comes with torchcaps."""
    with serving([shipped()], 0) as address:
        yield address


def draw(page: Page, points: list[tuple[float, float]] = THREE) -> None:
    """A stroke of the mouse, and the wait for what the network says of it."""
    area = page.locator(".drawing").bounding_box()
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


def test_it_opens_with_a_tour_that_is_remembered_and_then_with_a_digit_that_moves(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(address, height=800, fresh=True)
    page.locator(".tour").wait_for()
    assert page.locator(".slider.sweeping").count() == 0
    assert page.get_by_role("button", name="Undo").is_disabled()
    outlined = []
    for _ in range(5):
        outlined.append(page.locator(".toured").get_attribute("class").split()[0])
        tour = page.locator(".tour").bounding_box()
        for name in (".toured", ".verdict"):
            box = page.locator(name).bounding_box()
            assert box["y"] + box["height"] <= tour["y"], f"{name} is covered"
        page.get_by_role("button", name="Next").click()
    assert outlined == ["image", "capsules", "components", "decoded", "routing"]
    assert page.locator(".tour li").count() == 3
    answer = page.get_by_text("trained on single digits. There")
    assert answer.is_hidden()
    page.locator(".tour summary").click()
    assert answer.is_visible()
    page.get_by_role("button", name="Done").click()
    page.locator(".slider.sweeping").wait_for()
    for panel in (".whole", ".slider >> nth=-1", "#cell"):  # in sight at once
        box = page.locator(panel).bounding_box()
        assert box["y"] + box["height"] <= 800
    page.reload()
    page.locator(".slider.sweeping").wait_for()
    assert page.locator(".tour").is_hidden()
    assert "changed by the sliders" not in page.locator(".source").inner_text()
    page.get_by_role("button", name="Tour").click()
    assert page.locator(".tour").is_visible()


def test_on_a_phone_the_tour_begins_at_the_picture_and_covers_no_answer(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(address, 390, 844, fresh=True)
    page.locator(".tour").wait_for()
    for where in ("drawing", "bars", "components", "whole", "maps"):
        tour, seen = (page.locator(name).bounding_box() for name in (".tour", f".{where}"))
        assert 0 <= seen["y"] < tour["y"], f"{where} is out of sight"
        verdict = page.locator(".verdict").bounding_box()
        assert verdict["y"] + verdict["height"] <= tour["y"]
        page.get_by_role("button", name="Next").click()
    tour, drawing = (page.locator(name).bounding_box() for name in (".tour", ".drawing"))
    assert -1 < tour["y"] < tour["y"] + tour["height"] <= drawing["y"], "the tasks stand above the drawing"
    assert drawing["y"] + drawing["height"] <= 844


def test_a_stroke_is_judged_undone_and_downloaded(open_page: Callable[..., Page], address: str, tmp_path: Path) -> None:
    page = open_page(address)
    assert page.locator(".verdict").inner_text() == "Draw, upload or pick an image."
    assert pixels(page, ".drawing").max() == pixels(page, ".whole").max() == 0
    assert page.get_by_role("button", name="Copy link").is_disabled()
    draw(page)
    assert page.locator(".verdict strong").inner_text() == "3"
    lengths = [float(text) for text in page.locator(".bar .number").all_inner_texts()]
    assert np.argmax(lengths) == 3
    assert pixels(page, ".drawing").max() == 255
    assert pixels(page, ".whole").max() > 100
    assert page.locator(".whole").get_attribute("aria-label") == "Reconstruction from capsule 3"
    first, before = picture(page, ".drawing"), picture(page)

    page.get_by_role("radio", name="4, length").check()
    settle(page)
    assert picture(page) != before
    assert page.locator("#components-heading").inner_text() == "Components of capsule 4"
    page.get_by_text("More controls").click()
    page.get_by_label("Keep the chosen capsule").check()
    pick(page, 9)
    assert page.locator("#components-heading").inner_text() == "Components of capsule 4", "it is pinned"
    page.get_by_role("radio", name="the longest").check()
    page.get_by_role("button", name="Undo").click()
    settle(page)
    assert (picture(page, ".drawing"), picture(page)) == (first, before)

    with page.expect_download() as download:
        page.get_by_role("button", name="Download PNG").click()
    assert download.value.suggested_filename == "torchcaps-3.png"
    download.value.save_as(tmp_path / "picture.png")
    sheet = np.asarray(Image.open(tmp_path / "picture.png"))
    np.testing.assert_array_equal(sheet[15:290:10, 15:290:10, :3], pixels(page, ".drawing"))
    np.testing.assert_array_equal(sheet[15:290:10, 305:580:10, :3], pixels(page, ".whole"))

    page.get_by_role("button", name="Invert").click()
    settle(page)
    assert (pixels(page, ".drawing")[0, 0] == 255).all()
    page.get_by_role("button", name="Clear").click()
    assert pixels(page, ".drawing").max() == pixels(page, ".whole").max() == 0
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    settle(page)
    assert picture(page, ".drawing") == first


def test_a_stroke_asks_one_kind_of_question(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    draw(page)
    assert set(asked) == {"look"}
    page.get_by_role("radio", name="4, length").check()
    settle(page)
    page.get_by_role("radio", name="the longest").check()
    settle(page)
    assert asked[-1] == "decode"
    assert asked.count("decode") == 1


def test_sliders_sweeps_and_iterations_redraw(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address)
    pick(page, 7)
    alone, image = pixels(page, ".whole")[..., 0] / 255, pixels(page, ".drawing")[..., 0] / 255
    page.get_by_label("Overlay").check()
    wanted = image[..., None] * [255, 128, 0] + alone[..., None] * [51, 153, 255]
    np.testing.assert_allclose(pixels(page, ".whole"), wanted.clip(0, 255), atol=1.5)
    page.get_by_label("Overlay").uncheck()
    before = picture(page)
    for k in range(16):
        page.get_by_role("slider", name=f"Component {k}", exact=True).press("End")
    settle(page)
    assert picture(page) != before
    assert "changed by the sliders" in page.locator(".source").inner_text()
    page.get_by_role("button", name="Reset sliders").click()
    settle(page)
    assert picture(page) == before

    slider, values = page.get_by_role("slider", name="Component 2", exact=True), set()
    start, button = slider.input_value(), page.get_by_role("button", name="Sweep component 2", exact=True)
    button.click()
    while button.get_attribute("aria-pressed") == "true":
        values.add(round(float(slider.input_value()), 1))
    settle(page)
    assert min(values) <= -0.4 < 0.4 <= max(values)
    assert (slider.input_value(), picture(page)) == (start, before)

    last, control = picture(page, ".maps .present canvas"), page.get_by_label("Iteration", exact=True)
    page.get_by_role("button", name="Play").click()
    uniform = pixels(page, ".maps .present canvas")
    assert (uniform == uniform[0, 0]).all()
    page.wait_for_function("last => document.querySelector('.maps .present canvas').toDataURL() === last", arg=last)
    control.press("ArrowLeft")
    assert page.locator(".transport output").inner_text() == "iteration 2 of 3"
    trained = page.locator(".bar .number").all_inner_texts()
    page.locator("[name=iterations]").select_option("5")
    page.get_by_text("iteration 5 of 5").wait_for()
    settle(page)
    assert page.locator(".bar .number").all_inner_texts() != trained
    page.get_by_role("button", name="Copy link").click()
    assert "iterations=5" in page.url
    page.locator("[name=iterations]").select_option("3")
    page.get_by_text("iteration 3 of 3").wait_for()
    settle(page)
    assert page.locator(".bar .number").all_inner_texts() == trained


def test_a_cell_shows_its_patch_and_its_votes(open_page: Callable[..., Page]) -> None:
    explorer = shipped()
    with serving([explorer], 0) as address:
        page = open_page(address)
        pick(page, 7)
        rows, columns = page.evaluate("import('./core.js').then(({ state }) => state.view.routing.size)")
        maps, patch, drawing = (page.locator(name) for name in (".maps", ".patch", ".drawing"))
        maps.focus()
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp"):
            maps.press(key)
        image, box = drawing.bounding_box(), patch.bounding_box()
        pixel, patches = image["width"] / 28, explorer.patches
        assert box["x"] - image["x"] == pytest.approx(2 * patches["stride"][1] * pixel, abs=0.5)
        assert (box["y"] - image["y"], box["height"]) == pytest.approx((0, patches["size"][0] * pixel), abs=0.5)
        maps.press("Enter")
        page.locator(".votes tbody tr").first.wait_for()
        votes = explorer.votes(explorer.pick(7)[0], [0, 2])
        read = "cells => cells.map(({ title }) => title.match(/agreement (.+), coupling (.+)/).slice(1))"
        shown = np.array(page.locator(".votes td").evaluate_all(read))
        agreement = [float(text.replace("−", "-")) for text in shown[:, 0]]
        np.testing.assert_allclose(agreement, votes["agreement"][-1].ravel(), atol=0.006)
        np.testing.assert_allclose(shown[:, 1].astype(float), votes["coupling"][-1].ravel(), atol=0.0006)
        page.get_by_label("Iteration", exact=True).fill("1")
        assert {coupling for _, coupling in page.locator(".votes td").evaluate_all(read)} == {"0.100"}
        last = page.locator(".map").last
        spot = last.bounding_box()
        last.hover(position={"x": spot["width"] - 2, "y": spot["height"] - 2})
        assert f"Row {rows}, column {columns}" in page.locator("#cell").inner_text()
        last.click(position={"x": spot["width"] - 2, "y": spot["height"] - 2})
        settle(page)
        assert page.locator(".votes").is_visible()
        last.click(position={"x": spot["width"] - 2, "y": spot["height"] - 2})
        page.locator(".votes").wait_for(state="hidden")


# Gives the page a file as a paste (`clipboardData`) or a drop (`dataTransfer`) would.
GIVE = """([kind, holder, name, type, bytes]) => {
    const given = new DataTransfer();
    given.items.add(new File([new Uint8Array(bytes)], name, { type }));
    const event = new Event(kind, { bubbles: true, cancelable: true });
    event[holder] = given;
    document.body.dispatchEvent(event);
    return event.defaultPrevented;
}"""


def test_files_are_read_and_broken_ones_refused(
    open_page: Callable[..., Page], address: str, errors: list[str]
) -> None:
    page = open_page(address)
    upload = page.get_by_label("Upload image")
    upload.set_input_files({"name": "holiday.png", "mimeType": "image/png", "buffer": b"\x89PNG and no more"})
    assert message(page).startswith("“holiday.png” cannot be read as an image; ")
    image = np.zeros((28, 28), np.uint8)
    image[5:23, 13:16] = 250
    for kind, holder in (("paste", "clipboardData"), ("drop", "dataTransfer")):
        page.evaluate(GIVE, [kind, holder, f"{kind}.png", "image/png", list(png(image))])
        page.get_by_text(f"{kind}.png.").wait_for()
        settle(page)
        np.testing.assert_array_equal(pixels(page, ".drawing")[..., 0], image)
    assert page.evaluate(GIVE, ["drop", "dataTransfer", "a.txt", "text/plain", [65]]), "the browser would show the file"
    assert message(page) == "“a.txt” is not an image file."

    paper = np.full((300, 400), 210, np.uint8)
    paper[60:180, 100:112] = 40
    photo = {"name": "photo.png", "mimeType": "image/png", "buffer": png(paper)}
    upload.set_input_files(photo)
    page.get_by_text("Prepared for the network: dark ink turned light;").wait_for()
    settle(page)
    assert pixels(page, ".drawing")[:, :8].max() == 0
    assert page.locator(".original img").evaluate("image => image.naturalWidth") == 400
    page.get_by_text("More controls").click()
    page.get_by_label("Prepare photos").uncheck()
    upload.set_input_files(photo)
    page.locator(".original").wait_for(state="hidden")
    settle(page)
    assert pixels(page, ".drawing").min() > 20

    pick(page, 100_000)
    assert message(page).startswith("The number of a test image must be 0 to ")
    page.route("**/ask/*", lambda route: route.fulfill(status=500, body="Traceback"))
    page.get_by_role("button", name="Random").click()
    page.get_by_text("The explorer does not answer.").wait_for()
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
    assert link.startswith(f"{address}/#pixels=")
    assert page.url == link

    other = open_page(link)
    settle(other)
    assert shown(other) == drawn
    pick(other, 12)
    other.get_by_role("radio", name="5, length").check()
    other.get_by_role("slider", name="Component 1", exact=True).press("Home")
    settle(other)
    picked = shown(other)
    other.get_by_role("button", name="Copy link").click()
    assert "#test=12&class=5&pose=" in other.url
    page.goto(other.url)  # in the same tab, where only what follows the # changes
    settle(page)
    page.get_by_text("Its label is").wait_for()
    settle(page)
    assert shown(page) == picked

    for broken, sentence in (
        ("test=x", "Give the number of a test image"),
        ("pixels=%", "The link is broken: its image was cut off."),
        ("test=1&class=z", "The link names the class “z”, which this network does not have."),
        ("test=1&pose=1,2", "The link has 2 components, but a capsule of this network has 16."),
    ):
        page.goto(f"{address}/#{broken}")
        page.get_by_text(sentence).wait_for()


def test_two_networks_side_by_side(open_page: Callable[..., Page]) -> None:
    image = shipped_images().images[7].numpy()
    first = Explorer(small_network("sabour2017", 10, (1, 28, 28)), name="three", images=shipped_images())
    second = Explorer(small_network("baseline-cnn", 10, (1, 28, 28)), name="cnn")
    with serving([first, second], 0) as beside:
        page = open_page(beside)
        pick(page, 7)
        answers = page.locator(".answer").all()
        for answer, view in zip(answers, (first.look(image), second.look(image)), strict=True):
            assert answer.locator(".said strong").inner_text() == str(view.present[0])
            assert (
                view.capsules is not None or answer.get_by_text("probability of each class; they sum to 1").is_visible()
            )
            bars = [float(text) for text in answer.locator(".thin div > span:last-child").all_inner_texts()]
            np.testing.assert_allclose(bars, view.scores, atol=0.006)
        page.get_by_role("radio", name="cnn").check()
        settle(page)
        why = "A convolutional network has no capsules; choose the other network."
        assert page.locator("#components-help").inner_text() == page.locator(".routing .what").inner_text() == why
        assert page.locator(".source").is_hidden()
        assert page.get_by_role("button", name="Reset sliders").is_disabled()
        page.get_by_role("radio", name="three").check()
        settle(page)
        assert page.get_by_text("iteration 3 of 3").is_visible()


def named_controls(page: Page) -> list[tuple[str, str]]:
    """Role and accessible name of every control and picture, as the browser tells a screen reader."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "slider", "radio", "spinbutton", "textbox", "image", "img", "application", "region", "group"}
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]


def test_a_digit_is_drawn_by_keyboard_and_everything_is_named(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address, color_scheme="dark")
    for _ in range(4):  # the tour, the documentation, and what the panel shows, come first
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "drawing"
    for key, times in (("ArrowUp", 9), ("Space", 1), ("ArrowDown", 18)):
        for _ in range(times):
            page.keyboard.press(key)
    settle(page)
    ink = pixels(page, ".drawing")[..., 0]
    assert ink[5:23, 14].min() > 100
    assert ink[:, :10].max() == 0
    name = "({ textContent, name, id }) => textContent || name || id"
    order = []
    for _ in range(60):
        page.keyboard.press("Tab")
        order.append(page.evaluate(f"({name})(document.activeElement)"))
    page.keyboard.press("Space")  # of a control that is not the drawing area
    assert order[:6] == ["Undo", "Clear", "upload", "test", "Random", "More controls"]
    assert "component-15" in order
    page.get_by_text("More controls").click()
    controls = named_controls(page)
    assert not [role for role, name in controls if not name.strip()]
    names = {name.strip() for _, name in controls}
    assert {"Drawing area", "Undo", "Test image", "Pen width", *(f"Component {k}" for k in range(16))} < names
    docs = Path(__file__).parents[2] / "docs"
    links = [str(each.get_attribute("href")) for each in page.locator(".help a").all()]
    pages = [link.partition("#")[0].rpartition("/")[2].replace(".html", ".md") for link in links]
    assert pages
    assert not [name for name in pages if not list(docs.rglob(name))]


def test_a_phone_is_wide_enough_and_takes_one_finger(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(address, 390, 844, has_touch=True, is_mobile=True)
    area = page.locator(".drawing").bounding_box()
    assert area["width"] >= 280
    fingers = page.context.new_cdp_session(page)

    def touch(kind: str, *places: tuple[float, float]) -> None:
        places = tuple((area["x"] + x * area["width"], area["y"] + y * area["height"]) for x, y in places)
        points = [{"id": n, "x": x, "y": y} for n, (x, y) in enumerate(places)]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (0.2, 0.2))
    touch("touchStart", (0.2, 0.2), (0.8, 0.8))
    for y in (0.3, 0.4, 0.5):
        touch("touchMove", (0.2, y), (0.8, 0.8 - y / 4))
    touch("touchEnd")
    settle(page)
    ink = pixels(page, ".drawing")[..., 0]
    assert ink[6:14, 5].min() > 100
    assert ink[:, 10:].max() == 0, "a second finger draws nothing"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # the picture stays in sight while the last slider is moved
    slider = page.get_by_role("slider", name="Component 15", exact=True)
    slider.scroll_into_view_if_needed()
    slider.press("End")
    settle(page)
    box = page.locator(".whole").bounding_box()
    assert 0 <= box["y"] <= 844 - box["height"]


def test_networks_that_see_two_objects(open_page: Callable[..., Page]) -> None:
    images = ImageSet(torch.full((1, 3, 18, 20), 90, dtype=torch.uint8), torch.tensor([[3, 1]]))
    network = small_network("sabour2017-multimnist", in_shape=(3, 18, 20))
    with serving([Explorer(network, list("abcd"), images=images)], 0) as address:
        page = open_page(address)
        pick(page, 0)
        assert "Its label is d and b." in page.locator(".label").inner_text()
        first, second = page.locator(".apart figcaption").all_inner_texts()
        assert page.locator(".verdict strong").inner_text() == f"{first} and {second}"
        orange, blue = (pixels(page, f".apart figure:nth-child({n}) canvas") for n in (1, 2))
        np.testing.assert_allclose(pixels(page, ".whole"), (orange + blue).clip(0, 255), atol=1)
        page.get_by_role("radio", name=f"{second}, length").check()
        page.get_by_role("slider", name="Component 2", exact=True).press("End")
        page.get_by_role("slider", name="Component 3", exact=True).press("Home")
        settle(page)
        after = [pixels(page, f".apart figure:nth-child({n}) canvas") for n in (1, 2)]
        np.testing.assert_array_equal(after[0], orange)
        assert (after[1] != blue).any()
