"""Training steps give their memory back: a step leaves no tensors behind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import routings
from torchcaps.machine import MIB
from torchcaps.nn import Capsules, ConvCapsules, ConvTypeCapsules, DenseCapsules

STEPS = 6
VOTES_MIB = 2
ROUTINGS = routings(**{"dynamic, cosine": {"name": "dynamic", "agreement": "cosine", "squash": "last"}})
#: Layers by kind, with the sizes of their input; the votes take 2 MiB.
LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], tuple[int, ...] | None]] = {
    "dense": (lambda routing: DenseCapsules(128, 16, 16, 16, routing=routing), (16, 128, 16), None),
    "map": (
        lambda routing: ConvCapsules(4, 16, 8, 16, transform="matrix", routing=routing),
        (2, 4 * 9 * 9, 16),
        (4, 9, 9),
    ),
    "types of a map": (
        lambda routing: ConvTypeCapsules(4, 8, 4, 8, layer_padding=1, transform="dense", routing=routing),
        (1, 4 * 64 * 64, 8),
        (4, 64, 64),
    ),
}


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        *((name, ctypes.c_size_t) for name in ("hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated_mib() -> float:
    """Return the memory that the process has allocated and not freed; resident memory also has freed parts."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, TypeError):
        pytest.skip("needs glibc 2.33")
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return float(found.uordblks + found.hblkhd) / MIB


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_steps_leave_no_memory_allocated(routing: str, kind: str) -> None:
    make, size, grid = LAYERS[kind]
    layer = make(ROUTINGS[routing])

    def step() -> None:
        capsules = Capsules(torch.rand(size), torch.rand(size[:2]), grid)
        layer(capsules).poses.square().mean().backward()
        layer.zero_grad()

    step()
    step()  # fills the pool of buffers
    before = allocated_mib()
    for _ in range(STEPS):
        step()
    assert allocated_mib() - before < VOTES_MIB * STEPS / 4
