"""A job from training to its log, in this process; test_plans.py gives each a process of its own."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from torchcaps.analysis import RobustnessCurve
from torchcaps.errors import InputError
from torchcaps.files import read_json
from torchcaps.reproduce import Job, Measure, Outcome, Row, Table
from torchcaps.reproduce.estimate import time_jobs
from torchcaps.reproduce.jobs import execute
from torchcaps.training import Interrupted, TrainConfig, load_run, train
from torchcaps.training.loop import Trainer
from torchcaps.training.progress import Silence


def job(row: Row, seed: int = 0, **fields: Any) -> Job:
    return Job("tiny", row, seed, Path("runs"), Path("results"), accelerator="cpu", **fields)


class StopAtStep(Silence):
    """Sends this process a Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        if step == self.at:
            signal.raise_signal(signal.SIGINT)


class Epochs(Silence):
    """Takes up which epochs are trained."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def epoch(self, row: Any) -> None:
        self.seen.append(row["epoch"])


def stopping(row: Row, target: float) -> Row:
    """The row whose training ends at an accuracy."""
    return dataclasses.replace(row, overrides={**row.overrides, "stop_at": target})


def looks_at_test_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes up after how many epochs a network is judged on the test images."""
    looks: list[int] = []
    own = Trainer._evaluate

    def spy(trainer: Trainer, network: Any, images: Any) -> Any:
        if images is trainer.dataset.test:
            looks.append(trainer.state.epoch)
        return own(trainer, network, images)

    monkeypatch.setattr(Trainer, "_evaluate", spy)
    return looks


def test_a_job_becomes_an_ordinary_run_and_its_log(tiny: Table) -> None:
    made = job(tiny.rows[0], seed=1)
    assert execute(made, Silence()) is Outcome.DONE
    assert made.run == Path("runs/tiny/plain/seed-1")
    run = load_run(made.run)
    assert run.config is not None
    assert run.config == dataclasses.replace(made.config, precision="32")  # what auto came to
    log = Path("results/tiny/plain/seed-1")
    summary = read_json(log / "summary.json", "summary")
    assert summary["test"] == read_json(made.run / "summary.json", "summary")["test"]
    assert (
        summary["command"]
        == "torchcaps reproduce tiny --row plain --seeds 2 --out runs/again --results runs/again/logs"
    )
    assert read_json(log / "measures.json", "measures") == {}
    assert made.is_done


def test_what_is_done_is_not_done_again(tiny: Table) -> None:
    made, epochs = job(tiny.rows[0]), Epochs()
    assert execute(made, epochs) is Outcome.DONE
    before = {path: path.stat().st_mtime_ns for path in made.log.iterdir()}
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == [1, 2]
    assert {path: path.stat().st_mtime_ns for path in made.log.iterdir()} == before


def test_a_run_without_its_log_is_logged_without_training(tiny: Table) -> None:
    made, epochs = job(tiny.rows[0]), Epochs()
    execute(made, Silence())
    shutil.rmtree(made.log)
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == []
    assert made.is_done


def test_an_interrupted_job_goes_on_where_it_stopped(tiny: Table) -> None:
    made, epochs = job(tiny.rows[0]), Epochs()
    assert execute(made, StopAtStep(3)) is Outcome.STOPPED  # two steps an epoch
    assert not made.is_done
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == [2]
    whole = job(tiny.rows[0])
    whole = dataclasses.replace(whole, out=Path("others"), results=Path("others-results"))
    execute(whole, Silence())
    assert read_json(made.log / "summary.json", "s")["test"] == read_json(whole.log / "summary.json", "s")["test"]


def test_training_ends_with_the_first_epoch_that_reaches_the_target(tiny: Table) -> None:
    made, epochs = job(stopping(tiny.rows[0], 0.0)), Epochs()
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == [1]
    summary = read_json(made.log / "summary.json", "summary")
    assert (summary["epochs"], summary["best_epoch"]) == (1, 1)
    assert (summary["resumed_with"], summary["earlier_commits"]) == ([], []), "nobody had stopped it"
    recipe = read_json(made.log / "config.json", "configuration")["recipe"]
    assert (recipe["epochs"], recipe["stop_at"]) == (2, 0.0)
    made.check()


def test_before_the_target_nobody_looks_at_the_test_images(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looks_at_test_images(monkeypatch)
    execute(job(stopping(tiny.rows[0], 0.0)), Silence())
    assert looks == [1], "once, with the epoch that is both the last one and the best"


def test_a_target_that_is_not_reached_ends_with_the_last_epoch(tiny: Table) -> None:
    made = job(stopping(tiny.rows[0], 1.0))
    assert execute(made, Silence()) is Outcome.DONE
    assert read_json(made.log / "summary.json", "summary")["epochs"] == 2


def test_a_run_that_died_before_it_wrote_that_its_target_is_reached_ends_there(
    tiny: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a kill between the checkpoint and the metrics that follow from it."""
    made, epochs = job(stopping(tiny.rows[0], 0.0)), Epochs()

    def die(_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("torchcaps.training.loop.Trainer._publish", die)
        with pytest.raises(SystemExit):
            execute(made, epochs)
    assert (made.run / "last.ckpt").exists()
    assert not (made.run / "metrics.csv").exists()
    made.check()
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == []
    assert read_json(made.log / "summary.json", "summary")["epochs"] == 1
    assert len((made.log / "metrics.csv").read_text().splitlines()) == 2


def test_a_run_that_was_stopped_before_its_target_says_so_once(tiny: Table) -> None:
    made = job(stopping(tiny.rows[0], 0.0))
    assert execute(made, StopAtStep(1)) is Outcome.STOPPED
    assert execute(made, Silence()) is Outcome.DONE
    assert read_json(made.log / "summary.json", "summary")["resumed_with"] == [made.command]


def test_more_is_measured_without_training_where_the_run_is_still_there(tiny: Table) -> None:
    row = tiny.rows[1]
    assert execute(job(row), Silence()) is Outcome.DONE
    made, epochs = job(dataclasses.replace(row, measures=(Measure(kind="rotation", images=12),))), Epochs()
    assert not made.is_done
    made.check()
    assert execute(made, epochs) is Outcome.DONE
    assert epochs.seen == []
    assert read_json(made.log / "measures.json", "measures")["rotation"]["num_images"] == 12
    assert made.is_done


def test_a_divergence_is_logged_and_is_an_end(tiny: Table) -> None:
    row = tiny.rows[0]
    made = job(dataclasses.replace(row, overrides={**row.overrides, "learning_rate": 1e30}))
    assert execute(made, Silence()) is Outcome.DIVERGED
    reason = json.loads((made.log / "diverged.json").read_text())["reason"]
    assert "became NaN or infinite" in reason
    assert "runs" not in reason
    assert made.is_done
    assert execute(made, Silence()) is Outcome.DIVERGED


def test_what_a_row_measures_is_measured(tiny: Table) -> None:
    made = job(tiny.rows[1])
    assert execute(made, Silence()) is Outcome.DONE
    measures = read_json(made.log / "measures.json", "measures")
    assert list(measures) == ["rotation", "pgd-scores"]
    rotation, attack = (RobustnessCurve.from_dict(found) for found in measures.values())
    assert (rotation.kind, rotation.num_images) == ("rotation", 10)
    assert (attack.kind, attack.num_images) == ("pgd-scores", 5)


# locks


def test_one_process_at_a_time_works_on_a_job(tiny: Table) -> None:
    made = job(tiny.rows[0])
    made.run.parent.mkdir(parents=True)
    lock = made.run.with_name(f".{made.run.name}.lock")
    with FileLock(lock):
        assert execute(made, Silence()) is Outcome.BUSY
        assert not made.run.exists()
    lock.touch()
    assert execute(made, Silence()) is Outcome.DONE, "a lock file that is left behind is no lock"
    assert not [*made.run.parent.glob(".*"), *made.log.parent.glob(".*")], "and goes at the end"


def test_runs_in_several_folders_do_not_write_the_same_log(tiny: Table) -> None:
    made = job(tiny.rows[0])
    other = dataclasses.replace(made, out=Path("elsewhere"))
    with other.locked():
        assert execute(made, Silence()) is Outcome.BUSY
        assert not made.run.exists()
        with dataclasses.replace(made, results=Path("other-results")).locked():
            pass
    with made.locked():
        pass


def test_runs_and_logs_may_share_a_folder(tiny: Table) -> None:
    made = dataclasses.replace(job(tiny.rows[0]), results=Path("runs").resolve())
    assert execute(made, Silence()) is Outcome.DONE


def test_lines_of_runs_that_share_a_terminal_begin_with_their_names(
    tiny: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(job(tiny.rows[0]), share_output=True) is Outcome.DONE
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("tiny/plain, seed 0: ") for line in lines), lines
    assert lines[0].endswith(": begins")
    assert sum(": epoch " in line for line in lines) == 2


# other settings


@pytest.mark.parametrize("place", ["run", "log"])
def test_a_run_of_other_settings_is_seen_before_anything_is_done(tiny: Table, place: str) -> None:
    from torchcaps.files import write_json

    made = job(tiny.rows[0])
    made.check()
    other = job(dataclasses.replace(tiny.rows[0], overrides={**tiny.rows[0].overrides, "epochs": 7}))
    folder = getattr(made, place)
    write_json(folder / "config.json", other.config.to_dict())
    other.check()
    with pytest.raises(InputError, match=f"{re.escape(str(folder))}.*other settings"):
        made.check()


@pytest.mark.parametrize("place", ["run", "log"])
def test_a_run_that_ended_with_another_target_is_seen(tiny: Table, place: str) -> None:
    assert execute(job(stopping(tiny.rows[0], 0.0)), Silence()) is Outcome.DONE
    other = job(stopping(tiny.rows[0], 1.0))
    shutil.rmtree(getattr(other, "log" if place == "run" else "run"))
    with pytest.raises(InputError, match=f"{re.escape(str(getattr(other, place)))}.*other settings"):
        other.check()


def test_rows_that_share_their_data_load_them_once(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.training import data

    loaded, load = [], data.load_run_data

    def count(config: TrainConfig) -> Any:
        loaded.append(config)
        return load(config)

    monkeypatch.setattr(data, "load_run_data", count)
    row = tiny.rows[0]
    longer = dataclasses.replace(row, overrides={**row.overrides, "epochs": 7, "num_iterations": 1})
    fewer = dataclasses.replace(row, overrides={**row.overrides, "limit_train": 60})
    time_jobs([job(row), job(longer), job(fewer), job(fewer)])
    assert [config.recipe.limit_train for config in loaded] == [100, 60]


def test_the_time_of_a_job_is_estimated_from_its_images(tiny: Table) -> None:
    row = tiny.rows[0]
    long = dataclasses.replace(row, overrides={**row.overrides, "epochs": 2000})
    short, much = time_jobs([job(row), job(long)])
    assert 0 < short.seconds < much.seconds
    assert short.hardware["device"] == "cpu"
    assert short.versions["torch"] == torch.__version__
    with pytest.raises(InputError, match="no data set"):
        time_jobs([job(dataclasses.replace(row, data="dogits"))])


def test_the_timed_step_is_training_s_own(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.reproduce import estimate
    from torchcaps.training import loop, step
    from torchcaps.training.step import TrainStep, learning_rate, set_up_step

    assert loop.set_up_step is set_up_step
    made, rates = [], []

    def spy(fabric: Any, config: TrainConfig, network: Any) -> Any:
        made.append((fabric, config, set_up_step(fabric, config, network)))
        return made[-1][2]

    def noted(step: TrainStep, batch: Any, number: int, rate: float) -> None:
        rates.append((len(batch.labels), number, rate))
        own(step, batch, number, rate)

    own = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", noted)
    monkeypatch.setattr(step, "set_up_step", spy)
    (timing,) = time_jobs([job(tiny.rows[0])])
    ((fabric, config, made_step),) = made
    assert timing.seconds > 0
    assert fabric._precision.precision == "32-true"
    assert made_step.optimizer.param_groups[0]["fused"]
    assert config.recipe.batch_size == estimate.CPU_IMAGES
    assert rates == [(estimate.CPU_IMAGES, step, learning_rate(config.recipe, step, 3)) for step in range(3)]


def test_a_run_in_another_precision_goes_on_in_it(tiny: Table) -> None:
    made = job(tiny.rows[0])
    begun = dataclasses.replace(made.config, precision="bf16")
    with pytest.raises(Interrupted):
        train(begun, made.run, progress=StopAtStep(1), figures=False)
    made.check()
    assert execute(made, Silence()) is Outcome.DONE
    assert read_json(made.log / "summary.json", "summary")["precision"] == "bf16"
    assert read_json(made.log / "config.json", "config")["precision"] == "bf16"


def test_a_signal_in_the_last_batch_before_the_target_stops_the_job(tiny: Table) -> None:
    made = job(stopping(tiny.rows[0], 0.0))
    assert execute(made, StopAtStep(2)) is Outcome.STOPPED  # two steps an epoch
    assert not (made.run / "summary.json").exists()
    assert execute(made, Silence()) is Outcome.DONE
    assert read_json(made.log / "summary.json", "summary")["epochs"] == 1
