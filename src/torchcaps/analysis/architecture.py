"""A network's layers in order: what each does, what comes out of it, how much it learns; and a drawing of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING

from torch import nn

from torchcaps.analysis.figures import GAP, LINE, MARGIN, MUTED, SMALL, Sheet, text_width
from torchcaps.models import BaselineCNN, CapsNet, Network, PooledCNN
from torchcaps.nn import (
    ChannelNorm,
    ConvBackbone,
    ConvCapsules,
    Convolution,
    Dense,
    DenseCapsules,
    DynamicRouting,
    Elementwise,
    Matrix,
    SelfAttentionRouting,
    Shared,
    StackBackbone,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches: a row of the drawing, the longest side of a map, a cell of a grid, the shortest arrow.
WIDEST, LONGEST, CELL, ARROW = 14.5, 1.15, 0.1, 0.45
MOST_CELLS, MOST_VECTORS, MOST_SHEETS = 24, 10, 5
"""Cells of a grid's side, capsules below each other, and types of capsules behind each other, at most."""
_FEATURES = "feature maps"
MAPS, CAPSULES, NUMBERS = "#cfe3f1", "#f9dcc4", "0.88"


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


@singledispatch
def list_layers(model: Network) -> list[Layer]:
    """The layers of a network, from the image to the class scores, such as lengths, then those of the decoder.

    Args:
        model: Of either kind; nothing is computed with it, so that it may be on torch's device ``"meta"``.

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
    return [Layer("scores", (type(model).__name__,), (model.num_classes,), _learned(model))]


def figure_architecture(model: Network, *, title: str | None = None) -> Figure:
    """A drawing of a network's layers with their sizes: from left to right what comes out of each, arrows between.

    Over an arrow stands what is done, under it how many parameters are learned; the decoder has rows of its own.

    Args:
        model: Of either kind; nothing is computed with it, so that it may be on torch's device ``"meta"``.
        title: Above the figure; by default it says what kind of network it is.
    """
    layers = list_layers(model)
    total = sum(layer.parameters for layer in layers)
    title = title or type(model).__name__
    subtitle = f"{_shape(model.in_shape)} pixels, {model.num_classes} classes, {total:,} parameters"
    largest = max(max(layer.shape[-2:]) for layer in layers if len(layer.shape) == 3)
    blocks = [_Block(layer, largest) for layer in layers]
    rows = _rows(blocks)
    heights = [max(block.height for block in row) for row in rows]
    top = MARGIN + 0.3 + 2 * LINE
    wide = max(sum(block.width for block in row) + GAP * len(row) for row in rows)
    sheet = Sheet(wide + 2 * MARGIN, top + sum(heights) + LINE * len(rows) + MARGIN, title, subtitle)
    y = top
    for row, height in zip(rows, heights, strict=True):
        x, middle = MARGIN, y + max(block.above for block in row)
        for block in row:
            block.draw(sheet, x, middle)
            x += block.width + GAP
        y += height + LINE
    return sheet.figure


class _Block:
    """A layer in the drawing: an arrow with what is done, and after it what comes out.

    The longest side of any map of the network has ``largest`` pixels.
    """

    def __init__(self, layer: Layer, largest: int) -> None:
        self.layer, self.largest = layer, largest
        *places, last = layer.shape
        note = f"{math.prod(places):,} of {last} components" if len(places) in (1, 3) else ""
        self.under = [layer.name, _shape(layer.shape), note]
        self.learned = f"{layer.parameters:,} parameters" if layer.parameters else ""
        self.arrow = max(ARROW, text_width([*layer.steps, self.learned], SMALL)) + 2 * GAP if layer.steps else 0.0
        self.size, self.depth = self._measure()
        self.shown = max(self.size[0] + self.depth, text_width(self.under, SMALL))
        self.width = self.arrow + self.shown
        drawn = (self.size[1] + 0.6 * self.depth) / 2
        self.above = max(drawn, len(layer.steps) * LINE + GAP)
        self.below = max(drawn + GAP + len(self.under) * LINE, LINE + GAP)
        self.height = self.above + self.below

    def draw(self, sheet: Sheet, x: float, middle: float) -> None:
        """Draw it with its left end at ``x``, the arrow at the height ``middle``; inches."""
        centre = x + self.arrow / 2
        if self.layer.steps:
            sheet.arrow((x, middle), (x + self.arrow - GAP, middle))
        for n, step in enumerate(reversed(self.layer.steps)):
            sheet.text(step, centre, middle - GAP / 2 - n * LINE, size=SMALL, ha="center", va="bottom")
        sheet.text(self.learned, centre, middle + GAP / 2, size=SMALL, ha="center", color=MUTED)
        left = x + self.arrow + (self.shown - self.size[0] - self.depth) / 2
        top = middle - (self.size[1] - 0.6 * self.depth) / 2  # of the front
        self._draw_output(sheet, left, top)
        under = middle + (self.size[1] + 0.6 * self.depth) / 2 + GAP
        styles: tuple[dict[str, str], ...] = ({}, {"weight": "bold"}, {"color": MUTED})
        for n, (line, style) in enumerate(zip(self.under, styles, strict=True)):
            sheet.text(line, x + self.arrow + self.shown / 2, under + n * LINE, size=SMALL, ha="center", **style)

    def _measure(self) -> tuple[tuple[float, float], float]:
        """Width and height of the front, and how far what is behind it reaches to the right; inches."""
        shape = self.layer.shape
        if len(shape) == 1:
            return (0.16, 0.3 + 0.09 * math.log2(shape[0])), 0.0
        if len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS) + (shape[0] > MOST_VECTORS)  # the last for an ellipsis
            return (min(shape[1], MOST_CELLS) * CELL, rows * CELL), 0.0
        height, width = shape[1:3]
        scale = LONGEST / math.sqrt(self.largest) / math.sqrt(max(height, width))  # areas as the sides of the maps
        front = (max(width * scale, CELL), max(height * scale, CELL))
        if len(shape) == 4:
            return front, CELL * (min(shape[0], MOST_SHEETS) - 1)
        return front, 0.05 + 0.06 * math.log2(shape[0])

    def _draw_output(self, sheet: Sheet, left: float, top: float) -> None:
        """Numbers as a bar, capsules as rows of components, maps as a block, types of capsules behind each other."""
        shape, (width, height), depth = self.layer.shape, self.size, self.depth
        if len(shape) == 1:
            _box(sheet, left, top, self.size, NUMBERS)
        elif len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS)
            _box(sheet, left, top, (width, rows * CELL), CAPSULES, rows, shape[1])
            if shape[0] > rows:
                sheet.text("⋮", left + width / 2, top + height - CELL / 2, size=SMALL, ha="center", va="center")
        elif len(shape) == 3:
            right, bottom, up = left + width, top + height, top - 0.6 * depth
            _box(sheet, left, top, self.size, MAPS)
            sheet.polygon([(left, top), (left + depth, up), (right + depth, up), (right, top)], MAPS)
            sheet.polygon([(right, top), (right + depth, up), (right + depth, up + height), (right, bottom)], MAPS)
        else:
            for n in range(min(shape[0], MOST_SHEETS) - 1, 0, -1):
                _box(sheet, left + n * CELL, top - 0.6 * n * CELL, self.size, CAPSULES)
            _box(sheet, left, top, self.size, CAPSULES, *shape[1:3])


def _box(
    sheet: Sheet, left: float, top: float, size: tuple[float, float], colour: str, rows: int = 1, columns: int = 1
) -> None:
    """A rectangle with lines between rows, and between columns, where there are not too many."""
    right, bottom = left + size[0], top + size[1]
    sheet.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], colour)
    for n in range(1, rows if rows <= MOST_CELLS else 1):
        y = top + n * size[1] / rows
        sheet.line((left, y), (right, y))
    for n in range(1, columns if columns <= MOST_CELLS else 1):
        x = left + n * size[0] / columns
        sheet.line((x, top), (x, bottom))


def _rows(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Blocks beside each other as far as a row is wide; the decoder's begin a row."""
    rows: list[list[_Block]] = []
    for n, block in enumerate(blocks):
        begins = n == 0 or block.layer.in_decoder != blocks[n - 1].layer.in_decoder
        if begins or sum(each.width + GAP for each in rows[-1]) + block.width > WIDEST:
            rows.append([])
        rows[-1].append(block)
    return rows


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _learned(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _convolution(conv: nn.Module, number: int = 1) -> list[str]:
    assert isinstance(conv, nn.Conv2d)
    height, width = conv.kernel_size
    what = f"{number} convolutions" if number > 1 else "convolution"
    return [f"{what} {height}×{width}", *([f"stride {conv.stride[0]}"] if conv.stride[0] > 1 else [])]


def _maps(parts: Iterable[nn.Module], shape: tuple[int, ...]) -> list[Layer]:
    """The layers of modules that make maps of others: each begins with a convolution."""
    words = {ChannelNorm: "channel norm", nn.BatchNorm2d: "batch norm", nn.ReLU: "ReLU", nn.Dropout2d: "dropout"}
    layers: list[Layer] = []
    for part in parts:
        if isinstance(part, Convolution):
            sizes = zip(shape[1:], part.kernel_size, part.stride, part.zeros, strict=True)
            outer = [(size + 2 * zeros - kernel) // stride + 1 for size, kernel, stride, zeros in sizes]
            shape = (part.out_channels, *outer)
            layers.append(Layer(_FEATURES, (), shape, 0))
            steps = [*_convolution(part), *(["ReLU"] if part.relu else [])]
        elif isinstance(part, nn.MaxPool2d):
            pool = part.kernel_size
            assert isinstance(pool, int)
            shape = (shape[0], *(-(-size // pool) for size in shape[1:]))
            steps = [f"max pooling {pool}×{pool}"]
        else:
            steps = [words[type(part)]] if type(part) in words else []
        last = layers[-1]
        layers[-1] = replace(
            last, steps=(*last.steps, *steps), shape=shape, parameters=last.parameters + _learned(part)
        )
    return layers


@list_layers.register
def _capsule_layers(model: CapsNet) -> list[Layer]:
    config, primary = model.config, model.primary_capsules
    layers = _backbone_layers(model)

    if config.standardise or config.pixel_scale != 1:
        before = "standardised" if config.standardise else f"pixels × {config.pixel_scale:g}"
        layers[1] = replace(layers[1], steps=(before, *layers[1].steps))

    kinds, height, width = model.primary_grid
    made_by = primary.convs if primary.each_channel is None else primary.each_channel
    if primary.each_channel is None:
        steps = _convolution(primary.convs[0], len(primary.convs))
    else:
        steps = ["each channel alone", *_convolution(primary.each_channel)]
    steps += [*(["batch norm"] if isinstance(primary.norm, nn.BatchNorm2d) else [])]
    steps += ["ReLU"] if primary.activation == "relu" else []
    learned = _learned(made_by, primary.norm)
    layers.append(Layer(_FEATURES, tuple(steps), (kinds * primary.dim, height, width), learned))
    in_space = primary.grouping == "channels"
    cut = f"cut in {primary.dim}s" if in_space else f"flattened, cut in {primary.dim}s"
    ends = {"squash": ("squash",), "unit": ("to length 1",), "routed": (f"÷ {kinds}, + bias", "squash")}
    ends |= {"exponential": ("exponential squash",), "linear": ()}
    active = ("activations: convolution", "sigmoid") if primary.activity is not None else ()
    places = (kinds, height, width) if in_space else (math.prod(model.primary_grid),)
    own = _learned(primary) - learned
    layers.append(Layer("primary capsules", (cut, *ends[primary.output], *active), (*places, primary.dim), own))

    for layer, out in zip(model.layers, model.shapes[1:], strict=True):
        assert isinstance(layer, DenseCapsules | ConvCapsules)
        steps = [*_window(layer), *_transform(layer), *_routing(layer.routing)]
        steps += ["batch norm"] if isinstance(layer, ConvCapsules) and layer.norm is not None else []
        places = (out.number,) if out.grid is None else out.grid
        name = "class capsules" if layer is model.class_capsules else "capsules"
        layers.append(Layer(name, tuple(steps), (*places, out.dim), _learned(layer)))
    is_length = isinstance(model.class_capsules.routing, DynamicRouting | SelfAttentionRouting)
    score = ("lengths", "length") if is_length else ("scores", "activation, or length")
    learned = model.score_scale.numel() if isinstance(model.score_scale, nn.Parameter) else 0
    scaled = ("times a scale in the loss",) if learned else ()
    layers.append(Layer(score[0], (*score[1:], *scaled), (model.num_classes,), learned))
    return layers + _decoder_layers(model)


def _backbone_layers(model: CapsNet | PooledCNN) -> list[Layer]:
    """The image and the maps that the backbone makes; of a backbone that is not known here the last ones only."""
    image, backbone = Layer("image", (), model.in_shape, 0), model.backbone
    if isinstance(backbone, ConvBackbone):
        parts = [*backbone.stem.children(), backbone.conv, backbone.norm, backbone.activation, backbone.dropout]
        return [image, *_maps(parts, model.in_shape)]
    if isinstance(backbone, StackBackbone):
        return [image, *_maps(backbone.children(), model.in_shape)]
    return [image, Layer(_FEATURES, (type(backbone).__name__,), model.map_shape, _learned(backbone))]


def _window(layer: DenseCapsules | ConvCapsules) -> list[str]:
    if isinstance(layer, DenseCapsules):
        return []
    named = {"stride": layer.stride if layer.stride > 1 else 0, "padding": layer.padding}
    return [f"windows {layer.kernel_size}×{layer.kernel_size}", *(f"{name} {n}" for name, n in named.items() if n)]


def _transform(layer: DenseCapsules | ConvCapsules) -> list[str]:
    size, transform = layer.size, layer.transform
    if isinstance(layer, DenseCapsules) and layer.share_positions and layer.grid is not None:
        size = size._replace(in_capsules=layer.grid[0])
    pairs = f"{size.in_capsules:,}×{size.out_capsules}"
    if isinstance(transform, Dense):
        return [f"{pairs} matrices", f"{size.out_dim}×{size.in_dim} each"]
    if isinstance(transform, Shared):
        return [f"{size.out_capsules} matrices", f"{size.out_dim}×{size.in_dim} each"]
    if isinstance(transform, Matrix):
        return [f"{pairs} matrices", f"{math.isqrt(size.in_dim)}×{math.isqrt(size.in_dim)} each"]
    if isinstance(transform, Elementwise):
        return [f"{pairs} vectors", f"of {size.out_dim}"]
    return [type(transform).__name__]


def _routing(routing: nn.Module) -> Iterable[str]:
    if not isinstance(routing, DynamicRouting):
        iterations = f", {routing.num_iterations} iterations" if getattr(routing, "num_iterations", 1) > 1 else ""
        return [f"{type(routing).__name__}{iterations}"]
    if routing.num_iterations == 0:
        return ["sum of votes"]
    rounds = f"routing, {routing.num_iterations} iteration{'s' * (routing.num_iterations > 1)}"
    return [rounds, f"softmax over {routing.softmax_over}", *(['"none of the above"'] if routing.leaky else [])]


def _decoder_layers(model: CapsNet) -> list[Layer]:
    if model.decoder is None:
        return []
    capsules, objects = model.class_capsules, model.config.objects
    kept = "one kept, others 0" if objects == 1 else f"{objects} times one kept, others 0"
    steps = ("class capsules", kept, "flattened")
    layers = [Layer("decoder's input", steps, (capsules.out_capsules * capsules.out_dim,), 0, True)]
    found: list[Layer] = []
    size: tuple[int, ...] = ()
    for part in model.decoder.modules():
        if isinstance(part, nn.Linear):
            found.append(Layer("hidden", ("dense", "ReLU"), (part.out_features,), _learned(part), True))
        elif isinstance(part, nn.Unflatten):
            found[-1] = replace(found[-1], name="map", shape=tuple(part.unflattened_size))
        elif isinstance(part, nn.Upsample):
            assert isinstance(part.size, tuple)
            size = part.size
        elif isinstance(part, Convolution):
            how = ("twice as large", *_convolution(part), "ReLU")
            found.append(Layer("map", how, (part.out_channels, *size), _learned(part), True))
    last = found.pop().steps[:-1] if found else ("dense",)
    rest = _learned(model.decoder) - sum(layer.parameters for layer in found)
    name = "reconstruction" if objects == 1 else "reconstruction of each"
    return [*layers, *found, Layer(name, (*last, "sigmoid"), model.in_shape, rest, True)]


@list_layers.register
def _cnn_layers(model: BaselineCNN) -> list[Layer]:
    parts = [*model.stem.children()]
    for conv, norm in zip(model.convs, model.norms, strict=True):
        parts += [conv, norm, nn.ReLU(), model.pool, model.conv_dropout]
    layers = [Layer("image", (), model.in_shape, 0), *_maps(parts, model.in_shape)]
    layers.append(Layer("numbers", ("flattened",), (math.prod(layers[-1].shape),), 0))
    for dense in model.dense:
        assert isinstance(dense, nn.Linear)
        layers.append(Layer("hidden", ("dense", "ReLU"), (dense.out_features,), _learned(dense)))
    return [*layers, _probabilities(model, ["dropout"] if model.config.dropout else [])]


@list_layers.register
def _pooled_layers(model: PooledCNN) -> list[Layer]:
    how = {"average": "mean over places", "max": "largest over places", "none": "flattened"}[model.config.pooling]
    numbers = Layer("numbers", (how,), (model.classify.in_features,), 0)
    return [*_backbone_layers(model), numbers, _probabilities(model)]


def _probabilities(model: BaselineCNN | PooledCNN, before: Sequence[str] = ()) -> Layer:
    steps = (*before, "dense", "softmax" if model.config.objects == 1 else "sigmoid")
    return Layer("probabilities", steps, (model.num_classes,), _learned(model.classify))
