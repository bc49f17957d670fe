"""Configurations, recipes, the optimizers against their equations, and learning rates."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_close
from torchcaps.errors import InputError
from torchcaps.models import list_presets
from torchcaps.parts import all_parts, build, options, part_of
from torchcaps.training import Recipe, TrainConfig, learning_rate, make_config, read_config
from torchcaps.training.config import NESTED_FIELDS

RATES = [1e-3 * 0.98**step for step in range(100)]


def test_the_configuration_of_every_preset_survives_json(tmp_path: Path) -> None:
    for preset in list_presets():
        config = make_config(preset, data="mnist", seed=3, epochs=2)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        assert read_config(tmp_path / "config.json") == config


def test_a_file_of_an_earlier_version_may_say_how_many_machines_there_were(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config().to_dict() | {"num_nodes": 2}))
    assert read_config(tmp_path / "config.json") == make_config()


def test_every_option_of_a_run_and_its_parts_has_one_flat_name() -> None:
    own = [name for settings in (Recipe, TrainConfig) for name in options(settings)]
    assert len(own) == len(set(own))
    for part in all_parts():
        assert not options(part).keys() & set(own), part_of(part)


def test_a_bad_value_is_one_sentence_that_names_its_field() -> None:
    for overrides, words in (
        ({"learning_rate": float("nan")}, "learning_rate must be above 0 and at most 1e+38, got nan"),
        *(({name: {}}, f'no field of sabour2017 "{name}"') for name in NESTED_FIELDS if name != "preset"),
        ({"schedule": "cosine"}, "schedule must be one of"),
        ({"class_weights": ()}, "class_weights must be"),
        ({"dropout": 0.1}, 'no field of sabour2017 "dropout"'),
    ):
        with pytest.raises(InputError) as caught:
            make_config("sabour2017", **overrides)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_bad_file_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    wrong = ("{", "[]", '{"presett": "sabour2017"}', '{"preset": "sabour"}', '{"recipe": 3}', '{"model": 3}')
    plugins = tuple(f'{{"plugins": {value}}}' for value in ("5", "Infinity", "null", "true", '"abc"', "{}"))
    for text in (None, *wrong, '{"recipe": {"epoch": 3}}', *plugins):
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError) as caught:
            read_config(path)
        assert str(path) in str(caught.value)
        assert "made with plugins" not in str(caught.value)
        assert "\n" not in str(caught.value)


def as_in_tensorflow(weights: Tensor, gradients: Tensor, eps: float) -> Tensor:
    """The weights after a step of TensorFlow's Adam, whose βs are float32, with each of the gradients."""
    b1, b2 = (float(torch.tensor(beta)) for beta in (0.9, 0.999))
    m = v = torch.zeros_like(weights)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        weights = weights - rate * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (v.sqrt() + eps)
    return weights


def taken(optimizer: dict[str, Any] | Callable[..., Any], weights: Tensor, gradients: Tensor) -> Tensor:
    """The weights after a step with each of the gradients."""
    weight = nn.Parameter(weights.clone())
    if callable(optimizer):
        made = optimizer([weight])
    else:
        made = build("optimizer", optimizer, params=[weight], learning_rate=RATES[0])
    for rate, gradient in zip(RATES, gradients, strict=True):
        made.param_groups[0]["lr"], weight.grad = rate, gradient.clone()
        made.step()
    return weight.detach()


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_adam_can_take_the_steps_of_tensorflow(eps: float) -> None:
    weights = torch.randn(7, dtype=torch.float64)
    gradients = 0.02 * torch.randn(100, 7, dtype=torch.float64) + 0.01
    found, other = (
        taken({"name": "adam", "adam": form, "adam_eps": eps}, weights, gradients) - weights
        for form in ("tensorflow", "torch")
    )
    wanted = as_in_tensorflow(weights, gradients, eps) - weights
    assert ((found - wanted) / wanted).abs().max() < 1e-6
    assert ((other - wanted) / wanted).abs().max() > 1e-5, "the forms are not the same, so the test tells them apart"


def test_the_others_are_torchs() -> None:
    weights, gradients = torch.randn(7), torch.randn(100, 7)
    for part, torchs in (
        ({"name": "adam", "adam_eps": 1e-3}, lambda p: torch.optim.Adam(p, RATES[0], eps=1e-3)),
        ({"name": "adamw", "weight_decay": 0.05}, lambda p: torch.optim.AdamW(p, RATES[0], weight_decay=0.05)),
        ({"name": "sgd", "momentum": 0.8, "weight_decay": 0.0}, lambda p: torch.optim.SGD(p, RATES[0], momentum=0.8)),
    ):
        assert_close(taken(part, weights, gradients), taken(torchs, weights, gradients))


def test_decay_by_step_is_the_authors_and_decay_by_epoch_changes_with_the_epoch_only() -> None:
    recipe = Recipe(schedule="decay-by-step", decay=0.96, decay_steps=2000, min_learning_rate=1e-6)
    rates = [learning_rate(recipe, step, 429) for step in (0, 1000, 2000, 10**6)]
    assert rates == pytest.approx([1e-3, 1e-3 * 0.96**0.5, 0.96e-3, 1e-6])
    recipe = Recipe(schedule="decay-by-epoch", decay=0.9)
    found = [learning_rate(recipe, step, 3) for step in range(7)]
    assert found == pytest.approx([1e-3, 1e-3, 1e-3, 0.9e-3, 0.9e-3, 0.9e-3, 0.81e-3])
    assert {learning_rate(Recipe(), step, 10) for step in range(50)} == {1e-3}


def test_one_cycle_rises_to_the_peak_and_falls_to_zero() -> None:
    recipe = Recipe(schedule="one-cycle", learning_rate=3e-3, epochs=10)
    rates = [learning_rate(recipe, step, 10) for step in range(101)]
    assert rates[0] == pytest.approx(3e-3 / 25)
    assert max(rates) == pytest.approx(3e-3)
    assert rates.index(max(rates)) == 30
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert (rates[65], rates[100]) == pytest.approx((1.5e-3, 0), abs=1e-12)  # half way down: the cosine's middle
    assert math.isfinite(learning_rate(Recipe(schedule="one-cycle", epochs=1), 0, 1))
