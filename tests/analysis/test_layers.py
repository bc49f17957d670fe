"""The layers of a network: those that it computes, with all of its parameters, in a drawing that can be read."""

import itertools
import math
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from torch import nn

from own_parts import register, two_layers
from support import small
from torchcaps.analysis import figure_architecture, list_layers
from torchcaps.models import CapsNet, ModelOutput, Network, create_model, list_presets


def on_meta(name: str, *shape: Any, **overrides: Any) -> Any:
    with torch.device("meta"):
        return create_model(name, *shape, **overrides)


def learned(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_layers_are_those_that_the_network_computes() -> None:
    for name in list_presets():
        check_layers(create_model(name, **small(name)))
    stem = {"stem_channels": (4, 6), "stem_strides": (1, 2), "conv_norm": "channel", "conv_dropout": 0.1}
    model = create_model("sabour2017", (1, 45, 37), **small("sabour2017"), **stem)
    check_layers(model)
    assert list_layers(model)[2].steps == ("convolution 3×3", "stride 2", "ChannelNorm", "ReLU", "Dropout2d")


def check_layers(model: Network) -> None:
    """Maps, capsules and scores are as large as what comes out for an image, and nothing is left out."""
    layers, images = list_layers(model), torch.rand(1, *model.in_shape)
    assert sum(layer.parameters for layer in layers) == learned(model)
    shapes = [layer.shape for layer in layers if not layer.in_decoder]
    with torch.inference_mode():
        output = model.eval()(images)
        assert (shapes[0], shapes[-1]) == (model.in_shape, output.scores[0].shape)
        if isinstance(model, CapsNet):
            maps, poses = model.backbone(images), [*(each.poses for each in model.capsules(images)), output.capsules]
            *_, before, _ = wanted = [maps[0].shape, *(each[0].shape for each in poses), output.scores[0].shape]
            assert before == (model.num_classes, model.capsule_dim)
            for layer, size in zip(shapes[-len(wanted) :], wanted, strict=True):
                flat = layer if layer == size else (math.prod(layer[:-1]), layer[-1])
                assert flat == size
    decoder = [layer for layer in layers if layer.in_decoder]
    assert bool(decoder) == (model.decoder is not None)
    assert sum(layer.parameters for layer in decoder) == (learned(model.decoder) if model.decoder else 0)
    assert not decoder or (decoder[-1].shape, decoder[-1].name) == (model.in_shape, "reconstruction")


def test_what_each_layer_does_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(model: Network) -> list[Any]:
        return [(layer.name, layer.steps, layer.shape) for layer in list_layers(model)][1:]

    register(monkeypatch)
    layers = two_layers({"layer_stride": 2, "transform": "shared", "routing": "cosine"}, {"routing": "active"})
    middle = {"name": "dense", "num_capsules": 6, "capsule_dim": 4, "transform": "elementwise"}
    pooled: Any = {"backbone": "pooled", "pooled_channels": 12, "primary_dim": 9, "decoder": False}
    assert told(on_meta("sabour2017", layers=(layers[0], middle, layers[1]), **pooled)) == [
        ("feature maps", ("convolution 3×3", "MaxPool2d"), (12, 13, 13)),
        ("primary capsules", ("convolution 9×9", "stride 2", "squash"), (32, 3, 3, 9)),
        ("capsules", ("windows 3×3", "stride 2", "shared 3×4×9", "cosine routing, 1 iteration"), (3, 1, 1, 4)),
        ("capsules", ("elementwise 3×6×4", "dynamic routing, 3 iterations"), (6, 4)),
        ("class capsules", ("dense 6×10×5×4", "active routing, 1 iteration"), (10, 5)),
        ("activations", ("activation",), (10,)),
    ]
    maps: Any = {"decoder_hidden": (9,), "decoder_channels": (6, 5)}
    assert told(on_meta("sabour2017", (3, 30, 33), 4, **maps))[-6:] == [
        ("decoder's input", ("class capsules", "all but one 0"), (4 * 16,)),
        ("numbers", ("dense", "ReLU"), (9,)),
        ("numbers", ("dense", "ReLU"), (6 * 8 * 9,)),
        ("feature maps", ("Unflatten", "Upsample"), (6, 15, 17)),
        ("feature maps", ("convolution 3×3", "ReLU", "Upsample"), (5, 30, 33)),
        ("reconstruction", ("convolution 3×3", "Sigmoid"), (3, 30, 33)),
    ]


def test_a_network_of_your_own_is_listed_by_its_modules() -> None:
    class Mine(Network):
        def __init__(self) -> None:
            super().__init__((1, 6, 5), 3, objects=1)
            self.dense, self.scale = nn.Linear(30, 3), nn.Parameter(torch.ones(3))

        def forward(self, images: torch.Tensor, *_: Any) -> ModelOutput:
            return ModelOutput(self.dense(images.flatten(1)) * self.scale)

    image, scores = list_layers(Mine())
    assert (image.name, image.shape) == ("image", (1, 6, 5))
    assert (scores.name, scores.steps, scores.shape, scores.parameters) == ("scores", ("dense",), (3,), 96)
    FigureCanvasAgg(figure_architecture(Mine())).draw()


@pytest.mark.parametrize("name", ["sabour2017-cifar10", "cnn-matched", "sabour2017-multimnist", "hinton2018-paper"])
def test_the_words_of_a_drawing_stand_apart_and_say_every_size(name: str) -> None:
    model = on_meta(name)
    figure = figure_architecture(model, title=name)
    canvas = FigureCanvasAgg(figure)
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    width, height = canvas.get_width_height()
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)
    for first, second in itertools.combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(across, down) <= 1, (texts[boxes.index(first)].get_text(), texts[boxes.index(second)].get_text())
    said = [text.get_text() for text in texts]
    assert said[0] == name
    assert f"{learned(model):,} parameters" in said[1]
    for layer in list_layers(model):
        assert {layer.name, "×".join(map(str, layer.shape)), *layer.steps} <= set(said)
        assert not layer.parameters or f"{layer.parameters:,} parameters" in said
