"""What every module of torchcaps.nn has: initial values, a repr, a device and a type of numbers, typed results."""

import copy
import functools
import inspect
import itertools
import math
import pickle
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import torchcaps.nn
from routing_cases import TRANSFORMS
from support import SIZES, assert_close, assert_raises, small
from torchcaps import InputError, create_model
from torchcaps.models import get_preset, list_presets
from torchcaps.models.capsnet import Readout
from torchcaps.nn import (
    B2IRouting,
    CapsuleHead,
    Capsules,
    ChannelNorm,
    ConvBackbone,
    ConvCapsules,
    Convolution,
    ConvTypeCapsules,
    DeconvCapsules,
    DenseCapsules,
    DynamicRouting,
    GroupedRouting,
    Identity,
    InstanceNorm,
    Routing,
)
from torchcaps.parts import PARTS, build, options, part_of

Make = Callable[[], nn.Module]
LAYER: Any = (8, 16, 10, 16)
"""Sizes I, K, J, D of a layer."""


def with_options(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """The mapping of a part, and one for each value of its options that can add or draw parameters in another way."""
    yield {"name": name}
    for option in options(PARTS[kind][name]).values():
        values = [not option.default] if isinstance(option.default, bool) else []
        values += [each for each in typing.get_args(option.hint) if isinstance(each, str)]
        for value in values:
            if option.choice is None and value != option.default:
                yield {"name": name, option.name: value}


def cases() -> Iterator[tuple[str, Make]]:
    """Every module with parameters, by a description."""
    sizes = SIZES | {"in_shape": (1, 20, 20), "in_channels": 16}
    for kind, registry in PARTS.items():
        for name, cls in registry.items():
            if kind in ("network", "optimizer") or name == "timm" or not cls.__module__.startswith("torchcaps."):
                continue
            for spec in with_options(kind, name):
                words = " ".join(map(str, (kind, *spec.values())))
                if kind in ("transform", "routing"):
                    yield words, lambda kind=kind, spec=spec: DenseCapsules(*LAYER, **{kind: spec})
                    if name.startswith("heinsen"):
                        open_size: Any = (None, *LAYER[1:])
                        yield (
                            f"{words}, any number",
                            lambda spec=spec, size=open_size: DenseCapsules(*size, transform="shared", routing=spec),
                        )
                    continue
                yield words, lambda kind=kind, spec=spec: build(kind, spec, **sizes)
    yield "head", lambda: CapsuleHead(6, 3)
    yield "norms", lambda: nn.Sequential(ChannelNorm(5), InstanceNorm(5, learned=True))
    yield "readout", lambda: Readout(10, 16)
    for preset in torchcaps.list_presets():
        yield f"network {preset}", lambda preset=preset: create_model(preset, **small(preset))


CASES = dict(cases())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def drawn_later(make: Make) -> nn.Module:
    """A module that gets memory first, and initial values then, as FSDP and Lightning do it: outer modules first."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for each in state_of(module).values():
            each.fill_(torch.nan if each.is_floating_point() else -1)
    for each in module.modules():
        if any(True for _ in [*each.parameters(recurse=False), *each.buffers(recurse=False)]):
            each.reset_parameters()  # type: ignore[operator]
    return module


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_deferred_initialisation_draws_as_the_constructor_does(case: str) -> None:
    """Constants are equal; random numbers have the same moments, as far as their number tells."""
    try:
        module, again = CASES[case](), state_of(CASES[case]())
    except InputError:  # an option that needs another one
        pytest.skip("options that need others")
    later = state_of(drawn_later(CASES[case]))
    assert later.keys() == state_of(module).keys()
    for name, values in state_of(module).items():
        numbers, drawn = (each.detach().flatten().double() for each in (values, later[name]))
        assert drawn.isfinite().all(), name
        if values.equal(again[name]):
            assert drawn.equal(numbers), name
            continue
        if len(numbers) < 16:  # too few to compare
            continue
        scale, few = numbers.std(), 6 / len(numbers) ** 0.5
        assert abs(drawn.mean() - numbers.mean()) <= few * scale, name
        assert abs(drawn.std() / scale - 1) <= few, name
        assert abs(drawn.abs().mean() - numbers.abs().mean()) <= few * scale, name  # the shape of the distribution


def test_drawn_layers_are_copied_and_stored() -> None:
    """Each copy draws its own weights, not those of the module that it was copied from."""
    backbone = ConvBackbone(1, conv_channels=4, conv_init="glorot")
    backbone.init_weights()
    for other in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        before = backbone.conv.weight.clone()
        with torch.no_grad():
            other.conv.weight.zero_()
        other.conv.reset_parameters()
        assert other.conv.weight.any()
        assert other.conv.bias.eq(0).all()
        assert backbone.conv.weight.equal(before)


@pytest.mark.parametrize("transform", ["dense", "matrix", "elementwise"])
def test_weights_with_the_axes_of_the_equation_are_loaded(transform: str) -> None:
    """As earlier versions stored them; a dict that fits both orders is today's."""
    layer, other = (DenseCapsules(5, 4, 3, 4, transform=transform) for _ in range(2))
    old = {"transform.weight": layer.transform.matrices.detach().clone()}
    for assign in (False, True):
        other.load_state_dict(old, assign=assign)
        assert other.transform.weight.equal(layer.transform.weight)
        assert other.transform.weight.is_contiguous()
    assert old["transform.weight"].shape == layer.transform.matrices.shape, "the caller's dict is as it was"
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({"transform.weight": torch.zeros(5, 3, 4, 9)})
    square = DenseCapsules(4, 4, 4, 4)
    weight = torch.randn(4, 4, 4, 4)
    square.load_state_dict({"transform.weight": weight})
    assert square.transform.weight.equal(weight)


# ---- repr


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("network")])
def test_repr_names_sizes_and_options(case: str) -> None:
    try:
        shown = repr(CASES[case]())
    except InputError:
        pytest.skip("options that need others")
    kind, name, *value = [*case.removesuffix(", any number").split(" "), ""]
    if kind in PARTS:
        assert f"{PARTS[kind][name].__name__}(" in shown
        assert value[0] in shown
    assert "in_dim=16" in shown or kind not in ("transform", "routing", "layer")


# ---- device and dtype

PUBLIC = [
    cls
    for name in torchcaps.nn.__all__
    if inspect.isclass(cls := getattr(torchcaps.nn, name))
    and issubclass(cls, nn.Module)
    and not inspect.isabstract(cls)
    and cls is not torchcaps.nn.PositionCapsules  # which has no parameters
    and not issubclass(cls, (torchcaps.nn.Routing, torchcaps.nn.Transform))  # their layer makes their parameters
]


@pytest.mark.parametrize("cls", PUBLIC)
def test_modules_are_made_on_a_device_in_a_dtype(cls: type[nn.Module], timm_stub: None) -> None:
    parameters = inspect.signature(cls).parameters
    required = [
        name for name, each in parameters.items() if each.default is each.empty and each.kind != each.VAR_KEYWORD
    ]
    sizes = SIZES | {"channels": 3, "out_channels": 4, "kernel_size": 3}
    made: Any = cls
    arguments = {name: sizes[name] for name in required}
    if "learned" in parameters:
        arguments["learned"] = True
    module = made(**arguments, device="meta", dtype=torch.float64)
    assert {(each.device.type, each.dtype) for each in module.parameters()} == {("meta", torch.float64)}
    for wrong, said in (
        ({"device": "gpu"}, "device must be a device of this machine"),
        ({"device": "xla"}, "device must be a device of this machine"),
        ({"device": 99}, "device must be a device of this machine"),
        ({"dtype": torch.int32}, "dtype must be a floating-point type of at least 16 bits"),
        ({"dtype": torch.complex64}, "dtype must be a floating-point type of at least 16 bits"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be a floating-point type of at least 16 bits"),
        ({"dtype": "float16"}, "dtype must be a floating-point type of at least 16 bits"),
    ):
        with pytest.raises(InputError, match=said):
            made(**arguments, **wrong)
    plain = made(**arguments)
    assert {(each.device.type, each.dtype) for each in plain.parameters()} == {("cpu", torch.float32)}
    assert {name: each.shape for name, each in plain.named_parameters()} == {
        name: each.shape for name, each in module.named_parameters()
    }
    empty = torch.nn.utils.skip_init(made, **arguments)
    assert {each.device.type for each in empty.parameters()} == {"cpu"}


# ---- Conv2d's arguments


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (3, 3), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 1), "groups": 1, "bias": False},
        {"kernel_size": (3, 1), "padding": "valid"},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": 3, "groups": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_a_convolution_takes_the_arguments_of_torchs(options: dict[str, Any]) -> None:
    """So that LoRA, which makes one of the same class with the same arguments, works."""
    ours, theirs, images = Convolution(4, 6, **options), nn.Conv2d(4, 6, **options), torch.randn(2, 4, 9, 8)
    theirs.load_state_dict(ours.state_dict())
    assert_close(ours(images), theirs(images), 1e-5)
    assert_close(ours(images, relu=True), theirs(images).relu(), 1e-5)
    positional: tuple[Any, ...] = (4, 6, 3, 1, 0, 1, 1, False)
    assert Convolution(*positional).bias is None
    assert_raises(
        InputError, Convolution, 4, 6, 3, groups=3, say="Convolution: in_channels must be divisible by groups"
    )


# ---- counters of operations


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("gradients", [False, True])
def test_operations_are_counted(transform: str, gradients: bool) -> None:
    """The counter's hooks differentiate the results of every module, also those of the transform."""
    layer = DenseCapsules(6, 4, 3, 4, transform=transform)
    with torch.set_grad_enabled(gradients), FlopCounterMode(display=False) as counter:
        layer(torch.randn(2, 6, 4))
    assert counter.get_total_flops() > 0


# ---- other tools


PRESETS = [name for name in list_presets() if get_preset(name).base is None]


class Adapted(nn.Module):
    """A linear layer and one beside it, whose results are added, as LoRA does it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.beside = base, copy.deepcopy(base)
        for parameter in self.beside.parameters():
            nn.init.normal_(parameter, std=0.1)

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        total: Tensor = self.base(*inputs, **options) + self.beside(*inputs, **options)
        return total


@pytest.mark.parametrize("preset", PRESETS)
def test_every_linear_layer_is_linear(preset: str) -> None:
    """An adapter beside a layer gives what a layer with the sum of both weights gives."""
    torch.manual_seed(0)
    merged = create_model(preset, **small(preset)).eval()
    adapted = copy.deepcopy(merged)
    linear = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    for name in [name for name, each in merged.named_modules() if isinstance(each, linear)]:
        parent, _, child = name.rpartition(".")
        layer, pair = merged.get_submodule(name), Adapted(adapted.get_submodule(name))
        setattr(adapted.get_submodule(parent), child, pair)
        for total, part in zip(layer.parameters(), pair.beside.parameters(), strict=True):
            total.detach().add_(part.detach())
    images = torch.rand(2, *merged.in_shape)
    for ours, theirs in zip(adapted(images), merged(images), strict=True):
        if isinstance(ours, Tensor):
            assert_close(ours, theirs, 1e-4)


class Wrapped(nn.Module):
    """A module in another one that has its attributes, as those that PEFT trains whole (``modules_to_save``)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*PRESETS, "compact-deep"])
def test_every_part_may_be_wrapped(preset: str) -> None:
    options = small(preset) | ({"transform": "dense"} if preset == "ucaps3d" else {})
    model = create_model(preset, **options).eval()
    images = torch.rand(2, *model.in_shape)
    expected = model(images)
    kinds = {name: part_of(type(each))[0] for name, each in model.named_modules()}
    kinds |= {name: "norm" for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
    for kind in ("transform", "routing", "layer", "backbone", "primary", "decoder", "norm"):
        wrapped = copy.deepcopy(model)
        for name in [name for name, its_kind in kinds.items() if its_kind == kind]:
            parent, _, child = name.rpartition(".")
            setattr(wrapped.get_submodule(parent), child, Wrapped(wrapped.get_submodule(name)))
        for ours, theirs in zip(wrapped(images), expected, strict=True):
            if isinstance(ours, Tensor):
                assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_dense_layers_may_be_quantised(preset: str) -> None:
    """They then have no parameters, and their ``weight`` is a function."""
    model = create_model(preset, **small(preset)).eval()
    images = torch.rand(2, *model.in_shape)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    assert_close(quantised(images).scores, model(images).scores, 0.3)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_saved_tensor_is_one(preset: str) -> None:
    """Tools that draw the graph, such as torchviz, read the shape of each."""
    model = create_model(preset, **small(preset))
    output = model(torch.rand(2, *model.in_shape))
    seen, pending = set(), [each.grad_fn for each in output if isinstance(each, Tensor) and each.requires_grad]
    while pending:
        step = pending.pop()
        if step is not None and step not in seen:
            seen.add(step)
            pending += [before for before, _ in step.next_functions]
            assert all(isinstance(each, Tensor) for each in getattr(step, "saved_tensors", ()))
    assert len(seen) > 10


# ---- every kind of layer with every routing

ON_MAPS: dict[str, Callable[..., nn.Module]] = {
    "conv": ConvCapsules,
    "conv over positions": functools.partial(ConvCapsules, compete_over="types-and-positions"),
    "conv-types": ConvTypeCapsules,
    "deconv": DeconvCapsules,
}


def layer_and_inputs(kind: str, routing: str) -> tuple[Any, Capsules]:
    """A layer, and three images for it."""
    grid = None if kind == "dense" else (2, 5, 5)
    options: Any = {"routing": routing} | ({"transform": "common"} if routing == "b2i" and grid is None else {})
    layer = DenseCapsules(*LAYER, **options) if grid is None else ON_MAPS[kind](2, 16, 3, 16, **options)
    return layer.eval(), Capsules(torch.randn(3, math.prod(grid or (8,)), 16), None, grid)


each_layer = pytest.mark.parametrize(
    ("kind", "routing"), list(itertools.product(["dense", *ON_MAPS], PARTS["routing"]))
)


@each_layer
def test_capsules_that_do_not_fit_are_refused(kind: str, routing: str) -> None:
    """Activations too of a routing that does not read them."""
    layer, inputs = layer_and_inputs(kind, routing)
    number, fitting = inputs.poses.shape[1], inputs.poses[:, :, 0].sigmoid()
    layer(inputs._replace(activations=fitting))
    for wrong, said in (
        ({"activations": fitting[:, :1]}, f"activations must have shape (3, {number}), got (3, 1)"),
        ({"activations": fitting[:1]}, f"activations must have shape (3, {number}), got (1, {number})"),
        ({"activations": fitting.to("meta")}, "poses and activations must be on one device"),
        ({"activations": fitting > 0.5}, "activations must be a floating-point tensor"),
        ({"mask": fitting[:, :1] > 0}, f"mask must have shape (3, {number}), got (3, 1)"),
        ({"mask": fitting}, "mask must be a tensor of True and False"),
        ({"poses": inputs.poses[:, :, :3]}, "in_dim is 16"),
        ({"poses": inputs.poses[:, :3]}, "got (3, 3, 16)" if kind == "dense" else "poses of 50 capsules, got 3"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            layer(inputs._replace(**wrong))


class Undefined(torch.autograd.Function):
    """An operation whose gradient is undefined, which stands for zero; gradcheck makes such gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


@each_layer
def test_undefined_gradients_are_zero(kind: str, routing: str) -> None:
    layer, inputs = layer_and_inputs(kind, routing)
    poses = inputs.poses.requires_grad_()
    for again in (False, True):
        results = layer(inputs)
        undefined: Any = Undefined.apply(results.poses)
        leaves = [poses, *layer.parameters()]
        gradients = torch.autograd.grad(
            undefined.sum() + 0 * poses.sum(), leaves, create_graph=again, allow_unused=True, materialize_grads=True
        )
        assert not any(each.any() for each in gradients)


class Same(nn.Module):
    """A parametrization that changes nothing."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.0


@each_layer
def test_weights_may_be_parametrized(kind: str, routing: str) -> None:
    """As ``torch.nn.utils.parametrize`` does it for weight normalisation, low-rank updates and quantisation."""
    layer, inputs = layer_and_inputs(kind, routing)
    expected = layer(inputs)
    for module in list(layer.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, Same())
    assert_close(layer(inputs).poses, expected.poses, 1e-5)


# ---- a part belongs to one layer


class Remembering(DynamicRouting):
    """A routing without parameters that remembers the sizes of its layer."""

    def bind(self, size: Any) -> None:
        self.remembered = size


@pytest.mark.parametrize(
    "routing", [B2IRouting(), DynamicRouting(capsule_bias=True), Remembering(), GroupedRouting(2), "em", "vb"], ids=repr
)
def test_a_routing_with_sizes_belongs_to_one_layer(routing: Any) -> None:
    shared: Routing = build("routing", routing)
    first = DenseCapsules(6, 4, 3, 4, routing=shared)
    said = f"{type(shared).__name__}: this routing already belongs to a layer; make one for each"
    assert_raises(InputError, DenseCapsules, 6, 4, 5, 4, routing=shared, say=said)
    first(torch.randn(2, 6, 4)), "the first layer is as it was"


def test_a_transform_with_sizes_belongs_to_one_layer() -> None:
    shared = Identity()
    first = DenseCapsules(6, 4, 3, 4, transform=shared)
    said = "Identity: this transform already belongs to a layer; make one for each"
    assert_raises(InputError, DenseCapsules, 6, 4, 5, 4, transform=shared, say=said)
    assert first(torch.randn(2, 6, 4)).poses.shape == (2, 3, 4)


def test_a_routing_that_keeps_nothing_may_be_shared() -> None:
    shared = DynamicRouting()
    layers = [DenseCapsules(6, 4, J, 4, routing=shared) for J in (3, 5)]
    assert [layer(torch.randn(2, 6, 4)).poses.shape[1] for layer in layers] == [3, 5]


def test_a_part_that_was_tried_alone_can_be_bound() -> None:
    """One refused for its sizes is as it was."""
    transform = Identity()
    assert_raises(InputError, DenseCapsules, 6, 4, 3, 5, transform=transform, say="the same number of components")
    DenseCapsules(6, 4, 3, 4, transform=transform)
