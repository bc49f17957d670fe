"""The table of the routings: only the head changes, and its learning rates are those that the search found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchcaps.models import build_model
from torchcaps.models.fields import flat
from torchcaps.reproduce import get_table
from torchcaps.reproduce.logs import RunLog, counted, read_logs
from torchcaps.reproduce.tables.zoo import HEADS, LEARNING_RATE, SEARCH_SEED, SEARCHED

RESULTS = Path(__file__).parents[2] / "results"
ROWS = {row.name: row for row in get_table("zoo").rows if row.compared_to or row.name.endswith("-uniform")}
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
    found: dict[float, tuple[float, float]] = {}
    for rate in SEARCHED:
        row = SEARCH[f"{images}-{head}-{rate * 1e4:.0f}"]
        assert row.config(SEARCH_SEED).recipe.learning_rate == rate
        for log in counted(read_logs(RESULTS, get_table("zoo-search"), row), row):
            found[rate] = _judged(log)
    assert len(found) == len(SEARCHED)
    assert min(found, key=lambda rate: found[rate]) == LEARNING_RATE


def _judged(log: RunLog) -> tuple[float, float]:
    """Validation error and loss of the last epoch; a run that diverged comes last."""
    if log.diverged is not None:
        return (1.0, float("inf"))
    last = log.summary["validation"]["last"]
    return (1 - last["accuracy"], last["loss"])


@pytest.mark.parametrize("row", ROWS)
def test_rows_have_the_learning_rate_of_the_search(row: str) -> None:
    assert ROWS[row].config(0).recipe.learning_rate == LEARNING_RATE
