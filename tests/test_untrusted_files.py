"""Files of others are read, never executed: whatever is put in their place."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import assert_raises
from tiny_runs import tiny_config, write_bars
from torchcaps import CapsNet, load_pretrained
from torchcaps.errors import InputError
from torchcaps.export import OnnxModel
from torchcaps.training import load_run, resume, train


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tiny_config(write_bars(tmp_path / "x.npz"), epochs=1), tmp_path / "run", figures=False)
    return tmp_path / "run"


def write_pickle(payload: Payload, path: Path) -> None:
    path.write_bytes(pickle.dumps(payload))


def write_torch(payload: Payload, path: Path) -> None:
    torch.save({"model": payload, "optimizer": payload, "progress": payload}, path)


WRITERS = (write_pickle, write_torch)


# a file of a run, and who reads it
READERS: dict[str, list[Callable[[Path], object]]] = {
    "config.json": [load_run, resume],
    "summary.json": [load_run],
    "last.ckpt": [lambda run: load_run(run, "last"), lambda run: resume(run, overrides={"epochs": 2})],
    "best/config.json": [load_run, lambda run: load_pretrained(run / "best")],
    "best/classes.json": [load_run],
    "best/model.safetensors": [
        load_run,
        lambda run: load_pretrained(run / "best"),
        lambda run: CapsNet.from_pretrained(run / "best"),
    ],
}


def test_nothing_in_a_run_is_executed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    for name, readers in READERS.items():
        whole = (run / name).read_bytes()
        for write in WRITERS:
            write(Payload(tmp_path / "executed"), run / name)
            for read in readers:
                assert_raises(InputError, read, run, say=name)
        (run / name).write_bytes(whole)
    for name in ("pytorch_model.bin", "model.pt", "model.pkl"):
        write_torch(Payload(tmp_path / "executed"), run / "best" / name)
    (run / "best" / "model.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    load_pretrained(run / "best")
    assert not (tmp_path / "executed").exists()
    torch.load(run / "best" / "model.pt", weights_only=False)
    assert (tmp_path / "executed").exists(), "the payload works"


def test_nothing_in_an_onnx_file_is_executed(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra torchcaps[export] is not installed")
    for write in WRITERS:
        write(Payload(tmp_path / "executed"), tmp_path / "model.onnx")
        assert_raises(InputError, OnnxModel, tmp_path / "model.onnx", say="model.onnx is damaged or no ONNX file")
    assert not (tmp_path / "executed").exists()
