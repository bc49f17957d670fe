import dataclasses

import numpy as np
import pytest
import torch

from support import small
from torchcaps.analysis import Probing, probe, with_affine_factors
from torchcaps.analysis.probing import _numbers
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import create_model


def bright(count: int, seed: int) -> ImageSet:
    """Images of 8×10 in four classes, of which a part is more or less bright, and what follows from that.

    A linear map reads an angle off only as sine and cosine, as 360° is 0°, and what each class has its sign of only by
    a map for each class.
    """
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, 8, 10), dtype=torch.uint8, generator=random)
    light = torch.rand(count, generator=random)
    images[:, :, 2:6, 3:7] += (light * 190).to(torch.uint8)[:, None, None, None]
    labels = torch.arange(count) % 4
    factors = {"light": light, "signed": (light - 0.5) * (labels - 1.5).sign(), "azimuth": (330 + 60 * light) % 360}
    factors |= {"noise": 100 * torch.rand(count, generator=random), "thing": torch.arange(count)}
    return ImageSet(images, labels, factors=factors)


def test_pose_and_pixels_of_a_network(model, words) -> None:
    found = probe(model, bright(200, 1), bright(100, 2))
    assert [(each.numbers, each.width) for each in found] == [("pose", 5), ("pixels", 80)]
    for each, least in zip(found, (0.5, 0.95), strict=True):
        assert list(each.r2) == ["light", "signed", "azimuth", "noise"]  # "thing" only names what is seen
        assert max(*each.shuffled.values(), each.r2.pop("noise")) < 0.2
        assert min(each.r2.values()) > least
    other = [found[0], dataclasses.replace(found[1], r2={"light": 0.1})]
    for yours, pixels in ((found, set()), (other, {"yours: pixels (80)"})):  # the same pixels once
        both = set(words(Probing({"mine": found, "yours": yours}, {}).figures()[""]))
        assert {"mine: pose (5)", "yours: pose (5)", "pixels (80)", "light"} | pixels <= both


@pytest.mark.parametrize("preset", ["hvc2021-learned"])
def test_features_of_any_network_without_capsules_are_probed(preset: str) -> None:
    side = 28
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (80, 1, side, side), dtype=torch.uint8, generator=random)
    factors = {"light": images.float().mean((1, 2, 3))}
    data = ImageSet(images, torch.arange(80) % 4, factors=factors)
    network = create_model(preset, (1, side, side), 4, **small(preset))
    found = probe(network, data, data)
    assert [each.numbers for each in found] == ["features", "principal components", "pixels"]


def test_it_is_the_pose_of_the_images_own_class(make_model) -> None:
    model, images = make_model(), bright(80, 1)
    model.class_capsules.transform.matrices.data[:, 1:] = 0  # only class 0 has a pose
    name, numbers = _numbers(model, images)
    sizes = [np.abs(numbers[(images.labels == label).numpy()]).max() for label in range(4)]
    assert name == "pose"
    assert sizes[0] > 1e-3 > max(sizes[1:])


def test_digits_under_known_affine_maps() -> None:
    random = np.random.default_rng(0)
    images = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    places = random.integers(9, 19, (40, 2))
    for image, (y, x) in zip(images, places, strict=True):
        image[0, y, x] = 255
    made = with_affine_factors(ImageSet(images, torch.arange(40) % 4), seed=3)
    factors = {name: values.numpy() for name, values in made.factors.items()}
    assert set(factors) == {"rotation", "scale", "shear", "shift right", "shift down"}
    for name, low, high in (("rotation", -20, 20), ("scale", 0.8, 1.2), ("shear", -0.2, 0.2), ("shift right", -2, 2)):
        assert low <= factors[name].min() < low + 0.2 * (high - low)
        assert high >= factors[name].max() > high - 0.2 * (high - low)
    # where the dot went: scaled, sheared, turned, moved
    y, x = (places - 13.5).T * factors["scale"]
    x += factors["shear"] * y
    turn = np.radians(factors["rotation"])
    x, y = np.cos(turn) * x + np.sin(turn) * y, -np.sin(turn) * x + np.cos(turn) * y
    x, y = x + factors["shift right"], y + factors["shift down"]
    ink = made.images[:, 0].double().numpy()
    for axis, wanted in zip(np.indices((28, 28)) - 13.5, (y, x), strict=True):
        assert np.abs((ink * axis).sum((1, 2)) / ink.sum((1, 2)) - wanted).max() < 0.35
    again, other = (with_affine_factors(ImageSet(images, torch.arange(40) % 4), seed=seed) for seed in (3, 4))
    assert torch.equal(again.images, made.images)
    assert not torch.equal(other.images, made.images)


def test_what_cannot_be_probed(make_model) -> None:
    fitted, held_out = bright(200, 1), bright(100, 2)
    plain = ImageSet(fitted.images, fitted.labels)
    for images, words in (
        ((plain, held_out), "no factors that are quantities"),
        ((fitted, plain), "held-out images have no factor light"),
        ((fitted.take(12), held_out), "at least 10 images of each class to fit on, got 3 of 0"),
        ((fitted, held_out.take(1)), "the factor light is the same in all held-out images"),
    ):
        with pytest.raises(InputError, match=words):
            probe(make_model(), *images)
    two = create_model("sabour2017-multimnist", (1, 36, 36), 10, conv_channels=4, primary_types=1, decoder=False)
    with pytest.raises(InputError, match="one object, but this network finds 2"):
        probe(two, fitted, held_out)
