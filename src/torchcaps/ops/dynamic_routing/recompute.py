"""Vote-free dynamic routing with its own backward pass: the votes, B·I·J·D numbers, are never built.

README.md beside this file derives every step; names in brackets, such as [logits], are the steps' names there.
Inside, poses are (B, K, I) and weights (J, D, K, I): the long axis comes last, and each step is a matrix product or
runs along it. A block is the part of the weights that is worked on at a time, (j, D, K·i); small letters are its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.reference import full_precision
from torchcaps.ops.squash import squash

MIB = 2**20
WORKING_MEMORY = (
    16.0  # MiB: a block's buffers stay in the caches; measured best for a large layer, near best for MNIST's
)
MAX_BATCH_SLICE = 128  # images; more do not make the products faster
MIN_BATCH_SLICE = 16  # images; with fewer, reading the weights costs more than multiplying by them
MIN_INPUT_BLOCK = 32  # input capsules; fewer make the inner loops short
INPUT_MULTIPLE = 16  # input capsules: a vector register of float32


class _WorkingMemory:
    mib = WORKING_MEMORY


def set_working_memory(mib: float) -> None:
    """Set how much memory vote-free routing may use for its work buffers, in one call.

    Layers are routed block by block, and the blocks are cut so that the buffers fit. Capsules that compete with each
    other stay together, so a block is at least one input capsule with all its outputs (``softmax_over="outputs"``) or
    one output with all its inputs, and up to 16 images; if even that does not fit, it is used all the same. The
    output, the gradients and what is saved for the backward pass come on top. Holds for all threads, from the next
    call on, and changes results by rounding only.

    Args:
        mib: MiB, positive and finite; 16 at the start.

    Raises:
        ValueError: ``mib`` is not positive and finite.
    """
    if not 0 < mib < float("inf"):
        raise ValueError(f"set_working_memory: mib must be positive and finite, got {mib}")
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
    """Output capsules and, if asked for, the last coupling. :func:`torchcaps.route` describes the arguments.

    Both are differentiable once, as in the reference. A second derivative raises an error that says what to do.
    """
    tensors = (poses, weight, bias, prior)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep_coupling = return_coupling or (differentiated and stop_gradient and num_iterations > 1)
    options = _Options(num_iterations, softmax_over == "inputs", stop_gradient, leaky, eps, keep_coupling)
    if torch.compiler.is_compiling():
        capsules, coupling, _ = _route_op(*tensors, *options.scalars)
    else:
        capsules, coupling, _ = _Route.apply(*tensors, options)
    return capsules, coupling.to(capsules.dtype) if return_coupling else None


@dataclass(frozen=True)
class _Options:
    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float
    keep_coupling: bool

    @property
    def scalars(self) -> tuple[int, bool, bool, bool, float, bool]:
        return (
            self.num_iterations, self.over_inputs, self.stop_gradient, self.leaky, self.eps, self.keep_coupling
        )  # fmt: skip

    @property
    def competing_axis(self) -> int:
        """The axis of logits (j, b, i) that the softmax runs over."""
        return 2 if self.over_inputs else 0

    @property
    def constant_coupling(self) -> bool:
        """No gradient flows through the coupling."""
        return self.stop_gradient or self.num_iterations == 0


class _Layer(NamedTuple):
    """The arguments of a call as the steps want them, in the dtype that is computed in."""

    poses: Float[Tensor, "B K I"]
    weight: Float[Tensor, "J D K I"]
    bias: Float[Tensor, "J D"] | None
    prior: Float[Tensor, "J I"] | None
    options: _Options
    blocks: _Blocks
    buffers: _Buffers

    @classmethod
    def of(cls, poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: _Options) -> _Layer:
        """Usually without a copy: the project's layers keep poses and weights in this order of memory."""
        dtype = _working_dtype(poses, weight)
        u = poses.to(dtype).transpose(1, 2).contiguous()
        W = weight.to(dtype).permute(1, 2, 3, 0).contiguous()
        bias = None if bias is None else bias.to(dtype)
        prior = None if prior is None or options.num_iterations == 0 else prior.to(dtype).t()
        return cls(u, W, bias, prior, options, _Blocks.of(u, W, options.over_inputs), _Buffers(u))

    def new_sum(self) -> Float[Tensor, "B J D"]:
        """Where a weighted sum is added up: zeros, or the bias."""
        J, D = self.weight.shape[:2]
        start = self.poses.new_zeros(J, D) if self.bias is None else self.bias
        return start.repeat(self.poses.shape[0], 1, 1)

    def weight_block(self, block: _Block) -> Float[Tensor, "j D Ki"]:
        """W of a block, contiguous."""
        return self.buffers.contiguous("weight", self.weight[block.outputs, :, :, block.inputs]).flatten(2)

    def pose_block(self, block: _Block, batch: slice) -> Float[Tensor, "b K i"]:
        """U of a block for some images, contiguous."""
        return self.buffers.contiguous("poses", self.poses[batch, :, block.inputs])


# ---- forward


def _forward(
    poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Capsules (B, J, D), the last coupling (B, I, J) if it is kept, else empty, and the sums (r, B, J, D).

    Coupling and sums are in the dtype that is computed in, the capsules in that of the arguments.
    """
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with full_precision(poses.device):
        layer = _Layer.of(poses, weight, bias, prior, options)
        coupling = _new_coupling(layer)
        sums = [_first_sum(layer)]
        if options.num_iterations == 0:  # the sum itself, not squashed
            return sums[0].to(dtype, copy=True), coupling.fill_(1).permute(1, 2, 0), torch.stack(sums)
        if options.num_iterations == 1 and options.keep_coupling:
            coupling.copy_(_first_coupling(layer)[:, None])
        capsules = squash(sums[0], eps=options.eps)
        summed_capsules = torch.zeros_like(capsules)  # V
        for t in range(2, options.num_iterations + 1):
            summed_capsules += capsules
            keep = options.keep_coupling and t == options.num_iterations
            sums.append(_weighted_sum(layer, summed_capsules, coupling if keep else None))
            capsules = squash(sums[-1], eps=options.eps)
        return capsules.to(dtype), coupling.permute(1, 2, 0), torch.stack(sums)


def _new_coupling(layer: _Layer) -> Float[Tensor, "J B I"]:
    B, _, I = layer.poses.shape
    return layer.poses.new_empty((layer.weight.shape[0], B, I) if layer.options.keep_coupling else (0, 0, 0))


def _first_coupling(layer: _Layer) -> Float[Tensor, "J I"]:
    """[first sum] c¹: the same for the whole batch, as it comes from the prior alone."""
    logits = layer.poses.new_zeros(layer.weight.shape[0], layer.poses.shape[2])
    if layer.prior is not None:
        logits += layer.prior
    return _compete(logits[:, None], layer.options, torch.empty_like(logits[:, None]))[:, 0]


def _uniform_coupling(layer: _Layer) -> float:
    """[first sum] c¹ without a prior, one number; 1 if there is no routing at all."""
    if layer.options.num_iterations == 0:
        return 1.0
    competitors = layer.poses.shape[2] if layer.options.over_inputs else layer.weight.shape[0]
    return 1.0 / (competitors + layer.options.leaky)


def _first_sum(layer: _Layer) -> Float[Tensor, "B J D"]:
    """[first sum] s¹ = u (c¹∘W)ᵀ + bias."""
    s = layer.new_sum()
    if layer.prior is None:
        s.flatten(1).addmm_(
            layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1).t(), alpha=_uniform_coupling(layer)
        )
        return s
    coupling = _first_coupling(layer)
    for block in layer.blocks:
        W = layer.weight[block.outputs, :, :, block.inputs] * coupling[block.outputs, None, None, block.inputs]
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            s[batch, block.outputs] += (u.flatten(1) @ W.flatten(2).flatten(0, 1).t()).unflatten(1, W.shape[:2])
    return s


def _weighted_sum(layer: _Layer, summed_capsules: Tensor, coupling_out: Tensor | None) -> Float[Tensor, "B J D"]:
    """[weighted sum] s_j = (c_j∘u) W_jᵀ + bias, with the coupling that the capsules so far ask for."""
    s = layer.new_sum()
    for block in layer.blocks:
        W = layer.weight_block(block)
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            VW = _pull_back(layer, "VW", summed_capsules[batch, block.outputs], W, u)
            coupling = _coupling(layer, block, VW, u, scratch=VW)
            if coupling_out is not None:
                coupling_out[block.outputs, batch, block.inputs] = coupling
            coupled = torch.mul(coupling[:, :, None], u, out=VW)  # VW has done its part
            s[batch, block.outputs] += _product(layer, "sum", coupled.flatten(2), W.transpose(1, 2)).transpose(0, 1)
    return s


def _pull_back(
    layer: _Layer, name: str, vectors: Float[Tensor, "b j D"], W: Float[Tensor, "j D Ki"], u: Float[Tensor, "b K i"]
) -> Float[Tensor, "j b K i"]:
    """[logits] V_j W_j: an output's vector seen from its inputs."""
    pulled = layer.buffers.take(name, (W.shape[0], *u.shape))
    torch.bmm(vectors.transpose(0, 1), W, out=pulled.flatten(2))
    return pulled


def _agreement(
    layer: _Layer, pulled: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
) -> Float[Tensor, "j b i"]:
    """[logits] ⟨V_j, û_j|i⟩ = Σ_k (V_j W_j)∘u, without the votes û."""
    j, b, _, i = pulled.shape
    return torch.sum(torch.mul(pulled, u, out=scratch), 2, out=layer.buffers.take("agreement", (j, b, i)))


def _coupling(
    layer: _Layer, block: _Block, VW: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
) -> Float[Tensor, "j b i"]:
    """[logits], [coupling] c = softmax(prior + ⟨V_j, û_j|i⟩)."""
    logits = _agreement(layer, VW, u, scratch)
    if layer.prior is not None:
        logits += layer.prior[block.outputs, None, block.inputs]
    return _compete(logits, layer.options, layer.buffers.take("coupling", logits.shape))


def _compete(logits: Float[Tensor, "j b i"], options: _Options, out: Tensor) -> Float[Tensor, "j b i"]:
    """[coupling] Softmax over the capsules that compete; if leaky, beside one more with logit 0."""
    axis = options.competing_axis
    if not options.leaky:
        return torch.softmax(logits, axis, out=out)
    highest = logits.amax(axis, keepdim=True).clamp_min_(0)
    torch.sub(logits, highest, out=out).exp_()
    return out.div_(out.sum(axis, keepdim=True).add_(highest.neg_().exp_()))


# ---- backward


@dataclass(frozen=True)
class _Wanted:
    """Which of the arguments want a gradient."""

    poses: bool
    weight: bool
    bias: bool
    prior: bool


class _Gradients(NamedTuple):
    """Gradients in the making, as the steps want them; None if not wanted."""

    poses: Float[Tensor, "B K I"] | None
    weight: Float[Tensor, "J D K I"] | None
    bias: Float[Tensor, "J D"] | None
    prior: Float[Tensor, "J I"] | None

    @classmethod
    def start(cls, layer: _Layer, wanted: _Wanted) -> _Gradients:
        """Zeros; the weight's, when the last iteration is going to write it block by block, uninitialised."""
        u, W = layer.poses, layer.weight
        iterated = layer.options.num_iterations > 1
        return cls(
            torch.zeros_like(u) if wanted.poses else None,
            None if not wanted.weight else torch.empty_like(W) if iterated else torch.zeros_like(W),
            u.new_zeros(W.shape[:2]) if wanted.bias else None,
            u.new_zeros(W.shape[0], u.shape[2]) if wanted.prior else None,
        )


def _backward(
    grad_capsules: Tensor | None,
    grad_coupling: Tensor | None,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prior: Tensor | None,
    sums: Tensor,
    coupling: Tensor,
    wanted: _Wanted,
    options: _Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[backward] Gradients of poses, weight, bias and prior in their axes and dtypes; empty where none is wanted."""
    with full_precision(poses.device):
        layer = _Layer.of(poses, weight, bias, prior, options)
        grads = _Gradients.start(layer, wanted)
        grad_v = torch.zeros_like(sums[0]) if grad_capsules is None else grad_capsules.to(sums.dtype)
        if options.num_iterations == 0:
            _first_backward(layer, grad_v, None, grads)
        elif options.stop_gradient:
            grad_s = _squash_backward(sums[-1], grad_v, options.eps)
            if options.num_iterations == 1:
                _first_backward(layer, grad_s, None, grads)
            else:
                _stopped_backward(layer, coupling.permute(2, 0, 1), grad_s, grads)
        else:
            grad_c = None if grad_coupling is None else grad_coupling.permute(2, 0, 1)
            _full_backward(layer, sums, grad_v, grad_c, grads)
        empty = poses.new_empty(0)
        return (
            empty if grads.poses is None else grads.poses.transpose(1, 2).to(poses.dtype),
            empty if grads.weight is None else grads.weight.permute(3, 0, 1, 2).to(weight.dtype),
            empty if grads.bias is None or bias is None else grads.bias.to(bias.dtype),
            empty if grads.prior is None or prior is None else grads.prior.t().to(prior.dtype),
        )


def _full_backward(layer: _Layer, sums: Tensor, grad_v: Tensor, grad_c: Tensor | None, grads: _Gradients) -> None:
    """[backward] Back through all iterations, the last first."""
    capsules = squash(sums, eps=layer.options.eps)
    grad_summed = torch.zeros_like(grad_v)  # G, the gradient of V
    for t in range(len(sums), 1, -1):
        grad_s = _squash_backward(sums[t - 1], grad_v, layer.options.eps)
        _iteration_backward(layer, capsules[: t - 1].sum(0), grad_s, grad_c, grads, grad_summed, last=t == len(sums))
        grad_v, grad_c = grad_summed, None
    _first_backward(layer, _squash_backward(sums[0], grad_v, layer.options.eps), grad_c, grads)


def _iteration_backward(
    layer: _Layer,
    summed_capsules: Float[Tensor, "B J D"],
    grad_s: Float[Tensor, "B J D"],
    grad_c: Float[Tensor, "J B I"] | None,
    grads: _Gradients,
    grad_summed: Float[Tensor, "B J D"],
    last: bool,
) -> None:
    """[backward] An iteration after the first; adds to ``grads`` and to ``grad_summed``."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    for block in layer.blocks:
        W = layer.weight_block(block)
        grad_W = None if grads.weight is None else layer.buffers.take("grad_W", W.shape).zero_()
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            V, gs = summed_capsules[batch, block.outputs], grad_s[batch, block.outputs]
            VW = _pull_back(layer, "VW", V, W, u)
            gsW = _pull_back(layer, "gsW", gs, W, u)
            scratch = layer.buffers.take("coupled", VW.shape)
            coupling = _coupling(layer, block, VW, u, scratch)

            grad_logits = _agreement(layer, gsW, u, scratch)  # [coupling, backward]
            if grad_c is not None:
                grad_logits += grad_c[block.outputs, batch, block.inputs]
            _compete_backward(coupling, grad_logits, layer.options)
            if grads.prior is not None:
                grads.prior[block.outputs, block.inputs] += grad_logits.sum(1)

            if grads.poses is not None:  # [poses, backward]
                mixed = gsW.mul_(coupling[:, :, None]).addcmul_(VW, grad_logits[:, :, None])
                grads.poses[batch, :, block.inputs] += mixed.sum(0)
            if grad_W is not None:  # [weight, backward]
                coupled = torch.mul(coupling[:, :, None], u, out=scratch).flatten(2)
                grad_W.baddbmm_(gs.permute(1, 2, 0), coupled)
            coupled = torch.mul(grad_logits[:, :, None], u, out=scratch).flatten(2)
            if grad_W is not None:
                grad_W.baddbmm_(V.permute(1, 2, 0), coupled)
            grad_V = _product(layer, "sum", coupled, W.transpose(1, 2))  # [logits, backward]
            grad_summed[batch, block.outputs] += grad_V.transpose(0, 1)
        _put_block(grads.weight, block, grad_W, add=not last)


def _stopped_backward(
    layer: _Layer, coupling: Float[Tensor, "J B I"], grad_s: Float[Tensor, "B J D"], grads: _Gradients
) -> None:
    """[stopped gradient] Back through the last weighted sum with its coupling held constant."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    if grads.poses is None and grads.weight is None:
        return
    for block in layer.blocks:
        W = layer.weight_block(block)
        grad_W = None if grads.weight is None else layer.buffers.take("grad_W", W.shape).zero_()
        for batch in layer.blocks.batches:
            u, gs = layer.pose_block(block, batch), grad_s[batch, block.outputs]
            c = coupling[block.outputs, batch, block.inputs][:, :, None]
            if grads.poses is not None:  # [poses, backward]
                grads.poses[batch, :, block.inputs] += _pull_back(layer, "gsW", gs, W, u).mul_(c).sum(0)
            if grad_W is not None:  # [weight, backward]
                coupled = torch.mul(c, u, out=layer.buffers.take("coupled", (W.shape[0], *u.shape)))
                grad_W.baddbmm_(gs.permute(1, 2, 0), coupled.flatten(2))
        _put_block(grads.weight, block, grad_W, add=False)


def _first_backward(layer: _Layer, grad_s: Tensor, grad_c: Tensor | None, grads: _Gradients) -> None:
    """[first sum, backward] The first iteration: its coupling is the same for the whole batch."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    if layer.prior is not None:
        _first_backward_with_prior(layer, layer.prior, grad_s, grad_c, grads)
        return
    gs, u, W = grad_s.flatten(1), layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1)
    if grads.poses is not None:
        grads.poses.flatten(1).addmm_(gs, W, alpha=_uniform_coupling(layer))
    if grads.weight is not None:
        grads.weight.flatten(2).flatten(0, 1).addmm_(gs.t(), u, alpha=_uniform_coupling(layer))


def _first_backward_with_prior(
    layer: _Layer, prior: Tensor, grad_s: Tensor, grad_c: Tensor | None, grads: _Gradients
) -> None:
    coupling = _first_coupling(layer)
    agreement = torch.zeros_like(prior) if grad_c is None else grad_c.sum(1)  # (J, I), summed over the batch
    for block in layer.blocks:
        W = layer.weight[block.outputs, :, :, block.inputs]
        c = coupling[block.outputs, None, None, block.inputs]
        coupled_W = (W * c).flatten(2).flatten(0, 1)
        product = torch.zeros_like(coupled_W)  # gsᵀ u
        for batch in layer.blocks.batches:
            u, gs = layer.pose_block(block, batch), grad_s[batch, block.outputs].flatten(1)
            product.addmm_(gs.t(), u.flatten(1))
            if grads.poses is not None:
                grads.poses[batch, :, block.inputs] += (gs @ coupled_W).view(u.shape)
        agreement[block.outputs, block.inputs] += (product.view(W.shape) * W).sum((1, 2))
        if grads.weight is not None:
            grads.weight[block.outputs, :, :, block.inputs].addcmul_(product.view(W.shape), c)
    if grads.prior is not None:
        grads.prior.add_(_compete_backward(coupling[:, None], agreement[:, None], layer.options)[:, 0])


def _compete_backward(coupling: Tensor, grad: Tensor, options: _Options) -> Tensor:
    """[coupling, backward] db = c∘(a − Σ c∘a) over the capsules that compete, in place of a; a leak has a = 0."""
    return grad.sub_((coupling * grad).sum(options.competing_axis, keepdim=True)).mul_(coupling)


def _squash_backward(s: Tensor, grad_v: Tensor, eps: float) -> Tensor:
    """[squash, backward] g_s = h g_v + 2 h' ⟨s, g_v⟩ s."""
    n = s.square().sum(-1, keepdim=True)
    q = torch.rsqrt(n + eps)
    h = n * q / (1 + n)
    slope = q / (1 + n).square() - n * q.pow(3) / (2 * (1 + n))
    return h * grad_v + 2 * slope * (s * grad_v).sum(-1, keepdim=True) * s


def _put_block(total: Tensor | None, block: _Block, part: Tensor | None, add: bool) -> None:
    """Write a block of the weight's gradient, or add to it."""
    if total is None or part is None:
        return
    target = total[block.outputs, :, :, block.inputs]
    part = part.view(target.shape)
    target.add_(part) if add else target.copy_(part)


def _product(layer: _Layer, name: str, left: Tensor, right: Tensor) -> Tensor:
    """The product left @ right, one product a capsule, in the buffer of that name."""
    return torch.bmm(left, right, out=layer.buffers.take(name, (*left.shape[:2], right.shape[2])))


# ---- blocks and buffers


class _Block(NamedTuple):
    """Capsules that are worked on together."""

    outputs: slice
    inputs: slice


@dataclass(frozen=True)
class _Blocks:
    """[blocks] How a layer is cut; iterates over the parts of its weights."""

    outputs: list[slice]
    inputs: list[slice]
    batches: list[slice]

    def __iter__(self) -> Iterator[_Block]:
        return (_Block(j, i) for i in self.inputs for j in self.outputs)

    @classmethod
    def of(cls, u: Float[Tensor, "B K I"], W: Float[Tensor, "J D K I"], over_inputs: bool) -> _Blocks:
        """Cut so that a block's buffers fit the working memory and the capsules that compete stay together."""
        B, I, (J, D, K) = u.shape[0], u.shape[2], W.shape[:3]
        budget = int(_WorkingMemory.mib * MIB) // u.element_size()
        matrix = D * K  # numbers of an input and output: W, and as many of grad_W
        link = 3 * K + 3  # numbers of an image, input and output: VW, gsW, coupled; agreement, coupling, spare
        b = _piece(B, MAX_BATCH_SLICE)
        if over_inputs:  # the weights of an output are one piece of memory, and used where they are
            while b > MIN_BATCH_SLICE and I * (matrix + b * link) > budget:
                b = -(-b // 2)
            j = _piece(J, budget // (I * (matrix + b * link)))
            return cls(_slices(J, j), _slices(I, I), _slices(B, b))
        if I * J * (matrix + b * link) <= budget:
            return cls(_slices(J, J), _slices(I, I), _slices(B, b))
        while b > MIN_BATCH_SLICE and min(I, MIN_INPUT_BLOCK) * (J * (2 * matrix + b * link) + b * K) > budget:
            b = -(-b // 2)
        i = _piece(I, budget // (J * (2 * matrix + b * link) + b * K), INPUT_MULTIPLE)
        return cls(_slices(J, J), _slices(I, i), _slices(B, b))


def _piece(size: int, most: int, multiple: int = 1) -> int:
    """Length of the nearly equal pieces, at most ``most`` long, that ``size`` is cut into."""
    if size <= most:
        return max(size, 1)
    most = max(most // multiple * multiple, 1) if most >= multiple else max(most, 1)
    pieces = -(-size // most)
    return min(most, -(-size // (pieces * multiple)) * multiple)


def _slices(size: int, piece: int) -> list[slice]:
    return [slice(start, min(start + piece, size)) for start in range(0, size, piece)]


class _Buffers:
    """Work buffers of one call, used again and again: fresh memory would cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The buffer of that name in ``shape``, with whatever it holds."""
        size = torch.Size(shape).numel()
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = self._like.new_empty(size)
        return flat[:size].view(shape)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` itself if it is contiguous, else its copy in the buffer of that name."""
        return tensor if tensor.is_contiguous() else self.take(name, tensor.shape).copy_(tensor)


def _working_dtype(poses: Tensor, weight: Tensor) -> torch.dtype:
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- autograd, torch.func


class _Route(torch.autograd.Function):
    """``_forward`` with ``_backward`` as its gradient."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, options = inputs
        _save(ctx, tuple(tensors), options, output)

    @staticmethod
    def backward(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, _: None) -> Any:
        wanted = _wanted(ctx)
        grads = _RouteBackward.apply(grad_capsules, grad_coupling, *ctx.saved_tensors, wanted, ctx.options)
        return *_only_wanted(grads, wanted), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _one_by_one(_Route.apply, info.batch_size, in_dims, args)


class _RouteBackward(torch.autograd.Function):
    """``_backward`` as a function of its own, so that a second derivative can say what to do."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _backward(*args)

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


def _save(ctx: Any, tensors: tuple[Any, ...], options: _Options, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, coupling, sums = output
    ctx.options = options
    ctx.set_materialize_grads(False)
    if options.constant_coupling or not options.keep_coupling:
        ctx.mark_non_differentiable(coupling, sums)
    else:
        ctx.mark_non_differentiable(sums)
    kept = coupling if options.stop_gradient else coupling.new_empty(0)
    ctx.save_for_backward(*tensors, sums, kept)


def _wanted(ctx: Any) -> _Wanted:
    poses, weight, bias, prior = ctx.needs_input_grad[:4]
    return _Wanted(poses, weight, bias, prior and not ctx.options.constant_coupling)


def _only_wanted(grads: tuple[Tensor, ...], wanted: _Wanted) -> tuple[Tensor | None, ...]:
    return tuple(grad if want else None for grad, want in zip(grads, astuple(wanted), strict=True))


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


_OPTIONS_SCHEMA = "int num_iterations, bool over_inputs, bool stop_gradient, bool leaky, float eps, bool keep_coupling"
_LAYER_SCHEMA = "Tensor poses, Tensor weight, Tensor? bias, Tensor? prior"


def _op_forward(poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, *scalars: Any) -> Any:
    return _forward(poses, weight, bias, prior, _Options(*scalars))


def _op_backward(*args: Any) -> Any:
    arguments = (*args[:8], _Wanted(*args[8]), _Options(*args[9:]))
    return _backward(*arguments)


_route_op = torch.library.custom_op(
    "torchcaps::route",
    _op_forward,
    mutates_args=(),
    schema=f"({_LAYER_SCHEMA}, {_OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
_route_backward_op = torch.library.custom_op(
    "torchcaps::route_backward",
    _op_backward,
    mutates_args=(),
    schema=f"(Tensor? grad_capsules, Tensor? grad_coupling, {_LAYER_SCHEMA}, Tensor sums, Tensor coupling, "
    f"bool[4] wanted, {_OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_route_op.register_fake
def _(*args: Any) -> Any:
    """Shapes, strides and dtypes of ``_forward``'s results."""
    poses, weight, options = args[0], args[1], _Options(*args[4:])
    (B, I, _), (_, J, D, _) = poses.shape, weight.shape
    working = poses.new_empty(0, dtype=_working_dtype(poses, weight))
    return (
        poses.new_empty(B, J, D, dtype=torch.promote_types(poses.dtype, weight.dtype)),
        working.new_empty((J, B, I) if options.keep_coupling else (0, 0, 0)).permute(1, 2, 0),
        working.new_empty(max(options.num_iterations, 1), B, J, D),
    )


@_route_backward_op.register_fake
def _(*args: Any) -> Any:
    """Shapes, strides and dtypes of ``_backward``'s results."""
    tensors, wanted = args[2:6], args[8]
    orders = ((0, 2, 1), (1, 2, 3, 0), (0, 1), (1, 0))  # of memory
    return tuple(
        _empty_in_order(tensor, order) if want else args[2].new_empty(0)
        for tensor, order, want in zip(tensors, orders, wanted, strict=True)
    )


def _empty_in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    memory = tensor.new_empty([tensor.shape[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(tensor.ndim)])


def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _save(ctx, inputs[:4], _Options(*inputs[4:]), output)


def _op_autograd(ctx: Any, grad_capsules: Tensor | None, grad_coupling: Tensor | None, _: None) -> Any:
    wanted = _wanted(ctx)
    grads = _route_backward_op(
        grad_capsules, grad_coupling, *ctx.saved_tensors, list(astuple(wanted)), *ctx.options.scalars
    )
    return *_only_wanted(grads, wanted), *(None for _ in ctx.options.scalars)


_route_op.register_autograd(_op_autograd, setup_context=_op_setup_context)
