"""[choice] Choose the fastest algorithm of a convolution for its sizes.

Costs are counted in multiplications. Moving a number into planes or out of them costs :data:`~.points.MOVE_COST`
multiplications, and each plane costs :data:`~.points.PLANE_COST`. Both were fitted to times on two cores with AVX-512
and with AVX2, which gave similar values. ``benchmarks/speed.py choice`` compares the choice with measured times on any
machine.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchcaps.kernels.convolution.points import MOVE_COST, Plan, Shape, best_plan
from torchcaps.kernels.memory import get_working_memory, piece
from torchcaps.machine import MIB

Way = Literal["plain", "columns", "transform"]

MIN_OUTPUTS_PER_POSITION = 5
"""With at least 5 times as many output channels as output positions of all images, reading the weight dominates."""
MIN_CHANNELS = 16
"""Input channels from which PyTorch's convolution and the transform are efficient."""
MAX_MAP_BYTES = 32 * MIB
"""Bytes of maps (or of a reordered weight) above which glibc requests new memory from the system at each call."""
MIN_TRIMMED_OUTPUTS = 128
"""With at least this many outputs, training slows down at half of MAX_MAP_BYTES already (glibc trims the heap)."""
MIN_MAP_BYTES = MIB // 4
"""Bytes of maps below which all algorithms take about the same time."""
MIN_CONTIGUOUS_KERNEL = 2**18
"""Numbers of a kernel from which PyTorch's convolution is fastest with contiguous features."""
MIN_KERNEL_PER_FEATURES = 4
"""Numbers of a kernel for each number of the features from which this holds for smaller kernels too."""
WEIGHT_MOVES = 3
"""Number of times that PyTorch's convolution copies the weight to another memory order."""
MAX_COST_RATIO = 1.05
"""Largest ratio of estimated costs, transform ÷ plain, at which the transform is taken."""


def choose(shape: Shape, images: int, learning: bool) -> Way:
    """Return the fastest algorithm within the working memory.

    Args:
        shape: Sizes of the convolution.
        images: Number of images.
        learning: True if gradients will be computed.
    """
    positions = images * math.prod(shape.out)
    weight = shape.channels * shape.outputs * math.prod(shape.kernel)  # numbers
    wide_vectors = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if MIN_OUTPUTS_PER_POSITION * positions <= shape.outputs:
        return "columns"  # reads the weight in its memory order; PyTorch copies it to another order
    if shape.channels < MIN_CHANNELS:
        map_bytes = 4 * positions * shape.outputs
        slow = learning and shape.channels == 1 and not wide_vectors
        trimmed = learning and shape.outputs >= MIN_TRIMMED_OUTPUTS
        too_large = map_bytes > (MAX_MAP_BYTES // 2 if trimmed else MAX_MAP_BYTES)
        return "columns" if too_large or (slow and map_bytes >= MIN_MAP_BYTES) else "plain"
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images)
    plain_cost = float(at_once * weight * math.prod(shape.out) + MOVE_COST * WEIGHT_MOVES * weight)
    return "transform" if at_once > 0 and plan.cost(at_once) <= MAX_COST_RATIO * plain_cost else "plain"


def plain_layout(weight: Tensor, features: Tensor | None = None) -> torch.memory_format:
    """Return the memory layout of features with which PyTorch's convolution with a contiguous kernel is fastest.

    Channels last is faster, but PyTorch then copies the kernel to that layout too, which costs more for large kernels
    and for few features. Without ``features``, the layout for many images.
    """
    few = features is not None and weight.numel() >= MIN_KERNEL_PER_FEATURES * features.numel()
    return torch.contiguous_format if few or weight.numel() >= MIN_CONTIGUOUS_KERNEL else torch.channels_last


def images_at_once(plan: Plan, images: int) -> int:
    """Return the number of images to process together within the working memory; 0 if a single image does not fit."""
    fitting = int((get_working_memory() * MIB / 4 - plan.numbers_of_kernel) / plan.numbers_of_image)
    return piece(images, fitting) if fitting > 0 else 0
