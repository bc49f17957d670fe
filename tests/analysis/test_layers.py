"""The layers of a network: those that it computes, with all of its parameters, in a drawing that can be read."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from torch import nn

from own_parts import Cosine, register, two_layers
from support import small
from torchcaps.analysis import figure_architecture, list_layers
from torchcaps.analysis.layers import primary_grid
from torchcaps.models import BaselineCNN, CapsNet, Network, create_model, list_presets
from torchcaps.nn import Convolution


def on_meta(name: str, *shape: Any, **overrides: Any) -> Any:
    with torch.device("meta"):
        return create_model(name, *shape, **overrides)


def learned(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def computed(model: Network) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that come out of a network's modules for an image, by what they are."""
    found: dict[str, list[tuple[int, ...]]] = {"maps": [], "numbers": []}

    def listen(modules: list[nn.Module], kind: str) -> None:
        for module in modules:
            module.register_forward_hook(lambda _, __, output: found[kind].append(tuple(output.shape[1:])))

    stem = model.stem if isinstance(model, BaselineCNN) else model.backbone
    convolutions: list[nn.Module] = [part for part in stem.modules() if isinstance(part, Convolution)]
    if isinstance(model, BaselineCNN):
        pooled = isinstance(model.max_pool, nn.MaxPool2d)
        convolutions += [model.max_pool] if pooled else list(model.convs)  # the one pool is called for each
    listen(convolutions, "maps")
    listen([part for part in model.modules() if isinstance(part, nn.Linear)], "numbers")
    with torch.inference_mode():
        model.eval()(torch.rand(1, *model.in_shape))
    return found


def test_layers_are_those_that_the_network_computes() -> None:
    for name in set(list_presets()) - {"sequences"}:  # whose parts are told as one's own are
        check_layers(create_model(name, **small(name)))
    stem = {"stem_channels": (4, 6), "stem_strides": (1, 2), "conv_norm": "channel", "conv_dropout": 0.1}
    model = create_model("sabour2017", (1, 45, 37), **small("sabour2017"), **stem)
    check_layers(model)
    assert list_layers(model)[2].steps == ("convolution 3×3", "stride 2", "channel norm", "ReLU", "dropout")


def check_layers(model: Network) -> None:
    layers, found = list_layers(model), computed(model)
    assert sum(layer.parameters for layer in layers) == learned(model)
    shapes = [layer.shape for layer in layers if not layer.in_decoder]
    assert shapes[0] == model.in_shape
    maps = [shape for shape in shapes[1:] if len(shape) == 3]
    if isinstance(model, CapsNet):
        kinds, height, width = primary_grid(model)
        dim = model.primary_capsules.primary_dim
        assert maps == [*found["maps"], (kinds * dim, height, width)]
        primary, *capsules, scores = shapes[-len(model.layers) - 2 :]
        assert primary == ((kinds, height, width, dim) if model.flow[0].grid else (kinds * height * width, dim))
        assert scores == (model.num_classes,)
        with torch.inference_mode():
            images = torch.rand(1, *model.in_shape)
            poses = [*(each.poses for each in model.capsules(images)), model(images).capsules]
        sizes = [(math.prod(shape[:-1]), shape[-1]) for shape in (primary, *capsules)]
        assert sizes == [tuple(each.shape[1:]) for each in poses]
    else:
        assert maps == found["maps"]
        assert [shape for shape in shapes if len(shape) == 1][1:] == found["numbers"]
    decoder = [layer.shape for layer in layers if layer.in_decoder]
    if getattr(model, "decoder", None) is None:
        assert decoder == []
    else:
        *hidden, pixels = dict.fromkeys(found["numbers"])  # once for each object
        assert decoder[1:-1] == hidden
        assert (decoder[-1], math.prod(decoder[-1])) == (model.in_shape, pixels[0])


def test_what_is_particular_about_a_network_is_said() -> None:
    for name, steps in {
        "keras-tutorial": ("pixels × 255", "softmax over inputs", "to length 1"),
        "sabour2017-cifar10": ("standardised", '"none of the above"'),
        "sabour2017": ("routing, 3 iterations", "1,152×10 matrices", "16×8 each", "one kept, others 0"),
        "keras-tutorial-r0": ("sum of votes",),
        "sabour2017-code": ("÷ 32, + bias",),
        "torch-notebook": ("8 convolutions 9×9", "flattened, cut in 8s"),
        "sabour2017-multimnist": ("2 times one kept, others 0",),
        "baseline-cnn": ("dropout", "softmax"),
        "baseline-cnn-multimnist": ("sigmoid",),
        "cnn-matched": ("max pooling 2×2",),
    }.items():
        assert set(steps) <= {step for layer in list_layers(on_meta(name)) for step in layer.steps}


def test_the_maps_of_a_decoder() -> None:
    model = on_meta("sabour2017", (3, 30, 33), 4, decoder_hidden=(9,), decoder_channels=(6, 5))
    found = [layer for layer in list_layers(model) if layer.in_decoder]
    assert [layer.shape for layer in found] == [(4 * 16,), (9,), (6, 8, 9), (5, 15, 17), (3, 30, 33)]
    assert [layer.name for layer in found[1:]] == ["hidden", "map", "map", "reconstruction"]
    assert found[3].steps == ("twice as large", "convolution 3×3", "ReLU")
    assert [layer.parameters for layer in found[2:]] == [10 * 6 * 72, 6 * 5 * 9 + 5, 5 * 3 * 9 + 3]


def test_parts_of_your_own_go_by_their_names() -> None:
    class Mine(Network):
        def __init__(self) -> None:
            super().__init__((1, 6, 5), 3, objects=1)
            self.dense = nn.Linear(30, 3)

    image, scores = list_layers(Mine())
    assert (image.name, image.shape) == ("image", (1, 6, 5))
    assert (scores.steps, scores.shape, scores.parameters) == (("Mine",), (3,), 93)
    FigureCanvasAgg(figure_architecture(Mine())).draw()
    model = on_meta("sabour2017")
    model.decoder = type("Draw", (nn.Linear,), {})(4, 5)
    assert list_layers(model)[-1].steps == ("Draw",)


def test_layers_of_a_deep_network_say_their_windows_and_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    layers = two_layers({"layer_stride": 2, "transform": "shared", "routing": "cosine"})
    middle = {"name": "dense", "num_capsules": 6, "capsule_dim": 4, "transform": "elementwise"}
    three = (layers[0], middle, layers[1])
    model = on_meta("sabour2017", layers=three, backbone="pooled", pooled_channels=12, primary_dim=9)
    found = list_layers(model)
    assert sum(layer.parameters for layer in found) == learned(model)
    assert [(layer.name, layer.shape, layer.parameters) for layer in (found[1], *found[4:7])] == [
        ("feature maps", (12, 13, 13), 12 * 9 + 12),
        ("capsules", (3, 1, 1, 4), 3 * 4 * 9),
        ("capsules", (6, 4), 3 * 6 * 4),
        ("class capsules", (10, 5), 6 * 10 * 5 * 4),
    ]
    assert found[1].steps == ("Pooled",)
    assert found[4].steps == ("windows 3×3", "stride 2", "3 matrices", "4×9 each", "Cosine")
    assert found[5].steps == ("3×6 vectors", "of 4", "routing, 3 iterations", "softmax over outputs")
    assert found[7].name == "lengths"
    model.class_capsules.routing = Cosine()  # of which nobody knows whether it gives activations
    assert list_layers(model)[7].steps == ("activation, or length",)
    FigureCanvasAgg(figure_architecture(model)).draw()


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
