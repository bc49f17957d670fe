import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.text import Text

from torchcaps.analysis import Reconstructions, reconstruct
from torchcaps.analysis.figures import WRONG

PAIRS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])


@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("mask", ["label-in-training", "label", "longest"])
def test_images_reconstructions_and_scores_belong_together(make_model, make_images, mask, objects):
    model, images, labels = (
        make_model(decoder_mask=mask, objects=objects),
        make_images(6),
        PAIRS[:, :objects].squeeze(1),
    )
    for given, shown in ((labels, images), (None, (images / 255).requires_grad_())):
        result = reconstruct(model, shown, given)
        targets = given if mask == "label" else None
        output = model.eval()(images / 255, targets)
        np.testing.assert_allclose(result.images, images / 255)
        np.testing.assert_allclose(result.reconstruction, output.reconstruction.detach(), atol=1e-6)
        np.testing.assert_array_equal(result.classes, output.scores.argsort(1, descending=True)[:, :objects].squeeze(1))
        np.testing.assert_array_equal(result.decoded, result.classes if targets is None else labels)
        whole = output.reconstruction.detach()
        whole = whole if objects == 1 else whole.sum(1).clamp(max=1)
        off = ((whole - images / 255) ** 2).sum((1, 2, 3))
        np.testing.assert_allclose(result.to_dict()["squared_error"], off, rtol=1e-5)
    assert result.right is result.to_dict()["num_correct"] is None  # without labels


def made(images: Any, drawn: Any, labels: Any, classes: Any, scores: Any) -> Reconstructions:
    found: Any = {"images": images, "reconstruction": drawn, "scores": scores, "caveats": [()] * len(images)}
    return Reconstructions(**found, labels=labels, classes=classes, decoded=classes)


def drawn_of(result: Reconstructions, *class_names: str):
    return dataclasses.replace(result, class_names=class_names or None).figures()[""]


def red_in(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if to_hex(text.get_color()) == WRONG]


@pytest.fixture
def result() -> Reconstructions:
    pixels = np.random.default_rng(0).random((3, 3, 8, 6), dtype=np.float32)
    lengths = np.array([[0.91, 0.1], [0.2, 0.62], [0.33, 0.1]], dtype=np.float32)
    return made(pixels, 1 - pixels, np.array([0, 0, 0]), np.array([0, 1, 0]), lengths)


def test_the_figure_names_label_class_and_length_and_marks_what_is_wrong(result, words):
    figure = drawn_of(result, "cat", "dog")
    found = words(figure)
    assert {"image", "reconstruction", "label", "class", "length", "0.91", "0.62", "0.33"} <= set(found)
    assert red_in(figure) == ["dog"]
    shown = [image.get_array() for image in figure.axes[0].images]
    assert len(shown) == 6
    np.testing.assert_allclose(shown[0], result.images[0].transpose(1, 2, 0))
    np.testing.assert_allclose(shown[3], result.reconstruction[0].transpose(1, 2, 0))  # under the row of images
    assert "decoded" not in found
    assert "decoded" in words(drawn_of(dataclasses.replace(result, decoded=result.labels)))
    unknown = drawn_of(dataclasses.replace(result, labels=None))
    assert "label" not in words(unknown)
    assert red_in(unknown) == []
    assert result.tables()[0].note[0].startswith("2 with the right class; squared error ")
    assert result.to_dict()["num_correct"] == 2


def test_pairs_are_drawn_apart_in_two_colours_and_overlaid(words):
    """One pair right, in the other order; one wrong. Object 1 is bright on the left, object 2 on the right."""
    drawn = np.zeros((2, 2, 1, 4, 6), dtype=np.float32)
    drawn[:, 0, :, :, :4], drawn[:, 1, :, :, 2:] = 1.0, 0.5
    classes, lengths = np.array([[1, 0], [2, 0]]), np.array([[0.8, 0.9, 0.1], [0.6, 0.2, 0.7]])
    result = made(drawn.max(1), drawn, np.array([[0, 1], [2, 1]]), classes, lengths)
    assert result.right.tolist() == [True, False]
    assert "1 with the right classes" in result.tables()[0].note[0]
    figure = drawn_of(result, "ant", "bee", "cow")
    assert {"object 1", "object 2", "together", "ant + bee", "bee + ant", "0.90 0.80", "0.70 0.60"} <= set(
        words(figure)
    )
    assert red_in(figure) == ["cow + ant"]
    shown = [image.get_array() for image in figure.axes[0].images]
    assert len(shown) == 2 * 4
    green, magenta, towards_white = [0, 1, 0], [0.5, 0, 0.5], [0.5, 1, 0.5]
    np.testing.assert_allclose(shown[2][0, 0], green)
    np.testing.assert_allclose(shown[4][0, 5], magenta)
    np.testing.assert_allclose(shown[6][0, [0, 5, 3]], [green, magenta, towards_white])


def test_more_than_two_objects_and_colour_images(words):
    drawn = np.random.default_rng(0).random((2, 3, 3, 4, 4), dtype=np.float32)
    figure = drawn_of(made(drawn[:, 0], drawn, None, np.array([[0, 1, 2], [3, 2, 1]]), drawn[:, 0, 0, 0]))
    assert {"object 3", "together", "3 + 2 + 1"} <= set(words(figure))
    assert len(figure.axes[0].images) == 2 * 5
