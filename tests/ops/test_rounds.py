"""Every number of each routing iteration: worked by hand, and together what ``dynamic_routing`` computes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_close, assert_raises
from torchcaps import dynamic_routing, routing_rounds

AXES = ("outputs", "inputs")

# Three input capsules, two output capsules, two components: the votes of docs/routing.md.
VOTES = torch.tensor(
    [[[[1, 0], [0, 1]], [[1, 0], [0, -1]], [[-1, 0], [0, 2]]]],
    dtype=torch.float64,
)


def squashed(length: float) -> float:
    return length**2 / (1 + length**2)


def test_the_first_round_by_hand() -> None:
    # c = 1/2:  s_0 = (1 + 1 - 1)/2 = 1/2, v_0 = (1/4)/(5/4) = 1/5;  s_1 = (1 - 1 + 2)/2 = 1, v_1 = 1/2
    (first,) = routing_rounds(VOTES, 1, eps=1e-30)
    assert torch.equal(first.logits, torch.zeros(1, 3, 2, dtype=torch.float64))
    assert_close(first.coupling, 0.5, 1e-12)
    assert_close(first.weighted_sum, [[[0.5, 0.0], [0.0, 1.0]]], 1e-12)
    assert_close(first.capsules, [[[0.2, 0.0], [0.0, 0.5]]], 1e-12)
    assert_close(first.agreement, [[[0.2, 0.5], [0.2, -0.5], [-0.2, 1.0]]], 1e-12)


def test_the_second_round_by_hand() -> None:
    # of two outputs, the first gets 1/(1 + e^(b_i1 - b_i0)) of input i
    shares = [1 / (1 + math.exp(second - first)) for first, second in ((0.2, 0.5), (0.2, -0.5), (-0.2, 1.0))]
    s_0 = shares[0] + shares[1] - shares[2]
    s_1 = (1 - shares[0]) - (1 - shares[1]) + 2 * (1 - shares[2])
    v_0, v_1 = squashed(s_0), squashed(s_1)
    _, second = routing_rounds(VOTES, 2, eps=1e-30)
    assert_close(second.coupling[0, :, 0], shares, 1e-12)
    assert_close(second.coupling[0, :, 1], [1 - share for share in shares], 1e-12)
    assert_close(second.weighted_sum, [[[s_0, 0.0], [0.0, s_1]]], 1e-12)
    assert_close(second.capsules, [[[v_0, 0.0], [0.0, v_1]]], 1e-12)
    assert_close(second.agreement, [[[v_0, v_1], [v_0, -v_1], [-v_0, 2 * v_1]]], 1e-12)
    assert_close(second.capsules[0, 0, 0], 0.4265, 1e-4)
    assert_close(second.capsules[0, 1, 1], 0.7600, 1e-4)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_a_round_ends_where_routing_of_so_many_iterations_does(
    axis: Any, leaky: bool, extras: bool, rng: torch.Generator
) -> None:
    votes = torch.randn(3, 5, 4, 2, dtype=torch.float64, generator=rng)
    options: dict[str, Any] = {"softmax_over": axis, "leaky": leaky, "eps": 1e-3}
    prior = torch.zeros(5, 4, dtype=torch.float64)
    if extras:
        prior = torch.randn(5, 4, dtype=torch.float64, generator=rng)
        options |= {"bias": torch.randn(4, 2, dtype=torch.float64, generator=rng), "prior": prior}
    rounds = routing_rounds(votes, 4, **options)
    assert len(rounds) == 4
    assert_close(rounds[0].logits, prior.expand(3, 5, 4), 1e-12)
    for number, each in enumerate(rounds, 1):
        capsules, coupling = dynamic_routing(votes, number, return_coupling=True, **options)
        assert_close(each.capsules, capsules, 1e-12)
        assert_close(each.coupling, coupling, 1e-12)
        assert_close(each.weighted_sum, (coupling[..., None] * votes).sum(1) + options.get("bias", 0), 1e-12)
        assert_close(each.agreement, (votes * capsules[:, None]).sum(-1), 1e-12)
    for before, after in itertools.pairwise(rounds):
        assert_close(after.logits, before.logits + before.agreement, 1e-12)


def test_no_routing_has_no_round() -> None:
    assert routing_rounds(VOTES, 0) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_followed_in_float32(dtype: torch.dtype) -> None:
    half, full = (routing_rounds(VOTES.to(number)) for number in (dtype, torch.float32))
    for got, wanted in zip(half, full, strict=True):
        for each, other in zip(got[:5], wanted[:5], strict=True):
            assert each.dtype == torch.float32
            assert torch.equal(each, other)  # these votes are whole numbers


def test_bad_input(rng: torch.Generator) -> None:
    votes: Tensor = torch.randn(2, 5, 4, 3, generator=rng)
    assert_raises(TypeError, routing_rounds, votes.long(), say="routing_rounds: votes must be a floating-point tensor")
    assert_raises(TypeError, routing_rounds, [[1.0]], say="routing_rounds: votes must be a floating-point tensor, got")
    assert_raises(ValueError, routing_rounds, votes[0], say="routing_rounds: votes must have shape (B, I, J, D)")
    assert_raises(ValueError, routing_rounds, votes, -1, say="routing_rounds: num_iterations must be an integer")
    assert_raises(ValueError, routing_rounds, votes, softmax_over="rows", say='must be "outputs" or "inputs"')
    assert_raises(ValueError, routing_rounds, votes, bias=torch.ones(4, 4), say="routing_rounds: bias must have shape")
    assert_raises(ValueError, routing_rounds, votes, prior=torch.ones(4, 4), say="prior must have shape (5, 4)")
