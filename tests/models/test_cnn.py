"""The convolutional networks: called like a capsule network."""

from __future__ import annotations

import math

import pytest
import torch

from support import assert_batch_independent, assert_close, assert_gradients_reach, assert_raises, small
from torchcaps import create_model
from torchcaps.errors import InputError, WrongType
from torchcaps.models import BaselineCNN, PooledCNN
from torchcaps.nn import ChannelNorm

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

    shared = output._replace(logits=torch.zeros(3, 4))  # by all classes of an image
    rows = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    assert_close(model.loss(shared, IMAGES, rows).total, math.log(4))
    assert_close(model.loss(shared, IMAGES, torch.zeros_like(rows)).total, 0.0)
    assert_close(model(IMAGES).logits, model(IMAGES).logits, 0)
    assert (model.train()(IMAGES).logits != model(IMAGES).logits).any(), "dropout in training only"


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
    assert_raises(WrongType, model, (IMAGES * 255).to(torch.uint8), say="uint8 images are divided by 255")
    assert_raises(InputError, model, IMAGES[:, :, 1:], say="images must have shape (B, 1, 12, 10)")
    assert_raises(InputError, model.loss, model(IMAGES), IMAGES, LABELS + 3, say="labels must be in 0..3")
    assert model.decoder_targets(LABELS) is None


# ---- pooling, and several objects in an image


def test_pooling_halves_the_maps_and_keeps_the_last_odd_pixel() -> None:
    model = network(channels=(4, 6), first_kernel=9, kernel=3, pool=2, hidden=(7,)).eval()
    assert [conv.kernel_size for conv in model.convs] == [(9, 9), (3, 3)]
    assert model.dense[0].in_features == 6 * 3 * 3  # 12×10 → 6×5 → 3×3
    hidden = IMAGES
    for conv in model.convs:
        hidden = torch.nn.functional.max_pool2d(conv(hidden).relu(), 2, ceil_mode=True)
    hidden = model.dense[0](hidden.flatten(1)).relu()
    assert_close(model(IMAGES).logits, model.classify(hidden))
    changed = IMAGES.clone()
    changed[..., -1] = 1 - changed[..., -1]
    assert (model(changed).logits != model(IMAGES).logits).any()


def test_a_stem_comes_first() -> None:
    options = {"stem_channels": (4, 6), "stem_strides": (1, 2), "conv_norm": "channel", "conv_dropout": 0.5}
    model = network(**options).eval()
    features = model.stem(IMAGES)
    height, width = ((size - 2 - 3) // 2 + 1 for size in IMAGES.shape[2:])
    assert features.shape == (len(IMAGES), 6, height, width)
    assert any(isinstance(layer, ChannelNorm) for layer in model.stem)
    assert_batch_independent(lambda images: model(images).logits, IMAGES)
    hidden = features
    for conv, norm in zip(model.convs, model.norms, strict=True):
        hidden = model.max_pool(norm(conv(hidden)).relu())
    hidden = hidden.flatten(1)
    for dense in model.dense:
        hidden = dense(hidden).relu()
    assert_close(model(IMAGES).logits, model.classify(hidden))
    model.train().drop.p = 0.0
    assert (model(IMAGES).logits != model(IMAGES).logits).any()  # channels of the stem are dropped


def test_pooling_fits_images_of_any_size() -> None:
    for size in (1, 2, 3, 7):
        model = create_model("cnn-matched", (2, size, size + 1), 3, channels=(2, 2, 2), hidden=(4,), pool=3)
        assert model(torch.rand(2, 2, size, size + 1)).lengths.shape == (2, 3)


def test_several_objects_have_probabilities_of_their_own() -> None:
    model = network(objects=2).eval()
    labels = torch.tensor([[0, 1], [3, 2], [1, 3]])
    output = model(IMAGES, labels)
    assert_close(output.lengths, output.logits.sigmoid())
    present = torch.zeros(3, 4).scatter(1, labels, 1)
    wanted = -(present * output.lengths.log() + (1 - present) * (1 - output.lengths).log()).sum() / 3
    assert_close(model.loss(output, IMAGES, labels).total, wanted, 1e-5)
    assert_close(model.loss(output, IMAGES, labels.flip(1)).total, wanted, 1e-5)


def test_labels_of_several_objects_that_do_not_fit() -> None:
    model = network(objects=2)
    output = model(IMAGES)
    twice = torch.tensor([[0, 1], [2, 2], [1, 3]])
    assert_raises(InputError, model.loss, output, IMAGES, twice, say="of different classes, got [2, 2] for image 1")
    assert_raises(InputError, model.loss, output, IMAGES, LABELS, say="sees 2 objects in an image")
    assert_raises(InputError, network, objects=4, say="objects must be below num_classes")


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_network_takes_images() -> None:
    network = create_model("baseline-cnn", (1, 8, 8), 3, channels=(4,), hidden=(5,)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear})
    images = torch.rand(2, 1, 8, 8)
    assert_close(quantised(images).lengths, network(images).lengths, 0.1)


# ---- any backbone, pooled


def pooled(**overrides: object) -> PooledCNN:
    model = create_model("cnn-pooled", (1, 12, 10), 4, **small("cnn-pooled") | overrides)
    assert isinstance(model, PooledCNN)
    return model


def test_pooled_maps_are_classified_by_one_layer() -> None:
    for pooling in ("average", "max", "none"):
        model = pooled(pooling=pooling, stack_strides=(1, 1, 1, 1)).eval()
        maps = model.backbone(IMAGES)
        assert maps.shape[1:] == model.map_shape
        seen = {"average": maps.mean((2, 3)), "max": maps.flatten(2).amax(2), "none": maps.flatten(1)}[pooling]
        output = model(IMAGES)
        assert_close(output.logits, model.classify(seen))
        assert_close(output.scores, output.logits.softmax(-1))
        model.loss(output, IMAGES, LABELS).total.backward()
        assert_gradients_reach(model)


def test_bad_input_of_a_pooled_network() -> None:
    model = pooled()
    assert_raises(InputError, model, IMAGES, return_coupling=True, say="a convolutional network has no coupling")
    said = "the smallest size that fits is"
    assert_raises(InputError, create_model, "cnn-pooled", (1, 1, 1), 4, say=said)
