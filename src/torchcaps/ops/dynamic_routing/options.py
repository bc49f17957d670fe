"""A call of :func:`torchcaps.route` as the fast paths take it: its tensors, then its options one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

#: The arguments of an operation that is registered with torch: the fields of ``Options`` follow the tensors.
LAYER_SCHEMA = "Tensor poses, Tensor weight, Tensor? bias, Tensor? prior"
OPTIONS_SCHEMA = "int num_iterations, bool over_inputs, bool stop_gradient, bool leaky, float eps"


class Options(NamedTuple):
    """What :func:`torchcaps.route` is told beside its tensors, in the order of ``OPTIONS_SCHEMA``."""

    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float

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
    """Poses, weight and prior with the input capsules next to each other in memory, as the layers keep them."""
    return (
        poses.transpose(1, 2).contiguous(),
        weight.permute(1, 2, 3, 0).contiguous(),
        None if prior is None else prior.t().contiguous(),
    )


def differentiate(
    ctx: Any, backward: Callable[..., Sequence[Tensor]], grad_capsules: Tensor | None, grad_coupling: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What autograd is given for the arguments of an operation.

    Args:
        ctx: Has the operation's ``options``, its other arguments than tensors as ``scalars``, and what was saved.
        backward: From both gradients, what was saved, which of the four tensors want a gradient, and the options.
        grad_capsules: Of the operation's first output.
        grad_coupling: Of the second one.
    """
    wanted = list(ctx.needs_input_grad[:4])
    wanted[3] = wanted[3] and not ctx.options.constant_coupling  # the prior's
    grads = backward(grad_capsules, grad_coupling, *ctx.saved_tensors, wanted, *ctx.options)
    picked = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *picked, *[None] * len(ctx.scalars)


def empty_gradients(wanted: list[bool], poses: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Room for the gradients of poses, weight, bias and prior, in the order of memory that the fast paths make.

    An empty tensor stands for one that is not wanted, as an operation registered with torch returns no None.
    """
    orders = ((0, 2, 1), (1, 2, 3, 0), (0, 1), (1, 0))  # of memory, outermost axis first
    return [
        torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
        if want and tensor is not None
        else poses.new_empty(0)
        for tensor, order, want in zip((poses, *others), orders, wanted, strict=True)
    ]
