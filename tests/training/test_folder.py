"""A run folder has one writer at a time; its files are whole, and nothing else is left in it."""

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support import assert_raises
from tiny_runs import go_on, run, same_weights, save_image, tiny_config
from torchcaps.errors import InputError
from torchcaps.files import atomic_path
from torchcaps.training import Progress, Recipe, TrainConfig, fit, load_run, make_config, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.folder import HOLDER, LOCK, lock_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_new_runs_in_one_folder(bars: Path, tmp_path: Path) -> None:
    """The second comes while the first is there, but has written nothing yet."""
    out = tmp_path / "run"
    with lock_folder(out):
        for note, who in (((out / HOLDER).read_text(), f"process {os.getpid()} on"), ("{", "another process trains")):
            (out / HOLDER).write_text(note)
            assert_raises(InputError, run, tiny_config(bars), out, say=f"is in use: {who}")
        assert contents(out).keys() == {LOCK, HOLDER}
    assert not out.exists(), "it was empty"


def test_a_folder_with_a_run_is_not_overwritten(bars: Path, out: Path) -> None:
    before = contents(out)
    assert_raises(InputError, run, tiny_config(bars), out, say="there is a run in")
    assert contents(out) == before
    with lock_folder(out):
        with pytest.raises(InputError, match=f"is in use: process {os.getpid()} on .* wait until it ends, or stop it"):
            go_on(out)
        load_run(out)  # readers need not wait
    assert contents(out) == before
    (out / "config.json").unlink()  # only last.ckpt says so
    assert_raises(InputError, run, tiny_config(bars), out, say="there is a run in")


@pytest.mark.parametrize("door", ["train", "fit"])
@pytest.mark.parametrize("name", ["metrics.csv", "summary.json", "best/config.json", "best/model.safetensors"])
def test_files_of_others_stay(name: str, door: str, bars: Path, tmp_path: Path) -> None:
    (tmp_path / "own/best").mkdir(parents=True)
    (tmp_path / "own" / name).write_text("precious")
    (tmp_path / "own/notes.txt").write_text("these do not matter")
    before, said = contents(tmp_path), f"{tmp_path / 'own' / name} exists already, and a run would replace it"
    if door == "train":
        assert_raises(InputError, run, tiny_config(bars), tmp_path / "own", say=said)
    else:
        network, data = nn.Linear(4, 2), (torch.rand(8, 4), torch.arange(8) % 2)
        small = {"recipe": Recipe(batch_size=4), "out": tmp_path / "own", "progress": Progress()}
        assert_raises(InputError, fit, network, data, **small, say=said)
    assert contents(tmp_path) == before


def test_a_run_does_not_lie_among_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(8):
        save_image(tmp_path / "ab"[n % 2] / f"{n}.png", np.full((18, 18), n, np.uint8))
    monkeypatch.chdir(tmp_path)
    config = make_config("compact", data="folder:.")
    assert_raises(
        InputError, train, config, progress=Progress(), say="runs has a run folder; choose a folder elsewhere"
    )


def test_the_lock_is_given_back_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "a" / "run"):
        raise ZeroDivisionError
    with lock_folder(tmp_path / "a" / "run"):
        pass
    assert contents(tmp_path) == {}
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), lock_folder(tmp_path / "file"):
        pass


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
@pytest.mark.parametrize("name", [LOCK, HOLDER])
def test_a_link_in_the_place_of_a_lock_leads_nowhere(out: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (out / name).symlink_to(precious)
    assert go_on(out, epochs=2)["epochs"] == 2
    assert precious.read_text() == "mine"
    assert not [each for each in contents(out) if Path(each).name.startswith(".")]


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("torchcaps.training.folder.FileLock.acquire", acquire)
    with lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run"):
        pass


class After(Progress):
    """Does something after an epoch."""

    def __init__(self, epoch: int, what: Callable[[], object]) -> None:
        self.number, self.what = epoch, what

    def epoch(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == self.number:
            self.what()


@pytest.mark.parametrize(("kind", "epoch"), [("moved", 1), ("removed", 1), ("another", 1), ("moved", 3)])
def test_a_run_whose_folder_goes_ends_with_a_sentence(bars: Path, tmp_path: Path, kind: str, epoch: int) -> None:
    out, away = tmp_path / "run", tmp_path / "away"

    def goes() -> None:
        out.rename(away)
        if kind == "removed":
            shutil.rmtree(away)
        if kind == "another":
            out.mkdir()

    with pytest.raises(InputError, match=r"the run folder .*run was moved or removed while the run wrote to it"):
        run(tiny_config(bars), out, After(epoch, goes))
    assert not out.exists() or contents(out) == {}
    if kind == "moved":
        assert go_on(away)["epochs"] == 3


def test_runs_without_a_name_are_numbered(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/sabour2017-bars-2").symlink_to("nowhere")  # no free number
    for number in (1, 3):
        assert Path(run(tiny)["out"]) == Path(f"runs/sabour2017-bars-{number}")
    monkeypatch.chdir(Path("runs/sabour2017-bars-3"))
    Path("runs").symlink_to("nowhere")
    with pytest.raises(OSError, match="runs"):
        run(tiny)


def left_of(path: Path) -> Path:
    """What a process leaves that is killed while it writes a file."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(path.read_bytes() if path.exists() else b"")
    temporary.write_bytes(b"half")
    return temporary


@pytest.mark.slow
def test_a_resumed_run_removes_what_a_kill_left_and_nothing_else(out: Path) -> None:
    files = [*contents(out), "figures/samples.png"]
    assert {"config.json", "metrics.csv", "last.ckpt", "summary.json", "best/classes.json"} < set(files)
    for name in files:
        left_of(out / name)
    own = [out / ".config.json.swp", out / ".hidden", out / "best" / ".notes"]
    for path in own:
        path.touch()
    resume(out, overrides={"epochs": 2}, progress=Progress())
    assert set(out.rglob(".*")) == set(own)


def test_a_run_that_cannot_go_on_keeps_its_configuration(out: Path) -> None:
    (out / "summary.json").unlink()
    (out / "summary.json").mkdir()
    before = (out / "config.json").read_bytes()
    with pytest.raises(OSError, match="summary"):
        go_on(out, epochs=2)
    assert (out / "config.json").read_bytes() == before


def test_a_run_is_read_back(bars: Path, out: Path) -> None:
    best, last = load_run(out), load_run(out, which="last")
    assert same_weights(read_checkpoint(out / "last.ckpt")["model"], last.model.state_dict())
    assert not best.model.training
    assert best.class_names == ("0", "1", "2")
    assert best.images.calibration is not None
    assert best.dataset().in_shape == best.dataset(f"npz:{bars}").in_shape == best.model.in_shape
    assert_raises(InputError, best.dataset, "digits", say="digits has 10 classes, but the network has 3")
    for text in ('{"class_names": ["a"]}', '{"class_names": 3}', '{"preparation": 7}', '{"calibration": [1, 2]}'):
        (out / "best" / "classes.json").write_text(text)
        with pytest.raises(InputError, match=r"list of classes .*classes\.json is damaged or no list of classes"):
            load_run(out)
