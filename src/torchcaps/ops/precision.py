"""Half precision is computed in float32, everywhere outside convolutions and dense layers."""

from __future__ import annotations

import torch
from torch import Tensor


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision; any other dtype is itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_full_precision(x: Tensor) -> Tensor:
    """A tensor in :func:`full_dtype` of its dtype."""
    return x.to(full_dtype(x.dtype))
