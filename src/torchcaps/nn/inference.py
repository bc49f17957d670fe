"""Two ways in which convolutions are faster on a CPU where nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn


def only_infers(images: Tensor) -> bool:
    """Whether these are computed on a CPU, at once, and nothing is kept for a backward pass."""
    return images.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def in_parts(
    function: Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B I K"]],
    images: Float[Tensor, "B C H W"],
    largest: int,
) -> Float[Tensor, "B I K"]:
    """``function(images)``, some images at a time; poses keep their memory order (B, K, I).

    Feature maps of a large batch are taken from the system anew each time and fall out of the caches; those of a few
    images are neither. On the paper's network 512 images take an eighth less time.

    Args:
        function: From images to poses, each image by itself.
        images: All of them.
        largest: Images at a time.
    """
    if len(images) <= largest:
        return function(images)
    return torch.cat([function(part).transpose(1, 2) for part in images.split(largest)]).transpose(1, 2)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to the module, which then has to be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def suits_few(features: Float[Tensor, "B C H W"], conv: nn.Conv2d) -> bool:
    """Whether :func:`convolve_few` is the faster way: what it copies is much smaller than the weight."""
    if not only_infers(features) or features.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    if has_hooks(conv):
        return False
    (kernel, _), (stride, _) = conv.kernel_size, conv.stride
    locations = math.prod((size - kernel) // stride + 1 for size in features.shape[2:])
    return 4 * len(features) * locations <= conv.out_channels


def convolve_few(features: Float[Tensor, "B C H W"], conv: nn.Conv2d) -> Float[Tensor, "B O h w"]:
    """A convolution without padding as one matrix product.

    oneDNN brings the weight into an order of its own at every call. For one image of the paper's network that is 21 MB
    in and out, for 3 MB of features; here the features are copied instead.
    """
    (kernel, _), (stride, _) = conv.kernel_size, conv.stride
    patches = features.unfold(2, kernel, stride).unfold(3, kernel, stride)  # (B, C, h, w, k, k)
    B, _, h, w = patches.shape[:4]
    columns = patches.permute(0, 2, 3, 1, 4, 5).reshape(B * h * w, -1)
    weight = conv.weight.flatten(1).t()
    product = columns @ weight if conv.bias is None else torch.addmm(conv.bias, columns, weight)
    return product.view(B, h, w, -1).permute(0, 3, 1, 2)
