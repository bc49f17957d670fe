"""``torchcaps reproduce``: the paper's tables, run again, and the page of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps.cli.base import Command, Stopped
from torchcaps.cli.fields import whole_numbers
from torchcaps.cli.output import add_row, count, print_pairs, print_table, print_title, say, table
from torchcaps.cli.runs import PATH, accelerator_option, refuse_options
from torchcaps.errors import InputError
from torchcaps.ranges import Range

if TYPE_CHECKING:
    from torchcaps.reproduce import Budget, Estimate, Job, Outcome, Reproduction, Table

#: Options that only say which runs are made, and how.
_OF_RUNS = ("budget", "seeds", "rows", "out", "data_dir", "accelerator", "estimate")


@click.command(
    "reproduce",
    cls=Command,
    short_help="Run the paper's tables again; write the page of results.",
    examples=(
        ("reproduce --list", "the tables and what they ask"),
        ("reproduce mnist", "a whole table in its small budget, or the rest of it"),
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
    show_default=True,
    help="Rows for a computer without a GPU, or the published settings.",
)
@click.option(
    "--seeds",
    type=whole_numbers(Range(1, 1000)),
    help="Runs of each row, with seeds from 0.  [default: 3 of a small budget, 5 of a full one]",
)
@click.option("--row", "rows", metavar="ROW", multiple=True, help="Only this row; may be given several times.")
@click.option("--out", type=PATH, default=Path("runs/reproduce"), show_default=True, help="Folder of the run folders.")
@click.option("--results", type=PATH, default=Path("results"), show_default=True, help="Folder of the logs.")
@click.option(
    "--page",
    type=PATH,
    help="The page of results.  [default: docs/results.md for the logs in results, else RESULTS/results.md]",
)
@click.option("--data-dir", metavar="DIR", help="Folder that holds the data sets' files.")
@accelerator_option
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
    estimate: bool,
    listed: bool,
    report: bool,
) -> None:
    """Run or resume all runs of a table of results, log them, and write the page of results from the logs.

    What is done is skipped; every row gets its first seed before any row its second. After Ctrl-C the same command goes
    on. Several processes may work on one table at a time, each on other runs. A run folder is OUT/TABLE/ROW/seed-N, its
    log RESULTS/TABLE/ROW/seed-N.
    """
    from torchcaps.reproduce import get_table, list_tables, plan, write_report

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
        _list_tables([get_table(name) for name in list_tables()])
        return
    wanted = get_table(table_name)
    if listed:
        refuse_options((*_OF_RUNS, "page"), "is for running a table, not for --list")
        _list_rows(wanted, results)
        return
    planned = plan(
        wanted,
        budget=budget,
        seeds=seeds,
        rows=rows,
        out=out,
        results=results,
        data_dir=data_dir,
        accelerator=accelerator,
    )
    if estimate:
        _estimate(planned, results, page)
    else:
        _work(planned, results, page)


def _estimate(planned: Reproduction, results: Path, page: Path | None) -> None:
    """Time what is left, and put it beside the logs."""
    from torchcaps.reproduce import Interrupted, write_report
    from torchcaps.reproduce.timings import write_timings

    try:
        found = _show_estimate(planned)
    except Interrupted as stop:
        raise Stopped("stopped; nothing was written", stop.exit_code) from stop
    if not found:
        say(f"All {len(planned.jobs)} runs of {planned.table.name} are done; there is nothing to time.")
        return
    file = write_timings(results, planned.table, {each.row.name: each.timing for each in found})
    say("", f"Times: {file}, page: {write_report(results, page, redraw=[])[0]}")


def _work(planned: Reproduction, results: Path, page: Path | None) -> None:
    from torchcaps.reproduce import Interrupted, Outcome, write_report

    total, name = len(planned.jobs), planned.table.name

    def before(job: Job, left: int) -> None:
        say("")
        print_title(f"{job}: {left} of {total} runs left")

    def after(job: Job, outcome: Outcome) -> None:
        if outcome is Outcome.DIVERGED:
            say(f"{job} diverged, which is logged; the others go on")
        write_report(results, page, redraw=[name])

    try:
        _show_estimate(planned)
        tally = planned.run(before=before, after=after)
    except Interrupted as stop:
        raise Stopped("stopped; the same command goes on from here", stop.exit_code) from stop
    written = write_report(results, page, redraw=[name])
    say("")
    if tally.busy:
        say(f"Other processes still work on {', '.join(map(str, tally.busy))}.")
    else:
        diverged = f", of which {len(tally.diverged)} diverged" if tally.diverged else ""
        done = len(tally.done) + len(tally.diverged)
        say(f"All {total} runs of {name} are done ({done} now{diverged}). Logs: {results / name}, page: {written[0]}")


def _show_estimate(planned: Reproduction) -> list[Estimate]:
    """What is left to do, and how long it will take."""
    from torchcaps.training.progress import duration

    pending = planned.pending
    if not pending:
        return []
    say(f"Timing a step of each row of {planned.table.name} …")
    found = planned.estimate()
    rows = table("row", "runs left", "one takes about", "together")
    for each in found:
        add_row(rows, each.row.name, each.runs, duration(each.seconds), duration(each.runs * each.seconds))
    add_row(rows, "all", len(pending), "", duration(sum(each.runs * each.seconds for each in found)), style="bold")
    print_table(rows, f"{planned.table.title}: time of training, in one process")
    return found


def _list_tables(tables: list[Table]) -> None:
    for each in tables:
        small, full = (len(each.rows_of(budget)) for budget in ("small", "full"))
        print_title(each.name)
        print_pairs([("", each.question), ("", f"{small} rows in the small budget, {full} in the full one.")])


def _list_rows(wanted: Table, results: Path) -> None:
    from torchcaps.reproduce.logs import counted, read_logs

    rows = table("row", "what", "budgets", "seeds done", left=3)
    for row in wanted.rows:
        done = len(counted(read_logs(results, wanted, row), row))
        add_row(rows, row.name, row.title, ", ".join(row.budgets), done or "–")
    print_table(rows, wanted.title)
    for budget, words in wanted.budgets.items():
        print_pairs([(budget.capitalize(), words)])
