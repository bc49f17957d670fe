"""List a network's layers with their operations, output shapes and parameters, and draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from torchcaps.analysis.figures import EDGE, GAP, LINE, MARGIN, MUTED, SMALL, canvas, text_width, write
from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models import BranchedNetwork, CapsNet, Network, PixelCapsules, SlotNetwork
from torchcaps.models.shapes import infer_shapes
from torchcaps.nn import CapsuleLayer, DeconvCapsules, PrimaryCapsules
from torchcaps.nn.layers import MapLayer
from torchcaps.nn.slots import SlotLayer
from torchcaps.parts import part_of
from torchcaps.tasks import task_of
from torchcaps.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: longest row of the drawing, longest side of a map, side of a cell, shortest arrow.
MAX_ROW, MAX_MAP, CELL, MIN_ARROW = 14.5, 1.15, 0.1, 0.45
MAX_CELLS, MAX_VECTORS, MAX_SHEETS = 24, 10, 5
"""Drawn at most: cells along a side of a grid, capsules in a column, and capsule types behind each other."""
BLUE, ORANGE, GREY = "#cfe3f1", "#f9dcc4", "0.88"  # maps, capsules, numbers


@dataclass(frozen=True)
class Layer:
    """One layer of a network, and its output for one image.

    Args:
        name: Name of the output: ``"feature maps"``, ``"primary capsules"`` …
        steps: Operations, a few words each: ``("convolution 9×9", "ReLU")``; empty for the image.
        shape: Shape of the output: maps (C, H, W), capsules on a grid (types, H, W, K), other capsules (number,
            components), numbers (n,).
        parameters: Number of learned parameters.
        in_decoder: True for layers of the decoder, which begins at the class capsules.
    """

    name: str
    steps: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int
    in_decoder: bool = False


@checked
def list_layers(model: Network) -> list[Layer]:
    """List the layers of a network: from the image to the class scores, then the decoder.

    Args:
        model: Any network. Nothing is computed, so it may be on torch's device ``"meta"``.

    Returns:
        Layers whose parameters sum to the parameters of the network.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import list_layers
        >>> for layer in list_layers(create_model("sabour2017", decoder=False)):
        ...     print(layer.name, layer.shape, layer.parameters)
        image (1, 28, 28) 0
        feature maps (256, 20, 20) 20992
        primary capsules (32, 6, 6, 8) 5308672
        class capsules (10, 16) 1474560
        lengths (10,) 0
    """
    images = torch.empty(2, *model.in_shape, device="meta", dtype=next(model.parameters()).dtype)
    image = Layer("image", (), model.in_shape, 0)
    if isinstance(model, PixelCapsules):
        return [image, *_layers_of_pixels(model, images)]
    if isinstance(model, BranchedNetwork):
        return [image, *_layers_of_branches(model, images)]
    if isinstance(model, SlotNetwork):
        return [image, *_layers_of_slots(model, images)]
    if not isinstance(model, CapsNet):
        *hidden, last = _called(model, images)
        return [image, *hidden, replace(last, name="scores")]
    layers = [image, *_called(model.backbone, images)]
    parts = [model.primary_capsules, *model.layers]
    names = ["primary capsules", *["capsules"] * (len(model.layers) - 1), "class capsules"]
    for name, part, out in zip(names, parts, model.flow, strict=True):
        shape = (*(out.grid or (out.poses.shape[1],)), out.poses.shape[2])
        layers.append(Layer(name, _words(part), shape, _learned(part)))
    score, plural = ("length", "lengths") if model.flow[-1].activations is None else ("activation", "activations")
    # such as parameters of the loss
    others = _learned(model) - _learned(*filter(None, [model.backbone, *parts, model.decoder]))
    layers.append(Layer(plural, (score,), (model.num_classes,), others))
    if model.decoder is None:
        return layers
    poses = model.flow[-1].poses
    *hidden, last = _called(model.decoder, poses)
    inputs = Layer("decoder's input", ("class capsules", "all but one 0"), (poses[0].numel(),), 0)
    drawn = [inputs, *hidden, replace(last, name="reconstruction", shape=model.in_shape)]
    return [*layers, *(replace(each, in_decoder=True) for each in drawn)]


def _layers_of_slots(model: SlotNetwork, images: Tensor) -> list[Layer]:
    """List the layers behind the image of a network that finds objects; its masks come from the decoder."""
    layers, (inputs, *slots) = _called(model.backbone, images), model.flow
    steps, learned = ("positions", "dense", "ReLU", "dense"), _learned(model.positions, model.features)
    layers.append(Layer("inputs of the slots", steps, tuple(inputs.poses.shape[1:]), learned))
    for layer, out in zip(model.layers, slots, strict=True):
        layers.append(Layer("slots", (type(layer).__name__,), tuple(out.poses.shape[1:]), _learned(layer)))
    assert model.decoder is not None
    others = _learned(model) - sum(layer.parameters for layer in layers) - _learned(model.decoder)
    layers.append(Layer("masks", ("softmax over slots",), (model.num_slots, *model.in_shape[1:]), others))
    *hidden, last = _called(model.decoder, slots[-1].poses)
    drawn = [*hidden, replace(last, name="reconstruction", shape=model.in_shape)]
    return [*layers, *(replace(each, in_decoder=True) for each in drawn)]


def _layers_of_branches(model: BranchedNetwork, images: Tensor) -> list[Layer]:
    """List the layers behind the image of a network with branches, one branch after another."""
    layers: list[Layer] = []
    maps = images
    for stage, to_capsules, branch in zip(model.stages, model.stage_capsules, model.branches, strict=True):
        layers += _called(stage, maps)
        maps = images.new_empty(2, *layers[-1].shape)
        capsules = infer_shapes(to_capsules, maps)[0]
        shape = (*(capsules.grid or (capsules.poses.shape[1],)), capsules.poses.shape[2])
        layers.append(Layer("capsules", _words(to_capsules), shape, _learned(to_capsules)))
        assert isinstance(branch, CapsuleLayer)
        layers.append(Layer("class capsules", _words(branch), (branch.out_capsules, branch.out_dim), _learned(branch)))
    return [*layers, Layer("scores", ("sum of branches", "softmax"), (model.num_classes,), _learned(model.classify))]


def _layers_of_pixels(model: PixelCapsules, images: Tensor) -> list[Layer]:
    """List the layers behind the image of a capsule network that answers each pixel."""
    sizes, layers = model.in_shape[1:], _called(model.backbone, images)
    names = ["capsules"] * (len(model.layers) - 1) + ["class capsules"]
    for name, part, out in zip(names, model.layers, model.flow[1:], strict=True):
        assert out.grid is not None
        joined = ("joined with a skip",) * isinstance(part, DeconvCapsules)
        layers.append(Layer(name, (*_words(part), *joined), (*out.grid, out.poses.shape[2]), _learned(part)))
    if model.up_channels:
        steps = ("transposed convolutions", "convolutions 3", "skips")
        parts = [*model.up, *model.join]
        layers.append(Layer("feature maps", steps, (model.classify.in_channels, *sizes), _learned(*parts)))
    decoder = [] if model.decoder is None else [model.decoder]
    others = _learned(model) - sum(layer.parameters for layer in layers) - _learned(*decoder)
    if model.up_channels:
        layers.append(Layer("scores", ("convolution 1", "softmax"), (model.num_classes, *sizes), others))
    else:
        layers.append(Layer("lengths", ("length",), (model.types, *sizes), others))
    for part in decoder:
        channels = model.decoded_channels
        inputs = Layer("decoder's input", ("the class of the pixel",) * (not model.up_channels), (channels, *sizes), 0)
        *hidden, drawn = _called(part, images.new_empty(2, channels, *sizes))
        drawn = replace(drawn, name="reconstruction")
        layers += [replace(each, in_decoder=True) for each in (inputs, *hidden, drawn)]
    return layers


def _called(module: nn.Module, inputs: Tensor) -> list[Layer]:
    """List the layers of a module: each begins with weights, or where the number of axes changes."""
    layers: list[Layer] = []

    def note(part: nn.Module, _: object, out: object) -> None:
        if not isinstance(out, Tensor) or isinstance(part, nn.Identity):
            return
        shape, learned = tuple(out.shape[1:]), _learned(part)
        before = layers[-1] if layers else Layer("", (), (), 0)
        if len(shape) != len(before.shape) or any(each.ndim > 1 for each in part.parameters()):
            layers.append(Layer("numbers" if len(shape) == 1 else "feature maps", _words(part), shape, learned))
        else:
            words, learned = (*before.steps, *_words(part)), before.parameters + learned
            layers[-1] = replace(before, steps=words, shape=shape, parameters=learned)

    out, _ = infer_shapes(module, inputs, note, [each for each in module.modules() if not any(each.children())])
    if not layers:
        note(module, None, getattr(out, "scores", out))
    rest = _learned(module) - sum(each.parameters for each in layers)
    return [*layers[:-1], replace(layers[-1], parameters=layers[-1].parameters + rest)]


def _words(part: nn.Module) -> tuple[str, ...]:
    """Describe the operations of a module, a few words each."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        window = _window("convolution", *part.kernel_size, stride=part.stride)
        return *window, *["ReLU"] * bool(getattr(part, "relu", False))
    if isinstance(part, PrimaryCapsules):
        strides = (part.primary_stride,) * 2
        return *_window("convolution", part.primary_kernel, stride=strides), part.primary_output
    if isinstance(part, SlotLayer):
        return part_of(type(part))[1], counted(part.num_iterations, "iteration")
    if not isinstance(part, CapsuleLayer):
        return ("dense" if isinstance(part, nn.Linear) else type(part).__name__,)
    windows: tuple[str, ...] = ()
    if isinstance(part, MapLayer):
        windows = _window(
            "transposed windows" if part.window.up else "windows",
            *(part.window.kernel,) * part.dims,
            stride=(part.window.stride,) * part.dims,
        )
    (_, transform), (_, routing) = part_of(type(part.transform)), part_of(type(part.routing))
    number = part.routing.num_iterations
    first = [*part.transform.parameters()][:1]
    weights = [_by(getattr(part.transform, "matrices", each).shape) for each in first]
    iterations = counted(number, "iteration")
    return *windows, " ".join([transform, *weights]), f"{routing} routing, {iterations}"


def _window(what: str, *kernel: int, stride: Sequence[int]) -> tuple[str, ...]:
    strides = f"stride {stride[0] if len({*stride}) == 1 else _by(stride)}"
    return f"{what} {_by(kernel * 2 if len(kernel) == 1 else kernel)}", *[strides] * (max(stride) > 1)


def _learned(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


# ---- the drawing


@checked
def figure_architecture(model: Network, *, title: str | None = None) -> Figure:
    """Draw a network's layers from left to right: outputs with their sizes, and arrows between them.

    The operation stands over an arrow and its number of parameters under it. The decoder is drawn in separate rows.

    Args:
        model: Any network. Nothing is computed, so it may be on torch's device ``"meta"``.
        title: Title of the figure; default: the class of the network.
    """
    if len(model.in_shape) == 4:
        raise InputError("the drawing shows lines and planes, but this network takes volumes")
    layers = list_layers(model)
    largest = max(max(layer.shape[-2:]) for layer in layers if len(layer.shape) == 3)
    rows: list[list[_Block]] = []
    for block in (_Block(layer, largest) for layer in layers):
        # a full row is followed by a new one; the decoder begins its own
        begins = not rows or rows[-1][-1].layer.in_decoder != block.layer.in_decoder
        if begins or sum(each.width for each in rows[-1]) + block.width > MAX_ROW:
            rows.append([])
        rows[-1].append(block)
    learned = counted(sum(layer.parameters for layer in layers), "parameter")
    outputs = counted(model.num_classes, task_of(model).output)
    subtitle = f"{_by(model.in_shape)} pixels, {outputs}, {learned}"
    y = MARGIN + 0.3 + 2 * LINE
    height = sum(max(each.above for each in row) + max(each.below for each in row) + LINE for row in rows)
    wide = max(sum(block.width for block in row) for row in rows) + 2 * MARGIN
    figure, axes = canvas(wide, y + height + MARGIN, title or type(model).__name__, subtitle)
    for row in rows:
        x, middle = MARGIN, y + max(block.above for block in row)
        for block in row:
            block.draw(axes, x, middle)
            x += block.width
        y = middle + max(block.below for block in row) + LINE
    return figure


class _Block:
    """Drawing of one layer, in inches: an arrow with the operation, the output, and below it its name and size.

    Args:
        layer: The layer.
        largest: Longest side of any map of the network, pixels.
    """

    def __init__(self, layer: Layer, largest: int) -> None:
        self.layer, shape = layer, layer.shape
        *places, last = shape
        note = f"{math.prod(places):,} of {counted(last, 'component')}" if len(places) in (1, 3) else ""
        self.words = (layer.name, _by(shape), note)
        self.learned = counted(layer.parameters, "parameter") if layer.parameters else ""
        self.depth = 0.0  # extent of the sides behind the front, to the right
        if len(shape) == 1:
            self.wide, self.high = 0.16, 0.3 + 0.09 * math.log2(shape[0])
        elif len(shape) == 2:
            self.wide, self.high = min(shape[1], MAX_CELLS) * CELL, min(shape[0], MAX_VECTORS) * CELL
        else:
            scale = MAX_MAP / math.sqrt(largest) / math.sqrt(max(shape[1:3]))  # areas as the sides of the maps
            self.wide, self.high = max(shape[2] * scale, CELL), max(shape[1] * scale, CELL)
            sheets = CELL * (min(shape[0], MAX_SHEETS) - 1)
            self.depth = sheets if len(shape) == 4 else 0.05 + 0.06 * math.log2(shape[0])
        self.arrow = max(MIN_ARROW, text_width([*layer.steps, self.learned], SMALL)) + 2 * GAP if layer.steps else 0.0
        self.output = max(self.wide + self.depth, text_width(self.words, SMALL))
        self.width = self.arrow + self.output + GAP
        half = (self.high + 0.6 * self.depth) / 2
        self.above, self.below = max(half, len(layer.steps) * LINE + GAP), half + GAP + 3 * LINE

    def draw(self, axes: Axes, x: float, middle: float) -> None:
        """Draw the layer with its left edge at ``x``, centred on the height ``middle``."""
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
        """Draw numbers as a bar, capsules as rows of components, maps as a block, capsule types behind each other."""
        shape, wide, high, depth = self.layer.shape, self.wide, self.high, self.depth
        right, up = x + wide, y - 0.6 * depth
        if len(shape) == 3:
            _polygon(axes, BLUE, (x, y), (x + depth, up), (right + depth, up), (right, y))
            _polygon(axes, BLUE, (right, y), (right + depth, up), (right + depth, up + high), (right, y + high))
        for n in range(min(shape[0], MAX_SHEETS) - 1, 0, -1) if len(shape) == 4 else ():
            _box(axes, ORANGE, x + n * CELL, y - 0.6 * n * CELL, wide, high)
        cells = {2: (min(shape[0], MAX_VECTORS), shape[-1]), 4: shape[1:3]}.get(len(shape), (1, 1))
        _box(axes, {1: GREY, 3: BLUE}.get(len(shape), ORANGE), x, y, wide, high, *cells)


def _polygon(axes: Axes, colour: str, *corners: tuple[float, float]) -> None:
    from matplotlib.patches import Polygon

    style: Any = {"facecolor": colour, "edgecolor": EDGE, "linewidth": 0.6, "joinstyle": "round"}
    axes.add_patch(Polygon(corners, **style))


def _box(
    axes: Axes, colour: str, left: float, top: float, wide: float, high: float, rows: int = 1, columns: int = 1
) -> None:
    """Draw a rectangle of cells; a side with more than 24 cells is drawn as one."""
    from matplotlib.colors import ListedColormap

    rows, columns = (number if number <= MAX_CELLS else 1 for number in (rows, columns))
    edges = np.linspace(left, left + wide, columns + 1), np.linspace(top, top + high, rows + 1)
    style: Any = {"cmap": ListedColormap([colour]), "edgecolors": EDGE, "linewidth": 0.4, "antialiased": True}
    axes.pcolormesh(*edges, np.zeros((rows, columns)), **style)


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
