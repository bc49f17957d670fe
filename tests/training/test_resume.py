"""A run that was stopped, in any way and at any step, goes on with the same bits; and not as another run."""

import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import assert_raises, registered_for_now, small
from tiny_runs import StopAt, go_on, is_same, judged, rows, run, same_weights, tiny_config
from torchcaps import analysis, files, register
from torchcaps.errors import InputError
from torchcaps.models import create_model, load_pretrained
from torchcaps.ranges import PositiveFactor
from torchcaps.training import Interrupted, Progress, TrainConfig, devices, load_run, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.folder import ADDED_SETTINGS
from torchcaps.training.load import load_initial_weights
from torchcaps.training.loop import Trainer


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


@pytest.fixture(scope="module")
def finished(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(tiny_config(bars), out)
    return out


@pytest.mark.parametrize("step", [1, 6, 8, 17])
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
            def __init__(self, params: Any, learning_rate: float, *, slower: PositiveFactor = 0.1) -> None:
                super().__init__(params, lr=learning_rate, lr_decay=slower)
                self.slower = slower

        yield


@pytest.mark.slow
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "way",
    [
        {"preset": "baseline-cnn", "channels": (4, 4), "hidden": (8,), "precision": "bf16"},  # with dropout
        {"schedule": "one-cycle", "max_gradient_norm": 0.5, "class_weights": "balanced", "crop": 17, "flip": True},
        {"adam": "tensorflow", "adam_eps": 1e-4},
        {"optimizer": "sgd", "momentum": 0.8},
        {"optimizer": "own", "slower": 0.3},
        {"average_weights": 0.9, "precise_norm": True},
        {"preset": "hvc2021-learned", "published_augmentation": "hvc2021", "max_shift": 0, "average_weights": 0.9},
    ],
    ids=str,
)
def test_with_all_that_a_recipe_asks_for(way: dict[str, Any], bars: Path, finished: Path, tmp_path: Path) -> None:
    preset = way.get("preset", "sabour2017")
    sizes = small(preset) if preset.startswith("hvc2021") else {}
    config, whole, broken = tiny_config(bars, **sizes, **way), tmp_path / "whole", tmp_path / "broken"
    run(config, whole)
    with pytest.raises(Interrupted):
        run(config, broken, StopAt(8))
    go_on(broken)
    assert is_same(broken, whole)
    assert not is_same(whole, finished)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_ctrl_c_while_judging(
    tiny: TrainConfig, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def stopped(own: Callable[..., Any]) -> Callable[..., Any]:
        def judge(*arguments: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return own(*arguments, **options)

        return judge

    owner, name = {"validation": (Trainer, "validate"), "test": (analysis, "evaluate")}[part]
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
        monkeypatch.setattr(Trainer, "validate", judge)


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
            with pytest.raises(InputError, match="has no network yet, because no epoch is finished"):
                load_run(out, which)
    assert go_on(out)["epochs"] == len(rows(out)) == 1


def test_more_epochs_or_another_accuracy_can_be_asked_for(bars: Path, finished: Path, tmp_path: Path) -> None:
    assert run(tiny_config(bars, epochs=1), tmp_path / "short")["epochs"] == 1
    with pytest.raises(Interrupted):
        go_on(tmp_path / "short", StopAt(8), epochs=3)
    assert load_run(tmp_path / "short").summary is None, "that of the shorter run"
    lowered = shutil.copytree(tmp_path / "short", tmp_path / "lowered")
    assert go_on(lowered, stop_at=0.0)["epochs"] == 2, "it ends between epochs"
    assert_raises(
        InputError, go_on, lowered, say="finished 2 epochs and 0 steps already; it cannot end with epoch 1", epochs=1
    )
    assert go_on(tmp_path / "short")["epochs"] == 3
    assert run(tiny_config(bars, stop_at=0.0), tmp_path / "good")["epochs"] == 1
    assert go_on(tmp_path / "good")["epochs"] == 1, "it stays at its end"
    assert go_on(tmp_path / "good", stop_at=None)["epochs"] == 3
    for out in ("short", "good"):
        assert is_same(tmp_path / out, finished)


def test_it_does_not_go_on_as_another_run(finished: Path, bars: Path, tmp_path: Path) -> None:
    overrides: dict[str, Any]
    for overrides, words in (
        ({"seed": 1}, "has seed = 0; it cannot resume with 1"),
        ({"precision": "bf16"}, "has precision = '32'"),
    ):
        assert_raises(InputError, go_on, finished, **overrides, say=words)
    run(tiny_config(bars, epochs=1, schedule="one-cycle"), tmp_path / "run")
    assert_raises(InputError, go_on, tmp_path / "run", say="ends with epoch 1; it cannot be extended", epochs=2)
    say = f"start a new run from its weights with --init-from {tmp_path / 'run'}"
    assert_raises(InputError, go_on, tmp_path / "run", say=say, epochs=2)
    assert_raises(InputError, go_on, tmp_path, say="there is no run to resume")


def test_it_does_not_go_on_with_other_images(bars: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(bars, tmp_path / "bars.npz"))
    run(tiny_config(copy, epochs=1), tmp_path / "run")
    with np.load(copy) as arrays:
        x, y = arrays["x"].copy(), arrays["y"]
    x[0, 0, 0] ^= 1
    np.savez(copy, x=x, y=y)
    assert_raises(
        InputError, go_on, tmp_path / "run", say="was trained on other images; resume it with the same images", epochs=3
    )


def test_what_is_no_checkpoint_of_this_run_is_one_sentence(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    path, words = out / "last.ckpt", "last.ckpt is damaged or no checkpoint"
    whole = path.read_bytes()
    for change in ({"model": {"conv.weight": 1}}, {"optimizer": {}}, {"progress": {"unknown": 1}}):
        torch.save(read_checkpoint(finished / "last.ckpt") | change, path)
        assert_raises(InputError, go_on, out, say=words, epochs=4)
    middle = len(whole) // 2
    for contents in (whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :], whole[:-100]):
        path.write_bytes(contents)
        assert_raises(InputError, read_checkpoint, path, say=words)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda each: each.to("meta"),
    "nested": lambda each: torch.nested.nested_tensor([each.reshape(-1)], layout=torch.jagged),
    "sparse_coo float32": lambda each: each.to_sparse(),
    "sparse_csr float32": lambda each: torch.ones(2, 2).to_sparse_csr(),
    "strided complex64": lambda each: each.to(torch.complex64),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", ["model", "optimizer", "progress"])
def test_a_tensor_of_another_form_is_one_sentence(finished: Path, tmp_path: Path, part: str, form: str) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    checkpoint = read_checkpoint(out / "last.ckpt")
    held = {"optimizer": lambda: checkpoint["optimizer"]["state"][0], "progress": lambda: checkpoint["progress"]}
    tensors = held.get(part, lambda: checkpoint["model"])()
    name = next(iter(tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors[name] = FORMS[form](torch.as_tensor(tensors[name]).float())
    torch.save(checkpoint, out / "last.ckpt")
    words = f"{name} is a {form} tensor, but must be a dense one of real numbers"
    assert_raises(InputError, go_on, out, say=words, epochs=4)
    assert_raises(InputError, load_run, out, "last", say=words)


def test_the_summary_keeps_commands_and_commits(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, commits, how = tmp_path / "run", iter(["abc", "def"]), {"progress": Progress(), "figures": False}
    monkeypatch.setattr(devices, "source_commit", lambda: next(commits))
    train(tiny_config(bars, epochs=1), out, command="first", **how)
    summary = resume(out, overrides={"epochs": 2}, command="second", **how)
    assert (summary["command"], summary["resumed_with"]) == ("first", ["second"])
    assert (summary["commit"], summary["earlier_commits"]) == ("def", ["abc"])


@pytest.fixture(scope="module")
def trained(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best epoch is not its last one."""
    out = tmp_path_factory.mktemp("init") / "trained"
    run(tiny_config(bars, epochs=8, learning_rate=5e-3), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 8])
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


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_checkpoint_of_another_format_is_refused(version: int | None, trained: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "other")
    checkpoint = read_checkpoint(trained / "last.ckpt")
    del checkpoint["format"]
    torch.save(checkpoint | ({} if version is None else {"format": version}), run_folder / "last.ckpt")
    with pytest.raises(InputError, match=f"has format {version or 1}, but this version of torchcaps reads format 2"):
        load_run(run_folder, "last")


def test_saved_and_shipped_networks_can_be_started_from(tmp_path: Path) -> None:
    load_pretrained("compact").save_pretrained(tmp_path / "saved")
    for source in ("compact", str(tmp_path / "saved")):
        network = create_model("compact")
        load_initial_weights(network, source)
        assert same_weights(network.state_dict(), load_pretrained("compact").state_dict())


def test_weights_that_do_not_fit_are_one_sentence(bars: Path, trained: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"capsule_dim": 8}, "to train the same network, sabour2017, use --config"),
        ({"decoder": False}, "do not fit the network: decoder."),
        ({"init_from": "cmpact"}, "no run folder"),
    ):
        with pytest.raises(InputError, match=rf"\A.*{said}.*\Z"):
            run(tiny_config(bars, **{"init_from": str(trained)} | change), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_run_from_before_a_setting_existed_goes_on(bars: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tiny_config(bars), tmp_path / "run", StopAt(8))
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    for name in ADDED_SETTINGS:
        del checkpoint["settings"][name]
    torch.save(checkpoint, tmp_path / "run" / "last.ckpt")
    go_on(tmp_path / "run")
    assert is_same(tmp_path / "run", finished)


def test_an_average_without_its_trained_weights_is_refused(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tiny_config(bars, average_weights=0.9), tmp_path / "run", StopAt(8))
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    for change in (lambda: checkpoint["trained"][0].fill_(torch.nan), lambda: checkpoint.pop("trained")):
        change()
        torch.save(checkpoint, tmp_path / "run" / "last.ckpt")
        assert_raises(InputError, go_on, tmp_path / "run", say="its trained weights")
