"""A training step, what it counts, and learning rates."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from lightning_fabric import Fabric

from torchcaps.datasets import Batch
from torchcaps.models import create_model
from torchcaps.training import Recipe, learning_rate
from torchcaps.training.step import TrainStep

TINY = {"conv_channels": 4, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (8,)}
RATES = [1e-3 * 0.9**step for step in range(24)]


def start() -> TrainStep:
    torch.manual_seed(0)
    network = create_model("sabour2017", (1, 20, 20), 10, **TINY).train()
    return TrainStep(Fabric(accelerator="cpu", devices=1, precision="32-true"), network, Recipe(), seed=0)


def batch(size: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        torch.rand(size, 1, 20, 20, generator=generator), torch.randint(10, (size,), generator=generator), None
    )


def test_a_checkpoint_of_another_device_brings_only_moments() -> None:
    one, two = start(), start()
    for n in range(3):
        one(batch(), n, RATES[n])
    saved = copy.deepcopy(one.optimizer.state_dict())
    group = {**saved["param_groups"][0], "lr": torch.tensor(0.5), "fused": False, "capturable": True}
    two.restore(one.network.state_dict(), {"state": saved["state"], "param_groups": [group]})
    assert (two.optimizer.param_groups[0]["fused"], two.optimizer.param_groups[0]["capturable"]) == (True, False)
    for step in (one, two):
        for n in range(3, 5):
            step(batch(), n, RATES[n])
    for name, value in one.network.state_dict().items():
        assert torch.equal(value, two.network.state_dict()[name]), name


def test_dropout_is_a_function_of_the_step() -> None:
    def fresh() -> TrainStep:
        torch.manual_seed(0)
        network = create_model("baseline-cnn", (1, 20, 20), 10, channels=(4, 4), hidden=(8,)).train()
        assert network.dropout > 0
        return TrainStep(Fabric(accelerator="cpu", devices=1, precision="32-true"), network, Recipe(), seed=3)

    def losses(steps: Sequence[int]) -> list[float]:
        step, found = fresh(), []
        for n in steps:
            step(batch(), n, 0.0)  # the weights stay, so that only dropout makes a difference
            found.append(float(step.sums.last_loss))
        return found

    whole = losses(range(7))
    assert len(set(whole)) == 7
    assert losses((5, 2)) == [whole[5], whole[2]]


def test_a_constant_rate() -> None:
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
