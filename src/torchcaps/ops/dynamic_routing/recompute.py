"""Vote-free dynamic routing with its own backward pass: the votes, B·I·J·D numbers, are never built.

README.md beside this file derives every step; the names in brackets here, such as [logits], are its headings.
Inside, poses are (B, K, I) and weights (J, D, K, I), so that the long axis is the last and each step a matrix product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

MIB = 2**20
DEFAULT_WORKING_MEMORY = 32.0  # MiB
MAX_BATCH_TILE = 128
MIN_INPUT_TILE = 64


class _WorkingMemory:
    mib = DEFAULT_WORKING_MEMORY


def set_working_memory(mib: float) -> None:
    """Set how much memory vote-free routing may use for its work buffers.

    Layers are routed tile by tile, and the tiles are cut so that their buffers fit. The smallest tile possible (one
    input capsule with all outputs, or one output with all inputs, depending on ``softmax_over``) is used if even that
    does not fit. Results and gradients come on top. Applies to the calls that start after it, in all threads.

    Args:
        mib: MiB, positive; 32 at the start.

    Raises:
        ValueError: ``mib`` is not positive.
    """
    if not mib > 0:
        raise ValueError(f"set_working_memory: mib must be positive, got {mib}")
    _WorkingMemory.mib = float(mib)


def get_working_memory() -> float:
    """MiB that vote-free routing may use for its work buffers; see :func:`set_working_memory`."""
    return _WorkingMemory.mib


def route_recompute(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    num_iterations: int,
    softmax_over: str,
    stop_gradient: bool,
    bias: Float[Tensor, "J D"] | None,
    prior: Float[Tensor, "I J"] | None,
    leaky: bool,
    eps: float,
    return_coupling: bool,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Output capsules and, if asked for, the last coupling. :func:`torchcaps.route` describes the arguments."""
    options = _Options(num_iterations, softmax_over == "inputs", stop_gradient, leaky, eps, return_coupling)
    capsules, coupling, _ = _Route.apply(poses, weight, bias, prior, options)
    return capsules, coupling if return_coupling else None


class _Options(NamedTuple):
    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float
    return_coupling: bool


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(poses, weight, bias, prior, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        poses, weight, bias, prior, options = inputs
        _, coupling, sums = output
        if options.stop_gradient or not options.return_coupling or options.num_iterations == 0:
            ctx.mark_non_differentiable(coupling, sums)
        else:
            ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(poses, weight, bias, prior, sums)
        ctx.options = options

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, _: None) -> Any:
        poses, weight, bias, prior, sums = ctx.saved_tensors
        if grad_capsules is None and grad_coupling is None:
            return None, None, None, None, None
        grads = _backward(
            grad_capsules, grad_coupling, poses, weight, bias, prior, sums, ctx.needs_input_grad[:4], ctx.options
        )
        return *grads, None


class _Layer(NamedTuple):
    """The tensors of a call as the steps want them, in the dtype that is computed in."""

    poses: Tensor  # (B, K, I)
    weight: Tensor  # (J, D, K, I)
    bias: Tensor | None  # (J, D)
    prior: Tensor | None  # (J, I)
    options: _Options

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        B, K, I = self.poses.shape
        J, D = self.weight.shape[:2]
        return B, I, J, D, K


def _layer(poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: _Options) -> _Layer:
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    return _Layer(
        poses.to(dtype).transpose(1, 2).contiguous(),
        weight.to(dtype).permute(1, 2, 3, 0).contiguous(),
        None if bias is None else bias.to(dtype),
        None if prior is None else prior.to(dtype).t().contiguous(),
        options,
    )


def _forward(
    poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Capsules (B, J, D), the last coupling (B, I, J) or nothing, and the sums s¹..sʳ (r, B, J, D) for backward."""
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with _full_precision(poses.device):
        layer = _layer(poses, weight, bias, prior, options)
        B, I, J, D, _ = layer.sizes
        iterations = options.num_iterations
        sums = layer.poses.new_empty(max(iterations, 1), B, J, D)
        coupling = layer.poses.new_empty((J, B, I) if options.return_coupling else (0, 0, 0))
        buffers = _Buffers(layer.poses)
        _first_sum(layer, buffers, sums[0])
        if iterations == 0:
            return sums[0].to(dtype, copy=True), coupling.fill_(1).permute(1, 2, 0).to(dtype), sums
        if iterations == 1 and options.return_coupling:
            coupling.copy_(_first_coupling(layer)[:, None].expand(J, B, I))
        summed_capsules = torch.zeros_like(sums[0])
        for t in range(1, iterations):
            summed_capsules += _squash(sums[t - 1], options.eps)
            wanted = coupling if options.return_coupling and t == iterations - 1 else None
            _weighted_sum(layer, buffers, summed_capsules, sums[t], wanted)
        capsules = _squash(sums[-1], options.eps)
        coupling = coupling.permute(1, 2, 0)
        return capsules.to(dtype), coupling.to(dtype), sums


def _first_coupling(layer: _Layer) -> Tensor:
    """Coupling of the first iteration (J, I), the same for the whole batch. [first sum]"""
    _, I, J, _, _ = layer.sizes
    logits = layer.poses.new_zeros(J, 1, I) if layer.prior is None else layer.prior[:, None]
    return _compete(logits, layer.options, torch.empty_like(logits))[:, 0]


def _uniform_coupling(layer: _Layer) -> float:
    _, I, J, _, _ = layer.sizes
    competitors = I if layer.options.over_inputs else J
    return 1.0 / (competitors + layer.options.leaky) if layer.options.num_iterations else 1.0


def _has_uniform_start(layer: _Layer) -> bool:
    return layer.prior is None or layer.options.num_iterations == 0


def _first_sum(layer: _Layer, buffers: _Buffers, out: Tensor) -> None:
    """s¹ = u (c¹∘W)ᵀ + bias: one product, as the first coupling is the same for the whole batch. [first sum]"""
    B, I, J, D, K = layer.sizes
    out.copy_(out.new_zeros(()) if layer.bias is None else layer.bias)
    flat = out.view(B, J * D)
    if _has_uniform_start(layer):
        flat.addmm_(
            layer.poses.view(B, K * I), layer.weight.view(J * D, K * I).t(), alpha=_uniform_coupling(layer)
        )
        return
    coupling = _first_coupling(layer)
    for tile in _tiles(layer):
        if tile.batch.start == 0:
            coupled = buffers.copy("weight", layer.weight[tile.outputs, :, :, tile.inputs])
            coupled *= coupling[tile.outputs, None, None, tile.inputs]
            poses = buffers.copy("all poses", layer.poses[:, :, tile.inputs])
            out[:, tile.outputs].flatten(1).addmm_
            part = torch.mm(poses.flatten(1), coupled.flatten(2).flatten(0, 1).t())
            out[:, tile.outputs] += part.view(B, -1, D)


def _weighted_sum(
    layer: _Layer, buffers: _Buffers, summed_capsules: Tensor, out: Tensor, coupling_out: Tensor | None
) -> None:
    """s_j = (c_j∘u) W_jᵀ + bias, with c from V: an iteration after the first. [weighted sum]"""
    out.copy_(out.new_zeros(()) if layer.bias is None else layer.bias)
    for tile in _tiles(layer):
        poses, weight = _take(layer, buffers, tile)
        capsules = summed_capsules[tile.batch, tile.outputs].transpose(0, 1)
        pulled = buffers.take("pulled capsules", _pulled_shape(capsules, poses))
        torch.bmm(capsules, weight, out=pulled.flatten(2))
        coupling = _coupling(layer, buffers, tile, poses, pulled, pulled)
        if coupling_out is not None:
            coupling_out[tile.outputs, tile.batch, tile.inputs] = coupling
        coupled = torch.mul(coupling[:, :, None], poses, out=pulled).flatten(2)
        out[tile.batch, tile.outputs].transpose(0, 1).baddbmm_(coupled, weight.transpose(1, 2))


def _pulled_shape(capsules: Tensor, poses: Tensor) -> tuple[int, int, int, int]:
    return (*capsules.shape[:2], *poses.shape[1:])  # (j, b, K, i)


def _coupling(
    layer: _Layer, buffers: _Buffers, tile: _Tile, poses: Tensor, pulled: Tensor, scratch: Tensor
) -> Tensor:
    """c = softmax of prior_j + Σ_k (V_j W_j)∘u, as (j, b, i). [logits], [coupling]"""
    J, b, _, i = pulled.shape
    logits = buffers.take("logits", (J, b, i))
    torch.sum(torch.mul(pulled, poses, out=scratch), 2, out=logits)
    if layer.prior is not None:
        logits += layer.prior[tile.outputs, None, tile.inputs]
    return _compete(logits, layer.options, buffers.take("coupling", (J, b, i)))


def _compete(logits: Tensor, options: _Options, out: Tensor) -> Tensor:
    """Softmax of (J, b, I) over the competing axis; leaky: beside a competitor with logit 0. Overwrites ``logits``."""
    axis = _competing_axis(options)
    if not options.leaky:
        return torch.softmax(logits, axis, out=out)
    top = logits.amax(axis, keepdim=True).clamp_min_(0)
    torch.sub(logits, top, out=out).exp_()
    return out.div_(out.sum(axis, keepdim=True).add_(top.neg_().exp_()))


def _competing_axis(options: _Options) -> int:
    return 2 if options.over_inputs else 0


def _backward(
    grad_capsules: Tensor | None,
    grad_coupling: Tensor | None,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prior: Tensor | None,
    sums: Tensor,
    needed: tuple[bool, ...],
    options: _Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of poses, weight, bias and prior, each only if needed. [backward]"""
    with _full_precision(poses.device):
        layer = _layer(poses, weight, bias, prior, options)
        constant_coupling = options.stop_gradient or options.num_iterations == 0
        grads = _Gradients.zeros(layer, (*needed[:3], needed[3] and not constant_coupling))
        pulls = _Buffers(layer.poses)
        grad_v = torch.zeros_like(sums[0]) if grad_capsules is None else grad_capsules.to(sums.dtype)
        if grad_coupling is not None:
            grad_coupling = grad_coupling.to(sums.dtype).permute(2, 0, 1)
        if options.num_iterations == 0:
            _first_backward(layer, pulls, grad_v.contiguous(), None, grads)
            return grads.like(poses, weight, bias, prior)

        capsules = _squash(sums, options.eps)
        grad_summed = torch.zeros_like(sums[0])  # G: gradient of V
        for t in range(options.num_iterations - 1, -1, -1):
            grad_sum = _squash_backward(sums[t], grad_v, options.eps)
            if grads.bias is not None:
                grads.bias += grad_sum.sum(0)
            if t == 0:
                _first_backward(layer, pulls, grad_sum, grad_coupling, grads)
            else:
                _iteration_backward(
                    layer, pulls, capsules[:t].sum(0), grad_sum, grad_coupling, grads, grad_summed
                )
            if options.stop_gradient:
                break
            grad_v, grad_coupling = grad_summed, None
        return grads.like(poses, weight, bias, prior)


@dataclass
class _Gradients:
    poses: Tensor | None  # (B, K, I)
    weight: Tensor | None  # (J, D, K, I)
    bias: Tensor | None  # (J, D)
    prior: Tensor | None  # (J, I)

    @classmethod
    def zeros(cls, layer: _Layer, needed: tuple[bool, ...]) -> _Gradients:
        B, I, J, D, K = layer.sizes
        shapes = ((B, K, I), (J, D, K, I), (J, D), (J, I))
        return cls(
            *(layer.poses.new_zeros(shape) if need else None for shape, need in zip(shapes, needed, strict=True))
        )

    def like(self, poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None) -> tuple[Any, ...]:
        """As the caller's tensors: their axes and dtypes."""
        return (
            None if self.poses is None else self.poses.transpose(1, 2).to(poses.dtype),
            None if self.weight is None else self.weight.permute(3, 0, 1, 2).to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
            None if self.prior is None or prior is None else self.prior.t().to(prior.dtype),
        )


def _first_backward(
    layer: _Layer, buffers: _Buffers, grad_sum: Tensor, grad_coupling: Tensor | None, grads: _Gradients
) -> None:
    """du += gs (c¹∘W), dW += c¹∘(gsᵀ u), and the prior's share. [first sum, backward]"""
    B, I, J, D, K = layer.sizes
    if layer.options.num_iterations == 0 and grads.bias is not None:
        grads.bias += grad_sum.sum(0)
    if _has_uniform_start(layer):
        uniform = _uniform_coupling(layer)
        flat = grad_sum.view(B, J * D)
        if grads.poses is not None:
            grads.poses.view(B, K * I).addmm_(flat, layer.weight.view(J * D, K * I), alpha=uniform)
        if grads.weight is not None:
            grads.weight.view(J * D, K * I).addmm_(flat.t(), layer.poses.view(B, K * I), alpha=uniform)
        return
    coupling = _first_coupling(layer)
    agreement = torch.zeros_like(coupling)  # Σ_b a, (J, I)
    if grad_coupling is not None:
        agreement += grad_coupling.sum(1)
    for tile in _tiles(layer):
        if tile.batch.start != 0:
            continue
        poses = buffers.copy("all poses", layer.poses[:, :, tile.inputs])
        weight = layer.weight[tile.outputs, :, :, tile.inputs]
        gs = grad_sum[:, tile.outputs].flatten(1)
        share = coupling[tile.outputs, None, None, tile.inputs]
        product = torch.mm(gs.t(), poses.flatten(1)).view(weight.shape)
        agreement[tile.outputs, tile.inputs] += (product * weight).sum((1, 2))
        if grads.weight is not None:
            grads.weight[tile.outputs, :, :, tile.inputs].addcmul_(product, share)
        if grads.poses is not None:
            grads.poses[:, :, tile.inputs] += torch.mm(gs, (weight * share).flatten(2).flatten(0, 1)).view(
                poses.shape
            )
    if grads.prior is not None:
        agreement -= (coupling * agreement).sum(1 if layer.options.over_inputs else 0, keepdim=True)
        grads.prior.addcmul_(coupling, agreement)


def _iteration_backward(
    layer: _Layer,
    buffers: _Buffers,
    summed_capsules: Tensor,
    grad_sum: Tensor,
    grad_coupling: Tensor | None,
    grads: _Gradients,
    grad_summed: Tensor,
) -> None:
    full = not layer.options.stop_gradient
    for tile in _tiles(layer):
        poses, weight = _take(layer, buffers, tile)
        V = summed_capsules[tile.batch, tile.outputs].transpose(0, 1)
        gs = grad_sum[tile.batch, tile.outputs].transpose(0, 1)
        shape = _pulled_shape(V, poses)
        pulled_V, pulled_gs, scratch = (buffers.take(name, shape) for name in ("pulled V", "pulled gs", "scratch"))
        torch.bmm(V, weight, out=pulled_V.flatten(2))
        coupling = _coupling(layer, buffers, tile, poses, pulled_V, scratch)
        if full or grads.poses is not None:
            torch.bmm(gs, weight, out=pulled_gs.flatten(2))
        grad_logits = None
        if full:
            agreement = buffers.take("logits", coupling.shape)
            torch.sum(torch.mul(pulled_gs, poses, out=scratch), 2, out=agreement)
            if grad_coupling is not None:
                agreement += grad_coupling[tile.outputs, tile.batch, tile.inputs]
            grad_logits = _softmax_backward(coupling, agreement, layer.options)
            if grads.prior is not None:
                grads.prior[tile.outputs, tile.inputs] += grad_logits.sum(1)
        if grads.poses is not None:
            mixed = pulled_gs.mul_(coupling[:, :, None])
            if grad_logits is not None:
                mixed.addcmul_(pulled_V, grad_logits[:, :, None])
            grads.poses[tile.batch, :, tile.inputs] += mixed.sum(0)
        grad_weight = None
        if grads.weight is not None:
            grad_weight = buffers.take("grad weight", weight.shape)
            coupled = torch.mul(coupling[:, :, None], poses, out=scratch).flatten(2)
            torch.bmm(gs.transpose(1, 2), coupled, out=grad_weight)
        if grad_logits is not None:
            coupled = torch.mul(grad_logits[:, :, None], poses, out=scratch).flatten(2)
            grad_summed[tile.batch, tile.outputs].transpose(0, 1).baddbmm_(coupled, weight.transpose(1, 2))
            if grad_weight is not None:
                grad_weight.baddbmm_(V.transpose(1, 2), coupled)
        if grads.weight is not None and grad_weight is not None:
            target = grads.weight[tile.outputs, :, :, tile.inputs]
            target += grad_weight.view(target.shape)


def _softmax_backward(coupling: Tensor, grad: Tensor, options: _Options) -> Tensor:
    """db = c∘(a − Σ c a) over the competitors, in place of a."""
    grad -= (coupling * grad).sum(_competing_axis(options), keepdim=True)
    return grad.mul_(coupling)


def _squash(s: Tensor, eps: float) -> Tensor:
    squared = s.square().sum(-1, keepdim=True)
    return s * (squared * torch.rsqrt(squared + eps) / (1 + squared))


def _squash_backward(s: Tensor, grad: Tensor, eps: float) -> Tensor:
    """g_s = h·g_v + 2h'(s·g_v)s, with squash(s) = h(‖s‖²) s. [squash, backward]"""
    n = s.square().sum(-1, keepdim=True)
    q = torch.rsqrt(n + eps)
    h = n * q / (1 + n)
    slope = q / (1 + n).square() - n * q.pow(3) / (2 * (1 + n))
    return h * grad + 2 * slope * (s * grad).sum(-1, keepdim=True) * s


class _Buffers:
    """Work buffers of one call, kept from tile to tile: fresh memory costs more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The buffer of that name, uninitialised, in ``shape``."""
        numel = torch.Size(shape).numel()
        flat = self.flat.get(name)
        if flat is None or flat.numel() < numel:
            flat = self.flat[name] = self.like.new_empty(numel)
        return flat[:numel].view(shape)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor`` in the buffer of that name."""
        return self.take(name, tensor.shape).copy_(tensor)


class _Tile(NamedTuple):
    batch: slice
    outputs: slice
    inputs: slice


def _take(layer: _Layer, buffers: _Buffers, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Poses (b, K, i) and weight (j, D, K·i) of a tile, contiguous; whole ones are not copied."""
    poses = layer.poses[tile.batch, :, tile.inputs]
    weight = layer.weight[tile.outputs, :, :, tile.inputs]
    poses = poses if poses.is_contiguous() else buffers.copy("poses", poses)
    weight = weight if weight.is_contiguous() else buffers.copy("weight", weight)
    return poses, weight.flatten(2)


def _tiles(layer: _Layer) -> Iterator[_Tile]:
    """Cut a layer so that the capsules that compete with each other stay together. [tiles]"""
    B, I, J, _, _ = layer.sizes
    b, i, j = _tile_sizes(layer)
    for i0 in range(0, I, i):
        for j0 in range(0, J, j):
            for b0 in range(0, B, b):
                yield _Tile(slice(b0, min(b0 + b, B)), slice(j0, min(j0 + j, J)), slice(i0, min(i0 + i, I)))


def _tile_sizes(layer: _Layer) -> tuple[int, int, int]:
    B, I, J, D, K = layer.sizes
    budget = int(_WorkingMemory.mib * MIB) // layer.poses.element_size()
    b = _even(B, MAX_BATCH_TILE)
    per_link = 3 * K + 4
    if layer.options.over_inputs:
        while b > 1 and b * I * per_link > budget:
            b = (b + 1) // 2
        return b, I, _even(J, max(1, budget // (b * I * per_link)))
    per_input = 2 * J * D * K
    while b > 8 and min(MIN_INPUT_TILE, I) * (per_input + b * J * per_link) > budget:
        b = (b + 1) // 2
    i = max(1, budget // (per_input + b * J * per_link))
    return b, _even(I, i, 16), J


def _even(size: int, most: int, multiple: int = 1) -> int:
    """Length of equal pieces of ``size``, at most ``most``, a multiple of ``multiple`` if there are several."""
    if size <= most:
        return max(size, 1)
    pieces = -(-size // most)
    piece = -(-size // pieces)
    rounded = -(-piece // multiple) * multiple
    return rounded if rounded <= most else piece


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
