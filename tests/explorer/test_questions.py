"""Questions from the browser: answered in plain JSON, and by a sentence where they are wrong."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from explorer_support import small_network
from torchcaps.analysis import trace_routing
from torchcaps.datasets import ImageSet
from torchcaps.explorer import Explorer
from torchcaps.explorer.questions import OBJECT_COLOURS, Questions, describe

SHAPE = (1, 18, 20)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


def encode(array: np.ndarray | bytes) -> str:
    return base64.b64encode(array).decode()


def decode(text: str, channels: int = 1) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(channels, *SHAPE[1:])


class Page:
    """Asks as the page does: through JSON, both ways."""

    def __init__(self, *explorers: Explorer) -> None:
        self.questions = Questions(explorers)

    def __call__(self, name: str, /, **question: Any) -> Any:
        return json.loads(self.questions.answer(name, json.loads(json.dumps(question))))


def explorer_with(**fields: Any) -> Explorer:
    images = ImageSet(torch.from_numpy(PIXELS)[None], torch.tensor([2]))
    return Explorer(small_network(**fields), ["a", "b", "c", "d"], name="small", images=images)


@pytest.fixture
def explorer() -> Explorer:
    return explorer_with()


@pytest.fixture
def ask(explorer: Explorer) -> Page:
    return Page(explorer)


def test_the_page_is_told_what_to_show(explorer: Explorer) -> None:
    about = json.loads(json.dumps(describe(explorer)))
    assert (about["name"], about["what"], about["prepares"]) == ("small", "", False)
    assert about["classes"] == ["a", "b", "c", "d"]
    assert (about["shape"], about["objects"], about["components"], about["images"]) == ([1, 18, 20], 1, 5, 1)
    assert (about["noPose"], about["noRouting"]) == (None, None)
    assert about["colours"] == ["rgb(255, 128, 0)", "rgb(51, 153, 255)"]
    assert describe(Explorer(small_network("baseline-cnn")))["noPose"] == "A convolutional network has no capsules."


def test_looking(explorer: Explorer, ask: Page) -> None:
    view, answer = explorer.look(PIXELS), ask("look", pixels=encode(PIXELS))
    np.testing.assert_allclose(answer["scores"], view.scores, atol=1e-4)
    np.testing.assert_allclose(answer["capsules"], view.capsules, atol=1e-4)
    assert answer["present"] == view.present
    routing = answer["routing"]
    assert view.routing is not None
    iterations, shown, height, width = np.shape(view.routing["maps"])
    assert (routing["size"], routing["classes"]) == ([height, width], [0, 1, 2, 3])
    assert np.shape(routing["means"]) == np.shape(routing["scores"]) == (iterations, shown)
    last = np.frombuffer(base64.b64decode(routing["maps"][-1][2]), np.uint8).reshape(height, width)
    np.testing.assert_array_equal(last, view.routing["maps"][-1][2])
    away = np.sign(last - 128.0) * ((last - 128.0) / 127) ** 2 * routing["reach"]  # as the page turns it back
    coupling = trace_routing(explorer.model, torch.from_numpy(PIXELS)[None]).maps[:, 0].mean(2)
    np.testing.assert_allclose(routing["uniform"] + away, coupling[-1, 2], atol=0.02 * routing["reach"])
    np.testing.assert_allclose(routing["range"], [coupling.min(), coupling.max()], atol=1e-4)


def test_decoding_two_capsules(explorer: Explorer, ask: Page) -> None:
    poses = [[0.1, -0.2, 0, 1, 0.5], [1, 0, 0, 0, -1]]
    answer = ask("decode", classes=[1, 3], poses=poses)
    alone = explorer.decode([1, 3], np.array(poses, np.float32))
    coloured = [one * np.array(colour)[:, None, None] / 255 for one, colour in zip(alone, OBJECT_COLOURS, strict=True)]
    for text, wanted in zip(answer["apart"], coloured, strict=True):
        np.testing.assert_allclose(decode(text, 3), 255 * wanted, atol=1)
    np.testing.assert_allclose(decode(answer["whole"], 3), 255 * sum(coloured).clip(0, 1), atol=1)


def test_pixels_come_back_as_they_went(ask: Page) -> None:
    """What is picked, or read from a file, can be looked at; an image of the right size is not changed."""
    picked = ask("pick", index=0)
    np.testing.assert_array_equal(decode(picked["pixels"]), PIXELS)
    assert picked["label"] == "c"
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(buffer, "PNG")
    answer = ask("read", name="x.png", data=encode(buffer.getvalue()))
    np.testing.assert_array_equal(decode(answer["pixels"]), PIXELS)
    assert ask("look", pixels=answer["pixels"]) == ask("look", pixels=encode(PIXELS))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("look", {}, "The question must have 'pixels' of type str, got NoneType."),
    ("look", {"network": 1, "pixels": "AAAA"}, "Networks go from 0 to 0, got 1."),
    ("progress", {}, "No network learns here; start the explorer with --train."),
    ("look", {"pixels": "AAAA"}, "may be from a link for another network."),
    ("look", {"pixels": "!"}, "The image is not valid base64; it may be from a link that was cut."),
    ("look", {"pixels": "ä"}, "The image is not valid base64; it may be from a link that was cut."),
    ("look", {"pixels": encode(PIXELS), "iterations": 10**9}, "Iterations must be"),
    *(
        (
            "votes",
            {"pixels": encode(PIXELS), "cell": wrong},
            "A cell must be two whole numbers, its row and its column.",
        )
        for wrong in ([], [0], [0, True], [0, "1"], [0] * 3)
    ),
    ("votes", {"pixels": encode(PIXELS), "cell": [0, 10**9]}, "Cells, row and column, go from [0, 0] to [0, 1]"),
    ("decode", {"classes": [9], "poses": [[0] * 5]}, "classes of 0 to 3, and for each a capsule of 5 components"),
    *(
        ("decode", {"classes": wrong, "poses": [[0] * 5]}, "Classes must be whole numbers")
        for wrong in ([True], [0.5], [2**70], [[0, 1]], [])
    ),
    *(
        ("decode", {"classes": [0], "poses": wrong}, "poses rows of numbers")
        for wrong in ([[0, 0], [0]], [0], [["1"] * 5], [[None] * 5], [[10**400] * 5])
    ),
    ("decode", {"classes": [0], "poses": [[float("nan")] * 5]}, "components of at most ±1000"),
    ("decode", {"classes": [0], "poses": [[1e39] * 5]}, "components of at most ±1000"),
    ("pick", {"index": 1}, "Test images go from 0 to 0, got 1."),
    ("read", {"name": "cat.png", "data": encode(b"no image")}, "“cat.png” cannot be read as an image"),
]


def test_a_wrong_question_gets_a_sentence(ask: Page) -> None:
    for name, question, sentence in WRONG:
        (said,) = ask(name, **question).values()
        assert sentence in said, question
        assert said[0].isupper() or said[0] == "“"
        assert said.endswith(".")
    for plain in (None, [], "pixels"):
        assert "must have 'pixels'" in json.loads(ask.questions.answer("look", plain))["error"]
