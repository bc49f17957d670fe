from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps.analysis import Perturbation, figure_component, figure_perturbation, perturb_capsule
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


def test_no_image(model) -> None:
    with pytest.raises(TypeError, match=r"images must be uint8 of 0..255 or floating-point of 0..1, got dict"):
        perturb_capsule(model, {"a": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 4}, "0 to 3, got 4"),
        ({"target": -1}, "0 to 3, got -1"),
        ({"amplitude": 0.0}, "amplitude, .* must be above 0, or a lower and a higher change, got 0.0"),
        ({"amplitude": math.nan}, "amplitude, .* must be above 0, .* got nan"),
        ({"amplitude": 1e308}, r"amplitude, .* must be at most 1,000.*got 1e\+308"),
        ({"amplitude": math.inf}, "amplitude, .* must be at most 1,000.*got inf"),
        ({"amplitude": (-2000.0, 1.0)}, "amplitude, .* must be at most 1,000"),
        ({"amplitude": (0.5, 0.5)}, r"amplitude, .* must be .* a lower and a higher change, got \(0.5, 0.5\)"),
        ({"amplitude": (math.nan, 0.5)}, r"a lower and a higher change, got \(nan, 0.5\)"),
        ({"components": [5]}, "components must be from 0 to 4, those of a class capsule, got 5"),
        ({"components": [0, -1]}, "components must be from 0 to 4.*got 0, -1"),
        ({"components": []}, "components must be from 0 to 4.*got none"),
        ({"steps": 1}, "steps must be 2 to 500, got 1"),
        ({"steps": 501}, "steps must be 2 to 500, got 501"),
        ({"steps": 2.5}, "steps must be a whole number, 2 to 500, got 2.5"),
        ({"amplitude": "a"}, "amplitude, .* must be one number or two"),
        ({"amplitude": (1, 2, 3)}, "amplitude, .* must be one number or two"),
        ({"components": ["a"]}, "components must be from 0 to 4.*got a"),
        ({"target": torch.tensor(1)}, "target must be a class from 0 to 3"),
        ({"batch_size": 0}, "batch_size must be 1 to"),
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
    assert {"−0.25", "0", "+0.25", "component", "added", "image", "reconstruction"} <= set(found)
    assert {"0", "1", "2", "3", "4"} <= set(found)
    assert len(figure.axes[0].images) == 2 + 5 * 3
    np.testing.assert_allclose(figure.axes[0].images[1].get_array()[..., 0], result.images[0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(figure.axes[0].images[16].get_array()[..., 0], result.images[4, 2, 0], atol=1e-6)


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


def test_chosen_components_are_those_of_all_of_them(model, make_images):
    image = make_images(1)[0]
    whole, chosen = (perturb_capsule(model, image, components=each, steps=4) for each in (None, [3, 1]))
    assert whole.components == (0, 1, 2, 3, 4)
    assert chosen.components == (3, 1)
    assert chosen.images.shape == (2, 4, *model.in_shape)
    np.testing.assert_allclose(chosen.images, whole.images[[3, 1]], atol=1e-6)


@pytest.mark.parametrize(
    ("amplitude", "steps", "expected"),
    [
        ((-1.0, 0.5), 4, [-1, -0.5, 0, 0.5]),
        ((-0.1, 0.3), 5, [-0.1, 0, 0.1, 0.2, 0.3]),
        ((0.2, 0.6), 3, [0.2, 0.4, 0.6]),
        ((-0.25, 0.25), 11, np.arange(-5, 6) * 0.05),
        (1000, 2, [-1000, 1000]),
    ],
)
def test_changes_go_from_the_lowest_to_the_highest(model, make_images, amplitude, steps, expected):
    result = perturb_capsule(model, make_images(1)[0], amplitude=amplitude, steps=steps)
    np.testing.assert_allclose(result.offsets, expected, atol=1e-12)
    np.testing.assert_array_equal(result.offsets == 0, np.abs(expected) < 1e-12)  # exactly zero, as the figure marks it
    assert np.isfinite(result.images).all()


def one_component(model, images, targets=None, component=2, **options) -> list[Perturbation]:
    targets = [None] * len(images) if targets is None else targets
    return [
        perturb_capsule(model, image, target=target, components=[component], **options)
        for image, target in zip(images, targets, strict=True)
    ]


def test_a_figure_of_one_component_has_a_row_for_each_image(model, make_images, words):
    results = one_component(model, make_images(3), [0, 3, 0], amplitude=0.5, steps=3)
    figure = figure_component(results, ["ant", "bee", "cow", "dog"])
    found = words(figure)
    assert found[0] == "Component 2 of a capsule of each image"
    assert [word for word in found if word.startswith("capsule ")] == ["capsule ant", "capsule dog", "capsule ant"]
    lengths = [f"length {each.lengths[each.target]:.2f}" for each in results]
    assert [word for word in found if word.startswith("length ")] == lengths
    assert {"image", "reconstruction", "−0.5", "0", "+0.5", "added"} <= set(found)
    drawn = [image.get_array()[..., 0] for image in figure.axes[0].images]
    expected = [image for each in results for image in (each.image, each.reconstruction, *each.images[0])]
    for got, wanted in zip(drawn, expected, strict=True):
        np.testing.assert_allclose(got, wanted[0], atol=1e-6)


def test_the_title_names_the_capsule_where_it_is_the_same_of_all_images(model, make_images, words):
    results = one_component(model, make_images(2), [1, 1])
    assert "Component 2 of the capsule “bee”" in words(figure_component(results, ["ant", "bee", "cow", "dog"]))
    assert "mine" in words(figure_component(results, title="mine"))


def test_bad_figures(model, make_images):
    image, wide = make_images(1)[0], make_images(1, (1, 8, 12))[0]
    (result,) = one_component(model, [image])
    with pytest.raises(InputError, match=r"at least one image.*got none"):
        figure_component([])
    with pytest.raises(InputError, match=r"one component was changed.*got components \(0, 1, 2, 3, 4\)"):
        figure_component([perturb_capsule(model, image)])
    with pytest.raises(InputError, match=r"the same of all images, got components \(2,\) and \(1,\)"):
        figure_component([result, *one_component(model, [image], component=1)])
    with pytest.raises(InputError, match="the same amplitude and number of steps"):
        figure_component([result, *one_component(model, [image], amplitude=0.3)])
    with pytest.raises(InputError, match="the same shape"):
        figure_component([result, dataclasses.replace(result, image=wide.numpy())])
    with pytest.raises(InputError, match="4 names"):
        figure_component([result], ["a"])
    with pytest.raises(InputError, match="5,000 images in 500 rows are drawn in one figure, got 501 rows of 11"):
        figure_component([result] * 501)
    many = dataclasses.replace(result, components=(2,) * 460, images=result.images.repeat(460, 0))
    with pytest.raises(InputError, match="5,000 images in 500 rows are drawn in one figure, got 460 rows of 11"):
        figure_perturbation(many)
