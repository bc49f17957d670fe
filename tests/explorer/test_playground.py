"""The playground of votes in a real browser: its numbers are the library's, and its votes are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchcaps
from explorer_support import small_network
from torchcaps.explorer import Explorer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PLAYGROUND = "document.querySelector('.playground').playground"
SHOW = f"changes => {{ {PLAYGROUND}.show(changes); return {PLAYGROUND}.rounds(); }}"


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Iterator[Page]:
    with serving([Explorer(small_network())], 0) as address:
        yield open_page(f"{address}/playground.html", fresh=True)


def expected(votes: torch.Tensor, routing: str, over: Any, iterations: int) -> dict[str, torch.Tensor]:
    """The last round by the library; the playground's names."""
    batch, active, zeros = votes[None], torch.ones(1, len(votes)).double(), torch.zeros(votes.shape[1]).double()
    if routing == "dynamic":
        last = torchcaps.routing_rounds(batch, iterations, softmax_over=over)[-1]._asdict()
        return {name: last[name] for name in ("logits", "coupling", "capsules", "agreement")} | {
            "sums": last["weighted_sum"]
        }
    if routing == "EM":
        routed = torchcaps.em_routing(batch, active, zeros, zeros, iterations, final_lambda=1.0, return_coupling=True)
        return {"coupling": routed.coupling, "capsules": routed.poses, "activations": routed.activations}
    routed = torchcaps.self_attention_routing(batch, return_coupling=True)
    return {"coupling": routed.coupling, "capsules": routed.poses}


def test_fifty_random_states_have_the_numbers_of_the_library(page: Page) -> None:
    random = torch.Generator().manual_seed(0)
    draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=random))  # noqa: E731
    for n in range(50):
        votes = torch.randn(draw(3, 8), draw(2, 3), 2, generator=random, dtype=torch.float64)
        state = ("dynamic", "self-attention", "EM")[n % 3], ("outputs", "inputs")[n // 3 % 2], draw(1, 5)
        routing, over, iterations = state
        shown = page.evaluate(
            SHOW, {"votes": votes.tolist(), "routing": routing, "over": over, "iterations": iterations, "round": 4}
        )[-1]
        for name, wanted in expected(votes, *state).items():
            torch.testing.assert_close(torch.tensor(shown[name], dtype=torch.float64), wanted[0], atol=1e-9, rtol=1e-9)
        cells = page.locator(".round tfoot tr:last-child td").all_inner_texts()
        assert cells == [f"{a:.2f}" for a in shown["activations"]]


def test_every_output_of_new_groups_gets_most_of_an_input(page: Page) -> None:
    page.evaluate(SHOW, {"votes": [[[1, 0]] * 3] * 4, "iterations": 3})
    for _ in range(10):
        page.get_by_role("button", name="New groups").click()
        coupling = torch.tensor(page.evaluate(f"{PLAYGROUND}.rounds()")[-1]["coupling"])
        assert set(coupling.argmax(1).tolist()) == {0, 1, 2}


def test_on_a_phone_every_number_is_in_sight(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate(SHOW, {"votes": [[[2, 2], [0.1, 0], [-2, -2]], [[-2, -2], [-2, -2], [2, 2]]] * 4, "round": 2})
    whole = page.locator(".playground").bounding_box()
    for table in page.locator(".round").all():
        assert table.bounding_box()["width"] <= whole["width"]


def test_a_vote_is_dragged_and_moved_by_keys_and_play_ends_at_the_last_iteration(page: Page) -> None:
    page.evaluate(
        SHOW, {"votes": [[[1, 0], [0, 1]]] * 3, "routing": "dynamic", "over": "outputs", "iterations": 2, "round": 0}
    )
    vote, length = page.locator(".vote").first, page.locator("figcaption output").first
    assert length.inner_text() == "length 0.69"  # a sum of 1.5: 2.25 / 3.25
    page.locator(".planes svg").first.scroll_into_view_if_needed()
    plane = page.locator(".planes svg").first.bounding_box()
    middle = plane["x"] + plane["width"] / 2, plane["y"] + plane["height"] / 2
    unit = plane["width"] / 4.4
    places = {vote.get_attribute("transform") for vote in page.locator(".planes svg").first.locator(".vote").all()}
    assert len(places) == 3, "equal votes lie side by side"
    page.mouse.move(middle[0] + unit, middle[1])
    page.mouse.down()
    page.mouse.move(middle[0] - unit, middle[1], steps=3)
    page.mouse.up()
    assert length.inner_text() == "length 0.20"  # one of three votes has turned round: a sum of 0.5
    vote.press("ArrowUp")
    assert "(0.50, 0.05)" in page.locator(".rounds").inner_text()
    page.get_by_role("button", name="Play").click()
    page.get_by_text("iteration 2 of 2").wait_for()
    page.get_by_role("button", name="Back").click()
    assert page.get_by_text("iteration 1 of 2").is_visible()
    assert page.get_by_role("button", name="Back").is_disabled()
