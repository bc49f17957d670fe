"""Assertions and small networks that several tests share."""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WRONG_PLURAL = re.compile(
    r"(?<![\w.,×/*^=+–:(\[-])1 (?:[a-z]+ )?(?!is\b|as\b|has\b|was\b|this\b|its\b|[a-z]*ss\b|axis\b)[a-z]+s\b"
)
"""A 1 with a noun in the plural, in a message."""

SIZES: dict[str, Any] = {
    "in_channels": 3,
    "in_shape": (1, 28, 28),
    "num_classes": 10,
    "in_types": 8,
    "in_capsules": (8, 6, 6),
    "in_dim": 16,
    "out_capsules": 10,
    "num_capsules": 10,
    "capsule_dim": 16,
    "slot_dim": 16,
    "out_shape": (1, 28, 28),
    "learning_rate": 0.1,
}
"""What the data tell, of any part."""


MASKS = ("pixels", "objects")
"""Tasks whose targets are masks."""


def assert_close(got: Tensor, wanted: Tensor | float | list[object], tol: float = 1e-6) -> None:
    """Equal up to ``tol``, relative and absolute; NaN equals nothing."""
    wanted = torch.as_tensor(wanted, dtype=got.dtype)
    torch.testing.assert_close(got.detach(), wanted.expand_as(got).detach(), rtol=tol, atol=tol)


def with_gradients(outputs: Any, leaves: dict[str, Tensor], *, create_graph: bool = False) -> dict[str, Tensor]:
    """Tensors by their names, and the gradients of a fixed random sum of them: ``d name`` of a leaf.

    Args:
        outputs: A mapping, or a NamedTuple, of tensors and None.
        leaves: What they were made of.
        create_graph: Whether the gradients will be differentiated.
    """
    named = outputs if isinstance(outputs, dict) else outputs._asdict()
    found = {name: each for name, each in named.items() if each is not None}
    learned = [each for each in found.values() if each.requires_grad]
    random = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(each.shape, dtype=torch.float64, generator=random).to(each.dtype) for each in learned]
    if not learned:
        return found | {f"d {name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(
        learned,
        list(leaves.values()),
        cotangents,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return found | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that was computed while it was active."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def second_derivatives(outputs: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients that can be differentiated, ``d name``, and the gradients of a random sum of them, ``d d name``."""
    found = with_gradients(outputs, leaves, create_graph=True)
    grads = {name: found[f"d {name}"] for name in leaves}
    second = with_gradients(grads, leaves)
    return {f"d {name}": grad for name, grad in grads.items()} | {f"d d {name}": second[f"d {name}"] for name in leaves}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], tol: float = 2e-6, what: object = "") -> None:
    """The same names, and tensors that are equal up to ``tol``, relative to the largest number of each, or to one."""
    assert got.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert got[name].shape == exact.shape, (name, what)
        off = (got[name] - exact).abs() / exact.abs().amax().clamp_min(1) if exact.numel() else exact
        assert (off <= tol).all(), f"{name} {what}: {off.max():.1e} off"


def assert_as_exact(
    got: dict[str, Tensor], other: dict[str, Tensor], exact: dict[str, Tensor], rounding: float = 5e-7
) -> None:
    """At most twice as far from the exact values as the other way is, but for a rounding of the largest numbers."""
    assert got.keys() == other.keys() == exact.keys()
    for name, wanted in exact.items():
        assert got[name].shape == wanted.shape, name
        ours, theirs = ((found[name].double() - wanted).norm() for found in (got, other))
        assert ours <= 2 * theirs + rounding * wanted.norm().clamp_min(1), (
            f"{name}: {ours:.2e} off, the other way {theirs:.2e}"
        )


def assert_differs(first: Tensor, second: Tensor, by: float = 1e-4) -> None:
    """Of one shape, and apart by more than ``by`` somewhere."""
    assert first.shape == second.shape, (first.shape, second.shape)
    assert (first - second).abs().max() > by, f"the same up to {by}"


def assert_finite(tensors: Iterable[Tensor | None]) -> None:
    """No NaN, no infinity."""
    for tensor in tensors:
        assert tensor is None or tensor.isfinite().all(), "not finite"


def assert_gradients_reach(module: nn.Module, besides: str = "") -> None:
    """Every parameter has a finite gradient that is not zero everywhere, except that of one whose gradient is zero."""
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
        assert name == besides or parameter.grad.count_nonzero() > 0, f"{name} has a gradient of zeros"


def assert_batch_independent(function: Callable[[Tensor], Tensor], batch: Tensor, tol: float = 1e-5) -> None:
    """What becomes of an item of the batch does not depend on its neighbours (``tol``: relative to the largest)."""
    together = function(batch).detach()
    scale = together.abs().max().clamp_min(torch.finfo(together.dtype).tiny)
    for i in range(len(batch)):
        assert_close(function(batch[i : i + 1]) / scale, together[i : i + 1] / scale, tol)


def assert_raises(
    kind: type[Exception], function: Callable[..., object], *args: object, say: str, **kwargs: object
) -> None:
    """It raises exactly ``kind``, and says ``say``."""
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    assert caught.type is kind, f"{caught.type.__name__} is no {kind.__name__}"
    assert say in str(caught.value), f"{caught.value} does not say {say!r}"


def holds(check: Callable[..., None], *args: object) -> bool:
    """Whether an assertion holds: for tests that show that a wrong version breaks it."""
    try:
        check(*args)
    except (AssertionError, pytest.fail.Exception):
        return False
    return True


COMPILES_KERNELS = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11 compiles its own operations in place of the kernels"
)


@contextmanager
def registered_for_now() -> Iterator[None]:
    """What is registered meanwhile, parts, presets, data sets and plugins, is known no more afterwards."""
    import torchcaps.datasets.sources
    import torchcaps.training.recipe  # noqa: F401  registers the optimizers
    from torchcaps import plugins
    from torchcaps.datasets.registry import _DATASETS
    from torchcaps.models.presets import registry
    from torchcaps.parts import PARTS

    registries: list[dict[str, Any]] = [registry._PRESETS, plugins._loaded, _DATASETS, *PARTS.values()]
    before, modules = [dict(registry) for registry in registries], set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) in plugins._loaded.values():
                del sys.modules[name]
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)


def plain_formulas(patch: pytest.MonkeyPatch) -> None:
    """Let all operations compute their plain formulas instead of their kernels."""
    from torchcaps.kernels.operation import Operation

    patch.setattr(Operation, "runs_kernel", lambda *_: False)


def image_presets() -> list[str]:
    """The presets whose networks give one answer for an image, and no masks."""
    from torchcaps.models import get_preset, list_presets

    return [name for name in list_presets() if get_preset(name).network["task"] not in MASKS]


def routings(**more: Any) -> dict[str, Any]:
    """All routings by their names, two of them also with other options, and more with options of one's own."""
    from torchcaps.parts import PARTS

    named: dict[str, Any] = {name: name for name in PARTS["routing"]}
    named["dynamic, over inputs"] = {"name": "dynamic", "softmax_over": "inputs", "leaky": True}
    named["grouped em"] = {"name": "grouped", "group_routing": "em"}
    return named | more


def pairwise(*axes: Iterable[str]) -> list[tuple[str, ...]]:
    """Cases of three axes, so that every two values of different axes meet in at least one of them.

    There are as many cases as pairs of values of the two longest axes.
    """
    values = [list(axis) for axis in axes]
    first, second, third = order = sorted(range(3), key=lambda axis: -len(values[axis]))
    cases = []
    for n, m in itertools.product(range(len(values[first])), range(len(values[second]))):
        chosen = dict(zip(order, (n, m, (n + m) % len(values[third])), strict=True))
        cases.append(tuple(values[axis][chosen[axis]] for axis in range(3)))
    return cases


def small(preset: str, **overrides: Any) -> dict[str, Any]:
    """Overrides that make a preset's network small and leave what is particular about it, and others of one's own."""
    from torchcaps.models import get_preset
    from torchcaps.parts import flat, override

    sizes: dict[str, Any] = {
        "channels": (4, 6),
        "hidden": (12, 8),
        "conv_channels": 8,
        "primary_types": 2,
        "layer_types": 4,
        "decoder_hidden": (16, 24),
        "stack_channels": (8,),
        "sequence_channels": (4, 6),
        "parameters_of": None,
        "up_channels": (7, 6, 5, 4, 3),
    }
    if preset == "segcaps":  # which has none
        del sizes["up_channels"]
    if preset == "efficient-capsnet-mnist":  # a channel of the last convolution for each of its primary capsules'
        sizes |= {"stack_channels": (4, 4, 8, 16), "primary_kernel": 2}
    if preset in ("cnn-pooled", "compact-shared"):  # four convolutions
        sizes |= {"stack_channels": (4, 4, 8, 8)}
    if preset.startswith("hvc2021"):  # a class capsule has the components of its branch's channels
        del sizes["stack_channels"]
        two = {"stack_kernels": (3, 3), "stack_strides": (1, 1)}
        sizes |= {"stages": tuple(two | {"stack_channels": (4, dim)} for dim in (4, 5, 6))}
        sizes |= {"branches": tuple({"capsule_dim": dim} for dim in (4, 5, 6))}
    if preset.startswith("slots"):
        kernels = get_preset(preset).network["decoder"]["broadcast_kernels"]
        convolutions = len(get_preset(preset).network["backbone"]["stack_kernels"])
        sizes |= {"stack_channels": (6,) * convolutions, "broadcast_channels": (8,) * (len(kernels) - 1)}
        sizes |= {"feature_width": 8, "mlp_width": 12, "capsule_dim": 10}
    parts = {name: value for name, value in overrides.items() if name in ("decoder", "backbone")}  # of other fields
    fields = flat(override("network", get_preset(preset).network, parts))
    return {name: size for name, size in sizes.items() if name in fields} | overrides


def labels_for(model: Any, batch: int) -> Tensor:
    """Labels (B,) that count up through the classes, of P objects (B, P), all different; else targets (B, J)."""
    first = torch.arange(batch)
    if model.task in MASKS:
        count = torch.arange(math.prod(model.in_shape[1:])).view(model.in_shape[1:])
        return ((count + first.view(-1, *[1] * count.ndim)) % model.num_classes).to(torch.uint8)
    if model.task != "classes":
        return torch.eye(model.num_classes)[first % model.num_classes]
    objects = model.objects
    return first % model.num_classes if objects == 1 else (first[:, None] + torch.arange(objects)) % model.num_classes


def drawn_for(model: Any, images: Tensor) -> Tensor:
    """What a network's loss compares its reconstructions with: the images, or P different parts of each."""
    objects = model.objects
    return images if objects == 1 else torch.stack([images * (p + 1) / objects for p in range(objects)], 1)
