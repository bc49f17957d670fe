"""Capsules on large maps: peak memory and processor time, slab by slab beside all votes at once, as a Markdown table.

    python benchmarks/pixels.py                  # layers on planes and volumes, and the networks for pixels
    python benchmarks/pixels.py "layer 128²"     # some of them
    python benchmarks/pixels.py --quick          # tiny maps, to see that everything works

Both contenders are the same layers. The plain one computes all votes at once and keeps what PyTorch keeps for the
gradient. Memory is the most that a process of its own takes beyond what stood before. Times are seconds of the
processor, both contenders in turns in one process, medians; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import measuring
import torch
from measuring import Work, environment, isolated, peak_mib, ratio, times_in_turns
from torch import Tensor, nn

from torchcaps import create_model, list_presets
from torchcaps.kernels.operation import Operation
from torchcaps.nn import Capsules, ConvTypeCapsules, DynamicRouting
from torchcaps.nn.votes import columns

LAYERS: dict[str, tuple[tuple[int, ...], int, int, int, int, int]] = {
    "layer 128²": ((128, 128), 8, 16, 4, 16, 5),
    "layer 64²": ((64, 64), 16, 32, 4, 32, 5),
    "layer 32³": ((32, 32, 32), 16, 8, 16, 8, 3),
}
"""Sizes of the map, types and components before and after, and kernel."""
NETWORKS = {"segcaps 128²": ("segcaps", 128), "segcaps 256²": ("segcaps", 256)}
"""Preset and side of the image, where the preset exists."""
WAYS = ("plain", "slabs")
MODES = ("training step", "inference")


def cases() -> list[str]:
    """All that can be measured."""
    return [*LAYERS, *(name for name, (preset, _) in NETWORKS.items() if preset in list_presets())]


@contextlib.contextmanager
def computed(way: str) -> Iterator[None]:
    """Compute by one of the ways."""
    if way == "plain":  # as in a graph
        with (
            mock.patch.object(Operation, "runs_kernel", return_value=False),
            mock.patch.object(columns, "is_graph_capture", return_value=True),
        ):
            yield
    else:
        yield


def work_of(name: str, training: bool, quick: bool, device: str = "cpu") -> Work:
    """A call, or a training step without an optimizer."""
    torch.manual_seed(0)
    module: nn.Module
    if name in LAYERS:
        sizes, types, dim, out_types, out_dim, kernel = LAYERS[name]
        sizes = (8,) * len(sizes) if quick else sizes
        module = ConvTypeCapsules(types, dim, out_types, out_dim, dims=len(sizes), layer_kernel=kernel,
                              layer_padding="same", transform="shared",
                              routing=DynamicRouting(3, capsule_bias=True)).to(device)  # fmt: skip
        images = torch.randn(1, types * math.prod(sizes), dim, device=device).requires_grad_(training)

        def result() -> Tensor:
            return module(Capsules(images, None, (types, *sizes))).poses

    else:
        preset, side = NETWORKS[name]
        side = 16 if quick else side
        module = create_model(preset, (1, side, side), 2).to(device)
        images = torch.rand(1, 1, side, side, device=device)

        def result() -> Tensor:
            return module(images).scores

    def step() -> None:
        module.zero_grad()
        images.grad = None
        result().square().sum().backward()

    @torch.no_grad()
    def infer() -> None:
        result()

    return step if training else infer


def peak(name: str, way: str, training: bool, quick: bool, calls: int) -> float:
    """MiB that some calls take beyond weights and images; libraries are loaded by a call on a tiny map."""
    work_of("layer 128²", training, quick=True)()
    work = work_of(name, training, quick)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what was done so far
    with computed(way):
        return peak_mib(lambda: work, calls)


def times(name: str, training: bool, quick: bool, rounds: int) -> list[list[float]]:
    """Milliseconds of the processor, round by round: plain, and slabs."""
    measuring.CLOCK = time.process_time
    work = work_of(name, training, quick)

    def by(way: str) -> Callable[[], Any]:
        def call() -> None:
            with computed(way):
                work()

        return call

    found = times_in_turns({way: by(way) for way in WAYS}, rounds)
    return [found[way] for way in WAYS]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(cases())}")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=1, help="whose memory is measured (default: %(default)s)")
    parser.add_argument("--memory-only", action="store_true", help="do not measure times")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the numbers mean nothing")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print("| case | mode | peak, MiB: plain, slabs, ratio | processor, s: plain, slabs, ratio (quartiles) |")
    print("|---|---|---|---|")
    for name in given.cases or cases():
        for mode in MODES:
            training = mode == MODES[0]
            plain, cut = (isolated("pixels", "peak", name, way, training, given.quick, given.calls) for way in WAYS)
            memory = f"{plain:,.0f}, {cut:,.0f}, {cut / max(plain, 1):.2f}"
            seconds = ""
            if not given.memory_only:
                before, after = isolated("pixels", "times", name, training, given.quick, given.rounds)
                middle, low, high = ratio(after, before)
                medians = [sorted(each)[len(each) // 2] / 1000 for each in (before, after)]
                seconds = f"{medians[0]:.2f}, {medians[1]:.2f}, {middle:.2f} ({low:.2f} to {high:.2f})"
            print(f"| {name} | {mode} | {memory} | {seconds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
