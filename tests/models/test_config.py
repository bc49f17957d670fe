"""Configurations: every field is checked, and every field does something."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_raises, drawn_for, labels_for, small
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.models import CapsNetConfig, CNNConfig, NetworkConfig, build_model, get_preset
from torchcaps.models.config import DecoderConfig, LossConfig, PrimaryConfig, Recipe
from torchcaps.models.fields import Described, UnknownField, all_parts, flat, is_part, replace, tree
from torchcaps.ranges import Range, ranges_in
from torchcaps.training import TrainConfig

# A small network with a layer on a map.
CONV_LAYER = {
    "primary_kernel": 7,
    "layers": [{"name": "conv", "layer_types": 2, "layer_stride": 2, "capsule_dim": 4}, {"name": "dense"}],
}
# For each field: another value, the first thing that it changes, and what other fields must be for it to matter.
# weights: parameters as they start < output < loss < gradients
CHANGES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "objects": (2, "output", {}),
    "pixel_scale": (2.0, "output", {}),
    "standardise": (True, "output", {}),
    "stem_channels": ((6,), "weights", {"stem_channels": (4,), "stem_strides": (1,)}),
    "stem_strides": ((2,), "weights", {"stem_channels": (4,), "stem_strides": (1,), "conv_kernel": 3}),
    "conv_channels": (6, "weights", {}),
    "conv_kernel": (7, "weights", {}),
    "conv_stride": (2, "weights", {}),
    "conv_norm": ("channel", "weights", {}),
    "conv_dropout": (0.5, "output", {}),
    "conv_activation": ("none", "output", {}),
    "conv_init": ("glorot", "weights", {}),
    "primary_init": ("matrix-capsules", "weights", {}),
    "primary_types": (3, "weights", {}),
    "primary_dim": (4, "weights", {}),
    "primary_kernel": (7, "weights", {}),
    "primary_stride": (1, "weights", {}),
    "primary_padding": (1, "weights", {}),
    "primary_activation": ("relu", "output", {}),
    "primary_separate_convs": (True, "weights", {}),
    "grouping": ("raster", "output", {}),
    "primary_output": ("unit", "output", {}),
    "primary_norm": ("batch", "weights", {}),
    "primary_activations": (True, "weights", {}),
    "primary_depthwise": (True, "weights", {"conv_channels": 6, "primary_types": 2, "primary_dim": 3}),
    "stack_channels": ((5,), "weights", {"backbone": "stack"}),
    "stack_kernels": ((3,), "weights", {"backbone": "stack"}),
    "stack_strides": ((1,), "weights", {"backbone": "stack"}),
    "stack_padding": (2, "weights", {"backbone": "stack"}),
    "stack_norm": ("batch", "weights", {"backbone": "stack"}),
    "stack_init": ("he", "weights", {"backbone": "stack"}),
    "share_positions": (True, "weights", {}),
    "coordinates": ("centres", "output", {"capsule_dim": 16}),
    "pose_norm": (True, "weights", CONV_LAYER),
    "attention_bias": (False, "weights", {"routing": "self-attention"}),
    "final_lambda": (0.1, "output", {"routing": "em"}),
    "cost_scale": (3.0, "output", {"routing": "em"}),
    "final_beta": (0.1, "output", {"routing": "em-code"}),
    "min_variance": (0.1, "output", {"routing": "em-code"}),
    "on_map": (True, "weights", {"routing": "em-code"}),
    "layers": ([{"num_capsules": 5}, {"name": "dense"}], "weights", {}),
    "num_capsules": ([{"num_capsules": 6}, {}], "weights", {"layers": [{"num_capsules": 5}, {"name": "dense"}]}),
    "layer_types": (3, "weights", CONV_LAYER),
    "layer_kernel": (2, "weights", CONV_LAYER),
    "layer_stride": (1, "weights", CONV_LAYER),
    "layer_padding": (1, "weights", CONV_LAYER),
    "compete_over": ("types-and-positions", "output", CONV_LAYER),
    "transform": ("shared", "weights", {}),
    "capsule_dim": (8, "weights", {}),
    "capsule_bias": (True, "weights", {}),
    "weight_init": ("fan-in", "weights", {}),
    "weight_std": (0.3, "weights", {}),
    "backbone": ("stack", "weights", {}),
    "routing": ("vb", "weights", {}),
    "num_iterations": (2, "output", {}),
    "softmax_over": ("inputs", "output", {}),
    "stop_gradient": (True, "gradients", {}),
    "leaky": (True, "output", {}),
    "learn_prior": (True, "weights", {}),
    "squash_eps": (0.1, "output", {}),
    "length_eps": (0.1, "output", {}),
    "decoder": (False, "weights", {}),
    "decoder_hidden": ((9,), "weights", {}),
    "decoder_channels": ((4, 3), "weights", {}),
    "decoder_init": ("glorot", "weights", {}),
    "decoder_mask": ("longest", "output", {}),
    "classification_loss": ("cross-entropy", "loss", {}),
    "score_scale": (3.0, "loss", {"classification_loss": "score-cross-entropy"}),
    "learn_score_scale": (True, "weights", {"classification_loss": "score-cross-entropy"}),
    "spread_margin": (0.5, "loss", {"classification_loss": "spread"}),
    "spread_growth": (100, "loss", {"classification_loss": "spread"}),
    "m_plus": (0.8, "loss", {}),
    "m_minus": (0.2, "loss", {"weight_std": 1.0}),  # capsules must be long for it to matter
    "margin_lambda": (0.7, "loss", {"weight_std": 1.0}),
    "margin_power": (1, "loss", {}),
    "margin_scale": (2.0, "loss", {}),
    "margin_over_classes": ("mean", "loss", {}),
    "reconstruction_weight": (0.1, "loss", {}),
    "reconstruction_over_pixels": ("mean", "loss", {}),
}
CNN_CHANGES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "objects": (2, "output", {}),
    "stem_channels": ((6,), "weights", {"stem_channels": (4,), "stem_strides": (1,)}),
    "stem_strides": ((2,), "weights", {"stem_channels": (4,), "stem_strides": (1,)}),
    "conv_norm": ("channel", "weights", {}),
    "conv_dropout": (0.5, "output", {}),
    "channels": ((4, 5), "weights", {}),
    "kernel": (3, "weights", {}),
    "first_kernel": (7, "weights", {}),
    "pool": (2, "weights", {}),
    "hidden": ((12, 7), "weights", {}),
    "dropout": (0.9, "output", {}),
}
ONE_KIND = {"primary", "loss"}  # parts of which there is no other kind to choose
ALIKE = ("weights", "output", "loss", "gradients")


def fingerprint(config: NetworkConfig) -> dict[str, list[Tensor]]:
    """What a network starts from, says, is told, and learns, on the same images with the same seed."""
    torch.manual_seed(0)
    model = build_model(config, (1, 28, 28), 3)
    images, labels = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1)), labels_for(model, 2)
    torch.manual_seed(0)
    output = model(images, model.decoder_targets(labels))
    losses = model.loss(output, drawn_for(model, images), labels)
    losses.total.backward()
    parameters = list(model.parameters())
    return {
        "weights": [parameter.detach() for parameter in parameters],
        "output": [tensor.detach() for tensor in output if tensor is not None],
        "loss": [losses.total.detach()],
        "gradients": [parameter.grad for parameter in parameters],
    }


def first_change(one: NetworkConfig, other: NetworkConfig) -> str | None:
    prints = fingerprint(one), fingerprint(other)
    for what in ALIKE:
        before, after = (each[what] for each in prints)
        if len(before) != len(after) or any(
            a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-7)
            for a, b in zip(before, after, strict=True)
        ):
            return what
    return None


def test_every_field_has_a_case() -> None:
    for config, changes in ((CapsNetConfig, CHANGES), (CNNConfig, CNN_CHANGES)):
        fields = {name for _, name, _ in tree(config)} - ONE_KIND
        fields |= {"num_capsules"} & set(changes)  # given within its layer only
        assert fields == set(changes), "add the new field to the table"


@pytest.mark.parametrize(
    ("preset", "field"),
    [*(("sabour2017", field) for field in CHANGES), *(("baseline-cnn", field) for field in CNN_CHANGES)],
)
def test_no_field_is_parsed_and_ignored(preset: str, field: str) -> None:
    value, what, needed = (CHANGES if preset == "sabour2017" else CNN_CHANGES)[field]
    base = replace(get_preset(preset).model, small(preset, **needed))
    assert first_change(base, base) is None
    assert first_change(base, replace(base, {"layers" if field == "num_capsules" else field: value})) == what


@pytest.mark.parametrize("config", [CapsNetConfig, CNNConfig, Recipe])
def test_dictionaries_and_back(config: Any) -> None:
    assert config.from_dict(config().to_dict()) == config()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_iteration", 3, 'there is no CapsNet field "num_iteration"; did you mean "num_iterations"?'),
        ("xyz", 3, 'there is no CapsNet field "xyz"; known: backbone, '),
        ("num_iterations", "3", "num_iterations must be of type int, got '3'"),
        ("num_iterations", 3.0, "num_iterations must be of type int, got 3.0"),
        ("num_iterations", True, "num_iterations must be of type int, got True"),
        ("num_iterations", None, "num_iterations must be of type int, got None"),
        ("num_iterations", -1, "num_iterations must be 0 to 1000, got -1"),
        ("leaky", 1, "leaky must be of type bool, got 1"),
        ("weight_std", "0.1", "weight_std must be of type float, got '0.1'"),
        ("weight_std", 0, "weight_std must be above 0 and at most 1e+38, got 0"),
        ("weight_std", float("nan"), "weight_std must be finite, got nan"),
        ("m_plus", float("inf"), "m_plus must be finite, got inf"),
        ("reconstruction_weight", -0.1, "reconstruction_weight must be 0 to 1e+38, got -0.1"),
        ("softmax_over", "output", "softmax_over must be one of outputs, inputs, got 'output'"),
        ("softmax_over", ["outputs"], "softmax_over must be one of outputs, inputs"),
        ("decoder_hidden", 512, "decoder_hidden must be a sequence, got 512"),
        ("decoder_hidden", [512, "x"], "decoder_hidden must be of type int, got 'x'"),
        ("decoder_hidden", [0], "decoder_hidden must be 1 to 65536, got 0"),
        ("conv_channels", 0, "conv_channels must be 1 to 65536, got 0"),
        ("primary_stride", 0, "primary_stride must be 1 to 4096, got 0"),
        ("objects", 0, "objects must be 1 to 65536, got 0"),
        ("squash_eps", 0.0, "squash_eps must be 1e-24 to 1, got 0.0"),
        ("length_eps", 1e-25, "length_eps must be 1e-24 to 1, got 1e-25"),
        ("primary_padding", -1, "primary_padding must be 0 to 4095, got -1"),
        ("primary_padding", 9, "primary_padding must be below primary_kernel, 9, got 9"),
        ("objects", 10, "objects must be below num_classes"),
    ],
)
def test_bad_values(field: str, value: Any, message: str) -> None:
    kind = UnknownField if "there is no" in message else InputError
    assert_raises(kind, create_model, "sabour2017", **{field: value}, say=message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kernel", 4, "kernel must be an odd number from 1 to 255, got 4"),
        ("kernel", -1, "kernel must be an odd number from 1 to 255, got -1"),
        ("first_kernel", 0, "first_kernel must be an odd number from 1 to 255, got 0"),
        ("pool", 0, "pool must be 1 to 4096, got 0"),
        ("objects", 0, "objects must be 1 to 65536, got 0"),
        ("dropout", 1.0, "dropout must be at least 0 and below 1, got 1.0"),
        ("channels", [0], "channels must be 1 to 65536, got 0"),
        ("channels", (), "channels must name at least one convolution, got none"),
        ("num_iterations", 2, 'there is no CNN field "num_iterations"'),
    ],
)
def test_bad_values_of_the_cnn(field: str, value: Any, message: str) -> None:
    kind = UnknownField if "there is no" in message else InputError
    assert_raises(kind, create_model, "baseline-cnn", **{field: value}, say=message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop", 0, "crop must be 1 to 4096, got 0"),
        ("flip", 1, "flip must be of type bool, got 1"),
        ("brightness", -0.1, "brightness must be 0 to 1, got -0.1"),
        ("brightness", 63, "brightness must be 0 to 1, got 63"),
        ("contrast", 1.8, "contrast must be 0 to 1, got 1.8"),
        ("max_rotation", 181, "max_rotation must be 0 to 180, got 181"),
        ("max_scaling", 1, "max_scaling must be at least 0 and below 1, got 1.0"),
        ("max_scaling", -0.1, "max_scaling must be at least 0 and below 1, got -0.1"),
        ("max_shift", -1, "max_shift must be 0 to 4096, got -1"),
        ("crop", True, "crop must be of type int, got True"),
        ("learning_rate", 10**400, "learning_rate must be finite, got inf"),
    ],
)
def test_bad_values_of_the_recipe(field: str, value: Any, message: str) -> None:
    assert_raises(InputError, Recipe, **{field: value}, say=message)


def fields_of_numbers() -> list[tuple[type[Described], str, Range, str]]:
    """Every field that takes a number or several: its configuration, its name, its range and its plain type."""
    found = []
    for config in (*all_parts(), PrimaryConfig, DecoderConfig, LossConfig, Recipe, TrainConfig):
        hints, plain_hints = typing.get_type_hints(config, include_extras=True), typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            plain = str(plain_hints[field.name])
            if ("int" in plain or "float" in plain) and not is_part(hints[field.name]):
                (allowed,) = ranges_in(hints[field.name])
                found.append((config, field.name, allowed, plain))
    return found


def test_every_number_has_a_range() -> None:
    assert len(fields_of_numbers()) > 50


@pytest.mark.parametrize(("config", "name", "allowed", "plain"), fields_of_numbers())
def test_a_number_beyond_its_range_is_refused(config: type[Described], name: str, allowed: Range, plain: str) -> None:
    huge = 1e300 if "float" in plain else 2**63
    for value in (-1, 1.01 * allowed.most + 1, huge, 10**400, -(10**400), 10**5000, float("nan"), float("inf")):
        with pytest.raises(InputError) as caught:
            config.from_dict({name: (value,) if "tuple" in plain else value})
        assert str(caught.value).startswith(f"{name} must be "), value
        assert len(str(caught.value)) < 250
    with pytest.raises(InputError, match=re.escape(f"{name} must be {allowed}, got ")):
        config.from_dict({name: [huge] if "tuple" in plain else huge})


def test_a_list_of_too_many_layers_is_refused() -> None:
    message = "decoder_hidden must have at most 100 entries, got 1000000"
    assert_raises(InputError, DecoderConfig, decoder_hidden=[1] * 1_000_000, say=message)


@pytest.mark.parametrize(
    ("allowed", "words", "inside", "outside"),
    [
        (Range(1, 3), "1 to 3", (1, 2, 3), (0, 4, float("nan"))),
        (Range(0, 1, above=True), "above 0 and at most 1", (0.1, 1), (0, 1.1)),
        (Range(0, 1, below=True), "at least 0 and below 1", (0, 0.9), (-0.1, 1)),
        (Range(1, 9, odd=True), "an odd number from 1 to 9", (1, 9), (2, 11, -1)),
        (Range(0, 1e38), "0 to 1e+38", (0, 1e38), (-1, float("inf"), 10**400)),
    ],
)
def test_ranges(allowed: Range, words: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    assert str(allowed) == words
    for value in inside:
        allowed.check("size", value)
    for value in outside:
        with pytest.raises(InputError, match=re.escape(f"size must be {words}, got ")):
            allowed.check("size", value)


def test_standardising_undoes_a_scale() -> None:
    assert_raises(InputError, CapsNetConfig, standardise=True, pixel_scale=255, say="pixel_scale must be 1 with")


def test_a_prior_that_could_not_learn_is_refused() -> None:
    for other in ({"stop_gradient": True}, {"num_iterations": 0}):
        assert_raises(InputError, replace, CapsNetConfig(), {"learn_prior": True, **other}, say="learn_prior needs")


def test_whole_numbers_become_floats_and_lists_tuples() -> None:
    config = replace(CapsNetConfig(), {"weight_std": 1, "decoder_hidden": [4, 5]})
    assert isinstance(flat(config)["weight_std"], float)
    assert flat(config)["decoder_hidden"] == (4, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.standardise = True  # type: ignore[misc]
