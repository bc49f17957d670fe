"""[held votes] The sums of very few images, from votes that stay in the caches.

Without votes, each of the 2r - 1 products of a forward pass reads all weights. For a large batch that is little beside
the multiplications; for one image it is nearly all the work. The votes of one image are small (0.7 MiB for MNIST's
layer, whose weights are 5.6 MiB), and once they are there no sum needs the weights again: they are read once.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.dynamic_routing.recompute.layer import Layer
from torchcaps.ops.dynamic_routing.recompute.steps import compete, first_coupling, uniform_coupling
from torchcaps.ops.memory import get_working_memory

# Measured on a CPU, softmax over either axis, 2 to 4 iterations, layers of 2,000 to 700,000 links: within these bounds
# 0.2 to 1.0 of the time without votes, beyond them soon more. A single iteration has nothing to hold them for.
MIN_ITERATIONS = 2
MAX_IMAGES = 6
MAX_MIB = 16.0  # votes beyond the caches are slower than none


def pay_off(layer: Layer) -> bool:
    """Whether a call is faster with votes: very few images, several iterations, votes that stay in the caches.

    The votes also keep within :func:`torchcaps.set_working_memory`.
    """
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    if not 0 < B <= MAX_IMAGES or layer.options.num_iterations < MIN_ITERATIONS or layer.poses.device.type != "cpu":
        return False
    mib = B * J * I * (D + 2) * layer.poses.element_size() / MIB  # votes, logits, coupling
    return mib <= min(MAX_MIB, get_working_memory())


def make_votes(layer: Layer) -> Float[Tensor, "J B D I"]:
    """û_j = W_j u, a component k of the poses at a time: each weight is read once, and only the votes are written."""
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    votes = layer.buffers.take("votes", (J, B, D, I)).zero_()
    for W_k, u_k in zip(layer.weight[:, None].unbind(3), layer.poses[:, None].unbind(2), strict=True):
        votes.addcmul_(W_k, u_k)
    return votes


def first_sum(votes: Float[Tensor, "J B D I"], layer: Layer) -> Float[Tensor, "B J D"]:
    """[first sum] s¹ = Σ_i c¹_ij û_j|i + bias."""
    if layer.prior is None:
        return _with_bias(layer, votes.sum(3).mul_(uniform_coupling(layer)))
    return _with_bias(layer, (first_coupling(layer)[:, None, None] @ votes.mT).squeeze(2))


def weighted_sum(
    votes: Float[Tensor, "J B D I"],
    layer: Layer,
    summed_capsules: Float[Tensor, "B J D"],
    coupling_out: Float[Tensor, "J B I"] | None,
) -> Float[Tensor, "B J D"]:
    """[logits], [coupling], [weighted sum] as the paper has them: s_j = Σ_i c_ij û_j|i + bias."""
    logits = (summed_capsules.transpose(0, 1)[:, :, None] @ votes).squeeze(2)
    if layer.prior is not None:
        logits += layer.prior[:, None]
    coupling = compete(logits, layer.options, layer.buffers.take("coupling", logits.shape))
    if coupling_out is not None:
        coupling_out.copy_(coupling)
    return _with_bias(layer, (coupling[:, :, None] @ votes.mT).squeeze(2))


def _with_bias(layer: Layer, s: Float[Tensor, "J B D"]) -> Float[Tensor, "B J D"]:
    return s.transpose(0, 1) if layer.bias is None else s.transpose(0, 1) + layer.bias
