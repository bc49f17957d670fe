"""Accuracy, loss and confusion: of networks whose answers are known by hand, and as a figure."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps.analysis import Evaluation, evaluate
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import Losses, ModelOutput, Network


class Oracle(Network):
    """Gives each image the classes that its first pixels are; the loss of an image is its last pixel."""

    decoder = None

    def __init__(self, num_classes: int, objects: int = 1) -> None:
        super().__init__((1, 1, objects + 1), num_classes, objects)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images, targets=None, return_coupling=False):
        given = (images[:, 0, 0, :-1] * 255).round().long()
        lengths = torch.linspace(0.9, 0.7, self.objects).expand_as(given)
        return ModelOutput(torch.zeros(len(images), self.num_classes).scatter(1, given, lengths))

    def decoder_targets(self, targets):
        return None

    def loss(self, output, images, targets):
        total = (images[:, 0, 0, -1] * 255).mean()
        return Losses(total, total)


def oracle_set(given, labels, losses) -> ImageSet:
    rows = [[*np.atleast_1d(each), loss] for each, loss in zip(given, losses, strict=True)]
    return ImageSet(torch.tensor(rows, dtype=torch.uint8)[:, None, None], torch.tensor(labels))


SEVEN = oracle_set([0, 1, 2, 2, 1, 0, 0], [0, 1, 2, 1, 1, 2, 0], [0, 10, 20, 30, 40, 50, 200])
TRIPLES = oracle_set([[2, 0, 1], [0, 3, 5], [4, 1, 5]], [[0, 1, 2], [5, 2, 0], [3, 1, 0]], [2, 0, 4])
"""One image is right, one lacks a class, one lacks two."""


def test_every_image_counts_once_and_the_last_partial_batch_by_its_size():
    for batch_size in (1, 2, 3, 100):
        result = evaluate(Oracle(3), SEVEN, batch_size=batch_size)
        assert result.confusion.tolist() == [[2, 0, 0], [0, 2, 1], [1, 0, 1]]  # rows are true classes
        assert (result.num_images, result.num_correct, result.accuracy, result.error) == (7, 5, 5 / 7, 2 / 7)
        assert result.loss == pytest.approx(350 / 7)
        assert result.predictions.tolist() == [0, 1, 2, 2, 1, 0, 0]
        assert result.lengths.shape == (7, 3)
        assert result.class_names == ("0", "1", "2")


def test_an_image_counts_only_with_all_its_classes_and_each_object_by_itself():
    confusion = np.zeros((6, 6), dtype=np.int64)
    for true, given in ((0, 0), (1, 1), (2, 2), (5, 5), (2, 3), (0, 0), (3, 4), (1, 1), (0, 5)):
        confusion[true, given] += 1
    for batch_size in (1, 2, 100):
        result = evaluate(Oracle(6, 3), TRIPLES, batch_size=batch_size)
        assert (result.num_images, result.num_correct, result.objects) == (3, 1, 3)
        assert (result.accuracy, result.error, result.object_accuracy) == (1 / 3, 2 / 3, 6 / 9)
        assert result.loss == pytest.approx(2)
        assert result.predictions.tolist() == [[2, 0, 1], [0, 3, 5], [4, 1, 5]]
        np.testing.assert_array_equal(result.confusion, confusion)
        assert [score["images"] for score in result.per_class] == [3, 2, 2, 1, 0, 1]  # images with the class in them
        assert (result.per_class[0]["recall"], result.per_class[5]["precision"]) == (2 / 3, 1 / 2)
    assert ["Objects", "66.67 %  (6 of 9 found, 3 per image)"] in result.tables()[0].rows


def test_hand_worked_scores_of_the_classes_as_json_without_nan():
    confusion = np.array([[3, 1, 0, 0], [2, 4, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    result = evaluation(confusion, "abcd", loss=math.nan)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (values["accuracy"], values["loss"], values["num_images"]) == (7 / 13, None, 13)
    assert values["confusion"] == confusion.tolist()
    rows = values["per_class"]
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["images"] for row in rows] == [4, 7, 0, 2]
    assert [row["precision"] for row in rows] == [3 / 6, 4 / 6, None, 0.0]
    assert [row["recall"] for row in rows] == [3 / 4, 4 / 7, None, 0.0]
    assert [row["f1"] for row in rows] == [6 / 10, 8 / 13, None, 0.0]


def test_balanced_accuracy_and_calibration_error_by_hand():
    confusion = np.array([[90, 0, 0], [5, 5, 0], [0, 0, 0]])
    assert evaluation(confusion).balanced_accuracy == pytest.approx((1 + 0.5) / 2)
    result = evaluate(Oracle(3), SEVEN)  # all scores are 0.9, and five of seven are right
    assert result.calibration_error == pytest.approx(0.9 - 5 / 7)
    scores = np.repeat([[0.6, 0], [0.9, 0]], [4, 6], 0)  # four at 0.6 are all right, three of six at 0.9
    result = Evaluation(np.array([0] * 7 + [1] * 3), scores, 0.0, ("a", "b"))
    assert result.calibration_error == pytest.approx((1.6 + 2.4) / 10)
    assert evaluate(Oracle(6, 3), TRIPLES).calibration_error is None


def test_of_many_classes_the_worst_and_the_most_frequent_confusions_are_listed():
    confusion = np.diag(np.full(25, 9))
    confusion[7, 3], confusion[2, 1], confusion[20, 20] = 5, 2, 0  # no image of c20
    _, worst, confused = evaluation(confusion, [f"c{j}" for j in range(25)]).tables()
    assert [row[0] for row in worst.rows[:2]] == ["c3", "c7"]
    assert len(worst.rows) == 10
    assert "c20" not in [row[0] for row in worst.rows]
    assert confused.rows == [["c7", "c3", "5"], ["c2", "c1", "2"]]
    about, per_class, few = evaluation([[3, 1], [0, 4]], ["long name", "b"]).tables()
    assert about.rows[0] == ["Accuracy", "87.50 %  (7 of 8 right)"]
    assert per_class.rows[0] == ["long name", "4", "100.00 %", "75.00 %", "85.71 %"]
    assert few.columns == ("true", "0", "1")
    cells = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in few.rows]
    assert cells == [["0 long name", "3", "1"], ["1 b", "·", "4"]]


@pytest.mark.parametrize("objects", [1, 2])
def test_the_loss_is_that_of_each_object_with_the_decoder_masked_as_the_source_does(make_model, make_images, objects):
    parts = make_images(10).unflatten(0, (5, 2))
    labels = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])[:, :objects].squeeze(1)
    given = ImageSet(parts.int().sum(1).clamp(max=255).byte(), labels, parts if objects == 2 else None)
    images, drawn = given.images / 255, (parts if objects == 2 else given.images) / 255
    for decoder_mask in ("label-in-training", "label", "longest"):
        model = make_model(objects=objects, decoder_mask=decoder_mask, reconstruction_weight=1.0).eval()
        with torch.no_grad():
            by_label, by_longest = (
                model.loss(model(images, targets), drawn, labels).total.item() for targets in (labels, None)
            )
        assert abs(by_label - by_longest) > 1e-4  # else this test could not fail
        expected = by_label if decoder_mask == "label" else by_longest
        for judged in (model, model.double()):
            assert evaluate(judged, given, batch_size=2).loss == pytest.approx(expected, rel=1e-5)


def test_nothing_of_the_model_changes_even_where_an_error_ends_it(cnn, images, monkeypatch):
    cnn.train()
    cnn.convs[0].eval()  # a part that a user has frozen stays so
    training = [module.training for module in cnn.modules()]
    random_state = torch.get_rng_state()
    first, second = evaluate(cnn, images), evaluate(cnn, images)
    np.testing.assert_array_equal(first.lengths, second.lengths)  # no dropout
    monkeypatch.setattr(cnn, "loss", None)
    with pytest.raises(TypeError, match="NoneType"):
        evaluate(cnn, images)
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in cnn.modules()] == training


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives(model, images):
    on_cpu, on_gpu = (evaluate(model.to(device), images, batch_size=4) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(on_gpu.lengths, on_cpu.lengths, atol=1e-2)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-2)


def test_what_cannot_be_evaluated(model, make_model, make_images):
    one, two = (ImageSet(make_images(2), torch.tensor(labels)) for labels in ([0, 1], [[0, 1], [2, 3]]))
    for network, images, options, message in (
        (model, one, {"class_names": ["a"]}, "class_names must be 4 names.*got 1"),
        (model, two, {}, r"\(2,\), one for each image, because the network finds 1 in it, got \(2, 2\)"),
        (make_model(objects=2), two, {}, "reconstructs each of 2 objects separately, so its images need parts"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(network, images, **options)
    assert evaluate(make_model(objects=2, decoder=False), two).num_images == 2


def evaluation(confusion, names=None, loss=0.1) -> Evaluation:
    labels, given = np.array([place for place, n in np.ndenumerate(confusion) for _ in range(n)]).T
    return Evaluation(labels, np.eye(len(confusion))[given], loss, tuple(names or map(str, range(len(confusion)))))


def test_right_and_wrong_have_their_own_colours_and_each_cell_its_number(words):
    found = evaluation([[8, 2, 0], [0, 5, 0], [0, 0, 0]], ["ant", "$bee$", "cow"])
    figure = dataclasses.replace(found, title="network, images").figures()[""]
    axes = figure.axes[0]
    wrong, right = (image.get_array() for image in axes.images)
    assert (wrong.count(), float(wrong[0, 1])) == (1, pytest.approx(20))  # percent of the true class
    assert (right.count(), float(right[0, 0]), float(right[1, 1])) == (2, pytest.approx(80), pytest.approx(100))
    numbers = {text.get_position(): text.get_text() for text in axes.texts}
    assert numbers == {(0, 0): "8", (1, 0): "2", (1, 1): "5"}  # x is the predicted class
    assert {"ant", "$bee$", "cow", "predicted class", "true class", "network, images\n2 of 15 images wrong"} <= set(
        words(figure)
    )
    assert len(evaluation(np.diag([3, 4])).figures()[""].axes[0].images) == 1  # without errors no scale of them


@pytest.mark.parametrize("classes", [3, 10])
def test_no_words_touch(classes, touching):
    figure = evaluation(np.eye(classes, dtype=int) * 97 + np.eye(classes, k=1, dtype=int)).figures()[""]
    assert not touching(figure)
    figure.axes[1].set_title("so long a title that it runs over the title of the next colour bar")
    assert touching(figure)


def test_many_classes_have_names_but_no_numbers_and_a_thousand_are_a_picture_of_bounded_size(words):
    for classes in (20, 50):
        (axes, *_) = evaluation(np.eye(classes, dtype=int) + 1).figures()[""].axes
        assert (len(axes.texts) > 0) == (classes <= 20)
        assert len(axes.get_xticklabels()) == len(axes.get_yticklabels()) == classes
    figure = evaluation(np.diag(np.full(1000, 9)), [f"name {j}" for j in range(1000)]).figures()[""]
    assert not [text for text in words(figure) if text.startswith("name")]
    assert max(figure.get_size_inches()) < 25
