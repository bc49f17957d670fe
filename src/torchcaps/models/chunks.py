"""Convolve a few images at a time, so that their maps stay in the caches of a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.nn import Capsules
from torchcaps.ops.memory import get_working_memory

MAX_CHUNK_MAP_MIB = 3.0
"""Size of the largest map of a chunk, so that it stays in the caches. 1.3 to 4 MiB are equally fast with AVX2 and with
AVX-512; 16 MiB take a fifth longer."""
MAX_TRANSFORM_SHARE = 0.25
"""Share of the working memory for the largest map of a chunk, if the convolution uses the transform."""


def map_chunks(
    function: Callable[[Float[Tensor, "B C H W"]], Capsules], images: Float[Tensor, "B C H W"], largest: int, wide: bool
) -> Capsules:
    """Return ``function(images)``, computed in nearly equal chunks of images. The poses keep their order (B, K, I).

    Args:
        function: The convolutions.
        images: Pixels 0..1.
        largest: Bytes of the largest feature map of one image.
        wide: The convolution uses the transform, which is fastest with many images.
    """
    memory = get_working_memory()
    max_map_mib = memory * MAX_TRANSFORM_SHARE if wide else min(MAX_CHUNK_MAP_MIB, memory)
    chunk_size = max(1, int(max_map_mib * MIB / largest))
    if len(images) <= chunk_size:
        return function(images)
    parts = [function(part) for part in images.tensor_split(-(-len(images) // chunk_size))]
    poses = torch.cat([part.poses.transpose(1, 2) for part in parts]).transpose(1, 2)
    activations = [part.activations for part in parts if part.activations is not None]
    masks = [part.mask for part in parts if part.mask is not None]
    return Capsules(
        poses, torch.cat(activations) if activations else None, parts[0].grid, torch.cat(masks) if masks else None
    )
