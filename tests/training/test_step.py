"""A training step's Adam, in the form of each source, against the formulas in float64; and learning rates."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from torchcaps.datasets import Batch
from torchcaps.models import Network, Recipe, create_model, get_preset
from torchcaps.training.step import BiasCorrection, TrainStep, learning_rate

TINY = {"conv_channels": 4, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (8,)}
RATES = [1e-3 * 0.9**step for step in range(24)]


def start(recipe: Recipe) -> tuple[TrainStep, list[Tensor]]:
    """A step, and where its weights start."""
    torch.manual_seed(0)
    network: Network = create_model("sabour2017", (1, 20, 20), 10, **TINY).train()
    step = TrainStep(Fabric(accelerator="cpu", devices=1, precision="32-true"), network, recipe, seed=0)
    return step, [parameter.detach().clone() for parameter in network.parameters()]


def batch(size: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        torch.rand(size, 1, 20, 20, generator=generator), torch.randint(10, (size,), generator=generator), None
    )


def steps_by_hand(starts: list[Tensor], gradients: list[list[Tensor]], form: str, eps: float) -> list[np.ndarray]:
    """The weights after the steps, in float64: Kingma and Ba's algorithm, or TensorFlow's."""
    found = []
    for n, weight in enumerate(starts):
        w, m, v = weight.double().numpy().copy(), 0.0, 0.0
        for t, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True), 1):
            g = gradient[n].double().numpy()
            b1, b2 = (0.9, 0.999) if form == "torch" else (float(np.float32(0.9)), float(np.float32(0.999)))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            if form == "torch":
                w -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
            else:
                w -= rate * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("form", "eps"), [("torch", 1e-8), ("torch", 1e-3), ("tensorflow", 1e-8), ("tensorflow", 1e-3)]
)
def test_adam_takes_the_steps_of_its_source(form: str, eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step, starts = start(Recipe(adam=form, adam_eps=eps))  # type: ignore[arg-type]
    gradients: list[list[Tensor]] = []
    optimise = step.optimizer.step

    def noted() -> None:
        gradients.append([p.grad.clone() for p in step.network.parameters() if p.grad is not None])
        optimise()

    monkeypatch.setattr(step.optimizer, "step", noted)
    for n, rate in enumerate(RATES):
        step(batch(), n, rate)
    ends = [parameter.detach() for parameter in step.network.parameters()]
    wanted = steps_by_hand(starts, gradients, form, eps)
    other = steps_by_hand(starts, gradients, "torch" if form == "tensorflow" else "tensorflow", eps)
    apart = 0.0
    for before, after, hand, false in zip(starts, ends, wanted, other, strict=True):
        way = np.abs(hand - before.double().numpy()).max()
        assert np.abs(after.double().numpy() - hand).max() < 1e-4 * way + 5e-7
        apart = max(apart, float(np.abs(hand - false).max() / way))
    assert apart > 0.02  # the two forms are not the same, so the test tells them apart


def test_restored_moments_go_on_in_the_same_form() -> None:
    recipe = get_preset("tf-notebook").recipe
    assert recipe.adam == "tensorflow"
    whole, _ = start(recipe)
    for n, rate in enumerate(RATES[:8]):
        whole(batch(), n, rate)
        if n == 3:
            weights = copy.deepcopy(whole.network.state_dict())
            moments = copy.deepcopy(whole.optimizer.state_dict())
    again, _ = start(recipe)
    again.restore(weights, moments)
    for n, rate in enumerate(RATES[4:8], 4):
        again(batch(), n, rate)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


def test_a_checkpoint_of_another_device_brings_only_moments() -> None:
    one, two = (start(Recipe())[0] for _ in range(2))
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
        assert isinstance(network.dropout, nn.Dropout)
        assert network.dropout.p > 0
        return TrainStep(Fabric(accelerator="cpu", devices=1, precision="32-true"), network, Recipe(), seed=3)

    def losses(steps: Sequence[int]) -> list[float]:
        step, found = fresh(), []
        for n in steps:
            step(batch(), n, 0.0)  # the weights stay, so that only dropout makes a difference
            found.append(step.tally.read().last_loss)
        return found

    whole = losses(range(7))
    assert len(set(whole)) == 7
    assert losses((5, 2)) == [whole[5], whole[2]]


def test_a_loss_that_is_lost_is_counted_where_it_was() -> None:
    step, _ = start(Recipe())
    for n in range(5):
        step(batch(), n, RATES[n])
    assert step.tally.read().first_bad == float("inf")
    step.tally.clear()
    for n in range(5, 8):
        given = batch()
        if n == 6:
            given.images.fill_(float("nan"))
        step(given, n, RATES[n])
    counted = step.tally.read()
    assert (counted.first_bad, counted.steps) == (1, 3)


def test_epsilon_is_32_times_as_large_in_tensorflows_first_step() -> None:
    assert BiasCorrection()(1) == pytest.approx(0.001**0.5 / 0.1, rel=1e-4)
    assert pytest.approx(31.6, abs=0.03) == 1 / (1 - 0.999) ** 0.5
    assert BiasCorrection()(100_000) == pytest.approx(1)


def test_presets_name_their_sources_adam() -> None:
    forms = {name: (get_preset(name).recipe.adam, get_preset(name).recipe.adam_eps) for name in SOURCES}
    assert forms == SOURCES


SOURCES = {
    "sabour2017-code": ("tensorflow", 1e-8),
    "tf-notebook": ("tensorflow", 1e-8),
    "keras-tutorial": ("tensorflow", 1e-7),
    "torch-notebook": ("torch", 1e-8),
    "torch-tutorial": ("torch", 1e-8),
}


def test_powers_are_products_in_float32() -> None:
    """As TensorFlow's two variables go on from step to step, also where a run is taken up, or begins again."""
    first, second = np.float32(1), np.float32(1)
    wanted = []
    for _ in range(50):
        first, second = first * np.float32(0.9), second * np.float32(0.999)
        wanted.append(np.sqrt(1 - float(second)) / (1 - float(first)))
    correction = BiasCorrection()
    assert [correction(t) for t in range(1, 51)] == wanted
    assert [correction(7), correction(3), correction(50)] == [wanted[6], wanted[2], wanted[49]]
    exact = np.sqrt(1 - float(np.float32(0.999)) ** 20) / (1 - float(np.float32(0.9)) ** 20)
    assert wanted[19] != exact
    assert wanted[19] == pytest.approx(exact, rel=1e-5)


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
