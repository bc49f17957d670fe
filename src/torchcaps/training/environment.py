"""The environment of a run: its device, the precision that suits it, and the machine and versions for its summary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import subprocess
from pathlib import Path
from typing import Literal

import torch

from torchcaps._version import __version__
from torchcaps.errors import InputError
from torchcaps.machine import MIB, peak_resident_memory_mib
from torchcaps.training.config import TrainConfig

#: Each precision in words.
PRECISION_WORDS = {"32": "float32", "bf16": "bfloat16 convolutions and dense layers, all else in float32"}
CPUINFO = Path("/proc/cpuinfo")
#: The names by which processors list instructions that multiply bfloat16: x86, x86 and ARM.
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
#: Values of ONEDNN_MAX_CPU_ISA that leave such instructions of x86 unused.
ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
#: The first compute capability whose GPUs multiply bfloat16.
AMPERE = (8, 0)


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


def resolve_precision(config: TrainConfig) -> TrainConfig:
    """The same run with ``auto`` replaced by the precision that it stands for on this machine.

    Raises:
        InputError: The precision is ``auto``, and this machine does not have the accelerator that the run names.
    """
    if config.precision != "auto":
        return config
    return dataclasses.replace(config, precision=pick_precision("auto", pick_device(config.accelerator)))


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 in hardware: CUDA from compute capability 8, x86 and ARM with instructions.

    A CPU whose kernels are limited to AVX2 (``ATEN_CPU_CAPABILITY=avx2``, ``ONEDNN_MAX_CPU_ISA=AVX2``) does not.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    if device.type != "cpu":
        return False
    found = BF16_FEATURES & _cpu_features()
    if "bf16" in found:
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return bool(found) and torch.backends.cpu.get_cpu_capability() == "AVX512" and limit not in ISA_WITHOUT_BF16


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


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    found: dict[str, str] = {}
    for line in CPUINFO.read_text().splitlines() if CPUINFO.exists() else ():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _cpu_features() -> set[str]:
    """Names of the processor's instruction sets; none if they are not known."""
    if CPUINFO.exists():
        found = _cpuinfo()
        return {*found.get("flags", "").split(), *found.get("Features", "").split()}
    ask = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.11; the only source without Linux's file
    return {name for name, there in ask().items() if there is True} if ask is not None else set()


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
