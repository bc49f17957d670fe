"""A run that was stopped, in any way and at any step, goes on with the same bits; and not as another run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import registered_for_now
from tiny_runs import StopAt, go_on, judged, rows, run, same_weights, tiny_config
from torchcaps import analysis, files, register
from torchcaps.errors import InputError
from torchcaps.models import create_model, load_pretrained
from torchcaps.ranges import PositiveFactor
from torchcaps.training import Interrupted, Progress, TrainConfig, devices, load_run, resume, train
from torchcaps.training.config import read_config
from torchcaps.training.folder import read_checkpoint
from torchcaps.training.loop import Trainer
from torchcaps.training.run import start_from


class KilledError(Exception):
    pass


class KillAt(Progress):
    """Ends the run, as a kill does, after a step; before the first one at step 0."""

    def __init__(self, step: int) -> None:
        self.at = step

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        if done == self.at:
            raise KilledError

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        if step == self.at:
            raise KilledError


def is_same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, moments and metrics."""
    ends = [read_checkpoint(out / "last.ckpt") for out in (one, other)]
    states = [end["optimizer"]["state"] for end in ends]
    moments = [{f"{n} {key}": each for n in state for key, each in state[n].items()} for state in states]
    best = [load_file(out / "best" / "model.safetensors") for out in (one, other)]
    same = [same_weights(*pair) for pair in ([end["model"] for end in ends], moments, best)]
    return all(same) and rows(one) == rows(other)


@pytest.fixture(scope="module")
def finished(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(tiny_config(bars), out)
    return out


def test_another_seed_is_seen_as_a_difference(bars: Path, finished: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        run(tiny_config(bars, seed=seed), tmp_path / str(seed))
        assert is_same(tmp_path / str(seed), finished) is same


# ---- every kind of stop


@pytest.mark.parametrize("step", [1, 6, 8, 12, 17])
def test_a_signal_at_any_step(bars: Path, finished: Path, tmp_path: Path, step: int) -> None:
    number, code = (signal.SIGTERM, 143) if step == 8 else (signal.SIGINT, 130)
    with pytest.raises(Interrupted) as caught:
        run(tiny_config(bars), tmp_path / "run", StopAt(step, number))
    assert (caught.value.exit_code, caught.value.step) == (code, step)
    assert f"torchcaps train --resume {tmp_path / 'run'}" in str(caught.value)
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["progress"]["step"] == step
    go_on(tmp_path / "run")
    assert is_same(tmp_path / "run", finished)


@pytest.fixture
def own() -> Iterator[None]:
    """An optimizer of one's own, with an option and a state of its own."""
    with registered_for_now():

        @register("optimizer", "own")
        class Own(torch.optim.Adagrad):
            """Adagrad.

            Args:
                params: What is learned.
                learning_rate: Of the first step.
                slower: Decay of the learning rate.
            """

            def __init__(self, params: Any, learning_rate: float, *, slower: PositiveFactor = 0.1) -> None:
                super().__init__(params, lr=learning_rate, lr_decay=slower)
                self.slower = slower

        yield


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "way",
    [
        {"preset": "baseline-cnn", "channels": (4, 4), "hidden": (8,)},  # dropout
        {"precision": "bf16"},
        {"schedule": "one-cycle", "max_gradient_norm": 0.5, "class_weights": "balanced", "crop": 17, "flip": True},
        {"adam": "tensorflow", "adam_eps": 1e-4},
        {"optimizer": "adamw", "weight_decay": 0.05},
        {"optimizer": "sgd", "momentum": 0.8},
        {"optimizer": "own", "slower": 0.3},
    ],
    ids=str,
)
def test_with_all_that_a_recipe_asks_for(way: dict[str, Any], bars: Path, finished: Path, tmp_path: Path) -> None:
    config, whole, broken = tiny_config(bars, **way), tmp_path / "whole", tmp_path / "broken"
    run(config, whole)
    with pytest.raises(Interrupted):
        run(config, broken, StopAt(8))
    go_on(broken)
    assert is_same(broken, whole)
    assert rows(whole) != rows(finished)


def test_a_kill_after_a_checkpoint_that_time_called_for(bars: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run(tiny_config(bars, checkpoint_minutes=1e-9), tmp_path / "run", KillAt(10))  # overdue after each step
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["progress"]["step"] == 9
    go_on(tmp_path / "run")
    assert is_same(tmp_path / "run", finished)


SCRIPT = """
import sys, torch
from torchcaps.training import PlainProgress, loop, train, read_config
torch.set_num_threads(1)
loop.YOUNG = 0.0  # a checkpoint at the end of every epoch
train(read_config(sys.argv[2]), sys.argv[1], progress=PlainProgress(), figures=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill -9")
def test_kill_9_within_an_epoch(bars: Path, tmp_path: Path) -> None:
    config, script = tmp_path / "config.json", tmp_path / "script.py"
    config.write_text(json.dumps(tiny_config(bars, epochs=4, batch_size=2).to_dict()))
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "broken"), str(config)]
    broken = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert broken.stdout is not None
    for line in broken.stdout:
        if line.startswith("epoch 2/4"):
            time.sleep(0.1)  # into the third epoch
            broken.send_signal(signal.SIGKILL)
            break
    assert broken.wait() == -signal.SIGKILL
    assert read_checkpoint(tmp_path / "broken" / "last.ckpt")["progress"]["epoch"] == 2
    go_on(tmp_path / "broken")
    run(read_config(config), tmp_path / "whole")
    assert is_same(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.parametrize("part", ["validation", "test"])
def test_ctrl_c_while_images_are_judged(
    tiny: TrainConfig, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def stopped(own: Callable[..., Any]) -> Callable[..., Any]:
        def judge(*arguments: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return own(*arguments, **options)

        return judge

    owner, name = {"validation": (Trainer, "judge"), "test": (analysis, "evaluate")}[part]
    monkeypatch.setattr(owner, name, stopped(getattr(owner, name)))
    with pytest.raises(Interrupted, match="--resume") as caught:
        run(tiny, tmp_path / "run")
    assert caught.value.exit_code == 130
    monkeypatch.undo()
    assert go_on(tmp_path / "run")["epochs"] == 3
    assert is_same(tmp_path / "run", finished)


# ---- kills between two files

FIRST_EPOCH = 7
"""Files written in the first epoch: .lock.json, config.json, last.ckpt, three of best/, metrics.csv."""
ACCURACY = {1: {0: 0.5, 1: 0.7, 2: 0.6}, 2: {1: 0.3, 2: 0.4}}
"""Accuracy on the validation images in a first try and in the second one, by epoch: they are not computed alike."""


class Kills:
    """A run is killed before a file takes its place, and goes on with other results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
        self.attempt, self.written, self.kill_before = 1, 0, before
        self.weights: dict[float, dict[str, torch.Tensor]] = {}
        own = files.commit

        def commit(temporary: Path, path: Path) -> None:
            self.written += 1
            if self.written == self.kill_before:
                raise KilledError
            own(temporary, path)

        def judge(trainer: Trainer, _: object) -> dict[str, float]:
            accuracy = ACCURACY[self.attempt][trainer.state.epoch]
            self.weights[accuracy] = {name: each.clone() for name, each in trainer.network.state_dict().items()}
            return judged(1.0, accuracy)

        monkeypatch.setattr(files, "commit", commit)
        monkeypatch.setattr(Trainer, "judge", judge)


@pytest.mark.parametrize("written", range(1, 6))  # last.ckpt, the files of best/, metrics.csv
def test_best_holds_the_weights_of_the_epoch_that_the_metrics_call_best(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    kills, out = Kills(monkeypatch, FIRST_EPOCH + written), tmp_path / "run"
    with pytest.raises(KilledError):
        run(tiny_config(bars), out)
    kills.attempt = 2
    summary = go_on(out)
    found = {int(row["epoch"]): float(row["validation_accuracy"]) for row in rows(out)}
    # killed before the checkpoint, the second epoch is done again and is worse; killed after it, it counts
    assert found == ({1: 0.5, 2: 0.3, 3: 0.4} if written == 1 else {1: 0.5, 2: 0.7, 3: 0.4})
    assert summary["best_epoch"] == (1 if written == 1 else 2)
    assert same_weights(load_file(out / "best" / "model.safetensors"), kills.weights[max(found.values())])


@pytest.mark.parametrize("written", range(2, FIRST_EPOCH))
def test_a_run_whose_first_network_is_not_written_yet_has_no_checkpoint(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    Kills(monkeypatch, written + 1)
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        run(tiny_config(bars, epochs=1), out)
    if written == FIRST_EPOCH - 1:  # only metrics.csv is missing
        assert load_run(out).model.num_classes == 3
    else:
        for which in ("best", "last"):
            with pytest.raises(InputError, match="has no checkpoint of a finished epoch yet, so there is no network"):
                load_run(out, which)
    assert go_on(out)["epochs"] == len(rows(out)) == 1


# ---- more, and not another run


def test_more_epochs_or_a_higher_accuracy_can_be_asked_for(bars: Path, finished: Path, tmp_path: Path) -> None:
    assert run(tiny_config(bars, epochs=1), tmp_path / "short")["epochs"] == 1
    assert load_run(tmp_path / "short").summary is not None
    with pytest.raises(Interrupted):
        go_on(tmp_path / "short", StopAt(8), epochs=3)
    assert load_run(tmp_path / "short").summary is None, "that of the shorter run"
    assert go_on(tmp_path / "short")["epochs"] == 3
    assert run(tiny_config(bars, stop_at=0.0), tmp_path / "good")["epochs"] == 1
    assert go_on(tmp_path / "good")["epochs"] == 1, "it stays at its end"
    assert go_on(tmp_path / "good", stop_at=None)["epochs"] == 3
    for out in ("short", "good"):
        assert is_same(tmp_path / out, finished)


def test_an_accuracy_that_is_lowered_ends_a_run_between_epochs(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tiny_config(bars), tmp_path / "run", StopAt(8))  # in the second epoch
    assert go_on(tmp_path / "run", stop_at=0.0)["epochs"] == 2
    with pytest.raises(InputError, match="finished 2 epochs and 0 steps already; it cannot go on to"):
        go_on(tmp_path / "run", epochs=1)


def test_it_does_not_go_on_as_another_run(finished: Path, bars: Path, tmp_path: Path) -> None:
    for change, words in (
        ({"preset": "tf-notebook"}, "trains sabour2017, not tf-notebook"),
        ({"overrides": {"seed": 1}}, "has seed = 0; it cannot go on with 1"),
        ({"overrides": {"num_iterations": 1}}, "has num_iterations = 3"),
        ({"overrides": {"precision": "bf16"}}, "has precision = '32'"),
        ({"overrides": {"no_such": 8}}, 'no field of sabour2017 "no_such"'),
    ):
        with pytest.raises(InputError, match=words):
            resume(finished, progress=Progress(), figures=False, **change)  # type: ignore[arg-type]
    run(tiny_config(bars, epochs=1, schedule="one-cycle"), tmp_path / "run")
    with pytest.raises(InputError, match="ends with epoch 1; it cannot go on to epoch 2"):
        go_on(tmp_path / "run", epochs=2)
    with pytest.raises(InputError, match="there is no run to resume"):
        go_on(tmp_path)


def test_it_does_not_go_on_with_other_images(bars: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(bars, tmp_path / "bars.npz"))
    run(tiny_config(copy, epochs=1), tmp_path / "run")
    with np.load(copy) as arrays:
        x, y = arrays["x"].copy(), arrays["y"]
    x[0, 0, 0] ^= 1
    np.savez(copy, x=x, y=y)
    with pytest.raises(InputError, match="the images are not those that the run in"):
        go_on(tmp_path / "run", epochs=3)


@pytest.mark.parametrize("change", [{"model": {"conv.weight": 1}}, {"optimizer": {}}, {"progress": {"unknown": 1}}])
def test_what_is_no_checkpoint_of_this_run_is_one_sentence(
    finished: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    path, words = out / "last.ckpt", r"checkpoint( of this run)? .*last.ckpt is damaged or no checkpoint"
    torch.save(read_checkpoint(path) | change, path)
    with pytest.raises(InputError, match=words):
        go_on(out, epochs=4)
    damaged = bytearray((finished / "last.ckpt").read_bytes())
    damaged[len(damaged) // 2] ^= 16
    for contents in (bytes(damaged), path.read_bytes()[:-100]):
        path.write_bytes(contents)
        with pytest.raises(InputError, match=words):
            read_checkpoint(path)


def test_the_summary_keeps_commands_and_commits(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, commits = tmp_path / "run", iter(["abc", "def"])
    monkeypatch.setattr(devices, "source_commit", lambda: next(commits))
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False, command="first")
    more = {"epochs": 2}
    summary = resume(out, overrides=more, progress=Progress(), figures=False, command="second")
    assert (summary["command"], summary["resumed_with"]) == ("first", ["second"])
    assert (summary["commit"], summary["earlier_commits"]) == ("def", ["abc"])


# ---- runs that start from the weights of another


@pytest.fixture(scope="module")
def trained(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best epoch is not its last one."""
    out = tmp_path_factory.mktemp("init") / "trained"
    run(tiny_config(bars, epochs=8, learning_rate=5e-3), out)
    return out


@pytest.mark.parametrize("step", [0, 1, 8])
def test_a_run_from_other_weights_goes_on_without_them(bars: Path, trained: Path, tmp_path: Path, step: int) -> None:
    source = shutil.copytree(trained, tmp_path / "source")
    config, whole, broken = tiny_config(bars, init_from=str(source)), tmp_path / "whole", tmp_path / "broken"
    run(config, whole)
    with pytest.raises(KilledError):
        run(config, broken, KillAt(step))
    if step == 0:
        start = read_checkpoint(broken / "last.ckpt")
        assert same_weights(start["model"], load_file(trained / "best" / "model.safetensors"))
        assert start["optimizer"]["state"] == {}
    shutil.rmtree(source)
    go_on(broken)
    assert is_same(broken, whole)
    run(tiny_config(bars), tmp_path / "other")
    assert float(rows(whole)[0]["train_loss"]) < float(rows(tmp_path / "other")[0]["train_loss"]) / 2


def test_saved_and_shipped_networks_can_be_started_from(trained: Path, tmp_path: Path) -> None:
    saved = load_run(trained).model
    saved.save_pretrained(tmp_path / "saved")
    network = create_model(
        "sabour2017", saved.in_shape, 3, conv_channels=8, primary_types=2, capsule_dim=4, decoder_hidden=(16,)
    )
    start_from(network, str(tmp_path / "saved"))
    assert same_weights(network.state_dict(), saved.state_dict())
    network = create_model("compact")
    start_from(network, "compact")
    assert same_weights(network.state_dict(), load_pretrained("compact").state_dict())


def test_weights_that_do_not_fit_are_one_sentence(bars: Path, trained: Path, tmp_path: Path) -> None:
    out, changes = tmp_path / "run", [{"capsule_dim": 8}, {"decoder": False}, {"init_from": "cmpact"}]
    words = [
        "a run of that network, sabour2017, begins with --config",
        "do not fit the network: decoder.",
        "no run folder",
    ]
    for change, said in zip(changes, words, strict=True):
        with pytest.raises(InputError, match=said) as caught:
            run(tiny_config(bars, **{"init_from": str(trained)} | change), out)
        assert "\n" not in str(caught.value)
        assert not out.exists()
