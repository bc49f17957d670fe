"""Every field of a configuration has an option, and the option reaches the configuration."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

from own_parts import register, two_layers
from torchcaps.cli.base import Stopped
from torchcaps.cli.fields import field_descriptions, is_option, option_name, option_type, part_heading
from torchcaps.models.config import CapsNetConfig, CNNConfig, NetworkConfig, Recipe
from torchcaps.models.fields import all_parts, flat, is_choice, replace, tree
from torchcaps.models.presets import _PRESETS, Preset, get_preset, list_presets
from torchcaps.training.config import TrainConfig, make_config

NOT_OPTIONS = ("preset", "model", "recipe", "plugins", "fitted")
#: Fields by what has them, of all kinds of parts.
FIELDS = {
    (config_type, name): hint
    for config_type in (CapsNetConfig, CNNConfig, Recipe, TrainConfig)
    for owner, name, hint in tree(config_type)
    if is_option(hint) and not (config_type is TrainConfig and (owner is not TrainConfig or name in NOT_OPTIONS))
}
PRESET_OF = {CapsNetConfig: "two-layers", CNNConfig: "baseline-cnn", Recipe: "sabour2017", TrainConfig: "sabour2017"}


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset with a layer of each kind, so that it has every field."""
    model = replace(CapsNetConfig(), {"layers": two_layers()})
    preset = Preset(name="two-layers", description="Two layers.", source="a test", model=model)
    monkeypatch.setitem(_PRESETS, preset.name, preset)


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
    if is_choice(hint):
        return {"transform": "shared", "backbone": "pooled", "routing": "cosine"}[name]
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if typing.get_origin(hint) is tuple:
        return (3, 5)
    kind = choices[0] if typing.get_origin(hint) is Annotated else hint
    if name in ("kernel", "first_kernel"):
        return (value or 1) + 2  # stays odd
    if kind is float:
        return value * 0.5 or 0.25
    return "elsewhere" if kind in (str, str | None) else (max(value) if isinstance(value, tuple) else value or 0) + 1


STACK = {"backbone": "stack", "stack_channels": (4, 4), "stack_kernels": (4, 4), "stack_strides": (1, 1)}
NEEDED: dict[str, dict[str, Any]] = {
    "stem_channels": {"stem_channels": (4, 4), "stem_strides": (1, 1)},
    "stem_strides": {"stem_channels": (4, 4), "stem_strides": (1, 1)},
    "layer_padding": {"layer_kernel": 5},
    "primary_padding": {"primary_kernel": 5},
    **{f"stack_{name}": {"backbone": "stack"} for name in ("padding", "norm", "init")},
    **{f"stack_{name}": STACK for name in ("channels", "kernels", "strides")},
    "attention_bias": {"routing": "self-attention"},
    **{name: {"routing": "em"} for name in ("final_lambda", "cost_scale")},
    **{name: {"routing": "em-code"} for name in ("final_beta", "min_variance", "on_map")},
}
"""Fields that need others."""


def as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option_name(name) if value else f"--no-{option_name(name)[2:]}"]
    return [option_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


@pytest.mark.parametrize(("config_type", "name"), FIELDS, ids=[f"{t.__name__}.{n}" for t, n in FIELDS])
def test_every_field_has_an_option_that_reaches_the_configuration(
    config_type: type, name: str, configured: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "num_capsules":
        pytest.skip("it is of inner dense layers only: a test below")
    register(monkeypatch)
    preset = PRESET_OF[config_type]
    needed: dict[str, Any] = NEEDED.get(name, {})
    base = make_config(preset, **needed)
    before = flat(base)[name]
    wanted = another_value(name, FIELDS[config_type, name], before)

    given = needed | {name: wanted}
    config = configured(preset, *(word for each in given for word in as_arguments(each, given[each])))

    is_kind = is_choice(FIELDS[config_type, name])  # the fields of the kind before are gone, its own are there
    others = {each: value for each, value in flat(config).items() if each != name and (each in flat(base))}
    assert flat(config)[name] == wanted != before
    assert others == {each: flat(base)[each] for each in others}, "another field changed too"
    assert is_kind or name == "decoder" or flat(config).keys() == flat(base).keys()
    assert config == make_config(preset, **given)


def test_what_means_nothing_to_all_layers_together_is_no_option(cli: Callable[..., Any]) -> None:
    result = cli("train", "--num-capsules", "5")
    assert result.code == 2
    assert "No such option '--num-capsules'" in result.err


def test_a_name_is_one_option_that_means_the_same_everywhere() -> None:
    kinds: dict[str, set[Any]] = {}
    for config_type in (NetworkConfig, Recipe):
        for _, name, hint in tree(config_type):
            kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            kinds.setdefault(name, set()).add(kind)
    assert all(len(each) == 1 for each in kinds.values())
    recipe, network = ({name for _, name, _ in tree(each)} for each in (Recipe, NetworkConfig))
    run = {field.name for field in dataclasses.fields(TrainConfig)}
    assert not recipe & network
    assert not run & (recipe | network)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("baseline-cnn", "--num-iterations", "3"), 'no option of baseline-cnn "--num-iterations"'),
        (
            ("baseline-cnn", "--conv-channels", "3"),
            'option of baseline-cnn "--conv-channels"; did you mean "--channels"?',
        ),
        (("sabour2017", "--channels", "3"), 'no option of sabour2017 "--channels"; did you mean "--stem-channels"?'),
        (
            ("sabour2017", "--layer-kernel", "3"),
            'option of sabour2017 "--layer-kernel"; did you mean "--primary-',
        ),
        (("sabour2017", "--temperature", "3"), "--temperature is an option of --routing cosine, which is not chosen"),
        (("sabour2017-r1", "--decoder-hidden", "8"), 'no option of sabour2017-r1 "--decoder-hidden"; did'),
        (("two-layers", "--routing", "cosine", "--leaky"), "--leaky is an option of --routing dynamic, which is not"),
    ],
)
def test_options_of_parts_that_a_network_has_not_are_refused(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    register(monkeypatch)
    result = cli("train", *arguments)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_part_of_a_prompt_has_options_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was typed has no source file to read them from."""
    namespace: dict[str, Any] = {"__name__": "typed"}
    lines = "import dataclasses\n@dataclasses.dataclass\nclass Typed:\n    size: int = 1\n    'Words.'\n"
    monkeypatch.setitem(sys.modules, "typed", types.ModuleType("typed"))
    exec(lines, namespace)
    assert field_descriptions(namespace["Typed"]) == {}


def test_what_is_not_given_is_fitted_to_images_of_ones_own(
    configured: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    from torchcaps.files import write_json

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
    assert configured() == make_config("sabour2017")
    assert configured("tf-notebook") == make_config("tf-notebook")


def test_none_takes_a_limit_away(configured: Callable[..., TrainConfig]) -> None:
    assert configured("keras-tutorial").recipe.limit_train == 1000
    assert configured("keras-tutorial", "--limit-train", "none").recipe.limit_train is None
    assert flat(configured("--decoder-hidden", "none"))["decoder_hidden"] == ()


def test_a_configuration_file_with_options_on_top(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    from torchcaps.files import write_json

    saved = make_config("tf-notebook", num_iterations=1, epochs=3, data="mnist")
    write_json(tmp_path / "config.json", saved.to_dict())
    assert configured("--config", tmp_path / "config.json") == saved
    assert configured("tf-notebook", "--config", tmp_path / "config.json") == saved
    again = configured("--config", tmp_path / "config.json", "--seed", "1", "--no-decoder")
    assert (again.seed, again.model.decodes, flat(again)["num_iterations"], again.data) == (1, False, 1, "mnist")


@pytest.mark.parametrize("config_type", [*all_parts(), Recipe, TrainConfig], ids=lambda each: each.__name__)
def test_every_field_has_words_for_the_help(config_type: type) -> None:
    words = field_descriptions(config_type)
    for field in dataclasses.fields(config_type):
        assert words[field.name].endswith("."), field.name


def test_the_help_has_every_option_once_under_its_heading(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    text = cli("train", "--help").out
    section = r"^(\S[^\n]*?)(?: \(default: the preset's\))?:\n((?:(?:  [^\n]*)?\n)+)"
    sections = dict(re.findall(section, text, re.MULTILINE))
    headings = ["Options", "Run", "Recipe", "Any network", "Capsule network", "Backbone conv", "Backbone stack"]
    headings += ["Backbone pooled", "Primary capsules", "Capsule layers", "Transforms"]
    kinds = ("dynamic", "self-attention", "em", "em-code", "cosine")
    headings += [*(f"Routing {kind}" for kind in kinds), "Decoder", "Loss", "Baseline CNN", "Pooled CNN", "Examples"]
    assert [heading for heading in sections if not heading.startswith("Usage")] == headings
    for owner, name, hint in tree(NetworkConfig):
        if is_option(hint):
            assert len(re.findall(f"^  {option_name(name)} ", text, re.MULTILINE)) == 1, name
            heading = owner.heading or part_heading(owner)
            shared = [each for each, _ in FIELDS_BY_NAME[name]] if name in FIELDS_BY_NAME else []
            assert len(shared) > 1 or f"  {option_name(name)} " in sections[heading], (name, heading)
    for config_type, heading in ((Recipe, "Recipe"), (TrainConfig, "Run")):
        for field in dataclasses.fields(config_type):
            if field.name not in NOT_OPTIONS:
                assert f"  {option_name(field.name)} " in sections[heading], field.name
    assert "--temperature FLOAT" in sections["Routing cosine"]
    assert "What the cosine is divided by. [above 0" in " ".join(sections["Routing cosine"].split())
    assert "|vb|cosine|silent|active]" in sections["Capsule layers"]


#: The parts that have a field of a name.
FIELDS_BY_NAME: dict[str, list[tuple[type, Any]]] = {}
for _owner, _name, _hint in tree(NetworkConfig):
    if (_owner, _hint) not in FIELDS_BY_NAME.setdefault(_name, []):
        FIELDS_BY_NAME[_name].append((_owner, _hint))


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_shows_each_field_of_its_parts(cli: Callable[..., Any], name: str) -> None:
    """Once, unless two of its parts have it with different values; nothing stands as Python would write it."""
    out, preset = cli("presets", name).out, get_preset(name)
    fields = flat(preset.model) | flat(preset.recipe)
    for field in fields:
        owners = [each for each in FIELDS_BY_NAME.get(field, []) if is_option(each[1])]
        if field in ("layers", "backbone", "transform", "routing") or (field == "decoder" and fields[field]):
            continue  # headings say them
        values = fields[field] if isinstance(fields[field], tuple) and len(owners) > 0 else (fields[field],)
        shown = len(re.findall(rf"^{field} ", out, re.MULTILINE))
        assert 1 <= shown <= max(len(values), 1), field
    assert "Config(" not in out
    assert "ClassVar" not in out
    if preset.model.has_capsules:
        first = preset.model.layers[0]
        parts = [f"Backbone {preset.model.backbone.name}", f"Transform {first.transform.name} of layer 1"]
        for heading in (*parts, "Primary capsules", "Layer 1: ", "Loss"):
            assert f"\n{heading}" in out
        assert f"\nRouting {first.routing.name} of layer 1" in out
        assert ("\nDecoder " in out) == preset.model.decodes


def test_a_preset_of_two_layers_shows_both(cli: Callable[..., Any]) -> None:
    out = cli("presets", "two-layers").out
    first, second = out.index("\nLayer 1: conv"), out.index("\nLayer 2: dense")
    assert "\nlayer_types " in out[first:second]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("capsule_dim ")] == ["4", "5"]
    described = json.loads(cli("presets", "two-layers", "--json").out)["model"]
    assert [layer["name"] for layer in described["layers"]] == ["conv", "dense"]
    assert described["layers"][0]["routing"]["name"] == "dynamic"
    assert described["backbone"]["conv_channels"] == 256
    assert CapsNetConfig.from_dict(described) == get_preset("two-layers").model
    listed = cli("presets").out
    assert "conv,dense" in listed


def test_option_types_refuse_what_does_not_fit() -> None:
    assert option_type(tuple[int, ...]).convert("7", None, None) == (7,)
    with pytest.raises(click.BadParameter, match="512,1024"):
        option_type(tuple[int, ...]).convert("7;8", None, None)
    with pytest.raises(click.BadParameter):
        option_type(int | None).convert("some", None, None)
