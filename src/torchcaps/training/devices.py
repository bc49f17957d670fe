"""Where a run is computed: its device, precision and processes, their start, and what a summary says of the machine."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lsf import LSFEnvironment
from lightning_fabric.plugins.environments.mpi import MPIEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps._version import __version__
from torchcaps.errors import InputError
from torchcaps.machine import MIB, peak_resident_memory_mib, usable_cores

#: Each precision in words.
PRECISION_WORDS = {"32": "float32", "bf16": "bfloat16 convolutions and dense layers, all else in float32"}
CPUINFO = Path("/proc/cpuinfo")
#: The names by which processors list instructions that multiply bfloat16: x86, x86 and ARM.
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
#: The first compute capability whose GPUs multiply bfloat16.
AMPERE = (8, 0)
#: How long processes wait for each other, at the start and later at any step.
PATIENCE = timedelta(minutes=30)
#: Programs that start processes themselves, as Fabric knows them: torchrun and those of clusters.
STARTED_ELSEWHERE = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
#: Environment variables that name the meeting place of the machines and the number of this one.
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
#: The environment variable that tells a process which one has started it.
PARENT = "TORCHCAPS_PARENT"


def pick_device(accelerator: str) -> torch.device:
    """The device called ``cpu``, ``cuda`` or ``mps``; ``auto`` is the fastest one of this machine.

    Raises:
        InputError: This machine has no such device.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [name for name in there if there[name]]
    if accelerator == "auto":
        return torch.device(usable[0])
    if accelerator not in usable:
        raise InputError(
            f"this machine has no {accelerator} device that PyTorch can use; --accelerator may be {', '.join(usable)}"
        )
    return torch.device(accelerator)


def pick_precision(precision: str, device: torch.device) -> Literal["32", "bf16"]:
    """The precision of training on a device; ``auto`` is the fastest one there.

    ``auto`` is bfloat16 on CUDA GPUs that multiply it, else float32. It is float32 on CPUs that multiply bfloat16, too:
    their float32 convolutions take less time. Another name than ``auto``, ``32`` and ``bf16`` raises InputError.
    """
    if precision not in ("auto", "32", "bf16"):
        raise InputError(f'precision must be "auto", "32" or "bf16", got {precision!r}')
    fast = device.type == "cuda" and multiplies_bf16(device) if precision == "auto" else precision == "bf16"
    return "bf16" if fast else "32"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 in hardware: CUDA from compute capability 8, CPUs of which Linux says so."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    found = _cpuinfo()
    features = {*found.get("flags", "").split(), *found.get("Features", "").split()}
    return device.type == "cpu" and bool(BF16_FEATURES & features)


def emulation_warning(precision: str, device: torch.device) -> str | None:
    """A sentence about the cost if this device emulates training in this precision; else None."""
    if precision != "bf16" or multiplies_bf16(device):
        return None
    if device.type == "cpu":
        return (
            "this processor emulates bfloat16: a training step takes about 12 times as long as in float32, its forward "
            "pass 7 times"
        )
    return f"this {device.type} device has no instructions for bfloat16, so float32 may be faster"


# ---- processes


def are_started_elsewhere() -> bool:
    """Whether torchrun or a cluster's own program has started the processes."""
    return any(environment.detect() for environment in STARTED_ELSEWHERE)


def check_devices(accelerator: str, devices: int, num_nodes: int = 1) -> None:
    """Raise InputError if this machine has fewer devices, or cores, or does not know where several machines meet.

    Processes that torchrun or a cluster's own program has started are not checked.
    """
    if are_started_elsewhere():
        return
    there, words = {
        "cuda": (torch.cuda.device_count(), "the CUDA devices of this machine"),
        "mps": (1, "as there is one MPS device"),
        "cpu": (usable_cores(), "the processor cores that this process may use"),
    }[pick_device(accelerator).type]
    if devices > there:
        raise InputError(f"devices must be at most {there}, {words}, got {devices}")
    if missing := [name for name in MEETING_PLACE if name not in os.environ and num_nodes > 1]:
        raise InputError(
            f"num_nodes is {num_nodes}, but the environment does not say where the machines meet: set "
            f"{', '.join(missing)} on each of them, or start with torchrun"
        )


def launch(accelerator: str = "auto", devices: int = 1, num_nodes: int = 1, precision: str = "auto") -> Fabric:
    """Start the processes, unless they have been started already, and wait for all of them.

    Raises:
        InputError: The devices that are asked for are not there, or the processes did not meet in time.
    """
    check_devices(accelerator, devices, num_nodes)
    if TorchElasticEnvironment.detect():  # torchrun says how many there are
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    total = devices * num_nodes
    precision = pick_precision(precision, pick_device(accelerator))
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it greets its own users
    try:
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=DDPStrategy(timeout=PATIENCE) if total > 1 else "auto",
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )
    except (RuntimeError, ValueError, MisconfigurationException) as error:  # devices that are not there
        wanted = f"{devices} devices with accelerator {accelerator}"
        raise InputError(f"this machine cannot give {wanted}: {error}") from None
    if total > 1 and not are_started_elsewhere():
        _end_with_parent()
        if num_nodes > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            waiting = f"Waiting for all {num_nodes} machines, {total} processes together, to meet at {place}"
            print(f"{waiting}, {PATIENCE.total_seconds() / 60:g} minutes at most", file=sys.stderr, flush=True)
    try:
        fabric.launch()
    except (RuntimeError, ValueError) as error:  # torch: no other process came; Fabric: the cluster has other numbers
        if total == 1:
            raise
        reason = str(error).partition("\n")[0]
        raise InputError(f"the {total} processes of the run did not find each other: {reason}") from error
    return fabric


def _end_with_parent() -> None:
    """In the process that starts the others: tell them its number. In the others: end when that process has ended."""
    parent = os.environ.get(PARENT, "")
    if os.environ.get("LOCAL_RANK", "0") == "0" or os.name != "posix":
        os.environ[PARENT] = str(os.getpid())
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)  # no way back from a meeting that waits for the other process

    if parent:
        threading.Thread(target=watch, daemon=True).start()


# ---- for the summary


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    found: dict[str, str] = {}
    for line in CPUINFO.read_text().splitlines() if CPUINFO.exists() else ():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def hardware(device: torch.device) -> dict[str, str | int]:
    """Processor, threads, and the accelerator if one is used."""
    found: dict[str, str | int] = {
        "processor": _cpuinfo().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    found = {"torchcaps": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def source_commit() -> str | None:
    """The commit of torchcaps's source tree, with ``-dirty`` if files differ from it; None if it is installed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak memory so far, MiB: allocated on a CUDA device, or resident in this process; None if it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return peak_resident_memory_mib()
