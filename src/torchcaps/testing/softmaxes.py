"""Record the softmaxes that torch computes, to tell which axis a routing normalises."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.tracing import TorchDispatchMode


class Softmax(NamedTuple):
    """A recorded softmax: shape of its logits, axis, and for each axis whether the logits differ along it."""

    shape: tuple[int, ...]
    axis: int
    differs: tuple[bool, ...]
    of_softmax: bool
    """True if the logits are the result of another softmax plus something."""


class Watch(TorchDispatchMode):
    """Record every softmax that torch computes, and follow its result to the logits of a later softmax.

    Args:
        still: Replace all random numbers by zero.
    """

    SOFTMAXES = ("softmax", "_softmax")
    KEEPS = ("mul", "div", "minimum", "maximum", "clamp", "where", "masked_fill", "clone", "_to_copy")
    """Operations that only scale, mask or copy."""

    def __init__(self, *, still: bool = False) -> None:
        super().__init__()
        self.still, self.softmaxes = still, list[Softmax]()
        # by memory address: the tensor, and True if something was added to it
        self.followed: dict[int, tuple[Tensor, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because torch would import dynamo to skip it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, random = func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags
        if name in (*self.SOFTMAXES, "_log_softmax") and args[0].ndim and args[0].numel():
            self._note(*args[:2])
        result = func(*args, **(kwargs or {}))
        if self.still and random and isinstance(result, Tensor):
            result.zero_()
        if isinstance(result, Tensor):
            self._follow(name, func._schema.is_mutable, [each for each in args if isinstance(each, Tensor)], result)
        return result

    def _note(self, logits: Tensor, axis: int) -> None:
        numbers = logits.detach()
        differs = tuple(bool((numbers != numbers.narrow(n, 0, 1)).any()) for n in range(numbers.ndim))
        of_softmax = self.followed.get(memory(logits), (logits, False))[1]
        self.softmaxes.append(Softmax(tuple(logits.shape), axis % logits.ndim, differs, of_softmax))

    def _follow(self, name: str, in_place: bool, inputs: list[Tensor], result: Tensor) -> None:
        followed = [each for each in inputs if memory(each) in self.followed]
        name = name.removesuffix("_")
        if name in self.SOFTMAXES:
            self.followed[memory(result)] = (result, False)
        elif followed and (in_place or memory(result) not in map(memory, inputs)):  # not a view
            added = any(self.followed[memory(each)][1] for each in followed)
            self.followed.pop(memory(result), None)
            if name in ("add", "sub") and len(inputs) == 2:
                added = True
            elif name not in ("add", "sub", *self.KEEPS):
                return
            if result.numel() == followed[0].numel():
                self.followed[memory(result)] = (result, added)


def memory(tensor: Tensor) -> int:
    """Return the memory address of a tensor, which its views share."""
    return tensor.untyped_storage().data_ptr()
