"""The tables as they are: every row is a run that can be made, and the questions of the paper are among them."""

from __future__ import annotations

import pytest
import torch

from torchcaps.datasets import list_datasets
from torchcaps.errors import InputError
from torchcaps.models import build_model, get_preset
from torchcaps.models.fields import flat
from torchcaps.registry import Registry
from torchcaps.reproduce import Row, Table, get_table, list_tables, register_table
from torchcaps.reproduce.figures import DRAW
from torchcaps.reproduce.table import BUDGETS

TABLES = ["mnist", "routing", "multimnist", "affnist", "tutorials", "robustness", "zoo", "zoo-search"]
ROWS = [(name, row) for name in TABLES for row in get_table(name).rows]
SHAPES = {info.name: info.in_shape for info in list_datasets()}


def rows_of(table: str) -> dict[str, Row]:
    return {row.name: row for row in get_table(table).rows}


def test_the_paper_s_tables_are_there() -> None:
    assert list_tables() == TABLES


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: value.name if isinstance(value, Row) else value)
def test_every_row_is_a_run_that_can_be_made(table: str, row: Row) -> None:
    config = row.config(3)
    assert config.seed == 3
    assert row.data in {info.name for info in list_datasets()}
    with torch.device("meta"):  # shapes only
        build_model(config.model, SHAPES[row.data], 10)
    if config.recipe.stop_at is not None:
        assert config.recipe.schedule != "one-cycle", "its length must be known before"
        assert config.recipe.select == "accuracy", "the chosen epoch must be the one that reached the target"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_rows_words_and_figures_for_each_budget(name: str) -> None:
    table = get_table(name)
    assert table.budgets.keys() <= set(BUDGETS)
    for budget in BUDGETS:
        assert bool(table.rows_of(budget)) == (budget in table.budgets)
        titles = [(row.group, row.title) for row in table.rows_of(budget)]
        assert len(set(titles)) == len(titles), "two rows are described alike"
    assert all(words.endswith(".") for words in table.budgets.values())
    assert set(table.figures) <= DRAW.keys()


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: value.name if isinstance(value, Row) else value)
def test_no_row_asks_for_a_precision(table: str, row: Row) -> None:
    assert row.config(0).precision == "auto"


@pytest.mark.parametrize("name", TABLES)
def test_no_two_rows_are_the_same_run(name: str) -> None:
    configs = [row.config(0) for row in get_table(name).rows]
    assert all(configs.count(config) == 1 for config in configs)


def test_the_paper_s_figures_stand_beside_the_full_rows() -> None:
    mnist = rows_of("mnist")
    assert [mnist[f"sabour2017-{name}"].published_error for name in ("r1", "r1-recon", "r3", "r3-recon")] == [
        0.34,
        0.29,
        0.35,
        0.25,
    ]
    assert mnist["baseline-cnn"].published_error == 0.39
    pairs = rows_of("multimnist")
    names = ("baseline-cnn", "sabour2017-r1", "sabour2017-r3")
    assert [pairs[name].published_error for name in names] == [8.1, 7.5, 5.2]


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
    mnist = rows_of("mnist")
    one, other = (flat(mnist[name].config(0)) for name in (plain, changed))
    assert {name for name in one | other if one.get(name) != other.get(name)} == {"reconstruction_weight"}
    assert other["reconstruction_weight"] == pytest.approx(factor * one["reconstruction_weight"])


def test_every_combination_of_the_routing_table_is_there_once() -> None:
    for prefix in ("compact", "sabour2017"):
        found = [row.config(0).model for row in get_table("routing").rows if row.name.startswith(prefix)]
        assert len(found) == 3 * (1 + 2 + 3 * 2 * 2) + 4 * 2
        fields = "weight_std", "weight_init", "num_iterations", "softmax_over", "stop_gradient"
        values = [flat(network) for network in found if network.has_capsules]
        settings = [tuple(each[name] for name in fields) for each in values if each["num_iterations"] > 1]
        assert len(set(settings)) == len(settings) == 3 * 3 * 2 * 2 + 3 * 2


def num_parameters(table: str, name: str) -> int:
    row = rows_of(table)[name]
    with torch.device("meta"):
        network = build_model(row.config(0).model, SHAPES[row.data], 10)
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("table", "cnn", "capsules"),
    [
        ("mnist", "baseline-small", "compact-r3-recon"),
        ("mnist", "cnn-twin", "compact-r3-recon"),
        ("mnist", "cnn-twin-long", "compact"),
        ("multimnist", "baseline-small", "compact-r3"),
        ("multimnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-twin", "compact-r3"),
        ("affnist", "cnn-matched", "sabour2017"),
        ("robustness", "cnn-twin", "compact-r3"),
        ("robustness", "baseline-small", "compact-r3"),
    ],
)
def test_networks_that_are_compared_have_as_many_parameters(table: str, cnn: str, capsules: str) -> None:
    assert num_parameters(table, cnn) == pytest.approx(num_parameters(table, capsules), rel=0.01)


@pytest.mark.parametrize("name", ["mnist", "routing", "multimnist", "affnist", "robustness"])
def test_networks_that_are_compared_see_the_same_changes(name: str) -> None:
    """Those of `compact`'s own recipe are compared with one another."""
    own = [row.config(0).recipe for row in rows_of(name).values() if row.name == "compact" or "-long" in row.name]
    assert all(recipe == own[0] for recipe in own)
    recipes = [row.config(0).recipe for row in rows_of(name).values() if row.config(0).recipe not in own]
    assert len({(recipe.max_shift, recipe.max_rotation, recipe.max_scaling) for recipe in recipes}) == 1


def test_the_tutorials_run_as_their_presets_say() -> None:
    for name, row in rows_of("tutorials").items():
        if name.endswith(("-1-epoch", "-20-epochs")):
            continue
        preset, config = get_preset(name), row.config(0)
        assert (config.model, config.recipe) == (preset.model, preset.recipe)


def test_a_table_is_registered_once(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table"))
    register_table(tiny)
    assert get_table("tiny") is tiny
    with pytest.raises(InputError, match='there is a table "tiny" already'):
        register_table(tiny)
    with pytest.raises(InputError, match='did you mean "tiny"'):
        get_table("tny")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Two Words"}, "lower-case"),
        ({"name": "../up"}, "lower-case"),
        ({"budgets": ()}, "budget"),
    ],
)
def test_rows_that_cannot_be(fields: dict[str, object], message: str) -> None:
    right = {"name": "a", "title": "t", "preset": "sabour2017", "data": "digits", "budgets": ("small",)}
    with pytest.raises(ValueError, match=message):
        Row(**(right | fields))


def test_a_table_names_each_row_once(tiny: Table) -> None:
    import dataclasses

    with pytest.raises(ValueError, match="share a name"):
        dataclasses.replace(tiny, rows=(*tiny.rows, tiny.rows[0]))
    with pytest.raises(ValueError, match="lower-case"):
        dataclasses.replace(tiny, name="a/b")
    with pytest.raises(ValueError, match="plain is compared to nobody, which table tiny has not"):
        dataclasses.replace(tiny, rows=(dataclasses.replace(tiny.rows[0], compared_to="nobody"),))
