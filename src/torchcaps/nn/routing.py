"""Routing algorithms as modules: what a capsule layer calls to turn poses into output capsules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.ops.checks import check_choice, check_flags
from torchcaps.ops.dynamic_routing import BACKENDS, Backend, SoftmaxOver, route
from torchcaps.ops.dynamic_routing.checks import check_options


class Routing(nn.Module, ABC):
    """A routing algorithm: from poses and transformation matrices to output capsules and their coupling.

    Subclass it with a ``forward`` of the signature below to put an algorithm of your own into
    :class:`~torchcaps.nn.DenseCapsules`. :func:`torchcaps.compute_votes` gives the votes (B, I, J, D) if the
    algorithm needs them.
    """

    @abstractmethod
    def forward(
        self,
        poses: Float[Tensor, "B I K"],
        weight: Float[Tensor, "I J D K"],
        bias: Float[Tensor, "J D"] | None = None,
        prior: Float[Tensor, "I J"] | None = None,
        return_coupling: bool = False,
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
        """Route.

        Args:
            poses: Input capsules u_i.
            weight: Transformation matrices W_ij.
            bias: Added to an output capsule before its non-linearity.
            prior: Start of the routing logits.
            return_coupling: Whether the coupling is asked for.

        Returns:
            Output capsules v_j, and the coupling c_ij that made them (None unless asked for).
        """


class DynamicRouting(Routing):
    """Routing by agreement: :func:`torchcaps.route` with its options kept.

    Args:
        num_iterations: How many times the coupling is computed, 0 to 1,000; 0 sums the votes without squash, 1 is
            uniform coupling.
        softmax_over: ``"outputs"`` (the paper) or ``"inputs"``.
        stop_gradient: Let gradients flow through the last weighted sum only.
        leaky: Add a "none of the above" competitor.
        eps: The squash's epsilon.
        backend: See :func:`torchcaps.route`.

    Raises:
        TypeError: An option of another type.
        ValueError: A value that is out of its range, or an option that does not exist.

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829).
    """

    def __init__(
        self,
        num_iterations: int = 3,
        *,
        softmax_over: SoftmaxOver = "outputs",
        stop_gradient: bool = False,
        leaky: bool = False,
        eps: float = 1e-7,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_options(num_iterations, softmax_over, eps, "DynamicRouting")
        check_flags("DynamicRouting", stop_gradient=stop_gradient, leaky=leaky)
        check_choice("DynamicRouting", "backend", backend, BACKENDS)
        self.num_iterations = num_iterations
        self.softmax_over: SoftmaxOver = softmax_over
        self.stop_gradient = stop_gradient
        self.leaky = leaky
        self.eps = eps
        self.backend: Backend = backend

    def forward(
        self,
        poses: Float[Tensor, "B I K"],
        weight: Float[Tensor, "I J D K"],
        bias: Float[Tensor, "J D"] | None = None,
        prior: Float[Tensor, "I J"] | None = None,
        return_coupling: bool = False,
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
        """Route by agreement; see :class:`Routing` for arguments and result."""
        check_flags("DynamicRouting", return_coupling=return_coupling)
        options: dict[str, Any] = {
            "softmax_over": self.softmax_over,
            "stop_gradient": self.stop_gradient,
            "bias": bias,
            "prior": prior,
            "leaky": self.leaky,
            "eps": self.eps,
            "backend": self.backend,
        }
        if return_coupling:
            return route(poses, weight, self.num_iterations, return_coupling=True, **options)
        return route(poses, weight, self.num_iterations, **options), None

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return (
            f"num_iterations={self.num_iterations}, softmax_over={self.softmax_over!r}, "
            f"stop_gradient={self.stop_gradient}, leaky={self.leaky}"
        )
