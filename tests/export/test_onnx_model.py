"""An ONNX file of torchcaps, and all that is none."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import assert_raises
from torchcaps.errors import InputError
from torchcaps.export import Description, OnnxModel, onnx_model

onnx = pytest.importorskip("onnx", reason="the extra torchcaps[export] is not installed")
pytest.importorskip("onnxruntime", reason="the extra torchcaps[export] is not installed")

Graph = tuple[Sequence[Any], Sequence[Any]]


def describe(**values: Any) -> Description:
    return Description(**{"in_shape": (1, 18, 20), "class_names": ("zero", "one", "two", "three"), **values})


def whole_numbers(name: str, values: list[int]) -> Any:
    return onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values)


def write_mean(path: Path, metadata: dict[str, str], output: str = "lengths", more: Graph = ((), ())) -> Path:
    """A file whose scores of four classes are the mean pixel, plus the mean of ``added``, which ``more`` computes."""
    helper, pixels = onnx.helper, ["batch", 1, 18, 20]
    nodes = [
        helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "last"], ["mean_column" if more[0] else "column"]),
        *more[0],
        *([helper.make_node("ReduceMean", ["added"], ["added_mean"], keepdims=0)] if more[0] else ()),
        *([helper.make_node("Add", ["mean_column", "added_mean"], ["column"])] if more[0] else ()),
        helper.make_node("Expand", ["column", "four"], [output]),
    ]
    constants = [whole_numbers("axes", [1, 2, 3]), whole_numbers("last", [1]), whole_numbers("four", [1, 4])]
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, pixels)],
        [helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, ["batch", 4])],
        [*constants, *more[1]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


@pytest.fixture
def mean(tmp_path: Path) -> OnnxModel:
    return OnnxModel(write_mean(tmp_path / "mean.onnx", describe().to_metadata()), threads=1)


def test_pixels_of_either_kind_a_batch_at_a_time(mean: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.arange(7 * 360, dtype=np.float64).reshape(7, 1, 18, 20)
    pixels = images.astype(np.uint8)
    for batch in (onnx_model.BATCH_SIZE, 3):
        monkeypatch.setattr(onnx_model, "BATCH_SIZE", batch)
        said = mean(pixels)
        assert said.reconstruction is None
        assert said.lengths.dtype == np.float32
        np.testing.assert_allclose(said.lengths, pixels.mean((1, 2, 3))[:, None].repeat(4, 1) / 255, rtol=1e-5)
        np.testing.assert_allclose(mean(images / 3000).lengths[:, 0], (images / 3000).mean((1, 2, 3)), rtol=1e-5)


def test_images_that_do_not_fit(mean: OnnxModel) -> None:
    for shape in ((1, 1, 18, 21), (1, 18, 20), (0, 1, 18, 20), (1, 3, 18, 20)):
        assert_raises(InputError, mean, np.zeros(shape, np.uint8), say="images must have shape (N, 1, 18, 20)")
    assert_raises(TypeError, mean, np.zeros((1, 1, 18, 20), np.int64), say="got int64")


def test_files_that_are_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = describe().to_metadata()
    with (tmp_path / "x.onnx").open("wb") as file:
        file.truncate(3 * 2**30)
    assert_raises(InputError, OnnxModel, tmp_path / "x.onnx", say="it has 3.0 GiB, an ONNX file at most 2")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert_raises(InputError, OnnxModel, tmp_path / "x.onnx", say='pip install "torchcaps[export]"')
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
    for shape, changed, said in (
        ((1, 1, 18, 20), {"class_names": ("a", "b")}, "cannot be used: its graph does not give finite lengths"),
        ((1, 3, 18, 20), {"in_shape": (3, 18, 20)}, "cannot be run: "),
    ):
        model = OnnxModel(write_mean(other, describe(**changed).to_metadata()))
        assert_raises(InputError, model, np.zeros(shape, np.uint8), say=f"{other} {said}")


def never_ends() -> Graph:
    """A loop of 10^15 rounds."""
    helper, kinds, value = onnx.helper, onnx.TensorProto, onnx.helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_on"], ["still"]), helper.make_node("Add", ["sum", "sum"], ["next"])],
        "body",
        [value("round", kinds.INT64, []), value("go_on", kinds.BOOL, []), value("sum", kinds.FLOAT, ["batch", 1])],
        [value("still", kinds.BOOL, []), value("next", kinds.FLOAT, ["batch", 1])],
    )
    constants = [
        helper.make_tensor("rounds", kinds.INT64, [], [10**15]),
        helper.make_tensor("yes", kinds.BOOL, [], [1]),
    ]
    return [helper.make_node("Loop", ["rounds", "yes", "mean_column"], ["added"], body=body)], constants


def outside() -> Graph:
    """A constant that stands in another file, outside the folder."""
    tensor = onnx.TensorProto(name="added_before", data_type=onnx.TensorProto.FLOAT, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../outside.bin"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return [onnx.helper.make_node("Identity", ["added_before"], ["added"])], [tensor]


def of_shape(operator: str, *inputs: str, size: list[int]) -> Graph:
    return [onnx.helper.make_node(operator, [*inputs, "size"], ["added"])], [whole_numbers("size", size)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: of_shape("ConstantOfShape", size=[100_000, 30_000]), "an image takes more than 768 MiB of memory"),
        (lambda: of_shape("ConstantOfShape", size=[10**9, 10**9]), "an image takes more than 768 MiB of memory"),
        (lambda: of_shape("Expand", "mean_column", size=[3_000_000, 1, 1000]), "an image takes more than 768 MiB"),
        (lambda: of_shape("Gather", "mean", size=[99]), "indices element out of data bounds"),
        (never_ends, "an image takes more than 2 s"),
    ],
)
def test_graphs_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Graph], said: str
) -> None:
    monkeypatch.setattr(onnx_model, "SECONDS", 2.0)
    model = OnnxModel(write_mean(tmp_path / "x.onnx", describe().to_metadata(), more=make()), threads=1)
    with pytest.raises(InputError) as caught:
        model(np.zeros((1, 1, 18, 20), np.uint8))
    assert str(caught.value).startswith(f"{tmp_path / 'x.onnx'} cannot be run: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_constant_of_another_folder_is_not_read(tmp_path: Path) -> None:
    np.ones(4, np.float32).tofile(tmp_path / "outside.bin")
    (tmp_path / "folder").mkdir()
    path = write_mean(tmp_path / "folder" / "x.onnx", describe().to_metadata(), more=outside())
    assert_raises(InputError, OnnxModel, path, say=f"{path} is damaged or no ONNX file: ")


def test_a_batch_that_takes_too_much_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image takes 20 MB of the 64."""
    monkeypatch.setattr(onnx_model, "MEMORY", 64 * 2**20)
    copies = [onnx.helper.make_node("Expand", ["mean_column", "size"], ["added"])]
    path = write_mean(
        tmp_path / "x.onnx", describe().to_metadata(), more=(copies, [whole_numbers("size", [1, 5_000_000])])
    )
    model = OnnxModel(path, threads=1)
    images = np.full((9, 1, 18, 20), 51, np.uint8)
    np.testing.assert_allclose(model(images).lengths, np.full((9, 4), 0.4), rtol=0.02)


def test_scores_that_are_not_finite(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        fill = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [value])
        node = onnx.helper.make_node("ConstantOfShape", ["size"], ["added"], value=fill)
        path = write_mean(tmp_path / "x.onnx", describe().to_metadata(), more=([node], [whole_numbers("size", [2])]))
        said = f"{path} cannot be used: its graph does not give finite lengths for each image"
        assert_raises(InputError, OnnxModel(path), np.zeros((1, 1, 18, 20), np.uint8), say=said)
