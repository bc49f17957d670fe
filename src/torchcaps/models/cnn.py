"""Convolutional baselines: the paper's, one with as many parameters as its network, and any pooled backbone."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.images import check_images
from torchcaps.models.network import Network
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.models.shapes import infer_map_shape
from torchcaps.nn.convolutions import ChannelNorm, ConvNorm, Convolution, conv_stem
from torchcaps.ops.precision import in_full_precision
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import OddKernel, Pixels, ShareBelowOne, Width
from torchcaps.tasks import TaskName


class CNN(Network):
    """Base class of convolutional networks: logits of the classes, their probabilities, and the loss.

    It is called like :class:`~torchcaps.CapsNet`. The ``scores`` are probabilities of a softmax, or of sigmoids for
    several objects in an image.
    """

    classify: nn.Module
    """Last layer, which returns the logits."""

    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.layers, self.decoder = nn.ModuleList(), None

    @abstractmethod
    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"] | Float[Tensor, "B J N"]:
        """Return the input of the last layer for images with pixels 0..1."""

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Targets | None = None,  # noqa: ARG002  all networks have the same arguments
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Classify images with pixels 0..1. ``targets`` are not used, because a CNN has no capsule to choose.

        Raises:
            InputError: The images do not fit the network, or ``return_coupling`` is set, which needs capsules.
        """
        if return_coupling:
            raise InputError("a convolutional network has no coupling; use a preset with capsules")
        check_images(images, self.in_shape, next(self.parameters()))
        logits = in_full_precision(self.classify(self.features(images)))
        return ModelOutput(self._task.activate(logits, self), logits=logits)

    @checked
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "..."],  # noqa: ARG002  all networks have the same arguments
        targets: Targets,
    ) -> Losses:
        """Return the loss of the task; the images are not used.

        - one class for each image: softmax cross-entropy; the classes of a multi-hot row share the probability;
        - several objects or labels: sigmoid cross-entropy, summed;
        - regression: mean squared error.

        Raises:
            InputError: The output has no logits, targets do not fit, or an image has two objects of one class.
        """
        if output.logits is None:
            raise InputError("CNN.loss: output must have logits, but outputs of capsule networks have none")
        loss = self._task.loss(output, targets, self)
        return Losses(loss, loss)


@register("network", "cnn")
class BaselineCNN(CNN):
    """Convolutions of stride 1 that keep the size, dense layers and dropout.

    Optional: max pooling after each convolution, and the stem of :class:`~torchcaps.nn.ConvBackbone` before the first.

    Args:
        channels: Channels of each convolution.
        kernel: Kernel of the convolutions, pixels.
        first_kernel: Kernel of the first convolution, pixels; none: the same as ``kernel``.
        pool: Size and stride of the max pooling after each convolution, pixels; 1: no pooling.
        hidden: Widths of the dense layers.
        dropout: Probability of dropout before the last layer.
        stem_channels: Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have
            none.
        stem_strides: Strides of the stem's convolutions, pixels, one for each.
        conv_norm: Normalisation before the activation of each convolution: none, or layer normalisation over the
            channels of each position.
        conv_dropout: Probability of dropout after the stem and after each convolution; it drops whole channels of an
            image.

    Source: Sabour, Frosst, Hinton 2017, sections 5 and 6 (arXiv:1710.09829). The paper does not give the padding;
    only convolutions that keep the size have its 35.4 M parameters on MNIST and its 24.56 M on MultiMNIST's 36×36.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "classes",
        channels: tuple[Width, ...] = (256, 256, 128),
        kernel: OddKernel = 5,
        first_kernel: OddKernel | None = None,
        pool: Pixels = 1,
        hidden: tuple[Width, ...] = (328, 192),
        dropout: ShareBelowOne = 0.5,
        stem_channels: tuple[Width, ...] = (),
        stem_strides: tuple[Pixels, ...] = (),
        conv_norm: ConvNorm = "none",
        conv_dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        if not channels:
            raise InputError("channels must name at least one convolution, got none")
        self.channels, self.kernel, self.first_kernel, self.pool = tuple(channels), kernel, first_kernel, pool
        self.hidden, self.dropout = tuple(hidden), dropout
        self.stem_channels, self.stem_strides = tuple(stem_channels), tuple(stem_strides)
        self.conv_norm, self.conv_dropout = conv_norm, conv_dropout
        norm = conv_norm == "channel"
        self.stem = conv_stem(self.in_shape[0], self.stem_channels, self.stem_strides, conv_norm, conv_dropout)
        before, height, width = infer_map_shape(self.stem, self.in_shape)[0].shape[1:]
        kernels = [first_kernel or kernel, *[kernel] * (len(channels) - 1)]
        self.convs = nn.ModuleList(
            Convolution(fan_in, fan_out, side, padding=side // 2, bias=not norm)
            for (fan_in, fan_out), side in zip(itertools.pairwise([before, *channels]), kernels, strict=True)
        )
        self.norms = nn.ModuleList(ChannelNorm(each) if norm else nn.Identity() for each in channels)
        self.drop_channels = nn.Dropout2d(conv_dropout) if conv_dropout else nn.Identity()
        # ceil_mode rounds odd sizes up, so that images of any size fit
        self.max_pool = nn.MaxPool2d(pool, ceil_mode=True) if pool > 1 else nn.Identity()
        for _ in self.convs:
            height, width = (-(-size // pool) for size in (height, width))
        widths = [channels[-1] * height * width, *hidden]
        self.dense = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths))
        self.drop = nn.Dropout(dropout)
        self.classify = nn.Linear(widths[-1], num_classes)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        maps = self.stem(images)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            maps = self.drop_channels(self.max_pool(norm(conv(maps)).relu()))
        features = maps.flatten(1)
        for dense in self.dense:
            features = dense(features).relu()
        return self.drop(features)


@register("network", "pooled")
class PooledCNN(CNN):
    """A backbone, pooling over its maps, and a linear layer: the baseline of a capsule network on that backbone.

    Args:
        backbone: Network that turns images into feature maps.
        pooling: Input of the linear layer: the mean or the maximum of each channel over its map, or all values.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "classes",
        backbone: Annotated[Spec, Choice("backbone")] = "stack",
        pooling: Literal["average", "max", "none"] = "average",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.pooling = pooling
        self.backbone = build("backbone", backbone, in_channels=self.in_shape[0], in_shape=self.in_shape)
        self.map_shape = tuple(infer_map_shape(self.backbone, self.in_shape)[0].shape[1:])
        """Channels, height and width of the backbone's maps."""
        seen = math.prod(self.map_shape) if pooling == "none" else self.map_shape[0]
        self.classify = nn.Linear(seen, num_classes)
        if self.backbone is not backbone and hasattr(self.backbone, "init_weights"):
            self.backbone.init_weights()

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        maps = self.backbone(images)
        if self.pooling == "none":
            return maps.flatten(1)
        return maps.mean((2, 3)) if self.pooling == "average" else maps.amax((2, 3))
