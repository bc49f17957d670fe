"""Every field of a configuration has an option, and the option reaches the configuration."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from torchcaps.cli.base import Stopped
from torchcaps.cli.fields import field_descriptions, option_name, option_type
from torchcaps.models.config import CapsNetConfig, CNNConfig, Recipe
from torchcaps.training.config import TrainConfig, field_names, make_config

PRESET_OF = {CapsNetConfig: "sabour2017", CNNConfig: "baseline-cnn", Recipe: "sabour2017", TrainConfig: "sabour2017"}
NOT_OPTIONS = ("preset", "model", "recipe")
FIELDS = [
    (config_type, field.name)
    for config_type in PRESET_OF
    for field in dataclasses.fields(config_type)
    if not (config_type is TrainConfig and field.name in NOT_OPTIONS)
]
PART = {CapsNetConfig: "model", CNNConfig: "model", Recipe: "recipe"}


@pytest.fixture
def configured(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainConfig]:
    """The configuration that `torchcaps train` with some arguments would train."""

    def configure(*arguments: Any) -> TrainConfig:
        taken = []

        def train(config: TrainConfig, out: Path | None, **_: Any) -> None:
            taken.append((config, out))
            raise Stopped("taken", 200)

        monkeypatch.setattr("torchcaps.training.train", train)
        result = cli("train", *arguments)
        assert (result.code, result.err) == (200, "taken\n")
        ((config, _),) = taken
        return config

    return configure


def another_value(name: str, hint: Any, value: Any) -> Any:
    """A value that fits the field and is not the one it has."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return next(choice for choice in choices if choice != value)
    if hint is bool:
        return not value
    if name == "kernel":
        return value + 2  # stays odd
    if typing.get_origin(hint) is tuple:
        return (3, 5)
    if int in (hint, *choices):
        return (value or 0) + 1
    return value * 0.5 or 0.25 if hint is float else "elsewhere"


STEM = {"stem_channels": (4, 4), "stem_strides": (1, 1)}
"""Fields that need each other."""


def as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option_name(name) if value else f"--no-{option_name(name)[2:]}"]
    return [option_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


@pytest.mark.parametrize(("config_type", "name"), FIELDS, ids=[f"{t.__name__}.{n}" for t, n in FIELDS])
def test_every_field_has_an_option_that_reaches_the_configuration(
    config_type: type, name: str, configured: Callable[..., TrainConfig]
) -> None:
    preset = PRESET_OF[config_type]
    needed = STEM if name in STEM else {}
    base = make_config(preset, **needed)
    part = PART.get(config_type)
    before = getattr(getattr(base, part) if part else base, name)
    wanted = another_value(name, typing.get_type_hints(config_type)[name], before)

    given = needed | {name: wanted}
    config = configured(preset, *(word for each in given for word in as_arguments(each, given[each])))

    changed = getattr(config, part) if part else config
    assert getattr(changed, name) == wanted != before
    others = dataclasses.replace(changed, **{name: before})
    assert (dataclasses.replace(config, **{part: others}) if part else others) == base, "another field changed too"


def test_only_fields_of_both_networks_share_a_name() -> None:
    names = [name for config_type, name in FIELDS if config_type is not CNNConfig]
    assert len(names) == len(set(names))
    shared = {name for config_type, name in FIELDS if config_type is CNNConfig} & set(names)
    assert shared <= {field.name for field in dataclasses.fields(CapsNetConfig)}
    types_of = [typing.get_type_hints(config_type) for config_type in (CapsNetConfig, CNNConfig)]
    assert all(types_of[0][name] == types_of[1][name] for name in shared)  # one option for both


def test_the_preset_is_sabour2017_unless_named(configured: Callable[..., TrainConfig]) -> None:
    assert configured() == make_config("sabour2017")
    assert configured("tf-notebook") == make_config("tf-notebook")


def test_none_takes_a_limit_away(configured: Callable[..., TrainConfig]) -> None:
    assert configured("keras-tutorial").recipe.limit_train == 1000
    assert configured("keras-tutorial", "--limit-train", "none").recipe.limit_train is None
    assert configured("--decoder-hidden", "none").model.decoder_hidden == ()


def test_a_configuration_file_with_options_on_top(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    from torchcaps.files import write_json

    saved = make_config("tf-notebook", num_iterations=1, epochs=3, data="mnist")
    write_json(tmp_path / "config.json", saved.to_dict())
    assert configured("--config", tmp_path / "config.json") == saved
    assert configured("tf-notebook", "--config", tmp_path / "config.json") == saved
    again = configured("--config", tmp_path / "config.json", "--seed", "1", "--no-decoder")
    assert (again.seed, again.model.decoder, again.model.num_iterations, again.data) == (1, False, 1, "mnist")


@pytest.mark.parametrize("config_type", PRESET_OF)
def test_every_field_has_words_for_the_help(config_type: type) -> None:
    words = field_descriptions(config_type)
    for field in dataclasses.fields(config_type):
        assert words[field.name].endswith("."), field.name


def test_the_help_has_every_option_under_its_heading(cli: Callable[..., Any]) -> None:
    text = cli("train", "--help").out
    headings = ["Options:", "Run:", "Recipe", "Any network", "Capsule network", "Baseline CNN", "Examples:"]
    places = [text.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    for start, end, part in ((1, 2, "run"), (2, 3, "recipe"), (3, 5, "model")):
        section = text[places[start] : places[end]]
        for name in field_names(make_config())[part]:
            assert f"  {option_name(name)} " in section, name


def test_option_types_refuse_what_does_not_fit() -> None:
    assert option_type(tuple[int, ...]).convert("7", None, None) == (7,)
    with pytest.raises(click.BadParameter, match="512,1024"):
        option_type(tuple[int, ...]).convert("7;8", None, None)
    with pytest.raises(click.BadParameter):
        option_type(int | None).convert("some", None, None)
