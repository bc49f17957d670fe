"""The learning-rate range test."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchcaps.tasks import find_task
from torchcaps.training import Recipe
from torchcaps.training.data import fit_data
from torchcaps.training.devices import launch
from torchcaps.training.rates import MIN_RATE, STEPS, STOP_AT_LOSS_RATIO, LearningRates, find_learning_rate


def range_test(noise: float = 0.1, **fields: Any) -> LearningRates:
    """Run the test for a linear classifier of three classes, which noise of 0.1 leaves separable."""
    torch.manual_seed(0)
    labels = torch.arange(48) % 3
    points = torch.eye(3)[labels] + noise * torch.randn(48, 3)
    network, recipe, fabric = nn.Linear(3, 3), Recipe(batch_size=8).replace(fields), launch("cpu")
    options: dict[str, Any] = {
        "task": find_task("classes"),
        "loss": None,
        "scale": "none",
        "keys": None,
        "seed": 0,
        "workers": 0,
    }
    _, data = fit_data(network, (points, labels), None, recipe, fabric, **options)
    return find_learning_rate(fabric, network, data, recipe, seed=0)


def test_rates_rise_by_a_constant_factor_and_the_loss_falls_first() -> None:
    found = range_test()
    assert found.rates[0] == pytest.approx(MIN_RATE)
    steps = [after / before for before, after in zip(found.rates, found.rates[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert steps[0] > 1
    assert min(found.losses) < 0.5 * found.losses[0]


def test_the_suggestion_is_a_tenth_of_the_best_rate() -> None:
    found = LearningRates([1e-3, 1e-2, 1e-1], [2.0, 1.0, 3.0])
    assert found.suggestion == pytest.approx(1e-3)
    assert "--learning-rate 1.0e-03" in str(list(found.tables()))


def test_it_stops_before_the_loss_explodes() -> None:
    found = range_test(noise=100.0, optimizer="sgd")
    assert 1 < len(found.rates) == len(found.losses) < STEPS
    assert all(map(math.isfinite, found.losses))
    assert max(found.losses[1:]) <= STOP_AT_LOSS_RATIO * min(found.losses)


@pytest.mark.parametrize(
    "fields",
    [{"learning_rate": 0.5}, {"epochs": 1}, {"schedule": "one-cycle"}, {"patience": 1}, {"stop_at": 0.1}],
    ids=lambda fields: next(iter(fields)),
)
def test_settings_of_a_whole_run_do_not_change_it(fields: dict[str, Any]) -> None:
    assert range_test(**fields).losses == range_test().losses


def test_a_table_has_few_rows() -> None:
    many, _ = LearningRates([10.0**-n for n in range(100, 0, -1)], [1.0] * 100).tables()
    assert 10 <= len(many.rows) <= 13
