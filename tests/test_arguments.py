"""Odd arguments of functions, layers and networks: a sentence names the function and the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support import assert_close, assert_raises, small
from torchcaps import (
    agreement,
    analysis,
    compute_votes,
    create_model,
    datasets,
    dynamic_routing,
    em_routing,
    em_routing_code,
    exponential_squash,
    inverted_attention_routing,
    margin_loss,
    normalised_cross_entropy,
    reconstruction_loss,
    route,
    safe_norm,
    score_cross_entropy,
    self_attention_routing,
    self_routing,
    set_working_memory,
    spread_loss,
    squash,
    vb_routing,
    weighted_sum,
)
from torchcaps.datasets.image_set import resize_images
from torchcaps.datasets.splits import stratified_split
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, ModelOutput
from torchcaps.nn import (
    Capsules,
    ChannelNorm,
    ConvCapsules,
    Convolution,
    ConvStem,
    Decoder,
    Dense,
    DenseCapsules,
    DynamicRouting,
    Elementwise,
    LayerSize,
    Matrix,
    PrimaryCapsules,
    Routed,
    Routing,
    Shared,
    mask_capsules,
    separate_capsules,
)
from torchcaps.ops.convolution import convolve
from torchcaps.ops.losses import multi_hot

Call = tuple[str, Callable[..., object], dict[str, Tensor], tuple[str, ...]]
"""What an error calls it, what is called, its tensors, and those that may be None."""


def network(preset: str = "sabour2017", **overrides: Any) -> CapsNet | BaselineCNN:
    return create_model(preset, (1, 18, 18), 4, **small(preset) | overrides)


def own_routing() -> Routing:
    class Mean(Routing):
        def forward(self, votes, activations=None, *, return_coupling=False):
            return Routed(squash(votes.weighted_sum(None) / votes.size.in_capsules))

    return Mean()


def calls() -> Iterator[Call]:
    """Every function, layer and network that takes tensors, with tensors that fit."""
    poses, weight, bias, prior = torch.rand(2, 3, 6), torch.rand(3, 4, 5, 6), torch.rand(4, 5), torch.rand(3, 4)
    layer: dict[str, Tensor] = {"poses": poses, "weight": weight, "bias": bias, "prior": prior}
    capsules, lengths, labels = torch.rand(2, 4, 5), torch.rand(2, 4), torch.tensor([0, 3])
    maps, images = torch.rand(2, 3, 9, 9), torch.rand(2, 1, 18, 18)
    yield "squash", squash, {"x": capsules}, ()
    yield "exponential_squash", exponential_squash, {"x": capsules}, ()
    yield "safe_norm", safe_norm, {"x": capsules}, ()
    yield "margin_loss", margin_loss, {"lengths": lengths, "targets": labels}, ()
    yield "normalised_cross_entropy", normalised_cross_entropy, {"lengths": lengths, "targets": labels}, ()
    yield "reconstruction_loss", reconstruction_loss, {"reconstruction": images, "images": images}, ()
    yield "compute_votes", compute_votes, {"poses": poses, "weight": weight}, ()
    votes = {"votes": torch.rand(2, 3, 4, 5), "bias": bias, "prior": prior}
    yield "dynamic_routing", dynamic_routing, votes, ("bias", "prior")
    yield "route", route, layer, ("bias", "prior")
    yield (
        "weighted_sum",
        weighted_sum,
        {"poses": poses, "weight": weight, "coupling": torch.rand(2, 3, 4)},
        ("coupling",),
    )
    yield "agreement", agreement, {"poses": poses, "weight": weight, "parents": capsules}, ()
    yield from routings()
    yield "spread_loss", spread_loss, {"scores": lengths, "targets": labels}, ()
    yield "score_cross_entropy", score_cross_entropy, {"scores": lengths, "targets": labels}, ()
    kernels = {"features": maps, "weight": torch.rand(4, 3, 3, 3), "bias": torch.rand(4)}
    yield "convolve", convolve, kernels, ("bias",)
    yield "Convolution", Convolution(3, 4, 3), {"input": maps}, ()
    yield "ChannelNorm", ChannelNorm(3), {"input": maps}, ()
    yield "ConvStem", ConvStem(3, (4,)), {"input": maps}, ()
    yield "PrimaryCapsules", PrimaryCapsules(3, 2, 4, kernel_size=3, separate_convs=True), {"features": maps}, ()
    for dense in (DenseCapsules(3, 6, 4, 5), DenseCapsules(3, 6, 4, 5, routing=own_routing())):
        yield "DenseCapsules", lambda poses, dense=dense: dense(poses), {"poses": poses}, ()
        yield "DenseCapsules", lambda poses, dense=dense: dense(Capsules(poses)), {"poses": poses}, ()
        yield "DenseCapsules", lambda poses, dense=dense: dense.route(poses, return_coupling=True), {"poses": poses}, ()
    conv = ConvCapsules(2, 6, 4, 5)
    yield "ConvCapsules", lambda poses: conv(Capsules(poses, grid=(2, 4, 5))), {"poses": torch.rand(2, 40, 6)}, ()
    for kind in (Dense, Shared):
        transform = kind()
        transform.bind(LayerSize(3, 6, 4, 5), 1.0)
        yield kind.__name__, transform, {"poses": poses}, ()
    yield "Decoder", Decoder(4, 5, (1, 3, 3), (6,)), {"capsules": capsules}, ()
    yield "mask_capsules", mask_capsules, {"capsules": capsules, "targets": labels}, ("targets",)
    pairs = torch.tensor([[0, 1], [3, 2]])
    yield "separate_capsules", separate_capsules, {"capsules": capsules, "classes": pairs}, ()
    model, of_pairs, cnn = network(), network(objects=2), network("baseline-cnn")
    yield "CapsNet", model, {"images": images}, ()
    yield "mask_capsules", lambda targets: model(images, targets), {"targets": labels}, ("targets",)
    yield "CapsNet", lambda targets: of_pairs(images, targets), {"targets": pairs}, ("targets",)
    yield "BaselineCNN", cnn, {"images": images}, ()
    output, of_cnn, of_two = model(images), cnn(images), of_pairs(images)
    yield "margin_loss", lambda targets: model.loss(output, images, targets), {"targets": labels}, ()
    yield "reconstruction_loss", lambda images: model.loss(output, images, labels), {"images": images}, ()
    yield "BaselineCNN.loss", lambda targets: cnn.loss(of_cnn, images, targets), {"targets": labels}, ()
    drawn = {"images": torch.rand(2, 2, 1, 18, 18), "targets": pairs}
    yield "CapsNet.loss", lambda images, targets: of_pairs.loss(of_two, images, targets), drawn, ()


def routings() -> Iterator[Call]:
    """Routing by votes (2, 3, 4, 5), but dynamic routing."""
    votes, active = {"votes": torch.rand(2, 3, 4, 5)}, {"activations": torch.rand(2, 3)}
    yield "self_attention_routing", self_attention_routing, votes | {"bias": torch.rand(3, 4)}, ("bias",)
    norm = {"norm_weight": torch.rand(5), "norm_bias": torch.rand(5)}
    yield "inverted_attention_routing", inverted_attention_routing, votes | norm, ("norm_weight", "norm_bias")
    yield "self_routing", self_routing, votes | active | {"routing_logits": torch.rand(2, 3, 4)}, ()
    first, second = torch.rand(4), torch.rand(4)
    yield "em_routing", em_routing, votes | active | {"beta_u": first, "beta_a": second}, ()
    code = {"sigma_bias": first, "activation_bias": second}
    yield "em_routing_code", em_routing_code, votes | active | code, ()
    yield "vb_routing", vb_routing, votes | active | {"beta_u": first, "beta_a": second}, ()


ARGUMENTS = [
    pytest.param(function, given, name, name in optional, said, id=f"{number}-{said}-{name}")
    for number, (said, function, given, optional) in enumerate(calls())
    for name in given
]
every_argument = pytest.mark.parametrize(("function", "given", "name", "optional", "said"), ARGUMENTS)


@every_argument
def test_what_is_no_tensor(
    function: Callable[..., object], given: dict[str, Tensor], name: str, optional: bool, said: str
) -> None:
    function(**given)
    others: list[object] = [given[name].tolist(), given[name].numpy(), "abc", 3, 1.5, True, object(), {}]
    for other in others if optional else [None, *others]:
        kind = type(other).__name__
        assert_raises(TypeError, function, **given | {name: other}, say=f"{said}: {name} must be a")
        assert_raises(TypeError, function, **given | {name: other}, say=f", got {kind}")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@every_argument
def test_tensors_that_are_not_computed_with(
    function: Callable[..., object], given: dict[str, Tensor], name: str, optional: bool, said: str
) -> None:
    right = given[name]
    floats = right.is_floating_point()
    odd = [right.to(torch.complex64), right.to_sparse()]
    odd += [right.to(torch.float8_e4m3fn), right.long(), right.bool(), right.to_mkldnn()] if floats else []
    odd += [torch.nested.nested_tensor([right[0], right[0]])] if floats and right.ndim > 1 else []
    takes_mkldnn = said in ("convolve", "Convolution") and name in ("features", "input")
    for tensor in odd:
        if tensor.layout == torch._mkldnn and takes_mkldnn:
            continue
        assert_raises(TypeError, function, **given | {name: tensor}, say=f"{said}: {name} must be a")


@every_argument
def test_tensors_on_another_device(
    function: Callable[..., object], given: dict[str, Tensor], name: str, optional: bool, said: str
) -> None:
    if said in ("squash", "exponential_squash", "safe_norm"):  # they have no other
        assert function(given["x"].to("meta")).device.type == "meta"  # type: ignore[attr-defined]
        return
    said = f"({said}|convolve|Dense)"  # layers leave it to their convolution, or to their transform
    with pytest.raises(ValueError, match=f"{said}: .* must be on one device, got .*(cpu and meta|meta and cpu)"):
        function(**given | {name: given[name].to("meta")})


@pytest.mark.parametrize(("loss", "option"), [(spread_loss, "margin"), (score_cross_entropy, "scale")])
def test_a_number_that_may_be_a_tensor_is_one_number(loss: Callable[..., Tensor], option: str) -> None:
    scores, labels = torch.rand(2, 4), torch.tensor([0, 3])
    assert_close(loss(scores, labels, **{option: torch.tensor(0.5)}), loss(scores, labels, **{option: 0.5}))
    said = f"{loss.__name__}: {option} must have shape (), got (2, 2)"
    assert_raises(ValueError, loss, scores, labels, **{option: torch.ones(2, 2)}, say=said)
    assert_raises(TypeError, loss, scores, labels, **{option: "a"}, say=f"{loss.__name__}: {option} must be a number")


def test_squash_and_norm_ask_for_an_axis() -> None:
    x = torch.rand(2, 3)
    for function in (squash, safe_norm):
        name = function.__name__
        for dim in (None, "0", 1.0, True, (0, 1), [0], torch.tensor(1)):
            assert_raises(TypeError, function, x, dim, say=f"{name}: dim must be an integer, got {dim!r}")
        for dim in (2, -3, 10**30):
            said = f"{name}: dim must be -2 to 1 for x of shape (2, 3), got {dim}"
            assert_raises(ValueError, function, x, dim, say=said)
        assert_raises(ValueError, function, torch.tensor(3.0), say=f"{name}: x must have at least one axis")
        for eps in ("a", None, torch.tensor([1.0, 2.0]), True):
            assert_raises(TypeError, function, x, eps=eps, say=f"{name}: eps must be a number, got")
        assert_raises(ValueError, function, x, eps=10**30, say=f"{name}: eps must be below 2⁶³")
        assert_close(function(x, np.int64(1)), function(x, 1), 0)


OPTIONS: list[tuple[Callable[..., object], dict[str, object], type[Exception], str]] = [
    (margin_loss, {"m_plus": "a"}, TypeError, "margin_loss: m_plus must be a number, got str"),
    (margin_loss, {"power": None}, TypeError, "margin_loss: power must be a number, got NoneType"),
    (margin_loss, {"reduction": np.ones(2)}, ValueError, "margin_loss: reduction must be one of mean, sum, none"),
    (normalised_cross_entropy, {"clip": "a"}, TypeError, "normalised_cross_entropy: clip must be a number"),
    (normalised_cross_entropy, {"clip": 0.5}, ValueError, "clip must be above 0 and below 0.5, got 0.5"),
    (set_working_memory, {"mib": "a"}, TypeError, "set_working_memory: mib must be a number, got str"),
    (Convolution, {"kernel_size": (3, 3)}, TypeError, "Convolution: kernel_size must be an integer, got (3, 3)"),
    (Convolution, {"padding": -1}, ValueError, "Convolution: padding must be at least 0, got -1"),
    (Convolution, {"stride": 10**30}, ValueError, "Convolution: stride must be at most 2147483647, got 10"),
    (Convolution, {"relu": "yes"}, TypeError, "Convolution: relu must be True or False, got str"),
    (ChannelNorm, {"channels": 0}, ValueError, "ChannelNorm: channels must be at least 1, got 0"),
    (ChannelNorm, {"channels": (4,)}, TypeError, "ChannelNorm: channels must be an integer, got (4,)"),
    (ConvStem, {"channels": ()}, ValueError, "ConvStem: channels must name at least one convolution, got none"),
    (ConvStem, {"channels": 8}, TypeError, "ConvStem: channels must be a sequence of integers, got 8"),
    (ConvStem, {"strides": (1,)}, ValueError, "ConvStem: strides must be 2, one for each of channels, got 1"),
    (ConvStem, {"strides": (1, 0)}, ValueError, "ConvStem: strides must be at least 1, got 0"),
    (ConvStem, {"strides": np.ones(2)}, TypeError, "ConvStem: strides must be a sequence of integers"),
    (ConvStem, {"dropout": 1.0}, ValueError, "ConvStem: dropout must be at least 0 and below 1, got 1.0"),
    (ConvStem, {"in_channels": None}, TypeError, "ConvStem: in_channels must be an integer, got None"),
    (PrimaryCapsules, {"kernel_size": (9, 9)}, TypeError, "PrimaryCapsules: kernel_size must be an integer"),
    (PrimaryCapsules, {"padding": -1}, ValueError, "PrimaryCapsules: padding must be at least 0, got -1"),
    (PrimaryCapsules, {"grouping": None}, ValueError, "PrimaryCapsules: grouping must be one of channels, raster"),
    (DenseCapsules, {"routing": 3}, TypeError, "DenseCapsules: routing must be a Routing or None, got int"),
    (DenseCapsules, {"transform": "dense"}, TypeError, "DenseCapsules: transform must be a Transform or None, got str"),
    (DenseCapsules, {"in_dim": 0}, ValueError, "DenseCapsules: in_dim must be at least 1, got 0"),
    (ConvCapsules, {"kernel_size": 2.0}, TypeError, "ConvCapsules: kernel_size must be an integer, got 2.0"),
    (ConvCapsules, {"padding": 3}, ValueError, "ConvCapsules: padding must be below kernel_size, 3, got 3"),
    (ConvCapsules, {"compete_over": "all"}, ValueError, "ConvCapsules: compete_over must be one of types, types-and-p"),
    (ConvCapsules, {"routing": Dense()}, TypeError, "ConvCapsules: routing must be a Routing or None, got Dense"),
    (
        ConvCapsules,
        {"transform": Elementwise()},
        ValueError,
        "Elementwise: input and output capsules must have as many",
    ),
    (
        ConvCapsules,
        {"transform": Matrix()},
        ValueError,
        "Matrix: the poses of input and output capsules must be square",
    ),
    (Dense, {"weight_std": -1}, ValueError, "Dense: weight_std must be at least 0 and finite, got -1"),
    (
        Shared,
        {"weight_init": "zeros"},
        ValueError,
        "Shared: weight_init must be one of balanced, normal, truncated-norm",
    ),
    (DynamicRouting, {"bias": None}, TypeError, "DynamicRouting: bias must be True or False, got NoneType"),
    (Decoder, {"out_shape": 784}, TypeError, "Decoder: out_shape must be a sequence of integers, got 784"),
    (Decoder, {"hidden": (8, 0)}, ValueError, "Decoder: hidden must be at least 1, got 0"),
    (Decoder, {"channels": (8, 0)}, ValueError, "Decoder: channels must be at least 1, got 0"),
    (DynamicRouting, {"leaky": "no"}, TypeError, "DynamicRouting: leaky must be True or False, got str"),
    (route, {"stop_gradient": "no"}, TypeError, "route: stop_gradient must be True or False, got str"),
    (route, {"eps": None}, TypeError, "route: eps must be a number, got NoneType"),
    (route, {"softmax_over": np.ones(2)}, ValueError, 'route: softmax_over must be "outputs" or "inputs", got'),
    (convolve, {"stride": None}, TypeError, "convolve: stride must be an integer, got None"),
    (convolve, {"stride": (1, 2, 3)}, ValueError, "convolve: stride must be an integer or two of them, got (1, 2, 3)"),
    (convolve, {"padding": 0.5}, TypeError, "convolve: padding must be an integer, got 0.5"),
]
FITTING: dict[Callable[..., object], dict[str, object]] = {
    margin_loss: {"lengths": torch.rand(2, 3), "targets": torch.tensor([0, 1])},
    normalised_cross_entropy: {"lengths": torch.rand(2, 3), "targets": torch.tensor([0, 1])},
    Convolution: {"in_channels": 3, "out_channels": 4, "kernel_size": 3},
    ConvStem: {"in_channels": 3, "channels": (4, 5)},
    PrimaryCapsules: {"in_channels": 3},
    DenseCapsules: {"in_capsules": 3, "in_dim": 4, "out_capsules": 2, "out_dim": 5},
    ConvCapsules: {"in_types": 3, "in_dim": 4, "out_types": 2, "out_dim": 5},
    Decoder: {"num_capsules": 4, "capsule_dim": 5, "out_shape": (1, 3, 3)},
    route: {"poses": torch.rand(2, 3, 6), "weight": torch.rand(3, 4, 5, 6)},
    convolve: {"features": torch.rand(2, 3, 8, 8), "weight": torch.rand(4, 3, 3, 3)},
}


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value)[:40])


@pytest.mark.parametrize(("function", "options", "kind", "said"), OPTIONS, ids=name_of)
def test_options_that_do_not_fit(
    function: Callable[..., object], options: dict[str, object], kind: type[Exception], said: str
) -> None:
    given = FITTING.get(function, {})
    if given:
        function(**given)
    assert_raises(kind, function, **given | options, say=said)


def test_empty_layers_and_maps() -> None:
    none = torch.rand(2, 0, 5)
    assert_raises(
        ValueError, mask_capsules, none, say="mask_capsules: capsules must be at least one, got shape (2, 0, 5)"
    )
    classes = torch.zeros(2, 1, dtype=torch.int64)
    assert_raises(ValueError, separate_capsules, none, classes, say="separate_capsules: capsules must be at least one")
    said = "margin_loss: lengths must have at least one class, got shape (2, 0)"
    assert_raises(ValueError, margin_loss, torch.rand(2, 0), torch.tensor([0, 0]), say=said)
    maps, weight = torch.rand(2, 3, 0, 9), torch.rand(4, 3, 1, 1)
    assert_raises(ValueError, convolve, maps, weight, padding=1, say="convolve: features must be at least as large")
    assert_raises(ValueError, convolve, torch.rand(2, 3, 9, 9), weight[:0], say="convolve: weight must not be empty")
    assert_raises(
        ValueError, reconstruction_loss, torch.rand(3), torch.rand(3), say="must have shape (B, ...), got (3,)"
    )
    # an empty batch is none of these
    assert mask_capsules(torch.rand(0, 3, 5)).shape == (0, 3, 5)
    assert margin_loss(torch.rand(0, 3), torch.rand(0, 3), reduction="none").shape == (0,)


def test_classes_beyond_the_capsules() -> None:
    capsules = torch.rand(2, 4, 5)
    for wrong, got in (([[0, 4], [1, 2]], "0..4"), ([[0, -1], [1, 2]], "-1..2")):
        said = f"separate_capsules: classes must be in 0..3, got {got}"
        assert_raises(ValueError, separate_capsules, capsules, torch.tensor(wrong), say=said)


def test_one_dtype_or_autocast() -> None:
    features, weight = torch.rand(2, 3, 9, 9), torch.rand(4, 3, 3, 3)
    said = "convolve: features and weight must be of one dtype, got torch.float64 and torch.float32"
    assert_raises(TypeError, convolve, features.double(), weight, say=said)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolve(features.bfloat16(), weight).dtype == torch.bfloat16
        assert_raises(TypeError, convolve, features.double(), weight, say="got torch.float64 and torch.bfloat16")
    for preset in ("sabour2017", "baseline-cnn"):
        model = network(preset)
        said = f"{type(model).__name__}: images and weights must be of one dtype, got torch.float16 and torch.float32"
        assert_raises(TypeError, model, torch.rand(2, 1, 18, 18).half(), say=said)
    assert_raises(
        TypeError, ChannelNorm(3), features.double(), say="ChannelNorm: input and weight must be of one dtype"
    )
    assert ChannelNorm(3)(features.bfloat16()).dtype == torch.bfloat16


def test_configurations_and_outputs_of_another_kind() -> None:
    model, cnn = network(), network("baseline-cnn")
    said = "config must be a CapsNetConfig, got 'sabour2017'; create_model takes a preset's name"
    assert_raises(InputError, CapsNet, "sabour2017", say=said)
    assert_raises(InputError, CapsNet, cnn.config, say="config must be a CapsNetConfig, got CNNConfig(")
    assert_raises(InputError, BaselineCNN, model.config, say="config must be a CNNConfig, got CapsNetConfig(")
    images, labels = torch.rand(2, 1, 18, 18), torch.tensor([0, 1])
    output = model(images)
    for other in (output.lengths, tuple(output), None):
        said = f"CapsNet.loss: output must be the ModelOutput of the network, got {type(other).__name__}"
        assert_raises(TypeError, model.loss, other, images, labels, say=said)
        assert_raises(
            TypeError, cnn.loss, other, images, labels, say="BaselineCNN.loss: output must be the ModelOutput"
        )
    assert_raises(ValueError, cnn.loss, output, images, labels, say="BaselineCNN.loss: output must have logits")
    for each in (model, cnn):
        name = type(each).__name__
        said = f"{name}: return_coupling must be True or False, got str"
        assert_raises(TypeError, each, images, None, "no", say=said)
    for shape in ((True, 18, 18), (1, 18, True)):
        assert_raises(InputError, create_model, "sabour2017", shape, say="three positive integers, got")
    assert_raises(
        InputError, create_model, "sabour2017", None, 10**30, say="num_classes must be 1 to 1000000000, got 1"
    )


# ---- labels in a column

COLUMN = torch.tensor([[0], [3]])


def test_labels_in_a_column_are_labels() -> None:
    lengths, labels = torch.rand(2, 4), COLUMN.squeeze(1)
    for loss in (margin_loss, normalised_cross_entropy, multi_hot):
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert_close(loss(lengths, COLUMN.to(dtype)), loss(lengths, labels), 0)
        name = loss.__name__
        assert_raises(TypeError, loss, lengths, COLUMN.float(), say=f"{name}: targets of shape (B,) must be integer")
        assert_raises(ValueError, loss, lengths, COLUMN + 1, say=f"{name}: labels must be in 0..3, got 1..4")
    capsules = torch.rand(2, 4, 5)
    assert_close(mask_capsules(capsules, COLUMN), mask_capsules(capsules, labels), 0)


def test_of_a_single_class_a_column_is_multi_hot() -> None:
    lengths = torch.tensor([[0.5], [0.5]])
    rows = torch.tensor([[1], [0]])  # there, and not there
    assert_close(multi_hot(lengths, rows), rows.float(), 0)
    assert_close(multi_hot(lengths, torch.tensor([0, 0])), 1.0, 0)


@pytest.mark.parametrize("preset", ["sabour2017", "keras-tutorial", "baseline-cnn"])
def test_networks_take_labels_in_a_column(preset: str) -> None:
    model, images = network(preset).eval(), torch.rand(2, 1, 18, 18)
    one, other = (model(images, labels) for labels in (COLUMN, COLUMN.squeeze(1)))
    for got, wanted in zip(one, other, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert_close(got, wanted, 0)
    losses = [model.loss(one, images, labels).total for labels in (COLUMN, COLUMN.squeeze(1))]
    assert_close(losses[0], losses[1], 0)
    if isinstance(model, CapsNet):
        pairs = network(objects=2)
        assert_raises(ValueError, pairs, images, COLUMN, say="sees 2 objects in an image")


# ---- nothing of this is in the way of torch's transformations


def test_losses_and_masks_under_vmap() -> None:
    lengths, labels, capsules = torch.rand(3, 2, 4), torch.randint(4, (3, 2)), torch.rand(3, 2, 4, 5)
    for function, first in ((margin_loss, lengths), (normalised_cross_entropy, lengths), (mask_capsules, capsules)):
        got = torch.vmap(function)(first, labels)
        assert_close(got, torch.stack([function(*each) for each in zip(first, labels, strict=True)]), 1e-6)
    gradient = torch.func.grad(lambda x: margin_loss(x, labels[0]))(lengths[0])
    leaf = lengths[0].clone().requires_grad_()
    assert_close(gradient, torch.autograd.grad(margin_loss(leaf, labels[0]), leaf)[0], 1e-6)


def test_a_step_compiles_into_one_graph() -> None:
    model, images, labels = network(), torch.rand(2, 1, 18, 18), torch.tensor([0, 3])

    def step(images: Tensor, labels: Tensor) -> Tensor:
        output = model(images, labels)
        assert isinstance(output, ModelOutput)
        return model.loss(output, images, labels).total

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for targets in (labels, labels[:, None]):
        assert_close(compiled(images, targets), step(images, targets), 1e-5)


def analysed() -> tuple[CapsNet, Tensor, Tensor]:
    network = create_model("sabour2017", (1, 18, 18), 3, conv_channels=2, primary_types=1, decoder_hidden=(4,)).eval()
    assert isinstance(network, CapsNet)
    return network, torch.rand(2, 1, 18, 18), torch.tensor([0, 2])


@pytest.mark.parametrize("wrong", [None, [1, 2], "images", np.zeros((2, 1, 18, 18))], ids=type)
def test_what_is_analysed_is_a_tensor(wrong: object) -> None:
    network, images, labels = analysed()
    for function, arguments in (
        (analysis.predict, (network, wrong)),
        (analysis.reconstruct, (network, wrong)),
        (analysis.trace_routing, (network, wrong)),
        (analysis.routing_statistics, (network, wrong)),
        (analysis.fgsm, (network, wrong, labels, 0.1)),
        (analysis.pgd, (network, wrong, labels, 0.1)),
        (analysis.rotate, (wrong, 10.0)),
    ):
        with pytest.raises(TypeError, match="images must be "):
            function(*arguments)  # type: ignore[operator]
    for function, arguments in (
        (analysis.fgsm, (network, images, wrong, 0.1)),
        (analysis.pgd, (network, images, wrong, 0.1)),
        (analysis.predict, (network, images, wrong)),
        (analysis.reconstruct, (network, images, wrong)),
    ):
        if wrong is not None:
            with pytest.raises(TypeError, match="labels must be integers"):
                function(*arguments)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [True, "1", torch.tensor(1.0), torch.ones(2), None, math.nan], ids=str)
def test_numbers_of_the_analysis(wrong: object) -> None:
    network, images, labels = analysed()
    for function, arguments, options in (
        (analysis.fgsm, (network, images, labels, wrong), {}),
        (analysis.pgd, (network, images, labels, wrong), {}),
        (analysis.pgd, (network, images, labels, 0.1), {"steps": wrong}),
        (analysis.predict, (network, images), {"batch_size": wrong}),
        (analysis.perturb_capsule, (network, images[0]), {"batch_size": wrong}),
        (analysis.rotate, (images, wrong), {}),
    ):
        with pytest.raises((TypeError, ValueError), match="must be"):
            function(*arguments, **options)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [None, [1], np.zeros(3), torch.zeros(3)], ids=type)
def test_data_are_tensors(wrong: object) -> None:
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 0])
    for function, arguments in (
        (datasets.ImageSet, (wrong, labels)),
        (datasets.ImageSet, (images, wrong)),
        (resize_images, (wrong, (5, 5))),
        (stratified_split, (wrong, 1)),
    ):
        with pytest.raises(TypeError, match=r"(images|labels) must be (uint8|int64)"):
            function(*arguments, **({"seed": 0} if function is stratified_split else {}))  # type: ignore[operator]
    for size in (None, 5, (5,), (5, 5, 5), (0, 5), (5, 10**6), ("a", "b")):
        assert_raises(InputError, resize_images, images, size, say="size must be a height and a width")
