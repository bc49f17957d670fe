"""``fit`` and ``predict`` with images in memory whose every pixel has a class: planes, volumes and lines."""

import numpy as np
import pytest
import torch

from support import assert_raises, small
from torchcaps import CapsNet, create_model, fit
from torchcaps.analysis import predict
from torchcaps.errors import InputError
from torchcaps.training import Progress, Recipe

SIZES = {"planes": (1, 16, 16), "volumes": (1, 8, 8, 8)}
PRESETS = {"planes": "segcaps", "volumes": "ucaps3d"}


def network(kind: str) -> CapsNet:
    torch.manual_seed(0)
    return create_model(PRESETS[kind], SIZES[kind], 3, **small(PRESETS[kind])).eval()


def patches(kind: str, number: int = 4) -> np.ndarray:
    return np.random.default_rng(0).random((number, *SIZES[kind]), dtype=np.float32)


@pytest.mark.parametrize("kind", SIZES)
def test_predictions_are_the_classes_of_pixels(kind: str) -> None:
    model, images = network(kind), patches(kind)
    found = predict(model, images)
    with torch.no_grad():
        scores = model(torch.from_numpy(images)).scores
    assert found.classes.shape == (4, *SIZES[kind][1:])
    np.testing.assert_array_equal(found.classes, scores.argmax(1).numpy())
    for other in (np.moveaxis(images, 1, -1), images[:, 0]):
        np.testing.assert_array_equal(predict(model, other).classes, found.classes)


@pytest.mark.parametrize("kind", SIZES)
def test_images_of_another_size_have_masks_of_their_size(kind: str) -> None:
    model = network(kind)
    larger = np.random.default_rng(1).random((2, 1, *(size + 5 for size in SIZES[kind][1:])), dtype=np.float32)
    assert predict(model, larger).classes.shape == (2, *larger.shape[2:])
    wrong = np.concatenate([larger, larger], 1)
    assert_raises(InputError, predict, model, wrong, say="must have the shape (N, 1, ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_arrays_are_fitted(kind: str) -> None:
    images = patches(kind, 12)
    masks = (images[:, 0] > 0.5).astype(np.uint8) + (images[:, 0] > 0.8)
    model = network(kind).train()
    before = [each.clone() for each in model.parameters()]
    fit(model, (images, masks), Recipe(epochs=1, batch_size=4), progress=Progress())
    assert any(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert predict(model, images).classes.shape == masks.shape
