import re
import subprocess
from pathlib import Path

import pytest
import torch

from torchcaps.training import environment
from torchcaps.training.environment import commit, hardware, peak_memory_mib, versions


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def test_the_commit_is_that_of_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "torchcaps" / "training" / "environment.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(environment, "__file__", str(source))
    assert commit() is None, "an installed package has no commit"
    git(tmp_path, "init")
    assert commit() is None, "nor has a tree without one"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "v1")
    clean = commit()
    assert re.fullmatch("[0-9a-f]{10}", str(clean))
    source.write_text("2")
    assert commit() == f"{clean}-dirty"


def test_versions_and_hardware_name_what_decides_the_numbers() -> None:
    cpu = torch.device("cpu")
    assert set(versions(cpu)) == {"torchcaps", "torch", "python"}
    assert {"cuda"} <= set(versions(torch.device("cuda"))) <= {"torchcaps", "torch", "python", "cuda", "triton"}
    assert hardware(cpu)["device"] == "cpu"
    peak = peak_memory_mib(cpu)
    assert peak is None or peak > 50
