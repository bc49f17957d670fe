"""Convolutional networks to compare with: the paper's baselines, one of its network's size, any backbone, pooled."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.config import CNNConfig, PooledConfig
from torchcaps.models.images import backbone_maps, check_images, if_they_fit, largest_map
from torchcaps.models.network import Network
from torchcaps.models.objects import label_rows
from torchcaps.models.output import Losses, ModelOutput, Targets, check_output
from torchcaps.nn import ChannelNorm, Convolution, ConvStem
from torchcaps.ops.checks import check_flags
from torchcaps.ops.losses import multi_hot
from torchcaps.ops.precision import in_full_precision


class CNN(Network):
    """What the convolutional networks have in common: logits of the classes, their probabilities, and the loss.

    They are called like :class:`~torchcaps.models.CapsNet`; ``scores`` are probabilities: of a softmax, or, for several
    objects in an image, of sigmoids.
    """

    classify: nn.Linear
    """The last layer, which gives the logits."""

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
            TypeError: Images that are not floating-point or not of the network's dtype.
            ValueError: Images whose shape does not fit.
            InputError: Coupling was asked for, which a CNN has not.
        """
        name = type(self).__name__
        check_flags(name, return_coupling=return_coupling)
        if return_coupling:
            raise InputError("a convolutional network has no coupling; use a preset with capsules")
        check_images(name, images, self.in_shape, next(self.parameters()))
        logits = in_full_precision(self.classify(self.features(images)))
        return ModelOutput(logits.softmax(-1) if self.config.objects == 1 else logits.sigmoid(), logits=logits)

    def decoder_targets(self, targets: Targets) -> None:
        """None: there is no decoder."""

    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"],  # noqa: ARG002  the call all networks share
        targets: Targets,
    ) -> Losses:
        """Softmax cross-entropy; for several objects in an image, sigmoid cross-entropy, summed over the classes.

        The classes of a multi-hot row share the probability. The images are not used.

        Raises:
            TypeError: Labels that are not integers, or another ``output``.
            ValueError: An output without logits, targets that do not fit, or two objects of one class in an image.
        """
        name = f"{type(self).__name__}.loss"
        check_output(name, output)
        if output.logits is None:
            raise ValueError(f"{name}: output must have logits, which that of a capsule network has not")
        if self.config.objects > 1:
            present = label_rows(output.scores, targets, self.config.objects, name)
            loss = F.binary_cross_entropy_with_logits(output.logits, present, reduction="none").sum(-1).mean()
            return Losses(loss, loss)
        present = multi_hot(output.scores, targets, name)
        wanted = present / present.sum(-1, keepdim=True).clamp_min(1)
        loss = -(wanted * F.log_softmax(output.logits, -1)).sum(-1).mean()
        return Losses(loss, loss)


class BaselineCNN(CNN):
    """Convolutions of stride 1 that keep the size, each followed by max pooling where wanted, dense layers, dropout.

    Before them, where wanted, the stem that :class:`~torchcaps.models.CapsNet` may have too.

    Args:
        config: The network.
        in_shape: Images (C, H, W).
        num_classes: J.

    Raises:
        InputError: No configuration of a convolutional network, as many objects in an image as there are classes, or
            images smaller than the stem needs.

    Source: Sabour, Frosst, Hinton 2017, sections 5 and 6 (arXiv:1710.09829). The paper does not give the padding;
    only convolutions that keep the size have its 35.4 M parameters on MNIST and its 24.56 M on MultiMNIST's 36×36.
    """

    config: CNNConfig

    def __init__(self, config: CNNConfig, in_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        if not isinstance(config, CNNConfig):
            raise InputError(f"config must be a CNNConfig, got {config!r}; create_model takes a preset's name")
        super().__init__(config, in_shape, num_classes)
        channels, height, width = self.in_shape
        norm = config.conv_norm == "channel"
        self.stem: nn.Module = nn.Identity()
        if config.stem_channels:
            dropout = config.conv_dropout
            self.stem = ConvStem(channels, config.stem_channels, config.stem_strides, norm=norm, dropout=dropout)
            channels, height, width = if_they_fit(lambda shape: largest_map(self.stem, shape)[0], self.in_shape)
        widths = [channels, *config.channels]
        kernels = [config.first_kernel or config.kernel, *[config.kernel] * (len(config.channels) - 1)]
        self.convs = nn.ModuleList(
            Convolution(fan_in, fan_out, kernel, padding=kernel // 2, bias=not norm)
            for (fan_in, fan_out), kernel in zip(itertools.pairwise(widths), kernels, strict=True)
        )
        self.norms = nn.ModuleList(ChannelNorm(width) if norm else nn.Identity() for width in config.channels)
        self.conv_dropout = nn.Dropout2d(config.conv_dropout) if config.conv_dropout else nn.Identity()
        # odd sizes are rounded up, so that an image of any size fits
        self.pool = nn.MaxPool2d(config.pool, ceil_mode=True) if config.pool > 1 else nn.Identity()
        for _ in self.convs:
            height, width = (-(-size // config.pool) for size in (height, width))
        widths = [widths[-1] * height * width, *config.hidden]
        self.dense = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths))
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(widths[-1], num_classes)
        self.layers, self.decoder = nn.ModuleList(), None

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the last layer sees of images with pixels 0..1."""
        hidden = self.stem(images)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden = self.conv_dropout(self.pool(norm(conv(hidden)).relu()))
        hidden = hidden.flatten(1)
        for dense in self.dense:
            hidden = dense(hidden).relu()
        return self.dropout(hidden)


class PooledCNN(CNN):
    """A backbone, pooling over the places of its maps, and a linear layer: a capsule network without its capsules.

    Args:
        config: The network.
        in_shape: Images (C, H, W).
        num_classes: J.

    Raises:
        InputError: No configuration of such a network, as many objects in an image as there are classes, images smaller
            than the backbone needs, or a backbone that gives no maps.
    """

    config: PooledConfig

    def __init__(self, config: PooledConfig, in_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        if not isinstance(config, PooledConfig):
            raise InputError(f"config must be a PooledConfig, got {config!r}; create_model takes a preset's name")
        super().__init__(config, in_shape, num_classes)
        self.backbone = config.backbone.build(self.in_shape)
        #: channels, height, width of the backbone's maps
        self.map_shape, _ = if_they_fit(partial(backbone_maps, self.backbone), self.in_shape)
        seen = math.prod(self.map_shape) if config.pooling == "none" else self.map_shape[0]
        self.classify = nn.Linear(seen, num_classes)
        config.backbone.start(self.backbone)
        self.layers, self.decoder = nn.ModuleList(), None

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the last layer sees of images with pixels 0..1."""
        maps = self.backbone(images)
        if self.config.pooling == "none":
            return maps.flatten(1)
        return maps.mean((2, 3)) if self.config.pooling == "average" else maps.amax((2, 3))
