"""Transforms: what each input capsule predicts for each output capsule, its votes, asked for and never built.

A transform is a module from capsules to :class:`Votes`. A routing algorithm then asks for their weighted sums and for
their agreement with output capsules, and for the votes themselves only if it must have each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchcaps.nn.flow import LayerSize
from torchcaps.ops.built_votes import dense_votes, matrix_votes
from torchcaps.ops.checks import check_choice, check_numbers, check_one_device, check_tensor
from torchcaps.ops.contractions import agreement, build_votes, weighted_sum
from torchcaps.ops.dynamic_routing import SoftmaxOver
from torchcaps.ops.dynamic_routing.reference import compete
from torchcaps.ops.precision import full_dtype, full_precision, in_full_precision
from torchcaps.ops.votes import is_traced, log_softmax_over_outputs

WeightInit = Literal["balanced", "normal", "truncated-normal", "fan-in"]


class Votes(ABC):
    """The votes û_j|i of the input capsules of a batch for its output capsules, as a routing algorithm sees them.

    Args:
        poses: Input capsules u_i.
        size: I, K, J, D.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], size: LayerSize) -> None:
        self.poses, self.size = poses, size
        self.rivals: Rivals | None = None

    def zeros(self) -> Float[Tensor, "B I J"]:
        """Routing logits to start from, in full precision; in memory as (J, B, I), as agreement is."""
        shape = self.size.out_capsules, self.poses.shape[0], self.size.in_capsules
        return self.poses.new_zeros(shape, dtype=full_dtype(self.poses.dtype)).permute(1, 2, 0)

    @abstractmethod
    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """Σ_i c_ij û_j|i; without coupling, the plain sum."""

    @abstractmethod
    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """⟨û_j|i, x_j⟩ with output capsules, or with any other vectors x_j."""

    @abstractmethod
    def build(self) -> Float[Tensor, "B I J D"]:
        """The votes themselves, for algorithms that need each of them: B·I·J·D numbers."""

    def pieces(self) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
        """How votes of some images are built: a function of a tensor whose first axis is the images, and of others.

        Algorithms that need each vote build those of a few images at a time. Votes that do not say how are built whole.
        """
        return _as_they_are, self.build(), ()

    @property
    def together(self) -> int:
        """So many rows of the first axis belong together: one, or on a map where positions compete, an image's."""
        return 1 if self.rivals is None else len(self.rivals.children)

    def log_compete(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """The logarithm of :meth:`compete` over the outputs, exact even of couplings too small for their precision."""
        return log_softmax_over_outputs(logits) if self.rivals is None else self.rivals.log_compete(logits)

    def compete(
        self, logits: Float[Tensor, "B I J"], softmax_over: SoftmaxOver = "outputs", *, leaky: bool = False
    ) -> Float[Tensor, "B I J"]:
        """Coupling c_ij: the softmax of the logits over the capsules that compete.

        Over ``"outputs"``, the output capsules that an input capsule votes for compete: all of them, or, in a layer on
        a map that says so, those of all positions whose windows hold the input capsule.

        Args:
            logits: b_ij.
            softmax_over: The axis on which capsules compete.
            leaky: Add a competitor with logit 0, whose share goes to no capsule.
        """
        if self.rivals is None or softmax_over == "inputs":
            return compete(logits, softmax_over, leaky)
        return self.rivals.compete(logits, leaky)


def _as_they_are(votes: Tensor) -> Tensor:
    return votes


class WeightVotes(Votes):
    """Votes of poses and one tensor of weights."""

    weight: Tensor

    def pieces(self) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
        """See :class:`Votes`."""
        kind: Callable[[Tensor, Tensor], Votes] = type(self)
        return lambda poses, weight: kind(poses, weight).build(), self.poses, (self.weight,)


class DenseVotes(WeightVotes):
    """Votes W_ij u_i, a matrix for each pair; or w_ij∘u_i, a vector for each pair.

    Args:
        poses: Input capsules u_i.
        weight: W_ij (I, J, D, K), or w_ij (I, J, D) with D = K.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."]) -> None:
        I, J, D = weight.shape[:3]
        super().__init__(poses, LayerSize(I, poses.shape[2], J, D))
        self.weight = weight

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`."""
        return weighted_sum(self.poses, self.weight, coupling)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`."""
        return agreement(self.poses, self.weight, parents)

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        return build_votes(self.poses, self.weight)

    def pieces(self) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
        """See :class:`Votes`; the matrices are laid out once so that each capsule's votes are one product."""
        if self.weight.ndim == 3:
            return super().pieces()
        J, D = self.size.out_capsules, self.size.out_dim
        dtype = full_dtype(torch.promote_types(self.poses.dtype, self.weight.dtype))
        matrices = self.weight.to(dtype).permute(0, 3, 1, 2).flatten(2).contiguous()  # (I, K, J·D)

        def build(poses: Tensor, matrices: Tensor) -> Tensor:
            poses = poses.to(matrices.dtype)
            if is_traced():
                return torch.bmm(poses.transpose(0, 1), matrices).transpose(0, 1).unflatten(2, (J, D))
            return dense_votes(poses, matrices, J)

        return build, self.poses, (matrices,)


class SharedVotes(WeightVotes):
    """Votes W_j u_i: all input capsules share the matrix of an output capsule."""

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "J D K"]) -> None:
        J, D, K = weight.shape
        super().__init__(poses, LayerSize(poses.shape[1], K, J, D))
        self.weight = weight
        self._poses, self._weight = in_full_precision(poses), in_full_precision(weight)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`. W_j Σ_i c_ij u_i: the poses are summed first."""
        with full_precision(self.poses.device):
            if coupling is None:
                total = torch.einsum("jdk,bk->bjd", self._weight, self._poses.sum(1))
            else:
                sums = coupling.to(self._poses).transpose(1, 2) @ self._poses  # (B, J, K)
                total = torch.einsum("jdk,bjk->bjd", self._weight, sums)
        return total.to(self.poses.dtype)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`. ⟨u_i, W_jᵀ x_j⟩: the output capsules are brought back first."""
        with full_precision(self.poses.device):
            agreement = self._poses @ torch.einsum("jdk,bjd->bkj", self._weight, parents.to(self._poses))
        return agreement.to(self.poses.dtype)

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        with full_precision(self.poses.device):
            return torch.einsum("jdk,bik->bijd", self._weight, self._poses).to(self.poses.dtype)


class MatrixVotes(WeightVotes):
    """Votes M_i W_ij of poses that are square matrices, M_i (P, P), read row by row: K = D = P².

    The rows of a pose are transformed alike, so that a row is a capsule of P components to the sums.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J P P"]) -> None:
        I, J, P, _ = weight.shape
        super().__init__(poses, LayerSize(I, P * P, J, P * P))
        self.weight = weight
        rows = poses.unflatten(2, (P, P)).movedim(2, 1).flatten(0, 1)  # (B·P, I, P)
        self.rows = DenseVotes(rows, weight.transpose(2, 3))
        self.batch, self.side = poses.shape[0], P

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`."""
        each = None if coupling is None else coupling.repeat_interleave(self.side, 0)
        return self._joined(self.rows.weighted_sum(each))

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`."""
        rows = parents.unflatten(2, (self.side, self.side)).movedim(2, 1).flatten(0, 1)  # (B·P, J, P)
        return self.rows.agreement(rows).unflatten(0, (self.batch, self.side)).sum(1)

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        if is_traced():
            return self._joined(self.rows.build())
        dtype = torch.promote_types(self.poses.dtype, self.weight.dtype)
        poses, weight = (tensor.to(full_dtype(dtype)) for tensor in (self.poses, self.weight))
        return matrix_votes(poses.unflatten(2, (self.side, self.side)), weight).to(dtype)

    def _joined(self, rows: Float[Tensor, "BP *capsules P"]) -> Float[Tensor, "B *capsules D"]:
        return rows.unflatten(0, (self.batch, self.side)).movedim(1, -2).flatten(-2)


class IdentityVotes(Votes):
    """Votes u_i, the same for all output capsules: nothing is transformed."""

    def __init__(self, poses: Float[Tensor, "B I K"], out_capsules: int) -> None:
        _, I, K = poses.shape
        super().__init__(poses, LayerSize(I, K, out_capsules, K))

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`."""
        if coupling is None:
            return self.poses.sum(1, keepdim=True).expand(-1, self.size.out_capsules, -1)
        return coupling.to(self.poses.dtype).transpose(1, 2) @ self.poses

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`."""
        return self.poses @ parents.to(self.poses.dtype).transpose(1, 2)

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        return self.poses.unsqueeze(2).expand(-1, -1, self.size.out_capsules, -1)


class MapVotes(Votes):
    """Votes of the capsules of a map whose weights are the same at all positions.

    Args:
        votes: Those of each position, (B·L, T, J, D).
        poses: The capsules (B, T·L, K), type by type.
        positions: L.
    """

    def __init__(self, votes: Votes, poses: Float[Tensor, "B I K"], positions: int) -> None:
        super().__init__(poses, votes.size._replace(in_capsules=poses.shape[1]))
        self.votes, self.positions = votes, positions

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`."""
        each = None
        if coupling is not None:
            each = coupling.unflatten(1, (-1, self.positions)).transpose(1, 2).flatten(0, 1)  # (B·L, T, J)
        return self.votes.weighted_sum(each).unflatten(0, (-1, self.positions)).sum(1)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`."""
        return self._joined(self.votes.agreement(parents.repeat_interleave(self.positions, 0)))

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        return self._joined(self.votes.build())

    def pieces(self) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
        """See :class:`Votes`."""
        build, rows, others = self.votes.pieces()
        return (
            lambda rows, *others: self._joined(build(rows.flatten(0, 1), *others)),
            rows.unflatten(0, (-1, self.positions)),
            others,
        )

    def _joined(self, each: Float[Tensor, "BL T *more"]) -> Float[Tensor, "B TL *more"]:
        return each.unflatten(0, (-1, self.positions)).transpose(1, 2).flatten(1, 2)


class PlacedVotes(Votes):
    """Votes to which the place of their capsule is added.

    Args:
        votes: Without the places.
        places: What is added, the same for all output capsules.
    """

    def __init__(self, votes: Votes, places: Float[Tensor, "I D"]) -> None:
        super().__init__(votes.poses, votes.size)
        self.votes, self.places = votes, places

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`Votes`."""
        total = self.votes.weighted_sum(coupling)
        places = self.places.to(total.dtype)
        added = places.sum(0) if coupling is None else coupling.to(total.dtype).transpose(1, 2) @ places
        return total + added

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`Votes`."""
        agreement = self.votes.agreement(parents)
        return agreement + self.places.to(agreement.dtype) @ parents.to(agreement.dtype).transpose(1, 2)

    def build(self) -> Float[Tensor, "B I J D"]:
        """See :class:`Votes`."""
        return self._placed(self.votes.build(), self.places)

    def pieces(self) -> tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]:
        """See :class:`Votes`."""
        build, each, others = self.votes.pieces()
        return lambda each, *others: self._placed(build(each, *others[:-1]), others[-1]), each, (*others, self.places)

    @staticmethod
    def _placed(votes: Float[Tensor, "B I J D"], places: Float[Tensor, "I D"]) -> Float[Tensor, "B I J D"]:
        return votes + places.to(votes.dtype).unsqueeze(1)


class Rivals:
    """The competition on a map: an input capsule's rivals stand at all positions whose windows hold it.

    Args:
        children: The capsule of the map that each input capsule of each window is.
        number: Capsules on the map, N.
    """

    def __init__(self, children: Int[Tensor, "L I"], number: int) -> None:
        self.children, self.number = children, number

    def sum(self, windows: Float[Tensor, "BL I"]) -> Float[Tensor, "B N"]:
        """What the input capsules of the windows have, summed for each capsule of the map."""
        given = windows.unflatten(0, (-1, len(self.children))).flatten(1)  # (B, L·I)
        return given.new_zeros(len(given), self.number).index_add(1, self.children.flatten(), given)

    @property
    def links(self) -> Float[Tensor, "N"]:
        """How many windows hold each capsule of the map."""
        return self.sum(torch.ones(self.children.shape, device=self.children.device))[0]

    def compete(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> Float[Tensor, "BL I J"]:
        """The softmax over the output types and the positions; see :meth:`Votes.compete`."""
        powers, _, total, child = self._powers(logits, leaky)
        return (powers / total[:, child, None]).unflatten(1, self.children.shape).flatten(0, 1)

    def log_compete(self, logits: Float[Tensor, "BL I J"]) -> Float[Tensor, "BL I J"]:
        """Its logarithm; see :meth:`Votes.log_compete`."""
        _, above, total, child = self._powers(logits, leaky=False)
        return (above - total[:, child, None].log()).unflatten(1, self.children.shape).flatten(0, 1)

    def _powers(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The exponentials of logits (B, L·I, J), what they are of, their sums (B, N), and each capsule's number."""
        positions, I = self.children.shape
        child = self.children.flatten()  # (L·I)
        given = logits.unflatten(0, (-1, positions)).flatten(1, 2)  # (B, L·I, J)
        B = given.shape[0]
        with torch.no_grad():  # the largest of a child's logits, which cancels out
            start = 0.0 if leaky else -math.inf
            largest = given.new_full((B, self.number), start)
            largest.scatter_reduce_(1, child.expand(B, -1), given.amax(2), "amax")
            largest = largest.clamp_min(torch.finfo(given.dtype).min)  # of capsules in no window
        above = given - largest[:, child, None]
        powers = above.exp()
        total = self.sum(powers.sum(2).unflatten(1, (positions, I)).flatten(0, 1))
        if leaky:
            total = total + (-largest).exp()
        return powers, above, total, child


class Transform(nn.Module, ABC):
    """From capsules to votes. A layer tells it its sizes once, by :meth:`bind`, where it makes its parameters.

    Subclass it with :meth:`bind` and :meth:`forward` to put a transform of your own into a capsule layer.
    """

    @abstractmethod
    def bind(self, size: LayerSize, std: float) -> None:
        """Make the parameters for the sizes I, K, J, D; a ValueError for sizes that this transform cannot have.

        ``std`` is the deviation of votes, relative to the length of a pose, that suits the routing; see
        :meth:`torchcaps.nn.Routing.balanced_std`.
        """

    @abstractmethod
    def forward(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """The votes of input capsules u_i."""


class WeightTransform(Transform):
    """A transform with one tensor of weights, which starts at random.

    Args:
        weight_init: ``"balanced"`` (default): normal, with the deviation that suits the sizes and the routing, so that
            layers stack; ``"normal"`` or ``"truncated-normal"`` (cut at two deviations) with ``weight_std``;
            ``"fan-in"``: normal with variance 2 / (I·K).
        weight_std: Standard deviation for ``"normal"`` and ``"truncated-normal"``.

    Raises:
        TypeError: A deviation that is no number.
        ValueError: A deviation below zero, or another ``weight_init``.
    """

    weight: nn.Parameter
    _votes: type[DenseVotes | SharedVotes | MatrixVotes] = DenseVotes

    def __init__(self, weight_init: WeightInit = "balanced", weight_std: float = 0.1) -> None:
        super().__init__()
        name = type(self).__name__
        check_choice(name, "weight_init", weight_init, ("balanced", "normal", "truncated-normal", "fan-in"))
        check_numbers(name, weight_std=weight_std)
        if not 0 <= weight_std < math.inf:
            raise ValueError(f"{name}: weight_std must be at least 0 and finite, got {weight_std}")
        self.weight_init, self.weight_std = weight_init, weight_std

    def bind(self, size: LayerSize, std: float) -> None:
        """See :class:`Transform`."""
        if hasattr(self, "size"):
            raise ValueError(f"{type(self).__name__}: this transform belongs to a layer already; make one for each")
        self.weight = nn.Parameter(self._empty(size))
        self.size, self.balanced_std = size, std * math.sqrt(size.in_dim / self._products(size))
        self.reset_parameters()

    @abstractmethod
    def _empty(self, size: LayerSize) -> Tensor:
        """The weights' memory; a ValueError for sizes that this transform cannot have."""

    def _products(self, size: LayerSize) -> int:
        """How many products of a weight and a component of a pose are summed in a component of a vote."""
        return size.in_dim

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's random generator."""
        with torch.no_grad():
            if self.weight_init == "truncated-normal":
                std = self.weight_std
                nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
            else:
                stds = {
                    "balanced": self.balanced_std,
                    "normal": self.weight_std,
                    "fan-in": math.sqrt(2 / (self.size.in_capsules * self.size.in_dim)),
                }
                nn.init.normal_(self.weight, std=stds[self.weight_init])

    def forward(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """See :class:`Transform`."""
        check_tensor(type(self).__name__, "poses", poses, ("B", self.size.in_capsules, self.size.in_dim))
        check_one_device(type(self).__name__, poses=poses, weight=self.weight)
        return self._votes(poses, self.weight)

    def extra_repr(self) -> str:
        """Sizes and start, for ``print(model)``."""
        if not hasattr(self, "size"):
            return ""
        std = f"({self.weight_std:g})" if "normal" in self.weight_init else ""
        return f"weight={tuple(self.weight.shape)}, weight_init={self.weight_init}{std}"


class Dense(WeightTransform):
    """A matrix for each pair of an input and an output capsule: votes W_ij u_i, W (I, J, D, K).

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """

    def _empty(self, size: LayerSize) -> Float[Tensor, "I J D K"]:
        # seen as (I, J, D, K), kept in memory as (J, D, K, I): every step of fast routing is then a matrix product
        I, K, J, D = size
        return torch.empty(J, D, K, I).permute(3, 0, 1, 2)


class Shared(WeightTransform):
    """One matrix for each output capsule, which all input capsules share: votes W_j u_i, W (J, D, K).

    Source: Gu, Tresp 2020, "Improving the Robustness of Capsule Networks to Image Affine Transformations"
    (arXiv:1911.07968).
    """

    _votes = SharedVotes

    def _empty(self, size: LayerSize) -> Float[Tensor, "J D K"]:
        _, K, J, D = size
        return torch.empty(J, D, K)


class Elementwise(WeightTransform):
    """A vector for each pair of an input and an output capsule: votes w_ij∘u_i, w (I, J, D), D = K.

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136).
    """

    def _empty(self, size: LayerSize) -> Float[Tensor, "I J D"]:
        I, K, J, D = size
        if K != D:
            raise ValueError(
                f"Elementwise: input and output capsules must have as many components as each other, got {K} and {D}"
            )
        return torch.empty(J, D, I).permute(2, 0, 1)

    def _products(self, size: LayerSize) -> int:  # noqa: ARG002  as all transforms
        return 1


class Matrix(WeightTransform):
    """Poses are square matrices M_i (P, P), and so are the weights: votes M_i W_ij, W (I, J, P, P), K = D = P².

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR).
    """

    _votes = MatrixVotes

    def _empty(self, size: LayerSize) -> Float[Tensor, "I J P P"]:
        I, K, J, D = size
        P = math.isqrt(K)
        if P * P != K or K != D:
            raise ValueError(
                f"Matrix: the poses of input and output capsules must be square matrices of one size, such as 4×4 = 16 "
                f"components, got {K} and {D}"
            )
        return torch.empty(J, P, P, I).permute(3, 0, 2, 1)

    def _products(self, size: LayerSize) -> int:
        return math.isqrt(size.in_dim)


class Identity(Transform):
    """No transform: each input capsule votes with its own pose, D = K. It has no weights."""

    def bind(self, size: LayerSize, std: float) -> None:  # noqa: ARG002  there is nothing to draw
        """See :class:`Transform`."""
        if size.in_dim != size.out_dim:
            raise ValueError(
                "Identity: input and output capsules must have as many components as each other, got "
                f"{size.in_dim} and {size.out_dim}"
            )
        self.out_capsules = size.out_capsules

    def forward(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """See :class:`Transform`."""
        return IdentityVotes(poses, self.out_capsules)
