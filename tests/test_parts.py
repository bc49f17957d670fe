"""Parts: registered, described, built again, changed by flat names; and no option is parsed and ignored."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import Tensor, nn

from support import MASKS, SIZES, assert_raises, drawn_for, labels_for, registered_for_now, small
from torchcaps import create_model, register
from torchcaps.errors import InputError
from torchcaps.models import build_network, get_preset
from torchcaps.nn import DynamicRouting
from torchcaps.parts import (
    PARTS,
    Choice,
    Option,
    Spec,
    UnknownOption,
    all_parts,
    build,
    complete,
    describe,
    flat,
    options,
    override,
    own_parts,
    part_of,
)
from torchcaps.ranges import MAX_ENTRIES, Iterations, PositiveFactor, Range, Size, as_text
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

EVERY = [part_of(cls) for cls in all_parts()]
DEEP = complete(
    "network",
    {
        "name": "capsules",
        "layers": [
            {"name": "conv", "layer_types": 4, "capsule_dim": 8},
            {"name": "dense", "num_capsules": 7, "routing": {"name": "dynamic", "num_iterations": 2}},
            {"name": "dense", "transform": {"name": "shared", "weight_std": 0.3}},
        ],
    },
)
"""A network of three capsule layers, two of them with options of their own."""
USUAL = complete("network", "capsules")


@pytest.fixture
def own() -> Iterator[type]:
    """A routing of one's own, which has one option of the dynamic one, and one that no other part has."""
    with registered_for_now():

        @register("routing", "other")
        class Other(DynamicRouting):
            """One's own.

            Args:
                num_iterations: Its iterations.
                temperature: Of the
                    softmax, ``1`` or :class:`more`.
            """

            def __init__(self, num_iterations: Iterations = 5, *, temperature: PositiveFactor = 1.0) -> None:
                super().__init__(num_iterations)
                self.temperature = temperature

        yield Other


def changed(tree: Any, /, **changes: Any) -> Any:
    return override("network", tree, changes)


# ---- every part that is registered


def test_a_part_is_described_and_built_again(timm_stub: None) -> None:
    for kind, name in EVERY:
        cls = PARTS[kind][name]
        tree = complete(kind, name)
        assert tree == complete(kind, {"name": name}) == complete(kind, json.loads(json.dumps(tree)))
        assert override(kind, tree, {}) == tree
        assert set(flat(tree)) >= set(options(cls))
        assert all(option.help for option in options(cls).values()), "each option has an Args: line"
        if kind != "optimizer":  # which is no module
            module = build(kind, name, **SIZES)
            assert type(module) is cls
            if name == "pixel-capsules":  # whose last layer gets a type for each class
                tree["layers"][-1]["layer_types"] = SIZES["num_classes"]
            assert describe(module) == tree
            assert describe(build(kind, tree, **SIZES)) == tree
            assert build(kind, module) is module
            assert complete(kind, module) is module
        hints = [option.hint for option in options(cls).values() if option.choice is None]
        assert None not in {each for hint in hints for each in ranges_in(hint)}, "give it a range"


def ranges_in(hint: Any) -> Iterator[Range | None]:
    """The range of each number in an annotation; None of one that has none."""
    args = typing.get_args(hint)
    if hint in (int, float):
        yield None
    elif typing.get_origin(hint) is Annotated and args[0] in (int, float):
        yield next((arg for arg in args if isinstance(arg, Range)), None)
    else:
        for arg in args:
            yield from ranges_in(arg)


# ---- built by name


def test_sizes_go_by_their_names() -> None:
    with registered_for_now():

        @register("decoder", "sized")
        class Sized(nn.Module):
            def __init__(self, capsule_dim: Size, *, num_capsules: Size, own_width: Size = 3) -> None:
                super().__init__()
                self.sizes = capsule_dim, num_capsules, own_width

        @register("decoder", "asking")
        class Asking(nn.Module):
            def __init__(self, depth: Size) -> None:
                super().__init__()

        assert build("decoder", {"name": "sized", "own_width": 5}, **SIZES).sizes == (16, 10, 5)
        said = "decoder Asking has an argument depth without a default, which is no size of a decoder; known sizes: "
        assert_raises(InputError, build, "decoder", "asking", capsule_dim=3, say=said + "capsule_dim")


def test_what_no_part_is() -> None:
    for function, (spec, said) in itertools.product(
        (build, complete),
        (
            ("dynamc", 'there is no routing "dynamc"; did you mean "dynamic"? Load your own with --plugin'),
            ("zzz", 'there is no routing "zzz"; known: b2i, dynamic, em'),
            ({"name": "dynamic", "leeky": True}, '"leeky"; did you mean "leaky"?'),
            ({"leaky": True}, 'routing must have a "name", one of dynamic'),
            ({"name": 3}, 'routing must have a "name", one of dynamic'),
            (3, "routing must be a name, or a mapping of its name and options, got 3"),
        ),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            function("routing", spec)


def test_what_does_not_keep_its_options_cannot_be_described(own: type) -> None:
    """What is not registered: test_what_no_file_could_bring_back_is_not_saved."""

    class Forgets(nn.Module):
        def __init__(self, own_depth: Size = 3) -> None:
            super().__init__()

    register("decoder", "forgets")(Forgets)
    assert_raises(InputError, describe, Forgets(), say="Forgets must keep its option: write self.own_depth = own_depth")


# ---- registration


def test_a_part_of_ones_own_is_like_any_other(own: type) -> None:
    help_of = {name: option.help for name, option in options(own).items()}
    assert help_of == {"num_iterations": "Its iterations.", "temperature": "Of the softmax, 1 or more."}
    tree = complete("routing", {"name": "other", "temperature": 2})
    assert tree == {"name": "other", "num_iterations": 5, "temperature": 2}
    assert describe(build("routing", tree)) == tree
    assert own_parts("network", USUAL) == []
    assert own_parts("network", changed(DEEP, routing="other")) == ["routing other"]


def test_options_that_cannot_be_said_or_mean_something_else() -> None:
    def refused(hint: Any, name: str, default: Any, said: str) -> None:
        class Mine(nn.Module):
            pass

        def constructor(self: Any, **given: Any) -> None:
            pass

        own_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        constructor.__signature__ = inspect.Signature([own_self, option])  # type: ignore[attr-defined]
        constructor.__annotations__ = {name: hint}
        Mine.__init__ = constructor  # type: ignore[method-assign]
        assert_raises(InputError, register("routing", "mine"), Mine, say=f"routing Mine has an option {name}{said}")
        assert "mine" not in PARTS["routing"]

    other = " of another type than in transform dense; a name has one type in all parts"
    refused(bool, "weight_std", False, other)
    refused(Annotated[Spec, Choice("routing")], "transform", "dynamic", " of another type than in layer dense")
    refused(int, "epochs", 3, ", which is a recipe field already; choose another name")
    for hint in (dict, list[int], Tensor, tuple[int, int], Literal[1, 2], Any, bool | list[int]):
        refused(hint, "own", None, f" of type {hint}; an option must be a bool, int, float or str, a Literal of names")


# ---- changes by flat names


def test_a_name_reaches_every_part_that_has_it_and_nothing_else() -> None:
    before = json.dumps(DEEP)
    tree = changed(DEEP, num_iterations=1, squash_eps=1e-3, conv_init="glorot")
    assert [layer["routing"]["num_iterations"] for layer in tree["layers"]] == [1, 1, 1]
    assert {
        part["squash_eps"] for part in (*(layer["routing"] for layer in tree["layers"]), tree["primary_capsules"])
    } == {1e-3}
    assert flat(tree)["conv_init"] == tree["backbone"]["conv_init"] == "glorot"
    old, new = flat(DEEP), flat(tree)
    assert {name for name in old if old[name] != new[name]} == {"num_iterations", "squash_eps", "conv_init"}
    assert json.dumps(DEEP) == before, "the original is left alone"


def test_values_that_differ_from_part_to_part_are_shown_one_by_one() -> None:
    values = flat(DEEP)
    assert values["num_iterations"] == (3, 2, 3)
    assert values["layers"] == ("conv", "dense", "dense")
    assert values["routing"] == "dynamic", "of one kind in all layers"
    assert (values["decoder"], values["decoder_hidden"]) == ("dense", (512, 1024))
    without = flat(changed(DEEP, decoder=False))
    assert without["decoder"] is None
    assert "decoder_hidden" not in without


def test_a_part_chosen_by_name_keeps_the_options_that_the_new_one_has_too(own: type) -> None:
    base = changed(USUAL, num_iterations=2, leaky=True)
    tree = changed(base, routing="other")
    assert tree["layers"][0]["routing"] == {"name": "other", "num_iterations": 2, "temperature": 1.0}
    both = changed(base, routing="other", temperature=2.0, num_iterations=4)
    assert both["layers"][0]["routing"] == {"name": "other", "num_iterations": 4, "temperature": 2.0}
    back = changed(tree, routing="dynamic")["layers"][0]["routing"]
    assert back == complete("routing", {"name": "dynamic", "num_iterations": 2})
    assert changed(base, transform="dense", routing="dynamic", backbone="conv") == base, "the same name changes nothing"
    several = changed(DEEP, transform="shared")
    assert [layer["transform"]["weight_std"] for layer in several["layers"]] == [0.1, 0.1, 0.3]


def test_a_mapping_changes_the_options_of_that_part_only() -> None:
    tree = changed(USUAL, primary_capsules={"squash_eps": 1e-3, "primary_types": 4})
    assert tree["primary_capsules"] == USUAL["primary_capsules"] | {"squash_eps": 1e-3, "primary_types": 4}
    assert tree["layers"] == USUAL["layers"], "the routing has an option of the same name, which is left alone"
    both = changed(USUAL, primary_capsules={"squash_eps": 1e-3}, squash_eps=1e-2)
    assert flat(both)["squash_eps"] == 1e-2, "a flat name is said of all parts"
    named = changed(DEEP, layers=[{}, {"routing": {"leaky": True}}, {"transform": {"name": "dense"}}])
    assert named["layers"][0] == DEEP["layers"][0]
    assert named["layers"][1]["routing"] == DEEP["layers"][1]["routing"] | {"leaky": True}
    assert named["layers"][2]["transform"] == complete("transform", {"name": "dense", "weight_std": 0.3})
    fresh = changed(DEEP, layers=[{"name": "conv"}, {"name": "dense"}])["layers"]
    assert fresh == (complete("layer", "conv"), complete("layer", "dense")), "named ones are new"
    module = nn.Identity()
    assert changed(USUAL, backbone=module)["backbone"] is module


def test_a_part_that_may_be_absent_and_those_that_may_not() -> None:
    base = changed(USUAL, decoder_hidden=(9,))
    for absent in (False, None):
        without = changed(base, decoder=absent)
        assert without["decoder"] is None
        assert changed(base, decoder=True) == base, "what is there keeps its options"
        assert changed(without, decoder=True)["decoder"] == complete("decoder", "dense")
        for given in ({"decoder": True, "decoder_hidden": (3,)}, {"decoder": {"name": "dense", "decoder_hidden": [3]}}):
            assert changed(without, **given)["decoder"]["decoder_hidden"] == (3,)
        assert changed(base, decoder=absent, decoder_hidden=(3,))["decoder"] is None, "its options need not be left out"
        assert_raises(UnknownOption, changed, without, decoder_hidden=(3,), say='it belongs to decoder "dense"')
        for name in ("backbone", "primary_capsules", "classification_loss"):
            assert_raises(InputError, changed, USUAL, **{name: absent}, say="must be a name, or a mapping of its name")


def test_what_does_not_fit_is_refused_wherever_it_stands() -> None:
    """Single values: tests/test_arguments.py."""
    many = [{"name": "dense"}] * (MAX_ENTRIES + 1)
    for values, said in (
        ({"decoder_hidden": [1] * 1_000_000}, "decoder_hidden must have at most 100 entries, got 1000000"),
        ({"layers": "dense"}, "layers must be a sequence, got 'dense'"),
        ({"layers": [3]}, "layer must be a name, or a mapping of its name and options, got 3"),
        ({"layers": many}, f"layers must have at most {MAX_ENTRIES} entries, got 101"),
        (
            {"layers": [{}, {}, {}, {"capsule_dim": 3}]},
            'must have a "name", one of dense, conv, conv-types, deconv, slots, slot-mixture, got None',
        ),
        ({"routing": {"nam": "dynamic"}}, 'there is no option of routing "dynamic" "nam"'),
        ({"num_iteration": 2}, 'there is no option of network "capsules" "num_iteration"; did you mean "num_iter'),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            changed(DEEP, **values)


def test_an_unknown_name_gets_the_nearest_or_the_parts_that_have_it() -> None:
    with pytest.raises(UnknownOption, match='there is no knob "leeky"; did you mean "leaky"') as caught:
        override("network", DEEP, {"leeky": True}, "knob")
    assert (caught.value.name, caught.value.owners) == ("leeky", [])
    assert "leaky" in caught.value.known
    with pytest.raises(UnknownOption, match=r'with the parts that you chose; it belongs to routing "em"$') as caught:
        changed(complete("network", "cnn"), final_lambda=2)
    assert caught.value.owners == [("routing", "em")]


def test_values_as_a_person_types_them() -> None:
    values = True, False, None, (), (512, 1024), 1e-3, "dense"
    assert " ".join(map(as_text, values)) == "on off none none 512,1024 0.001 dense"


# ---- settings


def test_settings_are_options_too() -> None:
    recipe = Recipe()
    sgd = recipe.replace({"optimizer": "sgd", "momentum": 0.5, "learning_rate": 1, "epochs": 3})
    assert sgd.optimizer == {"name": "sgd", "momentum": 0.5, "weight_decay": 0.0}
    assert (sgd.epochs, sgd.learning_rate) == (3, 1.0)
    assert isinstance(sgd.learning_rate, float), "whole numbers become floats"
    assert (recipe.epochs, recipe.optimizer["name"]) == (20, "adam")
    assert_raises(UnknownOption, recipe.replace, {"epoch": 2}, say='no recipe field "epoch"; did you mean "epochs"?')
    config = TrainConfig().replace({"epochs": 3, "momentum": 0.3, "optimizer": "sgd", "seed": 7})
    assert config == TrainConfig(recipe=Recipe().replace({"epochs": 3, "optimizer": "sgd", "momentum": 0.3}), seed=7)


# ---- no option is parsed and ignored


def some_layers(preset: str, *places: int) -> list[dict[str, Any]]:
    """Return some of the capsule layers of a preset."""
    layers = get_preset(preset).network["layers"]
    return [layers[place] for place in places]


# Small networks that have every option together; each is changed in the first one of its kind that has it.
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    (
        "sabour2017",
        {
            **{"stem_channels": (4,), "stem_strides": (1,), "conv_channels": 6, "conv_kernel": 3},
            **{"primary_dim": 3, "primary_kernel": 3, "weight_std": 1.0},  # long capsules: all of the loss matters
        },
    ),
    ("sabour2017", {"backbone": "stack", "primary_kernel": 3}),
    ("sabour2017", {"backbone": "sequence", "primary_kernel": 3}),
    ("sabour2017", {"backbone": "timm", "primary_kernel": 2}),
    (
        "sabour2017",
        {
            "primary_kernel": 7,
            "layers": [{"name": "conv", "layer_types": 2, "layer_stride": 2, "capsule_dim": 4}, {"name": "dense"}],
        },
    ),
    ("sabour2017", {"layers": [{"name": "dense", "num_capsules": 5}, {"name": "dense"}]}),
    *(
        ("sabour2017", {"routing": name})
        for name in ("self-attention", "em", "em-code", "b2i", "heinsen-matrix", "grouped")
    ),
    *(("sabour2017", {"classification_loss": name}) for name in ("score-cross-entropy", "spread")),
    ("baseline-cnn", {"stem_channels": (4,), "stem_strides": (1,)}),
    ("cnn-pooled", {"backbone": "conv", "stem_channels": (4,), "stem_strides": (1,)}),
    ("segcaps", {"layers": some_layers("segcaps", 0, -2, -1), "reconstruction_weight": 1.0}),  # one stride, not three
    (
        "ucaps3d",
        {
            "layers": some_layers("ucaps3d", 0, 1),
            "up_channels": (5,),
            "reconstruction_weight": 1.0,
            "coarse_weight": 1.0,
        },
    ),
    ("unet-twin", {}),
    ("hvc2021-learned", {}),
    ("slots-small", {}),
    ("slots-small", {"layers": ["slot-mixture"]}),
]
# Other values of options where none follows from the annotation, or where the next one means the same in training.
VALUES: dict[str, Any] = {
    "task": "regression",
    "decoder_mask": "longest",
    "timm_model": "wide",
    "first_kernel": 7,
    "cost_scale": 3.0,
    "spread_growth": 100,
    "num_groups": 4,
    "layers": [{"num_capsules": 5}, {"name": "dense"}],
    "num_capsules": [{"num_capsules": 6}, {}],
    "stages": [{"stack_kernels": (5, 3)}, {}, {}],
    "stage_capsules": [{"name": "conv", "primary_dim": 4}, {}, {}],
    "branches": [{"transform": "dense"}, {}, {}],
    "backbone": "sequence",
    "primary_capsules": "sequence",
    "transform": "shared",
    "routing": "vb",
    "group_routing": "em",
    "decoder": False,
    "classification_loss": "cross-entropy",
}


# The same for networks that answer each pixel.
PIXEL_VALUES: dict[str, Any] = VALUES | {
    "transform": "dense",
    "routing": "em",
    "classification_loss": "pixel-margin",
    "pixel_kernels": (3,),
    "coarse_loss": "spread",
    "layer_padding": 2,
    "parameters_of": "segcaps",
    "broadcast_kernels": (3, 3, 7),
    "broadcast_strides": (1, 2, 3),
}


# Options that another option of the same network leaves without effect; another network has each of them.
WITHOUT_EFFECT = [
    ("segcaps", "weight_std"),  # of weight_init="he"
    ("segcaps", "coarse_weight"),  # no coarse_loss
    ("ucaps3d", "squash"),  # the cosine does not depend on lengths
    ("ucaps3d", "score_scale"),  # scores are logits of convolutions
    ("unet-twin", "score_scale"),
]


def another(option: Option, value: Any) -> Any:
    """Another value that an option may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # of several parts
        return another(option, value[0])
    if isinstance(value, tuple):
        return (*value[:-1], value[-1] + 1) if value else (6,)
    if isinstance(value, str):
        names = typing.get_args(option.hint)
        return names[(names.index(value) + 1) % len(names)]
    return value / 2 + 0.3 if isinstance(value, float) else value + (2 if "odd=True" in str(option.hint) else 1)


def built(tree: dict[str, Any]) -> Any:
    return build_network(tree, (1, 16, 16), 2) if tree["task"] in MASKS else build_network(tree, (1, 28, 28), 3)


def fingerprint(tree: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return a network, and its start, answers, loss and gradients on the same images with the same seed."""
    torch.manual_seed(0)
    model = built(tree)
    images = torch.rand(2, *model.in_shape, generator=torch.Generator().manual_seed(1))
    labels = labels_for(model, 2)
    torch.manual_seed(0)
    output = model(images, model.decoder_targets(labels))
    loss = model.loss(output, drawn_for(model, images), labels).total
    loss.backward()
    learned = [each for parameter in model.parameters() for each in (parameter, parameter.grad)]
    return model, [each.detach() for each in (*learned, *output, loss) if each is not None]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.slow
def test_no_option_is_parsed_and_ignored(timm_stub: None) -> None:
    declared = {name: each for cls in all_parts() for name, each in options(cls).items()}
    seen: set[tuple[str, str]] = set()
    ignored: list[tuple[str, str]] = []
    for preset, needed in NETWORKS:
        base = override("network", get_preset(preset).network, small(preset, **needed))
        before = fingerprint(base)[1]
        assert is_same(before, fingerprint(base)[1]), "the same options, the same numbers"
        for name, value in flat(base).items():
            is_new = (preset, name) not in seen and not (name == "num_capsules" and value is None)
            if is_new:
                values = PIXEL_VALUES if base["task"] in MASKS else VALUES
                given = values[name] if name in values else another(declared[name], value)
                if name.endswith("_strides_across"):  # as many as there are convolutions
                    given = tuple(each + 1 for each in flat(base)[name.removesuffix("_across")])
                try:
                    tree = override("network", base, {"layers" if name == "num_capsules" else name: given})
                    model, after = fingerprint(tree)
                except InputError:  # a sentence, so not ignored; another network must have it
                    continue
                seen.add((preset, name))
                if is_same(before, after):
                    ignored.append((preset, name))
                again = describe(model)
                if base["task"] == "pixels":  # the last layer has a type for each class
                    assert describe(built(again)) == again
                else:
                    assert again == tree
    assert ignored == WITHOUT_EFFECT
    networks = [cls for cls in all_parts() if part_of(cls)[0] != "optimizer"]
    assert {name for _, name in seen} == {name for cls in networks for name in options(cls)}, "add it to a network"


def test_options_that_do_not_go_together() -> None:
    for options_, said in (
        ({"standardise": True, "pixel_scale": 255.0}, "pixel_scale must be 1 with standardise=True"),
        (
            {"objects": 10},
            "objects must be below num_classes, because all objects have different classes, got 10 objects and 10",
        ),
    ):
        assert_raises(InputError, build_network, changed(USUAL, **options_), (1, 28, 28), 10, say=said)


AFTER_ONE_IMPORT = """
import os, sys, torch
for module in {modules}:
    if (child := os.fork()) == 0:  # a process that has imported torch, and nothing of torchcaps
        assert not any(name.startswith("torchcaps") for name in sys.modules)
        __import__(module)
        from torchcaps.parts import find
        for each in {parts}:
            find(*each)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_parts_of_all_kinds_are_found_after_any_import() -> None:
    parts = ("network", "cnn"), ("loss", "spread"), ("optimizer", "sgd"), ("layer", "deconv"), ("backbone", "stack")
    modules = "torchcaps.nn", "torchcaps.parts", "torchcaps.models.output"
    code = AFTER_ONE_IMPORT.format(modules=modules, parts=parts)
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("preset", ["compact", "compact-shared"])
def test_a_preset_of_planes_refuses_a_large_volume(preset: str) -> None:
    said = "in_shape must be (channels, height, width), three positive integers, got (1, 128, 128, 128)"
    assert_raises(InputError, create_model, preset, (1, 128, 128, 128), say=said)
