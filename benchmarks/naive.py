"""The network and its routing as published PyTorch code commonly writes them: the yardstick, not a part of the library.

Convolutions are PyTorch's own (`nn.Conv2d`, so `F.conv2d`) on the whole batch, votes are built by broadcasting, all of
it is left to autograd. Nothing here uses a faster way of the library; of it come only the decoder, the losses and the
weights, copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.models import CapsNet, ModelOutput
from torchcaps.nn import ConvBackbone, Dense, mask_capsules


def naive_routing(poses: Tensor, weight: Tensor, num_iterations: int = 3, stop_gradient: bool = False) -> Tensor:
    """Output capsules (B, J, D) from poses (B, I, K) and weights (I, J, D, K), by broadcasting.

    Votes by a broadcast product, logits with an entry for every image and two trailing axes of size one, elementwise
    products and sums for the weighted sum and for the agreement, all of it left to autograd. ``stop_gradient``
    detaches the votes of all iterations but the last.
    """
    (B, I, _), J = poses.shape, weight.shape[1]
    votes = torch.matmul(weight[None], poses[:, :, None, :, None])  # (B, I, J, D, 1)
    constant_votes = votes.detach() if stop_gradient else votes
    logits = torch.zeros(B, I, J, 1, 1, dtype=poses.dtype, device=poses.device)
    for iteration in range(1, num_iterations + 1):
        last = iteration == num_iterations
        coupling = logits.softmax(2)
        capsules = _squash((coupling * (votes if last else constant_votes)).sum(1, keepdim=True))  # (B, 1, J, D, 1)
        if not last:
            logits = logits + (constant_votes * capsules).sum(3, keepdim=True)
    return capsules.squeeze(4).squeeze(1)


def einsum_routing(poses: Tensor, weight: Tensor, num_iterations: int = 3, stop_gradient: bool = False) -> Tensor:
    """The same by einsum, without axes of size one: the plain formulation that compilers do most for."""
    votes = torch.einsum("bik,ijdk->bijd", poses, weight)
    constant_votes = votes.detach() if stop_gradient else votes
    logits = torch.zeros(votes.shape[:3], dtype=poses.dtype, device=poses.device)
    for _ in range(num_iterations - 1):
        capsules = _squash(torch.einsum("bij,bijd->bjd", logits.softmax(2), constant_votes), 2)
        logits = logits + torch.einsum("bijd,bjd->bij", constant_votes, capsules)
    return _squash(torch.einsum("bij,bijd->bjd", logits.softmax(2), votes), 2)


def _squash(s: Tensor, dim: int = 3, eps: float = 1e-7) -> Tensor:
    squared = (s**2).sum(dim, keepdim=True)
    return squared / (1 + squared) * s / torch.sqrt(squared + eps)


def plain_convolution(convolution: nn.Conv2d) -> nn.Conv2d:
    """PyTorch's own convolution with copies of the weights of one that may be faster; what follows it is left out."""
    weight = convolution.weight
    plain = nn.Conv2d(
        convolution.in_channels,
        convolution.out_channels,
        (weight.shape[2], weight.shape[3]),
        (convolution.stride[0], convolution.stride[1]),
        bias=convolution.bias is not None,
    )
    plain.load_state_dict(convolution.state_dict())
    return plain


def convolutions_of(network: CapsNet) -> tuple[nn.Conv2d, nn.Conv2d]:
    """The first and the primary convolution of a network, whatever they are made of."""
    backbone = network.backbone
    assert isinstance(backbone, ConvBackbone)
    first, primary = backbone.conv, network.primary_capsules.convs[0]
    assert isinstance(first, nn.Conv2d)
    assert isinstance(primary, nn.Conv2d)
    return first, primary


def weight_of(network: CapsNet) -> Tensor:
    """The matrices (I, J, D, K) of its class capsules."""
    transform = network.class_capsules.transform
    assert isinstance(transform, Dense)
    return transform.matrices


class Convolutions(nn.Module):
    """The two convolutions of a network alone, with a ReLU between them, by PyTorch's own: the former floor of a step.

    Args:
        network: Its weights are copied.
    """

    def __init__(self, network: CapsNet) -> None:
        super().__init__()
        self.conv, self.primary = map(plain_convolution, convolutions_of(network))

    def forward(self, images: Tensor) -> Tensor:
        """The primary capsules' map."""
        return self.primary(self.conv(images).relu())


class NaiveCapsNet(nn.Module):
    """sabour2017 as published code writes it, with copies of the weights of torchcaps's.

    Args:
        network: sabour2017 with any sizes.
        stop_gradient: Detach the votes of all iterations but the last.
        routing: :func:`naive_routing`, or another of its arguments.
    """

    def __init__(self, network: CapsNet, stop_gradient: bool, routing: Callable[..., Tensor] = naive_routing) -> None:
        super().__init__()
        self.stop_gradient, self.routing = stop_gradient, routing
        self.types, self.dim = network.primary_capsules.primary_types, network.primary_capsules.primary_dim
        self.convolutions = Convolutions(network)
        # contiguous, (I, J, D, K), as published code keeps it
        weight = weight_of(network).detach()
        self.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
        self.decoder = copy.deepcopy(network.decoder)

    def capsules(self, images: Tensor) -> Tensor:
        """Class capsules (B, J, D), without reconstructing."""
        maps = self.convolutions(images)
        grouped = maps.view(len(maps), self.types, self.dim, -1)  # (B, types, K, locations)
        poses = grouped.permute(0, 1, 3, 2).reshape(len(maps), -1, self.dim)
        return self.routing(_squash(poses, 2), self.weight, 3, self.stop_gradient)

    def forward(self, images: Tensor, targets: Tensor) -> ModelOutput:
        """Lengths, capsules and the reconstruction from the labels' capsules."""
        capsules = self.capsules(images)
        assert self.decoder is not None
        reconstruction = self.decoder(mask_capsules(capsules, targets))
        return ModelOutput(torch.sqrt((capsules**2).sum(2) + 1e-7), capsules, reconstruction)
