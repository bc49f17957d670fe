"""Measures that ``check_routing`` and ``diagnose`` share."""

from __future__ import annotations

import math
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


def place_of(error: Exception, module: nn.Module) -> str:
    """Return file and line of an error: the last line in the file of the module's class, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{Path(last.filename).name}, line {last.lineno}"


def change(new: Tensor, old: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((new - old).detach().abs().max().nan_to_num(math.inf) / old.detach().abs().max().clamp_min(1e-30))


def gradients_of(seen: Tensor, leaves: Inputs) -> dict[str, Tensor]:
    """Return the gradient of each leaf; zeros for a leaf without a gradient."""
    if not seen.requires_grad or not leaves:
        return {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    total = (seen * cotangent(seen)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def require(condition: bool, otherwise: str) -> None:
    """Fail a check; also under ``python -O``, which removes assert statements."""
    if not condition:
        raise AssertionError(otherwise)


def cotangent(seen: Tensor) -> Tensor:
    """Return fixed random weights. Their weighted sum of the numbers is differentiated."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(seen.shape, generator=random, dtype=torch.float64).to(seen)


def move(tensor: Tensor, by: float) -> None:
    """Add random numbers to a tensor: ``by`` times its root mean square, or times 1 if it is zero."""
    random = torch.Generator().manual_seed(3)
    size = float(tensor.square().mean().sqrt()) or 1.0
    tensor += by * size * torch.randn(tensor.shape, generator=random).to(tensor)
