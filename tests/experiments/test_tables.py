"""The shipped tables: every row is a run that can be made, and what is compared can be compared."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.grades import LEARNING_RATES as GRADES
from experiments.grades import SEARCHED as GRADES_SEARCHED
from experiments.objects import LEARNING_RATES as OBJECTS
from experiments.objects import SEARCHED as OBJECTS_SEARCHED
from experiments.pixels import AS_LONG, LEARNING_RATES, NETWORKS, SEARCHED
from experiments.pixels import TESTS as PIXEL_TESTS
from experiments.store import RESULTS, read_runs
from experiments.table import Table
from experiments.tables import SHIPPED, load_table
from experiments.zoo import LONG
from torchcaps.datasets import list_datasets
from torchcaps.errors import InputError
from torchcaps.models import plan_network

RECORDED = Path(__file__).parents[2] / RESULTS
RUNS = read_runs(RECORDED)
ROWS = {name: {row.name: row for row in table.rows} for name, table in SHIPPED.items()}
SHAPES = {info.name: info.in_shape for info in list_datasets()}
# of plugins
SHAPES |= dict.fromkeys(("viewpoints-azimuth", "viewpoints-elevation", "silhouettes-azimuth"), (1, 48, 48))
SHAPES |= dict.fromkeys(("turned-digits", "elevations"), (1, 28, 28))
SHAPES |= {"few-digits": (1, 36, 36), "brain-slices": (1, 96, 72), "brain-blocks": (1, 20, 20, 20)}
SHAPES |= {"drawn:cells": (3, 24, 24), "drawn:records": (2, 1, 128), "drawn:windows": (2, 1, 128)}
SHAPES |= dict.fromkeys(("drawn:patches", "drawn-scene:scene"), (16, 5, 5))


def num_parameters(table: str, name: str, decoder: bool = True) -> int:
    row = ROWS[table][name]
    network = plan_network(row.config(0).model, SHAPES[row.data], 10)
    named = network.named_parameters()
    return sum(each.numel() for part, each in named if decoder or not part.startswith("decoder"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_row_is_a_run_that_can_be_made(name: str) -> None:
    configs, planned = [], set[str]()
    for row in SHIPPED[name].rows:
        config = row.config(3)
        assert (config.seed, config.precision) == (3, "auto")
        shape = SHAPES[row.data.partition("-{")[0]]
        if (network := repr((config.model, shape))) not in planned:  # rows share it that train differently
            plan_network(config.model, shape, 10)  # shapes only
            planned.add(network)
        if config.recipe.stop_at is not None:
            assert config.recipe.schedule != "one-cycle", "its length must be known before"
            assert config.recipe.select == "accuracy", "the chosen epoch must be the one that reached the target"
        assert config not in configs or name == "by-hand", "two rows are the same run"
        configs.append(config)
    described = {(row.group, row.title, row.full) for row in SHIPPED[name].rows}
    assert len(described) == len(SHIPPED[name].rows) or name == "by-hand", "two are described alike"


def test_networks_that_are_compared_have_as_many_parameters_and_see_the_same_changes() -> None:
    for table, cnn, capsules in (
        ("mnist", "cnn-twin", "compact-r3-recon"),
        ("multimnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-matched", "sabour2017"),
    ):
        assert num_parameters(table, cnn) == pytest.approx(num_parameters(table, capsules), rel=0.01)
    sizes = [num_parameters("zoo", f"long-{network}", decoder=False) for network in LONG]
    assert sizes == [161_824, 161_226]
    for name in ("mnist", "routing", "multimnist", "affnist", "robustness"):
        recipes = {row: each.config(0).recipe for row, each in ROWS[name].items()}
        own = [recipes.pop(row) for row in list(recipes) if row == "compact" or "-long" in row]
        assert all(recipe == own[0] for recipe in own), "those of compact's own recipe"
        assert len({(r.max_shift, r.max_rotation, r.max_scaling) for r in recipes.values()}) == 1


@pytest.mark.parametrize("test", PIXEL_TESTS)
def test_networks_for_pixels_have_as_many_parameters_and_the_same_recipe(test: str) -> None:
    names = [f"{test}-{network}" for network in NETWORKS]
    unet = num_parameters("pixels", names[0])
    assert all(num_parameters("pixels", name) == pytest.approx(unet, rel=0.03) for name in names)
    recipes = [ROWS["pixels"][name].config(0).recipe for name in names]
    assert all(recipe.replace({"learning_rate": recipes[0].learning_rate}) == recipes[0] for recipe in recipes)
    longer = ROWS["pixels"][f"{test}-unet-as-long"].config(0).recipe
    assert longer.replace({"epochs": recipes[0].epochs}) == recipes[0]
    assert longer.epochs == AS_LONG * recipes[0].epochs


@pytest.mark.parametrize("test", PIXEL_TESTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_learning_rates_for_pixels_are_the_best_of_the_search(test: str, network: str) -> None:
    found = {
        log.config["learning_rate"]: log.summary["validation"]["last"]["accuracy"]
        for log in RUNS.values()
        if log.table == "pixels-search" and log.row.startswith(f"{test}-{network}-")
    }
    assert found.keys() <= set(SEARCHED)
    assert max(found, key=found.__getitem__) == LEARNING_RATES[test][network]


@pytest.mark.parametrize(("test", "task"), [(test, task) for test, tasks in GRADES.items() for task in tasks])
def test_the_learning_rates_of_grades_are_the_best_of_the_search(test: str, task: str) -> None:
    losses = {
        log.config["learning_rate"]: log.summary["validation"]["last"]["loss"]
        for log in RUNS.values()
        if log.table == "grades-search" and log.row.startswith(f"{test}-{task}-")
    }
    assert losses.keys() == set(GRADES_SEARCHED)
    assert min(losses, key=losses.__getitem__) == GRADES[test][task]


@pytest.mark.parametrize("row", OBJECTS)
def test_the_learning_rates_of_objects_are_the_best_of_the_search(row: str) -> None:
    losses = {
        rate: RUNS[f"objects-search/{row}-{1e3 * rate:.0f}/100"].summary["validation"]["last"]["loss"]
        for rate in OBJECTS_SEARCHED
    }
    assert min(losses, key=losses.__getitem__) == OBJECTS[row]


def test_every_recorded_run_is_one_of_its_row_and_has_its_epochs(recorded: Mapping[str, Any]) -> None:
    curves = recorded["page"].curves
    assert len(RUNS) == 898
    of_rows = {log.name for logs in recorded["page"].rows.values() for log in logs}
    assert RUNS.keys() - of_rows == set(), "runs with other settings than their row, or without its measures"
    for name, log in RUNS.items():
        epochs = [line["epoch"] for line in curves[name]]
        assert epochs == [str(n + 1) for n in range(log.summary["epochs"])]
        accuracy = float(curves[name][-1]["validation_accuracy"])
        assert accuracy == pytest.approx(log.summary["validation"]["last"]["accuracy"], rel=1e-4)
    assert curves.keys() == RUNS.keys()


def test_a_table_that_cannot_be(tiny: Table, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='did you mean "mnist"'):
        load_table("mnits")
    (tmp_path / "rows.py").write_text("ROWS = ()\n")
    with pytest.raises(InputError, match=r"rows\.py has no TABLE"):
        load_table(str(tmp_path / "rows.py"))
    for wrong in ({"rows": (*tiny.rows, tiny.rows[0])}, {"name": "../up"}):
        with pytest.raises(InputError, match="names must be lower-case"):
            dataclasses.replace(tiny, **wrong)
    with pytest.raises(InputError, match='no row of table tiny "plane"; did you mean "plain"'):
        dataclasses.replace(tiny, rows=(dataclasses.replace(tiny.rows[0], compared_to="plane"), *tiny.rows[1:]))
