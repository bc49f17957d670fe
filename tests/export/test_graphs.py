"""ONNX files and torch.export programs give what the network gives, for any number of images, or are not written."""

import copy
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from own_parts import register
from support import assert_raises, small
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.export import Agreement, Description, OnnxModel, export_onnx, export_program, graphs, random_images
from torchcaps.models import Network

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")

SHAPE, CLASSES = (1, 18, 20), ("zero", "one", "two", "three")
KINDS: dict[str, dict[str, Any]] = {
    "capsules": {"preset": "sabour2017"},
    "objects": {"preset": "sabour2017", "objects": 2, "standardise": True, "decoder_channels": (6, 5, 4)},
    "activations": {"preset": "sabour2017", "routing": "active"},  # one's own, which choose what is decoded
    "cnn": {"preset": "baseline-cnn"},
}


def make_network(preset: str = "sabour2017", **overrides: Any) -> Network:
    """A network whose capsules have lengths that differ, as those of trained ones."""
    torch.manual_seed(0)
    made = create_model(preset, SHAPE, len(CLASSES), **small(preset) | overrides)
    if made.has_capsules:
        with torch.no_grad():
            made.class_capsules.transform.weight.mul_(20)
    return made


def describe(**values: Any) -> Description:
    return Description(**{"in_shape": SHAPE, "class_names": CLASSES, **values})


@pytest.fixture(scope="module", params=KINDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Network, Path, Agreement]:
    """A network, its ONNX file, and how they agree."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        model = make_network(**KINDS[request.param])
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    description = describe(preset=KINDS[request.param]["preset"], objects=model.objects)
    return model, path, export_onnx(model.train(), path, description, random_images(SHAPE, 5))


def outputs(model: Network, images: Tensor) -> list[np.ndarray]:
    was_training = model.training
    with torch.no_grad():
        output = model.eval()(images)
    model.train(was_training)
    return [each.numpy() for each in (output.scores, output.reconstruction) if each is not None]


@pytest.mark.slow
def test_an_onnx_file_gives_what_the_network_gives(exported: tuple[Network, Path, Agreement]) -> None:
    model, path, agreement = exported
    has_decoder = model.decoder is not None
    for count in (1, 3, 300):
        images = random_images(SHAPE, count)
        said = OnnxModel(path)(images.numpy())
        wanted = outputs(model, images / 255)
        assert (said.reconstruction is None) == (len(wanted) == 1) != has_decoder
        for got, expected in zip((said.scores, said.reconstruction), wanted, strict=False):
            np.testing.assert_allclose(got, expected, atol=1e-5)
        assert np.ptp(wanted[0], axis=1).min() > 1e-3, "lengths that differ, so that decoding is tested"
    assert all(module.training for module in model.modules()), "the network stays as it was"
    preset = "sabour2017" if has_decoder else "baseline-cnn"
    assert OnnxModel(path).description == describe(preset=preset, objects=model.objects)
    assert agreement.images == 5
    assert 0 <= agreement.lengths < 1e-6
    assert (agreement.reconstruction is not None) == has_decoder
    assert f"largest difference of a score {agreement.lengths:.1e}" in str(agreement)


@pytest.mark.slow
def test_what_an_onnx_file_is(exported: tuple[Network, Path, Agreement]) -> None:
    """One file with all weights, ONNX's own operators only, names that can be relied on, and no line of source."""
    import onnx

    model, path, _ = exported
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path)
    assert {(each.domain, each.version) for each in proto.opset_import} == {("", graphs.OPSET)}
    assert {node.domain for node in proto.graph.node} == {""}
    assert len(proto.functions) == 0
    shapes = {
        each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in (*proto.graph.input, *proto.graph.output)
    }
    expected: dict[str, list[str | int]] = {"images": ["batch", 1, 18, 20], "lengths": ["batch", 4]}
    if model.decoder is not None:
        expected["reconstruction"] = ["batch", *([2] if model.objects == 2 else []), 1, 18, 20]
    assert shapes == expected
    contents = path.read_bytes()
    assert b".py" not in contents
    assert str(Path.cwd()).encode() not in contents
    assert len(contents) < 1.1 * sum(4 * p.numel() for p in model.parameters()) + 50_000


@pytest.mark.parametrize("kind", ["capsules", "cnn"])
def test_a_program_gives_what_the_network_gives(tmp_path: Path, kind: str) -> None:
    model = make_network(**KINDS[kind])
    path, extra = tmp_path / "model.pt2", {graphs.DESCRIPTION: ""}
    agreement = export_program(model, path, describe())
    assert agreement.images == 32
    program = torch.export.load(path, extra_files=extra)
    assert json.loads(extra[graphs.DESCRIPTION]) == json.loads(json.dumps(vars(describe())))
    loaded = program.module()
    for count in (1, 7):
        images = random_images(SHAPE, count) / 255
        for got, wanted in zip(loaded(images), outputs(model, images), strict=True):
            np.testing.assert_allclose(got.detach(), wanted, atol=1e-6)
    assert "torchcaps" not in str(program.graph), "operators of torch only"
    assert b".py" not in path.read_bytes()


@pytest.mark.slow
def test_sequences_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for rows of up to 20 places gives of shorter ones what the network gives of padded ones."""
    monkeypatch.setattr(graphs, "trace", functools.cache(graphs.trace))  # one trace for both files
    shape, path = (1, 1, 20), tmp_path / "model.onnx"
    model = create_model("sequences", shape, 4, **small("sequences")).eval()
    sequences = torch.randn(6, *shape)
    for row, length in enumerate((20, 1, 7, 13, 2, 20)):
        sequences[row, ..., length:] = torch.nan
    export_program(model, tmp_path / "model.pt2", describe(in_shape=shape), sequences)
    program = torch.export.load(tmp_path / "model.pt2").module()
    export_onnx(model, path, describe(in_shape=shape), sequences)
    exported = OnnxModel(path)
    for batch, length in ((6, 20), (1, 1), (3, 13), (2, 2)):
        given = sequences[:batch, ..., :length]
        wanted = outputs(model, torch.cat([given, given.new_full((batch, 1, 1, 20 - length), torch.nan)], 3))[0]
        np.testing.assert_allclose(exported(given.numpy()).scores, wanted, atol=1e-6)
        np.testing.assert_allclose(program(given)[0].detach(), wanted, atol=1e-6)
    said = "images must have shape (N, 1, 1, 1 to 20) with N at least 1, got (1, 1, 1, 21)"
    assert_raises(InputError, exported, np.zeros((1, 1, 1, 21), np.float32), say=said)


WRITERS = {"onnx": (export_onnx, "model.onnx"), "torch": (export_program, "model.pt2")}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_differs_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write, name = WRITERS[kind]
    model, real = make_network("baseline-cnn", hidden=()), graphs.trace
    (tmp_path / name).write_bytes(b"what was there")
    for wrong in (2e-3, math.nan):

        def trace_another(network: Network, wrong: float = wrong) -> Any:
            other = copy.deepcopy(network)
            with torch.no_grad():
                other.classify.bias[0] += wrong
            return real(other)

        monkeypatch.setattr(graphs, "trace", trace_another)
        said = f"{tmp_path / name} was not written: its "
        assert_raises(InputError, write, model, tmp_path / name, describe(), say=said)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"what was there"]


def test_differences_are_absolute_up_to_one_and_relative_beyond() -> None:
    row = np.array([[0.5, -3.0]])
    assert graphs.difference(row + 0.03, row) == pytest.approx(0.01)
    assert graphs.difference(row / 10 + 0.03, row / 10) == pytest.approx(0.03)
    assert graphs.difference(row[0], row) == math.inf
    assert math.isnan(graphs.difference(row * math.nan, row))
    assert math.isnan(graphs.difference(row, row * math.nan))


def test_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network()
    for write, name in WRITERS.values():
        said = f"the file must end in {Path(name).suffix}, got {tmp_path / 'model.bin'}"
        assert_raises(InputError, write, network, tmp_path / "model.bin", describe(), say=said)
        said = "the description does not fit the network: its in_shape, number of class_names and objects are "
        for wrong in ({"in_shape": (1, 18, 21)}, {"class_names": ("a", "b")}, {"objects": 2}):
            assert_raises(InputError, write, network, tmp_path / name, describe(**wrong), say=said)
    write, path = export_onnx, tmp_path / "x.onnx"
    for package in ("onnx", "onnxruntime", "onnxscript"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            said = f'an ONNX file needs the package {package}: pip install "torchcaps[export]"'
            assert_raises(InputError, write, network, path, describe(), say=said)
    monkeypatch.setattr(graphs, "MAX_ONNX_WEIGHT_BYTES", 1000)
    assert_raises(InputError, write, network, path, describe(), say="an ONNX file holds 2 GiB")
    assert not list(tmp_path.iterdir())
