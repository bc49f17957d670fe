"""Results of pixels: by hand, and as MONAI computes them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from pixel_support import TinyPixels, disc_set, discs
from torchcaps.analysis import PixelEvaluation, evaluate, figure_samples
from torchcaps.analysis.segmentation import hausdorff95
from torchcaps.ops.segmentation import confusions, mean_dice
from torchcaps.ranges import IGNORED

NAMES = ("ground", "disc", "square", "ring")


@pytest.fixture
def found() -> PixelEvaluation:
    """Three images; the third class is missed in the second image, the fourth is in none."""
    truth = torch.tensor([[[0, 1, 1, 2]] * 2, [[0, 2, 1, 1]] * 2, [[0, 0, 0, IGNORED]] * 2], dtype=torch.uint8)
    answer = torch.tensor([[[0, 1, 1, 2]] * 2, [[0, 0, 1, 0]] * 2, [[0, 0, 0, 3]] * 2], dtype=torch.uint8)
    distances = [[0.0, 0.0, 0.0, math.nan], [1.0, 1.0, math.inf, math.nan], [0.0] + [math.nan] * 3]
    return PixelEvaluation(confusions(answer, truth, 4).numpy(), np.array(distances), 0.5, NAMES)


def test_means_and_deviations_are_over_images_that_have_the_class(found: PixelEvaluation) -> None:
    ground, disc, square, ring = found.per_class
    assert (ground["images"], disc["images"], square["images"], ring["images"]) == (3, 2, 2, 0)
    assert disc["dice"] == pytest.approx((1 + 2 / 3) / 2)
    assert disc["dice_sd"] == pytest.approx(np.std([1, 2 / 3], ddof=1))
    assert disc["iou"] == pytest.approx((1 + 1 / 2) / 2)
    assert (square["dice"], square["hausdorff95"], square["missed"]) == (0.5, 0.0, 1)
    assert (ring["dice"], ring["dice_sd"], ring["hausdorff95"], ring["missed"]) == (None, None, None, 0)
    assert found.accuracy == pytest.approx((1 + (2 / 3 + 0) / 2 + 1) / 3)
    assert found.warning is None
    words = [cell for table in found.tables() for row in table.rows for cell in row]
    assert "–" in words
    assert "0.833 ± 0.236" in words
    assert found.to_dict()["per_class"][3]["dice"] is None


def test_a_class_that_no_pixel_is_given_is_named() -> None:
    truth = torch.tensor([[[0, 1, 2]]], dtype=torch.uint8)
    counts = confusions(torch.zeros_like(truth), truth, 3).numpy()
    found = PixelEvaluation(counts, np.zeros((1, 3)), 0.5, NAMES[:3])
    assert found.warning is not None
    assert found.warning.startswith("no pixel of 1 test image was given to: disc, square; try --class-weights")


@pytest.mark.parametrize("what", ["evaluate", "sample"])
def test_masks_are_drawn_in_the_colours_of_their_classes(what: str) -> None:
    images, colours = disc_set(3), ("#102030", "#00ff00", "#c00000")
    if what == "evaluate":
        network = TinyPixels(images.in_shape, 3)
        figure = evaluate(network, images, class_names=NAMES[:3], colours=colours).figures()[""]
    else:
        figure = figure_samples(images, NAMES[:3], count=2, colours=colours)
    pictures = [image.get_array() for axes in figure.axes for image in axes.images]
    drawn = np.concatenate([np.asarray(each)[..., :3].reshape(-1, 3) for each in pictures if each.ndim == 3])
    present = {tuple(colour) for colour in np.round(255 * drawn).astype(int).tolist()}
    assert {(16, 32, 48), (0, 255, 0)} <= present


def masks(size: tuple[int, ...], shift: int) -> np.ndarray:
    axes = np.indices(size)
    return sum((axis - 6 - shift * n) ** 2 for n, axis in enumerate(axes)) <= 16


def test_distances_are_measured_between_edges() -> None:
    truth = np.zeros((9, 30), bool)
    truth[2:7, 2:7] = True
    assert hausdorff95(truth, truth) == 0
    assert hausdorff95(np.roll(truth, 3, 1), truth) == 3
    assert hausdorff95(np.roll(truth, 3, 1), truth, spacing=(1.0, 0.5)) == 1.5
    assert hausdorff95(np.zeros_like(truth), truth) == math.inf
    assert math.isnan(hausdorff95(np.zeros_like(truth), np.zeros_like(truth)))


@pytest.mark.parametrize("size", [(17, 20), (14, 15, 16)])
@pytest.mark.parametrize("spacing", [None, (0.5, 2.0, 1.25)])
def test_metrics_equal_those_of_monai(size, spacing) -> None:
    metrics = pytest.importorskip("monai.metrics")
    spacing = None if spacing is None else spacing[: len(size)]
    for shift in range(4):
        truth, answer = masks(size, 0), masks(size, shift)
        both = [torch.from_numpy(np.stack([~each, each])[None]).float() for each in (answer, truth)]
        theirs = metrics.compute_hausdorff_distance(*both, percentile=95, spacing=spacing)
        assert hausdorff95(answer, truth, spacing) == pytest.approx(float(theirs[0, 0]), abs=1e-5)
        counts = confusions(*(torch.from_numpy(each[None].astype(np.uint8)) for each in (answer, truth)), 2)
        found = PixelEvaluation(counts.numpy(), np.zeros((1, 2)), 0.0, ("a", "b"))
        assert found.dice[0] == pytest.approx(metrics.compute_dice(*both, include_background=True)[0].numpy(), abs=1e-5)
        assert found.iou[0] == pytest.approx(metrics.compute_iou(*both, include_background=True)[0].numpy(), abs=1e-5)


def test_the_figure_has_a_row_for_each_of_the_worst_images() -> None:
    images = disc_set(20)
    found = evaluate(TinyPixels((1, 24, 20), 3), images, class_names=NAMES[:3])
    dice = mean_dice(torch.from_numpy(found.confusion)).numpy()
    worst = dice.argsort(kind="stable")[:8].tolist()
    assert worst != list(range(8))
    assert [each.name for each in found.examples] == [f"image {n}" for n in worst]
    assert [each.dice for each in found.examples] == pytest.approx(dice[worst])
    for n, each in zip(worst, found.examples, strict=True):
        assert each.mask.tolist() == discs(20)[1][n].tolist()
    named = dataclasses.replace(images, names={"file": tuple(f"{n}.png" for n in range(20))})
    assert evaluate(TinyPixels((1, 24, 20), 3), named).examples[0].name.endswith(".png")
    figure = found.figures()[""]
    assert len(figure.axes[0].images) == 8 * 4
    text = " ".join(each.get_text() for each in figure.axes[0].texts)
    assert "difference" in text
    assert "■ square" in text
