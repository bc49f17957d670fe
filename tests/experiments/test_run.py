"""Runs in processes of their own: here, and on the workers of a dask cluster."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from experiments import run
from experiments.table import Table, load_table
from support import registered_for_now
from torchcaps.datasets import find_dataset
from torchcaps.errors import InputError
from torchcaps.files import read_json, write_json
from torchcaps.plugins import loaded_plugins
from torchcaps.training import Progress, load_run

HERE = {"accelerator": "cpu"}
HEAD = """
from experiments.table import Row, Table
from experiments.tables import zoo

TINY = {"conv_channels": 4, "primary_types": 2, "decoder": False, "limit_train": 100, "limit_test": 40}
TINY |= {"validation_size": 40, "batch_size": 50, "epochs": 2, "max_shift": 0}
"""
ROWS = f"""{HEAD}
def brightness(run, test):
    return {{"mean": float(test.images.float().mean())}}

OWN = Row("azimuth-own", "mine", "sabour2017", TINY | {{"routing": "mine"}}, data="digits",
          measures={{"rotation": 5, "light": brightness}})
WILD = Row("wild", "diverges", "sabour2017", TINY | {{"learning_rate": 1e30}}, data="digits")
TABLE = Table(name="zoo", title="The zoo and mine", rows=(*zoo.TABLE.rows, OWN, WILD))
"""
PLUGIN = """
import torchcaps
from torchcaps.nn import DynamicRouting

@torchcaps.register("routing", "mine")
class Mine(DynamicRouting):
    pass
"""
LONG = f"""{HEAD}
TABLE = Table(name="long", title="Long", rows=(
    Row("long", "long", "sabour2017", TINY | {{"epochs": 30}}, data="digits", seeds=2),
))
"""


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, run.__file__, *words, "--accelerator", "cpu"]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*words: str) -> tuple[int, str]:
    process = start(*words)
    out, _ = process.communicate(timeout=200)
    return process.returncode, out


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file}"
        time.sleep(0.05)


# plans


def test_every_row_gets_its_first_seed_before_any_its_second(tiny: Table) -> None:
    jobs = run.plan(tiny, Path("r"), seeds=2)
    assert [(job.row.name, job.seed) for job in jobs] == [
        ("plain", 0),
        ("measured", 0),
        ("plain", 1),
        ("measured", 1),
    ]
    assert jobs[2].folder == Path("r/tiny/plain/seed-1")
    assert {job.row.name for job in run.plan(tiny, full=True)} == {"plain", "measured", "large"}
    assert [job.row.name for job in run.plan(tiny, rows=("large", "plain", "large"), seeds=1)] == ["large", "plain"]


def test_a_row_may_say_how_many_seeds_it_has_and_where_they_begin(tiny: Table) -> None:
    a = dataclasses.replace(tiny.rows[0], name="a", seeds=1, first_seed=100)
    table = dataclasses.replace(tiny, rows=(a, dataclasses.replace(a, name="b", seeds=2, first_seed=0)))
    assert [(job.row.name, job.seed) for job in run.plan(table)] == [("a", 100), ("b", 0), ("b", 1)]


def test_a_plan_that_cannot_be(tiny: Table, write_log) -> None:
    with pytest.raises(InputError, match='no row of table tiny "plane"; did you mean "plain"'):
        run.plan(tiny, rows=("plane",))
    config = write_log(tiny, "measured", 1) / "config.json"
    config.write_text(config.read_text().replace('"epochs": 1', '"epochs": 5'))
    with pytest.raises(InputError, match=r"measured.seed-1 holds a run with other settings"):
        run.plan(tiny)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a table: mnist, routing"),
        (["mnits"], 'did you mean "mnist"'),
        (["mnist", "--row", "compct"], 'did you mean "compact'),
        (["nowhere.py"], "nowhere.py"),
        (["mnist", "--seeds", "0"], "invalid choice: 0"),
        (["mnist", "--cluster", "nonsense"], "no dask scheduler"),
    ],
)
def test_wrong_input_is_said_in_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_tables_and_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == run.main(["robustness", "--list"]) == 0
    out = capsys.readouterr().out
    assert "routing: Routing: softmax axis, initial scale, gradient, iterations. 53 small rows, 53 full.\n" in out
    assert "cnn-twin                         small 0 runs  CNN: compact's stem" in out


# a run, in this process


def job(table: Table, row: str) -> run.Job:
    (made,) = run.plan(table, rows=(row,), seeds=1)
    return made


def test_a_run_is_an_ordinary_run_folder_that_names_no_place(tiny: Table) -> None:
    made = job(tiny, "measured")
    assert run.work(made, HERE, Progress()) == run.DONE
    found = load_run(made.folder)
    assert found.config == dataclasses.replace(made.row.config(0), precision="32", accelerator="cpu")
    summary = read_json(made.folder / "summary.json", "summary")
    assert summary["command"] == "python experiments/run.py tiny.py --row measured --seeds 1 --results runs/again"
    measures = read_json(made.folder / "measures.json", "measures")
    assert {kind: each["num_images"] for kind, each in measures.items()} == {"rotation": 10, "pgd-scores": 5}
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")}
    assert run.work(made, HERE, Progress()) == run.DONE
    assert {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")} == before, "it was finished"
    config = read_json(made.folder / "config.json", "configuration")
    write_json(made.folder / "config.json", config | {"data_dir": "a place on this machine"})
    found = dataclasses.replace(made.row, measures={})
    (made.folder / "measures.json").unlink()
    assert run.work(made._replace(row=found), HERE, Progress()) == run.DONE
    assert read_json(made.folder / "config.json", "configuration") == config


def test_more_is_measured_without_training_where_the_weights_are_there(tiny: Table) -> None:
    made = job(tiny, "measured")
    run.work(made, HERE, Progress())
    trained = (made.folder / "summary.json").read_bytes()
    more = made._replace(row=dataclasses.replace(made.row, measures={"latency": None, "fgsm": 7}))
    assert run.work(more, HERE, Progress()) == run.DONE
    assert (made.folder / "summary.json").read_bytes() == trained
    assert read_json(made.folder / "measures.json", "measures")["fgsm"]["num_images"] == 7
    shutil.rmtree(made.folder / "best")
    with pytest.raises(InputError, match="has no weights to measure; move it away"):
        run.work(made, HERE, Progress())


def test_one_process_at_a_time_works_on_a_run(tiny: Table) -> None:
    made = job(tiny, "plain")
    made.folder.parent.mkdir(parents=True)
    lock = made.folder.with_name(".seed-0.lock")
    with FileLock(lock):
        assert run.work(made, HERE, Progress()) == run.BUSY
        assert not made.folder.exists()
    lock.touch()
    assert run.work(made, HERE, Progress()) == run.DONE, "a lock file that is left behind is no lock"
    assert [path.name for path in made.folder.parent.iterdir()] == ["seed-0"], "and goes at the end"


# processes


def test_rows_of_ones_own_are_run_two_at_a_time_with_a_plugin() -> None:
    Path("rows.py").write_text(ROWS)
    Path("mine.py").write_text(PLUGIN)
    words = ("rows.py", "--row", "azimuth-own", "--row", "wild", "--seeds", "1", "--plugin", "mine.py")
    code, out = finish(*words, "--jobs", "2")
    assert code == 0, out
    assert "zoo/azimuth-own, seed 0: epoch 2/2 " in out
    assert {"zoo/azimuth-own, seed 0: done", "zoo/wild, seed 0: diverged"} <= {
        x.partition(";")[0] for x in out.splitlines()
    }
    folder = Path("results/zoo/azimuth-own/seed-0")
    assert read_json(folder / "config.json", "configuration")["plugins"] == ["mine.py"]
    again = "python experiments/run.py rows.py --row azimuth-own --seeds 1 --results runs/again --plugin mine.py"
    assert read_json(folder / "summary.json", "summary")["command"] == again
    assert list(read_json(folder / "measures.json", "measures")["light"]) == ["mean"]
    assert "became NaN" in read_json(Path("results/zoo/wild/seed-0/diverged.json"), "divergence")["reason"]
    code, out = finish(*words)
    last = "python experiments/report.py rows.py --plugin mine.py --results results"
    assert (code, out) == (0, f"All 2 runs of rows.py are done. The page of results: {last}\n")
    report = [sys.executable, str(Path(run.__file__).with_name("report.py")), *last.split()[2:]]
    subprocess.run(report, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    page = Path("results/results.md").read_text(encoding="utf-8")
    assert "| light: mean |" in page
    assert again.replace("azimuth-own --seeds 1", "ROW --seeds 3") in page


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
@pytest.mark.parametrize("number", [15, 9], ids=["SIGTERM", "SIGKILL"])  # Windows has no name for the second
def test_a_run_whose_command_is_ended_writes_its_checkpoint_and_goes_on(number: int) -> None:
    Path("long.py").write_text(LONG)
    process = start("long.py", "--seeds", "1")
    folder = Path("results/long/long/seed-0")
    wait_for(folder / "metrics.csv")
    process.send_signal(number)
    out, _ = process.communicate(timeout=100)  # the run holds the other end of the pipe until it has ended
    assert process.returncode == (143 if number == signal.SIGTERM else -9), out
    assert (folder / "last.ckpt").exists()
    assert not (folder / "summary.json").exists()
    code, out = finish("long.py", "--seeds", "1")
    assert code == 0, out
    summary = read_json(folder / "summary.json", "summary")
    assert len(summary["resumed_with"]) == 1
    (whole,) = run.plan(load_table("long.py"), Path("other"), seeds=1)
    run.work(whole, HERE, Progress())
    assert summary["test"] == read_json(whole.folder / "summary.json", "summary")["test"]


def test_a_run_that_fails_leaves_the_others_alone() -> None:
    Path("rows.py").write_text(
        f'{HEAD}\nTABLE = Table(name="two", title="", rows=(Row("bad", "", "sabour2017", TINY, data="npz:nowhere.npz"),'
        'Row("good", "", "sabour2017", TINY, data="digits")))\n'
    )
    code, out = finish("rows.py", "--seeds", "1")
    assert code == 1
    assert "nowhere.npz" in out
    assert "two/bad, seed 0: failed, exit code 2" in out
    assert "two/good, seed 0: done; 0 of 2 runs left" in out


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A scheduler with two workers on this machine."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made:
        yield made


def test_the_workers_of_a_cluster_make_the_runs(cluster: Any, tmp_path: Path) -> None:
    Path("long.py").write_text(LONG)
    code, out = finish("long.py", "--cluster", cluster.scheduler_address)
    assert code == 0, out
    done = {line.partition(";")[0] for line in out.splitlines() if line.startswith("long/long")}
    assert done == {"long/long, seed 0: done", "long/long, seed 1: done"}
    assert sorted(path.name for path in tmp_path.joinpath("results/long/long").iterdir()) == ["seed-0", "seed-1"]


def test_rows_load_their_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_all", lambda jobs, given: len(jobs))
    with registered_for_now():
        assert run.main(["zoo", "--row", "mnist-uniform", "--seeds", "1", "--results", str(tmp_path)]) == 1
        assert loaded_plugins() == ()
        assert run.main(["zoo", "--row", "azimuth-uniform", "--seeds", "2", "--results", str(tmp_path)]) == 2
        assert [Path(name).name for name in loaded_plugins()] == ["viewpoints.py"]
        assert find_dataset("viewpoints-azimuth")[0].in_shape == (1, 48, 48)
