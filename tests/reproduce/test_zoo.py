"""The table of the routings: only the head changes, and its learning rates are those that the search found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from torchcaps.models import build_model
from torchcaps.models.fields import flat
from torchcaps.reproduce import get_table
from torchcaps.reproduce.logs import RunLog, counted, read_logs
from torchcaps.reproduce.tables.zoo import HEADS, LEARNING_RATE, LONG, SEARCH_SEED, SEARCHED

RESULTS = Path(__file__).parents[2] / "results"
ZOO = {row.name: row for row in get_table("zoo").rows}
ROWS = {name: row for name, row in ZOO.items() if (row.compared_to or "").endswith("-uniform") or "-uniform" in name}
SEARCH = {row.name: row for row in get_table("zoo-search").rows}


def fields(name: str) -> dict[str, Any]:
    return flat(ROWS[name].config(0))


@pytest.mark.parametrize("head", HEADS)
def test_only_the_head_changes(head: str) -> None:
    own, uniform = fields(f"azimuth-{head}"), fields("azimuth-uniform")
    if "pooling" in own:
        assert own["pooling"] == {"average-pooling": "average", "max-pooling": "max", "fully-connected": "none"}[head]
        return
    changed = {name for name in own.keys() & uniform.keys() if own[name] != uniform[name]}
    assert changed <= {"routing", "transform", "num_iterations", "learning_rate"}
    assert own["classification_loss"] == "score-cross-entropy"


@pytest.mark.parametrize("shape", [(1, 48, 48), (1, 40, 40), (1, 28, 28)])
def test_all_heads_see_maps_of_the_same_convolutions(shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        pooled, capsules = (
            build_model(ROWS[name].config(0).model, shape, 5) for name in ("azimuth-max-pooling", "azimuth-uniform")
        )
    convolutions = [
        [tuple(each.weight.shape) for each in network.modules() if isinstance(each, torch.nn.Conv2d)]
        for network in (pooled, capsules)
    ]
    assert convolutions[0] == convolutions[1][:-1]  # the last one makes the activations of primary capsules
    types, height, width = capsules.primary_grid
    assert pooled.map_shape == (types * 16, height, width)


def test_the_search_has_a_seed_of_its_own_and_looks_at_no_test_set() -> None:
    for row in SEARCH.values():
        config = row.config(SEARCH_SEED)
        assert list(row.seeds_of("small")) == [SEARCH_SEED]
        assert config.recipe.limit_test == 1
    assert all(SEARCH_SEED not in row.seeds_of("small") for row in ROWS.values())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("images", ["views", "digits"])
def test_learning_rates_are_the_best_of_the_search(images: str, head: str) -> None:
    assert _best_rate(f"{images}-{head}") == LEARNING_RATE


@pytest.mark.parametrize("network", LONG)
def test_learning_rates_of_the_long_runs_are_the_best_of_the_search(network: str) -> None:
    assert _best_rate(f"long-{network}") == LEARNING_RATE == ZOO[f"long-{network}"].config(0).recipe.learning_rate


def test_the_long_runs_are_two_networks_of_one_size_by_one_recipe() -> None:
    capsules, cnn = (ZOO[f"long-{network}"].config(0) for network in ("efficient-capsnet", "cnn"))
    of_other_schedules = {"decay": 1.0, "decay_steps": 1, "min_learning_rate": 0.0}
    recipes = [dataclasses.replace(run.recipe, **of_other_schedules) for run in (capsules, cnn)]
    assert recipes[0] == recipes[1]
    with torch.device("meta"):
        networks = [build_model(run.model, (1, 28, 28), 10) for run in (capsules, cnn)]
    sizes = [
        sum(each.numel() for name, each in network.named_parameters() if not name.startswith("decoder"))
        for network in networks
    ]
    assert sizes == [161_824, 161_226]


def _best_rate(name: str) -> float:
    """The learning rate with the lowest validation error, then loss, of the search of a network."""
    found: dict[float, tuple[float, float]] = {}
    for rate in SEARCHED:
        row = SEARCH[f"{name}-{rate * 1e4:.0f}"]
        assert row.config(SEARCH_SEED).recipe.learning_rate == rate
        for log in counted(read_logs(RESULTS, get_table("zoo-search"), row), row):
            found[rate] = _judged(log)
    assert len(found) == len(SEARCHED)
    return min(found, key=lambda rate: found[rate])


def _judged(log: RunLog) -> tuple[float, float]:
    """Validation error and loss of the last epoch; a run that diverged comes last."""
    if log.diverged is not None:
        return (1.0, float("inf"))
    last = log.summary["validation"]["last"]
    return (1 - last["accuracy"], last["loss"])


@pytest.mark.parametrize("row", ROWS)
def test_rows_have_the_learning_rate_of_the_search(row: str) -> None:
    assert ROWS[row].config(0).recipe.learning_rate == LEARNING_RATE
