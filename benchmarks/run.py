"""All ratios of docs/speed.md in one command: routing, the whole step, inference, memory, an epoch.

    python benchmarks/run.py                        # everything: about 20 minutes of an otherwise idle machine
    python benchmarks/run.py training_step epoch    # some parts: routing, training_step, epoch
    python benchmarks/run.py --images 6000          # a shorter epoch; --rounds, --no-large shorten the other parts
    python benchmarks/run.py --quick                # every line of it, tiny: the numbers mean nothing

Correctness comes first: outputs, losses and gradients of all contenders are compared, and a difference stops the run
before anything is timed (exit status 1). Then the contenders of each comparison run in turns, round by round. A ratio
is the median over the rounds of the ratio within a round, so that a machine that others use, too, disturbs it little;
the CSVs hold the times.

It writes a CSV for each part, and, when all parts ran, the table of docs/speed.md; --quick only where --out and --page
say.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import epoch
import routing
import torch
import training_step
from measuring import (
    FOLDER,
    QUICK,
    Figure,
    Plan,
    environment,
    get_working_memory,
    markdown,
    replace_between,
    set_up,
    write_csv,
)

PARTS = {"routing": routing, "training_step": training_step, "epoch": epoch}
BEGIN, END = "<!-- written by benchmarks/run.py -->", "<!-- end of what benchmarks/run.py writes -->"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    set_up(options.threads, options.working_memory)
    plan = _plan(options)
    names = [name for name in PARTS if name in (options.parts or PARTS)]
    page = options.page if len(names) == len(PARTS) else None
    text = "" if page is None else page.read_text(encoding="utf-8")
    if page is not None:
        replace_between(text, BEGIN, END, "")  # has a place for the table: find that out now
    wrong = [message for name in names for message in PARTS[name].check(plan)]
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1

    facts = environment()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    figures: list[Figure] = []
    for name in names:
        part = PARTS[name].measure(plan)
        figures += part.figures
        for figure in part.figures:
            what, measured, goal, reached, *_ = figure.cells
            print(f"{what:<72}{measured:>8}   {goal:<7} {reached}", flush=True)
        if options.out is not None:
            write_csv(options.out / f"{name}.csv", [record | facts for record in part.records])
    if page is not None:
        page.write_text(replace_between(text, BEGIN, END, markdown(figures, facts)), encoding="utf-8")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--batch", type=int, help="images of a step and of the layer that is routed alone (128)")
    parser.add_argument("--rounds", type=int, help="of the step and of routing alone (21)")
    parser.add_argument("--images", type=int, help="of the epoch, in all its rounds together (60,000)")
    parser.add_argument("--no-large", action="store_true", help="leave the large layer out, which needs 17 GiB")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--working-memory", type=float, default=get_working_memory(), help="MiB of routing")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--out", type=Path, help="folder of the CSVs (results/speed)")
    parser.add_argument("--page", type=Path, help="page that holds the table (docs/speed.md)")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if not options.quick:
        options.out = options.out or FOLDER.parent / "results" / "speed"
        options.page = options.page or FOLDER.parent / "docs" / "speed.md"
    return options


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan()
    if options.batch is not None:
        plan = dataclasses.replace(plan, layer=plan.layer._replace(B=options.batch))
    if options.rounds is not None:
        plan = dataclasses.replace(plan, rounds=options.rounds)
    if options.images is not None:
        plan = dataclasses.replace(plan, images=options.images)
    if options.no_large:
        plan = dataclasses.replace(plan, large=None)
    return plan


if __name__ == "__main__":
    sys.exit(main())
