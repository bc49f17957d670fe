"""What is timed on: a CUDA GPU, or, for a dry run of the benchmark, the CPU."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MIB = 2**20
#: Passes or steps before the clock: libraries and Adam set up their memory.
WARM_UP = 3


class Row(NamedTuple):
    """A line of the table."""

    case: str
    contender: str
    batch: int
    times_us: list[float]
    peak_mib: float

    @property
    def median_us(self) -> float:
        """Of the rounds."""
        return statistics.median(self.times_us)


class Machine:
    """A device, its clock and its memory.

    Args:
        dry: Take the CPU.
    """

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if not self.dry:
            torch.cuda.synchronize()

    def time_us(self, work: Callable[[], object]) -> float:
        """Microseconds on the device, between two events; the host's share where it is the slower one."""
        if self.dry:
            return 1e6 * self.wall_seconds(work)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    def wall_seconds(self, work: Callable[[], object]) -> float:
        """Seconds until the device is done."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def peak_mib(self, work: Callable[[], object]) -> float:
        """MiB that work allocates at once; 0 on the CPU."""
        if self.dry:
            work()
            return 0.0
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def waits(self, work: Callable[[], object]) -> int:
        """How often the host waits for the device during work, as torch's own debug mode counts; 0 on the CPU."""
        if self.dry:
            work()
            return 0
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    def profile(self, work: Callable[[], object], what: str) -> None:
        """Print the device time of every kernel of 20 times the work."""
        activity = torch.profiler.ProfilerActivity
        work()
        with torch.profiler.profile(activities=[activity.CPU if self.dry else activity.CUDA]) as profile:
            for _ in range(20):
                work()
            self.wait()
        order = "cpu_time_total" if self.dry else "device_time_total"
        print(f"\nkernels of 20 times {what}:")
        print(profile.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60))

    def facts(self) -> dict[str, Any]:
        """What the times depend on."""
        if self.dry:
            return {"gpu": "none: a dry run, its times mean nothing", "cuda": "", "cudnn": ""}
        return {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
