"""Configurations made of parts: changed by flat names, chosen by name, written and read whole."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from support import assert_raises
from torchcaps import list_presets
from torchcaps.errors import InputError
from torchcaps.models import CapsNetConfig, CNNConfig, NetworkConfig, Recipe, RoutingConfig, get_preset, register_part
from torchcaps.models.config import (
    ConvLayerConfig,
    DecoderConfig,
    DenseConfig,
    DenseLayerConfig,
    DynamicRoutingConfig,
    SharedConfig,
)
from torchcaps.models.fields import PARTS, Described, UnknownField, flat, replace, tree
from torchcaps.nn import DynamicRouting, Routing
from torchcaps.ranges import MOST_LAYERS, Iterations, PositiveFactor
from torchcaps.registry import Registry

DEEP = CapsNetConfig(
    layers=(
        ConvLayerConfig(layer_types=4, capsule_dim=8),
        DenseLayerConfig(num_capsules=7, routing=DynamicRoutingConfig(num_iterations=2)),
        DenseLayerConfig(transform=SharedConfig(weight_std=0.3)),
    )
)
"""A network of three capsule layers, two of them with fields of their own."""


@dataclass(frozen=True, kw_only=True)
class OtherRoutingConfig(RoutingConfig):
    """A routing that has one field of the dynamic one, and one of its own."""

    name: ClassVar[str] = "other"

    num_iterations: Iterations = 5
    """Its iterations."""
    temperature: PositiveFactor = 1.0
    """A field that no other part has."""

    def build(self) -> Routing:
        return DynamicRouting()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for choice, kinds in list(PARTS.items()):
        monkeypatch.setitem(PARTS, choice, Registry(choice, kinds))


# ---- changes by flat names


def test_a_name_reaches_every_part_that_has_it() -> None:
    changed = replace(DEEP, {"num_iterations": 1, "squash_eps": 1e-3, "conv_init": "glorot"})
    assert [layer.routing for layer in changed.layers] == [DynamicRoutingConfig(num_iterations=1, squash_eps=1e-3)] * 3
    assert changed.primary.squash_eps == 1e-3
    assert flat(changed)["conv_init"] == changed.primary.conv_init == "glorot"
    assert flat(changed)["num_iterations"] == 1
    assert DEEP.layers[1].routing == DynamicRoutingConfig(num_iterations=2), "the original is left alone"


def test_nothing_else_is_changed() -> None:
    changed = replace(DEEP, {"num_iterations": 1})
    before, after = flat(DEEP), flat(changed)
    assert {name for name in before if before[name] != after[name]} == {"num_iterations"}
    assert replace(DEEP, {}) == DEEP


def test_values_that_differ_from_part_to_part_are_shown_one_by_one() -> None:
    values = flat(DEEP)
    assert values["num_iterations"] == (3, 2, 3)
    assert values["layers"] == ("conv", "dense", "dense")
    assert values["routing"] == "dynamic", "of one kind in all layers"
    assert values["transform"] == ("dense", "dense", "shared")
    assert values["decoder"] is True
    assert values["decoder_hidden"] == (512, 1024)
    assert "decoder_hidden" not in flat(replace(DEEP, {"decoder": False}))


def test_an_unknown_name_gets_the_nearest() -> None:
    assert_raises(
        UnknownField, replace, DEEP, {"num_iteration": 2}, say='no CapsNet field "num_iteration"; did you mean "num_it'
    )
    assert_raises(UnknownField, replace, CNNConfig(), {"num_iterations": 2}, say='no CNN field "num_iterations"; known')
    assert_raises(UnknownField, replace, Recipe(), {"epoch": 2}, say='no recipe field "epoch"; did you mean "epochs"?')
    with pytest.raises(UnknownField, match='there is no knob "leeky"; did you mean "leaky"') as caught:
        replace(DEEP, {"leeky": True}, "knob")
    assert caught.value.name == "leeky"
    assert "leaky" in caught.value.known


def test_a_value_that_does_not_fit_is_refused_wherever_its_field_stands() -> None:
    for values, said in (
        ({"num_iterations": -1}, "num_iterations must be 0 to 1000, got -1"),
        ({"layer_kernel": "3"}, "layer_kernel must be of type int, got '3'"),
        ({"decoder_hidden": [0]}, "decoder_hidden must be 1 to 65536, got 0"),
        ({"layer_kernel": 2, "layer_padding": 2}, "layer_padding must be below layer_kernel, 2, got 2"),
        ({"backbone": 3}, "backbone must be of type BackboneConfig, got 3"),
        ({"primary": "conv"}, "primary must be of type PrimaryConfig, got 'conv'"),
        ({"layers": "dense"}, "layers must be a sequence, got 'dense'"),
        ({"layers": [3]}, "layers must be of type LayerConfig, got 3"),
        ({"decoder": 3}, "decoder must be of type DecoderConfig, got 3"),
    ):
        assert_raises(InputError, replace, DEEP, values, say=said)


# ---- parts chosen by name


def test_a_part_chosen_by_name_keeps_the_fields_that_the_new_kind_has_too(registry: None) -> None:
    register_part(OtherRoutingConfig)
    base = replace(CapsNetConfig(), {"num_iterations": 2, "leaky": True})
    changed = replace(base, {"routing": "other"})
    assert changed.layers[0].routing == OtherRoutingConfig(num_iterations=2)
    assert replace(changed, {"temperature": 3}).layers[0].routing == OtherRoutingConfig(num_iterations=2, temperature=3)
    assert replace(base, {"routing": "other", "temperature": 2.0, "num_iterations": 4}).layers[0].routing == (
        OtherRoutingConfig(num_iterations=4, temperature=2.0)
    ), "names of the new kind are known in the same call"
    assert_raises(UnknownField, replace, changed, {"leaky": True}, say='belongs to routing "dynamic"')
    assert replace(changed, {"routing": "dynamic"}).layers[0].routing == DynamicRoutingConfig(num_iterations=2)


def test_the_same_name_changes_nothing() -> None:
    base = replace(CapsNetConfig(), {"weight_std": 0.3, "leaky": True})
    assert replace(base, {"transform": "dense", "routing": "dynamic", "backbone": "conv"}) == base


def test_a_transform_is_chosen_for_every_layer() -> None:
    changed = replace(DEEP, {"transform": "shared"})
    assert [layer.transform for layer in changed.layers] == [
        SharedConfig(),
        SharedConfig(),
        SharedConfig(weight_std=0.3),
    ]


def test_a_mapping_changes_the_fields_of_that_part_only() -> None:
    changed = replace(CapsNetConfig(), {"primary": {"squash_eps": 1e-3, "primary_types": 4}})
    assert (changed.primary.squash_eps, changed.primary.primary_types) == (1e-3, 4)
    assert changed.layers == CapsNetConfig().layers, "the routing has a field of the same name, which is left alone"
    both = replace(CapsNetConfig(), {"primary": {"squash_eps": 1e-3}, "squash_eps": 1e-2})
    assert flat(both)["squash_eps"] == 1e-2, "a flat name is said of all parts"
    named = replace(DEEP, {"layers": [{}, {"routing": {"leaky": True}}, {"transform": {"name": "dense"}}]})
    assert named.layers[0] == DEEP.layers[0]
    assert named.layers[1].routing == DynamicRoutingConfig(num_iterations=2, leaky=True)
    assert named.layers[2].transform == DenseConfig(weight_std=0.3)


def test_parts_themselves_are_taken_as_they_are() -> None:
    layers = (DenseLayerConfig(num_capsules=3), DenseLayerConfig())
    assert replace(CapsNetConfig(), {"layers": layers}).layers == layers
    assert replace(CapsNetConfig(), {"layers": list(layers)}).layers == layers
    assert replace(CapsNetConfig(), {"decoder": DecoderConfig(decoder_hidden=())}).decoder == DecoderConfig(
        decoder_hidden=()
    )


@pytest.mark.parametrize("absent", [False, None])
def test_a_part_that_may_be_absent(absent: Any) -> None:
    base = replace(CapsNetConfig(), {"decoder_hidden": (9,)})
    without = replace(base, {"decoder": absent})
    assert without.decoder is None
    assert without.decodes is False
    assert replace(base, {"decoder": True}) == base, "what is there keeps its fields"
    assert replace(without, {"decoder": True}).decoder == DecoderConfig()
    assert replace(without, {"decoder": True, "decoder_hidden": (3,)}).decoder == DecoderConfig(decoder_hidden=(3,))
    assert replace(without, {"decoder": {"decoder_hidden": (3,)}}).decoder == DecoderConfig(decoder_hidden=(3,))
    assert_raises(UnknownField, replace, without, {"decoder_hidden": (3,)}, say='no CapsNet field "decoder_hidden"')


def test_a_part_that_must_be_there_cannot_be_left_out() -> None:
    for name in ("backbone", "primary", "loss"):
        for absent in (False, None):
            assert_raises(InputError, replace, CapsNetConfig(), {name: absent}, say=f"{name} must be of type ")


def test_an_unknown_kind_gets_the_nearest_and_how_to_bring_ones_own() -> None:
    for values, said in (
        (
            {"routing": "dynamc"},
            'there is no routing "dynamc"; did you mean "dynamic"? One of your own is loaded by --pl',
        ),
        ({"transform": {"name": "shard"}}, 'there is no transform "shard"; did you mean "shared"?'),
        ({"layers": [{"name": "dens"}]}, 'there is no layer "dens"; did you mean "dense"?'),
        ({"layers": [{}, {"capsule_dim": 3}]}, 'layers has no "name"; known: '),
        ({"routing": {"name": 3}}, "routing must be a name, got 3"),
        ({"routing": {"nam": "dynamic"}}, 'there is no field "nam"'),
    ):
        with pytest.raises(InputError) as caught:
            replace(CapsNetConfig(), values)
        assert said in str(caught.value)


def test_layers_are_as_many_as_are_given_and_not_too_many() -> None:
    assert len(replace(DEEP, {"layers": [{"name": "dense"}]}).layers) == 1
    too_many = [{"name": "dense"}] * (MOST_LAYERS + 1)
    assert_raises(InputError, replace, DEEP, {"layers": too_many}, say=f"layers must have at most {MOST_LAYERS} ")
    assert_raises(InputError, replace, DEEP, {"layers": []}, say="layers must end with a dense layer")


# ---- dictionaries


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_comes_back_from_json(name: str) -> None:
    config = get_preset(name).model
    assert NetworkConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert type(config).from_dict(config.to_dict()) == config


def test_nested_parts_come_back_from_json(registry: None) -> None:
    register_part(OtherRoutingConfig)
    config = replace(DEEP, {"routing": "other", "temperature": 2.0, "decoder": None})
    written = json.loads(json.dumps(config.to_dict()))
    assert written["name"] == "capsules"
    assert written["decoder"] is None
    assert written["layers"][1]["routing"] == {"name": "other", "num_iterations": 2, "temperature": 2.0}
    assert NetworkConfig.from_dict(written) == config


def test_what_is_left_out_of_a_dictionary_is_the_default() -> None:
    assert NetworkConfig.from_dict({"name": "capsules"}) == CapsNetConfig()
    assert NetworkConfig.from_dict({"name": "cnn", "kernel": 3}) == CNNConfig(kernel=3)
    assert_raises(InputError, NetworkConfig.from_dict, {}, say='network has no "name"; known: capsules, cnn')
    assert_raises(
        InputError, NetworkConfig.from_dict, {"name": "capsule"}, say='no network "capsule"; did you mean "cap'
    )


# ---- parts of one's own


def test_a_name_is_taken_once(registry: None) -> None:
    register_part(OtherRoutingConfig)
    assert PARTS["routing"]["other"] is OtherRoutingConfig
    assert_raises(InputError, register_part, OtherRoutingConfig, say='there is a routing "other" already')


def test_a_field_stands_for_one_thing_in_all_parts(registry: None) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clashing(OtherRoutingConfig):
        name: ClassVar[str] = "clashing"
        weight_std: bool = False

    said = 'routing "clashing" has a field weight_std of another type than transform "dense" has'
    assert_raises(InputError, register_part, Clashing, say=said)
    assert "clashing" not in PARTS["routing"]


def test_a_field_of_the_same_type_and_another_range_is_shared(registry: None) -> None:
    register_part(OtherRoutingConfig)
    names = [name for kind, name, _ in tree(NetworkConfig) if kind is OtherRoutingConfig]
    assert {"num_iterations", "temperature"} <= set(names)


def test_fields_are_frozen_and_compared_by_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEEP.layers[0].capsule_dim = 3  # type: ignore[misc]
    assert replace(DEEP, {"capsule_dim": 9}) != DEEP
    assert isinstance(DEEP, Described)
    assert hash(replace(DEEP, {})) == hash(DEEP)
