"""What is usual for a network, and answers beyond it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from support import small
from torchcaps import create_model
from torchcaps.analysis import Calibration, calibrate, distances, predict
from torchcaps.errors import InputError


def test_answers_beyond_the_bounds_are_unsure() -> None:
    usual = Calibration(score=0.8, distance=0.4, images=100)
    assert usual.caveats(0.8, 0.4) == ()
    assert usual.caveats(0.9, None) == ()
    assert usual.caveats(0.5, 0.2) == ("its score 0.50 is below 0.80, the bound of 99 % of the validation images",)
    assert usual.caveats(0.9, 0.7) == (
        "unlike anything it was trained on: its reconstruction is off by 0.70, more than 0.40, the bound of 99 % of "
        "the validation images",
    )
    assert len(usual.caveats(0.1, 0.9)) == 2
    assert Calibration().caveats(0.3, None) == ("its score 0.30 is below 0.50",)
    assert usual.caveats(0.9, None, 0.8) == ()
    assert usual.caveats(0.9, None, 0.85) == ("another class has nearly the same score, 0.85 beside 0.90",)


def test_distances_by_hand() -> None:
    images = np.zeros((3, 1, 2, 2))
    images[0] = 1.0
    images[1] = 0.5
    drawn = np.zeros((3, 1, 2, 2))
    drawn[0] = 0.5
    drawn[2] = 0.5
    np.testing.assert_allclose(distances(images, drawn), [0.25, 1, 1])  # 4·0.25/4, 1/1, 1/max(0, 1)
    two = np.zeros((1, 2, 1, 2, 2))
    two[0, :, 0, 0] = 0.7  # laid over each other, cut off at 1
    np.testing.assert_allclose(distances(images[:1], two), [0.5])


@pytest.mark.parametrize("objects", [1, 2])
def test_a_calibration_is_the_quantiles_of_the_images(objects: int) -> None:
    torch.manual_seed(0)
    model = create_model("sabour2017", **small("sabour2017", objects=objects))
    images = torch.randint(0, 256, (300, *model.in_shape), dtype=torch.uint8)
    usual = calibrate(model, images, batch_size=64)
    said = predict(model, images)
    given = np.sort(said.scores, 1)[:, -objects]
    assert said.reconstruction is not None
    off = distances(images.numpy() / 255, said.reconstruction)
    assert usual.images == 300
    assert abs((given > usual.score).mean() - 0.99) < 0.01
    assert abs((off < usual.distance).mean() - 0.99) < 0.01


def test_without_a_decoder_only_scores_are_measured() -> None:
    model = create_model("baseline-cnn", **small("baseline-cnn"))
    usual = calibrate(model, torch.rand(20, *model.in_shape))
    assert (usual.distance, usual.images) == (Calibration.distance, 20)


@pytest.mark.parametrize("pixel", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_is_usual_of_pixels_that_are_no_numbers(pixel: float) -> None:
    model = create_model("sabour2017", **small("sabour2017"))
    images = torch.rand(3, *model.in_shape)
    images[1, 0, 2, 3] = pixel
    with pytest.raises(InputError, match=r"what is usual is measured on pixels of 0..1, got NaN or one beyond 1e"):
        calibrate(model, images)


@pytest.mark.parametrize("values", [{"score": "1"}, {"distance": math.nan}, {"images": -1}, {"score": 1e39}])
def test_calibrations_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Calibration(**values)
