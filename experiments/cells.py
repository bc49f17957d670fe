"""Format the numbers of several runs for tables and pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from scipy.stats import t

from experiments.store import RunLog
from torchcaps.training.progress import duration

Runs = Sequence[RunLog]
NOTHING = "–"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown; the first line has the headings."""
    heading, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, ["---"] * len(heading), *rest))


def percent(values: Sequence[float]) -> str:
    """Format mean ± standard deviation; only the mean for a single value."""
    mean = statistics.mean(values)
    digits = 3 if mean < 1 and len(values) > 1 else 2
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{deviation} %"


def number(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{deviation}"


def mean(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.mean(values):.{digits}f}"


def time(values: Sequence[float]) -> str:
    return duration(statistics.mean(values))


def span(values: Sequence[float]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,}–{max(values):,}"


def difference(runs: Runs, others: Runs, value: Callable[[RunLog], float] = RunLog.error) -> tuple[float, float, float]:
    """Return the mean difference of two rows in pairs of the same seed, and its 95 % interval by Student's t.

    NaN for less than two pairs.
    """
    before = {run.seed: value(run) for run in others}
    pairs = [value(run) - before[run.seed] for run in runs if run.seed in before]
    if len(pairs) < 2:
        return (math.nan,) * 3
    middle, half = statistics.mean(pairs), t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / len(pairs) ** 0.5
    return middle, float(middle - half), float(middle + half)


def interval(middle: float, low: float, high: float) -> str:
    return NOTHING if math.isnan(middle) else f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"
