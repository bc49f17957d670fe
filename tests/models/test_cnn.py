"""The convolutional networks: called like a capsule network."""

import math

import torch

from support import assert_batch_independent, assert_close, assert_gradients_reach, assert_raises, small
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, PooledCNN

IMAGES = torch.rand(3, 1, 12, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1])


def network(**overrides: object) -> BaselineCNN:
    return create_model("baseline-cnn", (1, 12, 10), 4, **small("baseline-cnn") | overrides)


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


def test_bad_input() -> None:
    model = network()
    for each in (model, pooled()):
        assert_raises(InputError, each, IMAGES, return_coupling=True, say="a convolutional network has no coupling")
    assert_raises(InputError, model.loss, model(IMAGES), IMAGES, LABELS + 3, say="labels must be in 0..3")
    assert_raises(InputError, create_model, "cnn-pooled", (1, 1, 1), 4, say="the smallest size that fits is")


# ---- pooling, and several objects in an image


def test_layers_by_hand() -> None:
    """Pooling halves the maps and keeps the last odd pixel: 12×10 → 6×5 → 3×3."""
    stem = {"stem_channels": (4, 6), "stem_strides": (1, 2), "conv_norm": "channel", "conv_dropout": 0.5}
    pooled = {"channels": (4, 6), "first_kernel": 9, "kernel": 3, "pool": 2, "hidden": (7,)}
    for options, width in ((pooled, 6 * 3 * 3), (stem, 6 * 4 * 3), ({"hidden": ()}, 6 * 12 * 10)):
        model = network(**options).eval()
        hidden = model.stem(IMAGES)
        for conv, norm in zip(model.convs, model.norms, strict=True):
            hidden = norm(conv(hidden)).relu()
            if model.pool > 1:
                hidden = torch.nn.functional.max_pool2d(hidden, model.pool, ceil_mode=True)
        hidden = hidden.flatten(1)
        assert hidden.shape[1] == width
        for dense in model.dense:
            hidden = dense(hidden).relu()
        assert_close(model(IMAGES).logits, model.classify(hidden))
        assert_batch_independent(lambda images, model=model: model(images).logits, IMAGES)


def test_several_objects_have_probabilities_of_their_own() -> None:
    model = network(objects=2).eval()
    labels = torch.tensor([[0, 1], [3, 2], [1, 3]])
    output = model(IMAGES, labels)
    assert_close(output.lengths, output.logits.sigmoid())
    present = torch.zeros(3, 4).scatter(1, labels, 1)
    wanted = -(present * output.lengths.log() + (1 - present) * (1 - output.lengths).log()).sum() / 3
    assert_close(model.loss(output, IMAGES, labels).total, wanted, 1e-5)
    assert_close(model.loss(output, IMAGES, labels.flip(1)).total, wanted, 1e-5)


# ---- any backbone, pooled


def pooled(**overrides: object) -> PooledCNN:
    return create_model("cnn-pooled", (1, 12, 10), 4, **small("cnn-pooled") | overrides)


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
