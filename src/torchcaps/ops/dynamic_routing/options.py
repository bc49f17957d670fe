"""A call of :func:`torchcaps.route` as the fast paths take it: its options, its tensors, the gradients it wants."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

#: The arguments of an operation that is registered with torch: ``Options.scalars`` follow the tensors.
LAYER_SCHEMA = "Tensor poses, Tensor weight, Tensor? bias, Tensor? prior"
OPTIONS_SCHEMA = "int num_iterations, bool over_inputs, bool stop_gradient, bool leaky, float eps"


@dataclass(frozen=True)
class Options:
    """What :func:`torchcaps.route` is told beside its tensors."""

    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float

    @property
    def scalars(self) -> tuple[int, bool, bool, bool, float]:
        """The fields, in the order of ``OPTIONS_SCHEMA``."""
        return astuple(self)

    @property
    def constant_coupling(self) -> bool:
        """No gradient flows through the coupling."""
        return self.stop_gradient or self.num_iterations == 0

    def uniform_coupling(self, num_inputs: int, num_outputs: int) -> float:
        """[first sum] c¹ without a prior, one number; 1 if there is no routing at all."""
        if self.num_iterations == 0:
            return 1.0
        return 1.0 / ((num_inputs if self.over_inputs else num_outputs) + self.leaky)


def in_memory_order(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"], prior: Float[Tensor, "I J"] | None
) -> tuple[Float[Tensor, "B K I"], Float[Tensor, "J D K I"], Float[Tensor, "J I"] | None]:
    """Poses, weight and prior with the input capsules next to each other in memory.

    No copy of poses and weights that are laid out so already, as the project's layers keep them.
    """
    return (
        poses.transpose(1, 2).contiguous(),
        weight.permute(1, 2, 3, 0).contiguous(),
        None if prior is None else prior.t().contiguous(),
    )


@dataclass(frozen=True)
class Wanted:
    """Which of the tensors want a gradient."""

    poses: bool
    weight: bool
    bias: bool
    prior: bool

    @classmethod
    def of(cls, ctx: Any, options: Options) -> Wanted:
        """Of a call that autograd goes back through; a prior gets nothing through a constant coupling."""
        poses, weight, bias, prior = ctx.needs_input_grad[:4]
        return cls(poses, weight, bias, prior and not options.constant_coupling)

    @property
    def flags(self) -> list[bool]:
        """The fields, as an operation registered with torch takes them."""
        return list(astuple(self))

    def pick(self, grads: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients of all four tensors as autograd wants them: None where none is wanted."""
        return tuple(grad if want else None for grad, want in zip(grads, self.flags, strict=True))

    def empty(self, *tensors: Tensor | None) -> list[Tensor]:
        """Room for the gradients of the four tensors, in the order of memory in which the fast paths make them.

        An empty tensor stands for one that is not wanted, as an operation registered with torch returns no None.
        """
        poses = tensors[0]
        assert poses is not None
        orders = ((0, 2, 1), (1, 2, 3, 0), (0, 1), (1, 0))  # of memory, outermost axis first
        return [
            _empty_in_order(tensor, order) if want and tensor is not None else poses.new_empty(0)
            for tensor, order, want in zip(tensors, orders, self.flags, strict=True)
        ]


def _empty_in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    memory = tensor.new_empty([tensor.shape[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(tensor.ndim)])
