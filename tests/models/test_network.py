"""Networks of parts: stacks of capsule layers, backbones of one's own, and what of them can be saved."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from support import assert_close, assert_finite, assert_gradients_reach, assert_raises
from torchcaps import create_model, load_pretrained
from torchcaps.errors import InputError
from torchcaps.models import CapsNet
from torchcaps.nn import Decoder, DynamicRouting, LayerSize, Shared
from torchcaps.parts import PARTS, UnknownOption, describe

SHAPE, CLASSES = (1, 20, 20), 4
IMAGES = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 3])
SMALL = {"conv_channels": 8, "primary_types": 2, "decoder_hidden": (16,)}
MAPS = {"primary_kernel": 5, "primary_stride": 1}  # primary capsules on a map of 8×8

LAYERS = (
    {"name": "conv", "layer_types": 3, "capsule_dim": 4, "compete_over": "types-and-positions"},
    {"name": "conv", "layer_types": 2, "capsule_dim": 4, "layer_kernel": 2, "layer_padding": 1, "transform": "matrix"},
    {"name": "dense", "num_capsules": 6, "capsule_dim": 5},
    {"name": "dense", "transform": "shared"},
)


def network(in_shape: tuple[int, int, int] = SHAPE, **overrides: Any) -> CapsNet:
    return create_model("sabour2017", in_shape, CLASSES, **SMALL | overrides)


def step(model: CapsNet) -> float:
    """One step of Adam; the loss before it."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss = model.loss(model(IMAGES, LABELS), IMAGES, LABELS).total
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- layers


def test_layers_are_built_trained_saved_and_read_again(tmp_path: Path) -> None:
    model = network(**MAPS, layers=LAYERS)
    # 8×8 → 3×3 windows, 6×6 → 2×2 windows with a frame of one, 7×7 → 6 capsules → classes
    assert [capsules.grid for capsules in model.flow] == [(2, 8, 8), (3, 6, 6), (2, 7, 7), None, None]
    sizes = [(128, 8), (108, 4), (98, 4), (6, 5), (4, 16)]
    assert [tuple(capsules.poses.shape[1:]) for capsules in model.flow] == sizes
    assert [(each.poses.shape[1:], each.grid) for each in model.capsules(IMAGES)] == [
        (each.poses.shape[1:], each.grid) for each in model.flow[:-1]
    ]
    before = step(model)
    assert_gradients_reach(model)
    assert min(step(model) for _ in range(3)) < before
    model.eval().save_pretrained(tmp_path)
    assert_is_read_again(model, tmp_path)


def assert_is_read_again(model: CapsNet, folder: Path) -> None:
    again = load_pretrained(folder)
    assert describe(again) == describe(model)
    for ours, theirs in zip(again(IMAGES), model(IMAGES), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_the_last_layer_has_the_classes_and_layers_on_maps_get_maps() -> None:
    conv, dense, five = {"name": "conv"}, {"name": "dense"}, {"name": "dense", "num_capsules": 5}
    for layers in ((), (five,), (conv,), (dense, conv), (five, conv, dense)):
        with pytest.raises(InputError, match=r"layers must end with a dense layer|must have a grid"):
            network(**MAPS, layers=layers)
    overrides = MAPS | {"grouping": "raster", "layers": [conv, dense]}
    assert_raises(InputError, network, **overrides, say="must have a grid; primary capsules")


SMALLEST: list[tuple[dict[str, Any], int]] = [
    ({}, 17),
    ({"conv_kernel": 5, "primary_kernel": 3}, 7),
    ({"conv_stride": 2}, 25),
    ({"conv_stride": 3, "conv_kernel": 4, "primary_kernel": 2, "primary_stride": 5}, 7),
    ({"conv_kernel": 3, "conv_stride": 2, "primary_kernel": 4, "primary_padding": 1}, 5),
    ({"conv_kernel": 3, "primary_kernel": 3, "stem_channels": (4, 4), "stem_strides": (1, 2)}, 3 + 3 + 4 * 2 - 1),
    ({"conv_kernel": 3, "primary_kernel": 3, "layers": [{"name": "conv"}, {"name": "dense"}]}, 9),
    ({"layers": [{"name": "conv", "layer_padding": 1}, {"name": "conv", "layer_kernel": 4}, {"name": "dense"}]}, 23),
]
"""Options, and the side of the smallest images that they take."""


@pytest.mark.slow
def test_the_smallest_size_that_is_named_is_the_smallest() -> None:
    for overrides, smallest in SMALLEST:
        said = f"too small for the network's convolutions; the smallest size that fits is {smallest}×{smallest}"
        for shape in ((1, smallest - 1, smallest), (1, smallest, smallest - 1), (1, 1, 1)):
            assert_raises(InputError, network, shape, **overrides, say=f"images of {shape[1]}×{shape[2]} are {said}")
        with torch.device("meta"):
            network((1, smallest + 1, 3 * smallest), **overrides)
        assert_finite(network((1, smallest, smallest), **overrides)(torch.rand(2, 1, smallest, smallest)))
    options = {"stem_channels": (4, 4, 4), "stem_strides": (1, 2, 1), "channels": (2,), "hidden": ()}
    assert create_model("baseline-cnn", (1, 9, 10), 3, **options)(torch.rand(1, 1, 9, 10)).lengths.shape == (1, 3)
    said = "images of 8×10 are too small for the network's convolutions; the smallest size that fits is 9×10"
    assert_raises(InputError, create_model, "baseline-cnn", (1, 8, 10), 3, **options, say=said)


class Faulty(DynamicRouting):
    """Refuses its layer's sizes by an error of its own, as a user's routing may."""

    fault: ClassVar[Exception]

    def bind(self, size: LayerSize) -> None:
        raise self.fault


@pytest.mark.parametrize(
    "fault", [ValueError("needs 8 outputs"), RuntimeError("a size"), OverflowError("no"), KeyError("J")]
)
def test_an_error_of_ones_own_part_is_raised_as_it_is(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS["routing"], "faulty", Faulty)
    monkeypatch.setattr(Faulty, "fault", fault, raising=False)
    with pytest.raises(type(fault)) as caught:
        network(routing="faulty")
    assert caught.value is fault


class Demanding(nn.Module):
    """Refuses images by an error of its own: small ones in the words of a size, larger ones for another reason."""

    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("too narrow") if images.shape[-1] < 40 else KeyError("colours")


def test_a_size_is_named_only_where_it_fits() -> None:
    assert_raises(
        InputError,
        create_model,
        "compact",
        SHAPE,
        backbone=Demanding(),
        say="Demanding takes no input of shape (1, 20, 20): too narrow",
    )


# ---- backbones of one's own


class Flat(nn.Module):
    """Gives no map."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def test_any_module_that_gives_a_map_is_a_backbone() -> None:
    backbone = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    before = [parameter.clone() for parameter in backbone.parameters()]
    model = create_model("sabour2017", SHAPE, CLASSES, backbone=backbone, primary_types=2, decoder_hidden=(16,))
    assert model.backbone is backbone
    assert model.map_shape == (6, 9, 9)
    assert model.flow[0].grid == (2, 1, 1)
    assert all(ours.equal(theirs) for ours, theirs in zip(before, backbone.parameters(), strict=True))
    assert backbone[1].num_batches_tracked == 0, "shapes are found without a step of batch norm"
    assert backbone.training
    assert_close(model.primary(IMAGES).poses, model.primary_capsules(backbone(IMAGES)).poses)
    assert step(model) > step(model)
    assert_gradients_reach(model)


def test_a_backbone_that_does_not_fit_is_refused() -> None:
    said = 'there is no option of baseline-cnn "backbone" with the parts that you chose; it belongs to network'
    assert_raises(UnknownOption, create_model, "baseline-cnn", SHAPE, CLASSES, backbone=Flat(), say=said)
    small = nn.Sequential(nn.Conv2d(1, 6, 7), nn.MaxPool2d(2))
    for backbone, shape, said in (
        (Flat(), SHAPE, "Flat must return maps (B, c, h, w), as many as images and of their dtype; for 2 images"),
        (small, (1, 10, 20), "images of 10×20 are too small for the network's convolutions; the smallest size that"),
        (small, (3, 20, 20), "Sequential takes no input of shape (3, 20, 20): "),
    ):
        assert_raises(InputError, create_model, "sabour2017", shape, CLASSES, backbone=backbone, say=said)


# ---- parts changed by hand


class Mine(DynamicRouting):
    """Of no name."""


def test_what_is_changed_by_hand_is_saved_as_what_it_is(tmp_path: Path) -> None:
    model = network().eval()
    model.class_capsules.routing.num_iterations = 1
    model.class_capsules.transform = Shared()
    model.class_capsules.transform.bind(model.class_capsules.size, 0.1)
    model.decoder = Decoder(CLASSES, 16, SHAPE, decoder_hidden=(17,))
    model.save_pretrained(tmp_path)
    assert describe(model)["layers"][0]["transform"]["name"] == "shared"
    assert_is_read_again(model, tmp_path)


def test_what_no_file_could_bring_back_is_not_saved(tmp_path: Path) -> None:
    for place, part, said in (
        ("backbone", nn.Conv2d(1, 8, 9), "a Conv2d cannot be saved: register its class with torchcaps.register, and"),
        ("layers.0.routing", Mine(), "a Mine cannot be saved: register its class"),
        ("backbone.conv", nn.Conv2d(1, 8, 3), "its options build another one: backbone.conv.weight is floats (8, 1, 3"),
        ("another", nn.Linear(3, 3), "another.weight is floats (3, 3), but must be absent; register your own part"),
    ):
        model = network()
        owner, _, name = place.rpartition(".")
        setattr(model.get_submodule(owner), name, part)
        assert_raises(InputError, model.save_pretrained, tmp_path / "x", say=said)
        assert not (tmp_path / "x").exists()


def test_a_parametrized_network_is_not_saved(tmp_path: Path) -> None:
    model = network()
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule("backbone.conv"))
    assert_raises(InputError, model.save_pretrained, tmp_path, say="remove_parametrizations on its parametrized layers")
