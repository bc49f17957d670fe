"""A network whose routing gives activations goes by them everywhere; one without, by the lengths of its capsules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from own_parts import register
from torchcaps import analysis
from torchcaps.datasets import ImageSet
from torchcaps.models import CapsNet

LABELS = torch.tensor([3, 0, 1, 3])


@pytest.fixture
def active(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> CapsNet:
    """Its poses are all of length 3, and the last class is always the most active."""
    register(monkeypatch)
    model: CapsNet = make_model(routing="active")
    return model.eval()


def output_of(model: CapsNet, images: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(images / 255)


def test_scores_are_activations_or_lengths(active: CapsNet, model: CapsNet, cnn: Any, make_images: Any) -> None:
    images = make_images(4)
    output = output_of(active, images)
    assert output.scores is output.activations
    assert output.lengths is output.scores
    assert output.score_name == "activation"
    torch.testing.assert_close(output.capsules.norm(dim=2), torch.full((4, 4), 3.0), atol=1e-3, rtol=0)
    assert (output.scores.diff(dim=1) > 0).all()
    plain = output_of(model.eval(), images)
    assert plain.activations is None
    assert plain.score_name == "length"
    torch.testing.assert_close(plain.scores, plain.capsules.norm(dim=2), atol=1e-3, rtol=0)
    assert output_of(cnn.eval(), images).score_name == "probability"


def test_it_is_judged_and_asked_by_its_activations(active: CapsNet, make_images: Any) -> None:
    images = make_images(4)
    output = output_of(active, images)
    evaluation = analysis.evaluate(active, ImageSet(images, LABELS))
    np.testing.assert_allclose(evaluation.scores, output.scores, atol=1e-6)
    assert evaluation.accuracy == 0.5  # of class 3, as all are said to be
    assert evaluation.confusion[:, 3].sum() == 4
    predictions = analysis.predict(active, images)
    np.testing.assert_allclose(predictions.scores, output.scores, atol=1e-6)
    assert predictions.lengths is predictions.scores
    assert (predictions.classes.tolist(), predictions.score_name) == ([3] * 4, "activation")


def test_the_most_active_capsule_is_decoded(active: CapsNet, make_images: Any, words: Any) -> None:
    images = make_images(3)
    result = analysis.reconstruct(active, images)
    assert (result.decoded.tolist(), result.score_name) == ([3] * 3, "activation")
    by_label = analysis.reconstruct(active, images, torch.tensor([3, 3, 3]), capsule="label")
    np.testing.assert_allclose(result.reconstructions, by_label.reconstructions, atol=1e-6)
    assert "activation" in words(analysis.figure_reconstructions(result))
    assert "length" not in words(analysis.figure_reconstructions(result))

    changed = analysis.perturb_capsule(active, images[0], steps=3)
    assert changed.target == 3
    assert changed.score == f"activation {output_of(active, images[:1]).scores[0, 3]:.2f}"
    assert changed.score in words(analysis.figure_perturbation(changed))
    (row,) = [analysis.perturb_capsule(active, images[0], steps=3, components=[1])]
    assert changed.score in words(analysis.figure_component([row]))


def test_attacks_follow_the_activations(active: CapsNet, make_images: Any) -> None:
    images = ImageSet(make_images(4), LABELS)
    curve = analysis.rotation_curve(active, images, angles=(0.0,))
    assert curve.accuracy[0] == 0.5
    changed = analysis.fgsm(active, images.images / 255, LABELS, 0.1, objective="scores")
    assert (changed - images.images / 255).abs().max() > 0.05
