"""A network's layers in order: what each does, what comes out of it, how much it learns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import nn

from torchcaps.models import BaselineCNN, CapsNet, Network, PooledCNN
from torchcaps.models.images import follow
from torchcaps.nn import (
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
    Routing,
    SelfAttentionRouting,
    Shared,
    StackBackbone,
    Transform,
)
from torchcaps.nn.capsules import Grid
from torchcaps.nn.transforms import WeightTransform

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
    return [_image(model), Layer("scores", (type(model).__name__,), (model.num_classes,), _learned(model))]


@list_layers.register
def _capsule_layers(model: CapsNet) -> list[Layer]:
    layers = _backbone_layers(model)
    if model.standardise or model.pixel_scale != 1:
        before = "standardised" if model.standardise else f"pixels × {model.pixel_scale:g}"
        layers[1] = replace(layers[1], steps=(before, *layers[1].steps))
    layers += _primary_layers(model)
    for number, out in enumerate(model.flow[1:], 1):
        layer = model.layer(number)
        steps = [*_transform_words(layer.transform), *_routing_words(layer.routing)]
        if isinstance(layer, ConvCapsules):
            named = {"stride": layer.layer_stride if layer.layer_stride > 1 else 0, "padding": layer.layer_padding}
            window = [f"windows {layer.layer_kernel}×{layer.layer_kernel}"]
            window += [f"{name} {size}" for name, size in named.items() if size]
            steps = [*window, *steps, *(["batch norm"] if layer.pose_norm else [])]
        name = "class capsules" if layer is model.class_capsules else "capsules"
        places = out.grid or (layer.out_capsules,)
        layers.append(Layer(name, tuple(steps), (*places, layer.out_dim), _learned(layer)))
    is_length = isinstance(model.class_capsules.routing, DynamicRouting | SelfAttentionRouting)
    name, score = ("lengths", "length") if is_length else ("scores", "activation, or length")
    learned = _learned(model.classification_loss)
    scaled = ("times a scale in the loss",) if learned else ()
    layers.append(Layer(name, (score, *scaled), (model.num_classes,), learned))
    return layers + _decoder_layers(model)


@list_layers.register
def _cnn_layers(model: BaselineCNN) -> list[Layer]:
    parts = list(model.stem.children())
    for conv, norm in zip(model.convs, model.norms, strict=True):
        parts += [conv, norm, nn.ReLU(), model.max_pool, model.drop_channels]
    parts.append(nn.Flatten())
    for dense in model.dense:
        parts += [dense, nn.ReLU()]
    layers = [_image(model), *_sequence(parts, model.in_shape)]
    return [*layers, _probabilities(model, ["dropout"] if model.dropout else [])]


@list_layers.register
def _pooled_layers(model: PooledCNN) -> list[Layer]:
    how = {"average": "mean over places", "max": "largest over places", "none": "flattened"}[model.pooling]
    numbers = Layer("numbers", (how,), (model.classify.in_features,), 0)
    return [*_backbone_layers(model), numbers, _probabilities(model)]


def primary_grid(model: CapsNet) -> Grid:
    """Types, height and width of the map that primary capsules are made of, wherever they stand."""
    primary = model.primary_capsules
    around = 2 * primary.primary_padding - primary.primary_kernel
    height, width = ((side + around) // primary.primary_stride + 1 for side in model.map_shape[1:])
    return primary.primary_types, height, width


def _image(model: Network) -> Layer:
    return Layer("image", (), model.in_shape, 0)


def _backbone_layers(model: CapsNet | PooledCNN) -> list[Layer]:
    """The image and the maps that the backbone makes; of a backbone that is not known here the last ones only."""
    backbone = model.backbone
    if isinstance(backbone, ConvBackbone):
        parts = [*backbone.stem.children(), backbone.conv, backbone.norm, backbone.activation, backbone.dropout]
        return [_image(model), *_sequence(parts, model.in_shape)]
    if isinstance(backbone, StackBackbone):
        return [_image(model), *_sequence(backbone.children(), model.in_shape)]
    return [_image(model), Layer(MAPS, (type(backbone).__name__,), model.map_shape, _learned(backbone))]


def _primary_layers(model: CapsNet) -> list[Layer]:
    primary: nn.Module = model.primary_capsules  # one's own, perhaps
    capsules = model.flow[0]
    places = capsules.grid or (capsules.poses.shape[1],)
    if not isinstance(primary, PrimaryCapsules):
        steps: tuple[str, ...] = (type(primary).__name__,)
        return [Layer("primary capsules", steps, (*places, capsules.poses.shape[2]), _learned(primary))]
    types, height, width = primary_grid(model)
    dim = primary.primary_dim
    if primary.each_channel is None:
        made_by: nn.Module = primary.convs
        steps = _convolution_words(primary.convs[0], len(primary.convs))
    else:
        made_by, steps = primary.each_channel, ("each channel alone", *_convolution_words(primary.each_channel))
    steps = (*steps, *_words(primary.norm), *(["ReLU"] if primary.primary_activation == "relu" else []))
    maps = Layer(MAPS, steps, (types * dim, height, width), _learned(made_by, primary.norm))
    cut = f"cut in {dim}s" if primary.grouping == "channels" else f"flattened, cut in {dim}s"
    ends = {"squash": ("squash",), "unit": ("to length 1",), "routed": (f"÷ {types}, + bias", "squash")}
    ends |= {"exponential": ("exponential squash",), "linear": ()}
    active = ("activations: convolution", "sigmoid") if primary.primary_activations else ()
    rest = _learned(primary) - maps.parameters
    return [maps, Layer("primary capsules", (cut, *ends[primary.primary_output], *active), (*places, dim), rest)]


def _decoder_layers(model: CapsNet) -> list[Layer]:
    decoder: nn.Module | None = model.decoder  # one's own, perhaps
    if decoder is None:
        return []
    objects = model.objects
    name = "reconstruction" if objects == 1 else "reconstruction of each"
    if not isinstance(decoder, Decoder):
        return [Layer(name, (type(decoder).__name__,), model.in_shape, _learned(decoder), True)]
    kept = "one kept, others 0" if objects == 1 else f"{objects} times one kept, others 0"
    size = (model.num_classes * model.capsule_dim,)
    layers = [Layer("decoder's input", ("class capsules", kept, "flattened"), size, 0)]
    layers += _sequence(decoder.layers, size, maps="map")
    layers[-1] = replace(layers[-1], name=name, shape=model.in_shape)
    return [replace(layer, in_decoder=True) for layer in layers]


def _probabilities(model: BaselineCNN | PooledCNN, before: Sequence[str] = ()) -> Layer:
    steps = (*before, "dense", "softmax" if model.objects == 1 else "sigmoid")
    return Layer("probabilities", steps, (model.num_classes,), _learned(model.classify))


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
        return (*_convolution_words(part), *(["ReLU"] if part.relu else []))
    if isinstance(part, nn.MaxPool2d):
        return (f"max pooling {part.kernel_size}×{part.kernel_size}",)
    return (_WORDS[type(part)],) if type(part) in _WORDS else ()


def _convolution_words(conv: nn.Module, number: int = 1) -> tuple[str, ...]:
    assert isinstance(conv, nn.Conv2d)
    height, width = conv.kernel_size
    what = f"{number} convolutions" if number > 1 else "convolution"
    return (f"{what} {height}×{width}", *([f"stride {conv.stride[0]}"] if conv.stride[0] > 1 else []))


def _transform_words(transform: Transform) -> tuple[str, ...]:
    if isinstance(transform, WeightTransform) and transform.size is not None:
        I, K, J, D = transform.size
        side = math.isqrt(K)
        if isinstance(transform, Dense):
            return f"{I:,}×{J} matrices", f"{D}×{K} each"
        if isinstance(transform, Shared):
            return f"{J} matrices", f"{D}×{K} each"
        if isinstance(transform, Matrix):
            return f"{I:,}×{J} matrices", f"{side}×{side} each"
        if isinstance(transform, Elementwise):
            return f"{I:,}×{J} vectors", f"of {D}"
    return (type(transform).__name__,)


def _routing_words(routing: Routing) -> tuple[str, ...]:
    number = routing.num_iterations
    if not isinstance(routing, DynamicRouting):
        return (type(routing).__name__ + (f", {number} iterations" if number > 1 else ""),)
    if number == 0:
        return ("sum of votes",)
    rounds = f"routing, {number} iteration{'s' * (number > 1)}"
    return (rounds, f"softmax over {routing.softmax_over}", *(['"none of the above"'] if routing.leaky else []))


def _learned(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
