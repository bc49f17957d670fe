"""The same network by PyTorch and, from its exported file, by onnxruntime: milliseconds a batch on the CPU.

    python benchmarks/latency.py                            # sabour2017 and compact, one image and 32
    python benchmarks/latency.py --presets compact --rounds 51 --csv latency.csv

Both give lengths and reconstructions from float32 images, with equally many threads; the weights are random. Each
network is exported first, and the outputs compared at every batch size that is timed: a difference stops the run (exit
status 1). Then both run once a round, in turns that change places; the table shows medians, extremes and their ratio.
The threads of either go on spinning for a while after a run, on the cores that the other one wants, so each turn begins
with a pause and a run that is not counted.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import environment

from torchcaps.errors import InputError
from torchcaps.export import Description, OnnxModel, export_onnx, random_images
from torchcaps.models import Network, create_model

WARM_UP = 2  # rounds that are not counted
PAUSE = 0.1  # seconds, in which the other contender's threads go to sleep

Outputs = tuple[np.ndarray, ...]


def by_torch(model: Network) -> Callable[[np.ndarray], Outputs]:
    def run(images: np.ndarray) -> Outputs:
        with torch.inference_mode():
            output = model(torch.from_numpy(images))
        return tuple(each.numpy() for each in (output.scores, output.reconstruction) if each is not None)

    return run


def by_onnxruntime(model: Network, preset: str, threads: int, folder: Path) -> Callable[[np.ndarray], Outputs]:
    names = tuple(str(j) for j in range(model.num_classes))
    export_onnx(model, folder / "model.onnx", Description(in_shape=model.in_shape, class_names=names, preset=preset))
    exported = OnnxModel(folder / "model.onnx", threads)
    names = ("scores", "reconstruction")
    return lambda images: tuple(each for each in map(vars(exported(images)).get, names) if each is not None)


def check(contenders: dict[str, Callable[[np.ndarray], Outputs]], images: np.ndarray) -> list[str]:
    """What differs; empty if nothing does."""
    wanted, got = (run(images) for run in contenders.values())
    differences = [float(np.abs(ours - theirs).max()) for ours, theirs in zip(got, wanted, strict=True)]
    return [
        f"batch {len(images)}: outputs differ by {each:.1e}, 1e-4 allowed" for each in differences if not each <= 1e-4
    ]


def time_in_turns(
    contenders: dict[str, Callable[[np.ndarray], Outputs]], images: np.ndarray, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for n in range(rounds + WARM_UP):
        for name in list(contenders)[:: 1 if n % 2 else -1]:
            time.sleep(PAUSE)
            contenders[name](images)
            start = time.perf_counter()
            contenders[name](images)
            taken = time.perf_counter() - start
            if n >= WARM_UP:
                times[name].append(1e3 * taken)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["sabour2017", "compact"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="write all times to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    import onnxruntime

    facts = environment() | {"onnxruntime": onnxruntime.__version__}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"\n{'preset':<24}{'batch':>6}  {'':<12}{'median ms':>11}{'min to max':>22}{'torch ÷':>9}")
    records: list[dict[str, Any]] = []
    for preset in arguments.presets:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            try:
                model = create_model(preset).eval()
                exported = by_onnxruntime(model, preset, arguments.threads, Path(folder))
            except InputError as error:
                print(error, file=sys.stderr)
                return 1
        contenders = {"torch": by_torch(model), "onnxruntime": exported}
        batches = {
            size: random_images(model.in_shape, size).numpy().astype(np.float32) / 255 for size in arguments.batches
        }
        wrong = [line for images in batches.values() for line in check(contenders, images)]
        if wrong:
            print("\n".join([f"{preset}: wrong results, nothing was timed:", *wrong]), file=sys.stderr)
            return 1
        for size, images in batches.items():
            times = time_in_turns(contenders, images, arguments.rounds)
            medians = {name: statistics.median(values) for name, values in times.items()}
            for name, values in times.items():
                ratio, low, high = medians["torch"] / medians[name], min(values), max(values)
                spread = f"{low:.2f} to {high:.2f}"
                print(f"{preset:<24}{size:>6}  {name:<12}{medians[name]:>11.2f}{spread:>22}{ratio:>9.2f}")
                numbers = {"median_ms": medians[name], "min_ms": low, "max_ms": high, "rounds": len(values)}
                records.append({"preset": preset, "batch": size, "contender": name} | numbers | facts)
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
