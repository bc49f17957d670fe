"""The device of a run, the precision that suits it and the warning where none does, and what a summary says of both."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from torchcaps.errors import InputError
from torchcaps.training import devices
from torchcaps.training.devices import (
    emulation_warning,
    hardware,
    multiplies_bf16,
    peak_memory_mib,
    pick_precision,
    source_commit,
    versions,
)

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says what the processor has."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPUINFO", path)
    return path


def give_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 0), "32"), ((7, 5), "32"), ((8, 0), "bf16"), ((8, 9), "bf16"), ((12, 0), "bf16")]
)
def test_auto_on_cuda_is_what_its_capability_says(
    capability: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_capability(monkeypatch, *capability)
    assert pick_precision("auto", CUDA) == precision


@pytest.mark.parametrize("device", [CPU, MPS], ids=str)
def test_auto_is_float32_elsewhere(device: torch.device, processor: Path) -> None:
    processor.write_text("flags\t\t: avx512f avx512_bf16\n")
    assert pick_precision("auto", device) == "32"


@pytest.mark.parametrize("device", [CPU, CUDA, MPS], ids=str)
def test_a_precision_that_is_named_is_taken(device: torch.device) -> None:
    assert [pick_precision(name, device) for name in ("32", "bf16")] == ["32", "bf16"]


def test_another_precision_is_refused() -> None:
    with pytest.raises(InputError, match='precision must be "auto", "32" or "bf16", got \'16\''):
        pick_precision("16", CPU)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f\nbugs\t: none\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("bugs\t\t: avx512_bf16\n", False),  # another line's words
        ("", False),
    ],
)
def test_a_processor_multiplies_what_it_has_instructions_for(processor: Path, cpuinfo: str, expected: bool) -> None:
    processor.write_text(cpuinfo)
    assert multiplies_bf16(CPU) is expected


def test_the_cost_of_emulation_is_said(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor.write_text("flags: avx2\n")
    assert emulation_warning("bf16", CPU) == (
        "this processor emulates bfloat16: a training step takes about 12 times as long as in float32, its forward "
        "pass 7 times"
    )
    give_capability(monkeypatch, 7, 5)
    for device in (CUDA, MPS):
        said = f"this {device.type} device has no instructions for bfloat16, so float32 may be faster"
        assert emulation_warning("bf16", device) == said


def test_nothing_is_said_where_nothing_is_emulated(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_capability(monkeypatch, 8, 0)
    processor.write_text("flags: avx512_bf16\n")
    assert emulation_warning("bf16", CPU) is emulation_warning("bf16", CUDA) is None
    processor.write_text("flags: avx2\n")
    assert emulation_warning("32", CPU) is None


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "torchcaps" / "training" / "devices.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(devices, "__file__", str(source))
    assert source_commit() is None, "an installed package has no commit"
    git(tmp_path, "init")
    assert source_commit() is None, "nor has a tree without one"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "v1")
    clean = source_commit()
    assert re.fullmatch("[0-9a-f]{10}", str(clean))
    source.write_text("2")
    assert source_commit() == f"{clean}-dirty"


def test_versions_and_hardware_name_what_decides_the_numbers() -> None:
    cpu = torch.device("cpu")
    assert set(versions(cpu)) == {"torchcaps", "torch", "python"}
    assert {"cuda"} <= set(versions(torch.device("cuda"))) <= {"torchcaps", "torch", "python", "cuda"}
    assert hardware(cpu)["device"] == "cpu"
    peak = peak_memory_mib(cpu)
    assert peak is None or peak > 50
