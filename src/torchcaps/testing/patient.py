"""The module that ``diagnose`` examines: called safely, with fixed inputs and recorded softmaxes."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.errors import InputError, reason_of
from torchcaps.nn import CapsuleLayer, Capsules
from torchcaps.nn.slots import SlotLayer
from torchcaps.testing.measures import place_of
from torchcaps.testing.softmaxes import Softmax, Watch

#: Shortest length of output capsules to diagnose with, and factors on the inputs (of length one) that are tried.
MIN_LENGTH, FACTORS = 0.3, (1.0, 10.0, 100.0, 1e3, 1e4)


class Patient:
    """A module of any origin, its fixed inputs, and its results.

    Args:
        module: The module; a copy is called.
        shape: Shape of its input, (B, I, K) or (B, C, H, W).
        mask: Mask of the input capsules (B, I), if any.
    """

    def __init__(self, module: nn.Module, shape: Sequence[int], mask: Tensor | None) -> None:
        if len(shape) not in (3, 4) or not all(isinstance(size, int) and size > 0 for size in shape) or shape[0] < 2:
            raise InputError(f"diagnose: shape must be (B, I, K) or (B, C, H, W), B at least 2, got {tuple(shape)}")
        if mask is not None and (len(shape) == 4 or tuple(mask.shape) != tuple(shape[:2])):
            raise InputError(f"diagnose: mask must have shape (B, I) of poses {tuple(shape)}, got {tuple(mask.shape)}")
        self.name, self.shape, self.factor = type(module).__name__, tuple(shape), 1.0
        self.of_images = len(shape) == 4
        numbers = (each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point())
        self.like = next(numbers, torch.empty(0)).detach()
        self.mask = None if mask is None else mask.to(self.like.device)
        try:
            self.module = copy.deepcopy(module).eval()
        except Exception as error:
            raise InputError(f"diagnose: a {self.name} cannot be copied: {reason_of(error)}") from error
        if self.like.dtype in (torch.float16, torch.bfloat16):
            self.module, self.like = self.module.float(), self.like.float()
        if any(map(nn.parameter.is_lazy, self.module.parameters())):  # so that all copies get the same weights
            self.call(self.inputs(), module=self.module)
        length = 0.0
        for factor in (1.0,) if self.of_images else FACTORS:  # short votes would hide effects
            self.factor = factor
            self.poses = self.inputs()
            self.result = self.call(self.poses)
            before, length = length, float(self.result.norm(dim=-1).max())
            if length >= MIN_LENGTH or length < 1.5 * before:
                break
        if not self.result.isfinite().all():
            raise InputError(f"diagnose: a {self.name} returns NaN or infinity for random inputs, so no check can run")
        self.out_capsules = self.result.shape[1]
        self.out_dim = self.result.shape[2] if self.result.ndim == 3 else 1
        # a batch size that differs from all other sizes, so that its axis can be identified; if the module takes it
        sizes = {*self.shape[1:], self.out_capsules, self.out_dim}
        distinct = (n for n in (7, 11, 13, 17, 19, 23, 29) if all(size % n for size in sizes))
        self.batch = next(distinct, self.shape[0])
        try:
            self.softmaxes = self.watched()
        except InputError:
            self.batch = self.shape[0]
            self.softmaxes = self.watched()

    def inputs(self, seed: int = 0, batch: int | None = None) -> Tensor:
        """Return random poses of length ``factor``, or images of random pixels 0..1."""
        random, shape = torch.Generator().manual_seed(seed), (batch or self.shape[0], *self.shape[1:])
        if self.of_images:
            return torch.rand(shape, generator=random).to(self.like)
        poses = torch.randn(shape, generator=random)
        return (self.factor * poses / poses.norm(dim=-1, keepdim=True)).to(self.like)

    def call(
        self, inputs: Tensor, mask: Tensor | None = None, *, module: nn.Module | None = None, seed: int = 0
    ) -> Tensor:
        """Call a fresh copy, or ``module``, and return its result (B, J, D), or (B, J) of a network."""
        module = copy.deepcopy(self.module) if module is None else module
        mask = self.mask if mask is None else mask
        inputs = inputs.clone()  # the call may change it
        arguments: tuple[Any, ...] = (inputs,) if mask is None else (inputs, mask)
        if mask is not None and isinstance(module, CapsuleLayer | SlotLayer):
            arguments = (Capsules(inputs, mask=mask),)
        device = self.like.device
        called = f"diagnose: a {self.name}, called with {tuple(inputs.shape)},"
        try:
            with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                warnings.simplefilter("ignore")
                torch.manual_seed(seed)
                result = first_tensor(module(*arguments))
        except Exception as error:
            raised = f"{type(error).__name__}: {reason_of(error)} ({place_of(error, module)})"
            raise InputError(f"{called} raises {raised}") from error
        if result is None:
            raise InputError(f"{called} returns no tensor")
        for axis in range(result.ndim - 1, 0, -1):
            result = result.squeeze(axis) if result.ndim > 3 else result  # removes only axes of size one
        if result.ndim not in ((2, 3) if self.of_images else (3,)) or len(result) != len(inputs):
            meant = "(B, J) or (B, J, D)" if self.of_images else "(B, J, D)"
            raise InputError(f"{called} must return {meant} first, got {tuple(result.shape)}")
        return result

    @functools.cached_property
    def after_others(self) -> tuple[Tensor, Tensor]:
        """Results of one copy: first for other inputs, then for the usual inputs."""
        module = copy.deepcopy(self.module)
        return self.call(self.inputs(seed=1), module=module, seed=1), self.call(self.poses, module=module)

    def watched(self, module: nn.Module | None = None) -> list[Softmax]:
        """Return the softmaxes of a call."""
        mask = None if self.mask is None else self.mask[torch.arange(self.batch) % len(self.mask)]
        with Watch() as watch:
            self.call(self.inputs(batch=self.batch), mask, module=module)
        return watch.softmaxes

    def over(self, softmax: Softmax) -> Literal["outputs", "inputs", "nothing", "something else"]:
        """Return the axis of a softmax whose logits have 1 or D numbers for each pair of capsules of each image."""
        J, D, B = self.out_capsules, self.out_dim, self.batch
        size, others = softmax.shape[softmax.axis], [*softmax.shape]
        del others[softmax.axis]
        if J == 1 or size in others:  # the second case is attention among tokens
            return "something else"
        if size == J:
            return "outputs" if math.prod(others) > B else "something else"  # such as a softmax of scores
        of_pairs = not {J, J * D, B * J, B * J * D}.isdisjoint(others)
        if of_pairs and size == 1 and (self.of_images or self.shape[1] > 1):
            return "nothing"
        is_inputs = size not in (1, D, B) if self.of_images else size == self.shape[1] not in (1, D, B)
        return "inputs" if of_pairs and is_inputs else "something else"


def first_tensor(returned: object) -> Tensor | None:
    """Return the first tensor in the return value of a module."""
    if isinstance(returned, Tensor):
        return returned
    if not isinstance(returned, (tuple, list, Mapping)):
        returned = getattr(returned, "__dict__", ())
    parts: Any = returned.values() if isinstance(returned, Mapping) else returned
    return next((tensor for tensor in map(first_tensor, parts) if tensor is not None), None)
