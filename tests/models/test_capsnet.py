"""CapsNet as a whole: what it returns, whom it decodes, which images it takes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from support import (
    assert_close,
    assert_differs,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    assert_sums_to_one,
    small,
)
from torchcaps import create_model, dynamic_routing, margin_loss, safe_norm
from torchcaps.errors import InputError, WrongType
from torchcaps.models import CapsNet
from torchcaps.nn import mask_capsules
from torchcaps.parts import describe

IMAGES = torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1])


def network(preset: str = "sabour2017", in_shape: Any = (1, 20, 20), num_classes: int = 4, **overrides: Any) -> CapsNet:
    model = create_model(preset, in_shape, num_classes, **small(preset, **overrides))
    assert isinstance(model, CapsNet)
    return model


def test_the_parts_make_the_whole() -> None:
    model = network()
    output = model(IMAGES, LABELS, return_coupling=True)
    capsules, activations, coupling = model.class_capsules.route(model.primary(IMAGES), return_coupling=True)
    assert activations is None
    assert_close(output.capsules, capsules)
    assert_close(output.lengths, safe_norm(capsules))
    assert_close(output.coupling, coupling)
    assert_close(output.reconstruction, model.decode(mask_capsules(capsules, LABELS)))
    assert_sums_to_one(output.coupling, "outputs")
    assert output.logits is None
    assert model(IMAGES).coupling is None
    assert model.flow[0].grid == (2, 2, 2)


def test_coupling_asked_for_or_not_the_rest_is_the_same() -> None:
    model = network()
    assert_close(model(IMAGES, LABELS).capsules, model(IMAGES, LABELS, return_coupling=True).capsules)


def test_targets_choose_the_capsule_that_is_decoded() -> None:
    """Only the decoded capsule has an influence on the reconstruction."""
    model = network(weight_std=1.0)
    longest = model(IMAGES).lengths.argmax(-1)
    rows = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    for targets, kept in (
        (None, torch.nn.functional.one_hot(longest, 4)),
        (LABELS, torch.nn.functional.one_hot(LABELS, 4)),
        (rows, rows),
        (rows.bool(), rows),
    ):
        output = model(IMAGES, targets)
        gradient = torch.autograd.grad(output.reconstruction.square().sum(), output.capsules)[0]
        assert ((gradient.abs().sum(-1) > 0) == (kept > 0)).all()


def test_several_classes_in_an_image() -> None:
    model = network()
    rows = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    losses = model.loss(model(IMAGES, rows), IMAGES, rows)
    losses.total.backward()
    assert_finite(losses)
    assert_gradients_reach(model)


def test_bad_images_and_targets() -> None:
    model = network()
    assert_raises(
        WrongType, model, (IMAGES * 255).to(torch.uint8), say="got torch.uint8; uint8 images are divided by 255"
    )
    for images in (IMAGES[0], torch.rand(2, 3, 20, 20), torch.rand(2, 1, 20, 21)):
        said = "images must have shape (B, 1, 20, 20), as the network was built for (channels, height, width), got "
        assert_raises(InputError, model, images, say=f"{said}{tuple(images.shape)}")
    assert_raises(InputError, model, IMAGES, LABELS + 3, say="labels must be in 0..3, got 3..4")
    assert_raises(
        InputError, model, IMAGES, LABELS[:2], say="targets must have shape (3,) or (3, 1) or (3, 4), got (2,)"
    )
    without = network(decoder=False)
    assert_raises(InputError, without.decode, without(IMAGES).capsules, say="this network has no decoder")


@pytest.mark.parametrize("in_shape", [(1, 28), (1, 28, 0), (1.0, 28, 28), 28, "abc", (1, 28, 28, 1)])
def test_bad_shapes(in_shape: Any) -> None:
    assert_raises(InputError, create_model, "sabour2017", in_shape, say="in_shape must be (channels, height, width)")


@pytest.mark.parametrize("num_classes", [1, 0, -3, 10**30, 2.0, "10", True])
def test_bad_class_counts(num_classes: Any) -> None:
    for preset in ("sabour2017", "baseline-cnn"):
        with pytest.raises(InputError, match="num_classes must be "):
            create_model(preset, (1, 28, 28), num_classes)


@pytest.mark.parametrize(
    ("overrides", "smallest"),
    [
        ({}, 17),
        ({"conv_kernel": 5, "primary_kernel": 3}, 7),
        ({"conv_stride": 2}, 25),
        ({"conv_stride": 3, "conv_kernel": 4, "primary_kernel": 2, "primary_stride": 5}, 7),
        ({"primary_padding": 2}, 13),
        ({"conv_kernel": 3, "conv_stride": 2, "primary_kernel": 4, "primary_padding": 1}, 5),
    ],
)
def test_the_smallest_images(overrides: dict[str, int], smallest: int) -> None:
    for shape in ((1, smallest - 1, smallest), (1, smallest, smallest - 1), (1, 1, 1)):
        said = f"images of {shape[1]}×{shape[2]} are too small"
        assert_raises(InputError, network, in_shape=shape, **overrides, say=said)
        assert_raises(InputError, network, in_shape=shape, **overrides, say=f"fits is {smallest}×{smallest}")
    model = network(in_shape=(1, smallest, smallest), **overrides)
    assert model.flow[0].grid[1:] == (1, 1)
    assert_finite(model(torch.rand(2, 1, smallest, smallest)))


@pytest.mark.parametrize("preset", ["sabour2017", "keras-tutorial", "torch-notebook"])
def test_autocast(preset: str) -> None:
    model = network(preset)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(IMAGES, LABELS)
        losses = model.loss(output, IMAGES, LABELS)
    losses.total.backward()
    assert output.capsules.dtype == output.lengths.dtype == losses.total.dtype == torch.float32
    assert_finite(losses)
    assert_gradients_reach(model)
    assert_close(output.lengths, model(IMAGES).lengths, 0.02)


@pytest.mark.parametrize("preset", ["sabour2017", "sabour2017-code", "keras-tutorial", "torch-notebook"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_network_converted_as_a_whole(preset: str, dtype: torch.dtype) -> None:
    model = network(preset, num_iterations=1 if preset == "torch-notebook" else 3)  # W of deviation 1 magnifies errors
    wanted = model(IMAGES, LABELS)
    model = model.to(dtype)
    output = model(IMAGES.to(dtype), LABELS)
    losses = model.loss(output, IMAGES.to(dtype), LABELS)
    losses.total.backward()
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
    assert_finite([*losses, *(parameter.grad for parameter in model.parameters())])
    assert_close(output.lengths.float(), wanted.lengths, 0.02)
    if model.decoder is not None:
        assert output.reconstruction.dtype == dtype
        assert_close(output.reconstruction.float(), wanted.reconstruction, 0.02)


def test_copies_and_pickles_and_states() -> None:
    model = network(capsule_bias=True, learn_prior=True).eval()
    fresh = network(capsule_bias=True, learn_prior=True).eval()
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert describe(other) == describe(model)
        assert other.class_capsules.transform.weight.stride() == model.class_capsules.transform.weight.stride()
        assert_close(other(IMAGES).reconstruction, model(IMAGES).reconstruction, 0)


def test_the_seed_repeats_the_weights() -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(network())
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert_close(first, again, 0)
    assert (first != other).any()


def test_channels_last_and_double() -> None:
    model = network()
    wanted = model(IMAGES).capsules
    fast = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert_close(fast(IMAGES.contiguous(memory_format=torch.channels_last)).capsules, wanted, 1e-5)
    assert_close(model.double()(IMAGES.double()).capsules.float(), wanted, 1e-5)


def test_leaky_routing_gives_the_rest_to_none_of_the_classes() -> None:
    model = network(leaky=True)
    assert (model(IMAGES, return_coupling=True).coupling.sum(-1) < 0.999).all()
    poses = model.primary(IMAGES).poses
    votes = torch.einsum("ijdk,bik->bijd", model.class_capsules.transform.weight, poses)
    assert_close(model(IMAGES).capsules, dynamic_routing(votes, leaky=True).poses, 1e-5)


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
        gradient = torch.autograd.grad(output.reconstruction[:, p].sum(), output.capsules, retain_graph=True)[0]
        touched = gradient.abs().sum(-1) > 0
        assert (touched == torch.nn.functional.one_hot(PAIRS[:, p], 4).bool()).all()
    assert_close(model(IMAGES, PAIRS.flip(1)).reconstruction, output.reconstruction.flip(1))


def test_without_labels_the_longest_capsules_are_decoded_the_longest_first() -> None:
    model = pair_network()
    output = model(IMAGES)
    longest = output.lengths.argsort(-1, descending=True)[:, :2]
    assert (output.decoded == longest).all()
    assert_close(output.reconstruction, model(IMAGES, longest).reconstruction)
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
    mean = pair_network(reconstruction_over_pixels="mean")
    mean.load_state_dict(model.state_dict())
    assert_close(
        mean.loss(mean(IMAGES, PAIRS), PARTS, PAIRS).reconstruction, (output.reconstruction - PARTS).square().mean()
    )
    losses.total.backward()
    assert_gradients_reach(model)


def test_the_order_of_the_objects_does_not_matter() -> None:
    model = pair_network()
    wanted = model.loss(model(IMAGES, PAIRS), PARTS, PAIRS)
    other = model.loss(model(IMAGES, PAIRS.flip(1)), PARTS, PAIRS)  # decoded in one order, compared in another
    flipped = model.loss(model(IMAGES, PAIRS.flip(1)), PARTS.flip(1), PAIRS.flip(1))
    for losses in (other, flipped):
        assert_close(losses.reconstruction, wanted.reconstruction, 1e-6)
        assert_close(losses.classification, wanted.classification, 1e-6)
    assert_differs(wanted.reconstruction, model.loss(model(IMAGES, PAIRS), PARTS.flip(1), PAIRS).reconstruction)


def test_a_reconstruction_stands_beside_the_object_of_its_class() -> None:
    """Decoded 2 and 0, in the image 0 and 3: 0 beside 0, what is left beside what is left."""
    model = pair_network()
    output = model(IMAGES[:1], torch.tensor([[2, 0]]))
    two, none = output.reconstruction[0]
    zero, three = PARTS[0]
    losses = model.loss(output, PARTS[:1], torch.tensor([[0, 3]]))
    assert_close(losses.reconstruction, (none - zero).square().sum() + (two - three).square().sum(), 1e-5)


def test_labels_and_parts_that_do_not_fit_several_objects() -> None:
    model = pair_network()
    output = model(IMAGES, PAIRS)
    bad = {
        "sees 2 objects in an image, so targets must be their labels, of shape (3, 2), got (3,)": LABELS,
        "of shape (3, 2), got (3, 4)": torch.eye(4)[:3].long(),
        "must be of different classes, got [1, 1] for image 2": torch.tensor([[0, 1], [3, 2], [1, 1]]),
        "labels must be in 0..3, got 0..4": torch.tensor([[0, 1], [3, 2], [1, 4]]),
    }
    for said, labels in bad.items():
        assert_raises(InputError, model, IMAGES, labels, say=said)
        assert_raises(InputError, model.loss, output, PARTS, labels, say=said)
    assert_raises(
        WrongType, model, IMAGES, PAIRS.float(), say="targets must be a tensor of integers, got one of torch.float32"
    )
    said = "images must be the objects of each image, each alone, of shape (3, 2, 1, 20, 20), got (3, 1, 20, 20)"
    assert_raises(InputError, model.loss, output, IMAGES, PAIRS, say=said)
    for objects in (4, 5):
        assert_raises(InputError, network, objects=objects, say=f"got {objects} objects and 4 classes")


def test_several_objects_in_half_precision() -> None:
    model = pair_network()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(IMAGES, PAIRS)
        losses = model.loss(output, PARTS, PAIRS)
    losses.total.backward()
    assert_finite(losses)
    assert_gradients_reach(model)
