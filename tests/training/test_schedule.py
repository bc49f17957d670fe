import math

import pytest

from torchcaps.models.config import Recipe
from torchcaps.training import learning_rate


def test_constant() -> None:
    assert {learning_rate(Recipe(), step, 10) for step in range(50)} == {1e-3}


def test_decay_by_step_is_the_authors() -> None:
    recipe = Recipe(schedule="decay-by-step", decay=0.96, decay_steps=2000, min_learning_rate=1e-6)
    assert learning_rate(recipe, 0, 429) == 1e-3
    assert learning_rate(recipe, 1000, 429) == pytest.approx(1e-3 * 0.96**0.5)
    assert learning_rate(recipe, 2000, 429) == pytest.approx(0.96e-3)
    assert learning_rate(recipe, 10**6, 429) == 1e-6


def test_decay_by_epoch_changes_with_the_epoch_only() -> None:
    recipe = Recipe(schedule="decay-by-epoch", decay=0.9)
    assert [learning_rate(recipe, step, 3) for step in range(7)] == pytest.approx(
        [1e-3, 1e-3, 1e-3, 0.9e-3, 0.9e-3, 0.9e-3, 0.81e-3]
    )


def test_one_cycle_rises_to_the_peak_and_falls_to_zero() -> None:
    recipe = Recipe(schedule="one-cycle", learning_rate=3e-3, epochs=10)
    rates = [learning_rate(recipe, step, 10) for step in range(101)]
    assert rates[0] == pytest.approx(3e-3 / 25)
    assert max(rates) == pytest.approx(3e-3)
    assert rates.index(max(rates)) == 30
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    # half way down: the cosine's middle
    assert rates[65] == pytest.approx(1.5e-3)


def test_one_cycle_of_a_single_step() -> None:
    assert math.isfinite(learning_rate(Recipe(schedule="one-cycle", epochs=1), 0, 1))
