"""A network's layers in order: what each does, what comes out of it, how much it learns; and a drawing of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchcaps.analysis.figures import EDGE, GAP, LINE, MARGIN, MUTED, SMALL, canvas, text_width, write
from torchcaps.models import BaselineCNN, CapsNet, Network, PooledCNN
from torchcaps.models.images import follow
from torchcaps.nn import (
    CapsuleLayer,
    ChannelNorm,
    ConvBackbone,
    ConvCapsules,
    Convolution,
    Decoder,
    Dense,
    DynamicRouting,
    Elementwise,
    Matrix,
    PrimaryCapsules,
    SelfAttentionRouting,
    Shared,
    StackBackbone,
)
from torchcaps.nn.capsules import Grid
from torchcaps.nn.transforms import WeightTransform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS = "feature maps"
_WORDS = {
    nn.Linear: "dense",
    ChannelNorm: "channel norm",
    nn.BatchNorm2d: "batch norm",
    nn.ReLU: "ReLU",
    nn.Sigmoid: "sigmoid",
    nn.Dropout: "dropout",
    nn.Dropout2d: "dropout",
    nn.Upsample: "twice as large",
    nn.Flatten: "flattened",
}

# Inches: a row of the drawing, the longest side of a map, a cell of a grid, the shortest arrow.
WIDEST, LONGEST, CELL, ARROW = 14.5, 1.15, 0.1, 0.45
MOST_CELLS, MOST_VECTORS, MOST_SHEETS = 24, 10, 5
"""Cells of a grid's side, capsules below each other, and types of capsules behind each other, at most."""
BLUE, ORANGE, GREY = "#cfe3f1", "#f9dcc4", "0.88"  # maps, capsules, numbers


@dataclass(frozen=True)
class Layer:
    """One step of a network, and what it makes of one image.

    Args:
        name: What comes out: ``"feature maps"``, ``"primary capsules"`` …
        steps: What is done, in a few words each: ``("convolution 9×9", "ReLU")``; nothing for the image.
        shape: Of what comes out: maps (C, H, W), capsules at the places of a map (types, H, W, K), other capsules
            (number, components), numbers (n,).
        parameters: How many numbers are learned.
        in_decoder: Whether it belongs to the decoder, which begins at the class capsules.
    """

    name: str
    steps: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int
    in_decoder: bool = False


def list_layers(model: Network) -> list[Layer]:
    """The layers of a network, from the image to the class scores, such as lengths, then those of the decoder.

    Args:
        model: Of any kind; nothing is computed with it, so that it may be on torch's device ``"meta"``.

    Returns:
        Layers whose parameters add up to all of the network's.

    Example:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import list_layers
        >>> for layer in list_layers(create_model("sabour2017", decoder=False)):
        ...     print(layer.name, layer.shape, layer.parameters)
        image (1, 28, 28) 0
        feature maps (256, 20, 20) 20992
        feature maps (256, 6, 6) 5308672
        primary capsules (32, 6, 6, 8) 0
        class capsules (10, 16) 1474560
        lengths (10,) 0
    """
    image = Layer("image", (), model.in_shape, 0)
    if isinstance(model, CapsNet):
        return [image, *_backbone(model), *_primary(model), *_capsules(model), *_decoder(model)]
    if isinstance(model, BaselineCNN):
        parts: list[nn.Module] = list(model.stem.children())
        for conv, norm in zip(model.convs, model.norms, strict=True):
            parts += [conv, norm, nn.ReLU(), model.max_pool, model.drop_channels]
        parts.append(nn.Flatten())
        for dense in model.dense:
            parts += [dense, nn.ReLU()]
        return [image, *_sequence(parts, model.in_shape), _probabilities(model, "dropout" if model.dropout else "")]
    if isinstance(model, PooledCNN):
        how = {"average": "mean over places", "max": "largest over places", "none": "flattened"}[model.pooling]
        return [
            image,
            *_backbone(model),
            Layer("numbers", (how,), (model.classify.in_features,), 0),
            _probabilities(model),
        ]
    return [image, Layer("scores", (type(model).__name__,), (model.num_classes,), _learned(model))]


def primary_grid(model: CapsNet) -> Grid:
    """Types, height and width of the map that primary capsules are made of, wherever they stand."""
    primary = model.primary_capsules
    around = 2 * primary.primary_padding - primary.primary_kernel
    height, width = ((side + around) // primary.primary_stride + 1 for side in model.map_shape[1:])
    return primary.primary_types, height, width


def _backbone(model: CapsNet | PooledCNN) -> list[Layer]:
    """The maps that the backbone makes; of a backbone that is not known here the last ones only."""
    backbone = model.backbone
    layers = [Layer(MAPS, (type(backbone).__name__,), model.map_shape, _learned(backbone))]
    if isinstance(backbone, ConvBackbone | StackBackbone):
        leaves = [part for part in backbone.modules() if not any(part.children())]
        layers = _sequence(
            [part for part in leaves if not isinstance(part, nn.Sequential | nn.Identity)], model.in_shape
        )
    before: tuple[str, ...] = ()
    if isinstance(model, CapsNet) and (model.standardise or model.pixel_scale != 1):
        before = ("standardised" if model.standardise else f"pixels × {model.pixel_scale:g}",)
    return [replace(layers[0], steps=(*before, *layers[0].steps)), *layers[1:]]


def _primary(model: CapsNet) -> list[Layer]:
    primary: nn.Module = model.primary_capsules  # one's own, perhaps
    capsules, name = model.flow[0], "primary capsules"
    shape = (*(capsules.grid or (capsules.poses.shape[1],)), capsules.poses.shape[2])
    if not isinstance(primary, PrimaryCapsules):
        return [Layer(name, (type(primary).__name__,), shape, _learned(primary))]
    types, height, width = primary_grid(model)
    dim, alone = primary.primary_dim, primary.each_channel
    steps = _convolution(primary.convs[0], len(primary.convs)) if alone is None else _convolution(alone)
    if alone is not None:
        steps = ("each channel alone", *steps)
    steps = (*steps, *_words(primary.norm), *(["ReLU"] if primary.primary_activation == "relu" else []))
    learned = _learned(primary.convs if alone is None else alone, primary.norm)
    cut = f"cut in {dim}s" if primary.grouping == "channels" else f"flattened, cut in {dim}s"
    ends = {"squash": ("squash",), "unit": ("to length 1",), "routed": (f"÷ {types}, + bias", "squash")}
    ends |= {"exponential": ("exponential squash",), "linear": ()}
    active = ("activations: convolution", "sigmoid") if primary.primary_activations else ()
    made = (cut, *ends[primary.primary_output], *active)
    maps = Layer(MAPS, steps, (types * dim, height, width), learned)
    return [maps, Layer(name, made, shape, _learned(primary) - learned)]


def _capsules(model: CapsNet) -> list[Layer]:
    """The capsule layers, and the scores of the last one."""
    layers = []
    for number, out in enumerate(model.flow[1:], 1):
        layer = model.layer(number)
        name = "class capsules" if layer is model.class_capsules else "capsules"
        shape = (*(out.grid or (layer.out_capsules,)), layer.out_dim)
        layers.append(Layer(name, _capsule_words(layer), shape, _learned(layer)))
    is_length = isinstance(model.class_capsules.routing, DynamicRouting | SelfAttentionRouting)
    name, score = ("lengths", "length") if is_length else ("scores", "activation, or length")
    learned = _learned(model.classification_loss)
    steps = (score, "times a scale in the loss") if learned else (score,)
    return [*layers, Layer(name, steps, (model.num_classes,), learned)]


def _capsule_words(layer: CapsuleLayer) -> tuple[str, ...]:
    transform, routing = layer.transform, layer.routing
    words = [type(transform).__name__]
    if isinstance(transform, WeightTransform) and transform.size is not None:
        I, K, J, D = transform.size
        side = math.isqrt(K)
        known: dict[type[WeightTransform], list[str]] = {
            Dense: [f"{I:,}×{J} matrices", f"{D}×{K} each"],
            Shared: [f"{J} matrices", f"{D}×{K} each"],
            Matrix: [f"{I:,}×{J} matrices", f"{side}×{side} each"],
            Elementwise: [f"{I:,}×{J} vectors", f"of {D}"],
        }
        words = next((each for kind, each in known.items() if isinstance(transform, kind)), words)
    number = routing.num_iterations
    iterations = f", {number} iteration{'s' * (number > 1)}"
    if not isinstance(routing, DynamicRouting):
        words.append(type(routing).__name__ + iterations * (number > 1))
    elif number == 0:
        words.append("sum of votes")
    else:
        words += [f"routing{iterations}", f"softmax over {routing.softmax_over}"]
        words += ['"none of the above"'] * routing.leaky
    if isinstance(layer, ConvCapsules):
        window = [f"windows {layer.layer_kernel}×{layer.layer_kernel}"]
        window += [f"stride {layer.layer_stride}"] * (layer.layer_stride > 1)
        window += [f"padding {layer.layer_padding}"] * (layer.layer_padding > 0)
        words = [*window, *words, *["batch norm"] * layer.pose_norm]
    return tuple(words)


def _decoder(model: CapsNet) -> list[Layer]:
    decoder: nn.Module | None = model.decoder  # one's own, perhaps
    if decoder is None:
        return []
    objects, size = model.objects, (model.num_classes * model.capsule_dim,)
    name = "reconstruction" if objects == 1 else "reconstruction of each"
    if not isinstance(decoder, Decoder):
        return [Layer(name, (type(decoder).__name__,), model.in_shape, _learned(decoder), True)]
    kept = "one kept, others 0" if objects == 1 else f"{objects} times one kept, others 0"
    layers = [Layer("decoder's input", ("class capsules", kept, "flattened"), size, 0)]
    layers += _sequence(decoder.layers, size, maps="map")
    layers[-1] = replace(layers[-1], name=name, shape=model.in_shape)
    return [replace(layer, in_decoder=True) for layer in layers]


def _probabilities(model: BaselineCNN | PooledCNN, before: str = "") -> Layer:
    steps = (before, "dense", "softmax" if model.objects == 1 else "sigmoid")
    return Layer("probabilities", tuple(filter(None, steps)), (model.num_classes,), _learned(model.classify))


def _sequence(parts: Iterable[nn.Module], shape: tuple[int, ...], maps: str = MAPS) -> list[Layer]:
    """The layers of modules that follow each other: a convolution, a dense layer and a flattening begin one each."""
    layers: list[Layer] = []
    before: tuple[str, ...] = ()
    for part in parts:
        dtype = next((each.dtype for each in part.parameters()), torch.float32)
        shape = tuple(follow(part, torch.empty(2, *shape, device="meta", dtype=dtype))[0].shape[1:])
        words, name = _words(part), maps if len(shape) == 3 else "hidden"
        if isinstance(part, nn.Upsample):
            before = words
        elif isinstance(part, Convolution | nn.Linear | nn.Flatten):
            name = "numbers" if isinstance(part, nn.Flatten) else name
            layers.append(Layer(name, (*before, *words), shape, _learned(part)))
            before = ()
        else:
            last = layers[-1]
            name = name if isinstance(part, nn.Unflatten) else last.name
            layers[-1] = Layer(name, (*last.steps, *words), shape, last.parameters + _learned(part))
    return layers


def _words(part: nn.Module) -> tuple[str, ...]:
    """What a module does; nothing where it is not worth a word."""
    if isinstance(part, Convolution):
        return (*_convolution(part), *(["ReLU"] if part.relu else []))
    if isinstance(part, nn.MaxPool2d):
        return (f"max pooling {part.kernel_size}×{part.kernel_size}",)
    return (_WORDS[type(part)],) if type(part) in _WORDS else ()


def _convolution(conv: nn.Module, number: int = 1) -> tuple[str, ...]:
    assert isinstance(conv, nn.Conv2d)
    height, width = conv.kernel_size
    what = f"{number} convolutions" if number > 1 else "convolution"
    return (f"{what} {height}×{width}", *([f"stride {conv.stride[0]}"] if conv.stride[0] > 1 else []))


def _learned(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


# ---- the drawing


def figure_architecture(model: Network, *, title: str | None = None) -> Figure:
    """A drawing of a network's layers with their sizes: from left to right what comes out of each, arrows between.

    Over an arrow stands what is done, under it how many parameters are learned; the decoder has rows of its own.

    Args:
        model: Of any kind; nothing is computed with it, so that it may be on torch's device ``"meta"``.
        title: Above the figure; by default it says what kind of network it is.
    """
    layers = list_layers(model)
    largest = max(max(layer.shape[-2:]) for layer in layers if len(layer.shape) == 3)
    blocks = [_Block(layer, largest) for layer in layers]
    rows: list[list[_Block]] = []
    for block in blocks:  # beside each other as far as a row is wide; the decoder's begin one
        begins = not rows or rows[-1][-1].layer.in_decoder != block.layer.in_decoder
        if begins or sum(each.width for each in rows[-1]) + block.width > WIDEST:
            rows.append([])
        rows[-1].append(block)
    above = [max(block.above for block in row) for row in rows]
    below = [max(block.below for block in row) for row in rows]
    subtitle = f"{_by(model.in_shape)} pixels, {model.num_classes} classes, "
    subtitle += f"{sum(layer.parameters for layer in layers):,} parameters"
    y = MARGIN + 0.3 + 2 * LINE
    height = y + sum(above) + sum(below) + LINE * len(rows) + MARGIN
    wide = max(sum(block.width for block in row) for row in rows) + 2 * MARGIN
    figure, axes = canvas(wide, height, title or type(model).__name__, subtitle)
    for row, over, under in zip(rows, above, below, strict=True):
        x = MARGIN
        for block in row:
            block.draw(axes, x, y + over)
            x += block.width
        y += over + under + LINE
    return figure


class _Block:
    """A layer in the drawing: an arrow with words, what comes out, and under it its name and size. In inches.

    The longest side of any map of the network has ``largest`` pixels.
    """

    def __init__(self, layer: Layer, largest: int) -> None:
        self.layer, shape = layer, layer.shape
        *places, last = shape
        note = f"{math.prod(places):,} of {last} components" if len(places) in (1, 3) else ""
        self.words = (layer.name, _by(shape), note)
        self.learned = f"{layer.parameters:,} parameters" if layer.parameters else ""
        self.depth = 0.0  # how far what is behind the front reaches to the right
        if len(shape) == 1:
            self.wide, self.high = 0.16, 0.3 + 0.09 * math.log2(shape[0])
        elif len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS) + (shape[0] > MOST_VECTORS)  # the last for an ellipsis
            self.wide, self.high = min(shape[1], MOST_CELLS) * CELL, rows * CELL
        else:
            scale = LONGEST / math.sqrt(largest) / math.sqrt(max(shape[1:3]))  # areas as the sides of the maps
            self.wide, self.high = max(shape[2] * scale, CELL), max(shape[1] * scale, CELL)
            sheets = CELL * (min(shape[0], MOST_SHEETS) - 1)
            self.depth = sheets if len(shape) == 4 else 0.05 + 0.06 * math.log2(shape[0])
        self.arrow = max(ARROW, text_width([*layer.steps, self.learned], SMALL)) + 2 * GAP if layer.steps else 0.0
        self.output = max(self.wide + self.depth, text_width(self.words, SMALL))
        self.width = self.arrow + self.output + GAP
        half = (self.high + 0.6 * self.depth) / 2
        self.above, self.below = max(half, len(layer.steps) * LINE + GAP), half + GAP + 3 * LINE

    def draw(self, axes: Axes, x: float, middle: float) -> None:
        """Draw all of it from ``x`` on, around the line ``middle``."""
        if self.layer.steps:
            head = {"arrowstyle": "->", "color": EDGE, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x + self.arrow - GAP, middle), (x, middle), arrowprops=head)
            for n, step in enumerate(reversed(self.layer.steps)):
                write(axes, step, x + self.arrow / 2, middle - GAP / 2 - n * LINE, size=SMALL, ha="center", va="bottom")
            write(axes, self.learned, x + self.arrow / 2, middle + GAP / 2, size=SMALL, ha="center", color=MUTED)
        centre = x + self.arrow + self.output / 2
        self._draw_output(axes, centre - (self.wide + self.depth) / 2, middle - (self.high - 0.6 * self.depth) / 2)
        under = middle + self.below - 3 * LINE
        styles: tuple[dict[str, str], ...] = ({}, {"weight": "bold"}, {"color": MUTED})
        for n, (line, style) in enumerate(zip(self.words, styles, strict=True)):
            write(axes, line, centre, under + n * LINE, size=SMALL, ha="center", **style)

    def _draw_output(self, axes: Axes, x: float, y: float) -> None:
        """Numbers as a bar, capsules as rows of components, maps as a block, types of capsules behind each other."""
        shape, wide, high, depth = self.layer.shape, self.wide, self.high, self.depth
        right, up = x + wide, y - 0.6 * depth
        if len(shape) == 1:
            _box(axes, GREY, x, y, wide, high)
        elif len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS)
            _box(axes, ORANGE, x, y, wide, rows * CELL, rows, shape[1])
            if shape[0] > rows:
                write(axes, "⋮", x + wide / 2, y + high - CELL / 2, size=SMALL, ha="center", va="center")
        elif len(shape) == 3:
            _box(axes, BLUE, x, y, wide, high)
            _polygon(axes, BLUE, (x, y), (x + depth, up), (right + depth, up), (right, y))
            _polygon(axes, BLUE, (right, y), (right + depth, up), (right + depth, up + high), (right, y + high))
        else:
            for n in range(min(shape[0], MOST_SHEETS) - 1, -1, -1):
                _box(axes, ORANGE, x + n * CELL, y - 0.6 * n * CELL, wide, high, *(shape[1:3] if n == 0 else ()))


def _polygon(axes: Axes, colour: str, *corners: tuple[float, float]) -> None:
    from matplotlib.patches import Polygon

    style: Any = {"facecolor": colour, "edgecolor": EDGE, "linewidth": 0.6, "joinstyle": "round"}
    axes.add_patch(Polygon(corners, **style))


def _box(
    axes: Axes, colour: str, left: float, top: float, wide: float, high: float, rows: int = 1, columns: int = 1
) -> None:
    """A rectangle with lines between rows, and between columns, where there are not too many."""
    right, bottom = left + wide, top + high
    _polygon(axes, colour, (left, top), (right, top), (right, bottom), (left, bottom))
    style: Any = {"colors": EDGE, "linewidth": 0.4}
    if rows <= MOST_CELLS:
        axes.hlines([top + n * high / rows for n in range(1, rows)], left, right, **style)
    if columns <= MOST_CELLS:
        axes.vlines([left + n * wide / columns for n in range(1, columns)], top, bottom, **style)


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
