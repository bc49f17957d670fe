"""Thresholds of unsure answers."""

import math

import numpy as np
import pytest

from torchcaps.analysis import Calibration, Prediction, calibrate, predict, squared_errors
from torchcaps.analysis.calibration import add_objects
from torchcaps.errors import InputError

MEASURED = Calibration(score=0.8, error=40.0, images=100)


@pytest.mark.parametrize(
    ("calibration", "answer", "reasons"),
    [
        (MEASURED, (0.8, 40), ()),
        (MEASURED, (0.9, None), ()),
        (MEASURED, (0.9, None, 0.8), ()),
        (MEASURED, (0.5, 20), ("length 0.50 is below 0.80",)),
        (MEASURED, (0.9, 70), ("the redrawn image is off by 70.0 (limit 40.0)",)),
        (MEASURED, (0.9, None, 0.85), ("the runner-up has length 0.85",)),
        (MEASURED, (0.6, None, 0.1, "activation"), ("activation 0.60 is below 0.80",)),
        (Calibration(), (0.3, 1e9), ("length 0.30 is below 0.50",)),
        (Calibration(error=1.0), (0.9, 2.0), ("the redrawn image is off by 2.0 (limit 1.0)",)),
    ],
)
def test_answers_beyond_a_threshold_are_unsure(calibration, answer, reasons) -> None:
    assert calibration.caveats(*answer) == reasons


def test_all_reasons_are_given() -> None:
    assert len(MEASURED.caveats(0.1, 90, 0.1)) == 3


def test_the_lowest_predicted_score_and_the_runner_up_decide_with_several_objects() -> None:
    scores = np.array([[0.9, 0.85, 0.1], [0.9, 0.5, 0.48]], np.float32)
    said = Prediction.of(np.zeros((2, 1, 2, 2)), np.array([[0, 1], [0, 1]]), scores, None, Calibration(score=0.6))
    assert said.caveats[0] == ()
    assert said.caveats[1] == ("length 0.50 is below 0.60", "the runner-up has length 0.48")


def test_squared_errors_add_the_objects_of_an_image_up_to_white() -> None:
    image = np.array([[[[1.0, 0.5]]]], np.float32)
    objects = np.array([[[[[0.75, 0.25]]], [[[0.5, 0.0]]]]], np.float32)  # (N, P, C, H, W)
    np.testing.assert_allclose(add_objects(objects), [[[[1.0, 0.25]]]])
    np.testing.assert_allclose(squared_errors(image, objects), [0.0625])
    assert add_objects(image) is image


@pytest.mark.parametrize("objects", [1, 2])
def test_a_calibration_is_the_quantiles_of_the_images(make_model, make_images, objects: int) -> None:
    model, images = make_model(objects=objects), make_images(300)
    usual, said = calibrate(model, images), predict(model, images)
    off = squared_errors(images.numpy() / 255, said.reconstruction)
    assert usual.images == 300
    assert abs((np.sort(said.scores, 1)[:, -objects] > usual.score).mean() - 0.99) < 0.01
    assert abs((off < usual.error).mean() - 0.99) < 0.01


def test_without_a_decoder_only_scores_are_measured(cnn, make_images) -> None:
    usual = calibrate(cnn, make_images(20))
    assert (usual.error, usual.images) == (None, 20)
    with pytest.raises(InputError, match="of a calibration"):
        calibrate(cnn, make_images(3) * math.nan)
    for value in ({"score": "1"}, {"score": math.nan}, {"error": math.inf}, {"images": -1}):
        with pytest.raises(InputError, match="of a calibration must be"):
            Calibration(**{"score": 1, "error": 1, "images": 1} | value)
