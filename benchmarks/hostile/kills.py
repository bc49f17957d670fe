"""Training that is killed and goes on, against the same training that is not: equal to the last bit."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from hostile import forks
from hostile.program import call
from hostile.trials import CONTROL, DONE, TEMPORARY, TRACEBACK, Part, Rules, Trial, say

PRESETS = ("sabour2017", "compact", "tf-notebook", "keras-tutorial", "torch-tutorial", "torch-notebook", "baseline-cnn")
SMALL = "--limit-train 200 --limit-test 60 --validation-size 60 --accelerator cpu --no-figures"
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TIMES = ("seconds", "images_per_second", "epoch_seconds", "peak_memory_mib", "commands", "commits")
"""What rightly differs: how long it took, and what was typed."""
SUMMARY_TIMES = (*TIMES, "out", "command", "resumed_with", "earlier_commits")
MOST_STARTS = 12
ONE = 120.0
"""Seconds that one training may take."""


class Kills(Part):
    """Killed runs: weights, moments, metrics and figures of the summary must equal those of the run that was not."""

    name, cases, share = "kills", 60, 0.2

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """A small training of random settings, and when it is killed, by what."""
        arguments = _settings(random)
        kills = [(random.choice(SIGNALS), random.random()) for _ in range(random.choice((1, 1, 2, 3, 5)))]
        what = f"torchcaps {' '.join(arguments)}, " + ", ".join(f"{kind.name} at {share:.3f}" for kind, share in kills)
        work = partial(_compare, arguments, kills)
        rules = Rules(timeout=4 * ONE, writes=("whole*", "killed*", "*.out"), bounded=False, says_faults=True)
        return Trial(number, what, work, folder, rules)


def _settings(random: Random) -> list[str]:
    """A preset, small, with what makes runs differ in kind."""
    from torchcaps.models import list_presets

    names = [name for name in PRESETS if name in list_presets()]
    preset = random.choice(names)
    arguments = ["train", preset, "--data", "digits", *SMALL.split()]
    arguments += ["--epochs", str(random.randint(1, 4)), "--batch-size", str(random.choice((16, 25, 40)))]
    arguments += ["--seed", str(random.randrange(1000))]
    arguments += ["--checkpoint-minutes", random.choice(("0.0001", "0.002", "0.01", "5"))]
    arguments += random.choice(([], ["--select", "loss"], ["--schedule", "one-cycle"], ["--max-shift", "0"]))
    if preset == "baseline-cnn":
        return [*arguments, "--channels", "4,6", "--hidden", "12", "--dropout", random.choice(("0", "0.5"))]
    arguments += ["--conv-channels", "8", "--primary-types", "2"]
    arguments += random.choice((["--no-decoder"], ["--decoder", "--decoder-hidden", "16"]))
    return arguments + random.choice(([], ["--num-iterations", "1"], ["--softmax-over", "inputs"], ["--learn-prior"]))


def _compare(arguments: list[str], kills: list[tuple[signal.Signals, float]]) -> int:
    """Train twice, once through the kills; 70 and what differs, where something does."""
    here = Path.cwd()
    seconds, code, said = _train([*arguments, "--out", "whole"], here / "whole.out")
    if code == 2 and not (here / "whole").exists():  # settings that do not go together
        print(said)
        return DONE
    wrong = [] if code == 0 else [f"not killed, and ends: with {code}: {said[-500:]}"]
    for attempt in range(MOST_STARTS):
        resumes = (here / "killed" / "config.json").exists()
        start = ["train", "--resume", "killed", "--no-figures"] if resumes else [*arguments, "--out", "killed"]
        kind, share = kills[attempt] if attempt < len(kills) else (None, 0.0)
        _, code, said = _train(start, here / f"killed-{attempt}.out", kind, share * seconds)
        if TRACEBACK in said or CONTROL.search(said):
            wrong.append(f"prints a traceback: start {attempt}: {said[-800:]}")
        if kind is None or code == 0:
            break
        if code not in (-kind, 128 + kind):
            wrong.append(f"ends otherwise by {kind.name}: with {code}: {said[-500:]}")
    if code != 0:
        wrong.append(f"does not come to its end: {code}: {said[-500:]}")
    else:
        wrong += _differences(here / "whole", here / "killed")
    return say(wrong)


def _train(
    arguments: list[str], log: Path, kind: signal.Signals | None = None, after: float = 0.0
) -> tuple[float, int, str]:
    """Train in a process of its own, killed after some seconds; how long it took, its exit code, what it printed."""
    begin = time.monotonic()
    log.touch()  # a kill may come before there is any output
    pid = forks.start(partial(call, arguments), Path.cwd(), (log, log))
    if kind is not None:
        time.sleep(after)
        os.kill(pid, kind)  # it is not waited for yet: its number is still its own
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - begin > ONE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for left in (Path.cwd() / TEMPORARY).iterdir():
        if kind is not signal.SIGKILL:
            raise AssertionError(f"{left} is left in the temporary folder")
        left.unlink()
    return time.monotonic() - begin, code, log.read_text(errors="replace")


def _differences(whole: Path, killed: Path) -> list[str]:
    """What is not equal in two runs, in words."""
    import torch

    wrong = []
    names = [
        {str(path.relative_to(run)) for path in run.rglob("*") if path.suffix != ".lock"} for run in (whole, killed)
    ]
    if names[0] != names[1]:
        wrong.append(f"files differ: {sorted(names[0] ^ names[1])}")
    best = [(run / "best" / "model.safetensors").read_bytes() for run in (whole, killed)]
    if best[0] != best[1]:
        wrong.append("differs: best/model.safetensors")
    first, second = (torch.load(run / "last.ckpt", weights_only=True) for run in (whole, killed))
    wrong += [f"differs: last.ckpt in {place}" for place in _unequal(first, second, TIMES)]
    rows = [list(csv.DictReader((run / "metrics.csv").open(newline=""))) for run in (whole, killed)]
    wrong += [f"differs: metrics.csv in {place}" for place in _unequal(*rows, TIMES)]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, killed)]
    wrong += [f"differs: summary.json in {place}" for place in _unequal(*summaries, SUMMARY_TIMES)]
    configs = [(run / "config.json").read_text() for run in (whole, killed)]
    return wrong + ["differs: config.json"] * (configs[0] != configs[1])


def _unequal(first: Any, second: Any, but: tuple[str, ...], place: str = "") -> list[str]:
    """Where two trees of values differ."""
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)] if same else []
        return [] if same and torch.equal(*bits) else [place]
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [key for key in first.keys() | second.keys() if key not in but]
        missing = [f"{place}.{key}" for key in keys if key not in first or key not in second]
        both = [key for key in keys if key in first and key in second]
        return missing + [each for key in both for each in _unequal(first[key], second[key], but, f"{place}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [each for n, (one, other) in pairs for each in _unequal(one, other, but, f"{place}[{n}]")]
    return [] if first == second or (first != first and second != second) else [place]
