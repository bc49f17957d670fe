"""The paper's convolutional baseline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.config import CNNConfig
from torchcaps.models.images import check_images, check_num_classes, check_shape
from torchcaps.models.output import Losses, ModelOutput
from torchcaps.models.pretrained import Pretrained
from torchcaps.ops.losses import multi_hot


class BaselineCNN(Pretrained, library_name="torchcaps", tags=["image-classification"]):
    """Convolutions of stride 1 that keep the size, dense layers, dropout, softmax: 35.4 M parameters on MNIST.

    It is called like :class:`~torchcaps.models.CapsNet`; its ``lengths`` are probabilities.

    Args:
        config: The network.
        in_shape: Images (C, H, W).
        num_classes: J.

    Source: Sabour, Frosst, Hinton 2017, section 5 (arXiv:1710.09829). The paper does not give the padding; only
    convolutions that keep the size have its 35.4 M parameters.
    """

    config_type: ClassVar = CNNConfig
    config: CNNConfig

    def __init__(self, config: CNNConfig, in_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        self.config = config
        self.in_shape = check_shape(in_shape)
        self.num_classes = check_num_classes(num_classes)
        channels, height, width = self.in_shape
        widths = [channels, *config.channels]
        self.convs = nn.ModuleList(
            nn.Conv2d(fan_in, fan_out, config.kernel, padding=config.kernel // 2)
            for fan_in, fan_out in itertools.pairwise(widths)
        )
        widths = [widths[-1] * height * width, *config.hidden]
        self.dense = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths))
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(widths[-1], num_classes)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | None = None,  # noqa: ARG002  the call all networks share
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Classify images.

        Args:
            images: Pixels 0..1.
            targets: Not used: there is no capsule to choose.
            return_coupling: A CNN has none.

        Raises:
            TypeError: Images that are not floating-point.
            ValueError: Images whose shape does not fit.
            InputError: Coupling was asked for.
        """
        if return_coupling:
            raise InputError("a convolutional network has no coupling; use a preset with capsules")
        check_images(images, self.in_shape)
        hidden = images
        for conv in self.convs:
            hidden = conv(hidden).relu()
        hidden = hidden.flatten(1)
        for dense in self.dense:
            hidden = dense(hidden).relu()
        logits = self.classify(self.dropout(hidden)).float()
        return ModelOutput(lengths=logits.softmax(-1), logits=logits)

    def decoder_targets(
        self,
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"],
    ) -> None:
        """None: there is no decoder."""

    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"],  # noqa: ARG002  the call all networks share
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"],
    ) -> Losses:
        """Softmax cross-entropy; the classes of a multi-hot row share its probability.

        Args:
            output: What the network returned for ``images``.
            images: Not used.
            targets: Labels (B,) or multi-hot rows (B, J).
        """
        assert output.logits is not None
        present = multi_hot(output.lengths, targets, "BaselineCNN.loss")
        wanted = present / present.sum(-1, keepdim=True).clamp_min(1)
        loss = -(wanted * F.log_softmax(output.logits, -1)).sum(-1).mean()
        return Losses(loss, loss)
