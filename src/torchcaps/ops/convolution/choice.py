"""[choice] Which way of computing a convolution is the fastest for its sizes.

Multiplications are counted, and numbers that have to be moved, at the price of :data:`~.plan.MOVE` multiplications
each; ``benchmarks/convolution.py`` holds every choice against the clock.
"""

from __future__ import annotations

import math
from typing import Literal

from torchcaps.ops.convolution.plan import Plan, Shape, best_plan
from torchcaps.ops.memory import MIB, get_working_memory

Way = Literal["plain", "columns", "transform"]

MOST_COLUMNS = 512
"""Numbers of a window up to which copying windows is cheap beside multiplying by them."""
FEW = 4
"""Outputs of a channel in all images, as a share 1/FEW of the output channels, up to which a product is the fastest."""
LEAST_GAIN = 0.75
"""Cost of the transform, in that of the plain convolution, up to which it is taken."""


def choose(shape: Shape, images: int, learning: bool) -> Way:
    """The fastest way for so many images, within the working memory.

    Args:
        shape: Of the convolution.
        images: B.
        learning: Whether gradients will be asked for.
    """
    if min(shape.out) < 1 or images == 0:
        return "plain"
    window = math.prod(shape.kernel) * shape.channels
    places = images * math.prod(shape.out)
    if shape.channels < 16 and window <= MOST_COLUMNS and shape.outputs >= 64:
        return "columns"
    if not learning and FEW * places <= shape.outputs:
        return "columns"
    plan = best_plan(shape, images)
    pays = plan.cost(images) <= LEAST_GAIN * images * shape.multiplications
    return "transform" if pays and images_at_once(plan, images) else "plain"


def images_at_once(plan: Plan, images: int) -> int:
    """How many images' work buffers fit into the working memory; 0 where they are too few for the transform to pay."""
    numbers = get_working_memory() * MIB / 4 - plan.numbers_of_kernel
    fitting = min(int(numbers / plan.numbers_of_image), images)
    if fitting < 1:
        return 0
    at_once = -(-images // -(-images // fitting))  # nearly equal parts
    pays = plan.cost(at_once) <= LEAST_GAIN * at_once * plan.shape.multiplications
    return at_once if pays else 0
