"""A kill at any moment leaves a run folder that a resumed run makes right, also where it does not compute the same."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_runs import tiny_config
from torchcaps import files
from torchcaps.analysis import Evaluation
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.training import Progress, load_run, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.data import Batches
from torchcaps.training.loop import Trainer

#: Accuracy on the validation images in a first try and in the second one, by epoch: epochs are not computed alike.
ACCURACY = {1: {0: 0.5, 1: 0.7, 2: 0.6}, 2: {1: 0.3, 2: 0.4}}

#: Files written in the first epoch: .lock.json, config.json, last.ckpt, three of best/, metrics.csv.
FIRST_EPOCH = 7


class KilledError(Exception):
    pass


class Run:
    """A run that is killed before a file takes its place, and goes on with other results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt, self.written, self.kill_before = 1, 0, 0
        self.weights: dict[float, dict[str, torch.Tensor]] = {}
        own_commit, own_judge = files.commit, Trainer.judge

        def commit(temporary: Path, path: Path) -> None:
            self.written += 1
            if self.written == self.kill_before:
                raise KilledError
            own_commit(temporary, path)

        def judge(trainer: Trainer, network: Network, batches: Batches) -> Evaluation:
            result = own_judge(trainer, network, batches)
            if batches is not trainer.data.validation:
                return result
            accuracy = ACCURACY[self.attempt][trainer.state.epoch]
            self.weights[accuracy] = {name: each.clone() for name, each in network.state_dict().items()}
            right = round(100 * accuracy)
            counts = [[right, 100 - right, 0], [0, 0, 0], [0, 0, 0]]
            return Evaluation(torch.tensor(counts).numpy(), result.total_loss, result.class_names)

        monkeypatch.setattr(files, "commit", commit)
        monkeypatch.setattr(Trainer, "judge", judge)


@pytest.mark.parametrize("written", range(1, 6))  # last.ckpt, the files of best/, metrics.csv
def test_best_holds_the_weights_of_the_epoch_that_the_metrics_call_best(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    run, out = Run(monkeypatch), tmp_path / "run"
    run.kill_before = FIRST_EPOCH + written
    with pytest.raises(KilledError):
        train(tiny_config(bars), out, progress=Progress(), figures=False)
    run.attempt = 2
    summary = resume(out, progress=Progress(), figures=False)
    rows = {
        int(row["epoch"]): float(row["validation_accuracy"]) for row in csv.DictReader((out / "metrics.csv").open())
    }
    # killed before the checkpoint, the second epoch is done again and is worse; killed after it, it counts
    assert rows == ({1: 0.5, 2: 0.3, 3: 0.4} if written == 1 else {1: 0.5, 2: 0.7, 3: 0.4})
    assert summary["best_epoch"] == (1 if written == 1 else 2)
    best, wanted = load_file(out / "best" / "model.safetensors"), run.weights[max(rows.values())]
    assert best.keys() == wanted.keys()
    assert all(torch.equal(best[name], wanted[name]) for name in best)


@pytest.mark.parametrize("written", range(2, FIRST_EPOCH))
def test_a_run_whose_first_network_is_not_written_yet_has_no_checkpoint(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    run, out = Run(monkeypatch), tmp_path / "run"
    run.kill_before = written + 1
    with pytest.raises(KilledError):
        train(tiny_config(bars), out, progress=Progress(), figures=False)
    if written == FIRST_EPOCH - 1:  # only metrics.csv is missing
        assert load_run(out).model.num_classes == 3
        return
    for which in ("best", "last"):
        with pytest.raises(InputError, match="has no checkpoint of a finished epoch yet, so there is no network"):
            load_run(out, which)


def test_resuming_a_run_that_was_killed_at_its_very_end_writes_what_is_missing(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = Run(monkeypatch), tmp_path / "run"
    run.kill_before = 4  # .lock.json, config.json and last.ckpt are written
    with pytest.raises(KilledError):
        train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    assert not (out / "best" / "model.safetensors").exists()
    assert not (out / "metrics.csv").exists()
    assert resume(out, progress=Progress(), figures=False)["epochs"] == 1
    assert len(list(csv.DictReader((out / "metrics.csv").open()))) == 1


@pytest.mark.parametrize("change", [{"model": {"conv.weight": 1}}, {"optimizer": {}}, {"progress": {"unknown": 1}}])
def test_what_is_no_checkpoint_of_this_run_is_one_sentence(
    bars: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    train(tiny_config(bars, epochs=1), tmp_path / "run", progress=Progress(), figures=False)
    path = tmp_path / "run" / "last.ckpt"
    torch.save(read_checkpoint(path) | change, path)
    with pytest.raises(InputError, match=r"checkpoint( of this run)? .*last.ckpt is damaged or no checkpoint"):
        resume(tmp_path / "run", overrides={"epochs": 2}, progress=Progress(), figures=False)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"last.ckpt is damaged or no checkpoint"):
        read_checkpoint(path)
