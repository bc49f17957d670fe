"""[choice] Which way of computing a convolution is the fastest for its sizes.

Work is counted in multiplications. A number that has to be moved, into planes or out of them, costs as much as
:data:`~.points.MOVE` of them, and a plane costs :data:`~.points.CALLS`, whatever its size. The prices were fitted to
times on two cores with AVX-512 and with AVX2, where they are alike; ``benchmarks/speed.py choice`` holds the choice
against the clock on any machine.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.convolution.points import MOVE, Plan, Shape, best_plan
from torchcaps.ops.memory import get_working_memory, nearly_equal

Way = Literal["plain", "columns", "transform"]

FEW = 5
"""With this many times fewer places, of all images, than output channels, reading the weight is most of the work."""
NARROW = 16
"""Input channels from which on a convolution has enough of them for PyTorch's own way, or for planes."""
LARGE = 32 * MIB
"""Bytes beyond which the system's allocator (glibc's) takes memory anew from the system at each call: of maps, or of a
weight in another order."""
BROAD = 128
"""Output channels from which on half of :data:`LARGE` tells in training: the allocator gives back what lies last."""
SMALL = MIB // 4
"""Bytes of maps below which no way is worth choosing."""
LARGE_KERNEL = 2**18
"""Numbers of a kernel from which on PyTorch's convolution is fastest with contiguous features."""
REORDERED = 3
"""How often PyTorch's convolution moves the weight, into orders of its own and back."""
LEAST_GAIN = 1.05
"""The transform's cost in that of the plain convolution up to which it is taken."""


def choose(shape: Shape, images: int, learning: bool) -> Way:
    """The fastest way for so many images, within the working memory; ``learning``: gradients will be asked for."""
    places = images * math.prod(shape.out)
    weight = shape.channels * shape.outputs * math.prod(shape.kernel)  # numbers
    wide_vectors = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if FEW * places <= shape.outputs:
        return "columns"  # reads the weight as it lies in memory, where PyTorch lays it out anew
    if shape.channels < NARROW:
        maps = 4 * places * shape.outputs
        slow = learning and shape.channels == 1 and not wide_vectors
        large = LARGE // 2 if learning and shape.outputs >= BROAD else LARGE
        return "columns" if maps > large or (slow and maps >= SMALL) else "plain"
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images)
    plain = float(at_once * weight * math.prod(shape.out) + MOVE * REORDERED * weight)  # multiplications of PyTorch's
    return "transform" if at_once > 0 and plan.cost(at_once) <= LEAST_GAIN * plain else "plain"


def plain_layout(weight: Tensor) -> torch.memory_format:
    """Return the memory layout of features in which PyTorch's own convolution with a contiguous kernel is fastest.

    Small maps are computed faster with channels last, but a large kernel would have to be brought to that layout, too.
    """
    return torch.contiguous_format if weight.numel() >= LARGE_KERNEL else torch.channels_last


def images_at_once(plan: Plan, images: int) -> int:
    """How many images' work buffers fit into the working memory, in nearly equal parts; 0 if not those of one."""
    fitting = int((get_working_memory() * MIB / 4 - plan.numbers_of_kernel) / plan.numbers_of_image)
    return nearly_equal(images, fitting) if fitting > 0 else 0
