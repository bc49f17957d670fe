"""The page without a server: its answers, computed in a real browser, are those of the server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from explorer_support import served, settle, shipped, small_network
from torchcaps.errors import InputError
from torchcaps.explorer import Explorer, write_page
from torchcaps.explorer.questions import Questions, encode
from torchcaps.explorer.state import shipped_images

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOLERANCE = 1e-4
ASK = "([name, question]) => import('./ask.js').then(({ ask }) => ask(name, question))"


def numbers(answer: Any) -> np.ndarray:
    """All numbers of an answer in one row; bytes in base64 too, as pixels of 0..1."""
    if isinstance(answer, dict):
        answer = [value for name, value in sorted(answer.items()) if name not in ("caveats", "inputs")]
    if isinstance(answer, list):
        return np.concatenate([numbers(each) for each in answer]) if answer else np.zeros(0)
    if isinstance(answer, str) and not answer.replace(".", "").isdigit():
        return np.frombuffer(base64.b64decode(answer), np.uint8) / 255
    return np.array([float(answer)])


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("task", [None, "classes", "ordinal"])
def test_answers_in_the_browser_are_those_of_the_server(
    open_page: Callable[..., Page], tmp_path: Path, task: Any
) -> None:
    if task is None:
        explorer = shipped()
    else:  # weights that are not half precision; a ReLU within the convolution; wider strides
        explorer = Explorer(small_network("sabour2017", 10, (1, 28, 28), task=task), images=shipped_images())
    write_page(explorer, tmp_path / "site")
    questions = Questions([explorer])
    with served(tmp_path / "site") as address:
        page = open_page(f"{address}#test=3")
        settle(page)

        def ask(name: str, **question: Any) -> Any:
            """The browser's answer, held to the server's."""
            found = page.evaluate(ASK, [name, question])
            wanted = json.loads(questions.answer(name, question))
            assert found.keys() == wanted.keys()
            if name != "pick":
                assert found.get("caveats") == wanted.get("caveats")
                # maps are levels of 1/127, pixels of 1/255: rounding may fall on either side
                loose = np.array([numbers(found), numbers(wanted)])
                assert np.abs(loose[0] - loose[1]).max() <= 1.01 / 255
                for exact in ("scores", "capsules", "agreement", "coupling"):
                    if exact in found:
                        np.testing.assert_allclose(numbers(found[exact]), numbers(wanted[exact]), atol=TOLERANCE)
            return wanted

        for index in range(0, 50, 5):
            pixels = ask("pick", index=index)["pixels"]
            view = ask("look", pixels=pixels)
            ask("decode", classes=view["present"], poses=[view["capsules"][view["present"][0]]])
        other = ask("pick", index=4)["pixels"]
        for iterations in (1, 5):
            routed = ask("look", pixels=other, iterations=iterations)["routing"]
            assert len(routed["maps"]) == iterations
        ask("votes", pixels=other, cell=[2, 5])
        ask("votes", pixels=other, cell=[0, 1], iterations=4)
        noise = np.random.default_rng(0).integers(0, 256, (1, 28, 28), np.uint8)
        assert ask("look", pixels=encode(noise))["caveats"] or task == "ordinal"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scale", [None, (0.0, 128.0), (0.0, 4095.0)])
def test_a_file_is_read_in_the_range_of_the_network(
    open_page: Callable[..., Page], tmp_path: Path, scale: tuple[float, float] | None
) -> None:
    explorer = shipped()
    explorer.scale, explorer.fit = scale, "stretch"
    write_page(explorer, tmp_path / "site")
    grey = np.repeat(np.arange(28, dtype=np.uint8)[:, None] * 6, 56, 1)  # twice as wide as high
    with served(tmp_path / "site") as address:
        page = open_page(f"{address}#test=3")
        settle(page)
        for bits, numbers in ((8, grey), (16, grey.astype(np.uint16) * 257)):
            file = io.BytesIO()
            Image.fromarray(numbers).save(file, "PNG")
            question = ["read", {"name": "ramp.png", "data": base64.b64encode(file.getvalue()).decode()}]
            if scale is None or (scale[1] < 256 and bits == 8):
                pixels = np.frombuffer(base64.b64decode(page.evaluate(ASK, question)["pixels"]), np.uint8)
                (wanted,) = explorer.read("ramp.png", file.getvalue()).image
                assert np.abs(pixels.reshape(28, 28).astype(int) - wanted).max() <= 2
            else:
                with pytest.raises(Exception, match="This page reads images of 8 bits, but the network takes"):
                    page.evaluate(ASK, question)


@pytest.mark.slow
@pytest.mark.browser
def test_a_file_without_a_server_says_what_it_needs(browser: Browser, tmp_path: Path) -> None:
    write_page(shipped(), tmp_path / "site")
    page = browser.new_page()
    page.goto((tmp_path / "site" / "index.html").as_uri())
    page.get_by_text("A saved page needs a web server: python -m http.server").wait_for()
    page.close()


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (small_network("baseline-cnn"), "name 'capsules', but this one has 'cnn'"),
        (small_network("sabour2017", softmax_over="inputs"), "softmax_over 'outputs'"),
        (small_network("sabour2017", primary_padding=1), "primary_padding 0"),
        (small_network("sabour2017", decoder=None), "decoder.name 'dense'"),
    ],
)
def test_a_network_that_the_page_cannot_compute_is_refused(tmp_path: Path, network: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        write_page(Explorer(network), tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="exists already; choose a new or an empty folder"):
        write_page(Explorer(small_network()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
