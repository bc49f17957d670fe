"""The kernel of convolutions on a CPU: three algorithms, of which the fastest for the sizes is chosen.

``README.md`` of :mod:`torchcaps.kernels` derives the transform. Read the files in this order:

- :mod:`.points`: cuts a convolution into phases and tiles, and makes the matrices of the transform;
- :mod:`.transform`: forward and backward pass by the transform, from top to bottom;
- :mod:`.columns`: a convolution as one matrix product, for few input channels or very few images;
- :mod:`.choice`: chooses the algorithm;
- :mod:`.passes`: forward and backward pass with the chosen algorithm.
"""

from __future__ import annotations

from torchcaps.kernels.convolution.choice import choose
from torchcaps.kernels.convolution.passes import (
    Options,
    Results,
    Tensors,
    backward,
    fake,
    forward,
    plain,
    shape_of,
    suits,
)
from torchcaps.kernels.convolution.points import Pair, Shape
from torchcaps.kernels.operation import Operation

__all__ = ["Options", "Pair", "Shape", "Tensors", "choose", "convolution", "shape_of"]

convolution = Operation(
    "convolve",
    Tensors,
    Options,
    Results,
    forward=forward,
    backward=backward,
    plain=plain,
    fake=fake,
    suits=suits,
    read=lambda options: (0,) if options.relu else (),
)
