"""Sums over votes with a ledger of gradients, and makers of votes, against PyTorch's own operations in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from routing_cases import random
from support import assert_close, assert_same, holds
from torchcaps.kernels.memory import Buffers
from torchcaps.kernels.mixtures.ledger import Ledger, Sums
from torchcaps.kernels.mixtures.makers import MAKERS, VoteFactors, inputs_first

B, I, J, D = 3, 5, 4, 6
Found = dict[str, Tensor]


def asked(votes: Tensor, shares: Tensor, other: Tensor, centre: Tensor, *, by_ledger: bool) -> Found:
    """Every sum of some votes, with shares that sum to one or to less, and the gradients of all they are made of."""
    leaves = {"shares": shares, "other": other, "centre": centre}
    leaves = {name: each.clone().requires_grad_() for name, each in leaves.items()}
    given = votes.clone().requires_grad_(not by_ledger)
    sums = Ledger(given, Buffers(given)) if by_ledger else Sums(given)
    shares, other, centre = leaves.values()
    whole, mass = sums.share_out(shares.log(), other[:, :1])
    mean, scatter = sums.moments(whole)
    far = sums.log_densities(mean.sum(2), 1 / (scatter + 0.1), mean)
    less = other * far.sigmoid() / (1 + other.sum(2, keepdim=True))
    moved, about = sums.moments(less, centre, momentum=0.1)
    results = {"mass": mass, "mean": mean, "scatter": scatter, "far": far, "moved": moved, "about": about}
    results["end"] = sums.log_densities(about.sum(2), about.exp(), centre)
    total = sum((each * random(*each.shape).to(each)).sum() for each in results.values())
    assert isinstance(total, Tensor)
    wanted = list(leaves.values()) if by_ledger else [*leaves.values(), given]
    grads = list(torch.autograd.grad(total, wanted))
    if isinstance(sums, Ledger):
        with torch.no_grad():
            grads.append(sums.gradient())
    return {name: each.detach() for name, each in results.items()} | dict(
        zip([*(f"d {name}" for name in leaves), "d votes"], grads, strict=True)
    )


def drawn(dtype: torch.dtype = torch.float64, outputs: int = J) -> list[Tensor]:
    given = random(B, J, D, I), random(B, outputs, I, seed=1).sigmoid(), random(B, outputs, I, seed=2).sigmoid()
    return [each.to(dtype) for each in (*given, random(B, J, D, seed=3))]


@pytest.mark.parametrize("outputs", [J, 1])  # 1: the same shares for all outputs
def test_a_ledger_gives_the_sums_and_the_gradients_of_plain_operations(outputs: int) -> None:
    wanted = asked(*drawn(outputs=outputs), by_ledger=False)
    assert_same(asked(*drawn(outputs=outputs), by_ledger=True), wanted, 1e-10)


def test_without_gradients_a_ledger_gives_the_sums_alone() -> None:
    votes, shares, _, centre = drawn()
    ledger, plain = Ledger(votes, Buffers(votes)), Sums(votes)
    for got, wanted in zip(ledger.moments(shares, centre, 0.3), plain.moments(shares, centre, 0.3), strict=True):
        assert_close(got, wanted, 1e-12)
    given = centre.sum(2), centre.exp(), centre
    assert_close(ledger.log_densities(*given), plain.log_densities(*given), 1e-12)
    assert_close(ledger.squares(centre + 1), (votes - centre.unsqueeze(3) - 1).square().flatten(0, 1), 1e-12)


def test_no_share_or_gradient_is_denormal() -> None:
    """Products with denormal numbers would take a hundred times as long."""
    votes, _, _, centre = drawn(torch.float32)
    ledger, plain = Ledger(votes, Buffers(votes)), Sums(votes)
    logs = torch.linspace(-200, 0, B * J * I).view(B, J, I)
    active = torch.ones(B, 1, I)
    active[:, :, 0] = 0
    for got, wanted in zip(ledger.share_out(logs, active), plain.share_out(logs, active), strict=True):
        assert_close(got, wanted, 1e-6)
    shares, _ = ledger.share_out(logs, active)
    assert (shares[:, :, 0] == 0).all()
    assert shares[:, :, 1:].min() > 1e-32
    densities = ledger.log_densities(centre.sum(2).requires_grad_(), centre.exp(), centre)
    densities.backward(logs.exp())
    for pairs, *_ in ledger._noted:
        assert ((pairs == 0) | (pairs > 1e-31)).all()


def test_noted_twice_is_counted_twice() -> None:
    """So that the assertions above do not pass for a ledger that forgets."""
    votes, shares, _, centre = drawn()
    ledger = Ledger(votes, Buffers(votes))
    ledger.note(shares, centre, torch.zeros_like(centre))
    once = ledger.gradient().clone()
    ledger.note(shares, centre, centre)
    wanted = once + centre.unsqueeze(3) * shares.unsqueeze(2) * (1 + votes)
    assert_close(ledger.gradient(), wanted, 1e-12)
    assert not holds(assert_close, ledger.gradient(), once, 1e-3)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 6, 1), (3, 37, 50), (2, 256, 72), (0, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_capsules_come_first(
    shape: tuple[int, int, int], dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numbers = random(*shape).to(dtype)
    found = inputs_first(numbers)
    assert found.stride(2) == 1 or found.is_contiguous(), "a product of matrices would copy it"
    assert torch.equal(found, numbers.permute(2, 0, 1))


# ---- makers

KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "built": ((B, I, J, D), None),
    "dense": ((B, I, 3), (I, J, D, 3)),
    "matrix": ((B, I, 9), (I, J, 3, 3)),
    "shared": ((B, I, 3), (J, D, 3)),
}
"""Shapes of poses and weight of each kind."""


def factors_of(kind: Any, bias: tuple[int, ...] | None) -> VoteFactors:
    poses, weight = KINDS[kind]
    drawn = [None if shape is None else random(*shape, seed=n) for n, shape in enumerate((poses, weight, bias))]
    if drawn[1] is not None:  # in memory as layers keep them
        drawn[1] = drawn[1].movedim(0, -1).contiguous().movedim(-1, 0)
    assert drawn[0] is not None
    return VoteFactors(kind, *drawn)


def test_every_maker_is_here() -> None:
    assert KINDS.keys() == MAKERS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_maker_makes_what_is_built_and_gives_its_gradients(kind: Any) -> None:
    size = factors_of(kind, None).size[2:]
    for bias, wanted in itertools.product(
        (None, (I, *size), (I, 1, size[1]), (1, *size)), ((1, 1, 1), (0, 1, 0), (1, 0, 1))
    ):
        factors = factors_of(kind, bias)
        leaves = [each for each in factors[1:] if isinstance(each, Tensor)]
        for each in leaves:
            each.requires_grad_()
        votes = factors.build()
        gradient = random(*votes.shape, seed=9)
        exact = iter(torch.autograd.grad(votes, leaves, gradient))
        found = [None if each is None else next(exact) for each in factors[1:]]
        with torch.no_grad():
            maker = MAKERS[kind](factors, tuple(map(bool, wanted)))  # type: ignore[arg-type]
            for rows in (slice(0, 2), slice(2, B)):
                assert_close(maker.make(rows), votes[rows], 1e-12)
                maker.add_gradient(rows, gradient[rows].clone())
        for got, want, right in zip(maker.gradients(), wanted, found, strict=True):
            if want and right is not None:
                assert got is not None
                assert got.shape == right.shape
                assert_close(got, right, 1e-10)
            else:
                assert got is None
