"""Learning rates as pure functions of the step, so that a resumed run needs no state for them."""

from __future__ import annotations

import math

from torchcaps.models.config import Recipe

WARM_UP_SHARE = 0.3
START_DIVISOR = 25.0


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step.

    Args:
        recipe: Names the schedule and its numbers.
        step: Steps done before this one.
        steps_per_epoch: Steps of an epoch.

    ``one-cycle`` rises on a cosine from a 25th of the peak to the peak in the first 30 % of all steps and falls on
    a cosine to zero in the rest.

    Source: Smith, Topin 2018, "Super-convergence" (arXiv:1708.07120), with cosines.
    """
    peak = recipe.learning_rate
    if recipe.schedule == "decay-by-step":
        return max(peak * recipe.decay ** (step / recipe.decay_steps), recipe.min_learning_rate)
    if recipe.schedule == "decay-by-epoch":
        return max(peak * recipe.decay ** (step // steps_per_epoch), recipe.min_learning_rate)
    if recipe.schedule == "one-cycle":
        total = recipe.epochs * steps_per_epoch
        rise = max(1.0, WARM_UP_SHARE * total)
        if step < rise:
            return _cosine(peak / START_DIVISOR, peak, step / rise)
        return _cosine(peak, 0.0, (step - rise) / (total - rise)) if total > rise else peak
    return peak


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
