from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps.analysis import Evaluation, evaluate, evaluation_sums
from torchcaps.datasets import BatchLoader, ImageSet
from torchcaps.errors import InputError
from torchcaps.models import Losses, ModelOutput


class Oracle(nn.Module):
    """Gives each image the class its first pixel says; an image's loss is its second pixel."""

    in_shape = (1, 1, 2)
    objects = 1

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, images, targets=None):
        self.seen.append(len(images))
        given = (images[:, 0, 0, 0] * 255).round().long()
        return ModelOutput(nn.functional.one_hot(given, self.num_classes).float())

    def decoder_targets(self, targets):
        return None

    def loss(self, output, images, targets):
        total = (images[:, 0, 0, 1] * 255).mean()
        return Losses(total, total)


def oracle_set(given, labels, losses) -> ImageSet:
    images = torch.tensor([given, losses], dtype=torch.uint8).t().reshape(-1, 1, 1, 2)
    return ImageSet(images, torch.tensor(labels))


@pytest.fixture
def image_set(make_images) -> ImageSet:
    return ImageSet(make_images(10), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1]))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 100])
def test_every_image_counts_once_and_the_last_partial_batch_by_its_size(batch_size):
    model = Oracle(3)
    given, labels, losses = [0, 1, 2, 2, 1, 0, 0], [0, 1, 2, 1, 1, 2, 0], [0, 10, 20, 30, 40, 50, 200]
    result = evaluate(model, oracle_set(given, labels, losses), batch_size=batch_size)
    assert result.confusion.tolist() == [[2, 0, 0], [0, 2, 1], [1, 0, 1]]  # rows are true classes
    assert result.confusion.dtype == np.int64
    assert result.num_images == 7 == sum(model.seen)
    assert result.num_correct == 5
    assert result.accuracy == 5 / 7
    assert result.error == 2 / 7
    assert result.loss == pytest.approx(350 / 7)
    assert result.predictions.tolist() == given
    assert result.lengths.shape == (7, 3)
    assert result.class_names == ("0", "1", "2")


def test_hand_worked_scores_of_the_classes():
    confusion = np.array([[3, 1, 0, 0], [2, 4, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    rows = Evaluation(confusion, 0.5, ("a", "b", "c", "d")).per_class
    assert [row["images"] for row in rows] == [4, 7, 0, 2]
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["precision"] for row in rows] == [3 / 6, 4 / 6, None, 0.0]
    assert [row["recall"] for row in rows] == [3 / 4, 4 / 7, None, 0.0]
    assert [row["f1"] for row in rows] == [6 / 10, 8 / 13, None, 0.0]


def test_a_class_never_given_and_a_class_without_images():
    given_but_absent, never_given = Evaluation(np.array([[0, 0], [2, 0]]), 0.0, ("x", "y")).per_class
    assert (given_but_absent["precision"], given_but_absent["recall"], given_but_absent["f1"]) == (0.0, None, None)
    assert (never_given["precision"], never_given["recall"], never_given["f1"]) == (None, 0.0, 0.0)


def test_the_dictionary_is_json_without_nan():
    result = Evaluation(np.array([[3, 0], [0, 0]]), math.nan, ("x", "y"))
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["loss"] is None
    assert values["per_class"][1] == {"name": "y", "images": 0, "precision": None, "recall": None, "f1": None}
    assert values["confusion"] == [[3, 0], [0, 0]]
    assert (values["accuracy"], values["error"], values["num_images"], values["num_correct"]) == (1.0, 0.0, 3, 3)
    assert "100.00 %" in str(result)


def test_sums_of_shares_add_to_those_of_the_whole(model, image_set):
    whole = evaluate(model, image_set, batch_size=4)
    shares = [  # the last batch of two leaves one of three processes without an image
        evaluation_sums(model, BatchLoader(image_set, 4, shuffle=False, rank=rank, world_size=3).batches(0))
        for rank in range(3)
    ]
    result = Evaluation.from_sums(shares[0] + shares[1] + shares[2], ["a", "b", "c", "d"])
    np.testing.assert_array_equal(result.confusion, whole.confusion)
    assert result.loss == pytest.approx(whole.loss, rel=1e-5)
    assert result.class_names == ("a", "b", "c", "d")
    assert result.predictions is None
    assert sum(share.confusion.sum() for share in shares) == 10


def test_a_share_without_images_adds_nothing(model, make_images):
    empty = evaluation_sums(model, [(make_images(0), torch.zeros(0, dtype=torch.int64))])
    assert empty.confusion.sum() == 0
    assert empty.loss == 0.0
    with pytest.raises(InputError, match="at least one image"):
        Evaluation.from_sums(empty)


@pytest.mark.parametrize("decoder_mask", ["label-in-training", "label", "longest"])
def test_the_loss_has_the_decoder_masked_as_the_source_does(make_model, image_set, decoder_mask):
    model = make_model(decoder_mask=decoder_mask, reconstruction_weight=1.0)
    images, labels = image_set.images / 255, image_set.labels
    with torch.no_grad():
        by_label = model.loss(model(images, labels), images, labels).total.item()
        by_longest = model.loss(model(images), images, labels).total.item()
    assert abs(by_label - by_longest) > 1e-4  # else this test could not fail
    expected = by_label if decoder_mask == "label" else by_longest
    assert evaluate(model, image_set, batch_size=3).loss == pytest.approx(expected, rel=1e-5)


def test_nothing_of_the_model_changes(cnn, image_set):
    cnn.train()
    cnn.convs[0].eval()  # a part that a user has frozen stays so
    training = {name: module.training for name, module in cnn.named_modules()}
    weights = {name: value.clone() for name, value in cnn.state_dict().items()}
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    first, second = evaluate(cnn, image_set), evaluate(cnn, image_set)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: module.training for name, module in cnn.named_modules()} == training
    assert all(torch.equal(value, weights[name]) for name, value in cnn.state_dict().items())
    assert all(parameter.grad is None for parameter in cnn.parameters())
    np.testing.assert_array_equal(first.lengths, second.lengths)  # no dropout


def test_training_goes_on_after_an_error(model, make_images):
    def broken():
        yield make_images(2), torch.zeros(2, dtype=torch.int64)
        raise OSError("no more")

    model.train()
    with pytest.raises(OSError, match="no more"):
        evaluation_sums(model, broken())
    assert model.training
    assert model.backbone.conv.training
    assert not torch.is_inference_mode_enabled()


def test_bfloat16_is_near_float32_but_not_the_same(model, image_set):
    full, half = evaluate(model, image_set), evaluate(model, image_set, precision="bf16")
    assert half.lengths.dtype == np.float32
    np.testing.assert_allclose(half.lengths, full.lengths, atol=0.05)
    assert not np.array_equal(half.lengths, full.lengths)


def test_double_precision_networks_are_evaluated_in_double(model, image_set):
    assert evaluate(model.double(), image_set).loss == pytest.approx(evaluate(model.float(), image_set).loss, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_gives_what_the_cpu_gives(model, image_set):
    on_cpu = evaluate(model, image_set, batch_size=4, device="cpu")
    on_gpu = evaluate(model, image_set, batch_size=4, device="cuda")
    assert next(model.parameters()).is_cuda
    np.testing.assert_allclose(on_gpu.lengths, on_cpu.lengths, atol=1e-2)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_names": ["a"]}, "class_names must be 4 names.*got 1"),
        ({"precision": "16"}, "precision must be"),
        ({"batch_size": 0}, "batch_size must be 1 to"),
    ],
)
def test_bad_options(model, image_set, change, message):
    with pytest.raises(InputError, match=message):
        evaluate(model, image_set, **change)


def test_images_and_labels_of_another_network(model, make_images):
    with pytest.raises(InputError, match=r"\(B, 1, 8, 10\).*\(2, 1, 8, 9\)"):
        evaluate(model, ImageSet(make_images(2, (1, 8, 9)), torch.tensor([0, 1])))
    with pytest.raises(InputError, match=r"0 to 3.*0\.\.4"):
        evaluate(model, ImageSet(make_images(2), torch.tensor([0, 4])))
    with pytest.raises(InputError, match=r"\(2,\), one for each image, as the network sees 1 in it, got \(2, 2\)"):
        evaluate(model, ImageSet(make_images(2), torch.tensor([[0, 1], [2, 3]])))


# ---- several objects in an image


class PairOracle(nn.Module):
    """Gives each image the three classes whose numbers its pixels are, the first with the longest capsule."""

    in_shape = (1, 1, 3)
    num_classes = 6
    objects = 3
    decoder = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images, targets=None):
        given = (images[:, 0, 0] * 255).round().long()
        lengths = torch.tensor([0.9, 0.8, 0.7]).expand_as(given)
        return ModelOutput(torch.zeros(len(images), 6).scatter(1, given, lengths))

    def decoder_targets(self, targets):
        return None

    def loss(self, output, images, targets):
        total = images[:, 0, 0, 0].mean() * 255
        return Losses(total, total)


@pytest.fixture
def triples() -> ImageSet:
    """One image is right, one lacks a class, one lacks two."""
    given = torch.tensor([[2, 0, 1], [0, 3, 5], [4, 1, 5]], dtype=torch.uint8)
    return ImageSet(given.view(3, 1, 1, 3), torch.tensor([[0, 1, 2], [5, 2, 0], [3, 1, 0]]))


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_an_image_counts_only_with_all_its_classes_and_each_object_by_itself(triples, batch_size):
    result = evaluate(PairOracle(), triples, batch_size=batch_size)
    assert (result.num_images, result.num_correct, result.objects) == (3, 1, 3)
    assert (result.accuracy, result.error) == (1 / 3, 2 / 3)
    assert result.object_accuracy == 6 / 9
    assert result.loss == pytest.approx((2 + 0 + 4) / 3)
    assert result.predictions.tolist() == [[2, 0, 1], [0, 3, 5], [4, 1, 5]]
    confusion = np.zeros((6, 6), dtype=np.int64)
    for true, given in ((0, 0), (1, 1), (2, 2), (5, 5), (2, 3), (0, 0), (3, 4), (1, 1), (0, 5)):
        confusion[true, given] += 1
    np.testing.assert_array_equal(result.confusion, confusion)
    scores = result.per_class
    assert [score["images"] for score in scores] == [3, 2, 2, 1, 0, 1]  # images with the class in them
    assert scores[0]["recall"] == 2 / 3
    assert scores[5]["precision"] == 1 / 2
    assert result.to_dict()["object_accuracy"] == 6 / 9


def test_sums_of_shares_with_several_objects(triples):
    shares = [
        evaluation_sums(PairOracle(), BatchLoader(triples, 3, shuffle=False, rank=rank, world_size=4).batches(0))
        for rank in range(4)  # one of them has no image
    ]
    whole = evaluate(PairOracle(), triples)
    result = Evaluation.from_sums(sum(shares[1:], shares[0]))
    np.testing.assert_array_equal(result.confusion, whole.confusion)
    assert (result.num_images, result.num_correct, result.objects) == (3, 1, 3)
    assert result.loss == pytest.approx(whole.loss)
    assert str(result) == str(whole)


@pytest.fixture
def pairs(make_images) -> ImageSet:
    parts = make_images(10).view(5, 2, *make_images(1).shape[1:])
    images = parts.int().sum(1).clamp(max=255).byte()
    return ImageSet(images, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]), parts)


@pytest.mark.parametrize("decoder_mask", ["label-in-training", "label"])
def test_the_loss_compares_each_object_with_its_part(make_model, pairs, decoder_mask):
    model = make_model(objects=2, decoder_mask=decoder_mask, reconstruction_weight=1.0).eval()
    images, parts, labels = pairs.images / 255, pairs.parts / 255, pairs.labels
    with torch.no_grad():
        wanted = model.loss(model(images, labels if decoder_mask == "label" else None), parts, labels).total.item()
        other = model.loss(model(images, labels), parts.flip(1), labels).total.item()
    assert abs(wanted - other) > 1e-4  # else this test could not fail
    for batch_size in (2, 5):
        assert evaluate(model, pairs, batch_size=batch_size).loss == pytest.approx(wanted, rel=1e-5)


def test_without_parts_only_a_network_that_draws_none_is_judged(make_model, pairs):
    without = ImageSet(pairs.images, pairs.labels)
    with pytest.raises(InputError, match="reconstructs each of 2 objects by itself, so its images need parts"):
        evaluate(make_model(objects=2), without)
    with pytest.raises(InputError, match="need parts"):
        evaluation_sums(make_model(objects=2), [(pairs.images, pairs.labels)])
    assert evaluate(make_model(objects=2, decoder=False), without).num_images == 5


def test_labels_of_another_number_of_objects(make_model, pairs):
    one = ImageSet(pairs.images, pairs.labels[:, 0])
    with pytest.raises(InputError, match=r"\(5, 2\), 2 for each image, as the network sees 2 in it, got \(5,\)"):
        evaluate(make_model(objects=2), one)
