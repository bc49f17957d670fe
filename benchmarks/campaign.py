"""Everything odd at torchcaps: damaged files, odd command lines and calls, hostile requests, and killed runs.

    python benchmarks/campaign.py --seed 7 --out campaign.json              # all parts, as before a release
    python benchmarks/campaign.py --parts calls,requests --scale 0.1        # a tenth of two parts
    python benchmarks/campaign.py --seed 7 --case mutations:123             # one case again, its folder kept

Each case is drawn from the seed and its number, and runs in a process of its own. A case fails where it ends in a
traceback, exit code 70 or a signal of the system's; does not end; leaves, changes or half writes a file that it should
not; takes more than 1 GiB of memory for what it refuses; or sends control characters from a file to the terminal. What
each part allows besides stands in its module in benchmarks/hostile. The exit code is 1 where a case failed, or was left
out because the time was over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from hostile import fixtures, forks, program
from hostile.calls import Calls
from hostile.commands import Commands
from hostile.kills import Kills
from hostile.mutations import Mutations
from hostile.requests import Requests
from hostile.trials import TEMPORARY, Ended, Part, Trial, describe, judge

PARTS: dict[str, type[Part]] = {part.name: part for part in (Mutations, Commands, Calls, Requests, Kills)}
KEPT = 2000
"""Characters of what a failed case printed that are kept, from the end."""
SHOWN_KINDS = 5
"""Cases that are named for each kind of failure."""

Failure = dict[str, Any]


class Campaign:
    """The cases of one seed, and what they came to.

    Args:
        seed: Of everything that is drawn.
        folder: Where the cases work.
        jobs: How many at a time.
        timeout: Seconds that a case may take.
    """

    def __init__(self, seed: int, folder: Path, jobs: int, timeout: float) -> None:
        self.seed, self.folder, self.jobs, self.timeout = seed, folder, jobs, timeout
        self.fixtures = folder / "fixtures"
        self.failures: list[Failure] = []
        self.parts: dict[str, dict[str, Any]] = {}
        #: What lies in the folder besides the cases' own.
        self.own = {*(path.name for path in folder.iterdir()), "fixtures", "fixtures.out", *Requests.files}

    def prepare(self) -> None:
        """Make the valid files; fails with what went wrong where they cannot be made."""
        self.fixtures.mkdir()
        (self.fixtures / TEMPORARY).mkdir()
        log = self.folder / "fixtures.out"
        pid = forks.start(lambda: fixtures.make(self.fixtures, self.seed), self.fixtures, (log, log))
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            raise SystemExit(f"the valid files could not be made:\n{log.read_text(errors='replace')}")

    def run(self, name: str, cases: int, deadline: float) -> None:
        """Try the cases of a part until the deadline.

        Args:
            name: The part.
            cases: How many.
            deadline: By ``time.monotonic``.
        """
        begin, outcomes, faults = time.monotonic(), Counter[str](), Counter[str]()
        with PARTS[name](self.fixtures, self.timeout) as part:
            for trial, ended, before in forks.run(
                self._trials(part, range(cases), deadline), 1 if part.alone else self.jobs
            ):
                outcome, found = judge(trial, ended, before)
                outcomes[outcome] += 1
                if found:
                    faults.update(kind.partition(":")[0] for kind in found)
                    self._keep(name, str(trial.number), describe(trial, ended), ended, found)
                self._remove(trial)
            for words in (*part.at_the_end(), *self._strays()):
                faults["at the end"] += 1
                self._keep(name, "end", words, None, ["at the end"])
        tried = sum(outcomes.values())
        self.parts[name] = {
            "cases": cases,
            "tried": tried,
            "failed": sum(failure["part"] == name for failure in self.failures),
            "outcomes": dict(outcomes.most_common()),
            "faults": dict(faults.most_common()),
            "seconds": round(time.monotonic() - begin, 1),
        }

    def again(self, name: str, number: int) -> bool:
        """Try one case again, show it whole, and keep its folder; whether it was all right."""
        with PARTS[name](self.fixtures, self.timeout) as part:
            ((trial, ended, before),) = forks.run(self._trials(part, range(number, number + 1), float("inf")), 1)
            outcome, found = judge(trial, ended, before)
            found += part.at_the_end()
        print(f"{name}:{number}: {trial.what}\n--- stdout\n{ended.out!r:.{KEPT}}\n--- stderr\n{ended.err:.{KEPT}}")
        print(f"--- {outcome}, exit code {ended.code}, {ended.seconds:.1f} s, {ended.memory_mib:.0f} MiB")
        print(f"--- {'; '.join(found) or 'nothing wrong'}\n--- in {trial.folder}")
        return not found

    def _strays(self) -> list[str]:
        """What cases wrote beside their folders, and is removed."""
        strays = [path for path in self.folder.iterdir() if path.name not in self.own]
        for path in strays:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return [f"written beside the folders of the cases: {path.name!r}" for path in strays]

    def _trials(self, part: Part, numbers: range, deadline: float) -> Iterator[Trial]:
        for number in numbers:
            if time.monotonic() > deadline:
                return
            folder = self.folder / f"{part.name}-{number}"
            folder.mkdir()
            yield part.trial(number, Random(f"{self.seed} {part.name} {number}"), folder)

    def _keep(self, part: str, number: str, what: str, ended: Ended | None, found: list[str]) -> None:
        failure: Failure = {"case": f"{part}:{number}", "part": part, "seed": self.seed, "what": what, "faults": found}
        if ended is not None:
            failure |= {
                "code": ended.code,
                "seconds": round(ended.seconds, 2),
                "memory_mib": round(ended.memory_mib),
                "out": ended.out[-KEPT:],
                "err": ended.err[-KEPT:],
            }
        self.failures.append(failure)
        print(f"{part}:{number}  {'; '.join(found)}  {ascii(what)[1:-1]:.200}", flush=True)

    def _remove(self, trial: Trial) -> None:
        shutil.rmtree(trial.folder, ignore_errors=True)
        for suffix in (".out", ".err", ".base"):
            trial.folder.with_suffix(suffix).unlink(missing_ok=True)

    def summary(self) -> dict[str, Any]:
        """What is written to --out."""
        return {"seed": self.seed, "parts": self.parts, "failures": self.failures}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if not hasattr(os, "fork") or not Path("/proc/self/status").exists():
        print("a campaign forks its cases and watches them in /proc: it needs Linux", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="torchcaps-campaign-"))
    kept = options.case is not None
    try:
        program.isolate(folder)
        program.import_all()
        campaign = Campaign(options.seed, folder, options.jobs, options.timeout)
        campaign.prepare()
        if options.case is not None:
            return 0 if campaign.again(*options.case) else 1
        _run(campaign, options)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if options.out is not None:
        from torchcaps.files import write_json

        write_json(options.out, campaign.summary())
    return _show(campaign)


def _run(campaign: Campaign, options: argparse.Namespace) -> None:
    """All parts; what one leaves of its share of the time is the next ones'."""
    begin, total, until = time.monotonic(), sum(PARTS[name].share for name in options.parts), 0.0
    for name in options.parts:
        until += PARTS[name].share / total
        cases = max(1, round(PARTS[name].cases * options.scale))
        campaign.run(name, cases, begin + 60 * options.minutes * until)
        print(f"{name}: {campaign.parts[name]}", flush=True)


def _show(campaign: Campaign) -> int:
    """Counts of each part and outcome, and the kinds of failures; the exit code."""
    print(f"\n{'part':<12}{'cases':>7}{'tried':>7}{'failed':>7}{'minutes':>9}  outcomes")
    for name, part in campaign.parts.items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in part["outcomes"].items())
        numbers = f"{part['cases']:>7}{part['tried']:>7}{part['failed']:>7}{part['seconds'] / 60:>9.1f}"
        print(f"{name:<12}{numbers}  {outcomes}")
    kinds: dict[str, list[str]] = {}
    for failure in campaign.failures:
        for fault in failure["faults"]:
            kinds.setdefault(fault.partition(":")[0], []).append(failure["case"])
    for kind, cases in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{kind}: {len(cases)}, e.g. {', '.join(cases[:SHOWN_KINDS])}")
    left = sum(part["cases"] - part["tried"] for part in campaign.parts.values())
    if left:
        print(f"{left} cases were left out: the time was over; give more --minutes")
    print(f"seed {campaign.seed}: {len(campaign.failures)} failed")
    return 1 if campaign.failures or left else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; a release takes a new one (0)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="that all may take together")
    parser.add_argument("--out", type=Path, help="JSON file of the counts and of each failure")
    parser.add_argument("--parts", type=_part_names, default=list(PARTS), help=f"of {','.join(PARTS)} (all)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of cases (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (one a core)")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds after which a case hangs (20)")
    parser.add_argument("--case", type=_case, metavar="PART:NUMBER", help="only this one, shown whole, its folder kept")
    return parser.parse_args(arguments)


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"there is no part {name}; parts are {', '.join(PARTS)}")
    return names


def _case(text: str) -> tuple[str, int]:
    name, _, number = text.partition(":")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"a case is a part and a number such as mutations:12, got {text}")
    return _part_names(name)[0], int(number)


if __name__ == "__main__":
    sys.exit(main())
