import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchcaps.errors import InputError
from torchcaps.models import list_presets
from torchcaps.parts import all_parts, flat, options, part_of
from torchcaps.training import Recipe, TrainConfig, make_config, read_config
from torchcaps.training.config import WHOLE, override


@pytest.mark.parametrize("preset", list_presets())
def test_a_configuration_survives_json(preset: str, tmp_path: Path) -> None:
    config = make_config(preset, data="mnist", seed=3, epochs=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert read_config(path) == config


def test_overrides_reach_network_recipe_and_run() -> None:
    config = make_config("sabour2017", num_iterations=1, batch_size=7, seed=5)
    assert flat(config.fields)["num_iterations"] == 1
    assert config.recipe.batch_size == 7
    assert config.seed == 5


def test_what_is_left_out_of_a_file_is_the_presets() -> None:
    config = TrainConfig.from_dict({"preset": "torch-tutorial", "recipe": {"epochs": 2}})
    assert config.recipe == make_config("torch-tutorial").recipe.replace({"epochs": 2})
    assert config.model == make_config("torch-tutorial").model


def test_no_field_name_stands_twice() -> None:
    """A name of the run or of its recipe is no name of a network: each stands for one thing."""
    own = [name for settings in (Recipe, TrainConfig) for name in options(settings)]
    assert len(own) == len(set(own))
    for part in all_parts():
        assert not options(part).keys() & set(own), part_of(part)


def test_every_field_of_a_run_and_its_parts_has_one_flat_name() -> None:
    fields = flat(make_config("baseline-cnn").fields)
    assert {"dropout", "epochs", "seed", "preset", "model"} <= set(fields)
    assert (fields["model"], fields["epochs"]) == ("cnn", 50)


@pytest.mark.parametrize("name", WHOLE)
def test_what_a_run_consists_of_is_given_field_by_field(name: str) -> None:
    with pytest.raises(InputError, match=f'there is no field of sabour2017 "{name}"'):
        override(make_config("sabour2017"), {name: {}})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_iteration": 2}, 'no field of sabour2017 "num_iteration"; did you mean "num_iterations"'),
        ({"epochs": 0}, "epochs must be 1 to 1000000000, got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number, 1 to 1000000000, got 1.5"),
        ({"epochs": True}, "epochs must be 1 to 1000000000, got True"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0 and at most 1e+38, got nan"),
        ({"learning_rate": 0}, "learning_rate must be above 0 and at most 1e+38, got 0"),
        ({"schedule": "cosine"}, "schedule must be one of constant, decay-by-step"),
        ({"decoder_hidden": "512"}, "decoder_hidden must be a sequence"),
        ({"decoder_hidden": (0,)}, "decoder_hidden must be 1 to 65536, got 0"),
        ({"precision": "16"}, "precision must be one of auto, 32, bf16, got '16'"),
        ({"devices": 0}, "devices must be 1 to 4096, got 0"),
        ({"seed": -1}, "seed must be 0 to 4294967295, got -1"),
        ({"num_iterations": 10**12}, "num_iterations must be 0 to 1000, got 1000000000000"),
        ({"num_nodes": 10**20}, "num_nodes must be 1 to 4096, got 100000000000000000000"),
    ],
)
def test_a_bad_value_is_one_sentence(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        make_config("sabour2017", **overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_field_of_another_network_is_unknown() -> None:
    with pytest.raises(InputError, match='no field of baseline-cnn "num_iterations"'):
        make_config("baseline-cnn", num_iterations=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged or no configuration"),
        ("[]", "must hold a JSON object"),
        ('{"presett": "sabour2017"}', 'there is no setting "presett"; did you mean "preset"'),
        ('{"preset": "sabour"}', 'there is no preset "sabour"; did you mean "sabour2017"'),
        ('{"recipe": 3}', '"recipe" must be a JSON object'),
        ('{"recipe": {"epoch": 3}}', 'did you mean "epochs"'),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each field and its value as it is now."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value)
        elif name == "decoder":
            yield name, {True: "dense", False: None}.get(value, value)
        elif name != "layers":
            yield name, tuple(value) if isinstance(value, list) else value


def test_every_configuration_of_the_published_runs_is_read() -> None:
    """Versions up to 0.2 wrote them."""
    files = sorted((Path(__file__).parents[2] / "results").rglob("config.json"))
    if not files:
        pytest.skip("no results here: a source distribution does not hold them")
    for file in files:
        found = flat(read_config(file).fields)
        wrong = [name for name, value in leaves(json.loads(file.read_text())) if found.get(name, value) != value]
        assert not wrong, file


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no configuration"):
        read_config(tmp_path / "config.json")


def test_override_leaves_the_original_alone() -> None:
    config = make_config("sabour2017")
    assert override(config, {"epochs": 1}).recipe.epochs == 1
    assert config.recipe.epochs != 1


@pytest.mark.parametrize("plugins", [5, float("inf"), None, True, "abc", {}])
def test_plugins_that_are_no_list_are_one_sentence(plugins: object, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    values = make_config("sabour2017").to_dict() | {"plugins": plugins}
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"config\.json: plugins must be a sequence, got") as caught:
        read_config(file)
    assert "--plugin" not in str(caught.value)
