"""Routing side by side: 0 to 4 iterations, softmax over the outputs and over the inputs, on any preset and data set.

    python examples/compare_routing.py                                  # sabour2017 on the embedded digits
    python examples/compare_routing.py --preset keras-tutorial --data mnist --seeds 0 1 2 3 4
    python examples/compare_routing.py --set conv_channels=64 --set max_shift=0 --iterations 1 3

Every setting is trained from the same seeds, so that it starts from the same random numbers and sees the same batches.
The table shows the test accuracy of the epoch that the validation images chose; curves.png shows the mean of the seeds,
epoch by epoch. Without routing (0 iterations) there is no softmax, so there is one such row.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchcaps import InputError
from torchcaps.analysis import Curves, read_metrics, save_figure
from torchcaps.training import make_config, train

AXES = ("outputs", "inputs")


class Setting(NamedTuple):
    """One row of the table."""

    num_iterations: int
    softmax_over: str

    def __str__(self) -> str:
        if self.num_iterations == 0:
            return "no routing"
        return f"{self.num_iterations} over {self.softmax_over}"


def settings(iterations: Iterable[int]) -> list[Setting]:
    """Both axes for each number of iterations, but one setting without routing."""
    return [Setting(n, axis) for n in sorted(set(iterations)) for axis in (AXES if n else AXES[:1])]


def compare(
    preset: str, seeds: Sequence[int], out: Path, iterations: Iterable[int] = range(5), **overrides: Any
) -> dict[Setting, list[float]]:
    """Train every setting from every seed and draw the curves.

    Args:
        preset: A name from :func:`torchcaps.list_presets`, of a network with capsules.
        seeds: One run of each setting for each.
        out: Where the run folders and ``curves.png`` go.
        iterations: Numbers of routing iterations, 0 for no routing.
        **overrides: Other fields, as :func:`torchcaps.training.make_config` takes them.

    Returns:
        Test accuracies of the validation-chosen epochs, 0..1, one a seed.

    Raises:
        InputError: A preset, field or value that does not fit, or runs in ``out`` already.
    """
    accuracies: dict[Setting, list[float]] = {}
    curves = {}
    configs = {  # all of them before the first is trained, so that a wrong one is found at once
        setting: [make_config(preset, **{**overrides, **setting._asdict(), "seed": seed}) for seed in seeds]
        for setting in settings(iterations)
    }
    for setting, runs in configs.items():
        folders = [out / f"{str(setting).replace(' ', '-')}-seed{config.seed}" for config in runs]
        summaries = [train(config, folder, figures=False) for config, folder in zip(runs, folders, strict=True)]
        accuracies[setting] = [summary["test"]["best"]["accuracy"] for summary in summaries]
        metrics = [read_metrics(folder) for folder in folders]
        curves[str(setting)] = {column: np.mean([each[column] for each in metrics], axis=0) for column in metrics[0]}
    drawn = Curves(curves, dict.fromkeys(curves, f"{preset}, mean of {len(seeds)} seeds"))
    save_figure(drawn.figures()[""], out / "curves.png")
    return accuracies


def table(accuracies: dict[Setting, list[float]]) -> str:
    """Mean ± standard deviation over the seeds, in percent; the deviation of a single seed is not known."""
    lines = [f"{'routing':<16} {'test accuracy, %':>16}   seeds"]
    for setting, values in accuracies.items():
        percent = [100 * value for value in values]
        deviation = f" ± {statistics.stdev(percent):.2f}" if len(percent) > 1 else ""
        lines.append(f"{setting!s:<16} {statistics.mean(percent):.2f}{deviation}".ljust(33) + f"   {len(percent)}")
    return "\n".join(lines)


def override(text: str) -> tuple[str, Any]:
    """``FIELD=VALUE``; what is no JSON (a number, true, [1, 2]) is a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"write FIELD=VALUE instead of {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, train, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="sabour2017", help="a network with capsules (default: %(default)s)")
    parser.add_argument("--data", default="digits", help="a data set, folder:PATH or npz:PATH (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of every run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    parser.add_argument("--iterations", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 1 2 3 4")
    parser.add_argument("--out", type=Path, default=Path("runs/compare-routing"), help="default: %(default)s")
    parser.add_argument(
        "--set", type=override, action="append", default=[], metavar="FIELD=VALUE", help="any other field of a run"
    )
    given = parser.parse_args(arguments)
    fields = {**dict(given.set), "data": given.data, "epochs": given.epochs}
    try:
        print(table(compare(given.preset, given.seeds, given.out, given.iterations, **fields)))
    except InputError as error:
        parser.error(str(error))
    print(f"\nCurves: {given.out / 'curves.png'}")


if __name__ == "__main__":
    main()
