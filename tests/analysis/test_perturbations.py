import math

import numpy as np
import pytest
import torch
from torch import nn

from torchcaps.analysis import Perturbation, Perturbations, perturb_capsule, visibility
from torchcaps.errors import InputError

NAMES = ["ant", "bee", "cow", "dog"]


def drawn(results, class_names=None):
    return Perturbations(results, class_names).figures()[""]


class LinearDecoder(nn.Module):
    """Pixels = matrix · all components of all capsules: what each component does can be read off."""

    def __init__(self, model) -> None:
        super().__init__()
        self.shape = model.in_shape
        random = torch.Generator().manual_seed(2)
        self.matrix = torch.randn(math.prod(self.shape), model.num_classes * 5, generator=random)

    def forward(self, capsules):
        return (capsules.flatten(1) @ self.matrix.t()).unflatten(1, self.shape)


def test_only_the_right_component_of_the_right_capsule_changes(model, make_images):
    model.decoder, image = LinearDecoder(model), make_images(1)[0]
    capsules = model.eval()(image[None] / 255).capsules[0].detach()
    for target in (None, 0, 3):
        result = perturb_capsule(model, image, target=target, amplitude=0.3, steps=4)
        np.testing.assert_allclose(result.offsets, [-0.3, -0.1, 0.1, 0.3])
        chosen = int(capsules.norm(dim=1).argmax()) if target is None else target
        assert (result.target, result.components) == (chosen, (0, 1, 2, 3, 4))
        columns = model.decoder.matrix[:, chosen * 5 : chosen * 5 + 5]  # (pixels, D)
        np.testing.assert_allclose(result.reconstruction.ravel(), columns @ capsules[chosen], atol=1e-5)
        change = (result.images - result.reconstruction).reshape(5, 4, -1)
        expected = np.einsum("n,pd->dnp", result.offsets, columns.numpy())
        np.testing.assert_allclose(change, expected, atol=1e-5)
        np.testing.assert_allclose(result.lengths, capsules.norm(dim=1), atol=1e-4)
        np.testing.assert_allclose(result.image, image / 255)
    some = perturb_capsule(model, image, target=3, components=[3, 1], amplitude=0.3, steps=4)
    np.testing.assert_allclose(some.images, result.images[[3, 1]], atol=1e-6)


def test_one_capsule_of_several_objects_is_changed_and_decoded_alone(make_model, make_images):
    model, image = make_model(objects=2).eval(), make_images(1)[0]
    output = model(image[None] / 255)
    for target, place in ((None, 0), (int(output.decoded[0, 1]), 1)):
        result = perturb_capsule(model, image, target=target)
        assert result.target == output.decoded[0, place]
        np.testing.assert_allclose(result.reconstruction, output.reconstruction[0, place].detach(), atol=1e-6)


def test_changes_go_from_the_lowest_to_the_highest(model, make_images, words):
    for amplitude, expected, written in (
        (0.25, np.arange(-5, 6) * 0.05, ["−0.25", "−0.2", "−0.15"]),
        (1.0, [-1, -1 / 3, 1 / 3, 1], ["−1", "−0.3333", "+0.3333"]),
        ((-1.0, 0.5), [-1, -0.5, 0, 0.5], ["−1", "−0.5", "0"]),
        (1000, [-1000, 1000], ["−1000", "+1000"]),
    ):
        result = perturb_capsule(model, make_images(1)[0], amplitude=amplitude, steps=len(expected))
        np.testing.assert_allclose(result.offsets, expected, atol=1e-12)
        np.testing.assert_array_equal(result.offsets == 0, np.abs(expected) < 1e-12)  # exactly, as the figure marks it
        assert np.isfinite(result.images).all()
        found = words(drawn([result]))
        place = found.index(written[0])
        assert found[place : place + len(written)] == written


def test_bad_options(model, make_model, make_images):
    for network, change, message in (
        (model, {"target": 4}, "target must be 0 to 3, got 4"),
        (model, {"amplitude": math.nan}, "amplitude must be above 0, .* got nan"),
        (model, {"amplitude": 1e308}, r"1,000 either way, got 1e\+308"),
        (model, {"amplitude": (0.5, 0.5)}, r"a lower and a higher change.*got \(0.5, 0.5\)"),
        (model, {"components": [0, -1]}, "components must be 0 to 4, got -1"),
        (make_model(decoder=False), {}, "needs a decoder"),
    ):
        with pytest.raises(InputError, match=message):
            perturb_capsule(network, make_images(1)[0], **change)


def assert_drawn(figure, *images) -> None:
    for got, wanted in zip(figure.axes[0].images, images, strict=True):
        np.testing.assert_allclose(got.get_array()[..., 0], wanted[0], atol=1e-6)


def test_the_figure_has_a_row_for_each_component_and_names_the_offsets(model, make_images, words):
    result = perturb_capsule(model, make_images(1)[0], target=2, steps=3, amplitude=0.25)
    figure = drawn([result], NAMES)
    found = words(figure)
    assert any("cow" in word and result.score in word for word in found)
    assert {"−0.25", "0", "+0.25", "added", "image", "reconstruction"} <= set(found)
    assert {f"component {d}" for d in range(5)} <= set(found)
    assert_drawn(figure, result.image, result.reconstruction, *result.images.reshape(15, *model.in_shape))


def test_visibility_is_the_largest_change_of_a_pixel_and_0_where_the_pose_does_not_matter(model, make_images):
    images = make_images(3)
    seen = visibility(model, images, amplitude=0.3)
    ends = [perturb_capsule(model, image, amplitude=0.3, steps=2).images for image in images]
    assert seen == pytest.approx(np.mean([np.abs(each[:, 1] - each[:, 0]).max((1, 2, 3)) for each in ends]))
    assert 0 < visibility(model, images) < seen < 1
    with torch.no_grad():
        next(model.decoder.parameters()).zero_()  # the first weights: those of the capsules
    assert visibility(model, images) == 0
    with pytest.raises(InputError, match="give at least one image"):
        visibility(model, images[:0])


def one_component(model, images, targets, **options) -> list[Perturbation]:
    pairs = zip(images, targets, strict=True)
    return [perturb_capsule(model, image, target=each, components=[2], **options) for image, each in pairs]


def test_a_figure_of_one_component_has_a_row_for_each_image(model, make_images, words):
    results = one_component(model, make_images(3), [0, 3, 0], amplitude=0.5, steps=3)
    figure = drawn(results, NAMES)
    found = words(figure)
    assert found[0] == "Component 2 of a capsule of each image"
    assert [word for word in found if word.startswith("capsule ")] == ["capsule ant", "capsule dog", "capsule ant"]
    assert [word for word in found if word.startswith("length ")] == [each.score for each in results]
    assert_drawn(figure, *(image for each in results for image in (each.image, each.reconstruction, *each.images[0])))
    same = one_component(model, make_images(2), [1, 1])
    report = Perturbations(same, NAMES, ["first", "second"], "the label's")
    assert "Component 2 of the label's capsule" in words(report.figures()[""])
    length = f"{same[0].lengths[1]:.3f}"
    assert report.tables()[0].note[0] == f"first: component 2 of capsule bee (the label's), length {length}"
    assert [each["class"] for each in report.to_dict()] == ["bee", "bee"]


def test_bad_figures(model, make_images):
    images = make_images(1)
    results = one_component(model, images, [0])
    further = one_component(model, images, [0], amplitude=0.3)
    for others in ([], [perturb_capsule(model, images[0])] * 2, results + further):
        with pytest.raises(InputError, match="of one shape of which the same one component was changed"):
            drawn(others)
