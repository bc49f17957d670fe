"""The convolutional baseline: called like a capsule network."""

from __future__ import annotations

import math

import torch

from support import assert_close, assert_gradients_reach, assert_raises, small
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN

IMAGES = torch.rand(3, 1, 12, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1])


def network(**overrides: object) -> BaselineCNN:
    model = create_model("baseline-cnn", (1, 12, 10), 4, **small("baseline-cnn") | overrides)
    assert isinstance(model, BaselineCNN)
    return model


def test_probabilities_and_loss() -> None:
    model = network().eval()
    output = model(IMAGES)
    assert_close(output.lengths.sum(-1), 1.0)
    assert_close(output.lengths, output.logits.softmax(-1))
    assert output.capsules is output.reconstruction is output.coupling is None
    losses = model.loss(output, IMAGES, LABELS)
    assert_close(losses.total, torch.nn.functional.cross_entropy(output.logits, LABELS))
    assert losses.reconstruction is None


def test_classes_of_an_image_share_its_probability() -> None:
    model = network().eval()
    output = model(IMAGES)._replace(logits=torch.tensor([[0.0, 0.0, 0.0, 0.0]]).expand(3, 4))
    rows = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    assert_close(model.loss(output, IMAGES, rows).total, math.log(4))
    none = torch.zeros(3, 4, dtype=torch.int64)
    assert_close(model.loss(output, IMAGES, none).total, 0.0)


def test_dropout_in_training_only() -> None:
    model = network()
    assert (model(IMAGES).logits != model(IMAGES).logits).any()
    model.eval()
    assert_close(model(IMAGES).logits, model(IMAGES).logits, 0)


def test_the_papers_layers() -> None:
    with torch.device("meta"):
        model = create_model("baseline-cnn")
    assert [tuple(conv.weight.shape) for conv in model.convs] == [(256, 1, 5, 5), (256, 256, 5, 5), (128, 256, 5, 5)]
    assert [layer.out_features for layer in (*model.dense, model.classify)] == [328, 192, 10]


def test_without_dense_layers_the_map_is_classified_directly() -> None:
    model = network(hidden=()).eval()
    losses = model.loss(model(IMAGES), IMAGES, LABELS)
    losses.total.backward()
    assert len(model.dense) == 0
    assert model.classify.in_features == 6 * 12 * 10
    assert_gradients_reach(model)
    features = model.convs[1](model.convs[0](IMAGES).relu()).relu().flatten(1)
    assert_close(model(IMAGES).logits, model.classify(features))


def test_bad_input() -> None:
    model = network()
    assert_raises(InputError, model, IMAGES, return_coupling=True, say="a convolutional network has no coupling")
    assert_raises(TypeError, model, (IMAGES * 255).to(torch.uint8), say="uint8 images are divided by 255")
    assert_raises(ValueError, model, IMAGES[:, :, 1:], say="images must have shape (B, 1, 12, 10)")
    assert_raises(
        ValueError, model.loss, model(IMAGES), IMAGES, LABELS + 3, say="BaselineCNN.loss: labels must be in 0..3"
    )
    assert model.decoder_targets(LABELS) is None


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert network()(IMAGES).logits.dtype == torch.float32
