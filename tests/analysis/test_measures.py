"""Every measure × every kind of images: it measures what it names, or refuses in one sentence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from torchcaps.analysis import (
    accuracy_curve,
    attack,
    calibrate,
    detect,
    evaluate,
    fit_detector,
    probe,
    with_affine_factors,
)
from torchcaps.analysis.robustness import rotate
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import Network, create_model

N, EPSILON = 60, 1e-4


def numbers(kind: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    if kind == "sequences":
        return 30 * torch.randn(N, 2, 1, 24, generator=random)
    if kind == "sequences of 0..1":
        return torch.rand(N, 2, 1, 24, generator=random)
    if kind == "padded sequences":
        return numbers("sequences").index_fill(3, torch.arange(15, 24), torch.nan)
    if kind == "rows of pixels":
        return torch.randint(0, 256, (N, 2, 1, 24), generator=random, dtype=torch.uint8)
    pixels = torch.randint(0, 256, (N, 1, 10, 12), generator=random, dtype=torch.uint8)
    return {"images": pixels, "floats": pixels / 255, "normalised": (pixels / 255 - 0.3) / 0.5}[kind]


def images_of(kind: str) -> ImageSet:
    return ImageSet(numbers(kind), torch.arange(N) % 2, factors={"size": torch.linspace(0, 1, N).sin()})


def network_of(kind: str, capsules: bool) -> Network:
    torch.manual_seed(0)
    shape = images_of(kind).in_shape
    if not capsules:
        return create_model("baseline-cnn", shape, 2, channels=(4,), kernel=3, hidden=(6,)).eval()
    if shape[1] == 1:
        return create_model("sequences", shape, 2).eval()
    options: Any = {"conv_kernel": 3, "primary_kernel": 3, "conv_channels": 6, "primary_types": 2, "primary_dim": 4}
    return create_model("sabour2017", shape, 2, **options, decoder_hidden=(8,)).eval()


def holds_attack(network: Network, images: ImageSet, **how: Any) -> None:
    """The change of every number is within ε, so an attack of almost no size changes no answer."""
    changed = attack(network, images.images, images.labels, EPSILON, **how)
    plain = images.images / 255 if images.images.dtype == torch.uint8 else images.images
    assert (changed - plain).abs().max() <= EPSILON * 1.01
    kind: Any = ("pgd" if how else "fgsm") + "-scores" * ("goal" in how)
    curve = accuracy_curve(network, images, kind, (0, EPSILON), steps=2)
    assert curve.accuracy[0] == curve.accuracy[1] == evaluate(network, images).accuracy
    assert curve.fill is None


def holds_rotation(network: Network, images: ImageSet) -> None:
    """A full turn changes nothing, and the pixels that enter are those that were asked for."""
    curve = accuracy_curve(network, images, "rotation", (0, 360), fill="edge")
    assert curve.accuracy[0] == curve.accuracy[1] == evaluate(network, images).accuracy
    assert (curve.fill, curve.title) == ("edge", "Rotation, filled with the edge")
    grey = ImageSet(torch.full_like(images.images, 100 if images.images.dtype == torch.uint8 else 0.4), images.labels)
    assert len(set(accuracy_curve(network, grey, "rotation", (0, 30), fill="edge").accuracy)) == 1


def holds_affine_factors(network: Network, images: ImageSet) -> None:
    assert {"rotation", "scale", "shear", "shift right", "shift down"} == set(with_affine_factors(images).factors)
    probes = probe(network, with_affine_factors(images), with_affine_factors(images, seed=1))
    assert all(-9 < value <= 1 for each in probes for value in each.r2.values())


def holds_factors(network: Network, images: ImageSet) -> None:
    assert probe(network, images, images)[-1].numbers == "pixels"


def holds_detection(network: Network, images: ImageSet, measure: Any, **attacks: Any) -> None:
    detector = fit_detector(network, images, measure=measure)
    found = detect(network, images, detector, steps=1, **attacks).found
    assert all(0 < limit < float("inf") for limit in detector.limits)
    assert all(0 <= each.detected <= each.fooled <= N for each in found)


def holds_calibration(network: Network, images: ImageSet) -> None:
    assert 0 < calibrate(network, images.images).score < 1


MEASURES: dict[str, Callable[[Network, ImageSet], None]] = {
    "FGSM": holds_attack,
    "PGD on the scores": partial(holds_attack, goal="scores", steps=2, seed=0),
    "rotation": holds_rotation,
    "probe of affine changes": holds_affine_factors,
    "probe of factors": holds_factors,
    "detection by the score": partial(holds_detection, measure="score"),
    "detection of attacks": partial(holds_detection, measure="score", epsilons=(0.1,)),
    "detection by reconstruction": partial(holds_detection, measure="reconstruction"),
    "calibration": holds_calibration,
}
WITHOUT_RANGE = {"sequences", "sequences of 0..1", "padded sequences", "normalised"}
NEED_PIXELS = set(MEASURES) - {"calibration", "detection by the score"}
NEED_PLANES = {"rotation", "probe of affine changes"}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("capsules", [True, False], ids=["capsules", "cnn"])
@pytest.mark.parametrize("kind", ["images", "floats", "rows of pixels", *sorted(WITHOUT_RANGE)])
def test_a_measure_measures_what_it_names_or_refuses(kind: str, capsules: bool, measure: str) -> None:
    network, images = network_of(kind, capsules), images_of(kind)
    if "reconstruction" in measure and network.decoder is None:
        sentence: str | None = "needs a decoder"
    elif kind == "padded sequences" and not capsules and measure not in NEED_PIXELS - {"detection of attacks"}:
        sentence = "answers to 60 images are NaN|must be .*, got nan"  # convolutions of a CNN do not know padding
    elif measure in NEED_PLANES and network.in_shape[1] == 1:
        sentence = "needs? images of several rows and columns"
    elif measure in NEED_PIXELS and kind in WITHOUT_RANGE:
        sentence = "needs pixels of 0..1"
    else:
        return MEASURES[measure](network, images)
    with pytest.raises(InputError, match=sentence):
        MEASURES[measure](network, images)
    return None


def test_rotated_images_are_filled_with_zeros_or_with_the_edge() -> None:
    bright = torch.full((1, 1, 20, 20), 0.7)
    assert rotate(bright, 45)[0, 0, 0, 0] == 0
    torch.testing.assert_close(rotate(bright, 45, "edge"), bright)
    factors = with_affine_factors(ImageSet((bright * 255).byte(), torch.tensor([1])), fill="edge")
    assert factors.images.unique().tolist() == [178]
