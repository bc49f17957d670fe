"""What a run ran on: written into its summary, so that figures say where they come from."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from torchcaps._version import __version__
from torchcaps.machine import peak_resident_memory_mib


def hardware(device: torch.device) -> dict[str, str | int]:
    """Processor, threads, and the accelerator if one is used."""
    found: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"torchcaps": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["triton"] = importlib.metadata.version("triton")
    return found


def commit() -> str | None:
    """The commit of torchcaps's own source tree, with ``-dirty`` where files differ from it; None where installed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak memory so far, MiB: allocated on a CUDA device, or resident in this process. None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_resident_memory_mib()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
