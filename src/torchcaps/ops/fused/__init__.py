"""Vote-free dynamic routing with a hand-written backward pass: the votes, B·I·J·D numbers, are never built.

``README.md`` in this folder derives every step. Names in brackets, such as [logits], are names of its steps. Read the
files in this order:

- :mod:`.forward` and :mod:`.backward`: the two passes, from top to bottom;
- :mod:`.layer`: the tensors of a call, their blocks and work buffers, and the steps that both passes share;
- :mod:`.loop`: gradients that can be differentiated again, by the contractions;
- this file: the operations that PyTorch calls, in eager code and in compiled graphs.

Inside, poses are (B, K, I) and weights (J, D, K, I). The long axis comes last, and each step is a matrix product or
runs along it. A block is the part of the weights that is processed at a time, (j, D, K·i); small letters are its sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.fused import backward, forward, loop
from torchcaps.ops.fused.layer import Options, working_dtype
from torchcaps.ops.operation import operation
from torchcaps.tracing import is_recording_operations

__all__ = ["Options", "route_recompute"]


def route_recompute(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    bias: Float[Tensor, "J D"] | None,
    options: Options,
    return_coupling: bool,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Return output capsules and, if requested, the last coupling; see :func:`torchcaps.route` for the arguments.

    Both can be differentiated any number of times, as in the reference.
    """
    tensors = (poses, weight, bias)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep_coupling = return_coupling or (differentiated and options.stop_gradient and options.num_iterations > 1)
    capsules, coupling, _ = _route(*tensors, *options._replace(keep_coupling=keep_coupling))
    return capsules, coupling.to(capsules.dtype) if return_coupling else None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, coupling, sums = output
    ctx.options = options = Options(*inputs[3:])
    ctx.set_materialize_grads(False)
    constant = options.stop_gradient or options.num_iterations == 0 or not options.keep_coupling
    ctx.mark_non_differentiable(sums, *([coupling] if constant else []))
    ctx.save_for_backward(*inputs[:3], sums, coupling if options.stop_gradient else coupling.new_empty(0))


def _gradients(ctx: Any, *grads: Tensor | None) -> Any:
    """Return the gradients of the forward pass's arguments from the gradients of its results."""
    wanted = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled() and not is_recording_operations():  # the gradients are differentiated again
        return *loop.gradients(ctx.options, ctx.saved_tensors[:3], wanted, grads[:2]), *(None for _ in ctx.options)
    found = _route_backward(*grads[:2], *ctx.saved_tensors, wanted, *ctx.options)
    return *(grad if want else None for grad, want in zip(found, wanted, strict=True)), *(None for _ in ctx.options)


def _route_fake(poses: Tensor, weight: Tensor, _bias: Any, *scalars: Any) -> Any:
    """Return results without numbers, with the shapes, strides and dtypes of ``forward``."""
    options = Options(*scalars)
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    working = poses.new_empty(0, dtype=working_dtype(poses, weight))
    return (
        poses.new_empty(B, J, D, dtype=torch.promote_types(poses.dtype, weight.dtype)),
        working.new_empty((J, B, I) if options.keep_coupling else (0, 0, 0)).permute(1, 2, 0),
        working.new_empty(max(options.num_iterations, 1), B, J, D),
    )


def _backward_fake(*call: Any) -> Any:
    """Return results without numbers, with the shapes, strides and dtypes of ``backward``."""
    tensors, wanted = call[2:5], call[7]
    orders = ((0, 2, 1), (1, 2, 3, 0), (0, 1))  # memory orders, outermost axis first
    return tuple(
        torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
        if want and tensor is not None
        else tensors[0].new_empty(0)
        for tensor, order, want in zip(tensors, orders, wanted, strict=True)
    )


def _only_once(*_: Any) -> Any:
    raise NotImplementedError(
        "route: a compiled graph of dynamic routing has first derivatives only; call the layer without torch.compile"
    )


_LAYER = "Tensor poses, Tensor weight, Tensor? bias"
_OPTIONS = "int num_iterations, bool over_inputs, bool stop_gradient, bool leaky, float eps, bool keep_coupling"
_route = operation(
    "route",
    f"({_LAYER}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    forward=forward.forward,
    fake=_route_fake,
    backward=_gradients,
    save=_save,
)
_route_backward = operation(
    "route_backward",
    f"(Tensor? grad_capsules, Tensor? grad_coupling, {_LAYER}, Tensor sums, Tensor coupling, bool[3] wanted, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    forward=backward.backward,
    fake=_backward_fake,
    backward=_only_once,
)
