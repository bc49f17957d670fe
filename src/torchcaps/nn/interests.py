"""Interests of users: attention for the training of recommenders, and scores of items."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.ops.precision import computed_in_full_precision, full_dtype
from torchcaps.ranges import Factor, Width


@checked
def interests_of_history(mask: Bool[Tensor, "B I"], most: Width) -> Bool[Tensor, "B J"]:
    """Return a mask of the interests that a user has: the first max(1, min(J, ⌊log₂ n⌋)) for a history of n items.

    Args:
        mask: True for each item of a history; False for padding.
        most: Largest number of interests (J).

    Source: Li et al. 2019, equation 9 (arXiv:1904.08030), with the number rounded down.
    """
    number = mask.sum(1, keepdim=True).clamp_min(1).log2().floor().clamp(1, most)
    return torch.arange(most, device=mask.device) < number


@checked
@computed_in_full_precision
def label_aware_attention(
    interests: Float[Tensor, "B J D"],
    items: Float[Tensor, "B D"],
    power: Factor | None = None,
    mask: Bool[Tensor, "B J"] | None = None,
) -> Float[Tensor, "B D"]:
    """Return the interests of each user, weighted by their fit to one item.

        v = Σ_j softmax_j(max(0, ⟨v_j, e⟩)^power) v_j

    Args:
        interests: Interests v_j.
        items: Item e, one for each user.
        power: Exponent of the products. 0 gives the mean of all interests. None selects the interest with the largest
            product. The gradient of a product that is not positive is zero.
        mask: True for each interest that a user has; all if None. Masked values are never read, even NaN. A user
            without any interest gets zeros.

    Returns:
        Weighted interests v, in the higher precision of interests and items (half precision is computed in float32).

    Source: Li et al. 2019, equation 10 (arXiv:1904.08030); Cen et al. 2020, equation 6 (arXiv:2005.09347), which takes
    the largest product.
    """
    dtype, interests, items = _in_full_precision(interests, items, mask)
    products = torch.einsum("bjd,bd->bj", interests, items)
    if power is None:
        chosen = products if mask is None else products.where(mask, -torch.inf)
        return interests.take_along_dim(chosen.argmax(1)[:, None, None], 1).squeeze(1).to(dtype)
    fits = _power(products, power)
    # not -∞: the softmax of a row without any interest would be NaN; here its interests are zeros
    weights = (fits if mask is None else fits.where(mask, torch.finfo(fits.dtype).min)).softmax(1)
    return torch.einsum("bj,bjd->bd", weights, interests).to(dtype)


def _in_full_precision(
    interests: Float[Tensor, "B J D"], items: Tensor, mask: Bool[Tensor, "B J"] | None
) -> tuple[torch.dtype, Float[Tensor, "B J D"], Tensor]:
    """Return the dtype of the result, and both tensors in full precision, with zeros for masked interests."""
    dtype = torch.promote_types(interests.dtype, items.dtype)
    interests, items = (each.to(full_dtype(dtype)) for each in (interests, items))
    return dtype, interests if mask is None else interests.where(mask.unsqueeze(2), 0), items


def _power(products: Float[Tensor, "B J"], power: float) -> Float[Tensor, "B J"]:
    """Return max(0, product)^power, finite and with a gradient of zero at zero."""
    if power == 0:
        return torch.ones_like(products)
    largest = torch.finfo(products.dtype).max ** (1 / max(power, 1.0)) / 2
    return products.where(products > 0, 1.0).clamp_max(largest).pow(power).where(products > 0, 0.0)


@checked
@computed_in_full_precision
def interest_scores(
    interests: Float[Tensor, "B J D"], items: Float[Tensor, "N D"], mask: Bool[Tensor, "B J"] | None = None
) -> Float[Tensor, "B N"]:
    """Return the score of each item for a user: its largest product with an interest, max_j ⟨v_j, e_n⟩.

    Args:
        interests: Interests v_j.
        items: Items e_n.
        mask: True for each interest that a user has; all if None. Masked values are never read, even NaN. A user
            without any interest gets -∞.

    Source: Cen et al. 2020, section 3.3 (arXiv:2005.09347).
    """
    dtype, interests, items = _in_full_precision(interests, items, mask)
    products = torch.einsum("bjd,nd->bjn", interests, items)
    return (products if mask is None else products.where(mask.unsqueeze(2), -torch.inf)).amax(1).to(dtype)
