"""A stand-in for CUDA graphs on the CPU: operations are recorded with the tensors they work on, and run again.

As with a graph, Python does not run again: numbers that it chose are as they were when the work was recorded,
operations read and write the memory that they did then, and nobody may look at a value while they are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that would wait for a device, or bring Python's numbers to it; a graph cannot hold them.
FORBIDDEN = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "lift_fresh", "repeat_interleave.Tensor"
)  # fmt: skip

#: These look at labels that lie on the CPU, or have torch's one_hot do so, and do not where labels lie on a device.
LOOKS_ON_THE_CPU_ONLY = tuple(map(Path, ("ops/losses.py", "models/objects.py", "nn/decoder.py")))

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class Recorder:
    """Records and replays; it is a :class:`torchcaps.training.capture.Capture`."""

    def __init__(self) -> None:
        self.runs = self.replays = 0
        self.calls: list[Call] = []

    def run(self, work: Callable[[], None]) -> None:
        self.runs += 1
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        recording = _Recording()
        with recording:
            work()
        recording.undo()
        self.calls = recording.calls

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for call in recording.calls:
                    _again(*call)

        return replay


class _Recording(TorchDispatchMode):
    """Runs what it records, and can bring back what was before: recording draws no random number either."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._own: set[int] = set()
        self._dice = torch.get_rng_state()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        by_mask = name.startswith("index") and any(leaf.dtype == torch.bool for leaf in _tensors(args[1:2]))
        if (name.startswith(FORBIDDEN) or by_mask) and not _called_by(LOOKS_ON_THE_CPU_ONLY):
            raise RuntimeError(f"{name} is not permitted while work is recorded")
        for tensor in _written(func, args, kwargs):
            if (memory := _memory(tensor)) not in self._own and memory not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[memory] = (whole, whole.clone())
        result = func(*args, **kwargs)
        self._own.update(_memory(tensor) for tensor in _fresh(func, args, kwargs, result))
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """A graph that is recorded has done nothing yet."""
        for memory, before in self._before.values():
            memory.copy_(before)
        torch.set_rng_state(self._dice)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Any) -> None:
    """Run an operation, its results in the memory that they had when it was recorded."""
    result = func(*args, **kwargs)
    for old, new in zip(_tensors(recorded), _tensors(result), strict=True):
        if _memory(old) != _memory(new):
            old.copy_(new)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for n, argument in enumerate(func._schema.arguments):
        statistics = argument.name.startswith("running_")  # batch normalisation writes them without saying so
        if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _fresh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterable[Tensor]:
    given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
    return (tensor for tensor in _tensors(result) if _memory(tensor) not in given)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _called_by(files: Iterable[Path]) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if any(frame.f_code.co_filename.endswith(str(file)) for file in files):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
