"""Configurations, recipes, the optimizers against their equations, and learning rates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models import get_preset, list_presets
from torchcaps.parts import all_parts, build, flat, options, part_of
from torchcaps.training import Recipe, TrainConfig, learning_rate, make_config, read_config
from torchcaps.training.config import WHOLE, override

RATES = [1e-3 * 0.98**step for step in range(100)]


def test_the_configuration_of_every_preset_survives_json(tmp_path: Path) -> None:
    for preset in list_presets():
        config = make_config(preset, data="mnist", seed=3, epochs=2)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        assert read_config(tmp_path / "config.json") == config


def test_overrides_reach_network_recipe_and_run_of_a_copy() -> None:
    config = make_config("sabour2017", num_iterations=1, batch_size=7, seed=5)
    assert (flat(config.fields)["num_iterations"], config.recipe.batch_size, config.seed) == (1, 7, 5)
    assert override(config, {"epochs": 1}).recipe.epochs == 1
    assert config.recipe.epochs != 1
    assert make_config("sabour2017").data == get_preset("sabour2017").data
    assert make_config().data == "digits"


def test_every_option_of_a_run_and_its_parts_has_one_flat_name() -> None:
    own = [name for settings in (Recipe, TrainConfig) for name in options(settings)]
    assert len(own) == len(set(own))
    for part in all_parts():
        assert not options(part).keys() & set(own), part_of(part)
    fields = flat(make_config("baseline-cnn").fields)
    assert {"dropout", "seed", "preset"} <= set(fields)
    assert (fields["model"], fields["epochs"]) == ("cnn", 50)


def test_a_bad_value_is_one_sentence_that_names_its_field() -> None:
    for overrides, words in (
        ({"num_iteration": 2}, 'no field of sabour2017 "num_iteration"; did you mean "num_iterations"'),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0 and at most 1e+38, got nan"),
        *(({name: {}}, f'no field of sabour2017 "{name}"') for name in WHOLE if name != "preset"),
        ({"schedule": "cosine"}, "schedule must be one of"),
        ({"decoder_hidden": (0,)}, "decoder_hidden must be"),
        ({"class_weights": ()}, "class_weights must be"),
        ({"momentum": 0.8}, 'it belongs to optimizer "sgd"'),
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
        assert "--plugin" not in str(caught.value)
        assert "\n" not in str(caught.value)


def by_the_equations(weights: list[float], gradients: list[list[float]], form: str, eps: float) -> list[float]:
    """Kingma and Ba's algorithm 1, or TensorFlow's, whose βs are float32, in Python's floats."""
    b1, b2 = (0.9, 0.999) if form == "torch" else (float(torch.tensor(0.9)), float(torch.tensor(0.999)))
    ends = []
    for n, w in enumerate(weights):
        m = v = 0.0
        for t, rate in enumerate(RATES, 1):
            g = gradients[t - 1][n]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            if form == "torch":
                w -= rate * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
            else:
                w -= rate * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (math.sqrt(v) + eps)
        ends.append(w)
    return ends


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
@pytest.mark.parametrize("form", ["torch", "tensorflow"])
def test_adam_takes_the_steps_of_its_source(form: str, eps: float, rng: torch.Generator) -> None:
    weights = torch.randn(7, dtype=torch.float64, generator=rng)
    gradients = 0.02 * torch.randn(100, 7, dtype=torch.float64, generator=rng) + 0.01
    found = taken({"name": "adam", "adam": form, "adam_eps": eps}, weights, gradients) - weights
    wanted, other = (
        torch.tensor(by_the_equations(weights.tolist(), gradients.tolist(), each, eps), dtype=torch.float64) - weights
        for each in (form, {"torch": "tensorflow", "tensorflow": "torch"}[form])
    )
    assert ((found - wanted) / wanted).abs().max() < 1e-6
    assert ((found - other) / other).abs().max() > 1e-5, "the forms are not the same, so the test tells them apart"


def test_the_others_are_torchs(rng: torch.Generator) -> None:
    weights, gradients = torch.randn(7, generator=rng), torch.randn(100, 7, generator=rng)
    for part, torchs in (
        ({"name": "adamw", "weight_decay": 0.05}, lambda p: torch.optim.AdamW(p, RATES[0], weight_decay=0.05)),
        ({"name": "sgd", "momentum": 0.8, "weight_decay": 0.0}, lambda p: torch.optim.SGD(p, RATES[0], momentum=0.8)),
    ):
        assert torch.equal(taken(part, weights, gradients), taken(torchs, weights, gradients))


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
