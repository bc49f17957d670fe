"""Vote-free routing (to be written by its owner)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.ops.dynamic_routing.reference import compute_votes, route_votes


def route_recompute(
    poses: Tensor,
    weight: Tensor,
    num_iterations: int,
    softmax_over: str,
    stop_gradient: bool,
    bias: Tensor | None,
    prior: Tensor | None,
    leaky: bool,
    eps: float,
    return_coupling: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    return route_votes(
        compute_votes(poses.to(dtype), weight.to(dtype)), num_iterations, softmax_over, stop_gradient, bias, prior, leaky, eps
    )
