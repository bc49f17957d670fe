"""An ONNX file of torchcaps, and all that is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import assert_raises
from torchcaps.errors import InputError
from torchcaps.export import OnnxModel, onnx_model

onnx = pytest.importorskip("onnx", reason="the extra torchcaps[export] is not installed")
pytest.importorskip("onnxruntime", reason="the extra torchcaps[export] is not installed")

Make = Callable[..., Any]


def write_mean(path: Path, metadata: dict[str, str], output: str = "lengths") -> Path:
    """A file whose scores of four classes are the mean pixel of the image."""
    helper, pixels = onnx.helper, ["batch", 1, 18, 20]
    nodes = [
        helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "last"], ["column"]),
        helper.make_node("Expand", ["column", "four"], [output]),
    ]
    constants = [
        helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values)
        for name, values in (("axes", [1, 2, 3]), ("last", [1]), ("four", [1, 4]))
    ]
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, pixels)],
        [helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, ["batch", 4])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


@pytest.fixture
def mean(tmp_path: Path, describe: Make) -> OnnxModel:
    return OnnxModel(write_mean(tmp_path / "mean.onnx", describe().to_metadata()), threads=1)


def test_pixels_of_either_kind(mean: OnnxModel) -> None:
    images = np.arange(2 * 360, dtype=np.float64).reshape(2, 1, 18, 20)
    pixels = images.astype(np.uint8)
    lengths, reconstruction = mean(pixels)
    assert reconstruction is None
    assert lengths.dtype == np.float32
    np.testing.assert_allclose(lengths, pixels.mean((1, 2, 3))[:, None].repeat(4, 1) / 255, rtol=1e-5)
    np.testing.assert_allclose(mean(images / 1000)[0][:, 0], (images / 1000).mean((1, 2, 3)), rtol=1e-5)


def test_many_images_go_through_a_batch_at_a_time(mean: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 1, 18, 20), np.uint8)
    at_once = mean(images)[0]
    monkeypatch.setattr(onnx_model, "BATCH_SIZE", 3)
    np.testing.assert_allclose(mean(images)[0], at_once, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 18, 21), (1, 18, 20), (0, 1, 18, 20), (1, 3, 18, 20)])
def test_images_of_another_shape(mean: OnnxModel, shape: tuple[int, ...]) -> None:
    assert_raises(InputError, mean, np.zeros(shape, np.uint8), say="images must have shape (N, 1, 18, 20)")


def test_images_of_another_dtype(mean: OnnxModel) -> None:
    assert_raises(TypeError, mean, np.zeros((1, 1, 18, 20), np.int64), say="got int64")


def test_files_that_are_none_of_ours(tmp_path: Path, describe: Make) -> None:
    metadata = describe().to_metadata()
    whole = write_mean(tmp_path / "whole.onnx", metadata).read_bytes()
    for name, contents in (("half", whole[: len(whole) // 2]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / f"{name}.onnx").write_bytes(contents)
        said = f"{tmp_path / name}.onnx is damaged or no ONNX file: "
        assert_raises(InputError, OnnxModel, tmp_path / f"{name}.onnx", say=said)
    assert_raises(InputError, OnnxModel, tmp_path / "gone.onnx", say=f"there is no file {tmp_path / 'gone.onnx'}")
    other = write_mean(tmp_path / "other.onnx", {})
    assert_raises(InputError, OnnxModel, other, say=f"{other} was not written by torchcaps export: it has no entry")
    other = write_mean(tmp_path / "other.onnx", metadata, output="scores")
    assert_raises(InputError, OnnxModel, other, say="it takes ['images'] and gives ['scores']")
    for changed, said in (
        ({"class_names": ("a", "b")}, "gives lengths (2,), by its graph (1, 18, 20) and (4,)"),
        ({"in_shape": (3, 18, 20)}, "takes images (3, 18, 20)"),
    ):
        write_mean(other, describe(**changed).to_metadata())
        assert_raises(InputError, OnnxModel, other, say=said)


def test_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert_raises(InputError, OnnxModel, tmp_path / "x.onnx", say='pip install "torchcaps[export]"')
