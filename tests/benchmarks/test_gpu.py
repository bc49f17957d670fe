"""The benchmark for GPUs, run on the CPU from its first line to its last."""

import csv
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import gpu

    return gpu


def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    return int(gpu.main())


def test_a_dry_run_checks_times_and_writes_everything(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(gpu, monkeypatch, "--dry-run", "--kernels", "--csv", str(tmp_path / "gpu.csv")) == 0
    rows = list(csv.DictReader((tmp_path / "gpu.csv").open()))
    found = {(row["case"], row["contender"]) for row in rows}
    for precision in ("fp32", "bf16"):
        for contender in ("plain", "compiled", "naive"):
            assert (f"training step, {precision}", contender) in found
    assert {contender for case, contender in found if case == "forward + backward, full"} == {
        "recompute", "reference", "naive"
    }  # fmt: skip
    assert {("epoch of 64 images, bf16", "training"), ("epoch of 64 images, bf16", "validation")} <= found
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert all("dry run" in row["gpu"] and row["torch"] == torch.__version__ for row in rows)
    shown = capsys.readouterr().out
    for words in (
        "full step",
        "epoch of MNIST",
        "naive ÷ ours",
        "300,000 steps",
        "kernels of 20 times a training step",
    ):
        assert words in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(gpu, monkeypatch) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_results_that_are_wrong_stop_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = gpu.gpu_routing.ROUTINGS["recompute"]
    monkeypatch.setitem(gpu.gpu_routing.ROUTINGS, "recompute", lambda *arguments: 1.001 * exact(*arguments))
    numbers = itertools.count()
    monkeypatch.setattr(gpu.gpu_steps.Contender, "losses", lambda *_: torch.tensor([float(next(numbers))]))
    assert run(gpu, monkeypatch, "--dry-run") == 1
    wrong = capsys.readouterr().err
    assert "wrong results, nothing was timed" in wrong
    assert "capsules is 1.00e-03 off" in wrong
    assert "fp32: losses compiled [1.0], plain [0.0]" in wrong
