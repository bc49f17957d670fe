"""Run or resume the rows of a table, each with several seeds.

    python experiments/run.py mnist --seeds 3 --jobs 2
    python experiments/run.py mnist --row compact --cluster tcp://192.168.0.1:8786
    python experiments/run.py my_rows.py --plugin my_routing.py

A finished run is a line in RESULTS/runs.jsonl and is not run again. Each run is a separate process (this script with
--job), so its peak of memory is measured separately and no run can break another.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for imports of experiments

from experiments.measures import measure
from experiments.store import RESULTS, RunLog, add_run, is_finished, is_run_of, read_runs, settings, summary_of
from experiments.table import Row, Table
from experiments.tables import SHIPPED, load_table
from torchcaps.errors import InputError, reason_of
from torchcaps.files import read_json
from torchcaps.machine import usable_cores
from torchcaps.plugins import load_plugin, loaded_plugins
from torchcaps.training import Diverged, Interrupted, Progress, load_run, resume, train
from torchcaps.training.config import override, read_config
from torchcaps.training.devices import pick_device
from torchcaps.training.folder import BEST, METRICS, SUMMARY
from torchcaps.training.progress import choose_progress

CONFIG = "config.json"
#: The exit codes of the process of a run.
DONE, DIVERGES, STOPPED = 0, 3, 143
REMOVE = "remove it to run it again, or give another folder with --results"
GOES_ON = "the same command resumes from its checkpoint"
OUTCOMES = {DONE: "done", DIVERGES: "diverged", STOPPED: f"stopped; {GOES_ON}"}
#: Processes started by this one.
_STARTED: list[subprocess.Popen[bytes]] = []


class Job(NamedTuple):
    """A run of a row with one seed."""

    table: Table
    row: Row
    seed: int
    results: Path = RESULTS

    @property
    def name(self) -> str:
        """``TABLE/ROW/SEED``, as in ``runs.jsonl``."""
        return f"{self.table.name}/{self.row.name}/{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.results / self.table.name / self.row.name / f"seed-{self.seed}"


def plan(
    table: Table, results: Path = RESULTS, *, full: bool = False, rows: Sequence[str] = (), seeds: int | None = None
) -> list[Job]:
    """Return the runs of the small rows, of all rows, or of some; first seeds of all rows come first."""
    chosen = [table[name] for name in dict.fromkeys(rows)] or [row for row in table.rows if full or not row.full]
    turns = range(max((seeds or row.seeds for row in chosen), default=0))
    jobs = [Job(table, row, row.first_seed + n, results) for n in turns for row in chosen if n < (seeds or row.seeds)]
    runs = read_runs(results)
    for job in jobs:
        recorded = [runs[job.name].config] if job.name in runs else []
        if (job.folder / CONFIG).exists():
            recorded.append(settings(read_config(job.folder / CONFIG)))
        if not all(is_run_of(config, job.row, job.seed) for config in recorded):
            raise InputError(f"{results} has a run {job.name} with other settings than the row has now; {REMOVE}")
    return jobs


# ---- in the process of a run


def work(job: Job, here: Mapping[str, Any], progress: Progress | None = None) -> int:
    """Train or resume a run, measure and record it, and return the exit code.

    ``here`` are settings of this machine, which do not define the run.
    """
    folder, row = job.folder, job.row
    if job.name in read_runs(job.results) and not (folder / BEST).exists():
        raise InputError(f"{folder} has no weights to measure for the run {job.name}; {REMOVE}")
    here = {**here, "plugins": loaded_plugins()}
    config = override(row.config(job.seed), here)
    command = job.table.again(row, job.seed, config.precision)
    common: dict[str, Any] = {"progress": progress, "figures": False, "command": command}
    results: dict[str, Any] = {}
    try:
        if not (folder / CONFIG).exists():
            train(config, folder, **common)
        elif not (folder / SUMMARY).exists():
            resume(folder, overrides=here, **common)
        results["summary"] = summary_of(read_json(folder / SUMMARY, "summary"))
        if row.measures:
            run = load_run(folder, device=pick_device(config.accelerator))
            measures = {kind: measure(run, kind, wanted, config.data_dir) for kind, wanted in row.measures.items()}
            results["measures"] = measures
    except Diverged as failure:
        results["diverged"] = str(failure).partition("; ")[0]
    except Interrupted:
        return STOPPED
    config = read_config(folder / CONFIG)
    add_run(job.results, RunLog(job.table.name, row.name, job.seed, settings(config), **results), folder / METRICS)
    return DIVERGES if "diverged" in results else DONE


def end_with_caller() -> None:
    """Stop this process, with a checkpoint, when its standard input is closed because its caller has ended."""
    os.read(sys.stdin.fileno(), 1)
    signal.raise_signal(signal.SIGTERM)


# ---- in the process of the user, or in a worker of a cluster


def call(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run this script as a separate process, and return its exit code."""
    # a separate process group, so that Ctrl-C reaches only this process, which then stops its runs with a checkpoint
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, cwd=folder, env={**environment, **os.environ}, process_group=0
    ) as process:
        _STARTED.append(process)
        return process.wait()


def run_all(table: Table, jobs: Sequence[Job], given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Make the unfinished runs, and return the exit code."""
    runs = read_runs(given.results)
    pending = [job for job in jobs if not is_finished(runs.get(job.name), job.row)]
    environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // given.jobs))} if given.jobs > 1 else {}
    command = [sys.executable, __file__, *arguments, "--job"]
    executor = connect(given.cluster) if given.cluster else ThreadPoolExecutor(given.jobs)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    calls = {executor.submit(call, [*command, job.name], Path.cwd(), environment): job for job in pending}
    codes: list[int] = []
    try:
        for finished in as_completed(calls):
            error = finished.exception()
            if error is not None:  # the cluster lost the run
                print(reason_of(error), file=sys.stderr)
            codes.append(1 if error is not None else finished.result())
            words = OUTCOMES.get(codes[-1], f"failed, exit code {codes[-1]}; {GOES_ON}")
            print(f"{calls[finished].name}: {words}; {len(pending) - len(codes)} of {len(jobs)} runs left", flush=True)
    finally:  # after a signal the runs write their checkpoints
        for each in calls:
            each.cancel()
        for process in _STARTED:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    if not {*codes} <= {DONE, DIVERGES}:
        return 1
    report = table.command("report", "--results", given.results)
    print(f"All {len(jobs)} runs of {given.table} are done. Their table: {report}")
    return 0


def connect(address: str) -> Executor:
    """Connect to a dask scheduler with at least one worker."""
    try:
        from distributed import Client
    except ImportError:
        raise InputError('--cluster needs the package distributed: pip install "torchcaps[cluster]"') from None
    try:
        client = Client(address, timeout=10)
        client.wait_for_workers(1, timeout=10)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"no dask scheduler with workers answers at {address}: {reason_of(error)}") from None
    return client.get_executor(pure=False)


def stop(number: int, _: object) -> NoReturn:
    """Exit on a signal."""
    print("Stopping; the same command resumes from here.", flush=True)
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0 done, 1 a run failed, 2 wrong input, 130 and 143 stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help=f"{', '.join(SHIPPED)}, or a file of your own")
    parser.add_argument("--full", action="store_true", help="include the rows that need a GPU")
    parser.add_argument("--row", action="append", default=[], help="run only this row; can be repeated")
    parser.add_argument("--seeds", type=int, choices=range(1, 1001), metavar="N", help="runs of each row")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time, which share the cores")
    parser.add_argument("--cluster", metavar="ADDRESS", help="run on the workers of this dask scheduler")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=f"folder of the runs ({RESULTS})")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the data sets")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--precision", choices=("auto", "32", "bf16"))
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help="registers parts of your own")
    given = parser.parse_args(arguments)
    try:
        for each in given.plugin:
            load_plugin(each)
        table = load_table(given.table)
        jobs = plan(table, given.results, full=given.full, rows=given.row, seeds=given.seeds)
        for each in (plugin for job in jobs for plugin in job.row.plugins):
            load_plugin(os.path.relpath(each))  # relative, as in the configuration of the run
        if given.job is None:
            return run_all(table, jobs, given, arguments)
        threading.Thread(target=end_with_caller, daemon=True).start()
        (job,) = (job for job in jobs if job.name == given.job)
        names = ("accelerator", "precision", "data_dir")
        here = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        alone = given.jobs == 1 and given.cluster is None  # otherwise the lines of several runs would be mixed
        return work(job, here, choose_progress() if alone else Progress())
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
