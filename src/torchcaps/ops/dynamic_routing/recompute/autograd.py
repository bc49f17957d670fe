"""How PyTorch calls the passes: eagerly with autograd, under torch.func, and from a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import LAYER_SCHEMA, OPTIONS_SCHEMA, Options, Wanted
from torchcaps.ops.dynamic_routing.recompute.backward import backward
from torchcaps.ops.dynamic_routing.recompute.forward import forward
from torchcaps.ops.dynamic_routing.recompute.layer import working_dtype


def route_recompute(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    bias: Float[Tensor, "J D"] | None,
    prior: Float[Tensor, "I J"] | None,
    options: Options,
    return_coupling: bool,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Output capsules and, if asked for, the last coupling. :func:`torchcaps.route` describes the arguments.

    Both are differentiable once, as in the reference. A second derivative raises an error that says what to do.
    """
    tensors = (poses, weight, bias, prior)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep_coupling = return_coupling or (differentiated and options.stop_gradient and options.num_iterations > 1)
    if torch.compiler.is_compiling():
        capsules, coupling, _ = _route_op(*tensors, *options.scalars, keep_coupling)
    elif torch.is_inference_mode_enabled() and not torch._C._are_functorch_transforms_active():
        capsules, coupling, _ = forward(*tensors, options, keep_coupling)  # autograd's own work is 3 % of one image's
    else:
        capsules, coupling, _ = _Route.apply(*tensors, options, keep_coupling)
    return capsules, coupling.to(capsules.dtype) if return_coupling else None


# ---- autograd, torch.func


class _Route(torch.autograd.Function):
    """``forward`` with ``backward`` as its gradient."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, options, keep_coupling = inputs
        _save(ctx, tuple(tensors), options, keep_coupling, output)

    @staticmethod
    def backward(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, _: None) -> Any:
        wanted = Wanted.of(ctx, ctx.options)
        grads = _RouteBackward.apply(grad_capsules, grad_coupling, *ctx.saved_tensors, wanted, ctx.options)
        return *wanted.pick(grads), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _one_by_one(_Route.apply, info.batch_size, in_dims, args)


class _RouteBackward(torch.autograd.Function):
    """``backward`` as a function of its own, so that a second derivative can say what to do."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _one_by_one(_RouteBackward.apply, info.batch_size, in_dims, args)


_SECOND_DERIVATIVE = 'route: fast routing can be differentiated once; backend="reference" gives second derivatives'
_FORWARD_MODE = 'route: fast routing is differentiated backward only; backend="reference" goes forward, too'


def _save(
    ctx: Any, tensors: tuple[Any, ...], options: Options, keep_coupling: bool, output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, coupling, sums = output
    ctx.options = options
    ctx.set_materialize_grads(False)
    if options.constant_coupling or not keep_coupling:
        ctx.mark_non_differentiable(coupling, sums)
    else:
        ctx.mark_non_differentiable(sums)
    kept = coupling if options.stop_gradient else coupling.new_empty(0)
    ctx.save_for_backward(*tensors, sums, kept)


def _one_by_one(
    function: Callable[..., tuple[Tensor, ...]], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """``torch.vmap`` of a function: a loop, as the members may differ in their weights."""
    members = [
        function(*(arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, in_dims, strict=True)))
        for n in range(size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*members, strict=True))
    return outputs, (0,) * len(outputs)


# ---- torch.compile: one operation that it does not look into


def _op_forward(poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, *scalars: Any) -> Any:
    *options, keep_coupling = scalars
    return forward(poses, weight, bias, prior, Options(*options), keep_coupling)


def _op_backward(*args: Any) -> Any:
    arguments = (*args[:8], Wanted(*args[8]), Options(*args[9:]))
    return backward(*arguments)


_route_op = torch.library.custom_op(
    "torchcaps::route",
    _op_forward,
    mutates_args=(),
    schema=f"({LAYER_SCHEMA}, {OPTIONS_SCHEMA}, bool keep_coupling) -> (Tensor, Tensor, Tensor)",
)
_route_backward_op = torch.library.custom_op(
    "torchcaps::route_backward",
    _op_backward,
    mutates_args=(),
    schema=f"(Tensor? grad_capsules, Tensor? grad_coupling, {LAYER_SCHEMA}, Tensor sums, Tensor coupling, "
    f"bool[4] wanted, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_route_op.register_fake
def _(poses: Tensor, weight: Tensor, _bias: Any, _prior: Any, num_iterations: int, *rest: Any) -> Any:
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
def _(*args: Any) -> Any:
    """Shapes, strides and dtypes of ``backward``'s results."""
    return tuple(Wanted(*args[8]).empty(*args[2:6]))


def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *options, keep_coupling = inputs[4:]
    _save(ctx, inputs[:4], Options(*options), keep_coupling, output)


def _op_autograd(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, _: None) -> Any:
    wanted = Wanted.of(ctx, ctx.options)
    grads = _route_backward_op(grad_capsules, grad_coupling, *ctx.saved_tensors, wanted.flags, *ctx.options.scalars)
    return *wanted.pick(grads), *[None] * (len(ctx.options.scalars) + 1)


_route_op.register_autograd(_op_autograd, setup_context=_op_setup_context)
