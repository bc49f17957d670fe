"""The public names: they resolve, say what they are, and keep to the shapes in their signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import torchcaps
import torchcaps.models
import torchcaps.nn


def test_names_resolve_and_are_described() -> None:
    for name in sorted(set(torchcaps.__all__) - {"__version__"}):
        value = getattr(torchcaps, name)
        assert inspect.getdoc(value), name
        assert value.__name__.split(".")[-1] == name
    for package, name in ((each, name) for each in (torchcaps.nn, torchcaps.models) for name in each.__all__):
        value = getattr(package, name)
        assert isinstance(value, types.UnionType) or inspect.getdoc(value), name
        for method_name, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not method_name.startswith("_") and method_name != "forward":
                assert inspect.getdoc(method), f"{name}.{method_name}"


def test_options_go_by_name() -> None:
    for function in (torchcaps.dynamic_routing, torchcaps.route, torchcaps.margin_loss):
        options = list(inspect.signature(function).parameters.values())[3:]
        assert all(option.kind is option.KEYWORD_ONLY for option in options)


TESTS = str(Path(__file__).parent)

SHAPES_AT_RUN_TIME = """
import sys, types

from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, install_import_hook

sys.modules["lenient"] = lenient = types.ModuleType("lenient")
lenient.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # 2 is a float
CHECKED = ["torchcaps.ops", "torchcaps.nn", "torchcaps.models.capsnet", "torchcaps.models.cnn"]

with install_import_hook(CHECKED, "lenient.check"):
    import itertools
    import torch
    import torchcaps
    from torchcaps.models import get_preset

    torchcaps.create_model

sys.path.insert(0, sys.argv[1])
from support import drawn_for, labels_for, small

torch.set_num_threads(1)
poses, weight = torch.randn(2, 5, 3), torch.randn(5, 4, 6, 3)
bias, prior = dict(bias=torch.randn(4, 6)), dict(prior=torch.randn(5, 4))
for axis, stop, leaky, extra in itertools.product(("outputs", "inputs"), (False, True), (False, True), (bias, prior)):
    options = dict(softmax_over=axis, stop_gradient=stop, leaky=leaky, **extra)
    torchcaps.route(poses, weight, return_coupling=True, **options)
    torchcaps.dynamic_routing(torchcaps.compute_votes(poses, weight), **options)
    del options["stop_gradient"]
    torchcaps.routing_rounds(torchcaps.compute_votes(poses, weight), **options)

votes, active, logits, beta = torch.randn(2, 5, 4, 6), torch.rand(2, 5), torch.randn(2, 5, 4), torch.zeros(4)
torchcaps.self_attention_routing(votes, bias=torch.zeros(5, 4), return_coupling=True)
torchcaps.inverted_attention_routing(votes, norm_weight=torch.ones(6), return_coupling=True)
torchcaps.self_routing(votes, active, logits, return_coupling=True)
for mixture in (torchcaps.em_routing, torchcaps.em_routing_code, torchcaps.vb_routing):
    mixture(votes, active, beta, beta, return_coupling=True)

PRESETS = "sabour2017-code keras-tutorial torch-notebook compact-deep efficient-capsnet-mnist hinton2018-code vb2020 "
PRESETS += "hahn2019-smallnet aff-capsnet sabour2017-multimnist baseline-cnn cnn-pooled"
for preset in PRESETS.split():
    model = torchcaps.create_model(preset, (2, 18, 21), 3, **small(preset))
    images, labels = torch.rand(2, 2, 18, 21), labels_for(model, 2)
    for targets in (None, labels) if model.objects > 1 else (None, labels, torch.eye(3)[labels] > 0):
        output = model(images, targets, return_coupling=get_preset(preset).has_capsules)
        model.loss(output, drawn_for(model, images), labels).total.backward()

try:
    torchcaps.ops.losses._reduce(torch.rand(2, 3), "none")
except TypeCheckError:
    print("checked")
"""


@pytest.mark.slow
def test_shapes_are_those_of_the_signatures() -> None:
    run = subprocess.run([sys.executable, "-c", SHAPES_AT_RUN_TIME, TESTS], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "checked", run.stderr[-3000:]
