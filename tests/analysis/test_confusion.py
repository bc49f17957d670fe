from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from torchcaps.analysis import Evaluation, figure_confusion, save_figure


def evaluation(confusion, names=None) -> Evaluation:
    confusion = np.asarray(confusion)
    return Evaluation(confusion, 0.1, tuple(names or map(str, range(len(confusion)))))


def test_right_and_wrong_have_their_own_colours_and_each_cell_its_number(words):
    figure = figure_confusion(evaluation([[8, 2, 0], [0, 5, 0], [0, 0, 0]], ["ant", "bee", "cow"]))
    axes = figure.axes[0]
    wrong, right = (image.get_array() for image in axes.images)
    np.testing.assert_allclose(wrong[0, 1], 20)  # percent of the true class
    assert wrong.count() == 1
    np.testing.assert_allclose([right[0, 0], right[1, 1]], [80, 100])
    assert right.count() == 2  # no colour for a class without images
    numbers = {text.get_position(): text.get_text() for text in axes.texts}
    assert numbers == {(0, 0): "8", (1, 0): "2", (1, 1): "5"}  # x is the class given
    assert {"ant", "bee", "cow", "class given", "true class", "2 of 15 images wrong"} <= set(words(figure))


def test_without_an_error_there_is_no_scale_of_errors():
    figure = figure_confusion(evaluation(np.diag([3, 4])), title="Fine")
    assert len(figure.axes[0].images) == 1
    assert len(figure.axes) == 2


@pytest.mark.parametrize("classes", [2, 20, 50])
def test_many_classes_have_names_but_no_numbers(tmp_path, classes):
    names = [f"a rather long name {j}" for j in range(classes)]
    figure = figure_confusion(evaluation(np.eye(classes, dtype=np.int64) + 1, names))
    axes = figure.axes[0]
    assert (len(axes.texts) > 0) == (classes <= 20)
    assert len(axes.get_xticklabels()) == len(axes.get_yticklabels()) == classes
    figure.savefig(tmp_path / "a.png", dpi=30)


def test_a_thousand_classes_are_a_picture_of_bounded_size_without_names(tmp_path, words):
    confusion = np.diag(np.full(1000, 9))
    confusion[700, 200] = 1
    figure = figure_confusion(evaluation(confusion, [f"name {j}" for j in range(1000)]))
    assert len(words(figure)) < 50
    assert not [text for text in words(figure) if text.startswith("name")]
    with Image.open(save_figure(figure, tmp_path / "a.png")) as image:
        assert 2000 < max(image.size) < 4000
        red, green, blue = np.asarray(image.convert("RGB")).astype(int).transpose(2, 0, 1)[:, :, :2800]
    rows, columns = np.nonzero((red > 100) & (red - green > 80) & (red - blue > 80))
    assert 1 <= np.ptp(rows) <= 4  # the one wrong cell, in its own colour
    assert 1 <= np.ptp(columns) <= 4


def test_the_size_never_falls_as_classes_are_added():
    sizes = [figure_confusion(evaluation(np.eye(n, dtype=np.int64))).get_figheight() for n in (21, 120, 180, 181)]
    assert sizes == sorted(sizes)
    assert sizes[-1] < 20
