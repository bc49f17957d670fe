"""Convolutional networks to compare with: the paper's baselines, one of its network's size, any backbone, pooled."""

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
from torchcaps.models.images import check_images, follow_backbone
from torchcaps.models.network import Network
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.nn.convolutions import ChannelNorm, ConvNorm, Convolution, conv_stem
from torchcaps.ops.precision import in_full_precision
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import OddKernel, Pixels, ShareBelowOne, Width
from torchcaps.tasks import TaskName


class CNN(Network):
    """What the convolutional networks have in common: logits of the classes, their probabilities, and the loss.

    They are called like :class:`~torchcaps.CapsNet`; ``scores`` are probabilities: of a softmax, or, for several
    objects in an image, of sigmoids.
    """

    classify: nn.Linear
    """The last layer, which gives the logits."""

    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.layers, self.decoder = nn.ModuleList(), None

    @abstractmethod
    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the last layer sees of images with pixels 0..1."""

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Targets | None = None,  # noqa: ARG002  as all
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Classify images with pixels 0..1; ``targets`` are not used, as there is no capsule to choose.

        Raises:
            InputError: Images that do not fit, or coupling was asked for, which a CNN has not.
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
        images: Float[Tensor, "..."],  # noqa: ARG002  the call all networks share
        targets: Targets,
    ) -> Losses:
        """Softmax cross-entropy; of several objects or labels, sigmoid cross-entropy, summed; or the squared error.

        The classes of a multi-hot row share the probability. The images are not used.

        Raises:
            InputError: An output without logits, targets that do not fit, or two objects of one class in an image.
        """
        if output.logits is None:
            raise InputError("CNN.loss: output must have logits, which that of a capsule network has not")
        loss = self._task.loss(output, targets, self)
        return Losses(loss, loss)


@register("network", "cnn")
class BaselineCNN(CNN):
    """Convolutions of stride 1 that keep the size, each followed by max pooling where wanted, dense layers, dropout.

    Before them, where wanted, the stem that :class:`~torchcaps.nn.ConvBackbone` may have too.

    Args:
        channels: Channels of the convolutions.
        kernel: Kernel of the convolutions, pixels.
        first_kernel: Kernel of the first convolution, pixels; that of the others if none is given.
        pool: Max pooling after each convolution: size and stride, pixels; 1 is none.
        hidden: Widths of the dense layers.
        dropout: Dropout before the last layer, a probability.
        stem_channels: Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have
            none.
        stem_strides: Their strides, pixels, one for each.
        conv_norm: What comes before the activations of all convolutions except the primary capsules': nothing, or layer
            normalisation over the channels of each location.
        conv_dropout: Probability of dropout after the stem and after each other convolution except the primary
            capsules'; it drops whole channels of an image.

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
        before, height, width = follow_backbone(self.stem, self.in_shape)[0].shape[1:]
        kernels = [first_kernel or kernel, *[kernel] * (len(channels) - 1)]
        self.convs = nn.ModuleList(
            Convolution(fan_in, fan_out, side, padding=side // 2, bias=not norm)
            for (fan_in, fan_out), side in zip(itertools.pairwise([before, *channels]), kernels, strict=True)
        )
        self.norms = nn.ModuleList(ChannelNorm(each) if norm else nn.Identity() for each in channels)
        self.drop_channels = nn.Dropout2d(conv_dropout) if conv_dropout else nn.Identity()
        # odd sizes are rounded up, so that an image of any size fits
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
    """A backbone, pooling over the places of its maps, and a linear layer: a capsule network without its capsules.

    Args:
        backbone: The network that makes feature maps of images.
        pooling: What the linear layer sees: of each channel the mean or the largest value over all places; or all
            values.
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
        self.map_shape = tuple(follow_backbone(self.backbone, self.in_shape)[0].shape[1:])
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
