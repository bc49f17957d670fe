"""Capsule layers: a transform computes votes, and a routing computes output capsules from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, Capsules, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.transforms import Transform
from torchcaps.nn.votes import Votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.parts import Choice, Spec, build

TransformSpec = Annotated[Spec, Choice("transform")]
RoutingSpec = Annotated[Spec, Choice("routing")]


class CapsuleLayer(nn.Module, ABC):
    """Base class of capsule layers: builds a transform and a routing for the sizes I, K, J, D.

    Args:
        size: Sizes of the layer.
        transform: Name or module of the transform.
        routing: Name or module of the routing.
        competitors: Number of output capsules that compete for one input capsule. None: J.
        transform_size: Sizes of the transform, if they differ.
        summed: Number of input capsules that one vote is summed over.
    """

    __call__: Callable[..., Capsules]

    def __init__(
        self,
        size: LayerSize,
        transform: TransformSpec,
        routing: RoutingSpec,
        competitors: int | None = None,
        transform_size: LayerSize | None = None,
        summed: float = 1.0,
    ) -> None:
        super().__init__()
        self.size = size
        self.in_capsules, self.in_dim, self.out_capsules, self.out_dim = size
        self.transform: Transform = build("transform", transform)
        self.routing: Routing = build("routing", routing)
        for part, kind in ((self.transform, Transform), (self.routing, Routing)):
            check(f"{type(self).__name__}: {kind.__name__.lower()}", part, kind)
        competing = size if competitors is None else size._replace(out_capsules=competitors)
        _bind(self.transform, transform_size or size, self.routing.balanced_std(competing) / math.sqrt(summed))
        _bind(self.routing, size)

    @abstractmethod
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: the votes, and the activations of the input capsules."""

    @computed_in_full_precision
    def route(self, capsules: Capsules | Float[Tensor, "B I K"], *, return_coupling: bool = False) -> Routed:
        """Compute votes and route them.

        A layer on a map routes each window: it returns poses (B·L, T, D) and coupling (B·L, I, T), position by
        position.

        Args:
            capsules: Input capsules. A layer without a map also takes a tensor of poses.
            return_coupling: Also return the coupling c_ij of the last iteration.

        Raises:
            InputError: Poses of another shape or device, or a routing whose result does not have the sizes of the
                layer.
        """
        routed, dtype = self._route_in_full_precision(capsules, return_coupling)
        return routed.to(dtype)

    def _route_in_full_precision(
        self, capsules: Capsules | Float[Tensor, "B I K"], return_coupling: bool = False
    ) -> tuple[Routed, torch.dtype]:
        """Return the result of the routing in full precision, and the dtype to convert it to."""
        votes, activations = self.votes(capsules)  # type: ignore[arg-type]  # subclasses may take a tensor of poses
        dtype, votes.dtype = votes.dtype, votes.like.dtype
        return self._routed(votes, activations, return_coupling), dtype

    def _routed(self, votes: Votes, activations: Activations, return_coupling: bool = False) -> Routed:
        """Call the routing, and check its result."""
        activations = None if activations is None else votes.present(activations)
        routed = self.routing(votes, activations, return_coupling=return_coupling)
        name = type(self.routing).__name__
        if not isinstance(routed, Routed):
            raise InputError(
                f"{name} must return Routed(poses, activations, coupling) of torchcaps.nn, got {type(routed).__name__}"
            )
        try:
            self._look_at(*routed)
        except InputError as error:
            raise InputError(f"{name} returned a result that does not fit the layer: {error}") from None
        return routed.masked(votes.mask)

    def _transformed(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """Return the votes that the transform computes from poses."""
        tensors = self.transform(poses)
        if not isinstance(tensors, tuple) or not all(isinstance(each, Tensor) for each in tensors):
            name = type(self.transform).__name__
            raise InputError(
                f"{name}.forward must return a tuple of tensors, the arguments of {name}.votes, got "
                f"{type(tensors).__name__}"
            )
        return self.transform.votes(*tensors)

    @checked
    def _look_at(
        self,
        poses: Float[Tensor, "B {self.out_capsules} {self.out_dim}"],
        activations: Float[Tensor, "B {self.out_capsules}"] | None,
        coupling: Float[Tensor, "B {self.in_capsules} {self.out_capsules}"] | None,
    ) -> None:
        """Raise InputError unless the result of a routing has the sizes of the layer."""


def _bind(part: Transform | Routing, size: LayerSize, *arguments: float) -> None:
    """Bind a part to the sizes of a layer.

    Raises:
        InputError: The part holds parameters, buffers or sizes of another layer.
    """
    kind = "transform" if isinstance(part, Transform) else "routing"
    if part.size is not None and (part.keeps_sizes or part.state_dict()):
        raise InputError(f"{type(part).__name__}: this {kind} already belongs to a layer; make one for each")
    before, part.size = _attributes(part), size
    part.bind(size, *arguments)
    after = _attributes(part)
    part.keeps_sizes = before.keys() != after.keys() or any(after[name] is not before[name] for name in before)


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of a part except its size, to see which ones change."""
    attributes: dict[str, Any] = vars(part) | part._parameters | part._buffers | part._modules
    return {name: value for name, value in attributes.items() if name != "size"}
