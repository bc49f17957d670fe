from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.text import Text

from torchcaps.analysis import Reconstructions, figure_reconstructions, reconstruct, trace_routing
from torchcaps.analysis.figures import WRONG
from torchcaps.errors import InputError

LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def test_images_reconstructions_and_scores_belong_together(model, make_images):
    images = make_images(6)
    result = reconstruct(model, images, LABELS, batch_size=4)
    output = model.eval()(images / 255)
    np.testing.assert_allclose(result.images, images / 255)
    np.testing.assert_allclose(result.reconstructions, output.reconstruction.detach(), atol=1e-6)
    np.testing.assert_array_equal(result.classes, output.lengths.argmax(1))
    np.testing.assert_array_equal(result.decoded, result.classes)
    np.testing.assert_array_equal(result.labels, LABELS)
    expected = ((output.reconstruction.detach() - images / 255) ** 2).sum((1, 2, 3))
    np.testing.assert_allclose(result.squared_error, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "capsule", "by_label"),
    [
        ("label-in-training", "source", False),
        ("label", "source", True),
        ("longest", "label", True),
        ("label", "longest", False),
    ],
)
def test_which_capsule_is_decoded(make_model, make_images, mask, capsule, by_label):
    model = make_model(decoder_mask=mask)
    images = make_images(6)
    result = reconstruct(model, images, LABELS, capsule=capsule)
    expected = model.eval()(images / 255, LABELS if by_label else None).reconstruction.detach()
    np.testing.assert_allclose(result.reconstructions, expected, atol=1e-6)
    np.testing.assert_array_equal(result.decoded, LABELS if by_label else result.classes)


def test_images_that_ask_for_a_gradient_are_images(model, make_images):
    images = make_images(3).float() / 255
    expected = reconstruct(model, images)
    result = reconstruct(model, images.requires_grad_())
    np.testing.assert_array_equal(result.images, expected.images)
    np.testing.assert_array_equal(trace_routing(model, images).images, expected.images)


def test_without_labels_the_longest_capsule_is_decoded(make_model, make_images):
    result = reconstruct(make_model(decoder_mask="label"), make_images(3))
    assert result.labels is None
    np.testing.assert_array_equal(result.decoded, result.classes)


def test_what_cannot_be_reconstructed(model, cnn, make_model, make_images):
    images = make_images(2)
    with pytest.raises(InputError, match=r"BaselineCNN has no decoder.*sabour2017") as error:
        reconstruct(cnn, images)
    assert "keras-tutorial" not in str(error.value)  # it has capsules, but no decoder
    with pytest.raises(InputError, match="has no decoder"):
        reconstruct(make_model(decoder=False), images)
    with pytest.raises(InputError, match="needs the labels"):
        reconstruct(model, images, capsule="label")
    with pytest.raises(InputError, match="capsule must be"):
        reconstruct(model, images, capsule="shortest")


@pytest.fixture
def result() -> Reconstructions:
    pixels = np.random.default_rng(0).random((3, 3, 8, 6), dtype=np.float32)
    lengths = np.array([[0.91, 0.1], [0.2, 0.62], [0.33, 0.1]], dtype=np.float32)
    labels, classes = np.array([0, 0, 0]), np.array([0, 1, 0])
    return Reconstructions(pixels, 1 - pixels, labels, classes, lengths, classes)


def test_the_figure_names_label_class_and_length_and_marks_what_is_wrong(result, words):
    figure = figure_reconstructions(result, ["cat", "dog"], columns=2, title="Two animals")
    found = words(figure)
    assert {"Two animals", "image", "reconstruction", "label", "class", "length", "0.91", "0.62", "0.33"} <= set(found)
    assert found.count("cat") == 3 + 2
    assert "decoded" not in found
    red = [text.get_text() for text in figure.findobj(Text) if to_hex(text.get_color()) == WRONG]
    assert red == ["dog"]
    shown = [image.get_array() for image in figure.axes[0].images]
    assert len(shown) == 6
    np.testing.assert_allclose(shown[0], result.images[0].transpose(1, 2, 0))
    np.testing.assert_allclose(shown[2], result.reconstructions[0].transpose(1, 2, 0))  # under the row of images


def test_the_figure_says_which_capsule_was_decoded_where_it_is_not_the_longest(result, words):
    by_label = Reconstructions(
        result.images, result.images, result.labels, result.classes, result.lengths, result.labels
    )
    assert "decoded" in words(figure_reconstructions(by_label))


def test_the_figure_without_labels(result, words):
    unknown = Reconstructions(result.images, result.images, None, result.classes, result.lengths, result.classes)
    figure = figure_reconstructions(unknown)
    assert "label" not in words(figure)
    assert all(to_hex(text.get_color()) != WRONG for text in figure.findobj(Text))


def test_bad_figures(result):
    with pytest.raises(InputError, match="columns"):
        figure_reconstructions(result, columns=0)
    with pytest.raises(InputError, match="2 names"):
        figure_reconstructions(result, ["cat"])


# ---- several objects in an image

PAIRS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])


@pytest.mark.parametrize("capsule", ["source", "label"])
def test_each_object_is_reconstructed_by_itself(make_model, make_images, capsule):
    model, images = make_model(objects=2).eval(), make_images(6)
    result = reconstruct(model, images, PAIRS, capsule=capsule, batch_size=4)
    output = model(images / 255, PAIRS if capsule == "label" else None)
    np.testing.assert_allclose(result.reconstructions, output.reconstruction.detach(), atol=1e-6)
    np.testing.assert_array_equal(result.decoded, output.decoded)
    np.testing.assert_array_equal(result.classes, output.lengths.argsort(1, descending=True)[:, :2])
    whole = output.reconstruction.detach().sum(1).clamp(max=1)
    np.testing.assert_allclose(result.full, whole, atol=1e-6)
    np.testing.assert_allclose(result.squared_error, ((whole - images / 255) ** 2).sum((1, 2, 3)), rtol=1e-5)


@pytest.fixture
def pair_result() -> Reconstructions:
    """One pair right, in the other order; one wrong. Object 1 is bright on the left, object 2 on the right."""
    drawn = np.zeros((2, 2, 1, 4, 6), dtype=np.float32)
    drawn[:, 0, :, :, :4], drawn[:, 1, :, :, 2:] = 1.0, 0.5
    classes, lengths = np.array([[1, 0], [2, 0]]), np.array([[0.8, 0.9, 0.1], [0.6, 0.2, 0.7]])
    return Reconstructions(drawn.max(1), drawn, np.array([[0, 1], [2, 1]]), classes, lengths, classes)


def test_pairs_are_drawn_apart_in_two_colours_and_overlaid(pair_result, words):
    assert pair_result.right.tolist() == [True, False]
    figure = figure_reconstructions(pair_result, ["ant", "bee", "cow"])
    found = words(figure)
    assert {"image", "object 1", "object 2", "both", "ant + bee", "bee + ant", "cow + bee", "cow + ant"} <= set(found)
    assert {"0.90 0.80", "0.70 0.60"} <= set(found)
    red = [text.get_text() for text in figure.findobj(Text) if to_hex(text.get_color()) == WRONG]
    assert red == ["cow + ant"]
    shown = [image.get_array() for image in figure.axes[0].images]
    assert len(shown) == 2 * 4
    first, second, both = shown[2], shown[4], shown[6]
    np.testing.assert_allclose(first[0, 0], [0, 1, 0])  # green
    np.testing.assert_allclose(second[0, 5], [0.5, 0, 0.5])  # magenta
    np.testing.assert_allclose(both[0, 0], [0, 1, 0])
    np.testing.assert_allclose(both[0, 3], [0.5, 1, 0.5])  # where they overlap, towards white
    np.testing.assert_allclose(both[0, 5], [0.5, 0, 0.5])


def test_more_than_two_objects_and_colour_images(words):
    drawn = np.random.default_rng(0).random((2, 3, 3, 4, 4), dtype=np.float32)
    classes, lengths = np.array([[0, 1, 2], [3, 2, 1]]), np.random.default_rng(1).random((2, 4))
    figure = figure_reconstructions(Reconstructions(drawn[:, 0], drawn, None, classes, lengths, classes))
    assert {"object 3", "together", "3 + 2 + 1"} <= set(words(figure))
    assert len(figure.axes[0].images) == 2 * 5
    for image in figure.axes[0].images[2:]:
        assert 0 <= image.get_array().min() <= image.get_array().max() <= 1


def test_right_needs_labels(model, make_images):
    with pytest.raises(InputError, match="without labels"):
        _ = reconstruct(model, make_images(2)).right


def test_too_many_images_for_one_figure(result):
    many = Reconstructions(*(np.repeat(part, 400, 0) for part in vars(result).values()))
    with pytest.raises(InputError, match="at most 1,000 images are drawn in one figure, got 1,200"):
        figure_reconstructions(many)
