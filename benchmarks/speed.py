"""The ratios of benchmarks/README.md: torchcaps beside published code, its own plain ways, and other routings.

    python benchmarks/speed.py                          # all sections: about 45 minutes of an otherwise idle machine
    python benchmarks/speed.py step routing             # some of the sections, which --help lists
    python benchmarks/speed.py --isa avx2               # the same on this CPU without AVX-512
    python benchmarks/speed.py --out speed.jsonl        # appends a line for each ratio
    python benchmarks/speed.py --table speed.jsonl      # measures nothing; prints the table of a file, as Markdown
    python benchmarks/speed.py --quick                  # tiny sizes, to see that everything works

Each section first compares outputs, losses and gradients of its contenders; a difference stops the run with exit status
1. Then the contenders of a comparison run in turns. A ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measuring
import torch
from compiling import compiled_steps
from contenders import QUICK, Row, Sizes, WrongResultError
from convolutions import choice, convolution
from exported import export
from measuring import AS_AVX2, Ratio, environment
from mixtures import mixtures
from routings import costs, routing
from slots import slots
from steps import step

SECTIONS = {
    "convolution": convolution,
    "choice": choice,
    "step": step,
    "compile": compiled_steps,
    "routing": routing,
    "mixtures": mixtures,
    "slots": slots,
    "costs": costs,
    "export": export,
}


def as_json(row: Row, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the file of ratios."""
    value = row.ratio._asdict() if isinstance(row.ratio, Ratio) else {"value": row.ratio}
    numbers = {name: float(f"{number:.4g}") for name, number in value.items()}
    medians = {name: float(f"{sorted(each)[len(each) // 2]:.4g}") for name, each in row.times.items()}
    return {"ratio": row.what, **numbers, "milliseconds": medians, **facts}


LABELS = {
    "the way that is chosen ÷ the fastest way, worst of all shapes": "algorithm, worst of all shapes: chosen ÷ fastest",
}
"""Labels in the table of ratios that are recorded under an older label."""
OURS = ("torchcaps", "chosen")
"""First words of the contenders that the table puts under the others."""


def table(path: Path) -> str:
    """Return the latest value of each ratio, with the middle half of its rounds and a column for each instruction set.

    All ratios are "other ÷ torchcaps": above 1, torchcaps is faster or needs less memory. The table inverts ratios that
    are recorded as "torchcaps ÷ other". It leaves out costs relative to uniform coupling, which compare routings.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if not line["ratio"].endswith("÷ uniform coupling")]
    sets = sorted({line["isa"] for line in lines})
    latest = {(line["ratio"], line["isa"]): line for line in lines}
    rows = [["ratio", *sets], ["---"] * (1 + len(sets))]
    for what in dict.fromkeys(line["ratio"] for line in lines):
        label, is_inverted = _label(what)
        rows.append([label, *(_cell(latest.get((what, isa)), is_inverted) for isa in sets)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _label(what: str) -> tuple[str, bool]:
    """Return the label of a ratio in the table, and True if the table inverts the ratio."""
    label = LABELS.get(what, what.replace("three lines of one's own", "own loop"))
    case, colon, pair = label.rpartition(": ")
    over, _, under = pair.partition(" ÷ ")
    is_inverted = over.startswith(OURS) and not under.startswith("torchcaps")
    return (f"{case}{colon}{under} ÷ {over}", True) if is_inverted else (label, False)


def _cell(line: Mapping[str, Any] | None, is_inverted: bool = False) -> str:
    if line is None:
        return "not measured"
    value, low, high = (line.get(name) for name in ("value", "low", "high"))
    if is_inverted:
        value, low, high = (None if each is None else 1 / each for each in (value, high, low))
    return f"{value:.3g}" if low is None else f"{value:.3g} ({low:.3g} to {high:.3g})"


def main(arguments: list[str] | None = None) -> int:
    """Measure some sections, or print a table."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native", help="compute as a CPU without AVX-512")
    parser.add_argument("--rounds", type=int, help=f"of each comparison ({Sizes().rounds})")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, for a machine that others use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the numbers mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the ratios to this file, as lines of JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of such a file")
    options = parser.parse_args(given)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
    if options.table is not None:
        print(table(options.table))
        return 0
    if options.isa == "avx2" and any(os.environ.get(name) != value for name, value in AS_AVX2.items()):
        # torch reads these when it is loaded, so it takes another process
        return subprocess.run([sys.executable, __file__, *given], env=os.environ | AS_AVX2, check=False).returncode
    torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else Sizes()
    if options.rounds is not None:
        sizes = sizes._replace(rounds=options.rounds)
    facts = environment() | ({"quick": True} if options.quick else {})
    if options.cpu_time:
        measuring.CLOCK, facts["clock"] = time.process_time, "processor"
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for name in options.sections or SECTIONS:
        try:
            for row in SECTIONS[name](sizes):
                line = as_json(row, facts)
                print(f"{row.what:<82}{_cell(line)}", flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except WrongResultError as error:
            print(f"wrong results, the section {name} was not timed further: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
