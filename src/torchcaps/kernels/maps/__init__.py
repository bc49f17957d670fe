"""The kernel of dynamic routing on maps: votes by convolution, a slab of the map at a time.

- :mod:`.windows`: kernels that move over maps, and the slabs of a map;
- :mod:`.slabs`: the forward and backward pass over slabs.
"""

from __future__ import annotations

from torchcaps.kernels.maps.slabs import Options, Results, Tensors, map_operation, slabs_of
from torchcaps.kernels.maps.windows import Slab, Window, convolve, cropped, repeated, window_sums

__all__ = [
    "Options",
    "Results",
    "Slab",
    "Tensors",
    "Window",
    "convolve",
    "cropped",
    "map_operation",
    "repeated",
    "slabs_of",
    "window_sums",
]
