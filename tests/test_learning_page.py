"""The page on which a layer learns, in a real browser: its numbers are torch's, and its controls work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import torchcaps
from torchcaps import load_pretrained
from torchcaps.plugins import import_file

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = DOCS / "assets" / "learning"
SHAPE = (5, 2, 2, 4)  # parts, wholes, components of a vote, components of a pose
DIALS = {"noise": 0.2, "distractors": 1}
VOTE = json.loads((SCRIPTS / "vote.json").read_text(encoding="utf-8"))
LEARNING = "document.querySelector('.learning').learning"
COMPUTE = """async ([seed, count, iterations, dials, steps]) => {
    const layer = await import("/assets/learning/layer.js"), random = layer.generator(seed);
    const weights = layer.firstWeights(random), scenes = layer.drawScenes(random, count, dials);
    const { loss, gradient } = layer.lossAndGradient(weights, scenes, iterations), first = [...weights];
    for (let n = 0; n < steps; n++) layer.step(weights, scenes, iterations, 0.5);
    const answers = scenes.map(({ poses }) => layer.forward(weights, poses, iterations));
    return {
        weights: first, loss, gradient: [...gradient], learned: [...weights],
        results: layer.evaluate(weights, scenes, iterations),
        poses: scenes.map(({ poses }) => [...poses]), labels: scenes.map(({ label }) => label),
        coupling: answers.map(({ coupling }) => [...coupling]),
        isDistractor: scenes.map(({ isDistractor }) => isDistractor),
    };
}"""


@pytest.fixture(scope="module")
def page_script() -> Any:
    return import_file(DOCS / "learning_page.py")


@pytest.fixture
def page(browser: Browser, page_script: Any) -> Iterator[Page]:
    errors: list[str] = []
    with page_script.served() as address:
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.set_default_timeout(20_000)  # milliseconds
        page.goto(f"{address}/assets/learning/")
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if is_error(line) else None)
        page.set_content('<div class="playground learning"></div><div class="playground one-vote"></div>')
        yield page
        page.close()
    assert errors == []


def is_error(line: Any) -> bool:
    return line.type == "error" and not line.location["url"].endswith("favicon.ico")


def opened(page: Page) -> Page:
    for script in ("learning", "vote"):
        page.add_script_tag(url=f"/assets/learning/{script}.js", type="module")
    page.locator(".side").first.wait_for()
    page.locator(".cell").first.wait_for()
    return page


def loss_of(weights: Tensor, poses: Tensor, labels: Tensor, iterations: int) -> tuple[Tensor, Any]:
    """Loss and routed capsules of the layer by the library."""
    votes = torch.einsum("ijdk,bik->bijd", weights, poses)
    routed = torchcaps.dynamic_routing(votes, iterations, return_coupling=True)
    return torchcaps.margin_loss(torchcaps.safe_norm(routed.poses), labels), routed


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_loss_gradient_and_learned_weights_are_those_of_torch(page: Page, iterations: int) -> None:
    steps = 20
    shown = page.evaluate(COMPUTE, [iterations, 12, iterations, DIALS, steps])
    poses = torch.tensor(shown["poses"], dtype=torch.float64).unflatten(1, (SHAPE[0], SHAPE[3]))
    labels = torch.tensor(shown["labels"])
    assert set(shown["labels"]) == {0, 1}
    weights = torch.tensor(shown["weights"], dtype=torch.float64).reshape(SHAPE).requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.5)
    for step in range(steps):
        loss, _ = loss_of(weights, poses, labels, iterations)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert weights.grad is not None
            assert weights.grad.abs().max() > 0.01
            assert loss.item() == pytest.approx(shown["loss"], abs=1e-9)
            torch.testing.assert_close(
                weights.grad.flatten(), torch.tensor(shown["gradient"], dtype=torch.float64), atol=1e-9, rtol=1e-9
            )
        optimizer.step()
    learned = torch.tensor(shown["learned"], dtype=torch.float64)
    torch.testing.assert_close(weights.detach().flatten(), learned, atol=1e-8, rtol=1e-8)

    loss, routed = loss_of(weights, poses, labels, iterations)
    lengths, results = routed.poses.norm(dim=2), shown["results"]
    assert results["loss"] == pytest.approx(loss.item(), abs=1e-8)
    assert results["accuracy"] == pytest.approx((lengths.argmax(1) == labels).double().mean().item())
    assert results["winner"] == pytest.approx(lengths.amax(1).mean().item(), abs=1e-6)
    coupling = routed.coupling
    assert coupling is not None
    torch.testing.assert_close(
        coupling.detach().flatten(1), torch.tensor(shown["coupling"], dtype=torch.float64), atol=1e-8, rtol=1e-8
    )
    with_right, strange = coupling[torch.arange(12), :, labels], torch.tensor(shown["isDistractor"])
    assert strange.sum(1).tolist() == [DIALS["distractors"]] * 12
    assert results["own"] == pytest.approx(with_right[~strange].mean().item(), abs=1e-8)
    assert results["distractor"] == pytest.approx(with_right[strange].mean().item(), abs=1e-8)


@pytest.mark.browser
def test_a_single_part_says_nothing_about_the_whole(page: Page) -> None:
    """Mean and covariance of the pose of each part are the same for both wholes and for distractors."""
    shown = page.evaluate(COMPUTE, [5, 6000, 1, {"noise": 0, "distractors": 2}, 0])
    poses = torch.tensor(shown["poses"]).unflatten(1, (SHAPE[0], SHAPE[3]))
    labels, strange = torch.tensor(shown["labels"]), torch.tensor(shown["isDistractor"])
    assert labels.double().mean().item() == pytest.approx(0.5, abs=0.03)
    for part in range(SHAPE[0]):
        for group in (labels == 0, labels == 1, strange[:, part], ~strange[:, part]):
            of_group = poses[group, part]
            assert of_group.mean(0).abs().max() < 0.08
            directions = torch.cov(of_group.T)
            expected = torch.tensor([[0.53, 0, 0.5, 0], [0, 0.53, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
            torch.testing.assert_close(directions, expected, atol=0.05, rtol=0)


@pytest.mark.browser
def test_both_layers_learn_and_one_iteration_is_uniform_coupling(page: Page) -> None:
    opened(page)
    page.get_by_label("Distractors").select_option("0")
    before = page.evaluate(f"{LEARNING}.results()")
    page.get_by_role("button", name="Train").click()
    # any step, because a loaded machine shows a single one too briefly to be seen
    page.get_by_text(re.compile(r"step [1-9]\d* of 300")).wait_for(timeout=120_000)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="One step").click()
    page.evaluate(f"{LEARNING}.advance(60)")
    after = page.evaluate(f"{LEARNING}.results()")
    for n in (0, 1):
        assert before[n]["accuracy"] < 0.9 < 0.99 < after[n]["accuracy"]
        assert f"Accuracy {100 * after[n]['accuracy']:.1f} %" in page.locator(".side").nth(n).inner_text()
    assert after[0] != after[1]
    page.get_by_label("Iterations").select_option("1")
    page.evaluate(f"{LEARNING}.advance(3)")
    routed, uniform = page.evaluate(f"{LEARNING}.results()")
    assert routed == uniform
    assert "uniform, too" in page.locator(".side h3").first.inner_text()


@pytest.mark.browser
def test_the_votes_of_the_shown_scene_are_thick_by_their_coupling(page: Page) -> None:
    opened(page)
    page.evaluate(f"{LEARNING}.advance(40)")
    page.get_by_role("button", name="Next scene").click()
    assert page.locator(".told").inner_text().startswith("Scene 2: a ")
    widths = [
        {line.get_attribute("stroke-width") for line in side.locator("[class^=input-] line").all()}
        for side in page.locator(".side").all()
    ]
    assert len(widths[0]) == 10, "five votes for two wholes"
    assert len(widths[1]) == 1, "uniform coupling"
    assert page.locator(".side").first.locator(".stranger").count() == 4, "two distractors vote for two wholes"


def test_the_numbers_of_the_vote_are_those_of_the_shipped_network(page_script: Any) -> None:
    assert (SCRIPTS / "vote.json").stat().st_size <= 50_000
    network = load_pretrained("compact")
    pixels = torch.tensor(VOTE["pixels"], dtype=torch.uint8).reshape(VOTE["shape"])
    fresh = page_script.one_vote(pixels)
    numbers = {"sum", "cells"}
    assert {name: fresh[name] for name in fresh.keys() - numbers} == {
        name: VOTE[name] for name in VOTE.keys() - numbers
    }
    for old, new in zip([*VOTE["cells"], {"sum": VOTE["sum"]}], [*fresh["cells"], {"sum": fresh["sum"]}], strict=True):
        for name in old:
            assert_near(old[name], new[name])
    output = network(pixels[None, None].float() / 255)
    torch.testing.assert_close(
        torchcaps.squash(torch.tensor(VOTE["sum"])), output.capsules[0, VOTE["digit"]].detach(), atol=1e-3, rtol=0
    )


def assert_near(some: Any, others: Any) -> None:
    torch.testing.assert_close(torch.tensor(some), torch.tensor(others), atol=3e-4, rtol=0)


@pytest.mark.browser
def test_a_clicked_cell_shows_its_vote_step_by_step(page: Page) -> None:
    opened(page)
    for cell in (0, 15):  # 15: row 3, column 4
        computed = page.evaluate(f"document.querySelector('.one-vote').vote.compute({cell})")
        one = VOTE["cells"][cell]
        vote = torch.tensor(one["matrix"], dtype=torch.float64) @ torch.tensor(one["pose"], dtype=torch.float64)
        total = torch.tensor(VOTE["sum"], dtype=torch.float64)
        assert_near(computed["vote"], vote.tolist())
        assert_near(computed["weighted"], (one["coupling"] * vote).tolist())
        assert_near(computed["others"], (total - one["coupling"] * vote).tolist())
        assert_near(computed["capsule"], torchcaps.squash(total).tolist())
    page.get_by_role("button", name="Row 3, column 4").click()
    says = page.locator(".one-vote .says")
    assert "row 3, column 4" in says.inner_text()
    for _ in range(16):
        page.locator(".one-vote").get_by_role("button", name="Next").click()
    assert says.inner_text().startswith("Component 16 of the vote for the 4: ")
    assert f"= {vote[15]:.2f}".replace("-", "−") in says.inner_text()
    page.locator(".one-vote").get_by_role("button", name="Next").click()
    assert f"the share {one['coupling']:.2f} of this vote (uniform: 0.10)" in says.inner_text()
    for _ in range(2):
        page.locator(".one-vote").get_by_role("button", name="Next").click()
    length = float(torchcaps.squash(total).norm())
    assert f"a length of {length:.2f}" in says.inner_text()
    assert page.locator(".one-vote").get_by_role("button", name="Next").is_disabled()
    page.locator(".cell.chosen").press("ArrowDown")
    assert "row 4, column 4" in says.inner_text()
