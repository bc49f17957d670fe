"""The limit on the memory for work buffers."""

from __future__ import annotations

from torchcaps.kernels.memory import get_working_memory, set_working_memory

__all__ = ["get_working_memory", "set_working_memory"]
