from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps.analysis import figure_perturbation, perturb_capsule
from torchcaps.errors import InputError


class LinearDecoder(nn.Module):
    """Pixels = matrix · all components of all capsules: what each component does can be read off."""

    def __init__(self, model) -> None:
        super().__init__()
        self.shape = model.in_shape
        self.matrix = torch.randn(
            math.prod(self.shape), model.num_classes * 5, generator=torch.Generator().manual_seed(2)
        )

    def forward(self, capsules):
        return (capsules.flatten(1) @ self.matrix.t()).unflatten(1, self.shape)


@pytest.mark.parametrize("batch_size", [1, 7, 256])
@pytest.mark.parametrize("target", [None, 0, 3])
def test_only_the_right_component_of_the_right_capsule_changes(model, make_images, target, batch_size):
    model.decoder = LinearDecoder(model)
    image = make_images(1)[0]
    result = perturb_capsule(model, image, target=target, amplitude=0.3, steps=4, batch_size=batch_size)
    np.testing.assert_allclose(result.offsets, [-0.3, -0.1, 0.1, 0.3])
    capsules = model.eval()(image[None] / 255).capsules[0].detach()
    chosen = int(capsules.norm(dim=1).argmax()) if target is None else target
    assert result.target == chosen
    columns = model.decoder.matrix[:, chosen * 5 : chosen * 5 + 5]  # (pixels, D)
    np.testing.assert_allclose(result.reconstruction.ravel(), columns @ capsules[chosen], atol=1e-5)
    change = (result.images - result.reconstruction).reshape(5, 4, -1)
    expected = np.einsum("n,pd->dnp", result.offsets, columns.numpy())
    np.testing.assert_allclose(change, expected, atol=1e-5)
    np.testing.assert_allclose(result.lengths, capsules.norm(dim=1), atol=1e-4)


def test_the_centre_column_is_the_plain_reconstruction(make_model, make_images):
    model = make_model(in_shape=(3, 9, 13), num_classes=7)
    image = make_images(1, (3, 9, 13))[0]
    model.train()
    result = perturb_capsule(model, image)
    assert model.training
    assert result.images.shape == (5, 11, 3, 9, 13)
    assert result.offsets[5] == 0
    np.testing.assert_allclose(result.offsets, np.arange(-5, 6) * 0.05)
    plain = model.eval()(image[None] / 255).reconstruction[0].detach().numpy()
    np.testing.assert_allclose(result.reconstruction, plain, atol=1e-6)
    for row in result.images:
        np.testing.assert_allclose(row[5], plain, atol=1e-6)
        assert np.abs(row[0] - plain).max() > 1e-4
    np.testing.assert_allclose(result.image, image / 255)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 4}, "0 to 3, got 4"),
        ({"target": -1}, "0 to 3, got -1"),
        ({"amplitude": 0.0}, "amplitude must be above 0 and at most 1000, got 0.0"),
        ({"amplitude": 1e308}, "amplitude must be above 0 and at most 1000, got 1e[+]308"),
        ({"amplitude": math.nan}, "amplitude must be above 0 and at most 1000, got nan"),
        ({"steps": 1}, "steps must be 2 to 501, got 1"),
        ({"steps": 10**9}, "steps must be 2 to 501, got 1000000000"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_options(model, make_images, change, message):
    with pytest.raises(InputError, match=message):
        perturb_capsule(model, make_images(1)[0], **change)


def test_what_cannot_be_perturbed(model, cnn, make_model, make_images):
    with pytest.raises(InputError, match=r"BaselineCNN has no decoder.*sabour2017"):
        perturb_capsule(cnn, make_images(1)[0])
    with pytest.raises(InputError, match="has no decoder"):
        perturb_capsule(make_model(decoder=False), make_images(1)[0])
    with pytest.raises(InputError, match="network was built for"):
        perturb_capsule(model, make_images(2))


def test_the_figure_has_a_row_for_each_component_and_names_the_offsets(model, make_images, words):
    result = perturb_capsule(model, make_images(1)[0], target=2, steps=3, amplitude=0.25)
    figure = figure_perturbation(result, ["ant", "bee", "cow", "dog"])
    found = words(figure)
    assert any("cow" in word for word in found)
    assert {"−0.25", "0", "+0.25", "component", "added to the component", "image", "reconstruction"} <= set(found)
    assert {"0", "1", "2", "3", "4"} <= set(found)
    assert len(figure.axes[0].images) == 2 + 5 * 3
    np.testing.assert_allclose(figure.axes[0].images[2].get_array()[..., 0], result.images[0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(figure.axes[0].images[-1].get_array()[..., 0], result.images[4, 2, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("amplitude", "steps", "expected"),
    [
        (0.25, 11, ["−0.25", "−0.20", "−0.15"]),
        (0.5, 11, ["−0.5", "−0.4", "−0.3"]),
        (2.0, 5, ["−2", "−1", "0"]),
        (1.0, 4, ["−1.0000", "−0.3333", "+0.3333"]),
    ],
)
def test_offsets_are_written_with_as_few_decimals_as_tell_them(model, make_images, words, amplitude, steps, expected):
    figure = figure_perturbation(perturb_capsule(model, make_images(1)[0], amplitude=amplitude, steps=steps))
    found = words(figure)
    place = found.index(expected[0])
    assert found[place : place + 3] == expected


def test_one_capsule_of_several_objects_is_changed_and_decoded_alone(make_model, make_images):
    model, image = make_model(objects=2).eval(), make_images(1)[0]
    output = model(image[None] / 255)
    for target, place in ((None, 0), (int(output.decoded[0, 1]), 1)):
        result = perturb_capsule(model, image, target=target)
        assert result.target == output.decoded[0, place]
        np.testing.assert_allclose(result.reconstruction, output.reconstruction[0, place].detach(), atol=1e-6)
