"""Run or resume the rows of a table, each with several seeds.

    python experiments/run.py --list
    python experiments/run.py mnist --seeds 3 --jobs 2
    python experiments/run.py mnist --row compact --cluster tcp://192.168.0.1:8786
    python experiments/run.py my_rows.py --plugin my_routing.py

Every row gets its first seed before any row its second; finished runs are skipped. Each run has a process of its own,
this script again with --seed, so that it has its own peak of memory and no run can break another.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the package; that of this script is there

from filelock import FileLock, Timeout
from joblib import Parallel, delayed

from experiments.logs import CONFIG, DIVERGED, MEASURES, SUMMARY, is_finished, read_logs, run_folder, same_run
from experiments.report import plural, row_command
from experiments.table import SHIPPED, Row, Table, load_table
from torchcaps.errors import InputError, reason_of, unknown_name
from torchcaps.files import locked, write_json
from torchcaps.machine import usable_cores
from torchcaps.plugins import load_plugin, loaded_plugins, plugin_options
from torchcaps.training.config import override, read_config
from torchcaps.training.progress import PlainProgress, Progress, choose_progress

if TYPE_CHECKING:
    from distributed import Client

#: The exit codes of the process of a run.
DONE, DIVERGES, LOST, BUSY, STOPPED = 0, 3, 4, 75, 143
OUTCOMES = {
    DONE: "done",
    DIVERGES: "diverged",
    LOST: "lost; the same command goes on from its checkpoint",
    BUSY: "another process works on it",
    STOPPED: "stopped; the same command goes on from its checkpoint",
}
#: The processes that this one has started.
_STARTED: list[subprocess.Popen[bytes]] = []


class Job(NamedTuple):
    """A run of a row with one seed."""

    table: Table
    row: Row
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.table.name}/{self.row.name}, seed {self.seed}"


def plan(
    table: Table,
    results: Path = Path("results"),
    *,
    full: bool = False,
    rows: Sequence[str] = (),
    seeds: int | None = None,
) -> list[Job]:
    """The runs of the small rows, of all, or of some: every row's first seed before any row's second.

    Raises:
        InputError: No such row, or a folder that holds a run with other settings than its row.
    """
    by_name = {row.name: row for row in table.rows}
    for name in rows:
        if name not in by_name:
            raise unknown_name(f"row of table {table.name}", name, by_name)
    names = dict.fromkeys(rows) if rows else [row.name for row in table.rows if full or not row.full]
    chosen = [by_name[name] for name in names]
    jobs = [
        Job(table, row, seed, run_folder(results, table.name, row.name, seed))
        for number in range(max([seeds or row.seeds for row in chosen], default=0))
        for row in chosen
        if number < (seeds or row.seeds)
        for seed in [row.first_seed + number]
    ]
    for job in jobs:
        file = job.folder / CONFIG
        if file.exists() and not same_run(read_config(file), job.row, job.seed):
            raise InputError(
                f"{job.folder} holds a run with other settings than row {job.row.name} of table {table.name} has now; "
                "move it away to run the row anew"
            )
    return jobs


# ---- in the process of a run


class NamedLines(PlainProgress):
    """Lines that begin with the name of their run, for runs that print to one place at a time."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def message(self, text: str) -> None:
        """A line, at once."""
        super().message(f"{self.job}: {text}")


def work(job: Job, here: Mapping[str, Any], progress: Progress | None = None) -> int:
    """Train what is not trained yet, and measure it. One process at a time works on a run.

    Args:
        job: The run.
        here: Settings that say where and with what it is computed, not what it is.
        progress: Shows it.

    Returns:
        One of :data:`OUTCOMES`.
    """
    from torchcaps.training import Diverged, Interrupted, load_run, resume, train
    from torchcaps.training.devices import pick_device
    from torchcaps.training.folder import BEST

    folder, row = job.folder, job.row
    here = {**here, "plugins": loaded_plugins()}
    command = row_command(job.table, row.name, job.seed + 1 - row.first_seed, here.get("precision", "auto"))
    common: dict[str, Any] = {"progress": progress, "figures": False, "command": command}
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)):
            if is_finished(folder, row):  # another process has finished it meanwhile
                return DIVERGES if (folder / DIVERGED).exists() else DONE
            if not (folder / CONFIG).exists():
                train(override(row.config(job.seed), here), folder, **common)
            elif not (folder / SUMMARY).exists():
                resume(folder, overrides=here, **common)
            measures = {}
            if row.measures:
                from experiments.measures import measure

                if not (folder / BEST).exists():
                    raise InputError(f"{folder} has no weights to measure; move it away to run it anew")
                run = load_run(folder, device=pick_device(here.get("accelerator", "auto")))
                measures = {
                    kind: measure(run, kind, wanted, here.get("data_dir")) for kind, wanted in row.measures.items()
                }
            config = read_config(folder / CONFIG)
            if config.data_dir is not None:  # a place on this machine
                write_json(folder / CONFIG, dataclasses.replace(config, data_dir=None).to_dict())
            write_json(folder / MEASURES, measures)
            return DONE
    except Diverged as failure:
        write_json(folder / DIVERGED, {"reason": str(failure).partition("; ")[0]})
        return DIVERGES
    except Timeout:
        return BUSY
    except Interrupted:
        return STOPPED


def end_with_caller() -> None:
    """Stop this process, with a checkpoint, once its standard input is closed: its caller has ended."""
    os.read(sys.stdin.fileno(), 1)
    signal.raise_signal(signal.SIGTERM)


# ---- in the process of the user, or in a worker of a cluster


def call(number: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, int]:
    """Run this script in a process of its own; the number of the call, and the exit code."""
    # a process group of its own: the terminal's Ctrl-C ends only this process, and with it, gently, those it started
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        cwd=folder,
        env={**environment, **os.environ},
        process_group=0,
    ) as process:
        _STARTED.append(process)
        return number, process.wait()


def call_on_cluster(client: Client, number: int, *arguments: Any) -> tuple[int, int]:
    """The same by a worker of a cluster."""
    try:
        return client.submit(call, number, *arguments, pure=False).result()
    except (Exception, CancelledError) as error:
        print(f"the cluster did not finish a run: {reason_of(error)}", file=sys.stderr)
        return number, LOST


def run_all(jobs: Sequence[Job], given: argparse.Namespace) -> int:
    """Make the runs that are not finished; the exit code."""
    pending = [job for job in jobs if not is_finished(job.folder, job.row)]
    environment, threads, how = {}, given.jobs, call
    if given.cluster is not None:
        client = connect(given.cluster)
        # a thread waits for each run; joblib's own backend for dask would use this machine where there is one worker
        given.jobs, threads = sum(client.nthreads().values()), max(1, len(pending))
        how = partial(call_on_cluster, client)
    elif given.jobs > 1:
        environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // given.jobs))}
    calls = [delayed(how)(n, command_of(job, given), Path.cwd(), environment) for n, job in enumerate(pending)]
    codes: list[int] = []
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        parallel = Parallel(threads, backend="threading", return_as="generator_unordered", batch_size=1)
        for number, code in parallel(calls):
            codes.append(code)
            words = OUTCOMES.get(code, f"failed, exit code {code}; the same command goes on from its checkpoint")
            print(f"{pending[number]}: {words}; {len(pending) - len(codes)} of {len(jobs)} runs left", flush=True)
    finally:  # after a signal the runs write their checkpoints
        for process in _STARTED:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        for signalled, handler in handlers.items():
            signal.signal(signalled, handler)
    if {*codes} <= {DONE, DIVERGES}:
        own = [] if given.table in SHIPPED else [given.table, *plugin_options(loaded_plugins())]
        report = ["python", "experiments/report.py", *own, "--results", str(given.results)]
        print(f"All {len(jobs)} runs of {given.table} are done. The page of results: {shlex.join(report)}")
    return 0 if {*codes} <= {DONE, DIVERGES, BUSY} else 1


def connect(address: str) -> Client:
    """Connect to a dask scheduler that has workers."""
    try:
        from distributed import Client
    except ImportError:
        raise InputError('--cluster needs the package distributed: pip install "torchcaps[cluster]"') from None
    try:
        client = Client(address, timeout=10)
        client.wait_for_workers(1, timeout=10)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"no dask scheduler with workers answers at {address}: {reason_of(error)}") from None
    return client


def command_of(job: Job, given: argparse.Namespace) -> list[str]:
    """The script and its arguments that make one run."""
    own = [__file__, job.table.source, "--row", job.row.name, "--seed", job.seed, "--results", given.results]
    here = ["--jobs", given.jobs, "--accelerator", given.accelerator, "--precision", given.precision]
    data = [] if given.data_dir is None else ["--data-dir", given.data_dir]
    return list(map(str, [*own, *here, *data, *plugin_options(loaded_plugins())]))


def show_tables() -> int:
    for table in map(load_table, SHIPPED):
        full = sum(row.full for row in table.rows)
        print(f"{table.name}: {table.title}. {plural(len(table.rows) - full, 'small row')}, {full} full.")
    return 0


def show_rows(table: Table, results: Path) -> int:
    for row in table.rows:
        done = plural(len(read_logs(results, table, row)[0]), "run")
        print(f"{row.name:32} {'full' if row.full else 'small':5} {done:7} {row.title}")
    return 0


def stop(number: int, _: object) -> NoReturn:
    """End as a signal asks for."""
    print("Stopping; the same command goes on from here.", flush=True)
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line; the exit code: 0 done, 1 a run failed, 2 wrong input, 130 and 143 stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help=f"{', '.join(SHIPPED)}, or a file of your own")
    parser.add_argument("--list", action="store_true", help="list the tables, or the rows of one")
    parser.add_argument("--full", action="store_true", help="also the rows that need a GPU")
    parser.add_argument("--row", action="append", default=[], help="only this row; may be given several times")
    parser.add_argument("--seeds", type=int, choices=range(1, 1001), metavar="N", help="runs of each row")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, which share the cores")
    parser.add_argument("--cluster", metavar="ADDRESS", help="run on the workers of this dask scheduler")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the runs")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data sets' files")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--precision", choices=("auto", "32", "bf16"), default="auto")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help="registers parts of your own")
    given = parser.parse_args(arguments)
    try:
        for each in given.plugin:
            load_plugin(each)
        if given.table is None:
            if not given.list:
                raise InputError(f"name a table: {', '.join(SHIPPED)}; or give --list")
            return show_tables()
        table = load_table(given.table)
        if given.list:
            return show_rows(table, given.results)
        jobs = plan(table, given.results, full=given.full, rows=given.row, seeds=given.seeds)
        for each in (plugin for job in jobs for plugin in job.row.plugins):
            load_plugin(os.path.relpath(each))  # as it stands in the run's configuration
        if given.seed is None:
            return run_all(jobs, given)
        threading.Thread(target=end_with_caller, daemon=True).start()
        job = jobs[0]._replace(seed=given.seed, folder=jobs[0].folder.with_name(f"seed-{given.seed}"))
        here = {"accelerator": given.accelerator, "precision": given.precision, "data_dir": given.data_dir}
        here = {name: value for name, value in here.items() if value is not None}
        return work(job, here, NamedLines(job) if given.jobs > 1 else choose_progress())
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
