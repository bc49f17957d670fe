"""What a network says of images and files, and when the answer is unsure."""

import numpy as np
import pytest
import torch
from PIL import Image

from own_parts import register
from torchcaps.analysis import (
    evaluate,
    load_image,
    perturb_capsule,
    predict,
)
from torchcaps.analysis.inference import BATCH
from torchcaps.datasets import ImageSet
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
        (two, images, torch.tensor([[0, 1], [2, 2]]), r"all different, got \[2, 2\]"),
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
