"""CapsNet as a whole: what it returns, whom it decodes, which images it takes."""

import itertools
from typing import Any

import pytest
import torch

from support import (
    assert_close,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    small,
)
from torchcaps import create_model, margin_loss
from torchcaps.errors import InputError, WrongType
from torchcaps.models import CapsNet
from torchcaps.models.images import standardise
from torchcaps.nn import mask_capsules

IMAGES = torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1])


def network(preset: str = "sabour2017", in_shape: Any = (1, 20, 20), num_classes: int = 4, **overrides: Any) -> CapsNet:
    return create_model(preset, in_shape, num_classes, **small(preset, **overrides))


def test_targets_choose_the_capsule_that_is_decoded() -> None:
    model = network(weight_std=1.0)
    longest = model(IMAGES).lengths.argmax(-1)
    rows = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    for targets, kept in (
        (None, torch.nn.functional.one_hot(longest, 4)),
        (LABELS, torch.nn.functional.one_hot(LABELS, 4)),
        (LABELS[:, None], torch.nn.functional.one_hot(LABELS, 4)),
        (rows, rows),
        (rows.bool(), rows),
    ):
        output = model(IMAGES, targets)
        gradient = torch.autograd.grad(output.reconstruction.square().sum(), output.capsules, retain_graph=True)[0]
        assert ((gradient.abs().sum(-1) > 0) == (kept > 0)).all()

    model.loss(output, IMAGES, rows).total.backward()
    assert_gradients_reach(model)


def test_bad_images_targets_and_sizes() -> None:
    model = network()
    assert_raises(WrongType, model, (IMAGES * 255).to(torch.uint8), say="divide uint8 images by 255")
    assert_raises(WrongType, model, IMAGES.half(), say="of one dtype, got torch.float16 and torch.float32")
    said = "images must have shape (B, 1, 20, 20), the network's (channels, height, width), got "
    for images in (IMAGES[0], torch.rand(2, 3, 20, 20), torch.rand(2, 1, 20, 21)):
        assert_raises(InputError, model, images, say=f"{said}{tuple(images.shape)}")
    without = network(decoder=False)
    assert_raises(InputError, without.decode, without(IMAGES).capsules, say="this network has no decoder")
    for in_shape in ((1, 28), (1, 28, 0), (1.0, 28, 28), 28, "abc", (1, 28, 28, 1)):
        said = "in_shape must be (channels, height, width)"
        assert_raises(InputError, create_model, "sabour2017", in_shape, say=said)
    for preset, classes in itertools.product(("sabour2017", "baseline-cnn"), (1, -3, 10**30, 2.0, "10", True)):
        with pytest.raises(InputError, match="num_classes must be "):
            create_model(preset, (1, 28, 28), classes)


def test_a_step_compiles_into_one_graph() -> None:
    model = network()

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss(model(images, labels), images, labels).total

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for targets in (LABELS, LABELS[:, None]):
        assert_close(compiled(IMAGES, targets), step(IMAGES, targets), 1e-5)


# ---- standardised images


def test_standardised_images_change_the_network_and_not_what_is_drawn() -> None:
    model, plain = network(standardise=True), network()
    plain.load_state_dict(model.state_dict())
    pixels = IMAGES - IMAGES.mean((1, 2, 3), keepdim=True)
    pixels = pixels / pixels.square().mean((1, 2, 3), keepdim=True).sqrt()
    assert_close(model.primary(IMAGES).poses, plain.primary(pixels).poses, 1e-5)
    assert_close(model.primary(IMAGES * 0.4 + 0.5).poses, model.primary(IMAGES).poses, 1e-4)
    output = model(IMAGES, LABELS)
    squared = (output.reconstruction - IMAGES).square().sum() / len(IMAGES)  # the pixels, not the standardised ones
    assert_close(model.loss(output, IMAGES, LABELS).reconstruction, squared, 1e-5)


def test_an_image_of_one_colour_is_zero_and_faint_ones_are_not_blown_up() -> None:
    images = torch.full((2, 1, 4, 4), 0.3)
    images[1, 0, 0, 0] += 1e-6
    images.requires_grad_()
    result = standardise(images)
    assert_close(result[0], 0.0, 1e-4)
    assert result[1].abs().max() < 255 * 4 * 1.1e-6  # the deviation counts as 1 / (255 √pixels) at least
    result.square().sum().backward()
    assert_finite([images.grad])
    of_three = torch.rand(4, 3, 5, 6, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    assert_close(standardise(of_three).std((1, 2, 3), correction=0), 1.0, 1e-12)
    assert (standardise(of_three).mean((2, 3)).abs() > 0.1).any(), "a channel by itself is not centred"


# ---- several objects in an image

PAIRS = torch.tensor([[0, 1], [3, 2], [1, 3]])
PARTS = torch.rand(3, 2, 1, 20, 20, generator=torch.Generator().manual_seed(1))


def pair_network(**overrides: Any) -> CapsNet:
    return network(**{"objects": 2, "weight_std": 1.0} | overrides)


def test_each_object_is_decoded_from_its_own_capsule_alone() -> None:
    model = pair_network()
    output = model(IMAGES, PAIRS)
    assert output.reconstruction.shape == (3, 2, 1, 20, 20)
    assert (output.decoded == PAIRS).all()
    for p in range(2):
        assert_close(output.reconstruction[:, p], model.decode(mask_capsules(output.capsules, PAIRS[:, p])))
    assert_close(model(IMAGES, PAIRS.flip(1)).reconstruction, output.reconstruction.flip(1))

    found = model(IMAGES)  # without labels: the longest first
    longest = found.lengths.argsort(-1, descending=True)[:, :2]
    assert (found.decoded == longest).all()
    assert_close(found.reconstruction, model(IMAGES, longest).reconstruction)
    without = pair_network(decoder=False)(IMAGES)
    assert without.reconstruction is without.decoded is None


def test_the_loss_of_several_objects_is_that_of_all_their_classes_and_parts() -> None:
    model = pair_network()
    output = model(IMAGES, PAIRS)
    losses = model.loss(output, PARTS, PAIRS)
    rows = torch.zeros(3, 4).scatter(1, PAIRS, 1)
    assert_close(losses.classification, margin_loss(output.lengths, rows))
    assert_close(losses.reconstruction, (output.reconstruction - PARTS).square().sum() / 3, 1e-5)
    assert_close(losses.total, losses.classification + 0.0005 * losses.reconstruction)
    mean = pair_network(reconstruction_over_pixels="mean").loss(output, PARTS, PAIRS)
    assert_close(mean.reconstruction, (output.reconstruction - PARTS).square().mean())


def test_an_object_is_compared_with_its_own_part_and_what_is_left_with_what_is_left() -> None:
    model = pair_network()
    output = model(IMAGES[:1], torch.tensor([[2, 0]]))
    (two, none), (zero, three) = output.reconstruction[0], PARTS[0]
    losses = model.loss(output, PARTS[:1], torch.tensor([[0, 3]]))
    assert_close(losses.reconstruction, (none - zero).square().sum() + (two - three).square().sum(), 1e-5)


def test_labels_and_parts_that_do_not_fit_several_objects() -> None:
    model = pair_network()
    output = model(IMAGES, PAIRS)
    twice = torch.tensor([[0, 1], [3, 2], [1, 1]])  # others: test_output.py
    for call in (lambda: model(IMAGES, twice), lambda: model.loss(output, PARTS, twice)):
        assert_raises(InputError, call, say="must be of different classes, got [1, 1] for image 2")
    said = "images must show each object of an image alone and have shape (3, 2, 1, 20, 20), got (3, 1, 20, 20)"
    assert_raises(InputError, model.loss, output, IMAGES, PAIRS, say=said)
