"""The device that an accelerator's name stands for."""

from __future__ import annotations

import torch


def device_of(accelerator: str) -> torch.device:
    """The device of that name; for ``auto`` the fastest there is, as training takes it."""
    if accelerator != "auto":
        return torch.device(accelerator)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return torch.device(next(name for name, usable in there.items() if usable))
