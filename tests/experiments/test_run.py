"""Runs in processes of their own: here, and on the workers of a dask cluster."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import processes
from experiments import run
from experiments.store import RESULTS, read_curves, read_runs
from experiments.table import Table
from experiments.tables import load_table
from support import registered_for_now
from torchcaps.datasets import find_dataset
from torchcaps.errors import InputError
from torchcaps.plugins import loaded_plugins
from torchcaps.training import Progress, load_run
from torchcaps.training.config import LOCATION_FIELDS

HERE = {"accelerator": "cpu"}
ROWS = """
from experiments.table import Row, Table
from experiments.tables import ZOO

TINY = {"conv_channels": 4, "primary_types": 2, "decoder": False, "limit_train": 100, "limit_test": 40}
TINY |= {"validation_size": 40, "batch_size": 50, "epochs": 2, "max_shift": 0}

def brightness(run, test):
    return {"mean": float(test.images.float().mean())}

OWN = Row("azimuth-own", "mine", "sabour2017", TINY | {"routing": "mine"}, data="digits",
          measures={"rotation": 5, "light": brightness})
WILD = Row("wild", "diverges", "sabour2017", TINY | {"learning_rate": 1e30}, data="digits")
BAD = Row("bad", "fails", "sabour2017", TINY, data="npz:nowhere.npz")
LONG = Row("long", "long", "sabour2017", TINY | {"epochs": 30}, data="digits", seeds=2)
TABLE = Table(name="zoo", title="The zoo and mine", rows=(*ZOO.rows, BAD, OWN, WILD, LONG))
"""
PLUGIN = """
import torchcaps
from torchcaps.nn import DynamicRouting

@torchcaps.register("routing", "mine")
class Mine(DynamicRouting):
    pass
"""


def start(*words: str, script: str = "run") -> processes.Forked:
    path = os.pathsep.join(filter(None, sys.path))  # for the processes that it starts
    environment = os.environ | {"PYTHONPATH": path}
    return processes.start(Path(run.__file__).with_name(f"{script}.py"), *words, environment=environment)


def finish(*words: str, script: str = "run") -> tuple[int | None, str]:
    process = start(*words, script=script)
    said, _ = process.communicate(timeout=200)
    return process.returncode, said


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def epochs_in(folder: Path) -> int:
    """Return the number of epochs in the metrics of a run, 0 before it has begun."""
    metrics = folder / "metrics.csv"
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def test_every_row_gets_its_first_seed_before_any_its_second(tiny: Table) -> None:
    jobs = run.plan(tiny, Path("r"), seeds=2)
    assert [job.name for job in jobs] == ["tiny/plain/0", "tiny/measured/0", "tiny/plain/1", "tiny/measured/1"]
    assert jobs[2].folder == Path("r/tiny/plain/seed-1")
    assert len(run.plan(tiny, full=True, seeds=1)) == 3
    assert [job.row.name for job in run.plan(tiny, rows=("large", "plain", "large"), seeds=1)] == ["large", "plain"]
    a = dataclasses.replace(tiny.rows[0], name="a", seeds=1, first_seed=100)  # a row may say how many and from where
    table = dataclasses.replace(tiny, rows=(a, dataclasses.replace(a, name="b", seeds=2, first_seed=0)))
    assert [(job.row.name, job.seed) for job in run.plan(table)] == [("a", 100), ("b", 0), ("b", 1)]


def test_a_plan_that_cannot_be(tiny: Table, record) -> None:
    measured = tiny.rows[1]
    record(dataclasses.replace(measured, overrides={**measured.overrides, "epochs": 5}), 1)
    with pytest.raises(InputError, match="a run tiny/measured/1 with other settings than the row has now"):
        run.plan(tiny)


def test_wrong_input_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs.jsonl").write_text("{")
    for words, said in (
        ("nowhere.py", "nowhere.py"),
        ("mnist --results .", "runs.jsonl is damaged or no list of runs"),
        ("mnist --cluster nonsense", "no dask scheduler"),
    ):
        with pytest.raises(SystemExit) as caught:
            run.main(words.split())
        assert caught.value.code == 2
        assert said in capsys.readouterr().err


def job(table: Table, row: str) -> run.Job:
    (made,) = run.plan(table, rows=(row,), seeds=1)
    return made


def test_a_run_is_an_ordinary_run_folder_and_is_measured_again_without_training(tiny: Table) -> None:
    made = job(tiny, "measured")
    assert run.work(made, HERE, Progress()) == run.DONE
    (log,) = read_runs(RESULTS).values()
    assert (log.name, log.config["preset"], log.config["epochs"]) == ("tiny/measured/0", "baseline-cnn", 1)
    assert not {*LOCATION_FIELDS, "seed", "precision"} & log.config.keys()
    assert {kind: each["num_images"] for kind, each in log.measures.items()} == {"rotation": 10, "pgd-scores": 5}
    (line,) = read_curves(RESULTS)[log.name]
    assert float(line["validation_loss"]) == pytest.approx(log.summary["validation"]["last"]["loss"], rel=1e-4)
    found = load_run(made.folder)
    assert found.config == dataclasses.replace(made.row.config(0), precision="32", accelerator="cpu")
    assert found.summary is not None
    assert found.summary["test"] == log.summary["test"]
    assert found.summary["command"] == tiny.again(made.row, 0, "auto")

    more = made._replace(row=dataclasses.replace(made.row, measures={"latency": None, "fgsm": 7}))
    assert run.work(more, HERE, Progress()) == run.DONE
    assert load_run(made.folder).summary == found.summary
    (log,) = read_runs(RESULTS).values()
    assert log.measures["fgsm"]["num_images"] == 7
    assert len(read_curves(RESULTS)[log.name]) == 1
    shutil.rmtree(made.folder / "best")
    with pytest.raises(InputError, match="has no weights to measure for the run tiny/measured/0; remove it"):
        run.work(made, HERE, Progress())


@pytest.mark.slow
def test_rows_of_ones_own_are_run_two_at_a_time_with_a_plugin() -> None:
    Path("rows.py").write_text(ROWS)
    Path("mine.py").write_text(PLUGIN)
    words = ("rows.py", "--row", "azimuth-own", "--row", "wild", "--seeds", "1", "--plugin", "mine.py")
    code, out = finish(*words, "--row", "bad", "--jobs", "2", "--accelerator", "cpu")
    assert (code, "nowhere.npz" in out) == (1, True), out
    said = {line.partition(";")[0] for line in out.splitlines()}
    assert {"zoo/azimuth-own/0: done", "zoo/wild/0: diverged", "zoo/bad/0: failed, exit code 2"} <= said
    logs = read_runs(RESULTS)
    assert logs["zoo/azimuth-own/0"].config["plugins"] == ["mine.py"]
    assert list(logs["zoo/azimuth-own/0"].measures["light"]) == ["mean"]
    assert "became NaN" in logs["zoo/wild/0"].diverged
    again = "python experiments/run.py rows.py --row azimuth-own --seeds 1 --precision {} --results runs/again"
    summary = json.loads((RESULTS / "zoo/azimuth-own/seed-0/summary.json").read_text())
    assert summary["command"] == again.format("auto") + " --plugin mine.py"
    code, out = finish(*words)
    report = "python experiments/report.py rows.py --results experiments/results --plugin mine.py"
    assert (code, out) == (0, f"All 2 runs of rows.py are done. Their table: {report}\n")
    code, page = finish(*report.split()[2:], script="report")
    assert code == 0
    assert "| light: mean |" in page
    assert again.format("32") + " --plugin mine.py\n" in page


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
@pytest.mark.slow
def test_a_run_whose_command_is_ended_writes_its_checkpoint_and_goes_on() -> None:
    """First the command is asked to end, then it is killed."""
    Path("rows.py").write_text(ROWS)
    words, epochs = ("rows.py", "--row", "long", "--accelerator", "cpu"), 0
    folder = RESULTS / "zoo/long/seed-0"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(*words)
        wait_for(lambda before=epochs: epochs_in(folder) > before)
        process.send_signal(number)
        out, _ = process.communicate(timeout=100)  # the run holds the other end of the pipe until it has ended
        assert process.returncode == (143 if number == signal.SIGTERM else -9), out
        assert (folder / "last.ckpt").exists()
        assert not (folder / "summary.json").exists()
        assert not folder.with_name("seed-1").exists(), "the second run is not begun any more"
        epochs = epochs_in(folder)
    code, out = finish(*words, "--seeds", "1")
    assert code == 0, out
    assert len(json.loads((folder / "summary.json").read_text())["resumed_with"]) == 2
    (whole,) = run.plan(load_table("rows.py"), Path("other"), rows=("long",), seeds=1)
    run.work(whole, HERE, Progress())
    logs = [read_runs(results)["zoo/long/0"] for results in (RESULTS, Path("other"))]
    assert logs[0].summary["test"] == logs[1].summary["test"]


@pytest.mark.slow
def test_the_workers_of_a_cluster_make_the_runs() -> None:
    distributed = pytest.importorskip("distributed")
    Path("rows.py").write_text(ROWS.replace('"epochs": 30', '"epochs": 2'))
    workers = {"n_workers": 2, "threads_per_worker": 1, "processes": False}  # threads; runs are processes of their own
    with distributed.LocalCluster(**workers, protocol="tcp", dashboard_address=None) as cluster:
        words = ("--row", "long", "--cluster", cluster.scheduler_address, "--accelerator", "cpu")
        code, out = finish("rows.py", *words)
    assert code == 0, out
    done = {line.partition(";")[0] for line in out.splitlines() if line.startswith("zoo/long")}
    assert done == {"zoo/long/0: done", "zoo/long/1: done"}
    assert read_runs(RESULTS).keys() == read_curves(RESULTS).keys() == {"zoo/long/0", "zoo/long/1"}


def test_rows_load_their_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_all", lambda table, jobs, *_: len(jobs))
    with registered_for_now():
        assert run.main(["zoo", "--row", "mnist-uniform", "--seeds", "1"]) == 1
        assert loaded_plugins() == ()
        assert run.main(["zoo", "--row", "azimuth-uniform", "--seeds", "2"]) == 2
        assert [Path(name).name for name in loaded_plugins()] == ["viewpoints.py"]
        assert find_dataset("viewpoints-azimuth")[0].in_shape == (1, 48, 48)
