from __future__ import annotations

import numpy as np
import pytest
import torch

from torchcaps.analysis import figure_samples
from torchcaps.datasets import ImageSet, PairSet
from torchcaps.errors import InputError


@pytest.fixture
def image_set(make_images) -> ImageSet:
    return ImageSet(make_images(7, (3, 6, 9)), torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_the_first_images_are_shown_in_order_with_their_names(image_set, words):
    figure = figure_samples(image_set, ["ant", "bee", "cow"], rows=2, columns=3, title="Insects?")
    shown = figure.axes[0].images
    assert len(shown) == 6
    np.testing.assert_allclose(shown[1].get_array(), image_set.images[1].permute(1, 2, 0) / 255)
    assert words(figure) == ["Insects?", *["ant", "bee", "cow"] * 2]
    places = [image.get_extent() for image in shown]
    assert places[0][0] < places[1][0]  # side by side
    assert places[0][2] < places[3][3]  # then below
    width, height = places[0][1] - places[0][0], places[0][2] - places[0][3]
    assert width / height == pytest.approx(9 / 6)


def test_fewer_images_than_places_are_all_shown(image_set, words):
    figure = figure_samples(image_set)
    assert len(figure.axes[0].images) == 7
    assert words(figure) == ["0", "1", "2", "0", "1", "2", "0"]


def test_grey_images_and_long_names(make_images, words):
    figure = figure_samples(ImageSet(make_images(2), torch.tensor([0, 1])), ["x", "n" * 200])
    assert figure.axes[0].images[0].get_array().shape == (8, 10, 3)
    assert words(figure)[1].endswith("…")
    assert figure.get_figwidth() < 4


def test_bad_sheets(image_set):
    with pytest.raises(InputError, match="rows must be"):
        figure_samples(image_set, rows=0)
    with pytest.raises(InputError, match="columns must be"):
        figure_samples(image_set, columns=0)
    with pytest.raises(InputError, match="label is 2, but there are only 2"):
        figure_samples(image_set, ["ant", "bee"])


def test_several_objects_in_an_image_are_all_named(make_images, words):
    pairs = ImageSet(make_images(2), torch.tensor([[0, 2], [1, 0]]))
    assert words(figure_samples(pairs, ["ant", "bee", "cow"])) == ["ant + cow", "bee + ant"]


def test_pairs_that_are_made_when_asked_for(image_set, words):
    pairs = PairSet(image_set, max_shift=1)
    figure = figure_samples(pairs, ["ant", "bee", "cow"], rows=1, columns=4)
    shown = pairs.preview(4)
    assert [word.split(" + ")[0] for word in words(figure)] == ["ant", "bee", "cow", "ant"]
    np.testing.assert_allclose(figure.axes[0].images[3].get_array(), shown.images[3].permute(1, 2, 0) / 255)


def test_names_are_drawn_as_they_are_and_control_characters_written_out(make_images, words):
    figure = figure_samples(ImageSet(make_images(2), torch.tensor([0, 1])), ["US$ $x^2$", "a\x1b[31m"])
    assert words(figure) == ["US$ $x^2$", r"a\x1b[31m"]
