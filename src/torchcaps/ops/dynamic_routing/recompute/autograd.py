"""How PyTorch calls the passes: eagerly with autograd, under torch.func, and from a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import OPTIONS_SCHEMA, Options
from torchcaps.ops.dynamic_routing.recompute.backward import backward
from torchcaps.ops.dynamic_routing.recompute.forward import forward
from torchcaps.ops.dynamic_routing.recompute.layer import working_dtype


def route_recompute(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    bias: Float[Tensor, "J D"] | None,
    options: Options,
    return_coupling: bool,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Output capsules and, if asked for, the last coupling. :func:`torchcaps.route` describes the arguments.

    Both are differentiable once, as in the reference. A second derivative raises an error that says what to do.
    """
    tensors = (poses, weight, bias)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep_coupling = return_coupling or (differentiated and options.stop_gradient and options.num_iterations > 1)
    run: Callable[..., Any] = _Route.apply
    if torch.compiler.is_compiling():
        run = _route_op
    elif torch.is_inference_mode_enabled() and not torch._C._are_functorch_transforms_active():
        run = _forward  # autograd's own work is 3 % of one image's
    capsules, coupling, _ = run(*tensors, *options, keep_coupling)
    return capsules, coupling.to(capsules.dtype) if return_coupling else None


def _forward(poses: Tensor, weight: Tensor, bias: Tensor | None, *scalars: Any) -> Any:
    *options, keep_coupling = scalars
    return forward(poses, weight, bias, Options(*options), keep_coupling)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, coupling, sums = output
    ctx.scalars = inputs[3:]
    *options, keep_coupling = ctx.scalars
    ctx.options = Options(*options)
    ctx.set_materialize_grads(False)
    if ctx.options.constant_coupling or not keep_coupling:
        ctx.mark_non_differentiable(coupling, sums)
    else:
        ctx.mark_non_differentiable(sums)
    kept = coupling if ctx.options.stop_gradient else coupling.new_empty(0)
    ctx.save_for_backward(*inputs[:3], sums, kept)


def _differentiate(
    ctx: Any, backward: Callable[..., tuple[Tensor, ...]], grad_capsules: Tensor | None, grad_coupling: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What autograd is given for the arguments of the operation, from the gradients of its first two outputs."""
    wanted = list(ctx.needs_input_grad[:3])
    grads = backward(grad_capsules, grad_coupling, *ctx.saved_tensors, wanted, *ctx.options)
    picked = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *picked, *[None] * len(ctx.scalars)


# ---- autograd, torch.func


class _Route(torch.autograd.Function):
    """``forward`` with ``backward`` as its gradient."""

    @staticmethod
    def forward(*call: Any) -> Any:
        return _forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _differentiate(ctx, _RouteBackward.apply, *grads[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            'route: fast routing is differentiated backward only; backend="reference" goes forward, too'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *call: Any) -> Any:
        return _one_by_one(_Route.apply, info.batch_size, in_dims, call)


class _RouteBackward(torch.autograd.Function):
    """``backward`` as a function of its own, so that a second derivative can say what to do."""

    @staticmethod
    def forward(*call: Any) -> Any:
        return backward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            'route: fast routing can be differentiated once; backend="reference" gives second derivatives'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *call: Any) -> Any:
        return _one_by_one(_RouteBackward.apply, info.batch_size, in_dims, call)


def _one_by_one(
    function: Callable[..., tuple[Tensor, ...]], size: int, in_dims: tuple[Any, ...], call: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """``torch.vmap`` of a function: a loop, as the members may differ in their weights."""
    members = [
        function(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in zip(call, in_dims, strict=True)))
        for n in range(size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*members, strict=True))
    return outputs, (0,) * len(outputs)


# ---- torch.compile: one operation that it does not look into


_LAYER_SCHEMA = "Tensor poses, Tensor weight, Tensor? bias"
_route_op = torch.library.custom_op(
    "torchcaps::route",
    _forward,
    mutates_args=(),
    schema=f"({_LAYER_SCHEMA}, {OPTIONS_SCHEMA}, bool keep_coupling) -> (Tensor, Tensor, Tensor)",
)
_route_backward_op = torch.library.custom_op(
    "torchcaps::route_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor? grad_capsules, Tensor? grad_coupling, {_LAYER_SCHEMA}, Tensor sums, Tensor coupling, "
    f"bool[3] wanted, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@_route_op.register_fake
def _(poses: Tensor, weight: Tensor, _bias: Any, num_iterations: int, *rest: Any) -> Any:
    """Shapes, strides and dtypes of ``forward``'s results."""
    keep_coupling = rest[-1]
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    working = poses.new_empty(0, dtype=working_dtype(poses, weight))
    return (
        poses.new_empty(B, J, D, dtype=torch.promote_types(poses.dtype, weight.dtype)),
        working.new_empty((J, B, I) if keep_coupling else (0, 0, 0)).permute(1, 2, 0),
        working.new_empty(max(num_iterations, 1), B, J, D),
    )


@_route_backward_op.register_fake
def _(*call: Any) -> Any:
    """Shapes, strides and dtypes of ``backward``'s results; an empty tensor stands for one that is not wanted."""
    poses, weight, bias = call[2:5]
    wanted = call[7]
    orders = ((0, 2, 1), (1, 2, 3, 0), (0, 1))  # of memory, outermost axis first
    return tuple(
        torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
        if want and tensor is not None
        else poses.new_empty(0)
        for tensor, order, want in zip((poses, weight, bias), orders, wanted, strict=True)
    )


def _differentiate_op(ctx: Any, *grads: Tensor | None) -> Any:
    return _differentiate(ctx, _route_backward_op, *grads[:2])


_route_op.register_autograd(_differentiate_op, setup_context=_setup_context)
