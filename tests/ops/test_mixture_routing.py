"""The routing algorithms of the field: their numbers, and the properties that each of them has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import torchcaps
from ops import mixture_oracle as oracle
from torchcaps.ops.vb_routing import digamma
from torchcaps.ops.votes import in_blocks

Routed = tuple[Tensor, ...]
SIZES = ((3, 7, 5, 4), (1, 2, 3, 1), (2, 1, 4, 6), (2, 9, 1, 16))


@dataclass(frozen=True)
class Algorithm:
    """One of them: poses, activations where there are some, coupling; of votes, activations and three (J)."""

    route: Callable[[Tensor, Tensor, Tensor, Tensor, int], Routed]
    oracle: Callable[[oracle.Array, oracle.Array, oracle.Array, oracle.Array, int], tuple[oracle.Array, ...]]
    iterates: bool = True
    weighs: bool = True
    """Whether activations of the input capsules count."""
    averages: bool = True
    """Whether copying each input capsule leaves poses unchanged at the first iteration."""


def logits_of(votes: Tensor) -> Tensor:
    return votes.sum(3).sin()


ALGORITHMS = {
    "self-attention": Algorithm(
        lambda V, a, u, b, n: torchcaps.self_attention_routing(V, bias=a[0][:, None] * u, return_coupling=True),
        lambda V, a, u, b, n: oracle.self_attention(V, a[:, None] * u),
        iterates=False,
        weighs=False,
        averages=False,
    ),
    "inverted-attention": Algorithm(
        lambda V, a, u, b, n: torchcaps.inverted_attention_routing(
            V, n, norm_weight=u[:1].expand(V.shape[3]), norm_bias=b[:1].expand(V.shape[3]), return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.inverted_attention(V, n, u[0], b[0], 1e-5),
        weighs=False,
        averages=False,
    ),
    "self-routing": Algorithm(
        lambda V, a, u, b, n: torchcaps.self_routing(V, a, logits_of(V), return_coupling=True),
        lambda V, a, u, b, n: oracle.self_routing(V, a, np.sin(V.sum(2))),
        iterates=False,
    ),
    "em": Algorithm(
        lambda V, a, u, b, n: torchcaps.em_routing(V, a, u, b, n, final_lambda=0.5, return_coupling=True),
        lambda V, a, u, b, n: oracle.em(V, a, u, b, n, 0.5, 1.0),
    ),
    "em, costs scaled": Algorithm(
        lambda V, a, u, b, n: torchcaps.em_routing(V, a, u, b, n, cost_scale=7.0, return_coupling=True),
        lambda V, a, u, b, n: oracle.em(V, a, u, b, n, 0.01, 7.0),
    ),
    "em-code": Algorithm(
        lambda V, a, u, b, n: torchcaps.em_routing_code(V, a, u, b / 100, n, return_coupling=True),
        lambda V, a, u, b, n: oracle.em_code(V, a, u, b / 100, n, 0.01, 0.0005),
        averages=False,
    ),
    "vb": Algorithm(
        lambda V, a, u, b, n: torchcaps.vb_routing(V, a, u, b, n, return_coupling=True),
        lambda V, a, u, b, n: oracle.vb(V, a, u, b, n),
        averages=False,
    ),
}
ITERATING = [name for name, each in ALGORITHMS.items() if each.iterates]
WEIGHING = [name for name, each in ALGORITHMS.items() if each.weighs]
AVERAGING = [name for name, each in ALGORITHMS.items() if each.averages]
every = pytest.mark.parametrize("name", ALGORITHMS)


def inputs(B: int = 3, I: int = 7, J: int = 5, D: int = 4, *, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Votes, activations and two learned numbers of each output capsule."""
    random = torch.Generator().manual_seed(seed)
    votes = scale * torch.randn(B, I, J, D, generator=random, dtype=torch.float64)
    activations = torch.rand(B, I, generator=random, dtype=torch.float64)
    return [votes, activations, *torch.randn(2, J, generator=random, dtype=torch.float64)]


@every
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_numbers_are_those_of_the_equations(
    name: str, sizes: tuple[int, int, int, int], iterations: int, scale: float
) -> None:
    algorithm, given = ALGORITHMS[name], inputs(*sizes, scale=scale)
    routed = algorithm.route(*given, iterations)
    V, a, u, b = (tensor.numpy() for tensor in given)
    if name == "self-attention":
        a = np.broadcast_to(a[0], a.shape)  # its bias, which is the same in all images
    for image in range(sizes[0]):
        for got, wanted in zip(routed, algorithm.oracle(V[image], a[image], u, b, iterations), strict=True):
            torch.testing.assert_close(got[image], torch.as_tensor(wanted), rtol=1e-9, atol=1e-12)


@every
def test_float32_agrees_with_float64(name: str) -> None:
    given = inputs(4, 33, 6, 16)
    double = ALGORITHMS[name].route(*given, 3)
    single = ALGORITHMS[name].route(*(tensor.float() for tensor in given), 3)
    for got, wanted in zip(single, double, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    given = [tensor.to(dtype) for tensor in inputs()]
    single = ALGORITHMS[name].route(*(tensor.float() for tensor in given), 2)
    if name == "self-attention":  # whose bias is computed from these in the test
        given[2:] = [tensor.float() for tensor in given[2:]]
        given[1] = given[1].float()
    for got, wanted in zip(ALGORITHMS[name].route(*given, 2), single, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted.to(dtype), rtol=1e-2, atol=1e-2)


@every
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    given = [tensor.requires_grad_() for tensor in inputs(2, 3, 2, 3)]

    def route(*tensors: Tensor) -> Routed:
        return ALGORITHMS[name].route(*tensors, 3)  # type: ignore[arg-type]  # four of them

    torch.autograd.gradcheck(route, given)
    if name in ("self-attention", "self-routing", "em", "vb"):
        torch.autograd.gradgradcheck(route, given)


@every
def test_gradients_of_each_image_by_vmap(name: str) -> None:
    votes, activations, u, b = inputs(2, 3, 2, 3)

    def loss(votes: Tensor, u: Tensor) -> Tensor:
        routed = ALGORITHMS[name].route(votes[None], activations[:1], u, b, 2)
        return torch.stack([(each * each.sin()).sum() for each in routed]).sum() + u.square().sum()

    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(votes, u)
    for n, image in enumerate(votes):
        leaves = image.clone().requires_grad_(), u.clone().requires_grad_()
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close(tuple(gradient[n] for gradient in each), wanted)


@every
def test_order_of_input_capsules_only_reorders_the_coupling(name: str) -> None:
    V, a, u, b = inputs(1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    *wanted, coupling = ALGORITHMS[name].route(V, a, u, b, 3)
    *got, moved = ALGORITHMS[name].route(V[:, order], a[:, order], u, b, 3)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(moved, coupling[:, order])


@every
def test_order_of_output_capsules_reorders_all(name: str) -> None:
    V, a, u, b = inputs(1)
    if name == "inverted-attention":
        u, b = torch.ones_like(u), torch.zeros_like(b)  # of the normalisation here, not of the output capsules
    order = torch.tensor([3, 0, 1, 4, 2])
    wanted = ALGORITHMS[name].route(V, a, u, b, 3)
    got = ALGORITHMS[name].route(V[:, :, order], a, u[order], b[order], 3)
    for one, other in zip(got[:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(one, other[:, order])
    torch.testing.assert_close(got[-1], wanted[-1][..., order])


@pytest.mark.parametrize("name", AVERAGING)
def test_copies_of_all_input_capsules_leave_means_as_they_are(name: str) -> None:
    V, a, u, b = inputs()
    iterations = 1 if name.startswith("em") else 3  # costs grow with the number of input capsules, means do not
    wanted = ALGORITHMS[name].route(V, a, u, b, iterations)[0]
    got = ALGORITHMS[name].route(V.repeat(1, 2, 1, 1), a.repeat(1, 2), u, b, iterations)[0]
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", WEIGHING)
def test_input_capsules_that_are_not_active_change_nothing(name: str) -> None:
    V, a, u, b = inputs()
    a[:, 2] = 0
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    *got, coupling = ALGORITHMS[name].route(V, a, u, b, 3)
    *wanted, others = ALGORITHMS[name].route(V[:, kept], a[:, kept], u, b, 3)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(coupling[:, kept], others)


CASES = {
    "votes of zero": lambda V, a: (0 * V, a),
    "votes times 50": lambda V, a: (50 * V, a),
    "votes of 1e-20": lambda V, a: (1e-20 * V, a),
    "votes that are all equal": lambda V, a: (torch.ones_like(V), a),
    "nothing active": lambda V, a: (V, 0 * a),
    "activations of 1e-30": lambda V, a: (V, 1e-30 * a),
    "everything active": lambda V, a: (V, torch.ones_like(a)),
    "one image of zeros": lambda V, a: (V * torch.tensor([0.0, 1.0, 1.0])[:, None, None, None], a),
}


@every
@pytest.mark.parametrize("case", CASES)
def test_numbers_and_gradients_are_finite(name: str, case: str) -> None:
    V, a, u, b = (tensor.float() for tensor in inputs(3, 9, 5, 16, scale=1.2))
    leaves = [tensor.clone().requires_grad_() for tensor in (*CASES[case](V, a), u, b)]
    routed = ALGORITHMS[name].route(*leaves, 3)  # type: ignore[arg-type]  # four of them
    for tensor in routed:
        assert tensor.isfinite().all()
    gradients = torch.autograd.grad([each.sum() for each in routed], leaves, allow_unused=True)
    for gradient in gradients:
        assert gradient is None or gradient.isfinite().all()


def test_a_coupling_below_the_precision_still_gives_the_mean() -> None:
    """Far votes have couplings of 1e-300 and less, which float32 does not know; their mean exists all the same."""
    V, a, u, b = inputs(1, 5, 2, 8, scale=30.0)
    double = torchcaps.em_routing(V, a, u, b, 3)[0]
    single = torchcaps.em_routing(*(tensor.float() for tensor in (V, a, u, b)), 3)[0]
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


@every
def test_coupling_sums_to_one_over_the_outputs(name: str) -> None:
    V, a, u, b = inputs()
    coupling = ALGORITHMS[name].route(V, a, 0 * u if name == "self-attention" else u, b, 3)[-1]
    torch.testing.assert_close(coupling.sum(2), torch.ones(3, 7, dtype=torch.float64))


@pytest.mark.parametrize("name", ITERATING)
def test_the_first_coupling_is_uniform(name: str) -> None:
    coupling = ALGORITHMS[name].route(*inputs(), 1)[-1]
    torch.testing.assert_close(coupling, torch.full((3, 7, 5), 0.2, dtype=torch.float64))


def test_self_routing_of_equal_logits_is_uniform() -> None:
    V, a, _, _ = inputs()
    poses, activations, coupling = torchcaps.self_routing(V, a, torch.zeros(3, 7, 5).double(), return_coupling=True)
    assert (coupling == 0.2).all()
    torch.testing.assert_close(activations, torch.full_like(activations, 0.2))
    torch.testing.assert_close(poses, torch.einsum("bi,bijd->bjd", a / a.sum(1, keepdim=True), V))


def test_em_of_equal_votes_has_the_smallest_variance_and_the_vote_as_mean() -> None:
    _, a, u, b = inputs()
    V = torch.arange(1.0, 21.0, dtype=torch.float64).reshape(1, 1, 5, 4).expand(3, 7, 5, 4).clone().requires_grad_()
    poses, activations = torchcaps.em_routing(V, a, u, b, 1, final_lambda=0.1)
    torch.testing.assert_close(poses, V[:, 0])
    costs = a.sum(1, keepdim=True) / 5 * 4 * (u + 0.5 * np.log(1e-9))
    torch.testing.assert_close(activations, torch.sigmoid(0.1 * 0.05 * (b - costs)))
    gradient = torch.autograd.grad((poses.sum() + activations.sum()), V)[0]
    assert gradient.isfinite().all()


def test_without_the_coupling_the_rest_is_the_same() -> None:
    V, a, u, b = inputs()
    with_it = torchcaps.self_attention_routing(V, return_coupling=True)[0]
    assert torch.equal(torchcaps.self_attention_routing(V), with_it)
    with_it = torchcaps.inverted_attention_routing(V, return_coupling=True)[0]
    assert torch.equal(torchcaps.inverted_attention_routing(V), with_it)
    for route in (torchcaps.em_routing, torchcaps.em_routing_code, torchcaps.vb_routing):
        *both, _ = route(V, a, u, b, return_coupling=True)
        for one, other in zip(route(V, a, u, b), both, strict=True):
            assert torch.equal(one, other)
    *both, _ = torchcaps.self_routing(V, a, logits_of(V), return_coupling=True)
    for one, other in zip(torchcaps.self_routing(V, a, logits_of(V)), both, strict=True):
        assert torch.equal(one, other)


# ---- some images at a time


@pytest.mark.parametrize("name", ["em", "em-code", "vb"])
def test_blocks_give_what_all_images_at_once_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [tensor.requires_grad_() for tensor in inputs(5)]
    wanted = ALGORITHMS[name].route(*given, 3)  # type: ignore[arg-type]  # four of them
    wanted_gradients = torch.autograd.grad([(each * each.sin()).sum() for each in wanted], given)
    monkeypatch.setattr("torchcaps.ops.votes.BLOCK", 2 * given[0][0].nbytes)
    got = ALGORITHMS[name].route(*given, 3)  # type: ignore[arg-type]
    assert type(got[0].grad_fn).__name__ != type(wanted[0].grad_fn).__name__ or "Block" in str(got[0].grad_fn)
    gradients = torch.autograd.grad([(each * each.sin()).sum() for each in got], given)
    torch.testing.assert_close((*got, *gradients), (*wanted, *wanted_gradients))


def test_a_block_holds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def work(votes: Tensor, factor: Tensor) -> tuple[Tensor]:
        seen.append(len(votes))
        return (votes.sum(1) * factor,)

    monkeypatch.setattr("torchcaps.ops.votes.BLOCK", 3 * 8 * 10)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    votes, factor = torch.randn(8, 10, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    with torch.no_grad():
        (total,) = in_blocks(work, (votes,), (factor,), 10)
        assert seen == [3, 3, 2]
        torch.testing.assert_close(total, votes.sum(1))
        seen.clear()
        in_blocks(work, (votes,), (factor,), 10, multiple=2)
        assert seen == [2, 2, 2, 2]
        seen.clear()
        monkeypatch.setattr("torch.get_num_threads", lambda: 2)  # each has caches of its own
        in_blocks(work, (votes,), (factor,), 10)
        assert seen == [6, 2]
        seen.clear()
        in_blocks(work, (votes.to("meta"),), (factor.to("meta"),), 10)  # as on a GPU, which has other caches
    assert seen == [8]


# ---- what does not fit


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"votes": torch.zeros(2, 3, 4)}, r"votes must have shape \(B, I, J, D\), got \(2, 3, 4\)"),
        ({"votes": [[1.0]]}, "votes must be a floating-point tensor, got list"),
        ({"activations": torch.zeros(2, 4)}, r"activations must have shape \(2, 3\), got \(2, 4\)"),
        ({"beta_u": torch.zeros(3)}, r"beta_u must have shape \(4,\), got \(3,\)"),
        ({"beta_a": torch.zeros(4, dtype=torch.int64)}, "beta_a must be a floating-point tensor, got torch.int64"),
        ({"num_iterations": 0}, "num_iterations must be an integer from 1 to 1000, got 0"),
        ({"num_iterations": True}, "num_iterations must be an integer from 1 to 1000, got True"),
        ({"final_lambda": 0.0}, "final_lambda must be positive and finite, got 0.0"),
        ({"cost_scale": float("nan")}, "cost_scale must be positive and finite, got nan"),
        ({"return_coupling": 1}, "return_coupling must be True or False, got int"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, object], message: str) -> None:
    given = {
        "votes": torch.zeros(2, 3, 4, 5),
        "activations": torch.zeros(2, 3),
        "beta_u": torch.zeros(4),
        "beta_a": torch.zeros(4),
    }
    with pytest.raises((TypeError, ValueError), match=f"^em_routing: {message}"):
        torchcaps.em_routing(**(given | changed))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda V: torchcaps.self_attention_routing(V, bias=torch.zeros(4, 3)), r"bias must have shape \(3, 4\)"),
        (lambda V: torchcaps.inverted_attention_routing(V, 0), "num_iterations must be an integer from 1 to 1000"),
        (lambda V: torchcaps.inverted_attention_routing(V, eps=0.0), "eps must be positive"),
        (
            lambda V: torchcaps.inverted_attention_routing(V, norm_weight=torch.ones(4)),
            r"norm_weight must have shape \(5,\), got \(4,\)",
        ),
        (
            lambda V: torchcaps.self_routing(V, torch.zeros(2, 3), torch.zeros(3, 4)),
            r"routing_logits must have shape \(2, 3, 4\), got \(3, 4\)",
        ),
        (
            lambda V: torchcaps.em_routing_code(V, torch.zeros(2, 3), torch.zeros(4), torch.zeros(4), min_variance=0.0),
            "min_variance must be positive",
        ),
        (lambda V: torchcaps.vb_routing(V, torch.zeros(2, 3), torch.zeros(4), torch.zeros(4), 1001), "from 1 to 1000"),
    ],
)
def test_arguments_of_the_others_too(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3, 4, 5))


def test_no_images_at_all() -> None:
    for algorithm in ("em", "em-code", "vb", "self-routing", "inverted-attention"):
        poses, *_ = ALGORITHMS[algorithm].route(torch.zeros(0, 3, 4, 5), torch.zeros(0, 3), *torch.zeros(2, 4), 2)
        assert poses.shape == (0, 4, 5)


def test_digamma_of_exported_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.linspace(1, 20, 50), torch.tensor([1e3, 1e6])]).double()
    wanted = torch.digamma(x)
    assert torch.equal(digamma(x), wanted)
    monkeypatch.setattr("torchcaps.ops.vb_routing.is_exporting", lambda: True)
    torch.testing.assert_close(digamma(x), wanted, rtol=1e-9, atol=1e-9)
