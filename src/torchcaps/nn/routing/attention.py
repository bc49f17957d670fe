"""Routing by attention: self-attention (Efficient-CapsNet) and inverted dot-product attention."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.flow import LayerSize
from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.transforms import Votes
from torchcaps.ops.attention_routing import attend_to_all, attend_to_receivers
from torchcaps.ops.checks import check_flags, check_numbers
from torchcaps.ops.dynamic_routing.checks import check_iterations
from torchcaps.ops.precision import full_dtype, full_precision


class SelfAttentionRouting(Routing):
    """Routing without iterations, by attention among the votes: :func:`torchcaps.self_attention_routing`.

    Args:
        learn_bias: Learn what is added to the coupling (I, J), from zero.

    Raises:
        TypeError: An option of another type.

    Source: Mazzia, Salvetti, Chiaberge 2021 (arXiv:2101.12491).
    """

    def __init__(self, *, learn_bias: bool = True) -> None:
        super().__init__()
        check_flags("SelfAttentionRouting", learn_bias=learn_bias)
        self.learns_bias = learn_bias
        self.bias: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the bias, where it is wanted."""
        self.belongs_to_no_layer(self.bias)
        if self.learns_bias:
            self.bias = nn.Parameter(torch.zeros(size.in_capsules, size.out_capsules))

    def forward(
        self,
        votes: Votes,
        activations: Float[Tensor, "B I"] | None = None,  # noqa: ARG002  lengths say it
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Route; see :class:`Routing`. Activations are not used: the length of a pose says the same."""
        with full_precision(votes.poses.device):
            poses, coupling = attend_to_all(votes, self.bias)
        dtype = votes.poses.dtype
        return Routed(poses.to(dtype), coupling=coupling.to(dtype) if return_coupling else None)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return f"learn_bias={self.learns_bias}"


class InvertedAttentionRouting(Routing):
    """Attention whose softmax goes over the receivers: :func:`torchcaps.inverted_attention_routing`.

    The normalisation's scale and shift (D) are learned. Poses that are normalised have no length that says anything,
    so an output capsule's activation is σ(w·v_j + b), w (D) and b learned, the same for all output capsules.

    Args:
        num_iterations: How many times the coupling is computed, 1 to 1,000; 1 is uniform coupling.
        eps: Added to the variance of the components; positive.

    Raises:
        TypeError: An option of another type.
        ValueError: An option out of its range.

    Source: Tsai, Srivastava, Goh, Salakhutdinov 2020 (arXiv:2002.04764), each layer by itself; the logit of the
    activation is the source's class score.
    """

    def __init__(self, num_iterations: int = 2, *, eps: float = 1e-5) -> None:
        super().__init__()
        check_iterations("InvertedAttentionRouting", num_iterations, least=1)
        check_numbers("InvertedAttentionRouting", eps=eps)
        if not eps > 0:
            raise ValueError(f"InvertedAttentionRouting: eps must be positive, got {eps}")
        self.num_iterations, self.eps = num_iterations, eps
        self.norm_weight: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the parameters of the normalisation and of the activation."""
        self.belongs_to_no_layer(self.norm_weight)
        D = size.out_dim
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.score = nn.Parameter(torch.empty(D).uniform_(-1, 1) / math.sqrt(D))
        self.score_bias = nn.Parameter(torch.zeros(()))

    def forward(
        self,
        votes: Votes,
        activations: Float[Tensor, "B I"] | None = None,  # noqa: ARG002  the algorithm has none
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Route; see :class:`Routing`. Activations of the input capsules are not used."""
        J, dtype = votes.size.out_capsules, votes.poses.dtype
        with full_precision(votes.poses.device):
            poses, coupling = attend_to_receivers(
                votes, J, self.num_iterations, self.norm_weight, self.norm_bias, self.eps
            )
            out = (poses @ self.score.to(poses.dtype) + self.score_bias.to(poses.dtype)).sigmoid()
            if return_coupling and coupling is None:
                coupling = votes.zeros().to(full_dtype(dtype)) + 1 / J
        coupling = coupling.to(dtype) if return_coupling and coupling is not None else None
        return Routed(poses.to(dtype), out.to(dtype), coupling)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return f"num_iterations={self.num_iterations}, eps={self.eps:g}"
