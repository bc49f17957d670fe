"""Half precision is computed in float32, everywhere outside convolutions and dense layers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from torchcaps.errors import WrongType


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision; any other dtype is itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_full_precision(x: Tensor) -> Tensor:
    """A tensor in :func:`full_dtype` of its dtype."""
    return x.to(full_dtype(x.dtype))


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast off on ``device``: the softmax and the squash magnify the rounding of half-precision products."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def check_one_dtype(what: str, *tensors: Tensor | None) -> None:
    """Raise WrongType unless tensors are of one dtype, or autocast brings them to one."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtypes = dict.fromkeys(tensor.dtype for tensor in given)
    if len(dtypes) > 1:
        kind = given[0].device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if not cast or torch.float64 in dtypes:  # which autocast leaves alone
            raise WrongType(f"{what} must be of one dtype, got {' and '.join(map(str, dtypes))}")
