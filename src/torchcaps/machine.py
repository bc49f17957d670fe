"""Memory and cores that this process can use. A request for too much memory is refused before allocation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchcaps.errors import InputError

MIB = 2**20


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_memory(size: int, what: str) -> None:
    """Raise InputError if the free memory is known and too small.

    Args:
        size: Bytes that are needed.
        what: Words for their contents in the error message, in the plural.
    """
    free = free_memory_mib()
    if free is not None and size > free * MIB:
        raise InputError(
            f"{what} would take {size / MIB:,.0f} MiB of memory, but must fit into the {free:,.0f} MiB left"
        )


def free_memory_mib() -> float | None:
    """Return the memory that this process can still take, MiB; on macOS, the machine's total; None if unknown."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = _numbers(meminfo)["MemAvailable:"] / 1024
        allowed = _allowed_by_container(Path("/sys/fs/cgroup"))
        return free if allowed is None else min(free, allowed)
    if sys.platform == "darwin":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    return None


def peak_resident_memory_mib() -> float | None:
    """Return the peak memory of this process so far, MiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 2**10)


def _allowed_by_container(cgroup: Path) -> float | None:
    """Return the memory left under a container's limit, MiB; None without a limit.

    Reads both versions of Linux's control groups.
    """
    for folder, limit, used, total in (
        (cgroup, "memory.max", "memory.current", ""),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            maximum = (folder / limit).read_text().strip()
            numbers = _numbers(folder / "memory.stat")
            cache = sum(numbers.get(f"{total}{kind}_file", 0) for kind in ("active", "inactive"))
            taken = int((folder / used).read_text()) - cache  # Linux frees the cache of files for processes
        except OSError:
            continue
        return None if maximum == "max" else max(0.0, (int(maximum) - taken) / MIB)
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the number in the second column of each line by the word in the first."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
