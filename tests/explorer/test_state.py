"""What is shown of an image: the same as the analysis says, for every kind of network."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from explorer_support import png, shipped, small_network
from own_parts import register, two_layers
from support import assert_raises
from torchcaps.analysis import perturb_capsule, predict, trace_routing
from torchcaps.analysis.calibration import Calibration
from torchcaps.analysis.results import MAX_SHOWN
from torchcaps.datasets import ImageSet
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError
from torchcaps.explorer import Explorer
from torchcaps.explorer.patches import find_patches
from torchcaps.explorer.questions import describe
from torchcaps.explorer.state import check_side_by_side, describe_routing, levels, to_bytes
from torchcaps.models import create_model


def pixels_for(explorer: Explorer, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, explorer.model.in_shape, dtype=np.uint8)


@pytest.fixture
def small() -> Explorer:
    return Explorer(small_network())


def test_looking_says_what_predict_and_trace_say(small: Explorer) -> None:
    pixels = pixels_for(small)
    view = small.look(pixels)
    images = torch.from_numpy(pixels)[None]
    predictions, trace = predict(small.model, images), trace_routing(small.model, images)
    np.testing.assert_allclose(view.scores, predictions.lengths[0], rtol=1e-6)
    assert view.present == [int(predictions.classes[0])]
    np.testing.assert_allclose(np.linalg.norm(view.capsules, axis=1), view.scores, rtol=1e-3)
    assert view.routing["classes"] == [0, 1, 2, 3]
    coupling = trace.maps[:, 0].mean(2)
    np.testing.assert_array_equal(view.routing["maps"], levels(coupling, trace.uniform, trace.reach))
    np.testing.assert_allclose(view.routing["means"], coupling.mean((2, 3)))
    np.testing.assert_array_equal(view.routing["largest"], coupling.max((1, 2, 3)))
    other = small.look(pixels_for(small, 1))
    assert other.routing["reach"] == view.routing["reach"] == trace.reach == 0.75, "one scale for all images"
    np.testing.assert_allclose(view.routing["scores"], trace.lengths[:, 0], rtol=1e-6)
    assert view.routing["uniform"] == trace.uniform == 0.25


@pytest.mark.parametrize("preset", ["sabour2017", "sabour2017-multimnist", "compact", "baseline-cnn"])
def test_a_look_is_one_pass_with_the_numbers_of_three(preset: str) -> None:
    """One pass through the backbone and the decoder gives what forward, trace_routing and decode each compute."""
    explorer = Explorer(small_network(preset))
    model, pixels = explorer.model, pixels_for(explorer)
    with torch.inference_mode():
        output = model(torch.from_numpy(pixels)[None].float() / 255)
    calls: list[str] = []
    for name in ("backbone", "decoder"):
        if (part := getattr(model, name, None)) is not None:
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    view = explorer.look(pixels)
    np.testing.assert_array_equal(view.scores, output.scores[0])
    if not model.has_capsules:
        assert (view.routing, view.decoded) == (None, None)
        return
    assert sorted(calls) == ["backbone", "decoder"]
    np.testing.assert_array_equal(view.capsules, output.capsules[0])
    assert repr(view.routing) == repr(describe_routing(trace_routing(model, torch.from_numpy(pixels)[None])))
    alone = explorer.decode(view.present, view.capsules[view.present])
    np.testing.assert_array_equal(to_bytes(view.decoded), to_bytes(alone))


def test_another_number_of_iterations_is_another_network_with_the_same_weights(small: Explorer) -> None:
    pixels = pixels_for(small)
    for iterations in (1, 5):
        longer = small_network(num_iterations=iterations)
        np.testing.assert_allclose(
            small.look(pixels, iterations).scores, Explorer(longer).look(pixels).scores, rtol=1e-5
        )
    assert small.routed_in(5).decoder.layers[0].weight is small.model.decoder.layers[0].weight
    np.testing.assert_array_equal(small.look(pixels).scores, small.look(pixels, 3).scores)
    assert_raises(InputError, small.look, pixels, -1, say="iterations")
    fixed = Explorer(small_network(routing="self-attention"))
    assert (small.iterations, fixed.iterations) == (3, None)
    assert_raises(InputError, fixed.look, pixels, 2, say="no number of iterations")


def test_a_cell_has_the_votes_of_its_capsules(small: Explorer) -> None:
    pixels = pixels_for(small)
    trace = trace_routing(small.model, torch.from_numpy(pixels)[None], num_iterations=2)
    types, height, width = trace.grid
    votes = small.votes(pixels, [0, 1], 2)
    for name in ("agreement", "coupling"):
        own = getattr(trace, name)[:, 0, [type_ * height * width + 1 for type_ in range(types)]]
        np.testing.assert_array_equal(votes[name], own)
    for cell in ([height, 0], [0, -1]):
        assert_raises(InputError, small.votes, pixels, cell, say="must be [0, 0] to [0, 1], got [")
    cnn = Explorer(small_network("baseline-cnn"))
    assert_raises(InputError, cnn.votes, pixels, [0, 0], say="has no capsules")


PADDED = {
    "name": "stack",
    "stack_channels": (4, 4),
    "stack_kernels": (5, 3),
    "stack_strides": (2, 1),
    "stack_padding": 1,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"conv_channels": 4},
        {"stem_channels": (4, 4), "stem_strides": (1, 2), "conv_kernel": 3, "primary_kernel": 3, "primary_padding": 1},
        {"backbone": PADDED, "primary_kernel": 3},
        {"backbone": "pooled", "primary_kernel": 3},
        {"conv_channels": 4, "layers": two_layers({"layer_kernel": 2})},
    ],
)
def test_a_cell_sees_its_patch_and_nothing_else(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    torch.manual_seed(0)
    network = create_model("sabour2017", (1, 27, 29), 4, primary_types=2, decoder=False, **changes).eval()
    patches, grid = find_patches(network), network.flow[-2].grid
    images = torch.rand(100, 1, 27, 29, requires_grad=True)
    poses = network.capsules(images)[-1].poses.unflatten(1, grid)
    for cell in ((0, 0), (grid[1] - 1, 1)):
        (gradient,) = torch.autograd.grad(poses[:, :, *cell].abs().sum(), images, retain_graph=True)
        for axis, size in enumerate((27, 29)):
            seen = gradient.abs().sum((0, 1, 3 - axis)).nonzero().squeeze()
            first = patches["first"][axis] + cell[axis] * patches["stride"][axis]
            assert seen.tolist() == list(range(max(first, 0), min(first + patches["size"][axis], size)))


def test_where_capsules_stand_on_no_map_there_is_no_patch() -> None:
    assert find_patches(small_network(grouping="raster", primary_dim=4)) is None
    assert find_patches(small_network("baseline-cnn")) is None


def test_a_capsule_decodes_as_perturb_has_it(small: Explorer) -> None:
    pixels = pixels_for(small)
    view = small.look(pixels)
    wanted = perturb_capsule(small.model, torch.from_numpy(pixels), target=2, amplitude=0.3, steps=2)
    np.testing.assert_allclose(small.decode([2], view.capsules[2:3])[0], wanted.reconstruction, atol=1e-6)
    changed = view.capsules[2:3].copy()
    changed[0, 4] += 0.3
    np.testing.assert_allclose(small.decode([2], changed)[0], wanted.images[4, 1], atol=1e-6)


def test_the_longest_of_many_classes_have_maps() -> None:
    explorer = Explorer(small_network(num_classes=MAX_SHOWN + 3))
    view = explorer.look(pixels_for(explorer))
    longest = np.argsort(-view.scores)[:MAX_SHOWN]
    assert view.routing["classes"] == sorted(longest.tolist())
    assert len(view.routing["maps"][0]) == view.routing["scores"].shape[1] == MAX_SHOWN
    np.testing.assert_allclose(view.routing["scores"][-1], view.scores[np.sort(longest)], rtol=1e-5)


def test_caveats_and_objects_are_those_of_predict() -> None:
    explorer = Explorer(small_network("sabour2017-multimnist", num_classes=5, grouping="raster", primary_dim=4))
    explorer.calibration = Calibration(score=2.0, error=1e9, images=5)
    view = explorer.look(pixels_for(explorer))
    assert view.present == np.argsort(-view.scores)[:2].tolist()
    assert any(caveat.startswith("length ") for caveat in view.caveats)
    assert view.routing["inSpace"] is False, "capsules in raster order have no place"


LETTERS = {
    "E": [(20, 5, 8, 5), (8, 5, 8, 23), (8, 23, 20, 23), (8, 14, 18, 14)],
    "K": [(8, 4, 8, 24), (20, 5, 8, 14), (8, 14, 20, 24)],
    "M": [(5, 23, 7, 5), (7, 5, 14, 17), (14, 17, 21, 5), (21, 5, 23, 23)],
    "N": [(7, 23, 7, 5), (7, 5, 21, 23), (21, 23, 21, 5)],
    "X": [(7, 5, 21, 23), (21, 5, 7, 23)],
}
"""Their strokes, in pixels of 28×28."""


def test_the_shipped_network_is_unsure_of_letters_and_sure_of_digits() -> None:
    explorer = shipped()
    unsure = [index for index in range(50) if explorer.look(explorer.pick(index)[0]).caveats]
    assert len(unsure) <= 1
    for letter, strokes in LETTERS.items():
        image = Image.new("L", (280, 280))
        for stroke in strokes:
            ImageDraw.Draw(image).line([10 * place for place in stroke], fill=255, width=24)
        pixels = np.asarray(image.resize((28, 28), Image.Resampling.BOX))[None].copy()
        assert explorer.look(pixels).caveats, letter


def test_what_a_network_lacks_is_said() -> None:
    complete = Explorer(small_network())
    assert (complete.no_pose, complete.no_routing) == (None, None)

    blind = Explorer(small_network(decoder=False))
    assert blind.no_pose == "Capsules cannot be decoded: this network has no decoder."
    assert blind.no_routing is None
    assert_raises(InputError, blind.decode, [0], np.zeros((1, 5), np.float32), say="needs a decoder")

    unrouted = Explorer(small_network(num_iterations=0))
    assert unrouted.no_routing is not None
    assert "num_iterations must be 1 to 1000, got 0" in unrouted.no_routing
    assert unrouted.look(pixels_for(unrouted)).routing is None

    cnn = Explorer(small_network("baseline-cnn"))
    assert cnn.no_pose == cnn.no_routing == "A convolutional network has no capsules."
    view = cnn.look(pixels_for(cnn))
    assert (view.capsules, view.routing, cnn.model.capsule_dim) == (None, None, 0)
    assert view.scores.sum() == pytest.approx(1)


def test_a_network_with_activations_is_explored_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    explorer = Explorer(small_network(routing="active"))
    view = explorer.look(pixels_for(explorer))
    assert view.present == [3]
    assert view.scores.max() <= 1 < 2 < np.linalg.norm(view.capsules, axis=1).min(), "lengths are no scores"
    np.testing.assert_allclose(view.routing["scores"][-1], view.scores, rtol=1e-5)
    described, plain = describe(explorer), describe(Explorer(small_network()))
    assert (described["score"], described["highest"]) == ("activation", "most active")
    assert (plain["score"], plain["highest"]) == ("length", "longest")


def test_a_network_of_two_layers_or_without_coupling_is_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    layers = two_layers({"layer_kernel": 1})
    deep = Explorer(create_model("sabour2017", (1, 18, 20), 4, layers=layers, conv_channels=4, primary_types=2).eval())
    view = deep.look(pixels_for(deep))
    assert (view.routing["inputs"], view.routing["inSpace"]) == ("capsules of layer 1", True)
    silent = Explorer(small_network(routing="silent"))
    assert silent.no_routing == "Routing cannot be followed: Silent returns no coupling, so there is none to show."
    assert silent.look(pixels_for(silent)).routing is None


def test_levels_are_roots_of_the_distance_from_uniform() -> None:
    found = levels(np.array([0.25, 0.45, 0.2, 0.3, 0.252, 0.9]), 0.25, 0.2)
    # nothing, all of the reach, a quarter of it below and above, a hundredth, more than the reach
    assert found.tolist() == [128, 255, 128 - 64, 128 + 64, 128 + 13, 255]


def test_picking_gives_the_image_and_its_label() -> None:
    images = torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 1, 18, 20)
    one = Explorer(small_network(), ["a", "b", "c", "d"], images=ImageSet(images, torch.tensor([3, 0, 1])))
    pixels, label = one.pick(1)
    assert (pixels.shape, label) == ((1, 18, 20), "a")
    assert (pixels == 1).all()
    for index in (-1, 3):
        assert_raises(InputError, one.pick, index, say=f"the number of a test image must be 0 to 2, got {index}")
    pair = Explorer(small_network(), images=ImageSet(images, torch.tensor([[3, 0], [0, 1], [2, 1]])))
    assert pair.pick(2)[1] == "2 and 1"
    assert_raises(InputError, Explorer(small_network(), no_images="none here").pick, 0, say="none here")


def test_a_photo_is_prepared_where_the_training_images_were(small: Explorer) -> None:
    paper = np.full((60, 60), 220, np.uint8)
    paper[10:40, 28:33] = 30
    reader = Explorer(small_network(in_shape=(1, 28, 28)), preparation=Preparation())
    prepared = reader.read("one.png", png(paper), prepare=True)
    assert "dark ink turned light" in prepared.changes
    assert prepared.image[0, 5:23, 13:15].min() > 150
    assert prepared.image[0, :, :8].max() == 0
    plain = reader.read("one.png", png(paper))
    assert (np.median(plain.image) > 200, plain.changes) == (True, ())
    assert small.read("one.png", png(paper), prepare=True).changes == ()


def test_only_networks_that_see_the_same_are_shown_side_by_side() -> None:
    first = Explorer(small_network(), list("abcd"), name="first")
    check_side_by_side([first, Explorer(small_network("baseline-cnn"), list("abcd"), name="other")])
    wide = Explorer(small_network(in_shape=(1, 18, 22)), list("abcd"), name="wide")
    say = "first has images of (1, 18, 20), a, b, c, d; wide has images of (1, 18, 22), a, b, c, d"
    assert_raises(InputError, check_side_by_side, [first, wide], say=say)
    named = Explorer(small_network(), list("abce"), name="named")
    assert_raises(InputError, check_side_by_side, [first, named], say="named has images of (1, 18, 20), a, b, c, e")
