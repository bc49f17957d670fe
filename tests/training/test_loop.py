import csv
import errno
import io
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import small
from tiny_runs import StopAt, tiny_config
from torchcaps.analysis import evaluate
from torchcaps.datasets import BatchLoader, load_dataset
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Losses, get_preset, list_presets
from torchcaps.nn import Capsules
from torchcaps.training import (
    Diverged,
    Interrupted,
    Progress,
    TrainConfig,
    devices,
    load_run,
    loop,
    make_config,
    resume,
    train,
)
from torchcaps.training.checkpoint import ProgressState, read_checkpoint
from torchcaps.training.loop import Trainer

SCRIPT = """
import sys, torch
from torchcaps.training import PlainProgress, loop, resume, train, read_config
torch.set_num_threads(1)
loop.YOUNG = 0.0  # a checkpoint at the end of every epoch
what, out, config = sys.argv[1:4]
if what == "resume":
    resume(out, progress=PlainProgress(), figures=False)
else:
    train(read_config(config), out, progress=PlainProgress(), figures=False)
"""


def weights(out: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(out / "last.ckpt")["model"]


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_assert_same_weights_sees_a_difference() -> None:
    with pytest.raises(AssertionError):
        assert_same_weights({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 1e-9])})


@pytest.fixture(scope="module")
def finished(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_config(bars), out, progress=Progress(), figures=False)
    return out


def test_the_run_folder_is_complete(finished: Path) -> None:
    rows = list(csv.DictReader((finished / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["epochs"] == 3
    assert summary["images"] == {"train": 108, "validation": 12, "test": 30}
    assert summary["test"]["last"]["images"] == 30
    assert summary["versions"]["torch"] == torch.__version__
    assert not list(finished.rglob(".*")), "temporary files were left"


def test_it_learns(bars: Path, tmp_path: Path) -> None:
    summary = train(
        tiny_config(bars, epochs=12, learning_rate=5e-3), tmp_path / "run", progress=Progress(), figures=False
    )
    assert summary["test"]["last"]["accuracy"] > 0.9


def test_the_best_epoch_is_chosen_by_validation_and_never_by_test(finished: Path) -> None:
    rows = list(csv.DictReader((finished / "metrics.csv").open()))
    summary = json.loads((finished / "summary.json").read_text())
    key = max(rows, key=lambda row: (float(row["validation_accuracy"]), -float(row["validation_loss"])))
    assert summary["best_epoch"] == int(key["epoch"])
    assert not [name for name in rows[0] if "test" in name]


def test_the_test_images_are_looked_at_only_at_the_end(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[int, str]] = []
    own = Trainer.judge

    def spy(trainer: Trainer, network: object, batches: BatchLoader) -> object:
        part = {30: "test", 12: "validation"}[batches.num_images]
        looked.append((trainer.state.epoch, part))
        return own(trainer, network, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "judge", spy)
    train(tiny, tmp_path / "run", progress=Progress(), figures=False)
    summary = load_run(tmp_path / "run").summary
    assert summary is not None
    networks = 1 if summary["best_epoch"] == 3 else 2  # the best epoch's and the last one's
    again = [(3, "validation")] * (summary["warning"] is not None)  # what a network that learned nothing says of them
    assert looked == [(0, "validation"), (1, "validation"), (2, "validation"), *[(3, "test")] * networks, *again]


def test_selection_by_loss_and_by_accuracy_differ() -> None:
    history = [
        {"epoch": 1, "validation_accuracy": 0.9, "validation_loss": 0.1},
        {"epoch": 2, "validation_accuracy": 0.95, "validation_loss": 0.3},
        {"epoch": 3, "validation_accuracy": 0.95, "validation_loss": 0.2},
        {"epoch": 4, "validation_accuracy": 0.95, "validation_loss": 0.2},
    ]
    state = ProgressState(history=history)
    assert state.best("loss")["epoch"] == 1
    assert state.best("accuracy")["epoch"] == 3  # the loss breaks the tie, the earlier epoch the next one


def test_a_seed_gives_its_own_weights_and_only_those(bars: Path, finished: Path, tmp_path: Path) -> None:
    train(tiny_config(bars), tmp_path / "again", progress=Progress(), figures=False)
    assert_same_weights(weights(tmp_path / "again"), weights(finished))
    train(tiny_config(bars, seed=1), tmp_path / "other", progress=Progress(), figures=False)
    with pytest.raises(AssertionError):
        assert_same_weights(weights(tmp_path / "other"), weights(finished))


@pytest.mark.parametrize(
    ("preset", "step"),
    [("sabour2017", step) for step in (1, 6, 8, 12, 17)] + [("baseline-cnn", step) for step in (8, 12)],  # dropout
)
def test_a_run_stopped_at_any_step_goes_on_exactly(bars: Path, tmp_path: Path, step: int, preset: str) -> None:
    small = {"channels": (4, 4), "hidden": (8,)} if preset == "baseline-cnn" else {}
    config = tiny_config(bars, preset, **small)
    train(config, tmp_path / "whole", progress=Progress(), figures=False)
    with pytest.raises(Interrupted) as caught:
        train(config, tmp_path / "broken", progress=StopAt(step), figures=False)
    assert caught.value.exit_code == 130
    assert caught.value.step == step
    assert f"torchcaps train --resume {tmp_path / 'broken'}" in str(caught.value)
    resume(tmp_path / "broken", progress=Progress(), figures=False)
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    whole, broken = (list(csv.DictReader((tmp_path / name / "metrics.csv").open())) for name in ("whole", "broken"))
    for row in whole + broken:
        row.pop("seconds"), row.pop("images_per_second")
    assert whole == broken


def test_sigterm_stops_like_ctrl_c(tiny: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        train(tiny, tmp_path / "run", progress=StopAt(3, signal.SIGTERM), figures=False)
    assert caught.value.exit_code == 143
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["progress"]["step"] == 3


def test_more_epochs_can_be_added(bars: Path, finished: Path, tmp_path: Path) -> None:
    train(tiny_config(bars, epochs=1), tmp_path / "run", progress=Progress(), figures=False)
    summary = resume(tmp_path / "run", overrides={"epochs": 3}, progress=Progress(), figures=False)
    assert summary["epochs"] == 3
    assert_same_weights(weights(tmp_path / "run"), weights(finished))


def test_training_ends_with_the_first_epoch_that_reaches_an_accuracy(bars: Path, tmp_path: Path) -> None:
    whole = train(tiny_config(bars, learning_rate=5e-3), tmp_path / "whole", progress=Progress(), figures=False)
    accuracies = [float(row["validation_accuracy"]) for row in csv.DictReader((tmp_path / "whole/metrics.csv").open())]
    assert accuracies[0] < accuracies[1], "else this test says nothing"
    assert whole["epochs"] == 3
    config = tiny_config(bars, learning_rate=5e-3, stop_at=accuracies[1])
    assert train(config, tmp_path / "run", progress=Progress(), figures=False)["epochs"] == 2
    assert resume(tmp_path / "run", progress=Progress(), figures=False)["epochs"] == 2, "it stays at its end"


def test_a_run_that_ended_at_an_accuracy_goes_on_to_a_higher_one(bars: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(tiny_config(bars, stop_at=0.0), out, progress=Progress(), figures=False)["epochs"] == 1
    assert resume(out, overrides={"stop_at": None}, progress=Progress(), figures=False)["epochs"] == 3
    assert_same_weights(weights(out), weights(finished))


def test_an_accuracy_that_is_lowered_ends_a_run_between_epochs(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny_config(bars), tmp_path / "run", progress=StopAt(8), figures=False)  # in the second epoch
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["progress"]["epoch"] == 1
    assert resume(tmp_path / "run", overrides={"stop_at": 0.0}, progress=Progress(), figures=False)["epochs"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill -9")
def test_kill_9_in_the_third_epoch_and_resume_gives_the_same_weights(bars: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config(bars, epochs=4, batch_size=2).to_dict()))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(what: str, out: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), what, str(tmp_path / out), str(config)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    broken = start("train", "broken")
    assert broken.stdout is not None
    for line in broken.stdout:
        if line.startswith("epoch 2/4"):
            time.sleep(0.1)  # into the third epoch
            broken.send_signal(signal.SIGKILL)
            break
    assert broken.wait() == -signal.SIGKILL
    stopped_at = read_checkpoint(tmp_path / "broken" / "last.ckpt")["progress"]
    assert stopped_at["epoch"] == 2
    assert start("resume", "broken").wait() == 0
    assert start("train", "whole").wait() == 0
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    best = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("broken", "whole")]
    assert_same_weights(*best)


def test_a_kill_while_the_checkpoint_is_written_leaves_the_one_before(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    saved = Trainer.save_checkpoint

    def killed(trainer: Trainer) -> None:
        if trainer.state.epoch < 2:
            saved(trainer)
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, out, progress=Progress(), figures=False)
    monkeypatch.undo()
    assert read_checkpoint(out / "last.ckpt")["progress"]["epoch"] == 1
    assert resume(out, progress=Progress(), figures=False)["epochs"] == 3


def test_a_full_disk_is_an_os_error_that_names_the_file(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path.open

    class Full(io.FileIO):
        """A file on a disk with room for 100 bytes."""

        def write(self, some: Any) -> int:
            if self.tell() + len(some) > 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(some)

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        return Full(path, mode) if "last.ckpt" in path.name and mode == "wb" else own(path, mode, **options)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match="the checkpoint could not be written: No space left") as caught:
        train(tiny, tmp_path / "run", progress=Progress(), figures=False)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "run" / "last.ckpt"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json"}


def test_nothing_goes_through_the_systems_temporary_folder(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError):
        tempfile.mkstemp()
    assert train(tiny, tmp_path / "run", progress=Progress(), figures=False)["epochs"] == 3
    assert resume(tmp_path / "run", overrides={"epochs": 4}, progress=Progress(), figures=False)["epochs"] == 4


def test_a_loss_that_is_not_finite_stops_the_run(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CapsNet.loss

    def ruined(network: CapsNet, *args: object) -> Losses:
        losses = own(network, *args)  # type: ignore[arg-type]
        calls.append(1)
        return losses._replace(total=losses.total * float("nan")) if network.training and len(calls) == 10 else losses

    calls: list[int] = []
    monkeypatch.setattr(CapsNet, "loss", ruined)
    with pytest.raises(Diverged) as caught:
        train(tiny, tmp_path / "run", progress=Progress(), figures=False)
    words = str(caught.value)
    # six steps and one batch of validation, then the third of the second epoch
    assert "the loss became NaN or infinite by step 9 (epoch 2, batch 3 of 6)" in words
    assert "--learning-rate" in words
    assert "keeps the last good checkpoint" in words
    assert "\n" not in words
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    assert checkpoint["progress"]["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


@pytest.mark.parametrize("batch_size", [108, 36])
def test_an_update_that_ruins_the_weights_is_not_kept(bars: Path, tmp_path: Path, batch_size: int) -> None:
    config = tiny_config(bars, learning_rate=1e38, batch_size=batch_size, epochs=1)
    with pytest.raises(Diverged) as caught:
        train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert "became NaN or infinite" in str(caught.value)
    assert "there was no checkpoint yet" in str(caught.value)
    assert not (tmp_path / "run" / "last.ckpt").exists()
    assert not (tmp_path / "run" / "best").exists()


def test_the_advice_names_only_options_that_the_network_has(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, "baseline-cnn", channels=(4,), hidden=(8,), learning_rate=1e38)
    with pytest.raises(Diverged) as caught:
        train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert "--weight-std" not in str(caught.value)


@pytest.mark.parametrize("preset", [name for name in list_presets() if get_preset(name).network["objects"] == 1])
def test_every_preset_trains_on_a_small_data_set_by_its_own_recipe(preset: str, tmp_path: Path) -> None:
    recipe = make_config(preset).recipe
    size = None if recipe.crop is None else recipe.crop + 4
    limits = {
        "limit_train": recipe.limit_train or 2 * recipe.batch_size,
        "limit_test": recipe.limit_test or 60,
        "validation_size": recipe.validation_size or 60,
    }
    config = make_config(preset, data="digits", epochs=1, image_size=size, **limits, **small(preset))
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert summary["images"]["train"] == limits["limit_train"]
    assert summary["images"]["test"] == min(limits["limit_test"], 360)  # fewer than keras-tutorial's 1,000
    side = recipe.crop or 28
    assert summary["in_shape"] == [1, side, side]


@pytest.mark.parametrize("preset", [name for name in list_presets() if get_preset(name).network["objects"] == 2])
@pytest.mark.usefixtures("two_bars")
def test_presets_for_two_objects_train_on_pairs(preset: str, tmp_path: Path) -> None:
    narrow = small(preset) | ({} if "cnn" in preset else {"capsule_dim": 4})
    out = tmp_path / "run"
    summary = train(make_config(preset, epochs=2, batch_size=16, **narrow), out, progress=Progress(), figures=False)
    assert (summary["objects"], summary["in_shape"]) == (2, [1, 22, 22])
    rows = list(csv.DictReader((out / "metrics.csv").open()))
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    assert summary["test"]["best"]["images"] == 30
    assert load_run(out).dataset().num_objects == 2


@pytest.mark.usefixtures("two_bars")
def test_an_image_of_two_counts_only_if_both_are_right(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, max_shift=0, objects=2, epochs=12, learning_rate=5e-3)
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    row = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))[-1]
    # of three classes chance finds both in a third
    assert float(row["train_accuracy"]) > 0.6
    assert summary["test"]["last"]["accuracy"] > 0.5


def test_capsule_weights_keep_their_order_in_half_precision(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    own = Trainer.fit

    def spy(trainer: Trainer) -> None:
        seen.append(trainer.network)
        own(trainer)

    monkeypatch.setattr(Trainer, "fit", spy)
    train(tiny_config(bars, precision="bf16", epochs=1), tmp_path / "run", progress=Progress(), figures=False)
    (network,) = seen
    assert network.class_capsules.transform.weight.permute(1, 2, 3, 0).is_contiguous()
    assert network.primary_capsules.convs[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_half_precision_run_goes_on_exactly(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, precision="bf16")
    train(config, tmp_path / "whole", progress=Progress(), figures=False)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "broken", progress=StopAt(8), figures=False)
    resume(tmp_path / "broken", progress=Progress(), figures=False)
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


def test_a_run_goes_on_exactly_from_a_checkpoint_that_time_called_for(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    class KillAt(Progress):
        def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
            if step == 10:
                raise KilledError

    config = tiny_config(bars, checkpoint_minutes=1e-9)  # overdue after each step
    with pytest.raises(KilledError):
        train(config, tmp_path / "broken", progress=KillAt(), figures=False)
    assert read_checkpoint(tmp_path / "broken" / "last.ckpt")["progress"]["step"] == 9
    resume(tmp_path / "broken", progress=Progress(), figures=False)
    train(tiny_config(bars), tmp_path / "whole", progress=Progress(), figures=False)
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


def test_short_epochs_write_a_checkpoint_when_they_are_the_best_or_the_last(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    own = Trainer.save_checkpoint

    def spy(trainer: Trainer) -> None:
        saved.append(trainer.state.epoch)
        own(trainer)

    monkeypatch.setattr(Trainer, "save_checkpoint", spy)
    for young, every in ((1e9, False), (0.0, True)):
        saved.clear()
        monkeypatch.setattr(loop, "YOUNG", young)
        out = tmp_path / str(young)
        train(tiny_config(bars, epochs=6, learning_rate=1e-5), out, progress=Progress(), figures=False)
        rows = list(csv.DictReader((out / "metrics.csv").open()))
        keys = [(float(row["validation_accuracy"]), -float(row["validation_loss"])) for row in rows]
        best = [n for n in range(1, 7) if n == 1 or keys[n - 1] > max(keys[: n - 1])]
        assert saved == (list(range(1, 7)) if every else sorted({*best, 6}))


def test_a_device_that_works_by_itself_is_looked_at_once_in_a_while(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    own = Trainer.fit

    class Steps(Progress):
        def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
            looked.append(step)

    def fit(trainer: Trainer) -> None:
        trainer.look_every = 4
        own(trainer)

    monkeypatch.setattr(Trainer, "fit", fit)
    train(tiny_config(bars), tmp_path / "seldom", progress=Steps(), figures=False)
    assert looked == [4, 8, 12, 16]
    monkeypatch.undo()
    train(tiny_config(bars), tmp_path / "often", progress=Progress(), figures=False)
    assert_same_weights(weights(tmp_path / "seldom"), weights(tmp_path / "often"))
    seldom, often = (list(csv.DictReader((tmp_path / name / "metrics.csv").open())) for name in ("seldom", "often"))
    assert [row["train_loss"] for row in seldom] == [row["train_loss"] for row in often]


@pytest.mark.parametrize("part", ["validation", "test"])
def test_ctrl_c_while_images_are_judged(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    own = Trainer.judge

    def stopped(trainer: Trainer, network: object, batches: BatchLoader) -> object:
        if batches.num_images == {"validation": 12, "test": 30}[part] and trainer.state.epoch >= 2:
            signal.raise_signal(signal.SIGINT)
        return own(trainer, network, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "judge", stopped)
    with pytest.raises(Interrupted) as caught:
        train(tiny, tmp_path / "run", progress=Progress(), figures=False)
    assert caught.value.exit_code == 130
    assert "--resume" in str(caught.value)
    monkeypatch.undo()
    assert resume(tmp_path / "run", progress=Progress(), figures=False)["epochs"] == 3


def test_a_run_does_not_go_on_with_other_data_or_fewer_epochs(bars: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bars.npz"
    copy.write_bytes(bars.read_bytes())
    train(tiny_config(copy, epochs=2), tmp_path / "run", progress=Progress(), figures=False)
    with pytest.raises(InputError, match="the run has finished 2 epochs already; it cannot go on to 1"):
        resume(tmp_path / "run", overrides={"epochs": 1}, progress=Progress(), figures=False)
    with np.load(copy) as arrays:
        x, y = arrays["x"].copy(), arrays["y"]
    x[0, 0, 0] ^= 1
    np.savez(copy, x=x, y=y)
    with pytest.raises(InputError, match="the images are not those that the run in"):
        resume(tmp_path / "run", overrides={"epochs": 3}, progress=Progress(), figures=False)


def test_a_run_within_an_epoch_does_not_go_back_to_its_beginning(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny_config(bars), tmp_path / "run", progress=StopAt(8), figures=False)
    with pytest.raises(InputError, match="the run is within epoch 2 already; it cannot go back to the end of epoch 1"):
        resume(tmp_path / "run", overrides={"epochs": 1}, progress=Progress(), figures=False)


def test_a_run_that_goes_on_has_no_summary_of_the_shorter_one(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    assert load_run(out).summary is not None
    with pytest.raises(Interrupted):
        resume(out, overrides={"epochs": 3}, progress=StopAt(8), figures=False)
    assert load_run(out).summary is None
    resume(out, progress=Progress(), figures=False)
    summary = load_run(out).summary
    assert summary is not None
    assert summary["epochs"] == 3
    resume(out, progress=Progress(), figures=False)  # nothing is left to do, and nothing gets lost
    assert load_run(out).summary is not None


def test_the_summary_keeps_the_command_that_started_the_run(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False, command="first")
    summary = resume(out, overrides={"epochs": 2}, progress=Progress(), figures=False, command="second")
    assert (summary["command"], summary["resumed_with"]) == ("first", ["second"])


def test_the_summary_keeps_the_commit_that_each_sitting_began_with(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, commits = tmp_path / "run", iter(["first", "second"])
    monkeypatch.setattr(devices, "source_commit", lambda: next(commits))
    summary = train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    assert (summary["commit"], summary["earlier_commits"]) == ("first", [])
    summary = resume(out, overrides={"epochs": 2}, progress=Progress(), figures=False)
    assert (summary["commit"], summary["earlier_commits"]) == ("second", ["first"])


def test_one_wrong_bit_in_a_checkpoint_is_noticed(finished: Path, tmp_path: Path) -> None:
    bits = bytearray((finished / "last.ckpt").read_bytes())
    bits[len(bits) // 2] ^= 16
    path = tmp_path / "last.ckpt"
    path.write_bytes(bits)
    with pytest.raises(InputError, match="is damaged"):
        read_checkpoint(path)


def test_another_data_set_is_looked_for_in_its_own_place(bars: Path, finished: Path, tmp_path: Path) -> None:
    run = load_run(finished)
    assert len(run.dataset().test) == 30
    other = run.dataset(f"npz:{bars}")
    assert other.in_shape == run.model.in_shape
    with pytest.raises(InputError, match="digits has images of shape"):
        run.dataset("digits")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"preset": "tf-notebook"}, "trains sabour2017, not tf-notebook"),
        ({"overrides": {"seed": 1}}, "has seed = 0; it cannot go on with 1"),
        ({"overrides": {"num_iterations": 1}}, "has num_iterations = 3"),
        ({"overrides": {"batch_size": 8}}, "has batch_size = 16"),
        ({"overrides": {"no_such": 8}}, 'no field of sabour2017 "no_such"'),
    ],
)
def test_a_run_does_not_go_on_as_another(finished: Path, overrides: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        resume(finished, progress=Progress(), figures=False, **overrides)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_one_cycle_run_does_not_go_on_for_longer(bars: Path, tmp_path: Path) -> None:
    train(tiny_config(bars, epochs=1, schedule="one-cycle"), tmp_path / "run", progress=Progress(), figures=False)
    with pytest.raises(InputError, match="ends with epoch 1; it cannot go on to epoch 2"):
        resume(tmp_path / "run", overrides={"epochs": 2}, progress=Progress(), figures=False)


def test_a_folder_with_a_run_is_not_overwritten(bars: Path, finished: Path) -> None:
    before = (finished / "last.ckpt").read_bytes()
    with pytest.raises(InputError, match="there is a run in"):
        train(tiny_config(bars), finished, progress=Progress(), figures=False)
    assert (finished / "last.ckpt").read_bytes() == before


def test_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run to resume"):
        resume(tmp_path, progress=Progress())


def test_a_batch_larger_than_the_data(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the batch size is 1000, but there are only 108 images"):
        train(tiny_config(bars, batch_size=1000), tmp_path / "run", progress=Progress(), figures=False)


def test_runs_are_numbered(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        summary = train(tiny, progress=Progress(), figures=False)
        assert Path(summary["out"]) == Path(f"runs/sabour2017-bars-{number}")


def test_a_link_to_nothing_is_no_free_number(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/sabour2017-bars-1").symlink_to("nowhere")
    assert train(tiny, progress=Progress(), figures=False)["out"] == str(Path("runs/sabour2017-bars-2"))
    monkeypatch.chdir(Path("runs/sabour2017-bars-2"))
    Path("runs").symlink_to("nowhere")
    with pytest.raises(OSError, match="runs"):
        train(tiny, progress=Progress(), figures=False)


def test_training_images_are_shifted_and_test_images_never(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    import torchcaps.models.capsnet as module

    own = module.CapsNet.primary

    def spy(network: torch.nn.Module, images: torch.Tensor) -> Capsules:
        seen[network.training].append((images * 255).round().to(torch.uint8))
        return own(network, images)  # type: ignore[arg-type]

    monkeypatch.setattr(module.CapsNet, "primary", spy)
    train(tiny, tmp_path / "run", progress=Progress(), figures=False)
    dataset = load_dataset(tiny.data, validation_size=12, seed=0)

    def known(images: list[torch.Tensor], *parts: object) -> float:
        rows = {image.numpy().tobytes() for part in parts for image in part.images}  # type: ignore[attr-defined]
        flat = [image.numpy().tobytes() in rows for batch in images for image in batch]
        return sum(flat) / len(flat)

    seen[False].pop(0)  # noise, by which the network is tried before the run
    assert known(seen[False], dataset.validation, dataset.test) == 1
    assert known(seen[True], dataset.train) < 0.4  # one in nine is not moved


class Messages(Progress):
    """Takes up what is said, and sends this process a Ctrl-C after a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.said: list[str] = []
        self.stop_at = stop_at

    def message(self, text: str) -> None:
        self.said.append(text)

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)


EMULATED = "Warning: this processor emulates bfloat16: a training step takes about 12 times as long"


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for bfloat16."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda _: False)


def test_auto_comes_to_float32_on_the_cpu_and_says_so(bars: Path, tmp_path: Path) -> None:
    config, messages = tiny_config(bars, epochs=1), Messages()
    assert config.precision == "auto"
    summary = train(config, tmp_path / "run", progress=messages, figures=False)
    assert summary["precision"] == "32"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["precision"] == "32"
    assert messages.said[3] == "Device: cpu, float32"
    assert not any(said.startswith("Warning") for said in messages.said)


@pytest.mark.usefixtures("emulating")
def test_bf16_that_is_emulated_trains_with_a_warning(bars: Path, tmp_path: Path) -> None:
    messages = Messages()
    train(tiny_config(bars, precision="bf16", epochs=1), tmp_path / "run", progress=messages, figures=False)
    assert messages.said[3] == "Device: cpu, bfloat16 convolutions and dense layers, all else in float32"
    assert [said.startswith(EMULATED) for said in messages.said if said.startswith("Warning")] == [True]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["precision"] == "bf16"


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("overrides", [{}, {"precision": "auto"}, {"precision": "bf16"}], ids=str)
def test_a_bf16_run_goes_on_in_bf16(bars: Path, tmp_path: Path, overrides: dict[str, str]) -> None:
    with pytest.raises(Interrupted):
        train(tiny_config(bars, precision="bf16"), tmp_path / "run", progress=Messages(stop_at=8), figures=False)
    messages = Messages()
    summary = resume(tmp_path / "run", overrides=overrides, progress=messages, figures=False)
    assert summary["precision"] == "bf16"
    assert messages.said[3].startswith("Device: cpu, bfloat16")
    assert sum(said.startswith(EMULATED) for said in messages.said) == 1


@pytest.mark.parametrize(("begun", "wanted"), [("bf16", "32"), ("32", "bf16"), ("auto", "bf16")])
def test_a_run_does_not_go_on_in_another_precision(bars: Path, tmp_path: Path, begun: str, wanted: str) -> None:
    config = tiny_config(bars, precision=begun, epochs=1)
    train(config, tmp_path / "run", progress=Progress(), figures=False)
    with pytest.raises(InputError, match="precision"):
        resume(tmp_path / "run", overrides={"precision": wanted, "epochs": 2}, progress=Progress(), figures=False)


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_judged_in_float32(bars: Path, tmp_path: Path, precision: str) -> None:
    config = tiny_config(bars, precision=precision, epochs=2)
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    for which in ("best", "last"):
        run = load_run(tmp_path / "run", which=which)
        found = evaluate(run.model, run.dataset().test)
        assert summary["test"][which]["accuracy"] == found.accuracy
        assert summary["test"][which]["loss"] == pytest.approx(found.loss, rel=1e-6)
        half = evaluate(run.model, run.dataset().test, precision="bf16")
        assert half.loss != pytest.approx(found.loss, rel=1e-6)


def test_bf16_trains_with_a_float32_routing(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, precision="bf16", epochs=12, learning_rate=5e-3)
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert summary["test"]["last"]["accuracy"] > 0.9
    assert {tensor.dtype for tensor in weights(tmp_path / "run").values()} == {torch.float32}


def test_tensorboard_events(bars: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_config(bars, logger="tensorboard"), tmp_path / "run", progress=Progress(), figures=False)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert len(events.Scalars("validation/accuracy")) == 3


def test_load_run_reads_best_and_last(finished: Path) -> None:
    best, last = load_run(finished), load_run(finished, which="last")
    assert_same_weights(dict(best.model.state_dict()), load_file(finished / "best" / "model.safetensors"))
    assert_same_weights(dict(last.model.state_dict()), weights(finished))
    assert not best.model.training
    assert best.class_names == ("0", "1", "2")
    assert best.dataset().in_shape == best.model.in_shape
