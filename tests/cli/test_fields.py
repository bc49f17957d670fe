"""Every option of every part, and every field of a run, has an option that reaches the configuration."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cli_support import Cli
from own_parts import OWN, register, two_layers
from support import registered_for_now
from torchcaps.checks import check
from torchcaps.cli.options import choices, option_name
from torchcaps.cli.train import field_help, field_option
from torchcaps.errors import InputError
from torchcaps.files import write_json
from torchcaps.models.presets import get_preset, list_presets, register_preset
from torchcaps.parts import PARTS, Option, all_parts, complete, flat, options, part_of
from torchcaps.training import Recipe, TrainConfig, make_config

NOT_OPTIONS = ("preset", "model", "recipe", "plugins", "fitted", "layers", "stages", "stage_capsules", "branches")
PRESETS = {
    "cnn": "baseline-cnn",
    "pooled": "cnn-pooled",
    "branches": "hvc2021-equal",
    "pixel-capsules": "segcaps",
    "unet": "unet-twin",
    "broadcast": "slots-small",
    "deconv": "segcaps",
    "conv-types": "segcaps",
    "slots": "slots-small",
    "slot-mixture": "slots-mixture",
}
CHOSEN_BY = {"primary": "primary_capsules", "loss": "classification_loss"}
OWNERS = (*all_parts(), *OWN.values(), Recipe, TrainConfig)


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A preset with a layer of each kind, so that it has every option of capsule networks; and parts of one's own."""
    with registered_for_now():
        register(monkeypatch)
        register_preset("two-layers", "Two layers.", network={"layers": two_layers()})
        mixture = {"layers": ("slot-mixture",), "broadcast_channels": (8, 8)}
        register_preset("slots-mixture", "A mixture.", base="slots-small", network=mixture)
        yield


@pytest.fixture
def configured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainConfig]:
    """The configuration that `torchcaps train` with some arguments would train."""
    taken: list[TrainConfig] = []

    def train(config: TrainConfig, *_: Any, **__: Any) -> None:
        taken.append(config)
        click.get_current_context().exit(200)

    def configure(*arguments: Any) -> TrainConfig:
        result = cli("train", *arguments)
        assert (result.code, result.err) == (200, "")
        return taken.pop()

    monkeypatch.setattr("torchcaps.training.train", train)
    return configure


def another_value(option: Option, before: Any) -> Any:
    """A value that fits the option and is not the one it has."""
    if option.choice is not None:
        return next((name for name in PARTS[option.choice.kind] if name != before), None)
    for value in (*choices(option.hint), True, False, 3, 5, 0.5, 0.25, (3, 5), (0.5, 2.0, 4.0), "elsewhere"):
        try:
            check(option.name, value, option.hint)
        except InputError:
            continue
        if value != before:
            return value
    raise AssertionError(option)


def as_words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [option_name(name) if value else f"--no-{option_name(name)[2:]}"]
    return [option_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


@pytest.mark.slow
@pytest.mark.parametrize("owner", OWNERS, ids=lambda each: each.__name__)
def test_every_option_reaches_the_configuration(owner: type, configured: Callable[..., TrainConfig]) -> None:
    kind, part = part_of(owner)
    chosen = kind in ("network", "layer") or part == "broadcast"
    preset = PRESETS.get(part, "two-layers") if chosen else "two-layers"
    needed = {} if kind == "" or chosen else {CHOSEN_BY.get(kind, kind): part}
    base = flat(make_config(preset, **needed).fields)
    for name, option in options(owner).items():
        if name in NOT_OPTIONS or name == "primary_capsules":  # the only one of its kind
            continue
        wanted = another_value(option, base[name])
        given = needed | {name: wanted}
        config = configured(preset, *(word for each in given for word in as_words(each, given[each])))
        assert flat(config.fields)[name] == wanted != base[name], name
        assert config == make_config(preset, **given), name


@pytest.mark.parametrize("owner", OWNERS, ids=lambda each: each.__name__)
def test_none_is_the_word_for_none_of_every_option_that_allows_it(owner: type) -> None:
    for option in options(owner).values():
        if option.name in NOT_OPTIONS or option.choice is not None:
            continue
        try:
            check(option.name, None, option.hint)
        except InputError:
            continue
        word = field_option(option, "").type
        assert word.convert("none", None, None) is None, option.name


def test_none_turns_off_texts_and_paths(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert flat(configured("unet-twin", "--parameters-of", "none").fields)["parameters_of"] is None
    assert flat(configured("unet-twin", "--parameters-of", "compact").fields)["parameters_of"] == "compact"
    saved = make_config("first", data_dir="somewhere", init_from="capsnet", logger="tensorboard")
    write_json(tmp_path / "config.json", saved.to_dict())
    words = ("--data-dir", "none", "--init-from", "none", "--logger", "none")
    config = configured("--config", tmp_path / "config.json", *words)
    assert (config.data_dir, config.init_from, config.recipe.logger) == (None, None, None)
    assert configured("--data-dir", "./none").data_dir == "./none"


def test_every_option_has_words_for_the_help() -> None:
    for owner in set(OWNERS) - set(OWN.values()):
        words = field_help(owner) if owner in (Recipe, TrainConfig) else {}
        for option in options(owner).values():
            assert (option.help or words[option.name]).endswith("."), option.name


def test_a_part_is_left_out_and_put_in(configured: Callable[..., TrainConfig]) -> None:
    for words, decoder in (
        ("sabour2017 --no-decoder", None),
        ("sabour2017 --decoder none", None),
        ("sabour2017-r1 --decoder dense", "dense"),
        ("sabour2017-r1 --decoder --seed 1", "dense"),
    ):
        assert flat(configured(*words.split()).fields)["decoder"] == decoder


def test_what_is_not_given_is_the_presets_or_fitted(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert configured() == make_config("first", data="digits")
    assert configured("tf-notebook") == make_config("tf-notebook", data="mnist")
    assert configured("compact") == make_config("compact")
    own = configured("compact", "--data", "folder:shapes")
    fitted = ("learning_rate", "patience", "select")
    across = ("stem_strides_across", "stack_strides_across")
    strides = ("stem_strides", "stack_strides", *across)
    assert own.fitted == ("task", "epochs", "batch_size", *fitted, *strides, "decoder_channels")
    assert own.recipe.fill == "edge"
    recipe = ("--epochs", "3", "--batch-size", "8", "--fill", "zeros")
    sizes = ("--stem-strides", "1,1,2", "--decoder-channels", "4")
    given = configured("compact", "--data", "npz:x.npz", *recipe, *sizes)
    assert (given.fitted, given.recipe.fill) == (("task", *fitted, "stack_strides", *across), "zeros")
    write_json(tmp_path / "config.json", make_config("compact", data="mnist").to_dict())
    assert configured("--config", tmp_path / "config.json", "--data", "folder:shapes").fitted == (), "a file says all"
    assert configured("keras-tutorial").recipe.limit_train == 1000
    assert configured("keras-tutorial", "--limit-train", "none").recipe.limit_train is None
    assert flat(configured("--decoder-hidden", "none").model)["decoder_hidden"] == ()
    assert configured("--class-weights", "1,0.5").recipe.class_weights == (1, 0.5)
    chosen = flat(configured("--backbone", "timm:resnet50", "--freeze").model)
    assert (chosen["backbone"], chosen["timm_model"], chosen["freeze"]) == ("timm", "resnet50", True)


def test_a_configuration_file_with_options_on_top(configured: Callable[..., TrainConfig], tmp_path: Path) -> None:
    saved = make_config("tf-notebook", num_iterations=1, epochs=3, data="mnist", optimizer="sgd", momentum=0.5)
    write_json(tmp_path / "config.json", saved.to_dict())
    assert configured("--config", tmp_path / "config.json") == saved
    assert configured("tf-notebook", "--config", tmp_path / "config.json") == saved
    again = configured("--config", tmp_path / "config.json", "--seed", "1", "--no-decoder")
    found = flat(again.fields)
    assert (again.seed, found["decoder"], found["num_iterations"], found["momentum"]) == (1, None, 1, 0.5)


def test_the_help_lists_the_run_and_the_recipe_once(cli: Cli) -> None:
    text = cli("train", "--help").out
    section = r"^(\S[^\n]*?)(?: \(default: the preset's\))?:\n((?:(?:  [^\n]*)?\n)+)"
    sections = dict(re.findall(section, text, re.MULTILINE))
    assert {"Options", "Run", "Recipe", "Examples"} <= sections.keys()
    for owner, heading in ((TrainConfig, "Run"), (Recipe, "Recipe")):
        for name in set(options(owner)) - set(NOT_OPTIONS):
            assert len(re.findall(f"^  {option_name(name)} ", text, re.MULTILINE)) == 1, name
            assert f"  {option_name(name)} " in sections[heading], name
    for part in all_parts():
        for name in options(part):
            assert f"{option_name(name)} " not in sections["Run"] + sections["Recipe"], name
    assert "\n  --class-weights [balanced]|NUMBER,…" in text
    assert len(text.splitlines()) <= 156


@pytest.mark.slow
def test_a_preset_shows_each_option_of_its_parts(cli: Cli) -> None:
    parts = {option.name for each in all_parts() for option in options(each).values() if option.choice}
    for name in (*list_presets(), "two-layers"):
        out, preset = cli("presets", name).out, get_preset(name)
        recipe = Recipe().replace(preset.recipe)
        trees = preset.network, recipe.fields, complete("optimizer", recipe.optimizer)
        for field in {field for tree in trees for field in flat(tree)} - {"name", "optimizer", *parts}:
            assert re.search(rf"^{field} ", out, re.MULTILINE), (name, field)
        assert "{" not in out
        assert "\nOptimizer adam " in out
    first, second = out.index("\nLayer conv of layer 1"), out.index("\nLayer dense of layer 2")
    assert "\nlayer_types " in out[first:second]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("capsule_dim ")] == ["4", "5"]
    described = cli.json("presets", name)["model"]
    assert complete("network", described) == preset.network
