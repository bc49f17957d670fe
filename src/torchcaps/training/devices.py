"""Devices, precision and processes of a run, and the description of the machine for its summary."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from torchcaps._version import __version__
from torchcaps.errors import InputError
from torchcaps.machine import MIB, peak_resident_memory_mib, usable_cores

PRECISION_WORDS = {"32": "float32", "bf16": "bfloat16 convolutions and dense layers, all else in float32"}
"""Description of each precision."""
MAX_WAIT = timedelta(minutes=30)
"""Longest time that processes wait for each other, at the start and at any step."""
PARENT = "TORCHCAPS_PARENT"
"""Environment variable with the number of the process that started the other processes."""


def pick_device(accelerator: str) -> torch.device:
    """Return the device ``cpu``, ``cuda``, ``cuda:1`` or ``mps``; ``auto`` is the fastest one of this machine.

    Raises:
        InputError: This machine has no such device.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [name for name in available if available[name]]
    kind, colon, number = accelerator.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in ("auto", *usable) or (colon and not (number.isdecimal() and int(number) < count)):
        raise InputError(f"this machine has no {accelerator} device that PyTorch can use; it has {', '.join(usable)}")
    return torch.device(usable[0] if accelerator == "auto" else accelerator)


def pick_precision(precision: str, device: torch.device) -> Literal["32", "bf16"]:
    """Return the precision of training on a device; ``auto`` is the fastest one.

    ``auto`` is bfloat16 on CUDA GPUs with bfloat16 arithmetic, else float32. CPUs with bfloat16 arithmetic also get
    float32, because its convolutions are faster there.

    Raises:
        InputError: The precision is not ``auto``, ``32`` or ``bf16``.
    """
    if precision not in ("auto", "32", "bf16"):
        raise InputError(f'precision must be "auto", "32" or "bf16", got {precision!r}')
    multiplies = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if precision == "bf16" or (precision == "auto" and multiplies) else "32"


def compiled(network: nn.Module, fabric: Fabric) -> Any:
    """Compile a network for the steps of one process.

    One process on a CUDA GPU captures each pass as a CUDA graph, because launching the operations one by one takes
    longer than computing them. There is a graph for each size of a batch.
    """
    if fabric.device.type == "cuda" and fabric.world_size == 1:
        return torch.compile(network, mode="reduce-overhead", dynamic=False)
    return torch.compile(network)


# ---- processes


def launch(accelerator: str = "auto", devices: int = 1, precision: str = "auto") -> Fabric:
    """Start the processes of this machine, unless torchrun has started them, and wait for all of them.

    Args:
        accelerator: Device, as for :func:`pick_device`. A device with a number, such as ``cuda:1``, needs one process.
        devices: Processes. Under torchrun, its options say how many processes and machines there are.
        precision: Precision, as for :func:`pick_precision`.

    Raises:
        InputError: A device is missing, or the processes did not find each other in time.
    """
    is_half = pick_precision(precision, pick_device(accelerator)) == "bf16"
    machines = 1
    if "LOCAL_WORLD_SIZE" in os.environ:  # set by torchrun
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // devices
    total = devices * machines
    kind, _, number = accelerator.partition(":")
    if number and total > 1:
        raise InputError(f"{accelerator} is one device, but there are {total} processes; use {kind}")
    # hide the greeting, but with several machines show which ones are missing
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING if machines == 1 else logging.INFO)
    try:
        fabric = Fabric(
            accelerator=kind,
            devices=[int(number)] if number and kind == "cuda" else devices,
            num_nodes=machines,
            strategy=DDPStrategy(timeout=MAX_WAIT) if total > 1 else "auto",
            precision="bf16-mixed" if is_half else "32-true",
        )
        if total > 1 and isinstance(getattr(fabric.strategy, "cluster_environment", None), LightningEnvironment):
            if fabric.device.type == "cpu" and devices > usable_cores():
                cores = f"{usable_cores()}, the number of processor cores for this process"
                raise InputError(f"devices must be at most {cores}, got {devices}")
            _end_with_parent()
        fabric.launch()
    except InputError:
        raise
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        # missing devices, a timeout in torch, or other numbers of a cluster in Fabric
        request = f"{total} processes with accelerator {accelerator}"
        reason = str(error).partition("\n")[0]
        raise InputError(f"cannot start {request}, or they did not find each other: {reason}") from error
    return fabric


def _end_with_parent() -> None:
    """End this process when the process that started it has ended. The first process sets the number to watch."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or os.name != "posix":
        os.environ[PARENT] = str(os.getpid())
        return

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # a process that waits for another one cannot end in any other way

    if PARENT in os.environ:
        threading.Thread(target=watch, args=(int(os.environ[PARENT]),), daemon=True).start()


# ---- description of the machine


def hardware(device: torch.device) -> dict[str, str | int]:
    """Return processor, cores, threads, device, and the name of a GPU."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    machine: dict[str, str | int] = {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of the packages that influence the results."""
    packages = {"torchcaps": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return packages | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})


def source_commit() -> str | None:
    """Return the commit of the source tree, with ``-dirty`` if files differ from it; None without a source tree."""
    root = Path(__file__).parents[3]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the peak memory so far, MiB: allocated on a CUDA device, or resident in this process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return peak_resident_memory_mib()


def over_processes(fabric: Fabric, values: Tensor, reduction: str) -> Tensor:
    """Return the elementwise sum or maximum over all processes, the same in all of them."""
    if fabric.world_size == 1:
        return values
    reduced = fabric.all_reduce(values.to(fabric.device, copy=True), reduce_op=reduction)
    assert isinstance(reduced, Tensor)
    return reduced
