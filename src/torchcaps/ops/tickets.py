"""Pass Python objects from the forward pass to the backward pass of a compiled graph.

A compiled graph passes only tensors. Therefore an object waits outside the graph, and a *ticket* (a tensor of one
number) identifies it.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Waiting = TypeVar("Waiting")


class Tickets(Generic[Waiting]):
    """Objects that wait for their backward pass, by the address of their ticket."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def leave(self, waiting: Waiting | None) -> Tensor:
        """Store an object and return its ticket. It is dropped when the ticket's memory is freed."""
        lease = np.zeros(1, np.float32)
        ticket = torch.from_numpy(lease)
        if waiting is not None:
            self._waiting[ticket.data_ptr()] = waiting
            weakref.finalize(lease, self._waiting.pop, ticket.data_ptr(), None).atexit = False
        return ticket

    def take(self, ticket: Tensor) -> Waiting | None:
        """Return the object of a ticket, once; None if none waits for it."""
        return self._waiting.pop(ticket.data_ptr(), None)
