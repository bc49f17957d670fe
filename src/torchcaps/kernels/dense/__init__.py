"""The kernels of dynamic routing and of sums over votes W_ij u_i: the votes, B·I·J·D numbers, are never built.

``README.md`` of :mod:`torchcaps.kernels` derives every step. Names in brackets, such as [logits], are names of its
steps. Read the files in this order:

- :mod:`.forward` and :mod:`.backward`: the two passes, from top to bottom;
- :mod:`.layer`: the tensors of a call, their blocks and work buffers, and the steps that both passes share;
- :mod:`.contraction`: the two sums for other routings, and their gradients.

Inside, poses are (B, K, I) and weights (J, D, K, I). The long axis comes last, and each step is a matrix product or
runs along it. A block is the part of the weights that is processed at a time, (j, D, K·i); small letters are its sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchcaps.kernels.dense.backward import backward
from torchcaps.kernels.dense.contraction import COUPLING, PARENTS, Contraction, Factors, contraction
from torchcaps.kernels.dense.forward import forward
from torchcaps.kernels.dense.layer import Options, Results, Tensors, working_dtype
from torchcaps.kernels.operation import Operation

__all__ = [
    "COUPLING",
    "PARENTS",
    "Contraction",
    "Factors",
    "Options",
    "Results",
    "Tensors",
    "bytes_of_row",
    "contraction",
    "route_operation",
]


def route_operation(plain: Callable[[Tensors, Options], Results]) -> Operation[Tensors, Options, Results]:
    """Return the operation of dynamic routing, whose plain formula is that of :func:`torchcaps.dynamic_routing`."""
    return Operation(
        "route",
        Tensors,
        Options,
        Results,
        forward=forward,
        backward=backward,
        plain=plain,
        fake=_fake,
        plain_bytes=lambda tensors, _: len(tensors.poses) * bytes_of_row(tensors),
        read=lambda options: (1, 2) if options.stop_gradient else (2,),
    )


def bytes_of_row(tensors: Tensors) -> int:
    """Return the bytes of the votes of one image."""
    poses, weight, _ = tensors
    return math.prod(weight.shape[:3]) * working_dtype(poses, weight).itemsize


def _fake(tensors: Tensors, options: Options) -> Results:
    """Return results without numbers, with the shapes, strides and dtypes of ``forward``."""
    poses, weight, _ = tensors
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    working = poses.new_empty(0, dtype=working_dtype(poses, weight))
    return Results(
        poses.new_empty(B, J, D, dtype=torch.promote_types(poses.dtype, weight.dtype)),
        working.new_empty((J, B, I) if options.keep_coupling else (0, 0, 0)).permute(1, 2, 0),
        working.new_empty(max(options.num_iterations, 1), B, J, D),
    )
