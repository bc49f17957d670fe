"""Every option of every part, and every field of a run, has an option that reaches the configuration."""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from own_parts import OWN, register, two_layers
from support import registered_for_now
from torchcaps.checks import check
from torchcaps.cli.base import Stopped
from torchcaps.cli.fields import field_descriptions, option_name
from torchcaps.cli.options import option_type
from torchcaps.errors import InputError
from torchcaps.files import write_json
from torchcaps.models.presets import get_preset, list_presets, register_preset
from torchcaps.parts import PARTS, Option, all_parts, complete, flat, options, part_of
from torchcaps.training import Recipe, TrainConfig, make_config

NOT_OPTIONS = ("preset", "model", "recipe", "plugins", "fitted", "layers")
#: Options by what has them.
CASES = {
    (owner, option.name): option
    for owner in (*all_parts(), *OWN.values(), Recipe, TrainConfig)
    for option in options(owner).values()
    if option.name not in NOT_OPTIONS
}
#: The only one of its kind, there is no other to choose.
del CASES[PARTS["network"]["capsules"], "primary_capsules"]
PRESETS = {"cnn": "baseline-cnn", "pooled": "cnn-pooled"}
CHOSEN_BY = {"primary": "primary_capsules", "loss": "classification_loss"}


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A preset with a layer of each kind, so that it has every option of capsule networks; and parts of one's own."""
    with registered_for_now():
        register(monkeypatch)
        register_preset("two-layers", "Two layers.", network={"layers": two_layers()})
        yield


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


def choices_in(hint: Any) -> Iterator[Any]:
    for each in typing.get_args(hint):
        yield from [each] if typing.get_origin(hint) is Literal else choices_in(each)


def another_value(option: Option, before: Any) -> Any:
    """A value that fits the option and is not the one it has."""
    if option.choice is not None:
        return next((name for name in PARTS[option.choice.kind] if name != before), None)
    for value in (*choices_in(option.hint), True, False, 3, 5, 0.5, 0.25, (3, 5), "elsewhere"):
        try:
            check(option.name, value, option.hint)
        except InputError:
            continue
        if value != before:
            return value
    raise AssertionError(option)


def as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [option_name(name) if value else f"--no-{option_name(name)[2:]}"]
    return [option_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


@pytest.mark.parametrize(("owner", "name"), CASES, ids=[f"{each.__name__}.{name}" for each, name in CASES])
def test_every_option_reaches_the_configuration(owner: type, name: str, configured: Callable[..., TrainConfig]) -> None:
    kind, part = part_of(owner)
    preset = PRESETS.get(part, "two-layers") if kind == "network" else "two-layers"
    needed = {} if kind in ("", "network", "layer") else {CHOSEN_BY.get(kind, kind): part}
    base = flat(make_config(preset, **needed).fields)
    wanted = another_value(CASES[owner, name], base[name])
    given = needed | {name: wanted}

    config = configured(preset, *(word for each in given for word in as_arguments(each, given[each])))

    found = flat(config.fields)
    assert found[name] == wanted != base[name]
    assert {each: found[each] for each in found.keys() & base.keys() - {name}} == {
        each: base[each] for each in found.keys() & base.keys() - {name}
    }, "another option changed too"
    assert found.keys() == base.keys() or CASES[owner, name].choice is not None
    assert config == make_config(preset, **given)


@pytest.mark.parametrize(
    ("arguments", "decoder"),
    [
        (("sabour2017", "--no-decoder"), None),
        (("sabour2017", "--decoder", "none"), None),
        (("sabour2017-r1", "--decoder"), "dense"),
        (("sabour2017-r1", "--decoder", "dense"), "dense"),
        (("--decoder", "--seed", "1"), "dense"),
    ],
)
def test_a_part_is_left_out_and_put_in(
    configured: Callable[..., TrainConfig], arguments: tuple[str, ...], decoder: str | None
) -> None:
    assert flat(configured(*arguments).fields)["decoder"] == decoder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("baseline-cnn", "--num-iterations", "3"), "--num-iterations is an option of --routing dynamic or --routing "),
        (("sabour2017", "--channels", "3"), "--channels is an option of the network cnn, which is not chosen"),
        (("sabour2017", "--layer-kernel", "3"), "--layer-kernel is an option of the layer conv, which is not chosen"),
        (("sabour2017", "--temperature", "3"), "--temperature is an option of --routing cosine, which is not chosen"),
        (("sabour2017-r1", "--decoder-hidden", "8"), "--decoder-hidden is an option of --decoder dense, which is not"),
        (("two-layers", "--routing", "cosine", "--leaky"), "--leaky is an option of --routing dynamic, which is not"),
        (("--momentum", "0.5"), "--momentum is an option of --optimizer sgd, which is not chosen"),
        (("--m-plus", "0.8", "--classification-loss", "spread"), "--m-plus is an option of --classification-loss mar"),
        (("--num-iteration", "3"), "'--num-iterations'?"),
        (("--routing", "dynamc"), 'there is no routing "dynamc"; did you mean "dynamic"? One of your own is loaded by'),
        (("--num-capsules", "5"), "num_capsules"),
    ],
)
def test_what_is_no_option_of_the_network_is_refused(
    cli: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    result = cli("train", *arguments)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


PLUGIN = '''
import torch
from torchcaps import register
from torchcaps.ops.squash import squash
from torchcaps.nn import Routed, Routing
from torchcaps.ranges import Factor, PositiveFactor

@register("routing", "hot")
class Hot(Routing):
    """The plain sum, squashed.

    Args:
        heat: How hot it is.
    """

    def __init__(self, heat: PositiveFactor = 1.0) -> None:
        super().__init__()
        self.heat = heat

    def forward(self, votes, activations=None, *, return_coupling=False):
        return Routed(squash(votes.weighted_sum(None) * self.heat))

@register("optimizer", "slow")
class Slow(torch.optim.SGD):
    """Small steps.

    Args:
        brake: What steps are divided by.
    """

    def __init__(self, params, learning_rate, *, brake: Factor = 2.0) -> None:
        super().__init__(params, learning_rate / brake)
        self.brake = brake
'''


def test_parts_of_a_plugin_bring_their_options(
    cli: Callable[..., Any], configured: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    file = tmp_path / "parts_of_mine.py"
    file.write_text(PLUGIN)
    config = configured("--plugin", file, "--routing", "hot", "--heat", "2", "--optimizer", "slow", "--brake", "4")
    assert flat(config.fields).items() >= {"routing": "hot", "heat": 2.0, "optimizer": "slow", "brake": 4.0}.items()
    assert config.plugins == (str(file),)
    assert "hot" in cli("presets", "--plugin", file).out


def test_a_part_of_a_prompt_has_options_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was typed has no source file to read them from."""
    namespace: dict[str, Any] = {"__name__": "typed"}
    lines = (
        "from torchcaps.parts import *\n@dataclass(frozen=True)\nclass Typed(Settings):\n    s: int = 1\n    'Words.'\n"
    )
    monkeypatch.setitem(sys.modules, "typed", types.ModuleType("typed"))
    exec(lines, namespace)
    assert field_descriptions(namespace["Typed"]) == {}


def test_what_is_not_given_is_fitted_to_images_of_ones_own(
    configured: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    assert configured("compact", "--data", "folder:shapes").fitted == ("epochs", "batch_size", "learning_rate")
    assert configured("compact", "--data", "npz:x.npz", "--epochs", "3").fitted == ("batch_size", "learning_rate")
    assert configured("compact", "--data", "npz:x.npz", "--epochs", "3", "--batch-size", "8").fitted == (
        "learning_rate",
    )
    assert configured("compact", "--data", "mnist").fitted == ()
    assert configured("compact", "--data", "mnist").recipe.fill == "zeros"
    assert configured("compact", "--data", "folder:shapes").recipe.fill == "edge"
    assert configured("compact", "--data", "folder:shapes", "--fill", "zeros").recipe.fill == "zeros"
    write_json(tmp_path / "config.json", make_config("compact", data="mnist").to_dict())
    assert configured("--config", tmp_path / "config.json", "--data", "folder:shapes").fitted == (), "a file says all"


def test_the_preset_is_sabour2017_unless_named(configured: Callable[..., TrainConfig]) -> None:
    assert configured() == make_config("sabour2017", data="digits")
    assert configured("tf-notebook") == make_config("tf-notebook", data="mnist")


def test_a_preset_brings_its_data_set_unless_another_is_named(configured: Callable[..., TrainConfig]) -> None:
    assert configured("sabour2017-multimnist").data == "multimnist"
    assert configured("sabour2017-multimnist", "--data", "digits", "--objects", "1").data == "digits"


def test_none_takes_a_limit_away(configured: Callable[..., TrainConfig]) -> None:
    assert configured("keras-tutorial").recipe.limit_train == 1000
    assert configured("keras-tutorial", "--limit-train", "none").recipe.limit_train is None
    assert flat(configured("--decoder-hidden", "none").model)["decoder_hidden"] == ()


def test_a_configuration_file_with_options_on_top(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    saved = make_config("tf-notebook", num_iterations=1, epochs=3, data="mnist", optimizer="sgd", momentum=0.5)
    write_json(tmp_path / "config.json", saved.to_dict())
    assert configured("--config", tmp_path / "config.json") == saved
    assert configured("tf-notebook", "--config", tmp_path / "config.json") == saved
    again = configured("--config", tmp_path / "config.json", "--seed", "1", "--no-decoder")
    found = flat(again.fields)
    assert (again.seed, found["decoder"], found["num_iterations"], found["momentum"]) == (1, None, 1, 0.5)


@pytest.mark.parametrize("owner", [*all_parts(), Recipe, TrainConfig], ids=lambda each: each.__name__)
def test_every_option_has_words_for_the_help(owner: type) -> None:
    words = field_descriptions(owner)
    for option in options(owner).values():
        assert (option.help or words[option.name]).endswith("."), option.name


def test_the_help_lists_the_run_and_the_recipe_once(cli: Callable[..., Any]) -> None:
    text = cli("train", "--help").out
    section = r"^(\S[^\n]*?)(?: \(default: the preset's\))?:\n((?:(?:  [^\n]*)?\n)+)"
    sections = dict(re.findall(section, text, re.MULTILINE))
    assert [heading for heading in sections if not heading.startswith("Usage")] == [
        *("Options", "Run", "Recipe", "Examples")
    ]
    shown = {name: "Run" for name in options(TrainConfig) if name not in NOT_OPTIONS}
    shown |= dict.fromkeys(options(Recipe), "Recipe")
    for name, heading in shown.items():
        assert len(re.findall(f"^  {option_name(name)} ", text, re.MULTILINE)) == 1, name
        assert f"  {option_name(name)} " in sections[heading], name
    for parts in PARTS.values():
        for name in {name for part in parts.values() for name in options(part)}:
            assert f"{option_name(name)} " not in sections["Run"] + sections["Recipe"], name
    assert "`torchcaps presets PRESET`" in text
    assert len(text.splitlines()) <= 70


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_shows_each_option_of_its_parts(cli: Callable[..., Any], name: str) -> None:
    """Once, unless two of its parts have it with different values; nothing stands as Python would write it."""
    out, preset = cli("presets", name).out, get_preset(name)
    recipe = Recipe().replace(preset.recipe)
    trees = preset.network, recipe.fields, complete("optimizer", recipe.optimizer)
    parts = {option.name for each in all_parts() for option in options(each).values() if option.choice}
    for field, value in [pair for tree in trees for pair in flat(tree).items()]:
        shown = len(re.findall(rf"^{field} ", out, re.MULTILINE))
        most = len(value) if isinstance(value, tuple) else 1
        assert field in {"name", "optimizer", *parts} or 1 <= shown <= max(most, 1), field
    assert "{" not in out
    assert "\nOptimizer adam " in out
    if preset.has_capsules:
        first = preset.network["layers"][0]
        for heading in ("Backbone ", "Primary conv ", "Layer ", f"Routing {first['routing']['name']} of layer 1"):
            assert f"\n{heading}" in out
        assert ("\nDecoder " in out) == (preset.network["decoder"] is not None)


def test_a_preset_of_two_layers_shows_both(cli: Callable[..., Any]) -> None:
    out = cli("presets", "two-layers").out
    first, second = out.index("\nLayer conv of layer 1"), out.index("\nLayer dense of layer 2")
    assert "\nlayer_types " in out[first:second]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("capsule_dim ")] == ["4", "5"]
    described = json.loads(cli("presets", "two-layers", "--json").out)["model"]
    assert [layer["name"] for layer in described["layers"]] == ["conv", "dense"]
    assert complete("network", described) == get_preset("two-layers").network
    listed = cli("presets").out
    assert "layers conv,dense" in listed


def test_the_presets_are_one_table_with_what_differs_and_the_parts(cli: Callable[..., Any]) -> None:
    out = " ".join(cli("presets").out.split())
    for name in list_presets():
        assert out.count(f" {name} ") >= 2, name
    assert "sabour2017-r1 num_iterations 1; decoder none" in out
    assert "compact-deep layers conv,dense;" in out, "beside compact, which it is a variant of"
    assert "keras-tutorial-r2 num_iterations 2 " in out
    assert "adam tensorflow; schedule decay-by-step" in out
    assert "--routing dynamic, " in out
    assert "--optimizer adam, adamw, sgd " in out


def test_option_types_refuse_what_does_not_fit() -> None:
    assert option_type(tuple[int, ...]).convert("7", None, None) == (7,)
    with pytest.raises(click.BadParameter, match="512,1024"):
        option_type(tuple[int, ...]).convert("7;8", None, None)
    with pytest.raises(click.BadParameter):
        option_type(int | None).convert("some", None, None)
