"""Interests of users, as recommenders train them and look items up by them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.ranges import Factor, Width


@checked
def interests_of_history(mask: Bool[Tensor, "B I"], most: Width) -> Bool[Tensor, "B J"]:
    """Which of ``most`` interests a user has: max(1, min(J, ⌊log₂ n⌋)) for a history of n items.

    Args:
        mask: Which items of each history are there.
        most: J.

    Source: Li et al. 2019, equation 9 (arXiv:1904.08030), whose number is rounded down.
    """
    number = mask.sum(1, keepdim=True).clamp_min(1).log2().floor().clamp(1, most)
    return torch.arange(most, device=mask.device) < number


@checked
def label_aware_attention(
    interests: Float[Tensor, "B J D"],
    items: Float[Tensor, "B D"],
    power: Factor | None = None,
    mask: Bool[Tensor, "B J"] | None = None,
) -> Float[Tensor, "B D"]:
    """A user as one item sees them: the interests, weighted by how well they fit it.

        v = Σ_j softmax_j(⟨v_j, e⟩^power) v_j

    Args:
        interests: v_j.
        items: e, the item that each user is to be told.
        power: Of the products that are positive, the others count as zero; None takes the interest with the largest
            product alone, 0 the mean of all.
        mask: Which interests a user has; all if None.

    Source: Li et al. 2019, equation 10 (arXiv:1904.08030); Cen et al. 2020, equation 6 (arXiv:2005.09347), which takes
    the largest.
    """
    products = torch.einsum("bjd,bd->bj", interests, items)
    if power is None:
        chosen = products if mask is None else products.where(mask, -torch.inf)
        return interests.take_along_dim(chosen.argmax(1)[:, None, None], 1).squeeze(1)
    fits = products.clamp_min(0).pow(power)
    weights = (fits if mask is None else fits.where(mask, -torch.inf)).softmax(1)
    return torch.einsum("bj,bjd->bd", weights, interests)


@checked
def interest_scores(
    interests: Float[Tensor, "B J D"], items: Float[Tensor, "N D"], mask: Bool[Tensor, "B J"] | None = None
) -> Float[Tensor, "B N"]:
    """How well each item fits a user: the largest of its products with the interests, max_j ⟨v_j, e_n⟩.

    Args:
        interests: v_j.
        items: e_n.
        mask: Which interests a user has, at least one; all if None.

    Source: Cen et al. 2020, section 3.3 (arXiv:2005.09347).
    """
    products = torch.einsum("bjd,nd->bjn", interests, items)
    return (products if mask is None else products.where(mask.unsqueeze(2), -torch.inf)).amax(1)
