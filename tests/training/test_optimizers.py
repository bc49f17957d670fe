"""The optimizers: Adam in the form of each source against its equations, and runs that go on exactly with each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import registered_for_now
from tiny_runs import StopAt, same_weights, tiny_config
from torchcaps import register
from torchcaps.cli import main
from torchcaps.errors import InputError
from torchcaps.models import get_preset
from torchcaps.parts import build
from torchcaps.ranges import PositiveFactor
from torchcaps.training import Interrupted, Progress, make_config, read_config, resume, train
from torchcaps.training.checkpoint import read_checkpoint

RATES = [1e-3 * 0.98**step for step in range(100)]


@pytest.fixture
def own() -> Iterator[None]:
    """An optimizer of one's own: steps of one length, after the sign of a running mean."""
    with registered_for_now():

        @register("optimizer", "signed")
        class Signed(torch.optim.Optimizer):
            """The sign of the mean gradient.

            Args:
                params: What is learned.
                learning_rate: Of the first step.
                half_life: Steps in which a gradient loses half of its weight.
            """

            def __init__(self, params: Any, learning_rate: float, *, half_life: PositiveFactor = 2.0) -> None:
                super().__init__(params, {"lr": learning_rate})
                self.half_life = half_life

            @torch.no_grad()
            def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for p in group["params"]:
                        mean = self.state[p].setdefault("mean", torch.zeros(p.numel(), dtype=p.dtype))
                        mean.lerp_(p.grad.flatten(), 1 - 0.5 ** (1 / self.half_life))
                        p.sub_(group["lr"] * mean.sign().view_as(p))

        yield


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


def _built(optimizer: dict[str, Any], weight: nn.Parameter) -> Any:
    return build("optimizer", optimizer, params=[weight], learning_rate=RATES[0])


def taken(optimizer: dict[str, Any] | Callable[..., Any], weights: Tensor, gradients: Tensor) -> Tensor:
    """The weights after a step with each of the gradients."""
    weight = nn.Parameter(weights.clone())
    made = optimizer([weight]) if callable(optimizer) else _built(optimizer, weight)
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


@pytest.mark.parametrize(
    ("part", "torchs"),
    [
        ({"name": "adamw", "weight_decay": 0.05}, lambda p: torch.optim.AdamW(p, RATES[0], weight_decay=0.05)),
        ({"name": "sgd", "momentum": 0.8, "weight_decay": 0.0}, lambda p: torch.optim.SGD(p, RATES[0], momentum=0.8)),
    ],
)
def test_the_others_are_torchs(part: dict[str, Any], torchs: Callable[..., Any], rng: torch.Generator) -> None:
    weights, gradients = torch.randn(7, generator=rng), torch.randn(100, 7, generator=rng)
    assert torch.equal(taken(part, weights, gradients), taken(torchs, weights, gradients))


def test_presets_name_their_sources_adam() -> None:
    names = ("sabour2017-code", "tf-notebook", "keras-tutorial", "torch-notebook", "torch-tutorial")
    recipes = [get_preset(name).recipe for name in names]
    assert [recipe.get("adam", "torch") for recipe in recipes] == ["tensorflow"] * 3 + ["torch"] * 2
    assert [recipe.get("adam_eps", 1e-8) for recipe in recipes] == [1e-8, 1e-8, 1e-7, 1e-8, 1e-8]


WAYS: list[dict[str, Any]] = [
    {"adam": "tensorflow", "adam_eps": 1e-4},
    {"optimizer": "adamw", "weight_decay": 0.05},
    {"optimizer": "sgd", "momentum": 0.8},
    {"optimizer": "signed", "half_life": 3.0},
]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_run_goes_on_exactly_with_each(way: dict[str, Any], bars: Path, tmp_path: Path) -> None:
    limits = {"limit_train": 96, "limit_test": 30, "epochs": 2}
    config = tiny_config(bars, data="digits", **limits, **way)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(config, whole, progress=Progress(), figures=False)
    with pytest.raises(Interrupted):
        train(config, broken, progress=StopAt(8), figures=False)
    assert read_config(broken / "config.json") == read_config(whole / "config.json")
    resume(broken, progress=Progress(), figures=False)
    ends = [read_checkpoint(out / "last.ckpt") for out in (whole, broken)]
    assert same_weights(ends[0]["model"], ends[1]["model"])
    for number, moments in ends[0]["optimizer"]["state"].items():
        assert same_weights(moments, ends[1]["optimizer"]["state"][number])
    train(tiny_config(bars, data="digits", **limits), tmp_path / "plain", progress=Progress(), figures=False)
    assert not same_weights(ends[0]["model"], read_checkpoint(tmp_path / "plain" / "last.ckpt")["model"])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_command_line_takes_each(way: dict[str, Any], bars: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "config.json", tmp_path / "run"
    file.write_text(json.dumps(tiny_config(bars, epochs=1, limit_train=32).to_dict()))
    options = [word for name, value in way.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "--config", str(file), *options, "--out", str(out), "--no-figures"]) == 0
    optimizer = read_config(out / "config.json").recipe.optimizer
    assert {"optimizer": optimizer["name"], **optimizer}.items() >= way.items()


def test_an_option_of_another_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match='"momentum" with the parts that are chosen; it belongs to optimizer "sgd"'):
        make_config("sabour2017", momentum=0.8)
