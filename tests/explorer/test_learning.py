"""A network that is watched while it learns: the same training, seen in copies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_runs import Heard, same_weights, tiny_config, write_bars
from torchcaps.explorer import Learning, learning
from torchcaps.explorer.questions import Questions
from torchcaps.training import Progress, TrainConfig, load_run, train


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on 18×18 images of three classes."""
    folder = tmp_path_factory.mktemp("learning")
    return tiny_config(write_bars(folder / "bars.npz"), epochs=3)


class Looking(Learning):
    """Looks, as the page would, after each step; from another thread it would come between two steps or during one."""

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        super().step(epoch=epoch, step=step, images_per_second=images_per_second, loss=loss)
        self.seen = [*getattr(self, "seen", []), self.look()["scores"]]


def test_watching_changes_nothing(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "INTERVAL", 0.0)

    class First(Progress):
        def network(self, network: torch.nn.Module) -> None:
            self.weights = {name: value.clone() for name, value in network.state_dict().items()}

    first = First()
    train(config, tmp_path / "alone", figures=False, progress=first)
    watched = Looking(config, Heard())
    assert same_weights(watched.explorer.model.state_dict(), first.weights), "it begins with the run's own weights"
    before = watched.look()["scores"]
    train(config, tmp_path / "watched", figures=False, progress=watched)
    for which in ("best", "last"):
        alone, seen = (load_run(tmp_path / name, which).model.state_dict() for name in ("alone", "watched"))
        assert same_weights(alone, seen)
    assert len(watched.seen) == watched.numbers()["steps"]
    assert not np.allclose(before, watched.seen[0])
    assert not np.allclose(watched.seen[0], watched.seen[-1])


def test_what_is_said_of_it(config: TrainConfig, tmp_path: Path) -> None:
    heard = Heard()
    watched = Learning(config, heard)
    questions = Questions([watched.explorer], watched)
    begin = json.loads(questions.answer("progress", {}))
    assert (begin["says"], begin["step"], begin["isRunning"]) == ("The training begins.", 0, True)
    assert begin["what"].startswith("learning on ")
    assert watched.labels == ["0", "1", "2"]
    summary = train(config, tmp_path / "run", figures=False, progress=watched)
    assert (len(heard.rows), len(heard.steps) > 3, heard.said != []) == (3, True, True)
    now = json.loads(questions.answer("progress", {}))
    assert (now["step"], now["epoch"], now["epochs"]) == (now["steps"], 3, 3)
    assert [step for step, _ in now["loss"]] == list(range(1, now["steps"] + 1))
    assert len(now["accuracy"]) == 3
    assert len(now["decoded"]) == len(now["seen"]) == 3
    watched.end(load_run(tmp_path / "run"), summary["test"]["best"]["accuracy"])
    end = json.loads(questions.answer("progress", {}))
    assert not end["isRunning"]
    assert end["what"] == begin["what"].replace("learning", "trained", 1)
    assert re.match(r"Trained: \d+\.\d % of the test images are right\. ", end["says"])
    assert end["says"].endswith(f"The run is in {tmp_path / 'run'}.")


def test_a_long_curve_is_thinned(config: TrainConfig) -> None:
    watched = Learning(config, Progress())
    watched.network(watched.explorer.model)
    for step in range(1, 1000):
        watched.step(epoch=1, step=step, images_per_second=1.0, loss=1 / step)
    loss = watched.numbers()["loss"]
    assert 100 <= len(loss) <= learning.MOST_POINTS
    assert loss[-1] == (999, 1 / 999)
