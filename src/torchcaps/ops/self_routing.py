"""Self-routing: each input capsule chooses its output capsules by itself, without looking at the others."""

from __future__ import annotations

from typing import Literal, overload

from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_flags, check_one_device, check_tensor
from torchcaps.ops.dynamic_routing.checks import check_active_votes
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.votes import BuiltVotes, VoteSums


@overload
def self_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    routing_logits: Float[Tensor, "B I J"],
    *,
    return_coupling: Literal[False] = False,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]: ...


@overload
def self_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    routing_logits: Float[Tensor, "B I J"],
    *,
    return_coupling: Literal[True],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]: ...


def self_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    routing_logits: Float[Tensor, "B I J"],
    *,
    return_coupling: bool = False,
) -> (
    tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]
    | tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
):
    """A mixture of experts: routing logits come from each input capsule alone, without agreement or iterations.

        c_ij   = softmax_j(logits_ij)
        pose_j = Σ_i c_ij a_i û_j|i / Σ_i c_ij a_i
        a_j    = Σ_i c_ij a_i / Σ_i a_i

    Args:
        votes: û_j|i, the prediction of input capsule i for output capsule j.
        activations: a_i, at least 0. Where all of an image are 0, so are its poses and activations.
        routing_logits: Of input capsule i for output capsule j, in the source a linear function of its pose u_i.
        return_coupling: Also return the coupling c_ij, before it is multiplied by a_i.

    Returns:
        Poses, and activations, which sum to 1 over j, in the dtype of ``votes`` (half precision is computed in
        float32); with ``return_coupling`` also c_ij.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other.

    Source: Hahn, Pyeon, Kim 2019, "Self-routing capsule networks", section 3 (NeurIPS 2019).
    """
    name = "self_routing"
    check_flags(name, return_coupling=return_coupling)
    check_active_votes(name, votes, activations)
    check_tensor(name, "routing_logits", routing_logits, tuple(votes.shape[:3]))
    check_one_device(name, votes=votes, routing_logits=routing_logits)
    with full_precision(votes.device):
        full = in_full_precision(votes)
        routed = choose_outputs(BuiltVotes(full), activations.to(full.dtype), routing_logits.to(full.dtype))
    poses, out, coupling = (tensor.to(votes.dtype) for tensor in routed)
    return (poses, out, coupling) if return_coupling else (poses, out)


def choose_outputs(
    votes: VoteSums, activations: Float[Tensor, "B I"], logits: Float[Tensor, "B I J"]
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]:
    """Poses, activations and coupling of :func:`self_routing`, over votes that need not be built."""
    coupling = votes.compete(logits)
    shares = coupling * activations.unsqueeze(2)  # (B, I, J)
    mass, total = shares.sum(1), activations.sum(1, keepdim=True)  # (B, J), (B, 1)
    poses = in_full_precision(votes.weighted_sum(shares / above_zero(mass).unsqueeze(1)))
    return poses, mass / above_zero(total), coupling


def above_zero(divisor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A divisor whose zeros, under which only zeros stand, are ones."""
    return divisor.where(divisor > 0, 1.0)
