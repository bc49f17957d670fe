"""What a network says of images and files, and when the answer is unsure."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from own_parts import register
from torchcaps.analysis import (
    Calibration,
    PhotoAnswers,
    Prediction,
    calibrate,
    evaluate,
    load_image,
    perturb_capsule,
    predict,
    squared_errors,
)
from torchcaps.analysis.inference import BATCH
from torchcaps.datasets import ImageSet, Photo, Prepared
from torchcaps.errors import InputError


def test_the_aspect_ratio_is_kept_and_the_rest_has_the_colour_of_the_border(tmp_path):
    page = Image.new("L", (20, 10), 220)
    page.paste(0, (1, 1, 19, 9))
    page.save(tmp_path / "a.png")
    image, inverted, stretched = (
        load_image(tmp_path / "a.png", (1, 28, 28), **options) for options in ({}, {"invert": True}, {"fit": "stretch"})
    )
    assert (image[0, 10:18, 6:22] < 20).all()
    assert (image[:, :7] == 220).all()
    assert (image[:, 21:] == 220).all()
    assert torch.equal(inverted, 255 - image)
    assert (stretched[0, 6:22, 6:22] < 20).all()


@pytest.mark.parametrize("objects", [1, 2])
def test_predictions_are_the_networks(make_model, make_images, objects):
    model, images = make_model(objects=objects), make_images(BATCH + 4)
    first = torch.arange(len(images)) % 4
    targets = torch.stack([first, (first + 1) % 4], 1)[:, :objects].squeeze(1)
    free, told = predict(model, images), predict(model, images, targets)
    output, chosen = (model.eval()(images / 255, each) for each in (None, targets))
    highest = output.scores.argsort(1, descending=True)[:, :objects].squeeze(1)
    for got, wanted in ((free, output), (told, chosen)):
        np.testing.assert_array_equal(got.classes, highest)
        np.testing.assert_allclose(got.lengths, output.lengths.detach(), atol=1e-6)
        np.testing.assert_allclose(got.reconstruction, wanted.reconstruction.detach(), atol=1e-6)
    assert np.abs(told.reconstruction - free.reconstruction).max() > 1e-4
    np.testing.assert_array_equal(predict(model, images / 255).lengths, predict(model, images).lengths)


def test_what_cannot_be_predicted(make_model, make_images):
    one, two, images = make_model(), make_model(objects=2), make_images(2)
    for model, given, targets, message in (
        (one, make_images(0), None, "at least one image"),
        (one, make_images(1, (3, 8, 10)), None, r"\(1, 3, 8, 10\)"),
        (one, images, torch.tensor([1]), r"shape \(2,\)"),
        (one, images, torch.tensor([0, 4]), r"0\.\.3, got 0\.\.4"),
        (one, images, [0, 1], "predict: targets must be a .*, got list"),
        (two, images, torch.tensor([0, 1]), r"\(2, 2\), 2 for each image"),
        (two, images, torch.tensor([[0, 1], [2, 2]]), "with a class twice"),
    ):
        with pytest.raises(InputError, match=message):
            predict(model, given, targets)
    with pytest.raises(TypeError, match="images must be numbers"):
        predict(one, ["a", "b"])
    with pytest.raises(InputError, match=r"got float32 from 0 to 255; .* such as scale=\(0, 255\)"):
        predict(one, torch.tensor([0.0, 255.0]).expand(2, 1, 8, 5, 2).reshape(2, 1, 8, 10))


def test_a_network_whose_routing_gives_activations_goes_by_them(make_model, make_images, monkeypatch):
    """Its poses are all of length 3, and the last class is always the most active."""
    register(monkeypatch)
    model, images, labels = make_model(routing="active").eval(), make_images(4), torch.tensor([3, 0, 1, 3])
    with torch.no_grad():
        output = model(images / 255)
    said, evaluation = predict(model, images), evaluate(model, ImageSet(images, labels))
    assert (said.classes.tolist(), said.score_name, evaluation.accuracy) == ([3] * 4, "activation", 0.5)
    for scores in (said.scores, evaluation.scores):
        np.testing.assert_allclose(scores, output.scores, atol=1e-6)
    by_label = predict(model, images, torch.full((4,), 3))
    np.testing.assert_allclose(said.reconstruction, by_label.reconstruction, atol=1e-6)
    changed = perturb_capsule(model, images[0], steps=3)
    assert (changed.target, changed.score) == (3, f"activation {output.scores[0, 3]:.2f}")


def test_answers_beyond_the_bounds_are_unsure() -> None:
    usual = Calibration(score=0.8, error=40.0, images=100)
    assert usual.caveats(0.8, 40) == usual.caveats(0.9, None) == usual.caveats(0.9, None, 0.8) == ()
    (low,), (far,), (near,) = usual.caveats(0.5, 20), usual.caveats(0.9, 70), usual.caveats(0.9, None, 0.85)
    assert low == "its score 0.50 is below 0.80, the bound of 99 % of the validation images"
    assert "unlike the training images" in far
    assert "0.85 beside 0.90" in near
    assert len(usual.caveats(0.1, 90)) == 2
    assert Calibration().caveats(0.3, 1e9) == ("its score 0.30 is below 0.50",)


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


def test_a_file_has_its_class_its_scores_and_why_it_is_unsure(words) -> None:
    prepared = Prepared(np.zeros((1, 28, 28), np.uint8), ("dark ink turned light",), (90, 180, 450, 540))
    scores, drawn, unsure = np.float32([[0.1, 0.3]]), np.zeros((1, 1, 28, 28)), "its score 0.30 is below 0.50"
    said = Prediction(np.array([1]), scores, drawn, [(unsure,)])
    photo = Photo(np.full((3, 900, 1800), 200, np.uint8), prepared)
    answers = PhotoAnswers([Path("a $file$.jpg")], [prepared], said, ("cat", "dog\x1b"), [photo])
    (found,) = answers.to_dict()
    assert (found["image"], found["class"]) == ("a $file$.jpg", "dog\x1b")
    assert (found["prepared"], found["unsure"]) == (("dark ink turned light",), (unsure,))
    (table,) = answers.tables()
    lines = [line if isinstance(line, str) else line.text for line in table.note]
    assert (table.title, lines[:2]) == (
        "a $file$.jpg  dog\x1b",
        ["  prepared: dark ink turned light", f"  unsure: {unsure}"],
    )
    assert [line.split()[:2] for line in lines[-2:]] == [["cat", "0.100"], [r"dog\x1b", "0.300"]]
    figure = answers.figures()[""]
    assert [image.get_array().shape[:2] for image in figure.axes[0].images] == [(200, 400), (28, 28), (28, 28)]
    row = ["cat  0.10", r"dog\x1b  0.30", r"a $file$.jpg: dog\x1b", "dark ink turned light", f"unsure: {unsure}"]
    assert words(figure) == ["photo", "what the network sees", "reconstruction", "length", *row]
    long = dataclasses.replace(answers, prediction=dataclasses.replace(said, caveats=[("word " * 30,)]))
    assert max(map(len, words(long.figures()[""]))) <= 50  # reasons are wrapped
    said = dataclasses.replace(said, scores=np.linspace(0, 1, 25)[None])
    many = dataclasses.replace(answers, class_names=tuple(map(str, range(25))), prediction=said)
    assert "… and 15 lower ones (--json shows all)" in many.tables()[0].note[-1]
