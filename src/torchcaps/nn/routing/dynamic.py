"""Dynamic routing as in Sabour, Frosst and Hinton (2017): the readable loop, and the entry to the fast path.

B batch, I input capsules, J output capsules, D components of an output capsule, K components of an input capsule.

:func:`dynamic_routing` is the loop over votes of any kind. Dense layers and :func:`route` compute the same results by
an operation. Its plain formula is the loop, and its kernel, in :mod:`torchcaps.kernels.dense`, never builds the votes.
``tests/nn/test_dynamic_routing.py`` checks for every option that both, and their derivatives, are equal. If you add an
option to the loop, add it to the kernel's two passes, or let ``_needs_loop`` choose the loop for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.kernels.dense import Options, Results, Tensors, bytes_of_row, route_operation
from torchcaps.kernels.memory import blocks, in_blocks
from torchcaps.kernels.operation import Backend
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, DenseVotes, Votes, at_least_tiny
from torchcaps.nn.votes.competition import SoftmaxOver
from torchcaps.ops.contractions import compute_votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ops.squash import squashed
from torchcaps.parts import register
from torchcaps.ranges import Epsilon, Iterations

Prior = Float[Tensor, "I J"] | Float[Tensor, "B I J"]
"""Initial routing logits, the same for all images or one set for each image."""
Agreement = Literal["product", "cosine"]
"""How a vote is compared with its output capsule: by the scalar product, or by the cosine of their angle."""
Squash = Literal["each", "last"]
"""Iterations after which the sums are squashed: each of them, or only the last one."""


@checked
@computed_in_full_precision
def dynamic_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    num_iterations: Iterations = 3,
    *,
    softmax_over: SoftmaxOver = "outputs",
    stop_gradient: bool = False,
    bias: Float[Tensor, "J D"] | None = None,
    prior: Prior | None = None,
    leaky: bool = False,
    eps: Epsilon = 1e-7,
    agreement: Agreement = "product",
    squash: Squash = "each",
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
    rounds: list[RoutingRound] | None = None,
) -> Routed:
    """Routing by agreement: raise the weight of votes that agree with their output capsule, iteration by iteration.

        b_ij ← prior_ij (or 0)
        repeat num_iterations times:
            c_ij = softmax(b_ij)                      over j ("outputs") or over i ("inputs")
            v_j  = squash(Σ_i c_ij û_j|i + bias_j)
            b_ij ← b_ij + ⟨û_j|i, v_j⟩                (not after the last iteration)

    Args:
        votes: Votes û_j|i = W_ij u_i, the predictions of input capsule i for output capsule j; a tensor, or
            :class:`torchcaps.nn.Votes`, which need not be built.
        num_iterations: Number of times that the coupling is computed, 0 to 1,000. 1 is uniform coupling (or the
            prior's). 0 is no routing: the plain sum of the votes (plus bias), not squashed, with a coupling of ones.
        softmax_over: The axis on which capsules compete. ``"outputs"``, as in the paper: the couplings of an input
            capsule sum to one. ``"inputs"``, as in several well-known implementations: the couplings of an output
            capsule sum to one.
        stop_gradient: Let gradients flow through the last weighted sum only. The coupling is then a constant, so a
            learned prior gets no gradient.
        bias: Added before the squash.
        prior: Initial routing logits, the same for all images or one set for each image; may be learned.
        leaky: Add a "none of the above" competitor with logit 0 to the softmax, so that coupling sums to less than 1.
        eps: The squash's epsilon.
        agreement: ``"cosine"`` divides ⟨û_j|i, v_j⟩ by the lengths of both, each at least 1e-8.
        squash: ``"last"`` compares votes with the sums s_j, and squashes only the last ones.
        mask: True for each input capsule that is present; all if None. Values of masked capsules, even NaN, never
            change a result. A row without any input capsule gives zeros.
        return_coupling: Also return the coupling of the last iteration.
        rounds: List that receives the intermediate results of each iteration; see :func:`routing_rounds`.

    Returns:
        Output capsules v_j, lengths in [0, 1), in the dtype of ``votes`` (half precision is computed in float32), and
        c_ij if requested.

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829); bias and leaky from the authors' released
    code. The initial b is zero in the paper's experiments; section 2 mentions a learned prior. Cosine and one squash
    at the end from Nguyen, Hua, Le 2021, "3D-UCaps" (arXiv:2203.08965), and its code.
    """
    built = BuiltVotes.of(votes, mask)

    def weighted_sum(coupling: Tensor | None) -> Tensor:
        s = built.weighted_sum(coupling)  # s_j = Σ_i c_ij û_j|i
        return s if bias is None else s + bias

    def agreement_of(s: Tensor, capsules: Tensor) -> Tensor:
        compared = capsules if squash == "each" else s
        if lengths is None:
            return built.agreement(compared)  # ⟨û_j|i, v_j⟩
        return built.agreement(compared / at_least_tiny(compared, 2)) / lengths

    lengths = built.lengths() if agreement == "cosine" and (num_iterations > 1 or rounds is not None) else None
    logits = built.zeros()  # b_ij
    bias = None if bias is None else bias.to(logits.dtype)
    logits = logits if prior is None else built.present(logits + prior.to(logits.dtype))
    if num_iterations == 0:
        routed = Routed(weighted_sum(None), coupling=torch.ones_like(logits))
    for iteration in range(1, num_iterations + 1):
        coupling = built.compete(logits, softmax_over, leaky=leaky)  # c_ij = softmax b_ij
        if stop_gradient:  # only the last weighted sum gets a gradient
            coupling = coupling.detach()
        s = weighted_sum(coupling)
        capsules = squashed(s, 2, eps)  # v_j
        routed = Routed(capsules, coupling=coupling)
        if iteration == num_iterations and rounds is None:
            break
        agreements = agreement_of(s, capsules)
        if rounds is not None:
            rounds.append(RoutingRound(logits, coupling, s, capsules, agreements))
        logits = logits + agreements
    return built.finish(routed, coupling=return_coupling)


@computed_in_full_precision
def routing_rounds(
    votes: Votes | Float[Tensor, "B I J D"], num_iterations: Iterations = 3, **options: Any
) -> list[RoutingRound]:
    """Return the intermediate results of each iteration of :func:`dynamic_routing`, to follow it by hand.

    Args:
        votes: Votes û_j|i, as in :func:`dynamic_routing`.
        num_iterations: Number of times that the coupling is computed.
        **options: The other arguments of :func:`dynamic_routing`, such as ``softmax_over`` and ``mask``.

    Returns:
        One :class:`~torchcaps.nn.RoutingRound` for each of the ``num_iterations`` iterations: logits, coupling and
        agreement (B, I, J), weighted sums and capsules (B, J, D). The dtype is that of ``votes`` (half precision is
        computed, and returned, in float32). An iteration keeps 3·B·I·J + 2·B·J·D numbers.

    Examples:
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
    rounds: list[RoutingRound] = []
    dynamic_routing(votes, num_iterations, rounds=rounds, **options)
    return rounds


@checked
@computed_in_full_precision
def route(  # noqa: D417  the other arguments are dynamic_routing's
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    num_iterations: Iterations = 3,
    *,
    softmax_over: SoftmaxOver = "outputs",
    stop_gradient: bool = False,
    bias: Float[Tensor, "J D"] | None = None,
    prior: Prior | None = None,
    leaky: bool = False,
    eps: Epsilon = 1e-7,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
    backend: Backend = "auto",
) -> Routed:
    """Routing by agreement from poses and transformation matrices, without storing the votes.

    Computes ``dynamic_routing(compute_votes(poses, weight), ...)``. The votes, B·I·J·D numbers, are built only for very
    few images, because then they stay in the processor's caches.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij. Fastest if they lie in memory as (J, D, K, I), as in
            :class:`torchcaps.nn.DenseCapsules`.
        backend: ``"reference"`` builds the votes and follows the equations. ``"recompute"`` builds no votes, on any
            device, within :func:`set_working_memory`; it takes no prior, and no mask if inputs compete. ``"auto"``
            uses recompute if possible; with these two options it follows the equations without building votes. It uses
            the reference for exports, ``torch.func`` and forward-mode differentiation, because these need torch's own
            operations. All can be differentiated any number of times.
    """
    if min(weight.shape) == 0:
        raise InputError(f"route: weight must be of at least one capsule and component, got {tuple(weight.shape)}")
    votes = DenseVotes(poses, weight).masked(mask)
    assert isinstance(votes, DenseVotes)
    options: dict[str, Any] = {
        "num_iterations": num_iterations,
        "softmax_over": softmax_over,
        "stop_gradient": stop_gradient,
        "bias": bias,
        "prior": prior,
        "leaky": leaky,
        "eps": eps,
    }
    if backend == "recompute" and _needs_loop(votes, options):
        raise InputError('route: backend="recompute" has no prior and no mask over inputs; use backend="reference"')
    return _route_dense(votes, options, backend, return_coupling)


def _needs_loop(votes: DenseVotes, options: Mapping[str, Any]) -> bool:
    """Return True if the kernel lacks an option of a call, so that the loop computes it."""
    is_masked = votes.mask is not None and options["softmax_over"] == "inputs"
    has_kernel = options.get("agreement", "product") == "product" and options.get("squash", "each") == "each"
    return is_masked or options["prior"] is not None or not has_kernel


def _route_dense(votes: DenseVotes, options: Mapping[str, Any], backend: Backend, return_coupling: bool) -> Routed:
    """Return :func:`dynamic_routing` of votes that compete by row, by the operation if its kernel has the options."""
    if _needs_loop(votes, options):
        of = BuiltVotes(votes.build(), votes.poses, votes.dtype).masked(votes.mask) if backend == "reference" else votes
        return dynamic_routing(of, **options, return_coupling=return_coupling)
    tensors = Tensors(votes.poses, votes.weight, options["bias"])
    num_iterations, stop_gradient = options["num_iterations"], options["stop_gradient"]
    # the backward pass needs the last coupling if it is constant
    is_constant = stop_gradient or num_iterations == 0
    learning = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    keep_coupling = return_coupling or (learning and stop_gradient and num_iterations > 1)
    over_inputs = options["softmax_over"] == "inputs"
    scalars = Options(num_iterations, over_inputs, stop_gradient, options["leaky"], options["eps"], keep_coupling)
    capsules, coupling, _ = _route(tensors, scalars, backend)
    routed = Routed(capsules, coupling=coupling.detach() if is_constant else coupling)
    return votes.finish(routed, coupling=return_coupling)


def _route_built_votes(tensors: Tensors, options: Options) -> Results:
    """Build the votes, some images at a time within the working memory, and follow the equations."""
    poses, weight, bias = tensors

    def work(images: slice) -> tuple[Tensor, Tensor]:
        votes = DenseVotes(poses[images], weight)
        routed = dynamic_routing(
            BuiltVotes(compute_votes(votes.poses, votes.weight)),
            options.num_iterations,
            softmax_over="inputs" if options.over_inputs else "outputs",
            stop_gradient=options.stop_gradient,
            bias=bias,
            leaky=options.leaky,
            eps=options.eps,
            return_coupling=options.keep_coupling,
        )
        capsules = routed.poses
        return capsules, capsules.new_empty(capsules.shape[0], 0, 0) if routed.coupling is None else routed.coupling

    images = poses.shape[0]  # no len(), which would fix the batch size of an exported graph
    capsules, coupling = in_blocks(work, blocks(images, bytes_of_row(tensors), poses.device))
    return Results(capsules.to(torch.promote_types(poses.dtype, weight.dtype)), coupling, capsules.new_empty(0))


_route = route_operation(_route_built_votes)


@register("routing", "dynamic")
class DynamicRouting(Routing):
    """Routing by agreement, :func:`torchcaps.dynamic_routing`, with an optional learned bias and prior.

    Args:
        num_iterations: Routing iterations: number of times that the coupling is computed; 1 is uniform coupling, 0 no
            routing, no squash.
        softmax_over: The axis on which capsules compete: the paper's outputs, or the inputs.
        stop_gradient: Let gradients flow through the last weighted sum only.
        leaky: Add a "none of the above" competitor to the softmax.
        capsule_bias: Learned bias, starting at 0.1, added before the capsules' squash.
        learn_prior: Learn the initial routing logits.
        squash_eps: Added under the squash's root. 1e-24 is practically zero: it changes no vector longer than 1e-8 in
            float32, and keeps the gradient of a zero vector finite.
        agreement: Compare a vote with its output capsule by the scalar product, or by the cosine of their angle.
        squash: Squash the sums in each iteration, or only the last ones.

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829); the bias from the authors' released code; see
    :func:`torchcaps.dynamic_routing` for the other options.
    """

    backend: Backend = "auto"
    """Implementation for dense votes; see :func:`torchcaps.route`."""

    def __init__(
        self,
        num_iterations: Iterations = 3,
        *,
        softmax_over: SoftmaxOver = "outputs",
        stop_gradient: bool = False,
        leaky: bool = False,
        capsule_bias: bool = False,
        learn_prior: bool = False,
        squash_eps: Epsilon = 1e-7,
        agreement: Agreement = "product",
        squash: Squash = "each",
    ) -> None:
        super().__init__()
        if learn_prior and (stop_gradient or num_iterations == 0):
            raise InputError(
                "learn_prior needs stop_gradient=False and num_iterations of at least 1: otherwise it gets no gradient"
            )
        self.num_iterations, self.softmax_over, self.stop_gradient = num_iterations, softmax_over, stop_gradient
        self.leaky, self.capsule_bias, self.learn_prior, self.squash_eps = leaky, capsule_bias, learn_prior, squash_eps
        self.agreement, self.squash = agreement, squash
        self.bias: nn.Parameter | None = None
        self.prior: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the bias (J, D) with ``capsule_bias``, and the prior (I, J) with ``learn_prior``."""
        _, _, J, D = size
        if self.capsule_bias:
            self.bias = self.learned("bias", 0.1, J, D)
        if self.learn_prior:
            self.prior = self.learned("prior", 0.0, size.inputs(self), J)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`.

        Over inputs, the rule of the base class would give votes of length √I. The second iteration then selects a
        single vote and saturates the squash. Therefore σ follows from the growth of short sums over the iterations:
        s_1 = σ·√(D/I) and s_t ≈ σ²·s²_{t-1}. The last sum s_r has length one for σ = (I/D)^(1/(6 - 2^(3-r))).
        """
        I, D = max(size.in_capsules, 1), size.out_dim
        if self.num_iterations == 0:
            return (I * D) ** -0.5
        if self.softmax_over == "inputs":
            return (I / D) ** (1 / (6 - 2.0 ** (3 - self.num_iterations)))
        return super().balanced_std(size)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations are ignored, because the lengths of poses have this role."""
        options = self._options() | {"num_iterations": self.num_iterations}
        if isinstance(votes, DenseVotes) and votes.competition is None:
            return _route_dense(votes, options, self.backend, return_coupling)
        return dynamic_routing(votes, **options, return_coupling=return_coupling)

    @property
    def has_map_kernel(self) -> bool:  # type: ignore[override]  # follows from the options
        """True without any option but the number of iterations, the bias and the squash's epsilon.

        False for a subclass, whose algorithm may be another one.
        """
        others = self.stop_gradient, self.leaky, self.learn_prior, self.num_iterations == 0
        has_options = any(others) or (self.softmax_over, self.agreement, self.squash) != ("outputs", "product", "each")
        return type(self) is DynamicRouting and not has_options

    def rounds(
        self, votes: Votes, activations: Activations = None, num_iterations: Iterations | None = None
    ) -> list[RoutingRound]:
        """Return the intermediate results of ``num_iterations`` iterations (default: the layer's number).

        See :func:`routing_rounds`.
        """
        return routing_rounds(
            votes, self.num_iterations if num_iterations is None else num_iterations, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        return {
            "softmax_over": self.softmax_over,
            "stop_gradient": self.stop_gradient,
            "bias": self.bias,
            "prior": self.prior,
            "leaky": self.leaky,
            "eps": self.squash_eps,
            "agreement": self.agreement,
            "squash": self.squash,
        }
