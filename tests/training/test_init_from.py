"""A run that starts from the weights of a trained network."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny_runs import same_weights, tiny_config
from torchcaps.cli import main
from torchcaps.errors import InputError
from torchcaps.models import create_model, load_pretrained
from torchcaps.training import Progress, load_run, resume, train
from torchcaps.training.checkpoint import read_checkpoint
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


@pytest.fixture(scope="module")
def trained(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best epoch is not its last one."""
    out = tmp_path_factory.mktemp("init") / "trained"
    train(tiny_config(bars, epochs=8, learning_rate=5e-3), out, progress=Progress(), figures=False)
    return out


def checkpoint_weights(out: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(out / "last.ckpt")["model"]


def metrics(out: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((out / "metrics.csv").open()))
    for row in rows:
        row.pop("seconds"), row.pop("images_per_second")
    return rows


def test_it_starts_from_the_best_epochs_weights_and_a_fresh_adam(bars: Path, trained: Path, tmp_path: Path) -> None:
    config, out = tiny_config(bars, init_from=str(trained)), tmp_path / "run"
    with pytest.raises(KilledError):
        train(config, out, progress=KillAt(0), figures=False)
    start = read_checkpoint(out / "last.ckpt")
    assert same_weights(start["model"], load_file(trained / "best" / "model.safetensors"))
    assert start["optimizer"]["state"] == {}
    assert json.loads((out / "config.json").read_text())["init_from"] == str(trained)


@pytest.mark.parametrize("step", [0, 1, 8])
def test_a_run_that_was_killed_goes_on_exactly_without_the_other_run(
    bars: Path, trained: Path, tmp_path: Path, step: int
) -> None:
    source = shutil.copytree(trained, tmp_path / "source")
    config = tiny_config(bars, init_from=str(source))
    train(config, tmp_path / "whole", progress=Progress(), figures=False)
    with pytest.raises(KilledError):
        train(config, tmp_path / "broken", progress=KillAt(step), figures=False)
    shutil.rmtree(source)
    resume(tmp_path / "broken", progress=Progress(), figures=False)
    assert same_weights(checkpoint_weights(tmp_path / "broken"), checkpoint_weights(tmp_path / "whole"))
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    train(tiny_config(bars), tmp_path / "other", progress=Progress(), figures=False)
    assert float(metrics(tmp_path / "whole")[0]["train_loss"]) < float(metrics(tmp_path / "other")[0]["train_loss"]) / 2


def test_what_save_pretrained_wrote_and_what_is_shipped_can_be_started_from(
    bars: Path, trained: Path, tmp_path: Path
) -> None:
    load_run(trained).model.save_pretrained(tmp_path / "saved")
    config, out = tiny_config(bars, init_from=str(tmp_path / "saved")), tmp_path / "run"
    with pytest.raises(KilledError):
        train(config, out, progress=KillAt(0), figures=False)
    assert same_weights(read_checkpoint(out / "last.ckpt")["model"], load_run(trained).model.state_dict())
    network = create_model("compact")
    start_from(network, "compact")
    assert same_weights(network.state_dict(), load_pretrained("compact").state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"capsule_dim": 8},
            r"do not fit the network: layers.0.transform.weight is floats .*; a run of that network, sabour2017, "
            r"begins with --config .*trained.config\.json",
        ),
        ({"decoder": False}, "do not fit the network: decoder."),
        ({"init_from": "nowhere"}, "there is no run folder nowhere"),
        ({"init_from": "cmpact"}, "there is no run folder cmpact"),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(
    bars: Path, trained: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        train(tiny_config(bars, **{"init_from": str(trained)} | change), tmp_path / "run", progress=Progress())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_on_the_command_line(bars: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    shared = ["--no-figures", "--epochs", "2"]
    arguments = ["--config", str(trained / "config.json"), "--init-from", str(trained), "--out", str(out)]
    assert main(["train", *arguments, *shared]) == 0, capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--init-from", str(tmp_path), "--epochs", "3"]) == 2
    assert f"has init_from = {str(trained)!r}; it cannot go on with" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--epochs", "3", "--no-figures"]) == 0
    assert main(["train", *arguments[:-1], str(tmp_path / "new"), "--init-from", str(tmp_path / "no"), *shared]) == 2
    assert "there is no run folder" in capsys.readouterr().err


def test_a_last_ckpt_of_no_run_is_not_gone_on_with(bars: Path, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "last.ckpt", tmp_path / "run")
    with pytest.raises(InputError, match="there is a run in"):
        train(tiny_config(bars, seed=1), tmp_path / "run", progress=Progress())
