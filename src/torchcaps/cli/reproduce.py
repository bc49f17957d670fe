"""``torchcaps reproduce``: the paper's tables, run again, and the page of results."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.cli.base import Command, Stopped
from torchcaps.cli.fields import whole_numbers
from torchcaps.cli.output import add_row, count, print_pairs, print_table, print_title, say, table
from torchcaps.cli.runs import PATH, accelerator_option, refuse_options
from torchcaps.errors import InputError
from torchcaps.files import user_path
from torchcaps.ranges import PROCESSES, Range

if TYPE_CHECKING:
    from torchcaps.reproduce import Budget, Job, Outcome, Reproduction, Table, Timing, Workers

#: Options that only say which runs are made, and how.
_OF_RUNS = ("budget", "seeds", "rows", "out", "data_dir", "accelerator", "precision", "jobs", "cluster", "estimate")


@click.command(
    "reproduce",
    cls=Command,
    short_help="Run the paper's tables again; write the page of results.",
    examples=(
        ("reproduce --list", "the tables and what they ask"),
        ("reproduce mnist", "a whole table in its small budget, or the rest of it"),
        ("reproduce mnist --jobs 4", "four runs at a time, which share this machine's cores"),
        ("reproduce mnist --cluster tcp://192.168.0.1:8786", "on the workers of a dask cluster"),
        ("reproduce mnist --budget full --seeds 5", "at the published size; for a GPU"),
        ("reproduce mnist --budget full --estimate", "how long that would take here"),
        ("reproduce mnist --row compact-r1 --row compact-r3", "some rows only"),
        ("reproduce --report", "write docs/results.md from the logs again"),
    ),
)
@click.argument("table_name", metavar="[TABLE]", required=False)
@click.option(
    "--budget",
    type=click.Choice(["small", "full"]),
    default="small",
    help="Rows for a computer without a GPU, or the published settings.",
)
@click.option(
    "--seeds",
    type=whole_numbers(Range(1, 1000)),
    help="Runs of each row, with seeds from 0.  [default: 3 of a small budget, 5 of a full one, unless the row says]",
)
@click.option("--row", "rows", metavar="ROW", multiple=True, help="Only this row; may be given several times.")
@click.option("--out", type=PATH, default=Path("runs/reproduce"), help="Folder of the run folders.")
@click.option("--results", type=PATH, default=Path("results"), help="Folder of the logs.")
@click.option(
    "--page",
    type=PATH,
    help="The page of results.  [default: docs/results.md for the logs in results, else RESULTS/results.md]",
)
@click.option("--data-dir", metavar="DIR", help="Folder that holds the data sets' files.")
@accelerator_option
@click.option(
    "--precision",
    type=click.Choice(["auto", "32", "bf16"]),
    default="auto",
    help="float32 or bfloat16; auto is bfloat16 on GPUs that have it.",
)
@click.option("--jobs", type=whole_numbers(PROCESSES), default=1, help="Runs at a time, each in a process of its own.")
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Run on the workers of this dask scheduler, which share the folders --out and --results with this machine "
    "(extra torchcaps[cluster]).",
)
@click.option(
    "--estimate", is_flag=True, help="Only time a step of each row that is left, and put on the page how long it takes."
)
@click.option("--list", "listed", is_flag=True, help="List the tables, or the rows of TABLE, and what is done.")
@click.option("--report", is_flag=True, help="Only write the page of results and its figures from the logs.")
def reproduce(
    table_name: str | None,
    budget: Budget,
    seeds: int | None,
    rows: tuple[str, ...],
    out: Path,
    results: Path,
    page: Path | None,
    data_dir: str | None,
    accelerator: str,
    precision: str,
    jobs: int,
    cluster: str | None,
    estimate: bool,
    listed: bool,
    report: bool,
) -> None:
    """Run or resume all runs of a table of results, log them, and write the page of results from the logs.

    What is done is skipped; every row gets its first seed before any row its second. A run that fails leaves the
    others alone. After Ctrl-C the same command goes on. Several commands may work on one table at a time, each on
    other runs. A run folder is OUT/TABLE/ROW/seed-N, its log RESULTS/TABLE/ROW/seed-N.
    """
    from torchcaps.reproduce import Interrupted, Workers, get_table, list_tables, plan, write_report

    if report:
        if table_name is not None or listed:
            raise InputError("--report writes the page of all tables; leave TABLE and --list out")
        refuse_options(_OF_RUNS, "is for running a table, not for --report")
        files = write_report(results, page)
        say(f"wrote {files[0]} and {count(len(files) - 1)} figures")
        return
    if table_name is None:
        if not listed:
            raise InputError(f"name a table to reproduce: {', '.join(list_tables())}; or give --list or --report")
        refuse_options((*_OF_RUNS, "results", "page"), "is for one table, not for the list of all")
        for each in map(get_table, list_tables()):
            print_title(each.name)
            small, full = len(each.rows_of("small")), len(each.rows_of("full"))
            print_pairs([("", each.question), ("", f"{small} rows in the small budget, {full} in the full one.")])
        return
    wanted = get_table(table_name)
    if listed:
        refuse_options((*_OF_RUNS, "page"), "is for running a table, not for --list")
        _list_rows(wanted, results)
        return
    if cluster is not None:
        refuse_options(("jobs",), "is for this machine, and the cluster's workers have as many runs as threads")
        out, data_dir = out.absolute(), data_dir and str(user_path(data_dir).absolute())
    planned = plan(
        wanted,
        budget=budget,
        seeds=seeds,
        rows=rows,
        out=out,
        results=results if cluster is None else results.absolute(),
        data_dir=data_dir,
        accelerator=accelerator,
        precision=precision,
    )
    try:
        with Workers(jobs, cluster) as workers:
            timings = _show_estimate(planned, workers)
            if estimate:
                _write_estimate(planned, timings, results, page)
            else:
                _work(planned, workers, results, page)
    except Interrupted as stop:
        kept = "nothing was written" if estimate else "the same command goes on from here"
        raise Stopped(f"stopped; {kept}", stop.exit_code) from stop


def _show_estimate(planned: Reproduction, workers: Workers) -> dict[str, Timing]:
    """Show what is left to do, and how long it will take."""
    from torchcaps.training.progress import duration

    pending = planned.pending
    if not pending:
        return {}
    say(f"Timing a step of each row of {planned.table.name} …")
    timings = planned.estimate(workers)
    runs = {name: sum(job.row.name == name for job in pending) for name in timings}
    rows = table("row", "runs left", "one takes about", "together")
    for name, timing in timings.items():
        add_row(rows, name, runs[name], duration(timing.seconds), duration(runs[name] * timing.seconds))
    together = sum(runs[name] * timing.seconds for name, timing in timings.items())
    add_row(rows, "all", len(pending), "", duration(together), style="bold")
    print_table(rows, f"{planned.table.title}: time of training, one run at a time")
    return timings


def _write_estimate(planned: Reproduction, timings: dict[str, Timing], results: Path, page: Path | None) -> None:
    """Put the times beside the logs, and on the page."""
    from torchcaps.reproduce import write_report
    from torchcaps.reproduce.estimate import write_timings

    if not timings:
        say(f"All {len(planned.jobs)} runs of {planned.table.name} are done; there is nothing to time.")
        return
    file = write_timings(results, planned.table, timings)
    say("", f"Times: {file}, page: {write_report(results, page, redraw=[])[0]}")


def _work(planned: Reproduction, workers: Workers, results: Path, page: Path | None) -> None:
    """Make the runs that are left, and write the page after each; a failed run is raised after all others."""
    from torchcaps.reproduce import Interrupted, Outcome, write_report

    total, left, name = len(planned.jobs), len(planned.pending), planned.table.name
    ended: Counter[Outcome] = Counter()
    busy: list[Job] = []
    failures: list[Exception] = []
    for job, outcome in planned.run(workers):
        if outcome is Outcome.BUSY:
            busy.append(job)
            continue
        left -= 1
        if isinstance(outcome, Outcome):
            ended[outcome] += 1
            say(f"{job}: {outcome.value}; {left} of {total} runs left")
        else:
            failures.append(outcome)
            say(f"{job} failed: {outcome}; {left} of {total} runs left", err=True)
        write_report(results, page, redraw=[name])
    written = write_report(results, page, redraw=[name])
    if failures:
        raise failures[0]
    if ended[Outcome.STOPPED]:
        raise Interrupted(128 + signal.SIGTERM)
    say("")
    if busy:
        say(f"Other processes still work on {', '.join(map(str, busy))}.")
    else:
        now = f"{ended.total()} now" + (f", of which {lost} diverged" if (lost := ended[Outcome.DIVERGED]) else "")
        say(f"All {total} runs of {name} are done ({now}). Logs: {results / name}, page: {written[0]}")


def _list_rows(wanted: Table, results: Path) -> None:
    from torchcaps.reproduce.logs import counted, read_logs

    rows = table("row", "what", "budgets", "seeds done", left=3)
    for row in wanted.rows:
        done = len(counted(read_logs(results, wanted, row), row))
        add_row(rows, row.name, row.title, ", ".join(row.budgets), done or "–")
    print_table(rows, wanted.title)
    for budget, words in wanted.budgets.items():
        print_pairs([(budget.capitalize(), words)])
