"""Vote-free dynamic routing on a GPU, as fused Triton kernels with their own backward pass.

The algebra is README.md's; the kernels are in ``triton_kernels.py``, which is imported, and Triton with it, by the
first call.

Launches, for r iterations with a softmax over the outputs:

- forward: a weighted sum and a squash an iteration, and from the second on a coupling before them. That is 3r - 1, of
  which the r squashes are tiny, and two fills;
- backward: a squash an iteration, from the second on a coupling with its gradient and a weighted sum, at the end the
  gradients of poses and weights: 3r. With the gradient stopped 4. A softmax over the inputs adds one launch to each
  coupling.

None waits for the host, and no size depends on data: a call can be captured in a CUDA graph once a first call has
compiled the kernels (up to half a minute for a new layer shape; Triton keeps them on disk).

Device memory beside results: B·J·I numbers forward, 2 (r - 1) B·J·I backward, 1/D of the votes each.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import (
    LAYER_SCHEMA,
    OPTIONS_SCHEMA,
    Options,
    differentiate,
    empty_gradients,
    in_memory_order,
)
from torchcaps.ops.dynamic_routing.reference import compete
from torchcaps.ops.precision import full_precision

MAX_INPUT_DIM = 32  # K: a lane keeps a pose of each of its images in registers
MAX_OUTPUT_DIM = 1024  # D: one tile holds an output capsule
LANES = 32  # of a warp, each with an input capsule of its own
ROW_BLOCK = 2048  # input capsules that a program normalises at a time
PROGRAMS = 256  # of a launch: about two for each of the 132 multiprocessors of an H200

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_available() -> bool:
    """Whether Triton can be imported and has a device to run on: a CUDA GPU, or its interpreter on the CPU."""
    return _HAS_TRITON and (torch.cuda.is_available() or _is_interpreted())


def supports(poses: Tensor, weight: Tensor, num_iterations: int) -> bool:
    """Whether :func:`route_triton` serves these tensors, if Triton is there.

    They must be on one device that Triton runs on, in float32 or half precision, not empty, with K ≤ 32, D ≤ 1024 and
    no work array of 2³¹ numbers or more. Other calls are :func:`~torchcaps.ops.dynamic_routing.recompute`'s.
    """
    on_device = poses.device == weight.device and (poses.is_cuda or (_is_interpreted() and poses.device.type == "cpu"))
    if not (on_device and poses.dtype in _DTYPES and weight.dtype in _DTYPES):
        return False
    (B, I, K), (_, J, D, _) = poses.shape, weight.shape
    largest = max(poses.numel(), weight.numel(), B * J * max(I, D) * max(num_iterations, 1))
    return B > 0 and 0 < K <= MAX_INPUT_DIM and D <= MAX_OUTPUT_DIM and largest < 2**31


def route_triton(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"],
    bias: Float[Tensor, "J D"] | None,
    prior: Float[Tensor, "I J"] | None,
    options: Options,
    return_coupling: bool,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
    """Output capsules and, if asked for, the last coupling. :func:`torchcaps.route` describes the arguments.

    Computes in float32. Poses laid out in memory as (B, K, I) and weights as (J, D, K, I) are read in place; others
    are copied.

    Raises:
        ValueError: Triton cannot be imported, or :func:`supports` does not accept the tensors.
    """
    if not _HAS_TRITON:
        raise ValueError("route: the triton backend needs Triton: pip install triton")
    if not supports(poses, weight, options.num_iterations):
        raise ValueError(
            f"route: the triton backend needs float32 or half-precision tensors on one GPU, K ≤ {MAX_INPUT_DIM}, "
            f"D ≤ {MAX_OUTPUT_DIM} and work arrays below 2³¹ numbers, got poses {tuple(poses.shape)} and weight "
            f"{tuple(weight.shape)} in {poses.dtype} and {weight.dtype} on {poses.device} and {weight.device}"
        )
    if options.num_iterations == 0:
        return _sum_votes(poses, weight, bias, return_coupling)
    capsules, coupling, _, _ = _forward_op(poses, weight, bias, prior, *options)
    if not return_coupling:
        return capsules, None
    coupling = coupling.expand(poses.shape[0], -1, -1).transpose(1, 2).to(capsules.dtype)
    return capsules, coupling.detach() if options.constant_coupling else coupling


def _sum_votes(
    poses: Tensor, weight: Tensor, bias: Tensor | None, return_coupling: bool
) -> tuple[Tensor, Tensor | None]:
    """No routing: Σ_i û_ij + bias, one matrix product over (k, i)."""
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    packed = weight.float().permute(1, 2, 3, 0).reshape(J * D, -1)
    with full_precision(poses.device):
        total = (poses.float().transpose(1, 2).reshape(B, -1) @ packed.t()).view(B, J, D)
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype), poses.new_ones((B, I, J), dtype=dtype) if return_coupling else None


# ---- each pass is one operator to torch, which torch.compile leaves whole


@torch.library.custom_op(
    "torchcaps::route_triton",
    mutates_args=(),
    schema=f"({LAYER_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(
    poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, *scalars: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Capsules, the last coupling (B or 1, J, I), and for the backward s¹..sʳ and V¹..Vʳ, (r, B, J, D) each."""
    options = Options(*scalars)
    r = options.num_iterations
    with torch.cuda.device_of(poses):
        layer = _Layer.of(poses, weight, prior, options)
        sums = poses.new_empty((r, *layer.state_shape), dtype=torch.float32)
        summed_capsules = torch.zeros_like(sums)
        capsules = poses.new_empty(layer.state_shape, dtype=torch.promote_types(poses.dtype, weight.dtype))
        coupling = _first_coupling(layer)
        for t in range(r):
            if t > 0:
                coupling = layer.new_links() if t == 1 else coupling
                _couple(layer, summed_capsules[t], coupling)
            partial = _weighted_sum(layer, coupling)
            following, out = (summed_capsules[t + 1], None) if t < r - 1 else (None, capsules)
            _squash(partial, bias, summed_capsules[t], sums[t], following, out, options.eps)
        return capsules, coupling, sums, summed_capsules


@_forward_op.register_fake
def _(
    poses: Tensor, weight: Tensor, _bias: Tensor | None, _prior: Tensor | None, num_iterations: int, *_options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    return (
        poses.new_empty((B, J, D), dtype=torch.promote_types(poses.dtype, weight.dtype)),
        poses.new_empty((1 if num_iterations == 1 else B, J, I), dtype=torch.float32),
        poses.new_empty((num_iterations, B, J, D), dtype=torch.float32),
        poses.new_empty((num_iterations, B, J, D), dtype=torch.float32),
    )


@torch.library.custom_op(
    "torchcaps::route_triton_backward",
    mutates_args=(),
    schema=f"(Tensor? grad_capsules, Tensor? grad_coupling, {LAYER_SCHEMA}, Tensor sums, Tensor summed_capsules, "
    f"bool[4] wanted, {OPTIONS_SCHEMA}) -> Tensor[]",
)
def _backward_op(
    grad_capsules: Tensor | None,
    grad_coupling: Tensor | None,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prior: Tensor | None,
    sums: Tensor,
    summed_capsules: Tensor,
    wanted: list[bool],
    *scalars: Any,
) -> list[Tensor]:
    """Gradients of poses, weight, bias and prior; an empty tensor for one that is not wanted [backward]."""
    options = Options(*scalars)
    want_poses, want_weight, want_bias, want_prior = wanted
    with torch.cuda.device_of(poses):
        layer = _Layer.of(poses, weight, prior, options)
        grad_capsules = torch.zeros_like(sums[0]) if grad_capsules is None else grad_capsules.contiguous()
        if options.stop_gradient:
            terms = _last_term(layer, grad_capsules, sums, summed_capsules)
        else:
            terms = _all_terms(layer, grad_capsules, grad_coupling, sums, summed_capsules)
        grads = [poses.new_empty(0) for _ in wanted]
        if want_poses:
            grads[0] = _grad_poses(layer, terms)
        if want_weight:
            grads[1] = _grad_weight(layer, terms)
        if want_bias and bias is not None:
            grads[2] = terms.grad_sums.sum((0, 1)).to(bias.dtype)
        if want_prior and prior is not None:
            first_above = grad_coupling if len(sums) == 1 else None
            grads[3] = _grad_prior(layer, terms, first_above).to(prior.dtype)
        return grads


@_backward_op.register_fake
def _(*args: Any) -> list[Tensor]:
    return empty_gradients(args[8], *args[2:6])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.scalars = inputs[4:]
    ctx.options = Options(*ctx.scalars)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output[2:])


def _backward(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad_capsules is None and grad_coupling is None:
        return (None,) * (4 + len(ctx.scalars))
    return differentiate(ctx, _backward_op, grad_capsules, grad_coupling)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


# ---- the steps


class _Blocks(NamedTuple):
    """Sizes of a program, from the layer's alone.

    A weight that is loaded serves all images of a program, and a pose all components that it sums up. What a thread
    sums up and the poses of its images lie in its registers: about 64 numbers each.
    """

    warps: int  # of a program whose input capsules are its own: coupling, gradient of poses; of weights
    images: int  # of a thread there; fewer make more programs
    warps_of_sum: int  # of a program in a weighted sum, which is cut along j, d and i besides
    images_of_sum: int  # of a thread there
    components: int  # d that a thread of a weighted sum or of the weights' gradient sums up; divides D


class _Layer(NamedTuple):
    """A call's tensors as the kernels want them."""

    poses: Tensor  # (B, K, I)
    weight: Tensor  # (J, D, K, I)
    prior: Tensor | None  # (J, I)
    options: Options
    sizes: tuple[int, int, int, int, int]  # B, I, J, D, K
    blocks: _Blocks

    @classmethod
    def of(cls, poses: Tensor, weight: Tensor, prior: Tensor | None, options: Options) -> _Layer:
        (B, I, K), (_, J, D, _) = poses.shape, weight.shape
        u, W, prior = in_memory_order(poses, weight, prior)
        return cls(u, W, prior, options, (B, I, J, D, K), _choose_blocks(B, I, D, K))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of s, v, V and their gradients: (B, J, D)."""
        B, _, J, D, _ = self.sizes
        return B, J, D

    @property
    def tiles(self) -> tuple[int, int]:
        """Programs along the images and along the input capsules, where they take these through all outputs."""
        B, I, *_ = self.sizes
        return _ceil_div(B, self.blocks.warps * self.blocks.images), _ceil_div(I, LANES)

    def constants(self, warps: int, components: int) -> dict[str, int]:
        """What every large kernel is compiled for: so many warps a program, and components that a thread unrolls."""
        _, I, J, D, K = self.sizes
        return {"I": I, "J": J, "D": D, "K": K, "WARPS": warps, "num_warps": warps, "BLOCK_D": components}

    def new_links(self, *count: int) -> Tensor:
        """An uninitialised number for every image, output and input capsule: (*count, B, J, I)."""
        B, I, J, *_ = self.sizes
        return self.poses.new_empty((*count, B, J, I), dtype=torch.float32)


def _choose_blocks(B: int, I: int, D: int, K: int) -> _Blocks:
    warps, warps_of_sum = min(4, _power_above(B)), min(8, _power_above(B))
    images = min(8, _power_below(64 // K), _power_above(_ceil_div(B, warps)))
    while images > 1 and _ceil_div(B, images * warps) * _ceil_div(I, LANES) < PROGRAMS:
        images //= 2
    components = _largest_divisor(D, min(16, 128 // K))
    images_of_sum = min(8, _power_below(64 // components), _power_above(_ceil_div(B, warps_of_sum)))
    return _Blocks(warps, images, warps_of_sum, images_of_sum, components)


def _power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _power_below(number: int) -> int:
    return 1 << number.bit_length() - 1


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _first_coupling(layer: _Layer) -> Tensor:
    """The first coupling c¹, (1, J, I), the same for every image [first sum]."""
    _, I, J, *_ = layer.sizes
    options = layer.options
    if layer.prior is None:
        return layer.poses.new_full((1, J, I), options.uniform_coupling(I, J), dtype=torch.float32)
    logits = layer.prior.float().t()[None]
    coupling = compete(logits, "inputs" if options.over_inputs else "outputs", options.leaky)
    return coupling.transpose(1, 2).contiguous()


def _couple(
    layer: _Layer,
    summed_capsules: Tensor,
    coupling: Tensor,
    grad_sums: Tensor | None = None,
    grad_coupling: Tensor | None = None,
    grad_logits: Tensor | None = None,
) -> None:
    """Coupling c from V; with gs also db [logits; coupling; coupling, backward]."""
    kernels = _kernels()
    B, I, J, D, _ = layer.sizes
    given = layer.poses, layer.weight, layer.prior, summed_capsules, grad_sums, grad_coupling, coupling, grad_logits, B
    kernels.coupling_kernel[layer.tiles](
        *given,
        OVER_OUTPUTS=not layer.options.over_inputs,
        LEAKY=layer.options.leaky,
        IMAGES=layer.blocks.images,
        **layer.constants(layer.blocks.warps, _largest_divisor(D, 4)),
    )
    if layer.options.over_inputs:
        block = min(ROW_BLOCK, _power_above(I))
        kernels.compete_over_inputs_kernel[(B * J,)](coupling, grad_logits, I, LEAKY=layer.options.leaky, BLOCK=block)


def _weighted_sum(layer: _Layer, links: Tensor) -> Tensor:
    """Σ_i links_ij û_ij by splits of the inputs, (splits, B, J, D) [first sum; weighted sum; logits, backward]."""
    B, I, J, D, _ = layer.sizes
    warps, images = layer.blocks.warps_of_sum, layer.blocks.images_of_sum
    batch_tiles, input_tiles = _ceil_div(B, warps * images), _ceil_div(I, LANES)
    pieces = J * D // layer.blocks.components
    splits = min(input_tiles, max(1, PROGRAMS // (batch_tiles * pieces)))
    tiles_a_split = _ceil_div(input_tiles, splits)
    splits = _ceil_div(input_tiles, tiles_a_split)  # none of them empty
    partial = links.new_empty((splits, B, J, D))
    given = layer.poses, layer.weight, links, partial, B, _batch_stride(links), tiles_a_split
    constants = layer.constants(warps, layer.blocks.components)
    _kernels().weighted_sum_kernel[(splits, pieces, batch_tiles)](*given, IMAGES=images, **constants)
    return partial


def _squash(
    partial: Tensor,
    bias: Tensor | None,
    summed_capsules: Tensor,
    sums: Tensor,
    next_summed_capsules: Tensor | None,
    capsules: Tensor | None,
    eps: float,
) -> None:
    """Sum s and capsules v of an iteration, and V of the next [weighted sum; squash]."""
    splits, B, J, D = partial.shape
    grid, blocks = _row_blocks(B * J, D)
    bias = None if bias is None else bias.contiguous()
    given = partial, bias, summed_capsules, sums, next_summed_capsules, capsules
    _kernels().capsules_kernel[grid](*given, B * J, J, D, splits, eps, **blocks)


def _squash_backward(
    partial: Tensor, grad_summed: Tensor, accumulate: bool, sums: Tensor, grad_sums: Tensor, eps: float
) -> None:
    """G and gs of an iteration [squash, backward]."""
    splits, B, J, D = partial.shape
    grid, blocks = _row_blocks(B * J, D)
    _kernels().grad_sums_kernel[grid](
        partial, grad_summed, sums, grad_sums, B * J, D, splits, eps, ACCUMULATE=accumulate, **blocks
    )


def _row_blocks(rows: int, D: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and tile of the kernels whose rows are output capsules."""
    block_d = _power_above(D)
    block_rows = max(1, 256 // block_d)
    return (_ceil_div(rows, block_rows),), {"BLOCK_ROWS": block_rows, "BLOCK_D": block_d}


class _Terms(NamedTuple):
    """Of what the gradient of the votes is the sum: x_j = Σ_t cᵗ_j gsᵗ_j + dbᵗ_j Vᵗ_j, (B, I, J, D), never built.

    The first term has no db: its logits do not depend on the votes, or the gradient is stopped there.
    """

    first_coupling: Tensor  # (B or 1, J, I)
    grad_sums: Tensor  # of the first term and of the T others, (1 + T, B, J, D)
    coupling: Tensor  # of the others, (T, B, J, I), as are:
    grad_logits: Tensor
    summed_capsules: Tensor  # (T, B, J, D)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        first, others = self.grad_sums[0], self.grad_sums[1:]
        return self.first_coupling, first, self.coupling, self.grad_logits, others, self.summed_capsules


def _last_term(layer: _Layer, grad_capsules: Tensor, sums: Tensor, summed_capsules: Tensor) -> _Terms:
    """With the gradient stopped: the last weighted sum, its coupling a constant [stopped gradient]."""
    grad_sums = torch.empty_like(sums[:1])
    _squash_backward(grad_capsules[None], torch.empty_like(sums[0]), False, sums[-1], grad_sums[0], layer.options.eps)
    coupling = _first_coupling(layer)
    if len(sums) > 1:
        coupling = layer.new_links()
        _couple(layer, summed_capsules[-1], coupling)
    no_links = layer.new_links(0)
    return _Terms(coupling, grad_sums, no_links, no_links, summed_capsules[:0])


def _all_terms(
    layer: _Layer, grad_capsules: Tensor, grad_coupling: Tensor | None, sums: Tensor, summed_capsules: Tensor
) -> _Terms:
    """From the last iteration to the first: gs, then c and db, then what V's gradient G gains [backward]."""
    r = len(sums)
    grad_sums = torch.empty_like(sums)
    grad_summed = torch.empty_like(sums[0])
    coupling, grad_logits = layer.new_links(r - 1), layer.new_links(r - 1)
    partial = grad_capsules[None]
    for t in range(r - 1, -1, -1):
        # the last capsules are not in any V: G begins with the iteration before
        _squash_backward(partial, grad_summed, t < r - 2, sums[t], grad_sums[t], layer.options.eps)
        if t > 0:
            above = grad_coupling.contiguous() if grad_coupling is not None and t == r - 1 else None
            _couple(layer, summed_capsules[t], coupling[t - 1], grad_sums[t], above, grad_logits[t - 1])
            partial = _weighted_sum(layer, grad_logits[t - 1])
    return _Terms(_first_coupling(layer), grad_sums, coupling, grad_logits, summed_capsules[1:])


def _grad_poses(layer: _Layer, terms: _Terms) -> Tensor:
    """du, (B, I, K) [poses, backward]."""
    B, I, _, D, K = layer.sizes
    grad_poses = layer.poses.new_empty((B, K, I))
    given = layer.weight, *terms.tensors, grad_poses, B, _batch_stride(terms.first_coupling)
    constants = layer.constants(layer.blocks.warps, _largest_divisor(D, 2))
    _kernels().grad_poses_kernel[layer.tiles](*given, T=len(terms.coupling), IMAGES=layer.blocks.images, **constants)
    return grad_poses.transpose(1, 2)


def _grad_weight(layer: _Layer, terms: _Terms) -> Tensor:
    """dW, (I, J, D, K) [weight, backward]."""
    B, I, J, D, K = layer.sizes
    grad_weight = layer.weight.new_empty((J, D, K, I))
    grid = _ceil_div(I, LANES), J * D // layer.blocks.components
    given = layer.poses, *terms.tensors, grad_weight, B, _batch_stride(terms.first_coupling)
    constants = layer.constants(layer.blocks.warps, layer.blocks.components)
    _kernels().grad_weight_kernel[grid](*given, T=len(terms.coupling), **constants)
    return grad_weight.permute(3, 0, 1, 2)


def _grad_prior(layer: _Layer, terms: _Terms, grad_first_coupling: Tensor | None) -> Tensor:
    """Σ_t Σ_b dbᵗ, (I, J); at t = 1 the logits are the prior itself [coupling, backward]."""
    coupling, grad_logits = layer.new_links(), layer.new_links()
    no_capsules = torch.zeros_like(terms.grad_sums[0])
    above = None
    if grad_first_coupling is not None:  # (1, J, I): already summed over the images
        above = torch.zeros_like(grad_logits)
        above[0] = grad_first_coupling[0]
    _couple(layer, no_capsules, coupling, terms.grad_sums[0], above, grad_logits)
    return (terms.grad_logits.sum((0, 1)) + grad_logits.sum(0)).t()


def _batch_stride(links: Tensor) -> int:
    """0 for links that all images share."""
    return 0 if links.shape[0] == 1 else links.stride(0)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> Any:
    from torchcaps.ops.dynamic_routing import triton_kernels

    return triton_kernels
