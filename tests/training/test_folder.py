"""A run folder has one writer at a time; the others learn who it is, and change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import tiny_config
from torchcaps.cli import main
from torchcaps.errors import InputError
from torchcaps.export import OnnxModel
from torchcaps.training import Progress, load_run, resume, runner, train
from torchcaps.training.checkpoint import HOLDER, LOCK, lock_folder

WAITING = """
import sys, time
from torchcaps.training import PlainProgress, read_config, resume, train

class Waits(PlainProgress):
    def epoch(self, row):
        super().epoch(row)
        time.sleep(600)

what, out, config = sys.argv[1:4]
if what == "resume":
    resume(out, progress=Waits(), figures=False)
else:
    train(read_config(config), out, progress=Waits(), figures=False)
"""


@pytest.fixture
def script(bars: Path, tmp_path: Path) -> list[str]:
    """A process that trains an epoch and then waits; what it is to do, and where, is to be added."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(bars).to_dict()))
    (tmp_path / "script.py").write_text(WAITING)
    return [sys.executable, str(tmp_path / "script.py")]


@pytest.fixture
def holder(script: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in another process that has finished its first epoch."""
    arguments = ["train", str(tmp_path / "run"), str(tmp_path / "config.json")]
    process = subprocess.Popen([*script, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 1/3"):
            break
    yield process
    process.kill()
    process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_a_run_is_in_takes_no_other(holder: subprocess.Popen[str], bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = contents(out)
    assert {LOCK, HOLDER, "last.ckpt"} <= before.keys()
    with pytest.raises(InputError) as caught:
        resume(out, progress=Progress(), figures=False)
    assert re.fullmatch(
        rf"{re.escape(str(out))} is in use: process {holder.pid} on {re.escape(socket.gethostname())} has trained in "
        r"it since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d; wait for its end, or stop it",
        str(caught.value),
    )
    with pytest.raises(InputError, match=f"is in use: process {holder.pid} on"):
        train(tiny_config(bars), out, progress=Progress(), figures=False)
    assert contents(out) == before
    load_run(out)  # readers need not wait
    holder.kill()  # the lock ends with its holder
    holder.wait()
    assert {LOCK, HOLDER} <= contents(out).keys()
    assert resume(out, progress=Progress(), figures=False)["epochs"] == 3
    assert not [name for name in contents(out) if Path(name).name.startswith(".")]


def test_two_new_runs_in_one_folder(bars: Path, tmp_path: Path) -> None:
    """The second comes while the first is there, but has written nothing yet."""
    out = tmp_path / "run"
    with lock_folder(out), pytest.raises(InputError, match=f"is in use: process {os.getpid()} on"):
        train(tiny_config(bars), out, progress=Progress(), figures=False)
    assert list(out.iterdir()) == []
    with lock_folder(out):
        (out / HOLDER).write_text("{")
        with pytest.raises(InputError, match="is in use: another process trains in it; wait"):
            train(tiny_config(bars), out, progress=Progress(), figures=False)


def test_a_run_that_came_while_the_data_were_read_is_not_overwritten(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, own = tmp_path / "run", runner._prepare

    def slow(*arguments: Any, **options: Any) -> object:
        trainer = own(*arguments, **options)
        monkeypatch.undo()
        train(tiny_config(bars, epochs=1, seed=1), out, progress=Progress(), figures=False)
        return trainer

    monkeypatch.setattr(runner, "_prepare", slow)
    with pytest.raises(InputError, match="there is a run in"):
        train(tiny_config(bars), out, progress=Progress(), figures=False)
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert LOCK not in contents(out)


def test_runs_that_name_no_folder_never_share_one(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    names = iter(["taken", "free"])  # the first was free when it was looked for
    monkeypatch.setattr(runner, "_next_folder", lambda _: Path(next(names)))
    assert train(tiny_config(bars, epochs=1), progress=Progress(), figures=False)["out"] == "free"
    assert list((tmp_path / "taken").iterdir()) == []


def test_the_lock_is_given_back_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "a" / "run"):
        raise ZeroDivisionError
    with lock_folder(tmp_path / "a" / "run"):
        pass
    assert contents(tmp_path) == {}


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
@pytest.mark.parametrize("name", [LOCK, HOLDER])
def test_a_link_in_the_place_of_a_lock_leads_nowhere(bars: Path, tmp_path: Path, name: str) -> None:
    out, precious = tmp_path / "run", tmp_path / "precious"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    precious.write_text("mine")
    (out / name).symlink_to(precious)
    assert resume(out, overrides={"epochs": 2}, progress=Progress(), figures=False)["epochs"] == 2
    assert precious.read_text() == "mine"
    assert not [each for each in contents(out) if Path(each).name.startswith(".")]


class After(Progress):
    """Does something after an epoch."""

    def __init__(self, epoch: int, what: Callable[[], object]) -> None:
        self.number, self.what = epoch, what

    def epoch(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == self.number:
            self.what()


@pytest.mark.parametrize("epoch", [1, 3], ids=["within", "at the end"])
@pytest.mark.parametrize("kind", ["moved", "removed", "another"])
def test_a_run_whose_folder_goes_ends_with_a_sentence(bars: Path, tmp_path: Path, kind: str, epoch: int) -> None:
    out, away = tmp_path / "run", tmp_path / "away"

    def goes() -> None:
        out.rename(away)
        if kind == "removed":
            shutil.rmtree(away)
        if kind == "another":
            out.mkdir()

    with pytest.raises(InputError, match=r"the run folder .*run was moved or removed while the run wrote to it"):
        train(tiny_config(bars), out, progress=After(epoch, goes), figures=False)
    assert not out.exists() or contents(out) == {}
    if kind == "moved":
        assert resume(away, progress=Progress(), figures=False)["epochs"] == 3


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("torchcaps.training.checkpoint.FileLock.acquire", acquire)
    with lock_folder(tmp_path), lock_folder(tmp_path):
        pass


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), lock_folder(tmp_path / "file"):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of files are UTF-8 on this system")
def test_a_folder_whose_name_is_not_utf_8_is_trained_in_and_drawn(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"\xff\xfe")
    assert train(tiny_config(bars, epochs=1), out, progress=Progress())["epochs"] == 1
    assert (out / "figures" / "curves.png").exists()
    run = load_run(out)
    assert run.summary is not None
    pytest.importorskip("onnx")
    assert main(["export", str(out), "--format", "onnx"]) == 0
    assert OnnxModel(out / "model.onnx").description.class_names == run.class_names
