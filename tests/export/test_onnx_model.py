"""An ONNX file of torchcaps, and all that is none."""

import itertools
import os
import signal
import sys
import time
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
    for batch in (onnx_model.MAX_BATCH, 3):
        monkeypatch.setattr(onnx_model, "MAX_BATCH", batch)
        said = mean(pixels)
        assert said.reconstruction is None
        assert said.lengths.dtype == np.float32
        np.testing.assert_allclose(said.lengths, pixels.mean((1, 2, 3))[:, None].repeat(4, 1) / 255, rtol=1e-5)
        np.testing.assert_allclose(mean(images / 3000).lengths[:, 0], (images / 3000).mean((1, 2, 3)), rtol=1e-5)


def test_images_that_do_not_fit(mean: OnnxModel) -> None:
    for shape in ((1, 1, 18, 21), (1, 18, 20), (0, 1, 18, 20), (1, 3, 18, 20)):
        assert_raises(InputError, mean, np.zeros(shape, np.uint8), say="images must have shape (N, 1, 18, 20)")
    assert_raises(TypeError, mean, np.zeros((1, 1, 18, 20), np.complex64), say="got complex64")


def test_files_that_are_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = describe().to_metadata()
    with (tmp_path / "x.onnx").open("wb") as file:
        file.truncate(3 * 2**30)
    assert_raises(InputError, OnnxModel, tmp_path / "x.onnx", say="it has 3.0 GiB, an ONNX file at most 2")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert_raises(InputError, OnnxModel, tmp_path / "x.onnx", say='pip install "torchcaps[export]"')
    whole = write_mean(tmp_path / "whole.onnx", metadata).read_bytes()
    # protobuf reads the parts before a cut between two of them, so one is cut through
    cut = whole.index(b"ReduceMean") + 5
    for name, contents in (("half", whole[:cut]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / f"{name}.onnx").write_bytes(contents)
        said = f"{tmp_path / name}.onnx is damaged or no ONNX file: "
        assert_raises(InputError, OnnxModel, tmp_path / f"{name}.onnx", say=said)
    assert_raises(InputError, OnnxModel, tmp_path / "gone.onnx", say=f"there is no file {tmp_path / 'gone.onnx'}")
    other = write_mean(tmp_path / "other.onnx", {})
    assert_raises(InputError, OnnxModel, other, say=f"{other} was not written by torchcaps export: it has no entry")
    other = write_mean(tmp_path / "other.onnx", metadata, output="scores")
    assert_raises(InputError, OnnxModel, other, say="it has the inputs ['images'] and the outputs ['scores']")
    for shape, changed, said in (
        ((1, 1, 18, 20), {"class_names": ("a", "b")}, "cannot be used: its graph does not return finite lengths"),
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
    monkeypatch.setattr(onnx_model, "MAX_SECONDS", 2.0)
    model = OnnxModel(write_mean(tmp_path / "x.onnx", describe().to_metadata(), more=make()), threads=1)
    with pytest.raises(InputError) as caught:
        model(np.zeros((1, 1, 18, 20), np.uint8))
    assert str(caught.value).startswith(f"{tmp_path / 'x.onnx'} cannot be run: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def filled(*size: int) -> Graph:
    """``whole``: ones of a size, a constant that the file does not hold."""
    one = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [1.0])
    return [onnx.helper.make_node("ConstantOfShape", ["of"], ["whole"], value=one)], [whole_numbers("of", list(size))]


def repeated(operator: str, times: int, *size: int, inputs: int = 1) -> Graph:
    """An operator on a constant, again and again."""
    nodes, constants = filled(*size)
    names = ["whole", *[f"x{n}" for n in range(times - 1)], "added"]
    nodes = [*nodes, *[onnx.helper.make_node(operator, [a] * inputs, [b]) for a, b in itertools.pairwise(names)]]
    return nodes, constants


def enlarged(operator: str, by: str, *numbers: int) -> Graph:
    """A constant of 1×1×10×10 that an operator enlarges."""
    nodes, constants = filled(1, 1, 10, 10)
    inputs = {"Resize": ["whole", "", "", by], "Tile": ["whole", by], "Expand": ["whole", by]}[operator]
    return [*nodes, onnx.helper.make_node(operator, inputs, ["added"])], [*constants, whole_numbers(by, list(numbers))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: repeated("Identity", 1, 30_000, 30_000), "takes more than 768 MiB", id="fill"),
        pytest.param(lambda: enlarged("Tile", "by", 1, 1, 2_000, 2_000), "takes more than 768 MiB", id="tile"),
        pytest.param(lambda: enlarged("Expand", "to", 10**7, 1, 10, 10), "takes more than 768 MiB", id="expand"),
        pytest.param(lambda: enlarged("Resize", "to", 1, 1, 40_000, 40_000), "takes more than 768 MiB", id="resize"),
        pytest.param(lambda: repeated("Sin", 3_000, 1_000, 20_000), "takes more than 4 s", id="chain"),
        pytest.param(lambda: repeated("MatMul", 200, 3_000, 3_000, inputs=2), "takes more than 4 s", id="products"),
        pytest.param(lambda: repeated("Add", 30_000, 1, inputs=2), "", id="many nodes"),
    ],
)
def test_small_files_that_ask_for_much_while_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Graph], said: str
) -> None:
    monkeypatch.setattr(onnx_model, "MAX_SECONDS", 4.0)
    path = write_mean(tmp_path / "x.onnx", describe().to_metadata(), more=make())
    assert path.stat().st_size < 2**20
    begin = time.monotonic()
    with pytest.raises(InputError) as caught:
        OnnxModel(path, threads=1)(np.zeros((1, 1, 18, 20), np.uint8))
    assert time.monotonic() - begin < 30  # two limits, and starting a process on a crowded machine
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_that_has_ended_is_started_again(mean: OnnxModel) -> None:
    images = np.full((3, 1, 18, 20), 51, np.uint8)
    before = mean(images).scores
    mean._worker._process.kill()
    np.testing.assert_array_equal(mean(images).scores, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_a_worker_of_its_own(mean: OnnxModel, tmp_path: Path) -> None:
    """One pipe for several processes would mix up their answers, and the first to end would end the worker of all."""
    worker = mean._worker._process.pid

    def has_right_answers(number: int) -> bool:
        images = np.full((3, 1, 18, 20), number, np.uint8)
        return all(np.allclose(mean(images).lengths, number / 255) for _ in range(20))

    children = []
    for number in range(1, 4):
        if (child := os.fork()) == 0:
            signal.alarm(60)  # ends a child that waits for an answer that another one has read
            os._exit(0 if has_right_answers(number) and mean._worker._process.pid != worker else 1)
        children.append(child)
    assert has_right_answers(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert mean._worker._process.pid == worker, "no child has ended it"


def test_no_process_is_left(mean: OnnxModel) -> None:
    process = OnnxModel(mean.path)._worker._process
    assert process.wait(timeout=10) is not None


def test_a_constant_of_another_folder_is_not_read(tmp_path: Path) -> None:
    np.ones(4, np.float32).tofile(tmp_path / "outside.bin")
    (tmp_path / "folder").mkdir()
    path = write_mean(tmp_path / "folder" / "x.onnx", describe().to_metadata(), more=outside())
    assert_raises(InputError, OnnxModel, path, say=f"{path} is damaged or no ONNX file: ")


def test_images_run_one_by_one_where_a_batch_takes_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image takes 60 MB of the 168."""
    monkeypatch.setattr(onnx_model, "MAX_MEMORY_BYTES", 160 * 2**20)
    copies = [onnx.helper.make_node("Expand", ["mean_column", "size"], ["added"])]
    path = write_mean(
        tmp_path / "x.onnx", describe().to_metadata(), more=(copies, [whole_numbers("size", [1, 15_000_000])])
    )
    model = OnnxModel(path, threads=1)
    images = np.full((9, 1, 18, 20), 51, np.uint8)
    np.testing.assert_allclose(model(images).lengths, np.full((9, 4), 0.4), rtol=0.02)


def test_scores_that_are_not_finite(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        fill = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [value])
        node = onnx.helper.make_node("ConstantOfShape", ["size"], ["added"], value=fill)
        path = write_mean(tmp_path / "x.onnx", describe().to_metadata(), more=([node], [whole_numbers("size", [2])]))
        said = f"{path} cannot be used: its graph does not return finite lengths for each image"
        assert_raises(InputError, OnnxModel(path), np.zeros((1, 1, 18, 20), np.uint8), say=said)
