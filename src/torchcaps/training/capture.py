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
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from torchcaps.datasets import Batch
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.training.config import TrainConfig
from torchcaps.training.step import TrainStep

if TYPE_CHECKING:
    from lightning_fabric import Fabric

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


class CapturedStep:
    """A training step that is replayed, from its fourth full batch on.

    Args:
        step: The step, made with ``capturable=True``.
        capture: Records it.
        batch_size: Images of a full batch; smaller ones use the plain step.
    """

    def __init__(self, step: TrainStep, capture: Capture, batch_size: int) -> None:
        self._step, self._capture, self._batch_size = step, capture, batch_size
        self._warm = 0
        self._inputs: Batch | None = None
        self._replay: Work | None = None

    def __call__(self, batch: Batch, step: int, learning_rate: float) -> None:
        """Make a step; see :class:`~torchcaps.training.step.TrainStep`."""
        self._step.prepare(step, learning_rate)
        if len(batch.labels) != self._batch_size or self._warm < WARM_UP:
            self._warm += len(batch.labels) == self._batch_size
            self._capture.run(lambda: self._step.update(batch))
        else:
            self._replay_with(batch)

    def _replay_with(self, batch: Batch) -> None:
        if self._inputs is None or self._replay is None:
            images, labels, parts = batch
            inputs = Batch(images.clone(), labels.clone(), None if parts is None else parts.clone())
            self._inputs, self._replay = inputs, self._capture.record(lambda: self._step.update(inputs))
        else:
            for place, part in zip(self._inputs, batch, strict=True):
                if place is not None and part is not None:
                    place.copy_(part)
        self._replay()


class Steps(NamedTuple):
    """The steps of a run."""

    plain: TrainStep
    """The plain step, which holds the network, the optimizer and the tally."""
    captured: CapturedStep | None
    """The same step captured, if it can be."""

    @property
    def make(self) -> TrainStep | CapturedStep:
        """The step to call for each batch."""
        return self.captured or self.plain


def set_up_steps(fabric: Fabric, config: TrainConfig, network: Network) -> Steps:
    """Bring a network to its device, give it its optimizer, and choose between plain and captured steps.

    Args:
        fabric: The devices of the run, from :func:`torchcaps.training.launch.launch`.
        config: The run.
        network: The network.

    Raises:
        InputError: Capture is asked for on a device without it.
    """
    capture = choose_capture(config.capture, fabric.device, fabric.world_size)
    plain = TrainStep(fabric, network, config.recipe, seed=config.seed, capturable=capture is not None)
    return Steps(plain, None if capture is None else CapturedStep(plain, capture, config.recipe.batch_size))


def choose_capture(setting: Literal["auto", "on", "off"], device: torch.device, processes: int) -> Capture | None:
    """CUDA graphs on a CUDA device with one process; None for plain steps.

    Args:
        setting: ``TrainConfig.capture``.
        device: The device of the steps.
        processes: How many processes train together.

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
