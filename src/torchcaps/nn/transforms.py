"""Transforms: modules that compute votes from input capsules."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.convolutions import KEPT_BY_CUT, draw_truncated
from torchcaps.nn.votes import DenseVotes, DiagonalVotes, MatrixVotes, SharedVotes, Votes
from torchcaps.ops.precision import full_dtype
from torchcaps.parts import register
from torchcaps.ranges import PositiveFactor
from torchcaps.tracing import is_graph_capture

WeightInit = Literal["balanced", "normal", "truncated-normal", "fan-in", "he"]


class Transform(nn.Module, ABC):
    """Base class of transforms. A layer calls :meth:`bind` once with its sizes; there the parameters are made.

    A layer calls ``transform.votes(*transform(poses))``. :meth:`forward` returns tensors, because hooks and the tools
    built on them need tensors. :meth:`votes` wraps them as votes, which a routing asks for sums.

    To use your own transform in a capsule layer, write a subclass with these three methods and register it with
    ``@register("transform", "mine")``.
    """

    size: LayerSize | None = None
    """Sizes I, K, J, D of the layer that contains the transform."""
    keeps_sizes: bool = False
    """True if :meth:`bind` changed the transform, which then belongs to one layer. Set by the layer."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let tools that differentiate a module's results find none where no gradient is recorded.

        Without gradients, PyTorch still marks a view of a parameter as one that requires a gradient, and counters of
        floating-point operations fail there.
        """
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward = _detached_without_gradients(cls.forward)  # type: ignore[method-assign]

    @abstractmethod
    def bind(self, size: LayerSize, std: float) -> None:
        """Make the parameters for the sizes of a layer.

        Args:
            size: Sizes I, K, J, D of the layer.
            std: Standard deviation of the votes, relative to the length of a pose, that suits the routing; see
                :meth:`torchcaps.nn.Routing.balanced_std`.

        Raises:
            InputError: Sizes that this transform cannot have.
        """

    @abstractmethod
    def forward(self, poses: Float[Tensor, "B I K"]) -> tuple[Tensor, ...]:
        """Return the arguments of :meth:`votes` for input capsules u_i: usually poses and matrices."""

    @abstractmethod
    def votes(self, *tensors: Any, **_named: Any) -> Votes:  # of any signature, so that a subclass names its tensors
        """Return the votes from the tensors of :meth:`forward`. Use parameters only there, not here."""


ForwardT = TypeVar("ForwardT", bound=Callable[..., Any])


def _detached_without_gradients(forward: ForwardT) -> ForwardT:
    @functools.wraps(forward)
    def call(*args: Any, **named: Any) -> Any:
        tensors = forward(*args, **named)
        if torch.is_grad_enabled() or not isinstance(tensors, tuple) or is_graph_capture():
            return tensors
        return tuple(each.detach() if isinstance(each, Tensor) and each.requires_grad else each for each in tensors)

    return cast(ForwardT, call)


class WeightTransform(Transform):
    """Base class of transforms with one tensor of random initial weights.

    ``weight`` is contiguous, because optimizers, pruning and file formats of other libraries flatten it. Its axes are
    in the order that fast routing reads; :attr:`matrices` has them in the order of the equation.

    Args:
        weight_init: Initial distribution of the transformation matrices. balanced: normal, with the standard deviation
            that suits the sizes and the routing, so that layers can be stacked. normal, truncated-normal (cut at two
            standard deviations): with weight_std. fan-in: normal with variance 2 / (I·K). he: truncated normal with
            variance 2 / K, as Keras's he_normal; K counts all numbers that a vote of an input capsule depends on.
        weight_std: Standard deviation of the initial weights with normal and truncated-normal.
    """

    weight: nn.Parameter
    axes: ClassVar[tuple[int, ...] | None] = None
    """Permutation that brings the axes of ``weight`` to the order of the equation. None: no permutation."""

    def __init__(self, weight_init: WeightInit = "balanced", weight_std: PositiveFactor = 0.1) -> None:
        super().__init__()
        self.weight_init, self.weight_std = weight_init, weight_std

    def bind(self, size: LayerSize, std: float) -> None:
        self.weight = nn.Parameter(self._empty(size))
        self.size, self.balanced_std = size, std * math.sqrt(size.in_dim / self._products(size))
        self.reset_parameters()

    @property
    def matrices(self) -> Tensor:
        """Return ``weight`` with its axes in the order of the equation, as a view to read or change.

        The view has no ``grad``; the gradient is ``weight.grad``, in the axes of ``weight``.
        """
        return self.weight if self.axes is None else self.weight.permute(self.axes)

    @abstractmethod
    def _empty(self, size: LayerSize) -> Tensor:
        """Allocate the weights; raise InputError for sizes that this transform cannot have."""

    def _products(self, size: LayerSize) -> int:
        """Return the number of products that are summed for one component of a vote."""
        return size.in_dim

    def reset_parameters(self) -> None:
        """Draw new weights from torch's random generator."""
        assert self.size is not None
        if self.weight_init == "truncated-normal":
            draw_truncated(self.matrices, self.weight_std)
            return
        if self.weight_init == "he":
            draw_truncated(self.matrices, math.sqrt(2 / self.size.in_dim) / KEPT_BY_CUT)
            return
        fan_in = math.sqrt(2 / (max(self.size.in_capsules, 1) * self.size.in_dim))
        stds = {"balanced": self.balanced_std, "normal": self.weight_std, "fan-in": fan_in}
        nn.init.normal_(self.matrices, std=stds[self.weight_init])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load weights, also with the axes of the equation, which earlier versions stored, if only these fit."""
        weight: Any = state_dict.get(f"{prefix}weight")
        shape = getattr(weight, "shape", None)
        if self.axes is not None and self.size is not None and shape == self.matrices.shape != self.weight.shape:
            order = [self.axes.index(axis) for axis in range(len(self.axes))]
            state_dict[f"{prefix}weight"] = weight.permute(order).contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)

    @checked
    def forward(self, poses: Float[Tensor, "B {self.size.in_capsules} {self.size.in_dim}"]) -> tuple[Tensor, ...]:
        return poses, self.matrices


@register("transform", "dense")
class Dense(WeightTransform):
    """A matrix for each pair of an input and an output capsule: votes W_ij u_i.

    ``matrices`` is W (I, J, D, K); ``weight`` holds the same numbers as (J, D, K, I), so that every step of fast
    routing is a matrix product.

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """

    axes = (3, 0, 1, 2)

    def _empty(self, size: LayerSize) -> Float[Tensor, "J D K I"]:
        _, K, J, D = size
        return torch.empty(J, D, K, size.inputs(self))

    def votes(self, poses: Float[Tensor, "B I K"], matrices: Float[Tensor, "I J D K"]) -> Votes:
        return DenseVotes(poses, matrices)


@register("transform", "shared")
class Shared(WeightTransform):
    """A matrix for each output capsule, shared by all input capsules: votes W_j u_i, W (J, D, K).

    Source: Gu, Tresp 2020, "Improving the Robustness of Capsule Networks to Image Affine Transformations"
    (arXiv:1911.07968).
    """

    def _empty(self, size: LayerSize) -> Float[Tensor, "J D K"]:
        _, K, J, D = size
        return torch.empty(J, D, K)

    def votes(self, poses: Float[Tensor, "B I K"], matrices: Float[Tensor, "J D K"]) -> Votes:
        return SharedVotes(poses, matrices)


@register("transform", "common")
class Common(WeightTransform):
    """One matrix for all pairs: votes W u_i, the same for all output capsules, W (D, K).

    A routing that starts from equal logits keeps all output capsules equal. Use a prior or noise as the start.

    Source: Li et al. 2019, "Multi-Interest Network with Dynamic Routing for Recommendation at Tmall"
    (arXiv:1904.08030), section 3.3.
    """

    def _empty(self, size: LayerSize) -> Float[Tensor, "D K"]:
        self.out_capsules = size.out_capsules
        return torch.empty(size.out_dim, size.in_dim)

    def votes(self, poses: Float[Tensor, "B I K"], matrix: Float[Tensor, "D K"]) -> Votes:
        return SharedVotes(poses, matrix.unsqueeze(0), self.out_capsules)


@register("transform", "factored")
class Factored(WeightTransform):
    """A matrix for each output capsule, the product of two factors: votes F (f_j∘u_i), F (D, K) for all j, f_j (K).

    It has K·(J + D) weights; ``"shared"`` has J·D·K. The f_j are initially one, so an input capsule first casts the
    same vote for all output capsules.

    Source: Heinsen 2022, "An Algorithm for Routing Vectors in Sequences" (arXiv:2211.11754), and its code.
    """

    scale: nn.Parameter

    def bind(self, size: LayerSize, std: float) -> None:
        super().bind(size, std)
        self.scale = nn.Parameter(torch.ones(size.out_capsules, size.in_dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):  # bind draws the weight first
            nn.init.ones_(self.scale)

    def _empty(self, size: LayerSize) -> Float[Tensor, "D K"]:
        return torch.empty(size.out_dim, size.in_dim)

    @checked
    def forward(self, poses: Float[Tensor, "B {self.size.in_capsules} {self.size.in_dim}"]) -> tuple[Tensor, ...]:
        return poses, self.scale, self.weight

    def votes(self, poses: Float[Tensor, "B I K"], scale: Float[Tensor, "J K"], matrix: Float[Tensor, "D K"]) -> Votes:
        dtype = torch.promote_types(poses.dtype, matrix.dtype)
        factors = matrix.to(full_dtype(dtype)), scale.to(full_dtype(dtype))  # their product is rounded once
        votes = SharedVotes(poses, factors[0] * factors[1].unsqueeze(1))
        votes.dtype = dtype
        return votes


@register("transform", "elementwise")
class Elementwise(WeightTransform):
    """A vector for each pair of an input and an output capsule: votes w_ij∘u_i, D = K.

    ``matrices`` is w (I, J, D), the diagonals of matrices; ``weight`` holds the same numbers as (J, D, I).

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136).
    """

    axes = (2, 0, 1)

    def _empty(self, size: LayerSize) -> Float[Tensor, "J D I"]:
        _require_equal("Elementwise", size)
        return torch.empty(size.out_capsules, size.out_dim, size.inputs(self))

    def _products(self, size: LayerSize) -> int:
        return 1

    @checked
    def forward(self, poses: Float[Tensor, "B {self.size.in_capsules} {self.size.in_dim}"]) -> tuple[Tensor, ...]:
        return poses, self.matrices

    def votes(self, poses: Float[Tensor, "B I K"], diagonals: Float[Tensor, "I J D"]) -> Votes:
        return DiagonalVotes(poses, diagonals)


@register("transform", "matrix")
class Matrix(WeightTransform):
    """Products of square matrices, poses M_i (P, P) and weights W_ij (P, P): votes M_i W_ij, K = D = P².

    ``matrices`` is W (I, J, P, P), rows before columns; ``weight`` holds the same numbers as (J, P, P, I), columns
    before rows.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR).
    """

    axes = (3, 0, 2, 1)

    def _empty(self, size: LayerSize) -> Float[Tensor, "J P P I"]:
        _, K, J, D = size
        P = math.isqrt(K)
        if P * P != K or K != D:
            raise InputError(
                f"Matrix: the poses of input and output capsules must be square matrices of one size, such as 4×4 = 16 "
                f"components, got {K} and {D}"
            )
        return torch.empty(J, P, P, size.inputs(self))

    def _products(self, size: LayerSize) -> int:
        return math.isqrt(size.in_dim)

    def votes(self, poses: Float[Tensor, "B I K"], matrices: Float[Tensor, "I J P P"]) -> Votes:
        return MatrixVotes(poses, matrices)


@register("transform", "identity")
class Identity(Transform):
    """No transform: each input capsule votes with its pose, D = K. It has no weights."""

    def bind(self, size: LayerSize, std: float) -> None:
        _require_equal("Identity", size)
        self.out_capsules = size.out_capsules

    def forward(self, poses: Float[Tensor, "B I K"]) -> tuple[Tensor, ...]:
        return (poses,)

    def votes(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return SharedVotes(poses, torch.eye(poses.shape[2]).to(poses).unsqueeze(0), self.out_capsules)


def _require_equal(name: str, size: LayerSize) -> None:
    if size.in_dim != size.out_dim:
        raise InputError(
            f"{name}: input and output capsules must have the same number of components, got {size.in_dim} and "
            f"{size.out_dim}"
        )
