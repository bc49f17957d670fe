"""Questions from the browser: answered in plain JSON, and by a sentence where they are wrong."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

from explorer_support import png, small_network
from torchcaps.datasets import ImageSet
from torchcaps.explorer import Explorer
from torchcaps.explorer.questions import OBJECT_COLOURS, Questions

SHAPE = (1, 18, 20)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


def encode(array: np.ndarray | bytes) -> str:
    return base64.b64encode(array).decode()


def decode(text: str, channels: int = 1) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(channels, *SHAPE[1:])


class Page:
    """Asks as the page does: through JSON, both ways."""

    def __init__(self, explorer: Explorer) -> None:
        self.questions = Questions([explorer])

    def __call__(self, name: str, /, **question: Any) -> Any:
        return json.loads(self.questions.answer(name, json.loads(json.dumps(question))))


@pytest.fixture
def explorer() -> Explorer:
    images = ImageSet(torch.from_numpy(PIXELS)[None], torch.tensor([2]))
    return Explorer(small_network(), ["a", "b", "c", "d"], name="small", images=images)


@pytest.fixture
def ask(explorer: Explorer) -> Page:
    return Page(explorer)


def test_looking(explorer: Explorer, ask: Page) -> None:
    view, answer = explorer.look(PIXELS), ask("look", pixels=encode(PIXELS))
    for name in ("scores", "capsules", "present"):
        np.testing.assert_allclose(answer[name], getattr(view, name), atol=1e-4)
    for name in ("size", "classes", "means", "scores", "uniform", "reach", "largest"):
        np.testing.assert_allclose(answer["routing"][name], view.routing[name], atol=1e-4)
    assert answer["routing"]["maps"] == [[encode(each) for each in row] for row in view.routing["maps"]]


@pytest.mark.parametrize("preset", ["sabour2017", "sabour2017-multimnist"])
def test_a_look_has_the_picture_that_decode_answers(preset: str) -> None:
    ask = Page(Explorer(small_network(preset)))
    view = ask("look", pixels=encode(PIXELS))
    poses = [view["capsules"][j] for j in view["present"]]
    assert view["decoded"] == ask("decode", classes=view["present"], poses=poses)
    assert ask("look", pixels=encode(PIXELS), iterations=5)["decoded"] != view["decoded"]


def test_a_look_of_a_network_without_decoder_has_no_picture() -> None:
    for network in (small_network(decoder=False), small_network("baseline-cnn")):
        assert Page(Explorer(network))("look", pixels=encode(PIXELS))["decoded"] is None


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
    answer = ask("read", name="x.png", data=encode(png(PIXELS[0])))
    np.testing.assert_array_equal(decode(answer["pixels"]), PIXELS)
    assert ask("look", pixels=answer["pixels"]) == ask("look", pixels=encode(PIXELS))


LOOK, ZERO, MANY = {"pixels": encode(PIXELS)}, [0] * 5, 10**9
CUT = "The image is not valid base64; a link may have been cut off."
CAPSULES = "1 to 4 classes of 0 to 3, and for each a capsule of 5 components within ±1000."
FIT_NOT = (([4], [ZERO]), ([2**70], [ZERO]), ([], [ZERO]), ([0, 1], [ZERO]), ([0] * 5, [ZERO] * 5))
FIT_NOT += (([0], [[0] * 4]), ([0], ZERO), ([0], [[None] * 5]), ([0], [[1e39] * 5]))
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("look", {}, "Pixels must be a text, got None."),
    ("look", {"network": 1, "pixels": "AAAA"}, "Network must be 0 to 0, got 1."),
    ("look", {"pixels": "AAAA"}, "the link may be for another network."),
    *(("look", {"pixels": wrong}, CUT) for wrong in ("!", "ä")),
    ("look", LOOK | {"iterations": MANY}, "Iterations must be"),
    *(("votes", LOOK | {"cell": wrong}, "Cell must ") for wrong in (7, [], [0], [0, True], [0, "1"], [0] * 3)),
    ("votes", LOOK | {"cell": [0, MANY]}, "Cell (row, column) must be [0, 0] to [0, 1]"),
    *(("decode", {"classes": classes, "poses": poses}, CAPSULES) for classes, poses in FIT_NOT),
    ("decode", {"classes": [0], "poses": [[float("nan")] * 5]}, CAPSULES),
    *(("decode", {"classes": wrong, "poses": [ZERO]}, "Classes must be an int") for wrong in ([True], [0.5], [[0, 1]])),
    *(("decode", {"classes": [0], "poses": wrong}, "Poses must be rows") for wrong in ([[0, 0], [0]], [[10**400] * 5])),
    ("pick", {"index": 1}, "The number of a test image must be 0 to 0, got 1."),
    ("read", {"name": "cat.png", "data": encode(b"no image")}, "“cat.png” cannot be read as an image"),
]


def test_a_wrong_question_gets_a_sentence(ask: Page) -> None:
    for name, question, sentence in WRONG:
        (said,) = ask(name, **question).values()
        assert sentence in said, question
        assert said[0].isupper() or said[0] == "“"
        assert said.endswith(".")
    for plain in (None, [], "pixels"):
        assert "Pixels must" in json.loads(ask.questions.answer("look", plain))["error"]
