"""The task ``objects``: its metric, data, networks, commands, and what is unknown without masks."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support import assert_close, assert_gradients_reach, assert_raises, small
from torchcaps import create_model, fit
from torchcaps.analysis import evaluate, foreground_ari, predict_mask
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.errors import InputError
from torchcaps.nn import BroadcastDecoder, DenseCapsules
from torchcaps.nn.broadcast import Positions
from torchcaps.ranges import IGNORED
from torchcaps.tasks import TASKS, find_task
from torchcaps.training import Progress, Recipe
from torchcaps.training.recipe import learning_rate

TASK = find_task("objects")
SMALL = small("slots-small")


def bright(number: int = 12, side: int = 9) -> ImageSet:
    """Images of one bright pixel on a dark ground, with masks."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 100, (number, 1, side, side), dtype=torch.uint8, generator=random)
    images[:, :, 2:4, 2:4] = 255
    return ImageSet(images, (images[:, 0] > 200).to(torch.uint8))


# ---- the metric


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    draw = lambda most, *shape: torch.randint(0, most, shape, dtype=torch.uint8, generator=random)  # noqa: E731
    masks = draw(4, 5, 8, 9)
    return {
        "random": (draw(5, 5, 8, 9), masks),
        "many slots": (draw(255, 5, 8, 9), masks),
        "as the objects": (masks, masks),
        "renumbered": (3 - masks, masks),
        "one slot": (torch.zeros_like(masks), masks),
        "one object": (draw(3, 5, 8, 9), (masks > 0).to(torch.uint8)),
        "unknown pixels": (draw(3, 5, 8, 9), masks.masked_fill(masks == 1, IGNORED)),
        "two pixels": (draw(2, 40, 1, 2), draw(3, 40, 1, 2) + 1),
    }


@pytest.mark.parametrize("case", cases())
def test_foreground_ari_is_that_of_scikit_learn(case: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    pred, masks = cases()[case]
    for got, slots, objects in zip(foreground_ari(pred, masks), pred, masks, strict=True):
        known = (objects > 0) & (objects != IGNORED)
        assert float(got) == pytest.approx(metrics.adjusted_rand_score(objects[known], slots[known]), abs=1e-6)


def test_what_has_no_objects_has_no_number() -> None:
    masks = torch.stack([torch.zeros(4, 4), torch.full((4, 4), IGNORED), torch.ones(4, 4)]).to(torch.uint8)
    assert foreground_ari(masks, masks).isnan().tolist() == [True, True, False]
    scores = torch.rand(3, 2, 4, 4)
    assert TASK.score(scores, masks)[:2].tolist() == [0, 0]
    assert len(foreground_ari(masks[:0], masks[:0])) == 0


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 4, 5), (1, 4, 6), (4, 6), (2, 3, 4, 6)])
def test_masks_of_other_shapes_are_not_compared(shape: tuple[int, ...]) -> None:
    masks = torch.ones(2, 4, 6, dtype=torch.uint8)
    assert_raises(InputError, foreground_ari, torch.ones(shape, dtype=torch.uint8), masks, say="must have shape (")
    assert_raises(InputError, foreground_ari, masks[0], masks[0], say="must have shape (B, H, W), got (4, 6)")


# ---- data


def test_scenes_are_three_pieces_of_one_colour_each_at_any_pixel() -> None:
    data = load_dataset("tetrominoes", limit_test=200)
    assert (data.task.name, data.num_classes, data.in_shape) == ("objects", 4, (3, 24, 24))
    images, masks = data.test.images, data.test.labels
    assert_close(torch.stack([(masks == piece).sum((1, 2)) for piece in range(1, 4)]).float(), 36.0)
    black = (images == 0).all(1)
    assert black.equal(masks == 0)
    colours = [[images[n][:, masks[n] == piece].unique(dim=1) for piece in range(1, 4)] for n in range(200)]
    assert all(each.shape == (3, 1) for scene in colours for each in scene)
    alike = np.mean([len({tuple(each.flatten().tolist()) for each in scene}) < 3 for scene in colours])
    assert 0.3 < alike < 0.6, "4 in 9 by the draw"
    tops = masks.amax(2).float().argmax(1)
    assert len(tops.unique()) > 12, "at any pixel, not on a grid"
    assert data.test.images.equal(load_dataset("tetrominoes", limit_test=200).test.images)


def test_masks_of_classes_are_objects_too() -> None:
    images = bright()
    assert images.task.name == "pixels"
    network = create_model("slots-small", (1, 9, 9), 3, **SMALL)
    assert evaluate(network, images).is_known
    assert TASK.describe(("0", "1"), images.labels[0]) == "1 objects"
    renumbered = ImageSet(images.images, 9 * images.labels)  # more objects than the network has outputs
    assert np.array_equal(evaluate(network, renumbered).ari, evaluate(network, images).ari)
    assert_raises(
        InputError, create_model, "compact", task="objects", say="choose a network with slots, such as slots-"
    )
    assert_raises(InputError, create_model, "slots-small", task="classes", say='set task="objects" (--task objects)')


# ---- networks


@pytest.mark.parametrize("preset", ["slots-small", "slots2020"])
@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 17, 30)])
def test_masks_of_slots_share_each_pixel_out_and_the_image_is_their_sum(preset: str, shape: tuple[int, ...]) -> None:
    network = create_model(preset, shape, 5, **small(preset))
    images = torch.rand(2, *shape)
    output = network(images, return_coupling=True)
    assert output.scores.shape == (2, 5, *shape[1:])
    assert_close(output.scores.sum(1), 1.0)
    assert output.reconstruction.shape == images.shape
    assert output.coupling.shape[2] == 5
    loss = network.loss(output, images, torch.zeros(2, *shape[1:], dtype=torch.uint8))
    assert_close(loss.total, (output.reconstruction - images).square().mean())
    loss.total.backward()
    assert_gradients_reach(network)


@pytest.mark.parametrize("strides", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("frequencies", [0, 3])
def test_the_decoder_is_the_sum_of_what_each_slot_draws(strides: tuple[int, int], frequencies: int) -> None:
    decoder = BroadcastDecoder(
        6,
        (2, 7, 8),
        broadcast_channels=(5,),
        broadcast_kernels=(3, 5),
        broadcast_strides=strides,
        broadcast_frequencies=frequencies,
    )
    slots = torch.randn(2, 3, 6)
    image, masks = decoder(slots)
    alone = [
        decoder.layers(decoder.positions(s[:, :, None, None].expand(-1, -1, *decoder.map_size)))[..., :7, :8]
        for s in slots.unbind(1)
    ]
    drawn = torch.stack(alone, 1)
    assert_close(masks, drawn[:, :, -1].softmax(1), 1e-5)
    assert_close(image, (masks.unsqueeze(2) * drawn[:, :, :-1]).sum(1), 1e-5)


@pytest.mark.parametrize("frequencies", [0, 1, 4])
def test_a_position_is_its_sides_and_their_waves(frequencies: int) -> None:
    positions = Positions(3, frequencies)
    added = positions(torch.zeros(2, 3, 4, 5))
    for row, column in ((0, 0), (1, 4), (3, 2)):
        y, x = row / 3, column / 4
        described = [y, x, 1 - y, 1 - x]
        for k in range(1, frequencies + 1):
            described += [wave(math.pi * k * side) for side in (y, x) for wave in (math.sin, math.cos)]
        assert_close(added[1, :, row, column], positions.linear(torch.tensor(described)), 1e-5)


@pytest.mark.parametrize("routing", ["dynamic", "em", "inverted-attention", "b2i"])
def test_a_capsule_layer_takes_the_place_of_slots(routing: Any) -> None:
    layer = {"name": "dense", "transform": "shared", "routing": routing, "capsule_dim": 8}
    network = create_model("slots-small", (3, 24, 24), 4, layers=(layer,))
    assert isinstance(network.layers[0], DenseCapsules)
    assert network(torch.rand(2, 3, 24, 24)).scores.shape == (2, 4, 24, 24)


@pytest.mark.parametrize("layer", ["slots", "slot-mixture"])
def test_compiled_and_by_vmap_it_gives_the_same(layer: str) -> None:
    network = create_model("slots-small", layers=(layer,), **SMALL).eval()
    images = torch.rand(2, 3, 24, 24)
    masks = network(images).scores
    assert_close(torch.compile(network, fullgraph=True, backend="eager")(images).scores, masks, 1e-5)
    assert_close(torch.vmap(lambda image: network(image[None]).scores[0])(images), masks, 1e-5)


def test_what_does_not_fit_a_network_is_one_sentence() -> None:
    for options, said in (
        ({"decoder": False}, "it needs a decoder"),
        ({"decoder": "dense"}, 'decoder must be "broadcast", which draws a mask of each slot, got Decoder'),
        ({"layers": ()}, "layers must hold at least one layer"),
        ({"num_capsules": 256}, "a network has at most 255 slots, got 256"),
    ):
        assert_raises(InputError, create_model, "slots-small", **options, say=said)
    assert_raises(InputError, create_model, "compact", decoder="broadcast", say="slot_dim without a default")
    network = create_model("slots-small", **SMALL)
    assert_raises(InputError, network, torch.rand(1, 3, 20, 24), say="images must have shape (B, 3, 24, 24)")
    assert network.num_slots == 4
    assert create_model("slots-small", **SMALL, num_capsules=6).num_slots == 6


def test_the_rate_rises_over_the_first_steps_of_any_schedule() -> None:
    recipe = Recipe(learning_rate=0.5, schedule="decay-by-step", decay=0.5, decay_steps=8, warm_up_steps=4)
    rates = [learning_rate(recipe, step, 10) for step in (0, 1, 3, 8)]
    assert rates == pytest.approx([0.125, 0.25 * 0.5 ** (1 / 8), 0.5 * 0.5 ** (3 / 8), 0.25])


def test_the_model_card_says_what_it_is(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    create_model("slots-small", **SMALL).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for words in ("pipeline_tag: image-segmentation", "A slot network for colour images of 3×24×24", "4 slots"):
        assert words in card
    assert "output.lengths  # (1, slots, sizes of the image)" in card


# ---- training and commands


def test_labels_change_nothing_of_training() -> None:
    weights = []
    for labels in (bright().labels, torch.full((12, 9, 9), IGNORED, dtype=torch.uint8)):
        torch.manual_seed(0)
        network = create_model("slots-small", (1, 9, 9), 3, **SMALL)
        rows = fit(network, ImageSet(bright().images, labels), Recipe(epochs=2, batch_size=5), progress=Progress())
        assert rows[-1]["train_loss"] < rows[0]["train_loss"]
        weights.append(network.state_dict())
    assert all(weights[0][name].equal(each) for name, each in weights[1].items())


def test_without_masks_the_squared_error_is_the_result() -> None:
    images = ImageSet(bright().images, torch.full((12, 9, 9), IGNORED, dtype=torch.uint8))
    result = evaluate(create_model("slots-small", (1, 9, 9), 3, **SMALL), images)
    assert not result.is_known
    assert math.isnan(result.accuracy)
    assert set(TASK.metric.cells(result.accuracy).values()) == {"–"}
    assert TASK.metric.spread([result.error, 0.5]) == "–"
    assert result.to_dict()["accuracy"] is None
    assert result.to_dict()["squared_error"] == pytest.approx(result.loss, rel=1e-5)
    assert [row[0] for row in result.tables()[0].rows] == ["Squared error"]
    assert "FG-ARI is unknown" in (result.warning or "")


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_have_the_numbers_of_the_network(slots: int) -> None:
    network = create_model("slots-small", (1, 9, 9), 3, **SMALL, num_capsules=slots)
    mask = predict_mask(network, bright().images[0].numpy())
    assert mask.shape == (9, 9)
    scores = network(bright().images.float() / 255).scores
    assert TASK.predict_classes(scores[:1])[0].numpy().tolist() == mask.tolist()
    assert TASK.predict_classes(scores[:1].detach().numpy()).tolist() == [mask.tolist()]
    assert mask.max() < slots
    assert evaluate(network, bright()).class_names == tuple(map(str, range(slots)))
    assert TASKS["objects"].supports("predict")


@pytest.mark.parametrize("names", [("x",), ("x", "x_test"), ("x", "x_val", "x_test"), ("train_images", "test_images")])
def test_pictures_without_labels_are_read_from_arrays(tmp_path: Path, names: tuple[str, ...]) -> None:
    np.savez(tmp_path / "a.npz", **{name: bright().images[:, 0].numpy() for name in names})
    data = load_dataset(f"npz:{tmp_path / 'a.npz'}", task="objects")
    assert (data.task.name, data.num_classes, data.in_shape) == ("objects", 7, (1, 9, 9))
    for part in data.parts.values():
        assert part.labels.unique().tolist() == [IGNORED]
    assert sum(len(part) for part in data.parts.values()) == 12 * len(names)
    for task in (None, "classes", "pixels"):
        assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'a.npz'}", task=task, say="has no array")
