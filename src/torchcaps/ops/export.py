"""Whether a model is being exported, which the fast paths make way for."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether a graph is being made of torch's own operations, as for ONNX."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it
