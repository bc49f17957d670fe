"""A network that is watched while it learns: the same training, seen in copies."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_runs import Heard, same_weights, tiny_config, write_bars
from torchcaps.explorer import Learning, learning
from torchcaps.explorer.questions import Questions
from torchcaps.training import Progress, TrainConfig, load_run, train


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A run on 18×18 images of three classes."""
    return tiny_config(write_bars(tmp_path / "bars.npz"), epochs=3)


class Looking(Learning):
    """Looks, as the page would, after each step; from another thread it would come between two steps or during one."""

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        super().step(epoch=epoch, step=step, images_per_second=images_per_second, loss=loss)
        self.seen = [*getattr(self, "seen", []), self.look()["scores"]]


def test_watching_changes_nothing_and_all_is_said(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "MIN_COPY_SECONDS", 0.0)

    class First(Progress):
        def network(self, network: torch.nn.Module) -> None:
            self.weights = {name: value.clone() for name, value in network.state_dict().items()}

    def asked() -> Any:
        return json.loads(Questions([watched.explorer], watched).answer("progress", {}))

    train(config, tmp_path / "alone", figures=False, progress=(first := First()))
    watched = Looking(config, heard := Heard())
    assert same_weights(watched.explorer.model.state_dict(), first.weights), "it begins with the run's own weights"
    assert watched.labels == ["0", "1", "2"]
    before, begin = watched.look()["scores"], asked()
    assert (begin["says"], begin["step"], begin["isRunning"]) == ("The training begins.", 0, True)
    assert begin["what"].startswith("learning on ")

    summary = train(config, tmp_path / "watched", figures=False, progress=watched)
    for which in ("best", "last"):
        alone, seen = (load_run(tmp_path / name, which).model.state_dict() for name in ("alone", "watched"))
        assert same_weights(alone, seen)
    assert not np.allclose(before, watched.seen[0])
    assert not np.allclose(watched.seen[0], watched.seen[-1])
    assert (len(heard.rows), heard.said != []) == (3, True)
    now = asked()
    assert len(watched.seen) == len(heard.steps) == now["step"] == now["steps"]
    assert (now["epoch"], now["epochs"], len(now["accuracy"])) == (3, 3, 3)
    assert [step for step, _ in now["loss"]] == list(range(1, now["steps"] + 1))
    assert len(now["decoded"]) == len(now["seen"]) == 3

    watched.end(load_run(tmp_path / "watched"), summary["test"]["best"]["accuracy"])
    end = asked()
    assert not end["isRunning"]
    assert end["what"] == begin["what"].replace("learning", "trained", 1)
    assert re.match(r"Trained: \d+\.\d % of the test images are classified correctly\. ", end["says"])
    assert end["says"].endswith(f"Run folder: {tmp_path / 'watched'}.")


def test_a_long_curve_is_thinned(config: TrainConfig) -> None:
    watched = Learning(config, Progress())
    watched.network(watched.explorer.model)
    for step in range(1, 1000):
        watched.step(epoch=1, step=step, images_per_second=1.0, loss=1 / step)
    loss = watched.numbers()["loss"]
    assert 100 <= len(loss) <= learning.MAX_CURVE_POINTS
    assert loss[-1] == (999, 1 / 999)
