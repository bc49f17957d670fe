"""The routing that ``check_routing`` checks, and the comparisons that its checks share."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.nn import DenseVotes, LayerSize, Routed, Routing, Votes
from torchcaps.testing.measures import Inputs, change, require

#: Largest difference, relative to the largest number, between float64 results that should be equal.
TOLERANCE = 1e-6
#: Standard deviation of the random changes of parameters when properties are checked a second time.
MOVED = 0.1

BATCH = 3


@dataclass(frozen=True)
class Subject:
    """A routing to check.

    Args:
        original: The routing of the user, which is never changed.
        sizes: Sizes of the layer: input capsules (I), their components (K), output capsules (J), their components (D).
        module: A copy that is bound to these sizes.
    """

    original: Routing
    sizes: tuple[int, int, int, int]
    module: Routing

    def inputs(self, dtype: torch.dtype = torch.float64, *, batch: int = BATCH) -> Inputs:
        """Return fixed random inputs with poses of length 1."""
        I, K, J, D = self.sizes
        shapes = {"poses": (batch, I, K), "weight": (I, J, D, K), "activations": (batch, I)}
        random = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
        drawn["poses"] /= drawn["poses"].norm(dim=-1, keepdim=True)
        drawn["activations"] = drawn["activations"].sigmoid()
        return {name: tensor.to(dtype) for name, tensor in drawn.items()}

    def call(self, inputs: Inputs, *, return_coupling: bool = True) -> Routed:
        """Call the routing as :class:`torchcaps.nn.DenseCapsules` does."""
        votes = DenseVotes(inputs["poses"], inputs["weight"])
        return self.route(votes, inputs["activations"], return_coupling=return_coupling)

    def route(self, votes: Votes, activations: Tensor | None, *, return_coupling: bool = True) -> Routed:
        """Call the routing with votes and, if any, activations of the input capsules."""
        returned = self.module(votes, activations, return_coupling=return_coupling)
        contract = "forward must return a torchcaps.nn.Routed of poses, activations or None, coupling or None"
        require(isinstance(returned, Routed), f"{contract}, got a {type(returned).__name__}")
        return returned

    def to(self, dtype: torch.dtype) -> Subject:
        """Return a copy in another precision."""
        return dataclasses.replace(self, module=copy.deepcopy(self.module).to(dtype))

    def parameters(self) -> dict[str, Tensor]:
        """Return the learned parameters, by names that no input has."""
        named = self.module.named_parameters()
        return {f"parameter {name}": tensor for name, tensor in named if tensor.requires_grad}


def fresh(subject: Subject, moved: bool = False) -> Subject:
    """Return a copy in float64, so that no check affects another one or the user's module."""
    module = copy.deepcopy(subject.original)
    module.bind(LayerSize(*subject.sizes))
    copied = dataclasses.replace(subject, module=module.to("cpu", torch.float64))
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in copied.parameters().values() if moved else ():
            parameter += MOVED * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return copied


def named_parts(routed: Routed) -> Iterable[tuple[str, Tensor | None]]:
    """Return the capsules, activations and coupling with their names."""
    return zip(("capsules", "activations", "coupling"), routed, strict=True)


def require_shapes(routed: Routed, subject: Subject, batch: int) -> None:
    """Fail unless capsules, activations and coupling have the right shapes."""
    I, _, J, D = subject.sizes
    shapes = {"capsules": (batch, J, D), "activations": (batch, J), "coupling": (batch, I, J)}
    for name, tensor in named_parts(routed):
        if tensor is not None or name == "capsules":
            actual = tuple(tensor.shape) if isinstance(tensor, Tensor) else f"none (it is a {type(tensor).__name__})"
            require(actual == shapes[name], f"it returns {name} of shape {actual} instead of {shapes[name]}")


def require_same(routed: Routed, expected: Routed, which: str, tolerance: float = TOLERANCE) -> str:
    """Fail unless capsules (and activations and coupling, if both have them) are equal up to the tolerance."""
    largest = 0.0
    for (name, one), other in zip(named_parts(routed), expected, strict=True):
        if one is not None and other is not None:
            what = f"the {name} {which}"
            shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
            require(one.shape == other.shape, f"{what} differ in their shapes, {shapes}")
            apart = change(one, other)
            words = f"{what} differ by {apart:.2g} of the largest number, more than {tolerance:.0e}"
            require(apart <= tolerance, words)
            largest = max(largest, apart)
    return f"differs by {largest:.2g} at most"


def require_finite(tensor: Tensor | None, what: str) -> None:
    """Fail if a number is NaN or infinite."""
    if isinstance(tensor, Tensor):
        bad = int((~tensor.isfinite()).sum())
        require(bad == 0, f"{what}: {bad} of {tensor.numel()} numbers are NaN or infinite")


def scored_numbers(routed: Routed) -> Tensor:
    """Return all numbers that a loss may depend on: capsules, and activations if any."""
    parts = (routed.poses.flatten(1), routed.activations)
    return torch.cat([part for part in parts if part is not None], 1)
