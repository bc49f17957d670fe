"""Slots: output capsules of no class, which compete for input capsules and are updated by a gated unit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Capsules, LayerSize, Routed
from torchcaps.nn.routing.b2i import Start
from torchcaps.ops.precision import computed_in_full_precision, full_dtype
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import AtLeastOneIteration, Epsilon, Size, Width

STARTS = ("mean", "log_std")
"""Parameters of the distribution that initial slots are drawn from."""


class Slots(NamedTuple):
    """State of the slots between two iterations."""

    poses: Float[Tensor, "B J D"]
    """Slots s_j, or the means μ_j of a mixture."""
    log_std: Float[Tensor, "B J D"] | None = None
    """Logarithms of the standard deviations σ_j of a mixture."""
    log_share: Float[Tensor, "B J"] | None = None
    """Logarithms of the shares π_j of a mixture, up to a number that all slots of an image have in common."""

    def joined(self) -> Float[Tensor, "B J D2"]:
        """Return the vectors that describe a slot as one: s_j, or [μ_j, log σ_j]."""
        return self.poses if self.log_std is None else torch.cat([self.poses, self.log_std], 2)


class GRUCell(nn.GRUCell):
    """Gated unit, by operations that have second derivatives on every device and run under ``torch.vmap``."""

    def forward(self, inputs: Float[Tensor, "N D"], hx: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:  # type: ignore[override]  # torch's hx may be None
        reset, update, new = F.linear(inputs, self.weight_ih, self.bias_ih).chunk(3, 1)
        reset_state, update_state, new_state = F.linear(hx, self.weight_hh, self.bias_hh).chunk(3, 1)
        new = (new + (reset + reset_state).sigmoid() * new_state).tanh()
        return new + (update + update_state).sigmoid() * (hx - new)


def perceptron(before: int, hidden: int, after: int) -> nn.Sequential:
    """Return two dense layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, after))


class SlotLayer(nn.Module, ABC):
    """Base class of layers of slots. A slot layer has no votes and no routing, because all pairs share one transform.

    Args:
        in_capsules: Number of input capsules (I), or the types and sizes of their map; None: any number.
        in_dim: Components of an input capsule (K).
        out_capsules: Number of slots (J), if num_capsules is None.
        capsule_dim: Components of a slot (D).
        num_capsules: Number of slots; default: one for each output of the network.
        num_iterations: Number of times that slots compete and are updated.
        mlp_width: Width of the hidden layer of the perceptron that refines slots.
        eps: Number added to the attention of slots before it is normalised over the inputs; in a mixture also to
            variances and shares.
        start_from: Initial slots: noise with a learned mean and standard deviation, or learned queries, one a slot.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    vectors: ClassVar[int] = 1
    """Vectors of D components that describe a slot in a query."""
    __call__: Callable[..., Capsules]
    queries: Float[Tensor, "J D"]
    mean: Float[Tensor, "D"]
    log_std: Float[Tensor, "D"]

    def __init__(
        self,
        in_capsules: Size | tuple[Size, ...] | None,
        in_dim: Size,
        out_capsules: Size,
        capsule_dim: Width = 64,
        *,
        num_capsules: Width | None = None,
        num_iterations: AtLeastOneIteration = 3,
        mlp_width: Width = 128,
        eps: Epsilon = 1e-8,
        start_from: Start = "noise",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        number = math.prod(in_capsules) if isinstance(in_capsules, Sequence) else in_capsules or 0
        self.size = LayerSize(number, in_dim, num_capsules or out_capsules, capsule_dim)
        self.in_capsules, self.in_dim, self.out_capsules, self.out_dim = self.size
        self.capsule_dim, self.num_capsules = capsule_dim, num_capsules
        self.num_iterations, self.mlp_width, self.eps, self.start_from = num_iterations, mlp_width, eps, start_from
        described = self.vectors * capsule_dim
        self.norm_inputs, self.norm_slots = nn.LayerNorm(in_dim), nn.LayerNorm(described)
        self.norm_mlp = nn.LayerNorm(capsule_dim)
        self.key, self.value = (nn.Linear(in_dim, capsule_dim, bias=False) for _ in range(2))
        self.query = nn.Linear(described, described, bias=False)
        self.gru = GRUCell(capsule_dim, capsule_dim)
        self.mlp = perceptron(capsule_dim, mlp_width, capsule_dim)
        self.output = perceptron(described, mlp_width, capsule_dim) if self.vectors > 1 else None
        learned = {"queries": self.size[2:]} if start_from == "queries" else dict.fromkeys(STARTS, (capsule_dim,))
        for name, shape in learned.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._noise = torch.randn(*self.size[2:], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of the initial slots."""
        if self.start_from == "queries":
            nn.init.normal_(self.queries)
            return
        for name in STARTS:  # by Glorot, as a variable of shape (1, 1, D) in TensorFlow
            limit = math.sqrt(6 / (1 + self.out_dim))
            nn.init.uniform_(getattr(self, name), -limit, limit)

    def forward(
        self, capsules: Capsules | Float[Tensor, "B I K"], starts: Float[Tensor, "B J D"] | None = None
    ) -> Capsules:
        """Return the slots; see :meth:`route`."""
        routed = self.route(capsules, starts)
        return Capsules(routed.poses, routed.activations)

    @computed_in_full_precision
    def route(
        self,
        capsules: Capsules | Float[Tensor, "B I K"],
        starts: Float[Tensor, "B J D"] | None = None,
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Return the slots, their activations and the attention.

        Args:
            capsules: Input capsules, or a tensor of their poses. Activations are ignored.
            starts: Initial slots; None: as ``start_from`` says.
            return_coupling: Also return the attention a_ij of the last iteration.

        Returns:
            Slots s_j, zeros for a row without input capsules. The activation of a slot is its mean attention over the
            input capsules that are present.

        Raises:
            InputError: Poses or initial slots of another shape or device, or no input capsules.
        """
        poses, mask = Capsules.of(capsules).poses, Capsules.of(capsules).mask
        self._check_sizes(poses, mask, starts)
        if poses.shape[1] == 0:
            raise InputError(f"{type(self).__name__}: there must be at least one input capsule, got none")
        stored = next(self.parameters()).dtype  # not that of a dense layer, which may be quantised
        dtype = torch.promote_types(poses.dtype, stored)
        poses = poses if mask is None else poses.where(mask.unsqueeze(2), 0)
        full = full_dtype(dtype)
        poses, starts = poses.to(full), None if starts is None else starts.to(full)
        if stored == full:
            routed = self._iterate(poses, mask, starts)
        else:  # converted once, so that gradients of all iterations are summed in full precision
            state = {f"layer.{name}": each.to(full) for name, each in self.named_parameters()}
            routed = functional_call(_Iterations(self), state, (poses, mask, starts))
        routed = routed if return_coupling else routed._replace(coupling=None)
        return routed.masked(mask).to(dtype)

    def _iterate(
        self,
        poses: Float[Tensor, "B I K"],
        mask: Bool[Tensor, "B I"] | None,
        starts: Float[Tensor, "B J D"] | None,
    ) -> Routed:
        """Return the slots, their activations and the attention, of poses and parameters of one dtype."""
        inputs = self.norm_inputs(poses)
        keys, values = self.key(inputs), self.value(inputs)
        slots = self._prepared(self._starts(inputs) if starts is None else starts)
        present = None if mask is None else mask.unsqueeze(1)
        attention = keys  # replaced in the first iteration
        for _ in range(self.num_iterations):
            attention = self._logits(keys, slots).softmax(1)  # (B, J, I): softmax and sum are faster than of (B, I, J)
            shares = attention + self.eps
            if present is not None:
                attention, shares = attention.where(present, 0), shares.where(present, 0)
            totals = shares.sum(2, keepdim=True)
            totals = totals if mask is None else totals.clamp_min(self.eps / 2)  # 0 in a row without inputs
            slots = self._updated(slots, shares, values, totals)
        count = attention.shape[2] if mask is None else mask.sum(1, keepdim=True).clamp_min(1)
        activations = attention.sum(2) / count
        poses = slots.poses if self.output is None else self.output(slots.joined())
        return Routed(poses, activations, attention.transpose(1, 2))

    @checked
    def _check_sizes(
        self,
        poses: Float[Tensor, "B {self.in_capsules} {self.in_dim}"],
        mask: Bool[Tensor, "B {self.in_capsules}"] | None,
        starts: Float[Tensor, "B {self.out_capsules} {self.out_dim}"] | None,
    ) -> None:
        """Raise InputError unless the arguments have the sizes of the layer."""

    def _starts(self, like: Float[Tensor, "B I K"]) -> Float[Tensor, "B J D"]:
        """Return the initial slots of each image: learned, or drawn; in evaluation the same for all images."""
        if self.start_from == "queries":
            return self.queries.expand(like.shape[0], -1, -1)
        if self.training:
            noise = torch.randn(like.shape[0], *self.size[2:], device=like.device, dtype=like.dtype)
        else:
            noise = self._noise.to(like.device, like.dtype).expand(like.shape[0], -1, -1)
        return self.mean + self.log_std.exp() * noise

    def _refined(self, slots: Float[Tensor, "B J D"], updates: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D"]:
        """Return the slots after the gated unit and the perceptron."""
        gated = self.gru(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return gated + self.mlp(self.norm_mlp(gated))

    def _queries(self, slots: Slots) -> Float[Tensor, "B J D2"]:
        """Return the queries of the slots."""
        return self.query(self.norm_slots(slots.joined()))

    def _prepared(self, starts: Float[Tensor, "B J D"]) -> Slots:
        """Return the state before the first iteration."""
        return Slots(starts)

    @abstractmethod
    def _logits(self, keys: Float[Tensor, "B I D"], slots: Slots) -> Float[Tensor, "B J I"]:
        """Return the logits of the softmax over the slots."""

    @abstractmethod
    def _updated(
        self,
        slots: Slots,
        shares: Float[Tensor, "B J I"],
        values: Float[Tensor, "B I D"],
        totals: Float[Tensor, "B J 1"],
    ) -> Slots:
        """Return the slots after an iteration: w_ij are the shares, divided by their totals over the inputs."""


class _Iterations(nn.Module):
    """The iterations of a layer, for :func:`torch.func.functional_call`."""

    def __init__(self, layer: SlotLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Any) -> Routed:
        return self.layer._iterate(*arguments)


@register("layer", "slots")
class SlotAttention(SlotLayer):
    """Slot attention: slots compete for input capsules, and each is updated by a gated unit from its weighted mean.

        k = W_k LN(x), v = W_v LN(x)                          keys and values of the input capsules x_i
        s_j = mean + exp(log_std) ∘ ε_j, or queries_j         initial slots
        a_ij = softmax_j(⟨k_i, W_q LN(s_j)⟩ / √D)             in each iteration
        s_j ← GRU(Σ_i w_ij v_i, s_j) with w_ij = (a_ij + eps) / Σ_i (a_ij + eps)
        s_j ← s_j + MLP(LN(s_j))

    A slot is a capsule of no class. The softmax runs over the slots as in routing, but all pairs share one transform,
    the sum is a mean, and slots are exchangeable. In training, ε is drawn anew for each image. In evaluation, it is the
    same for all images, drawn once from a fixed seed, so a result depends on no draw and on no other image.

    Source: Locatello et al. 2020, "Object-centric learning with slot attention" (arXiv:2006.15055). The layer
    normalisation has PyTorch's epsilon, 1e-5; the authors' Keras has 1e-3. Learned queries: Jia, Liu, Huang 2023
    (arXiv:2210.08990), here with the whole gradient.
    """

    def _logits(self, keys: Float[Tensor, "B I D"], slots: Slots) -> Float[Tensor, "B J I"]:
        return (self._queries(slots) / math.sqrt(self.out_dim)) @ keys.transpose(1, 2)

    def _updated(self, slots: Slots, shares: Tensor, values: Tensor, totals: Tensor) -> Slots:
        return Slots(self._refined(slots.poses, shares @ values / totals))


@register("layer", "slot-mixture")
class SlotMixture(SlotLayer):
    """Mixture of Gaussians over slots: EM with learned updates, in which a slot also has a variance.

        q^μ_j, q^σ_j = the halves of W_q LN([μ_j, log σ_j])
        γ_ij = softmax_j(log π_j − ½ Σ_d ((k_id − q^μ_jd) / exp q^σ_jd)² − Σ_d q^σ_jd)
        π_j = mean_i γ_ij,    w_ij = (γ_ij + eps) / Σ_i (γ_ij + eps)
        μ_j ← GRU(Σ_i w_ij v_i, μ_j);    μ_j ← μ_j + MLP(LN(μ_j))
        log σ_j = ½ log(Σ_i w_ij (v_i − μ_j)² + eps)
        s_j = output([μ_j, log σ_j])                          a perceptron, after the last iteration

    Keys, values, initial means and the behaviour in evaluation are those of :class:`SlotAttention`.

    Source: Kirilenko et al. 2024, "Object-centric learning with slot mixture module" (ICLR). The authors' code was not
    found. We chose what the paper leaves open: σ_j = 1 and π_j = 1/J at the start, and ``eps`` in w_ij and log π_j.
    """

    vectors: ClassVar[int] = 2

    def _prepared(self, starts: Float[Tensor, "B J D"]) -> Slots:
        return Slots(starts, torch.zeros_like(starts), starts.new_zeros(starts.shape[:2]))  # equal shares cancel

    def _logits(self, keys: Float[Tensor, "B I D"], slots: Slots) -> Float[Tensor, "B J I"]:
        assert slots.log_share is not None
        means, log_std = self._queries(slots).chunk(2, 2)
        precisions = (-2 * log_std).exp()
        # Σ_d ((k − q) / σ)² by matrix products, without the last term, which is a number for each slot
        products = precisions @ keys.square().transpose(1, 2) - 2 * (means * precisions) @ keys.transpose(1, 2)
        of_slots = slots.log_share - (log_std + 0.5 * means.square() * precisions).sum(2)
        return of_slots.unsqueeze(2) - 0.5 * products

    def _updated(self, slots: Slots, shares: Tensor, values: Tensor, totals: Tensor) -> Slots:
        weights = shares / totals
        means = self._refined(slots.poses, weights @ values)
        # not as a difference of squares, whose rounding would be as large as the variance of a narrow slot
        squares = (values.unsqueeze(1) - means.unsqueeze(2)).square()  # (B, J, I, D)
        log_std = 0.5 * ((weights.unsqueeze(2) @ squares).squeeze(2) + self.eps).log()
        return Slots(means, log_std, totals.squeeze(2).log())  # the number of inputs, the same for all slots, cancels
