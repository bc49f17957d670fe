"""The explorer of a network with slots: the parts of the image, and slots that are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from explorer_support import settle
from support import assert_raises, small
from torchcaps import create_model
from torchcaps.analysis import predict
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.explorer import Explorer, serving
from torchcaps.explorer.questions import Questions
from torchcaps.explorer.state import to_bytes
from torchcaps.explorer.static import write_page

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

SHAPE = (3, 12, 15)


def explorer_of(**options: Any) -> Explorer:
    torch.manual_seed(0)
    network = create_model("slots-small", SHAPE, 3, **small("slots-small") | options)
    with torch.no_grad():  # masks that differ
        network.decoder.layers[-1].weight.mul_(30)
    images = torch.randint(0, 256, (6, *SHAPE), dtype=torch.uint8)
    return Explorer(network.eval(), ("cat", "dog", "cow"), name="slots", images=ImageSet(images, images[:, 0] // 100))


@pytest.mark.parametrize("options", [{}, {"num_capsules": 5}, {"layers": ("slot-mixture",)}], ids=str)
def test_a_look_is_what_predict_says(options: dict[str, Any]) -> None:
    explorer = explorer_of(**options)
    pixels, label = explorer.pick(1)
    view, answer = explorer.look(pixels), predict(explorer.model, torch.from_numpy(pixels)[None])
    masks, image = answer.scores[0], answer.reconstruction[0]
    assert explorer.class_names == [f"slot {number}" for number in range(len(masks))]
    assert label == "2 objects"
    np.testing.assert_allclose(view.scores, masks.mean((1, 2)), rtol=1e-5)
    assert view.present == np.argsort(-view.scores).tolist()
    assert (view.caveats, view.routing, explorer.score_name) == ((), None, "share")
    np.testing.assert_allclose(view.decoded, (masks[:, None] * image)[view.present], atol=1e-6)
    again = explorer.decode(view.present, view.capsules[view.present])
    np.testing.assert_array_equal(to_bytes(again), to_bytes(view.decoded))
    changed = view.capsules.copy()
    changed[1] += 3
    other = explorer.decode(range(len(masks)), changed).sum(0)
    assert not np.array_equal(to_bytes(other), to_bytes(view.decoded.sum(0)))


def test_what_does_not_fit_slots_is_one_sentence(tmp_path: Path) -> None:
    explorer = explorer_of()
    for numbers, poses in (([0, 1], 2), ([0, 1, 1], 3), ([0, 1, 2], 2)):
        assert_raises(InputError, explorer.decode, numbers, np.zeros((poses, 10)), say="decode needs all slots, 0 to 2")
    assert_raises(InputError, explorer.look, explorer.pick(0)[0], 2, say="no number of iterations to change")
    assert_raises(InputError, explorer.votes, explorer.pick(0)[0], [0, 0], say="there are no votes")
    assert_raises(InputError, write_page, explorer, tmp_path / "site", say="networks with name 'capsules', but this")
    assert Questions([explorer, explorer_of()]).about()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving([explorer_of()], 0) as address:
        yield address


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_a_part_for_each_slot_and_changes_them(
    open_page: Callable[..., Page], address: str, width: int
) -> None:
    page = open_page(address, width, fresh=True)
    page.locator(".apart figure").first.wait_for()
    assert page.locator(".apart figcaption").all_inner_texts() == ["slot 0", "slot 1", "slot 2"]
    assert page.locator("#capsules-heading").inner_text() == "Slots"
    assert "from 3 slots" in page.locator(".verdict").inner_text()
    assert not page.locator(".tour").is_visible()
    assert not page.locator(".routing").is_visible()
    assert not page.locator(".class-words").filter(visible=True).count()
    draw = "canvas => canvas.toDataURL()"
    before = page.locator(".whole").evaluate(draw)
    page.locator("input[name=capsule][value='2']").check()
    assert page.locator("#components-heading").inner_text() == "Components of slot 2"
    page.locator(".slider input").nth(0).evaluate("e => { e.value = e.max; e.dispatchEvent(new Event('input')); }")
    settle(page)
    assert page.locator(".whole").evaluate(draw) != before
    assert page.locator(".message").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
