"""The fused path within its memory, and in all the ways that PyTorch can call it.

That its numbers are the loop's, for every option, cut and order of memory, is in tests/nn/test_dynamic_routing.py.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from calling import check_ways
from routing_cases import FEW, MANY, WAYS, Leaves, detached, draw_leaves, small_cuts  # noqa: F401  a fixture
from support import Largest, assert_close, with_gradients
from torchcaps import route
from torchcaps.kernels.dense import layer
from torchcaps.nn import DenseVotes, DynamicRouting
from torchcaps.ops.memory import set_working_memory


def routed(leaves: Leaves, backend: Any = "recompute", **options: Any) -> Leaves:
    """Capsules, coupling and gradients."""
    return with_gradients(route(**leaves, return_coupling=True, backend=backend, **options), leaves)


# ---- how a call is cut


@pytest.mark.usefixtures("small_cuts")
def test_a_layer_is_cut_along_the_axis_that_does_not_compete() -> None:
    """Pieces of outputs, inputs and images, for memory that is ample, little, and too little for anything."""
    B, I, J, D, K = MANY
    for mib, over_outputs, over_inputs in (
        (16, (1, 1, 4), (1, 1, 4)),
        (0.05, (1, 4, 4), (4, 1, 4)),
        (1e-6, (1, 63, 4), (7, 1, 4)),
    ):
        set_working_memory(mib)
        for pieces, over in ((over_outputs, False), (over_inputs, True)):
            given = torch.empty(B, I, K).double(), torch.empty(I, J, D, K).double()
            cut = layer.Layer(layer.Tensors(*given, None), layer.Options(3, over, False, False, 1e-7))
            assert (len(cut.outputs), len(cut.inputs), len(cut.batches)) == pieces
            alone = torch.empty(2, 2**20, 8, device="meta"), torch.empty(2**20, 10, 16, 8, device="meta")
            cut = layer.Layer(layer.Tensors(*alone, None), layer.Options(3, over, False, False, 1e-7))
            assert len(cut.outputs) == len(cut.inputs) == len(cut.batches) == 1, "without numbers nothing is cut"


# ---- memory


def test_what_is_saved_for_the_backward_pass() -> None:
    B, I, J, D, _ = size = (16, 40, 6, 16, 8)
    leaves = draw_leaves(size)
    for stop in (False, True):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            route(**leaves, stop_gradient=stop, backend="recompute")
        ours = sum(t.numel() for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves.values()))
        assert ours == 3 * B * J * D + (B * I * J if stop else 0), "s¹ s² s³; with a constant coupling, that; no votes"
    with torch.no_grad():
        assert route(**leaves, backend="recompute").poses.grad_fn is None


def test_only_the_gradients_that_are_wanted() -> None:
    leaves = draw_leaves()
    for wanted, way in itertools.product(leaves, WAYS):
        alone = {name: leaf.detach().requires_grad_(name == wanted) for name, leaf in leaves.items()}
        result = route(**alone, return_coupling=True, backend="recompute", **way)
        assert result.coupling.requires_grad != way["stop_gradient"]
        everything, name = routed(leaves, "reference", **way), f"d {wanted}"
        assert_close(with_gradients(result, {wanted: alone[wanted]})[name], everything[name], 1e-10)


# ---- dtypes


def test_half_precision_rounds_arguments_and_results_only() -> None:
    for size, dtype, way in itertools.product((MANY, FEW), (torch.bfloat16, torch.float16), WAYS):
        half = draw_leaves(size, dtype)
        single = {name: leaf.detach().float().requires_grad_() for name, leaf in half.items()}
        found, exact = (route(**leaves, return_coupling=True, backend="recompute", **way) for leaves in (half, single))
        assert found.poses.equal(exact.poses.to(dtype))
        assert found.coupling.equal(exact.coupling.to(dtype))
        cotangent = torch.randn(found.poses.shape).to(dtype)
        grads = torch.autograd.grad(found.poses, list(half.values()), cotangent)
        exact_grads = torch.autograd.grad(exact.poses, list(single.values()), cotangent.float())
        for grad, wanted in zip(grads, exact_grads, strict=True):
            assert grad.equal(wanted.to(dtype))


# ---- the ways to call it


def test_the_fast_path_is_taken_and_second_derivatives_build_no_votes() -> None:
    B, I, J, D, _ = size = (16, 40, 6, 16, 8)
    leaves, routing = draw_leaves(size), DynamicRouting()
    votes = DenseVotes(leaves["poses"], leaves["weight"])
    mask = torch.ones(votes.poses.shape[:2], dtype=torch.bool)
    set_working_memory(0.1)
    for poses in (route(**leaves).poses, routing(votes).poses, routing(votes.masked(mask)).poses):
        assert any("_Eager" in str(node) for node in (poses.grad_fn, poses.grad_fn.next_functions[0][0]))
        with Largest() as largest:
            (grad,) = torch.autograd.grad(poses.square().sum(), leaves["poses"], create_graph=True)
            grad.square().sum().backward()
        assert largest.numbers < B * I * J * D


def test_the_registered_operation_is_what_it_says() -> None:
    leaves = draw_leaves((2, 4, 3, 2, 2))
    for iterations, stop in itertools.product((0, 2), (False, True)):
        scalars = (iterations, False, stop, False, 1e-7, True)
        torch.library.opcheck(torch.ops.torchcaps.route.default, (*leaves.values(), [True] * 3, *scalars))
        half = [leaf.detach().bfloat16() for leaf in leaves.values()]
        torch.library.opcheck(torch.ops.torchcaps.route.default, (*half, [False] * 3, *scalars))


@pytest.mark.parametrize("number", [0, 3])
def test_called_in_every_way(number: int) -> None:
    with_coupling = lambda u, W, b: route(u, W, bias=b, leaky=True, **WAYS[number], return_coupling=True)[::2]  # noqa: E731
    check_ways(with_coupling, *detached(draw_leaves(FEW if number else MANY)).values())
