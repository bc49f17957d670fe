"""All ratios of docs/speed.md in one command: convolutions, step, inference, memory, epoch, squash and routing.

    python benchmarks/run.py                        # everything: about 10 minutes of an otherwise idle machine
    python benchmarks/run.py --isa avx2             # the same as on a CPU without AVX-512: the page's other column
    python benchmarks/run.py training_step epoch    # some parts, of these and convolution, choice, squash, routing
    python benchmarks/run.py --no-large --rounds 5  # shorter; --images for the epoch
    python benchmarks/run.py --quick                # every line of it, tiny: the numbers mean nothing
    python benchmarks/run.py --rewrite              # measure nothing, write the page again from what lies there

Correctness comes first: outputs, losses and gradients of all contenders are compared, and a difference stops the run
before anything is timed (exit status 1). Then the contenders of each comparison run in turns, round by round. A ratio
is the median over the rounds of the ratio within a round, so that a machine that others use, too, disturbs it little;
the CSVs hold the times.

What was measured lies in runs/speed/ISA, ISA being what torch computes with (avx512, avx2, ...): CSVs for each part
and figures.json. The tables of docs/speed.md are made from all such folders, so a run replaces what its parts measured
in its own column, and nothing else. --quick writes only where --out and --page say.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import choice
import convolution
import epoch
import routing
import squash
import torch
import training_step
from measuring import (
    AS_AVX2,
    FOLDER,
    QUICK,
    Part,
    Plan,
    cpu_flags,
    environment,
    get_working_memory,
    instruction_set,
    multiplies_bf16,
    set_up,
)
from speed_page import ROWS, as_read, check_page, write_page, write_part

PARTS = {
    "convolution": convolution,
    "choice": choice,
    "training_step": training_step,
    "epoch": epoch,
    "squash": squash,
    "routing": routing,
}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    if options.page is not None:
        check_page(options.page)  # has a place for the tables: find that out now
    if options.rewrite:
        write_page(options.page, options.out)
        return 0
    if options.isa == "avx2" and any(os.environ.get(name) != value for name, value in AS_AVX2.items()):
        # torch reads these when it is loaded, so it takes another process
        command = [sys.executable, str(FOLDER / "run.py"), *given]
        return subprocess.run(command, env=os.environ | AS_AVX2, check=False).returncode
    if options.isa == "avx2" and instruction_set() != "avx2":
        print(f"--isa avx2: torch computes with {instruction_set()} on this CPU all the same", file=sys.stderr)
        return 2
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    set_up(options.threads, options.working_memory)
    plan = _plan(options)
    bf16 = "in hardware" if multiplies_bf16() else "emulated"
    print(f"CPU: {' '.join(cpu_flags()) or 'its flags are not known'}")
    print(f"torch computes with: {instruction_set()}; bfloat16: {bf16}")
    names = [name for name in PARTS if name in (options.parts or PARTS)]
    wrong = [message for name in names for message in PARTS[name].check(plan)]
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1

    facts = environment() | {"options": _shown(options)}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for name in names:
        start = time.perf_counter()
        part = PARTS[name].measure(plan)
        _print(name, part, time.perf_counter() - start)
        if options.out is not None:
            write_part(options.out / instruction_set(), name, part, facts)
            if options.page is not None:
                write_page(options.page, options.out)
    return 0


def _print(name: str, part: Part, seconds: float) -> None:
    for row in ROWS:
        if row.what in part.figures:
            value = as_read(part.figures[row.what])["value"]
            print(f"{row.what:<94}{value:>8.3g}   {row.bound:<7} {row.reached(value)}")
        elif row.what in part.left_out:
            print(f"{row.what:<94}{part.left_out[row.what]}")
    print(f"({name}: {seconds:.0f} s)", flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument(
        "--isa", choices=("native", "avx2"), default="native", help="time this CPU as one that has no AVX-512"
    )
    parser.add_argument("--batch", type=int, help="images of a step and of what is timed alone (128)")
    parser.add_argument("--rounds", type=int, help="of the step, of routing alone and of each convolution (11)")
    parser.add_argument("--images", type=int, help="of the epoch, in all its rounds together (5,120)")
    parser.add_argument("--no-large", action="store_true", help="leave the large layer out, which needs 17 GiB")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--working-memory", type=float, default=get_working_memory(), help="MiB of routing")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--rewrite", action="store_true", help="only write the page, from what was measured before")
    parser.add_argument("--out", type=Path, help="folder of the instruction sets' folders (runs/speed)")
    parser.add_argument("--page", type=Path, help="page that holds the tables (docs/speed.md)")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if not options.quick:
        options.out = options.out or FOLDER.parent / "runs" / "speed"
        options.page = options.page or FOLDER.parent / "docs" / "speed.md"
    if options.page is not None and options.out is None:
        parser.error("--page is made from what lies in --out: give that, too")
    if options.rewrite and options.page is None:
        parser.error("--rewrite needs --page and --out where --quick is given")
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


def _shown(options: argparse.Namespace) -> str:
    """What differs from the command without options, as far as it changes what is measured."""
    named = [f"--{name} {getattr(options, name)}" for name in ("batch", "rounds", "images") if getattr(options, name)]
    flags = [f"--{name.replace('_', '-')}" for name in ("no_large", "quick") if getattr(options, name)]
    return " ".join(named + flags)


if __name__ == "__main__":
    sys.exit(main())
