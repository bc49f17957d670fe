"""How many images go through a network's convolutions at a time on a CPU where nothing is learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.nn.flow import Capsules
from torchcaps.ops.memory import get_working_memory

MAP = 3.0
"""MiB of the largest map of a part: it stays in the caches. From 1.3 to 4 MiB are equally fast, with AVX2 and AVX-512;
16 MiB take a fifth longer."""
WIDE = 0.25
"""The share of the working memory that the largest map of a part may take where planes are multiplied."""


def only_infers(images: Tensor) -> bool:
    """Whether these are computed on a CPU, at once, and nothing is kept for a backward pass."""
    return images.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def images_in_part(map_bytes: int, wide: bool) -> int:
    """How many images are best taken through the convolutions at a time, by the largest map of an image.

    A ``wide`` primary convolution goes by products of planes, which want many images.
    """
    most = get_working_memory() * WIDE if wide else min(MAP, get_working_memory())
    return max(1, int(most * MIB / map_bytes))


def in_parts(
    function: Callable[[Float[Tensor, "B C H W"]], Capsules], images: Float[Tensor, "B C H W"], largest: int
) -> Capsules:
    """``function(images)``, at most ``largest`` images at a time, in nearly equal parts.

    The poses keep their memory order (B, K, I).
    """
    if len(images) <= largest:
        return function(images)
    parts = [function(part) for part in images.tensor_split(-(-len(images) // largest))]
    poses = torch.cat([part.poses.transpose(1, 2) for part in parts]).transpose(1, 2)
    given = [part.activations for part in parts if part.activations is not None]
    return parts[0]._replace(poses=poses, activations=torch.cat(given) if given else None)
