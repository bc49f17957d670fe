"""The training step captured: recorded once as a CUDA graph, then replayed for every batch.

A step of MNIST's network is some hundreds of small kernels, and on a fast GPU launching them one by one takes longer
than running them. A graph launches them at once. Replaying runs the same kernels on the same memory, so a batch is
copied to where the recorded one was, the learning rate is read from a tensor, and dropout follows the device's
generator, which is seeded anew before each step: captured and plain steps compute the same.

Every network can be captured, those with dropout too. Several processes are not: their steps meet in DDP's hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from torchcaps.datasets import Batch
from torchcaps.errors import InputError

#: Plain steps before one is recorded: they compile kernels, and libraries and Adam set up their memory.
WARM_UP = 3

Work = Callable[[], None]


class Capture(Protocol):
    """Records and replays work on a device; tests have one for the CPU."""

    def run(self, work: Work) -> None:
        """Do the work in a way that lets it be recorded afterwards."""

    def record(self, work: Work) -> Work:
        """Record the work without doing it; the function that is returned does it."""


class CudaGraphs:
    """Captures work as CUDA graphs.

    Source: PyTorch's notes on CUDA semantics, "Whole-network capture".
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def run(self, work: Work) -> None:
        """Do the work on the stream that will record it, as autograd and the libraries keep resources by stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            work()
        current.wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """Record the work as a graph with memory of its own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


class CapturedUpdate:
    """The device's part of a training step, replayed from the fourth full batch on.

    Args:
        capture: Records it.
        batch_size: Images of a full batch; smaller ones are not replayed.
    """

    def __init__(self, capture: Capture, batch_size: int) -> None:
        self._capture, self._batch_size = capture, batch_size
        self._warm = 0
        self._inputs: Batch | None = None
        self._replay: Work | None = None

    def __call__(self, update: Callable[[Batch], None], batch: Batch) -> None:
        """Do ``update(batch)``; it must be the same function each time."""
        if len(batch.labels) != self._batch_size or self._warm < WARM_UP:
            self._warm += len(batch.labels) == self._batch_size
            self._capture.run(lambda: update(batch))
        else:
            self._replay_with(update, batch)

    def _replay_with(self, update: Callable[[Batch], None], batch: Batch) -> None:
        if self._inputs is None or self._replay is None:
            images, labels, parts = batch
            inputs = Batch(images.clone(), labels.clone(), None if parts is None else parts.clone())
            self._inputs, self._replay = inputs, self._capture.record(lambda: update(inputs))
        else:
            for place, part in zip(self._inputs, batch, strict=True):
                if place is not None and part is not None:
                    place.copy_(part)
        self._replay()


def choose_capture(setting: Literal["auto", "on", "off"], device: torch.device, processes: int) -> Capture | None:
    """CUDA graphs on a CUDA device with one process; None for plain steps.

    Raises:
        InputError: Capture is asked for on a device without it.
    """
    serves = device.type == "cuda" and processes == 1
    if setting == "on" and not serves:
        raise InputError(
            f"capture is on, but training runs on {device.type} in {processes} process{'es' * (processes > 1)}; only a "
            "single process on a CUDA GPU can be captured: leave --capture out, or give --accelerator cuda --devices 1"
        )
    return CudaGraphs() if serves and setting != "off" else None
