"""Cases of routing that several tests share: sizes, options, dtypes, orders of memory, and memory to work in.

They are drawn at random, the same ones in every run.
"""

import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.kernels.dense import layer
from torchcaps.nn import (
    DynamicRouting,
    EMCodeRouting,
    EMRouting,
    HeinsenMatrixRouting,
    HeinsenVectorRouting,
    HVCRouting,
    InvertedAttentionRouting,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    VBRouting,
)

Leaves = dict[str, Tensor]

FEW, MANY = (3, 63, 7, 5, 3), (7, 63, 7, 5, 3)
"""B, I, J, D, K: the fused path holds the votes of so few images, and never builds those of so many."""
SIZES = [FEW, MANY, (1, 4, 3, 2, 2), (3, 1, 1, 1, 1), (9, 40, 2, 3, 4), (0, 5, 2, 3, 2), (2, 3, 5, 7, 1)]
ORDERS = list(itertools.permutations(range(4)))
"""Of memory, of four axes; tensors of fewer axes leave some out."""
MEMORY = (16.0, 0.05, 1e-6)
"""Working memory, MiB: enough for all, for a few blocks, and for the smallest blocks."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_iterations": (0, 1, 2, 3, 4),
    "softmax_over": ("outputs", "inputs"),
    "stop_gradient": (False, True),
    "leaky": (False, True),
    "bias": (False, True),
    "return_coupling": (False, True),
}
"""The options of dynamic routing that both paths have, and values of each; with a prior the loop serves."""
WAYS: list[dict[str, Any]] = [
    {"softmax_over": axis, "stop_gradient": stop} for axis in ("outputs", "inputs") for stop in (False, True)
]


def draw_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float, dict[str, Any]]]:
    """Every combination of the options, after sizes, an order and an amount of memory drawn at random."""
    rng = Random(0)
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True))
        yield rng.choice(SIZES), rng.choice(ORDERS), rng.choice(MEMORY), options


def reordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers in another order of memory: ``order`` are the axes from the outermost to the innermost."""
    axes = [axis for axis in order if axis < tensor.ndim]
    return tensor.detach().permute(axes).contiguous().permute([axes.index(axis) for axis in range(tensor.ndim)])


def draw_leaves(
    size: tuple[int, ...] = MANY, dtype: torch.dtype = torch.float64, order: tuple[int, ...] = (0, 1, 2, 3)
) -> Leaves:
    """Poses, weight and bias of a layer of those sizes, all of which want gradients."""
    B, I, J, D, K = size
    shapes = {"poses": (B, I, K), "weight": (I, J, D, K), "bias": (J, D)}
    drawn = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    return {name: reordered(tensor, order).requires_grad_() for name, tensor in drawn.items()}


def detached(leaves: Leaves) -> Leaves:
    """The same without gradients."""
    return {name: leaf.detach() for name, leaf in leaves.items()}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fused path cut even small layers along every axis."""
    monkeypatch.setattr(layer, "max_batch_slice", lambda *_: 2)
    monkeypatch.setattr(layer, "INPUT_MULTIPLE", 4)


ROTATED = {"rotation"}  # by layer normalisation, or a variance of each component, which know the axes of a pose
ROUTINGS: dict[str, tuple[Callable[[], Routing], set[str]]] = {
    "dynamic": (DynamicRouting, set()),
    "dynamic, over inputs": (lambda: DynamicRouting(2, softmax_over="inputs"), set()),
    "dynamic, leaky": (lambda: DynamicRouting(2, leaky=True), {"coupling"}),
    "dynamic, learned": (lambda: DynamicRouting(2, capsule_bias=True, learn_prior=True), ROTATED),
    "self-attention": (SelfAttentionRouting, set()),
    "self-attention without bias": (lambda: SelfAttentionRouting(attention_bias=False), set()),
    "inverted attention": (InvertedAttentionRouting, ROTATED),
    "inverted attention, one iteration": (lambda: InvertedAttentionRouting(1), ROTATED),
    "self": (SelfRouting, set()),
    "em": (lambda: EMRouting(cost_scale=1.0), ROTATED),
    "em, scaled": (lambda: EMRouting(2, final_lambda=0.1), ROTATED),
    "em-code": (EMCodeRouting, ROTATED),
    "em-code on a map": (lambda: EMCodeRouting(2, on_map=True), ROTATED),
    "vb": (lambda: VBRouting().eval(), ROTATED),  # in training, images of a batch are normalised together
    "heinsen-matrix": (HeinsenMatrixRouting, ROTATED),
    "heinsen-vector": (HeinsenVectorRouting, {"input order", "output order", *ROTATED}),  # it draws β of each
    "hvc": (lambda: HVCRouting().eval(), {"lengths", "coupling", *ROTATED}),
}
"""Every routing module, with the properties of ``check_routing`` that it does not have."""
TRANSFORMS = {"dense": (6, 5), "shared": (6, 5), "factored": (6, 5), "elementwise": (5, 5), "matrix": (9, 9)}
TRANSFORMS |= {"identity": (5, 5)}
"""Every transform, with sizes K and D that it can have."""
