"""Routing by attention: each input capsule attends to the output capsules that its votes agree with."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_flags, check_numbers, check_one_device, check_tensor
from torchcaps.ops.dynamic_routing.checks import check_iterations, check_votes
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.squash import exponential_squash
from torchcaps.ops.votes import BuiltVotes, VoteSums


@overload
def self_attention_routing(
    votes: Float[Tensor, "B I J D"],
    *,
    bias: Float[Tensor, "I J"] | None = None,
    return_coupling: Literal[False] = False,
) -> Float[Tensor, "B J D"]: ...


@overload
def self_attention_routing(
    votes: Float[Tensor, "B I J D"], *, bias: Float[Tensor, "I J"] | None = None, return_coupling: Literal[True]
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]: ...


def self_attention_routing(
    votes: Float[Tensor, "B I J D"], *, bias: Float[Tensor, "I J"] | None = None, return_coupling: bool = False
) -> Float[Tensor, "B J D"] | tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Routing without iterations: a vote is coupled as strongly as it agrees with all votes for the same output.

        a_ij = ⟨û_j|i, Σ_k û_j|k⟩ / √D
        c_ij = softmax_j(a_ij) + bias_ij
        v_j  = exponential_squash(Σ_i c_ij û_j|i)

    Args:
        votes: û_j|i, the prediction of input capsule i for output capsule j.
        bias: Added to the coupling after the softmax; may be learned, and negative.
        return_coupling: Also return the coupling c_ij, bias included.

    Returns:
        Output capsules v_j, lengths in [0, 1), in the dtype of ``votes`` (half precision is computed in float32);
        with ``return_coupling`` also c_ij.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other.

    Source: Mazzia, Salvetti, Chiaberge 2021, "Efficient-CapsNet: capsule network with self-attention routing",
    section 3 (arXiv:2101.12491).
    """
    name = "self_attention_routing"
    check_flags(name, return_coupling=return_coupling)
    check_votes(name, votes)
    if bias is not None:
        check_tensor(name, "bias", bias, tuple(votes.shape[1:3]))
        check_one_device(name, votes=votes, bias=bias)
    with full_precision(votes.device):
        capsules, coupling = attend_to_all(BuiltVotes(in_full_precision(votes)), bias)
    return (capsules.to(votes.dtype), coupling.to(votes.dtype)) if return_coupling else capsules.to(votes.dtype)


def attend_to_all(
    votes: VoteSums, bias: Float[Tensor, "I J"] | None
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Capsules and coupling of :func:`self_attention_routing`, over votes that need not be built."""
    total = in_full_precision(votes.weighted_sum(None))
    coupling = votes.compete(in_full_precision(votes.agreement(total)) / math.sqrt(total.shape[2]))
    if bias is not None:
        coupling = coupling + bias.to(coupling.dtype)
    return exponential_squash(in_full_precision(votes.weighted_sum(coupling))), coupling


@overload
def inverted_attention_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 2,
    *,
    norm_weight: Float[Tensor, "D"] | None = None,
    norm_bias: Float[Tensor, "D"] | None = None,
    eps: float = 1e-5,
    return_coupling: Literal[False] = False,
) -> Float[Tensor, "B J D"]: ...


@overload
def inverted_attention_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 2,
    *,
    norm_weight: Float[Tensor, "D"] | None = None,
    norm_bias: Float[Tensor, "D"] | None = None,
    eps: float = 1e-5,
    return_coupling: Literal[True],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]: ...


def inverted_attention_routing(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int = 2,
    *,
    norm_weight: Float[Tensor, "D"] | None = None,
    norm_bias: Float[Tensor, "D"] | None = None,
    eps: float = 1e-5,
    return_coupling: bool = False,
) -> Float[Tensor, "B J D"] | tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Attention whose softmax goes over the receivers: the output capsules compete for an input capsule's vote.

        c_ij = 1/J                             in the first iteration,
        c_ij = softmax_j(⟨û_j|i, v_j⟩ / √D)    in all others
        v_j  = LayerNorm(Σ_i c_ij û_j|i)       over the D components, after each iteration

    Args:
        votes: û_j|i, the prediction of input capsule i for output capsule j.
        num_iterations: How many times the coupling is computed, 1 to 1,000; 1 is uniform coupling.
        norm_weight: Scale of the normalisation; 1 if None.
        norm_bias: Shift of the normalisation; 0 if None.
        eps: Added to the variance of the D components; positive.
        return_coupling: Also return the coupling of the last iteration.

    Returns:
        Output capsules v_j, normalised, not squashed: their length is no score. The dtype is that of ``votes`` (half
        precision is computed in float32). With ``return_coupling`` also c_ij. Of one component the normalisation
        leaves ``norm_bias`` only.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other, or an option out of its range.

    Source: Tsai, Srivastava, Goh, Salakhutdinov 2020, "Capsules with inverted dot-product attention routing"
    (arXiv:2002.04764), procedure 1 for a layer by itself.
    """
    name = "inverted_attention_routing"
    check_flags(name, return_coupling=return_coupling)
    check_iterations(name, num_iterations, least=1)
    check_numbers(name, eps=eps)
    if not eps > 0:
        raise ValueError(f"{name}: eps must be positive, got {eps}")
    check_votes(name, votes)
    for what, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None:
            check_tensor(name, what, tensor, (votes.shape[3],))
    check_one_device(name, votes=votes, norm_weight=norm_weight, norm_bias=norm_bias)
    with full_precision(votes.device):
        built = BuiltVotes(in_full_precision(votes))
        capsules, coupling = attend_to_receivers(built, votes.shape[2], num_iterations, norm_weight, norm_bias, eps)
    if not return_coupling:
        return capsules.to(votes.dtype)
    if coupling is None:
        coupling = votes.new_full(votes.shape[:3], 1 / votes.shape[2])
    return capsules.to(votes.dtype), coupling.to(votes.dtype)


def attend_to_receivers(
    votes: VoteSums,
    out_capsules: int,
    num_iterations: int,
    norm_weight: Float[Tensor, "D"] | None,
    norm_bias: Float[Tensor, "D"] | None,
    eps: float,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Capsules of :func:`inverted_attention_routing`, over votes that need not be built; no coupling if it is 1/J."""
    coupling = None
    total = in_full_precision(votes.weighted_sum(None)) / out_capsules
    D = total.shape[2]
    weight, bias = (None if given is None else given.to(total.dtype) for given in (norm_weight, norm_bias))
    capsules = F.layer_norm(total, (D,), weight, bias, eps)
    for _ in range(num_iterations - 1):
        coupling = votes.compete(in_full_precision(votes.agreement(capsules)) / math.sqrt(D))
        capsules = F.layer_norm(in_full_precision(votes.weighted_sum(coupling)), (D,), weight, bias, eps)
    return capsules, coupling
