"""The shipped tables: every row is a run that can be made, and what is compared can be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.store import RESULTS, is_run_of, logs_of, read_curves, read_runs, restore
from experiments.table import Table
from experiments.tables import SHIPPED, load_table
from experiments.zoo import HEADS, LEARNING_RATE, LONG, SEARCHED, SEED
from torchcaps.datasets import list_datasets
from torchcaps.errors import InputError
from torchcaps.models import get_preset, plan_network
from torchcaps.parts import flat

RECORDED = Path(__file__).parents[2] / RESULTS
RUNS = read_runs(RECORDED)
ROWS = {name: {row.name: row for row in table.rows} for name, table in SHIPPED.items()}
SHAPES = {info.name: info.in_shape for info in list_datasets()}
SHAPES |= dict.fromkeys(("viewpoints-azimuth", "viewpoints-elevation"), (1, 48, 48))  # of the plugin


def options(table: str, row: str) -> dict[str, Any]:
    return flat(ROWS[table][row].config(0).fields)


def num_parameters(table: str, name: str, decoder: bool = True) -> int:
    row = ROWS[table][name]
    network = plan_network(row.config(0).model, SHAPES[row.data], 10)
    named = network.named_parameters()
    return sum(each.numel() for part, each in named if decoder or not part.startswith("decoder"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_row_is_a_run_that_can_be_made(name: str) -> None:
    configs = []
    for row in SHIPPED[name].rows:
        config = row.config(3)
        assert (config.seed, config.precision) == (3, "auto")
        plan_network(config.model, SHAPES[row.data], 10)  # shapes only
        if config.recipe.stop_at is not None:
            assert config.recipe.schedule != "one-cycle", "its length must be known before"
            assert config.recipe.select == "accuracy", "the chosen epoch must be the one that reached the target"
        assert config not in configs or name == "by-hand", "two rows are the same run"
        configs.append(config)
    described = {(row.group, row.title, row.full) for row in SHIPPED[name].rows}
    assert len(described) == len(SHIPPED[name].rows) or name == "by-hand", "two are described alike"


def test_the_paper_s_figures_stand_beside_the_full_rows() -> None:
    errors = {name: row.published for name, row in ROWS["mnist"].items() if row.published and row.full}
    paper = {"r1": "0.34 ± 0.032 %", "r1-recon": "0.29 ± 0.011 %", "r3": "0.35 ± 0.036 %", "r3-recon": "0.25 ± 0.005 %"}
    assert errors == {f"sabour2017-{name}": error for name, error in paper.items()} | {"baseline-cnn": "0.39 %"}


@pytest.mark.parametrize(
    ("plain", "changed", "factor"),
    [
        ("compact-r3-recon", "compact-r3-recon-strong", 20),
        ("compact-code-r3-recon", "compact-code-r3-recon-weak", 1 / 20),
        ("sabour2017-r3-recon", "sabour2017-r3-recon-strong", 20),
        ("code-r3-recon", "code-r3-recon-weak", 1 / 20),
        ("compact", "compact-long-r3-recon-strong", 20),
        ("sabour2017-3-epochs", "sabour2017-3-epochs-strong", 20),
    ],
)
def test_the_question_of_the_reconstruction_changes_its_weight_alone(plain: str, changed: str, factor: float) -> None:
    one, other = options("mnist", plain), options("mnist", changed)
    assert {name for name in one | other if one.get(name) != other.get(name)} == {"reconstruction_weight"}
    assert other["reconstruction_weight"] == pytest.approx(factor * one["reconstruction_weight"])


@pytest.mark.parametrize(
    ("table", "cnn", "capsules"),
    [
        ("mnist", "baseline-small", "compact-r3-recon"),
        ("mnist", "cnn-twin", "compact-r3-recon"),
        ("multimnist", "baseline-small", "compact-r3"),
        ("multimnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-matched", "sabour2017"),
    ],
)
def test_networks_that_are_compared_have_as_many_parameters(table: str, cnn: str, capsules: str) -> None:
    assert num_parameters(table, cnn) == pytest.approx(num_parameters(table, capsules), rel=0.01)


@pytest.mark.parametrize("name", ["mnist", "routing", "multimnist", "affnist", "robustness"])
def test_networks_that_are_compared_see_the_same_changes(name: str) -> None:
    """Those of `compact`'s own recipe are compared with one another."""
    long = {row for row in ROWS[name] if row == "compact" or "-long" in row}
    recipes = [(row in long, each.config(0).recipe) for row, each in ROWS[name].items()]
    own = [recipe for is_long, recipe in recipes if is_long]
    assert all(recipe == own[0] for recipe in own)
    assert len({(r.max_shift, r.max_rotation, r.max_scaling) for is_long, r in recipes if not is_long}) == 1


def test_every_combination_of_the_routing_table_is_there_once() -> None:
    for prefix in ("compact", "sabour2017"):
        found = [options("routing", name) for name in ROWS["routing"] if name.startswith(prefix)]
        assert len(found) == 3 * (1 + 2 + 3 * 2 * 2) + 4 * 2
        names = ("weight_std", "weight_init", "num_iterations", "softmax_over", "stop_gradient")
        routed = {tuple(each[name] for name in names) for each in found if each["num_iterations"] > 1}
        assert len(routed) == 3 * 3 * 2 * 2 + 3 * 2


def test_the_tutorials_run_as_their_presets_say() -> None:
    for name, row in ROWS["tutorials"].items():
        if not name.endswith(("-1-epoch", "-20-epochs")):
            config = row.config(0)
            assert config.model == get_preset(name).network
            assert config.recipe == type(config.recipe)().replace(get_preset(name).recipe)


# the table of the routings


def test_only_the_head_changes() -> None:
    uniform = options("zoo", "azimuth-uniform")
    for head in HEADS:
        own = options("zoo", f"azimuth-{head}")
        if "pooling" not in own:
            changed = {name for name in own.keys() & uniform.keys() if own[name] != uniform[name]}
            assert changed <= {"routing", "transform", "num_iterations"}
        assert own["learning_rate"] == LEARNING_RATE


def test_the_search_has_a_seed_of_its_own_and_looks_at_no_test_set() -> None:
    for row in SHIPPED["zoo-search"].rows:
        assert (row.first_seed, row.seeds) == (SEED, 1)
        assert row.config(SEED).recipe.limit_test == 1
    assert all(row.first_seed + row.seeds <= SEED for row in SHIPPED["zoo"].rows)


def test_learning_rates_are_the_best_of_the_search() -> None:
    logs = logs_of(SHIPPED["zoo-search"], RUNS)
    for name in [f"{images}-{head}" for images in ("views", "digits") for head in HEADS] + [f"long-{n}" for n in LONG]:
        found = {}
        for rate in SEARCHED:
            row = ROWS["zoo-search"][f"{name}-{rate * 1e4:.0f}"]
            assert row.config(SEED).recipe.learning_rate == rate
            (log,) = logs[row.name]
            last = log.summary["validation"]["last"]
            found[rate] = (-last["accuracy"], last["loss"])
        assert min(found, key=lambda rate: found[rate]) == LEARNING_RATE


def test_the_long_runs_are_two_networks_of_one_size_by_one_recipe() -> None:
    of_other_schedules = {"decay": 1.0, "decay_steps": 1, "min_learning_rate": 0.0}
    capsules, cnn = (ROWS["zoo"][f"long-{network}"].config(0).recipe for network in LONG)
    assert capsules.replace(of_other_schedules) == cnn.replace(of_other_schedules)
    assert [num_parameters("zoo", f"long-{network}", decoder=False) for network in LONG] == [161_824, 161_226]


# records, and tables of one's own


def test_every_recorded_run_is_one_of_its_row_and_has_its_epochs() -> None:
    curves = read_curves(RECORDED)
    assert len(RUNS) == 562
    for name, log in RUNS.items():
        assert is_run_of(restore(log.config), ROWS[log.table][log.row]), name
        epochs = [line["epoch"] for line in curves[name]]
        assert epochs == [str(n + 1) for n in range(log.summary["epochs"])]
        accuracy = float(curves[name][-1]["validation_accuracy"])
        assert accuracy == pytest.approx(log.summary["validation"]["last"]["accuracy"], rel=1e-4)
    assert curves.keys() == RUNS.keys()


def test_the_words_beside_the_records_say_what_they_ran_on() -> None:
    words = " ".join((RECORDED / "README.md").read_text(encoding="utf-8").split())
    summaries = [log.summary for log in RUNS.values()]
    makers = [each["hardware"]["processor"].split("(")[0] for each in summaries]
    assert f"{makers.count('Intel')} runs are from an Intel Xeon, {makers.count('AMD EPYC')} from an AMD EPYC" in words
    precisions = [each["precision"] for each in summaries]
    assert f"{precisions.count('32')} in float32, {precisions.count('bf16')} in bfloat16" in words
    inexact = sum(not each["exact"] for each in summaries) / len(summaries)
    assert f"For {inexact:.0%} of the {len(summaries)} runs it is not".replace("%", " %") in words


def test_ratios_of_speed_say_where_they_were_measured() -> None:
    lines = (RECORDED / "speed.jsonl").read_text(encoding="utf-8").splitlines()
    for each in map(json.loads, lines):
        assert each["value"] > 0
        assert {"ratio", "cpu", "torch", "commit", "date", "threads"} <= each.keys()
        assert each["isa"] in ("avx2", "avx512")


def test_a_table_that_cannot_be(tiny: Table, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='did you mean "mnist"'):
        load_table("mnits")
    (tmp_path / "rows.py").write_text("ROWS = ()\n")
    with pytest.raises(InputError, match=r"rows\.py has no TABLE"):
        load_table(str(tmp_path / "rows.py"))
    with pytest.raises(InputError, match="names are lower-case"):
        dataclasses.replace(tiny, rows=(*tiny.rows, tiny.rows[0]))
    with pytest.raises(InputError, match="names are lower-case"):
        dataclasses.replace(tiny, name="../up")
    with pytest.raises(InputError, match='no row of table tiny "plane"; did you mean "plain"'):
        dataclasses.replace(tiny, rows=(dataclasses.replace(tiny.rows[0], compared_to="plane"), *tiny.rows[1:]))
