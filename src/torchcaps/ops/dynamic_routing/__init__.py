"""Dynamic routing between capsules, from votes (``dynamic_routing``) or from poses and weights (``route``).

The equations are in :mod:`~torchcaps.ops.dynamic_routing.reference`. The other files compute the same numbers faster.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_choice, is_exporting
from torchcaps.ops.dynamic_routing.checks import check_options, check_route, check_votes
from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute import route_recompute
from torchcaps.ops.dynamic_routing.reference import RoutingRound, compute_votes, route_votes

SoftmaxOver = Literal["outputs", "inputs"]
"""The axis on which capsules compete."""
Backend = Literal["auto", "reference", "recompute"]
"""How votes are routed; see :func:`route`."""
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "recompute")
"""All of them."""

__all__ = [
    "BACKENDS",
    "Backend",
    "RoutingRound",
    "SoftmaxOver",
    "compute_votes",
    "dynamic_routing",
    "route",
    "routing_rounds",
]


class RoutingOptions(TypedDict, total=False):
    """The options of :func:`dynamic_routing` that do not change what it returns."""

    softmax_over: SoftmaxOver
    stop_gradient: bool
    bias: Float[Tensor, "J D"] | None
    prior: Float[Tensor, "I J"] | None
    leaky: bool
    eps: float


class RouteOptions(RoutingOptions, total=False):
    """Those of :func:`route`."""

    backend: Backend


@overload
def dynamic_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[False] = False,
    **options: Unpack[RoutingOptions],
) -> Float[Tensor, "B J D"]: ...


@overload
def dynamic_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[True],
    **options: Unpack[RoutingOptions],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]: ...


def dynamic_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 3,
    *,
    softmax_over: SoftmaxOver = "outputs",
    stop_gradient: bool = False,
    bias: Float[Tensor, "J D"] | None = None,
    prior: Float[Tensor, "I J"] | None = None,
    leaky: bool = False,
    eps: float = 1e-7,
    return_coupling: bool = False,
) -> Float[Tensor, "B J D"] | tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Routing by agreement: each input capsule sends its vote to the outputs that agree with it.

        b_ij ← prior_ij (or 0)
        repeat num_iterations times:
            c_ij = softmax(b_ij)                      over j ("outputs") or over i ("inputs")
            v_j  = squash(Σ_i c_ij û_j|i + bias_j)
            b_ij ← b_ij + ⟨û_j|i, v_j⟩                (not after the last time)

    Args:
        votes: û_j|i = W_ij u_i, the prediction of input capsule i for output capsule j.
        num_iterations: How many times the coupling is computed, 0 to 1,000. 1 is uniform coupling (or the prior's). 0
            is no routing at all: the plain sum of the votes (plus bias), not squashed, with a coupling of ones.
        softmax_over: The axis on which capsules compete. ``"outputs"``, as in the paper: each input capsule shares
            itself out among the outputs. ``"inputs"``, as in several well-known implementations: each output capsule
            shares its attention out among the inputs.
        stop_gradient: Let gradients flow through the last weighted sum only: the coupling is a constant, so a learned
            prior gets no gradient.
        bias: Added before the squash.
        prior: Start of the routing logits; may be learned.
        leaky: Add a "none of the above" competitor with logit 0 to the softmax, so that coupling sums to less than 1.
        eps: The squash's epsilon.
        return_coupling: Also return the coupling of the last iteration.

    Returns:
        Output capsules v_j, lengths in [0, 1), in the dtype of ``votes`` (half precision is computed in float32);
        with ``return_coupling`` also c_ij.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: A shape, device or option that does not fit; the message names it.

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829); bias and leaky from the authors' released
    code. b starts at zero in the paper's experiments; a learned prior is mentioned in its section 2.
    """
    flags = {"stop_gradient": stop_gradient, "leaky": leaky, "return_coupling": return_coupling}
    check_options("dynamic_routing", num_iterations, softmax_over, eps, **flags)
    check_votes("dynamic_routing", votes, bias=bias, prior=prior)
    capsules, coupling = route_votes(votes, num_iterations, softmax_over, stop_gradient, bias, prior, leaky, eps)
    return (capsules, coupling) if return_coupling else capsules


def routing_rounds(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 3,
    *,
    softmax_over: SoftmaxOver = "outputs",
    bias: Float[Tensor, "J D"] | None = None,
    prior: Float[Tensor, "I J"] | None = None,
    leaky: bool = False,
    eps: float = 1e-7,
) -> list[RoutingRound]:
    """Every number of each iteration of :func:`dynamic_routing`, to be followed with a pencil.

    The arguments are those of :func:`dynamic_routing`, and so are the errors raised.

    Returns:
        The rounds 1, 2, ... of routing, as many as ``num_iterations``: logits, coupling and agreement (B, I, J),
        weighted sums and capsules (B, J, D), in the dtype of ``votes`` (half precision is computed, and returned, in
        float32). The numbers kept are 3·B·I·J + 2·B·J·D an iteration.

    Example:
        Three input capsules vote for one output capsule of one component; only the last one disagrees.

        >>> import torch
        >>> from torchcaps import routing_rounds
        >>> votes = torch.tensor([1.0, 1.0, -1.0]).reshape(1, 3, 1, 1)
        >>> first, second = routing_rounds(votes, 2, softmax_over="inputs")
        >>> round(first.weighted_sum.item(), 4), round(first.capsules.item(), 4)  # 1/3, and (1/9) / (1 + 1/9)
        (0.3333, 0.1)
        >>> torch.equal(second.logits, first.agreement)
        True

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829).
    """
    check_options("routing_rounds", num_iterations, softmax_over, eps, leaky=leaky)
    check_votes("routing_rounds", votes, bias=bias, prior=prior)
    rounds: list[RoutingRound] = []
    route_votes(votes, num_iterations, softmax_over, False, bias, prior, leaky, eps, rounds)
    return rounds


@overload
def route(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[False] = False,
    **options: Unpack[RouteOptions],
) -> Float[Tensor, "B J D"]: ...


@overload
def route(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[True],
    **options: Unpack[RouteOptions],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]: ...


def route(  # noqa: D417  the other arguments are dynamic_routing's
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    num_iterations: int = 3,
    *,
    softmax_over: SoftmaxOver = "outputs",
    stop_gradient: bool = False,
    bias: Float[Tensor, "J D"] | None = None,
    prior: Float[Tensor, "I J"] | None = None,
    leaky: bool = False,
    eps: float = 1e-7,
    return_coupling: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "B J D"] | tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Routing by agreement from poses and transformation matrices, without storing the votes.

    The result of ``dynamic_routing(compute_votes(poses, weight), ...)``; the votes, B·I·J·D numbers, are not built, but
    for those of very few images, which stay in the processor's caches, and with a ``prior``. The options of
    :func:`dynamic_routing`, its results and the errors that it raises are those of ``route`` too.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij. Fastest when its memory is laid out as (J, D, K, I), as
            :class:`torchcaps.nn.DenseCapsules` keeps it.
        backend: ``"reference"`` builds the votes and follows the equations, and can be differentiated any number of
            times. ``"recompute"`` does without them, on any device, within :func:`set_working_memory`; it can be
            differentiated once, and has no ``prior``. ``"auto"`` takes recompute; with a ``prior``, and while a model
            is being exported, the reference, which is made of torch's own operations.
    """
    flags = {"stop_gradient": stop_gradient, "leaky": leaky, "return_coupling": return_coupling}
    check_options("route", num_iterations, softmax_over, eps, **flags)
    check_route("route", poses, weight, bias, prior)
    check_choice("route", "backend", backend, BACKENDS)
    if backend == "recompute" and prior is not None:
        raise ValueError('route: backend="recompute" has no prior; leave it out, or take backend="reference"')
    if backend == "auto":
        backend = "reference" if prior is not None or is_exporting() else "recompute"
    coupling: Tensor | None
    if backend == "reference":
        votes = compute_votes(poses, weight)
        capsules, coupling = route_votes(votes, num_iterations, softmax_over, stop_gradient, bias, prior, leaky, eps)
        coupling = coupling if return_coupling else None
    else:
        options = Options(num_iterations, softmax_over == "inputs", stop_gradient, leaky, eps)
        capsules, coupling = route_recompute(poses, weight, bias, options, return_coupling)
    return capsules if coupling is None else (capsules, coupling)
