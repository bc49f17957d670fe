"""What a kill leaves of a file that was being written goes when the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import tiny_config
from torchcaps.files import atomic_path, remove_temporaries
from torchcaps.training import Progress, resume, train

WRITTEN = [
    "config.json",
    "metrics.csv",
    "last.ckpt",
    "summary.json",
    "best/config.json",
    "best/model.safetensors",
    "best/classes.json",
]


def left_of(path: Path) -> Path:
    """What a process leaves that is killed while it writes a file."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(path.read_bytes() if path.exists() else b"")
    temporary.write_bytes(b"half")
    return temporary


def test_a_resumed_run_removes_what_a_kill_left_and_nothing_else(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    left = [left_of(out / name) for name in WRITTEN]
    own = [out / ".config.json.swp", out / ".hidden", out / "best" / ".notes"]
    for path in own:
        path.touch()
    assert all(path.exists() for path in left)
    resume(out, overrides={"epochs": 2}, progress=Progress(), figures=False)
    assert not [path for path in left if path.exists()]
    assert set(out.rglob(".*")) == set(own)


def test_a_run_that_cannot_go_on_keeps_its_configuration(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    (out / "summary.json").unlink()
    (out / "summary.json").mkdir()
    before = (out / "config.json").read_bytes()
    with pytest.raises(OSError, match="summary"):
        resume(out, overrides={"epochs": 2}, progress=Progress(), figures=False)
    assert (out / "config.json").read_bytes() == before


def test_leftovers_of_figures_go_when_they_are_drawn_again(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    (out / "figures").mkdir()
    left = left_of(out / "figures" / "samples.png")
    resume(out, progress=Progress())
    assert not left.exists()
    assert (out / "figures" / "samples.png").exists()


@pytest.mark.parametrize("name", ["a[1].png", "x", "a.tar.gz"])
def test_names_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    left = left_of(tmp_path / name)
    other = left_of(tmp_path / f"other-{name}")
    remove_temporaries(tmp_path / name)
    assert (left.exists(), other.exists()) == (False, True)
