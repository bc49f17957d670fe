"""The device that an accelerator's name stands for."""

from __future__ import annotations

import torch

from torchcaps.errors import InputError


def pick_device(accelerator: str) -> torch.device:
    """The device of that name; ``auto`` is the fastest there is, as training takes it.

    Args:
        accelerator: ``auto``, ``cpu``, ``cuda`` or ``mps``.

    Raises:
        InputError: This machine has none such.
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
