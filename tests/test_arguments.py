"""Odd arguments of functions, layers, parts and settings: one sentence names the argument, and what would be right.

They are made from the annotations, so that a new function or part is asked too.
"""

import functools
import importlib
import inspect
import itertools
import math
import operator
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchcaps.nn
import torchcaps.ops
from support import SIZES, small
from torchcaps import analysis, create_model, datasets
from torchcaps.datasets import resize_images
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.nn import (
    Capsules,
    ChannelNorm,
    ConvCapsules,
    Convolution,
    Decoder,
    Dense,
    DenseCapsules,
    LayerSize,
    PrimaryCapsules,
)
from torchcaps.ops.memory import get_working_memory
from torchcaps.parts import PARTS, Option, options
from torchcaps.ranges import Range
from torchcaps.training import TrainConfig
from torchcaps.training.recipe import Recipe


def network(preset: str = "sabour2017", **overrides: Any) -> Network:
    return create_model(preset, (1, 18, 18), 4, **small(preset) | overrides)


# ---- arguments that fit an annotation, and such that do not

LETTERS = {"B": 2, "I": 3, "J": 4, "K": 6, "D": 5, "P": 2, "C": 3, "H": 9, "W": 9, "O": 4, "k": 3, "l": 3, "N": 7}
NOTHING_FITS = (object(), {"a": 1}, math.nan, "no such choice", torch.ones(2, dtype=torch.complex64))
"""Values that no annotation takes, but for a text."""


def members(hint: Any) -> tuple[Any, ...]:
    """The annotations of which one is enough."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def fitting(hint: Any, owner: object = None) -> Tensor | None:
    """A tensor that fits, where the annotation has one."""
    for each in members(hint):
        if hasattr(each, "dim_str"):
            shape: list[int] = []
            for letter in each.dim_str.split():
                if letter[0] == "{":
                    shape.append(operator.attrgetter(letter[len("{self.") : -1])(owner))
                else:
                    sizes = [LETTERS["H"], LETTERS["W"]] if letter == "*S" else [2, 3]
                    shape += sizes if letter == "..." or letter[0] == "*" else [int(LETTERS.get(letter) or letter)]
            kind = {"Floa": torch.float32, "Bool": torch.bool, "UInt": torch.uint8}.get(each.__name__[:4], torch.int64)
            return torch.ones(shape, dtype=kind) if kind == torch.bool else torch.rand(shape).to(kind)
    return None


def wrong(hint: Any) -> Iterator[Any]:
    """Values that do not fit an annotation."""
    kinds = members(hint)
    yield from (odd for odd in NOTHING_FITS if not (str in kinds and isinstance(odd, str)))
    if type(None) not in kinds:
        yield None
    good = fitting(hint) if len(kinds) == 1 and "self" not in str(hint) else None
    if good is not None:
        yield from (good.tolist(), good.numpy(), good.to_sparse(), good.to(torch.complex64))
        yield from (good.long(), good.to(torch.float8_e4m3fn)) if good.is_floating_point() else (good.float(),)
        if "..." not in hint.dim_str and "*" not in hint.dim_str:
            yield good[None]
    for each in kinds:
        ranges = [item for item in typing.get_args(each) if isinstance(item, Range)]
        if ranges and not any(hasattr(other, "dim_str") for other in kinds):
            (within,) = ranges
            yield from (within.least - 1, 10 * within.most + 1, True)
            yield from (
                [within.least] * within.above + [within.most] * within.below + [within.least + 0.5] * within.whole
            )
        if typing.get_origin(each) is tuple:
            yield from ((item,) for item in wrong(typing.get_args(each)[0]) if item is not None)
        if typing.get_origin(each) is Literal:
            yield from ([], *([3] if len(kinds) == 1 else []))  # another annotation may take numbers
        if each is bool:
            yield from (1, "yes", np.True_)
        if each is int:
            yield True


def assert_named(called: Callable[..., object], given: dict[str, Any], name: str, value: object, or_: str = "") -> None:
    """It raises an InputError of one line that names the argument (``or_``: or this)."""
    with pytest.raises(InputError, match=rf"\A.*\b({name}|{or_ or name})\b.*\Z"):
        called(**given | {name: value})


# ---- functions, modules, parts, settings

MODULES: tuple[nn.Module, ...] = (
    Convolution(3, 4, 3),
    ChannelNorm(3),
    PrimaryCapsules(3, primary_types=2, primary_dim=4),
    Decoder(4, 5, (1, 3, 3), decoder_hidden=(6,)),
)


def functions() -> dict[str, Callable[..., object]]:
    """Every checked function of ops and nn by its name."""
    found: dict[str, Callable[..., object]] = {}
    for package in (torchcaps.ops, torchcaps.nn):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                is_checked = isinstance(value, types.FunctionType) and value.__code__.co_filename.endswith("checks.py")
                if is_checked and value.__module__ == module.name and not name.startswith("_"):
                    found[name] = value
    return found


@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_a_function_or_module_is_named() -> None:
    for called in (*functions().values(), *MODULES):
        is_module = isinstance(called, nn.Module)
        hints = typing.get_type_hints(called.forward if is_module else called, include_extras=True)
        del hints["return"]
        given: dict[str, Any] = {name: fitting(hint, called) for name, hint in hints.items()}
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        if "mib" in hints:
            given["mib"] = get_working_memory()
        if "most" in hints:
            given["most"] = 4
        if "window" in hints:
            given |= {"function": lambda images: images, "window": (3, 4)}
        if "objects" in hints:
            given |= {"objects": 2, "targets": torch.tensor([[0, 1], [1, 2]])}
        called(**given)
        for name in hints.keys() - {"caller"}:
            for value in wrong(hints[name]):
                assert_named(called, given, name, value)
            if isinstance(given.get(name), Tensor) and sum(isinstance(each, Tensor) for each in given.values()) > 1:
                assert_named(called, given, name, given[name].to("meta"))


def test_each_option_of_a_part_and_each_setting_is_named(timm_stub: None) -> None:
    for part in (part for kind in PARTS.values() for part in kind.values()):
        given = {"params": [nn.Parameter(torch.zeros(2))]} | SIZES
        given = {name: given[name] for name in inspect.signature(part).parameters if name in given}
        given = {name: value for name, value in given.items() if name not in options(part)}
        part(**given)
        for option in options(part).values():
            assert_option_named(part, given, option)
    for settings in (Recipe, TrainConfig):
        for option in options(settings).values():
            if option.name != "recipe":
                assert_option_named(settings, {}, option)


def assert_option_named(called: type, given: dict[str, Any], option: Option) -> None:
    if option.choice is None:
        for value in wrong(option.hint):
            assert_named(called, given, option.name, value)
    else:
        for value in (3, "nothing", {"name": "nothing"}):
            assert_named(called, given, option.name, (value,) if option.choice.many else value, option.choice.kind)


def layers_and_networks() -> Iterator[tuple[Callable[..., object], dict[str, Tensor]]]:
    """What passes its arguments on to what checks them."""
    poses, images, labels = torch.rand(2, 3, 6), torch.rand(2, 1, 18, 18), torch.tensor([0, 3])
    pairs = torch.tensor([[0, 1], [3, 2]])
    dense, conv, transform = DenseCapsules(3, 6, 4, 5), ConvCapsules(2, 6, 4, 5), Dense()
    transform.bind(LayerSize(3, 6, 4, 5), 1.0)
    yield lambda poses: dense(poses), {"poses": poses}
    yield lambda poses: dense(Capsules(poses)), {"poses": poses}
    yield lambda poses: conv(Capsules(poses, grid=(2, 4, 5))), {"poses": torch.rand(2, 40, 6)}
    yield transform, {"poses": poses}
    model, of_pairs, cnn = network(), network(objects=2), network("baseline-cnn")
    output, of_cnn, of_two = model(images), cnn(images), of_pairs(images)
    yield model, {"images": images, "targets": labels}
    yield cnn, {"images": images}
    yield lambda images, targets: model.loss(output, images, targets), {"images": images, "targets": labels}
    yield lambda targets: cnn.loss(of_cnn, images, targets), {"targets": labels}
    parts = torch.rand(2, 2, 1, 18, 18)
    yield lambda images, targets: of_pairs.loss(of_two, images, targets), {"images": parts, "targets": pairs}


@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_a_layer_or_network_is_named() -> None:
    for called, given in layers_and_networks():
        called(**given)
        for name, right in given.items():
            for value in (*NOTHING_FITS, right.tolist(), right[None, None, None]):
                assert_named(called, given, name, value)


def test_arguments_of_the_analysis_and_of_data() -> None:
    model, images, labels = network().eval(), torch.rand(2, 1, 18, 18), torch.tensor([0, 2])
    looks = analysis.reconstruct, analysis.trace_routing, analysis.routing_statistics  # predict takes any form
    called: list[Callable[[Any], object]] = [
        *(functools.partial(look, model) for look in looks),
        lambda wrong: analysis.attack(model, wrong, labels, 0.1),
        lambda wrong: analysis.attack(model, images, wrong, 0.1),
        lambda wrong: datasets.ImageSet(wrong, labels),
        lambda wrong: datasets.ImageSet((255 * images).byte(), wrong),
        lambda wrong: resize_images(wrong, (5, 5)),
    ]
    for call, wrong in itertools.product(called, (None, [1, 2], "images", np.zeros((2, 1, 18, 18)))):
        with pytest.raises(TypeError, match=r"(images|labels) must be "):
            call(wrong)
    for wrong in (True, "1", torch.ones(2), None, math.nan):
        with pytest.raises((TypeError, ValueError), match="must be"):
            analysis.attack(model, images, labels, wrong)
