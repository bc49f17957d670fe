"""Routing by agreement: hand-worked numbers, explicit loops, and the properties that a wrong version would break."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support import (
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_finite,
    assert_raises,
    assert_sums_to_one,
)
from torchcaps import dynamic_routing, squash

AXES = ("outputs", "inputs")
B, I, J, D = 3, 5, 4, 2


@pytest.fixture
def votes(rng: torch.Generator) -> Tensor:
    return torch.randn(B, I, J, D, dtype=torch.float64, generator=rng)


@pytest.fixture
def bias(rng: torch.Generator) -> Tensor:
    return torch.randn(J, D, dtype=torch.float64, generator=rng)


@pytest.fixture
def prior(rng: torch.Generator) -> Tensor:
    return torch.randn(I, J, dtype=torch.float64, generator=rng)


# ---- by hand

# Two inputs, two outputs, one component: squash(s) = s²/(1+s²) for s > 0.
#   votes   û_1|1 = 2   û_2|1 = 0
#           û_1|2 = 2   û_2|2 = 2
HAND = torch.tensor([[[[2.0], [0.0]], [[2.0], [2.0]]]], dtype=torch.float64)


def by_hand(num_iterations: int, **options: Any) -> tuple[list[float], list[list[float]]]:
    capsules, coupling = dynamic_routing(HAND, num_iterations, eps=1e-30, return_coupling=True, **options)
    return capsules.flatten().tolist(), coupling[0].tolist()


def test_first_iteration_by_hand() -> None:
    # c = 1/2:  s_1 = ½·2 + ½·2 = 2, v_1 = 4/5;  s_2 = ½·0 + ½·2 = 1, v_2 = 1/2
    for axis in AXES:
        capsules, coupling = by_hand(1, softmax_over=axis)
        assert capsules == pytest.approx([0.8, 0.5])
        assert coupling == [[0.5, 0.5], [0.5, 0.5]]


def test_second_iteration_by_hand_over_outputs() -> None:
    # agreement: b_11 = 2·0.8 = 1.6, b_12 = 0·0.5 = 0, b_21 = 1.6, b_22 = 2·0.5 = 1
    # input 1: c_11 = e^1.6/(e^1.6 + 1)   = 0.832018
    # input 2: c_21 = e^1.6/(e^1.6 + e)   = 0.645656, c_22 = 0.354344
    # s_1 = 2·(0.832018 + 0.645656) = 2.955349, v_1 = 8.734090/9.734090 = 0.897268
    # s_2 = 2·0.354344              = 0.708687, v_2 = 0.502238/1.502238 = 0.334326
    capsules, coupling = by_hand(2)
    assert coupling[0] == pytest.approx([0.832018, 0.167982], abs=1e-6)
    assert coupling[1] == pytest.approx([0.645656, 0.354344], abs=1e-6)
    assert capsules == pytest.approx([0.897268, 0.334326], abs=1e-6)


def test_second_iteration_by_hand_over_inputs() -> None:
    # the same logits; output 1: b_11 = b_21, so c = ½, ½;  output 2: c_22 = e/(1 + e) = 0.731059
    # s_1 = 2, v_1 = 0.8;  s_2 = 2·0.731059 = 1.462117, v_2 = 2.137787/3.137787 = 0.681304
    capsules, coupling = by_hand(2, softmax_over="inputs")
    assert coupling[0] == pytest.approx([0.5, 0.268941], abs=1e-6)
    assert coupling[1] == pytest.approx([0.5, 0.731059], abs=1e-6)
    assert capsules == pytest.approx([0.8, 0.681304], abs=1e-6)


def test_leaky_by_hand() -> None:
    # c = 1/3 with the third competitor:  s_1 = 4/3, v_1 = (16/9)/(25/9) = 0.64;  s_2 = 2/3, v_2 = (4/9)/(13/9) = 4/13
    capsules, coupling = by_hand(1, leaky=True)
    assert capsules == pytest.approx([0.64, 4 / 13])
    assert coupling == [pytest.approx([1 / 3, 1 / 3])] * 2
    # b_11 = 1.28, b_12 = 0:  c_11 = e^1.28/(1 + e^1.28 + 1)
    _, coupling = by_hand(2, leaky=True)
    assert coupling[0] == pytest.approx([math.exp(1.28) / (2 + math.exp(1.28)), 1 / (2 + math.exp(1.28))])


def test_bias_and_prior_by_hand() -> None:
    # bias: s_1 = 2 + 1 = 3, v_1 = 0.9;  s_2 = 1 − 3 = −2, v_2 = −0.8
    capsules, _ = by_hand(1, bias=torch.tensor([[1.0], [-3.0]], dtype=torch.float64))
    assert capsules == pytest.approx([0.9, -0.8])
    # prior: c_11 = 3/4, c_12 = 1/4, input 2 even:  s_1 = ¾·2 + ½·2 = 2.5, s_2 = ½·2 = 1
    capsules, coupling = by_hand(1, prior=torch.tensor([[math.log(3), 0.0], [7.0, 7.0]], dtype=torch.float64))
    assert coupling == [pytest.approx([0.75, 0.25]), pytest.approx([0.5, 0.5])]
    assert capsules == pytest.approx([6.25 / 7.25, 0.5])


def test_no_routing_is_the_plain_sum(votes: Tensor, bias: Tensor, prior: Tensor) -> None:
    for options in ({}, {"softmax_over": "inputs"}, {"prior": prior}, {"leaky": True}):
        capsules, coupling = dynamic_routing(votes, 0, return_coupling=True, **options)
        assert_close(capsules, votes.sum(1), 1e-12)
        assert_close(coupling, torch.ones(B, I, J), 0)
    assert_close(dynamic_routing(votes, 0, bias=bias), votes.sum(1) + bias, 1e-12)
    assert (capsules.norm(dim=-1) > 1).any(), "not squashed"


# ---- against loops


def loops(votes: Tensor, iterations: int, over: str, bias: Tensor, prior: Tensor, leaky: bool, eps: float):
    """Procedure 1 of the paper, written with nothing but Python numbers."""
    capsules_of, coupling_of = [], []
    for image in votes.tolist():  # (I, J, D)
        b = [[prior[i, j].item() for j in range(J)] for i in range(I)]
        for _ in range(iterations):
            c = [[0.0] * J for _ in range(I)]
            for i, j in itertools.product(range(I), range(J)):
                rivals = [b[i][k] for k in range(J)] if over == "outputs" else [b[k][j] for k in range(I)]
                total = sum(math.exp(rival) for rival in rivals) + (1 if leaky else 0)
                c[i][j] = math.exp(b[i][j]) / total
            v = []
            for j in range(J):
                s = [bias[j, d].item() for d in range(D)]
                for i, d in itertools.product(range(I), range(D)):
                    s[d] += c[i][j] * image[i][j][d]
                n = sum(x * x for x in s)
                v.append([n / (1 + n) / math.sqrt(n + eps) * x for x in s])
            for i, j in itertools.product(range(I), range(J)):
                b[i][j] += sum(image[i][j][d] * v[j][d] for d in range(D))
        capsules_of.append(v)
        coupling_of.append(c)
    return torch.tensor(capsules_of, dtype=torch.float64), torch.tensor(coupling_of, dtype=torch.float64)


@pytest.mark.parametrize("num_iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("leaky", [False, True])
def test_explicit_loops_agree(
    num_iterations: int, axis: Any, leaky: bool, votes: Tensor, bias: Tensor, prior: Tensor
) -> None:
    wanted = loops(votes, num_iterations, axis, bias, prior, leaky, eps=1e-3)
    got = dynamic_routing(
        votes,
        num_iterations,
        softmax_over=axis,
        bias=bias,
        prior=prior,
        leaky=leaky,
        eps=1e-3,
        return_coupling=True,
    )
    assert_close(got[0], wanted[0], 1e-12)
    assert_close(got[1], wanted[1], 1e-12)


def test_weighted_sum_by_explicit_loops_is_the_matrix_product(votes: Tensor) -> None:
    """The demonstration of the notebook: Σ_i c_ij û_j|i, element by element, and as one product."""
    capsules, coupling = dynamic_routing(votes, return_coupling=True)
    sums = torch.zeros(B, J, D, dtype=torch.float64)
    for b in range(B):
        for i in range(I):
            for j in range(J):
                for d in range(D):
                    sums[b, j, d] += coupling[b, i, j] * votes[b, i, j, d]
    product = coupling.permute(0, 2, 1)[:, :, None] @ votes.permute(0, 2, 1, 3)  # (B, J, 1, I) @ (B, J, I, D)
    assert_close(product.squeeze(2), sums, 1e-12)
    assert_close(squash(sums), capsules, 1e-12)


# ---- the options


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("num_iterations", [1, 3])
def test_coupling_sums_to_one_over_the_axis_of_competition(axis: Any, num_iterations: int, votes: Tensor) -> None:
    _, coupling = dynamic_routing(votes, num_iterations, softmax_over=axis, return_coupling=True)
    assert_sums_to_one(coupling, axis)
    assert (coupling > 0).all()


@pytest.mark.parametrize("axis", AXES)
def test_leaky_coupling_sums_to_less(axis: Any, votes: Tensor) -> None:
    _, coupling = dynamic_routing(votes, softmax_over=axis, leaky=True, return_coupling=True)
    sums = coupling.sum({"outputs": 2, "inputs": 1}[axis])
    assert (sums < 0.999).all()
    assert (sums > 0).all()


def test_the_axes_differ(votes: Tensor) -> None:
    over_outputs, over_inputs = (dynamic_routing(votes, softmax_over=axis) for axis in ("outputs", "inputs"))
    assert_differs(over_outputs, over_inputs)


@pytest.mark.parametrize("axis", AXES)
def test_one_iteration_is_uniform_unless_there_is_a_prior(axis: Any, votes: Tensor, prior: Tensor) -> None:
    _, coupling = dynamic_routing(votes, 1, softmax_over=axis, return_coupling=True)
    assert_close(coupling, 1 / J if axis == "outputs" else 1 / I)
    _, coupling = dynamic_routing(votes, 1, softmax_over=axis, prior=prior, return_coupling=True)
    assert_close(coupling, prior.softmax(1 if axis == "outputs" else 0).expand(B, I, J))


def test_more_iterations_sharpen_the_coupling(votes: Tensor) -> None:
    entropies = []
    for num_iterations in (1, 2, 3, 4):
        _, coupling = dynamic_routing(votes * 2, num_iterations, return_coupling=True)
        entropies.append(-(coupling * coupling.log()).sum(-1).mean().item())
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < entropies[0] - 0.1


def test_prior_learns_unless_gradients_stop(votes: Tensor, prior: Tensor) -> None:
    prior.requires_grad_()
    (gradient,) = torch.autograd.grad(dynamic_routing(votes, prior=prior).sum(), prior)
    assert gradient.count_nonzero() == I * J
    votes.requires_grad_()
    loss = dynamic_routing(votes, prior=prior, stop_gradient=True).sum()
    assert torch.autograd.grad(loss, prior, allow_unused=True) == (None,)


@pytest.mark.parametrize("axis", AXES)
def test_stop_gradient_is_a_constant_coupling(axis: Any, votes: Tensor, bias: Tensor, prior: Tensor) -> None:
    leaves = (votes.requires_grad_(), bias.requires_grad_())
    options: dict[str, Any] = {"softmax_over": axis, "bias": bias, "prior": prior, "return_coupling": True}
    full, coupling = dynamic_routing(votes, **options)
    stopped, _ = dynamic_routing(votes, stop_gradient=True, **options)
    constant = squash((coupling.detach()[..., None] * votes).sum(1) + bias)
    assert_close(stopped, full, 0)
    weights = torch.randn_like(full)
    gradients = [torch.autograd.grad((v * weights).sum(), leaves) for v in (full, stopped, constant)]
    for through_all, last_only, wanted in zip(*gradients, strict=True):
        assert_close(last_only, wanted, 1e-12)
        assert_differs(last_only, through_all)


@pytest.mark.parametrize("num_iterations", [0, 1, 3])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("coupling", [False, True])
def test_gradients_are_those_of_finite_differences(
    num_iterations: int, axis: Any, leaky: bool, extras: bool, coupling: bool, rng: torch.Generator
) -> None:
    shapes = [(2, 3, 2, 2), (2, 2), (3, 2)] if extras else [(2, 3, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=rng, requires_grad=True) for shape in shapes]

    def run(votes: Tensor, bias: Tensor | None = None, prior: Tensor | None = None) -> Any:
        return dynamic_routing(
            votes,
            num_iterations,
            softmax_over=axis,
            leaky=leaky,
            bias=bias,
            prior=prior,
            return_coupling=coupling,
        )

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("stop_gradient", [False, True])
def test_zero_votes_have_finite_gradients(axis: Any, stop_gradient: bool) -> None:
    votes = torch.zeros(2, 3, 4, 5, requires_grad=True)
    capsules = dynamic_routing(votes, softmax_over=axis, stop_gradient=stop_gradient)
    capsules.sum().backward()
    assert_close(capsules, 0.0)
    assert_finite([votes.grad])


@pytest.mark.parametrize("axis", AXES)
def test_huge_votes_stay_finite(axis: Any, votes: Tensor) -> None:
    huge = (votes.float() * 1e4).requires_grad_()
    capsules = dynamic_routing(huge, softmax_over=axis)
    capsules.sum().backward()
    assert_finite([capsules, huge.grad])


# ---- symmetries


@pytest.mark.parametrize("axis", AXES)
def test_order_of_capsules_does_not_matter(axis: Any, votes: Tensor, bias: Tensor, prior: Tensor) -> None:
    inputs, outputs = torch.randperm(I), torch.randperm(J)
    options: dict[str, Any] = {"softmax_over": axis, "return_coupling": True}
    capsules, coupling = dynamic_routing(votes, bias=bias, prior=prior, **options)
    permuted, permuted_coupling = dynamic_routing(
        votes[:, inputs][:, :, outputs], bias=bias[outputs], prior=prior[inputs][:, outputs], **options
    )
    assert_close(permuted, capsules[:, outputs], 1e-12)
    assert_close(permuted_coupling, coupling[:, inputs][:, :, outputs], 1e-12)


@pytest.mark.parametrize("axis", AXES)
def test_an_image_does_not_see_its_neighbours(axis: Any, votes: Tensor) -> None:
    assert_batch_independent(lambda batch: dynamic_routing(batch, softmax_over=axis), votes, 1e-12)


@pytest.mark.parametrize("axis", AXES)
def test_rotating_the_votes_rotates_the_capsules(axis: Any, votes: Tensor) -> None:
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64)
    turned = dynamic_routing(votes @ turn, softmax_over=axis)
    assert_close(turned, dynamic_routing(votes, softmax_over=axis) @ turn, 1e-12)


def test_an_empty_batch(votes: Tensor) -> None:
    assert dynamic_routing(votes[:0]).shape == (0, J, D)


# ---- precision and bad input


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, votes: Tensor, bias: Tensor, prior: Tensor) -> None:
    votes = votes.to(dtype)
    got = dynamic_routing(votes, bias=bias, prior=prior, return_coupling=True)
    wanted = dynamic_routing(votes.float(), bias=bias, prior=prior, return_coupling=True)
    for half, full in zip(got, wanted, strict=True):
        assert half.dtype == dtype
        assert_close(half, full.to(dtype), 0)


def test_float32_follows_float64(votes: Tensor) -> None:
    assert_close(dynamic_routing(votes.float()), dynamic_routing(votes).float(), 1e-6)


def test_autocast_does_not_reach_into_routing(votes: Tensor) -> None:
    votes = votes.float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = dynamic_routing(votes)
    assert inside.dtype == torch.float32
    assert_close(inside, dynamic_routing(votes), 0)


def test_bad_input(votes: Tensor) -> None:
    for number in (-1, 1.0, "3", True, None, 1001, 10**12, 10**5000):
        assert_raises(ValueError, dynamic_routing, votes, number, say="num_iterations must be an integer from 0")
    assert_raises(ValueError, dynamic_routing, votes, softmax_over="j", say='must be "outputs" or "inputs", got \'j\'')
    assert_raises(ValueError, dynamic_routing, votes, eps=0.0, say="eps must be positive")
    assert_raises(
        TypeError, dynamic_routing, votes.long(), say="votes must be a floating-point tensor, got torch.int64"
    )
    assert_raises(TypeError, dynamic_routing, votes.tolist(), say="votes must be a floating-point tensor, got list")
    assert_raises(ValueError, dynamic_routing, votes[0], say="votes must have shape (B, I, J, D), got (5, 4, 2)")
    assert_raises(ValueError, dynamic_routing, votes[:, :0], say="at least one capsule")
    assert_raises(ValueError, dynamic_routing, votes, bias=torch.ones(J), say="bias must have shape (4, 2), got (4,)")
    assert_raises(
        ValueError, dynamic_routing, votes, prior=torch.ones(J, I), say="prior must have shape (5, 4), got (4, 5)"
    )
    assert_raises(
        TypeError, dynamic_routing, votes, prior=torch.ones(I, J).long(), say="prior must be a floating-point"
    )
