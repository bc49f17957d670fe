"""The capsule network: (stem →) convolution → primary capsules → routing → class capsules → decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.config import CapsNetConfig
from torchcaps.models.images import (
    check_images,
    check_num_classes,
    check_objects,
    check_shape,
    map_sizes,
    standardise,
)
from torchcaps.models.objects import check_labels, label_rows, longest, match
from torchcaps.models.output import Losses, ModelOutput, check_output
from torchcaps.models.pretrained import Pretrained
from torchcaps.nn import (
    ChannelNorm,
    Convolution,
    ConvStem,
    Decoder,
    DenseCapsules,
    DynamicRouting,
    PrimaryCapsules,
    mask_capsules,
    separate_capsules,
)
from torchcaps.nn.convolutions import STEM_KERNEL
from torchcaps.nn.inference import images_in_part, in_parts, only_infers
from torchcaps.ops.checks import check_flags, check_floating, check_one_device
from torchcaps.ops.losses import margin_loss, normalised_cross_entropy, reconstruction_loss
from torchcaps.ops.squash import safe_norm


class CapsNet(Pretrained):
    """A capsule network for images of any size, channels and class count that its convolutions fit.

    Args:
        config: The network; :func:`torchcaps.create_model` builds it from a preset's name.
        in_shape: Images (C, H, W).
        num_classes: J.

    Raises:
        InputError: No configuration of a capsule network, images smaller than the convolutions need (the message gives
            the smallest size that fits), or as many objects in an image as there are classes.

    Source: Sabour, Frosst, Hinton 2017 (arXiv:1710.09829).
    """

    config_type: ClassVar = CapsNetConfig
    config: CapsNetConfig

    def __init__(self, config: CapsNetConfig, in_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        if not isinstance(config, CapsNetConfig):
            raise InputError(f"config must be a CapsNetConfig, got {config!r}; create_model takes a preset's name")
        super().__init__()
        self.config = config
        self.in_shape = check_shape(in_shape)
        self.num_classes = check_num_classes(num_classes)
        check_objects(config.objects, num_classes)
        heights, widths = _map_sizes(config, self.in_shape)
        height, width = heights[-1], widths[-1]
        #: types, height, width of the primary capsules
        self.primary_grid = (config.primary_types, height, width)
        channels = (*config.stem_channels, config.conv_channels)
        self._before_primary = heights[-2], widths[-2]
        self._largest_map = max(math.prod(each) for each in zip(channels, heights[:-1], widths[:-1], strict=True))

        norm = config.conv_norm == "channel"
        self.stem = (
            ConvStem(
                self.in_shape[0], config.stem_channels, config.stem_strides, norm=norm, dropout=config.conv_dropout
            )
            if config.stem_channels
            else nn.Identity()
        )
        before = (self.in_shape[0], *config.stem_channels)[-1]
        self.conv = Convolution(
            before,
            config.conv_channels,
            config.conv_kernel,
            config.conv_stride,
            bias=not norm,
            relu=config.conv_activation == "relu" and not norm,
        )
        self.conv_norm = ChannelNorm(config.conv_channels) if norm else nn.Identity()
        self.conv_dropout = nn.Dropout2d(config.conv_dropout) if config.conv_dropout else nn.Identity()
        self.primary_capsules = PrimaryCapsules(
            config.conv_channels,
            config.primary_types,
            config.primary_dim,
            kernel_size=config.primary_kernel,
            stride=config.primary_stride,
            padding=config.primary_padding,
            activation=config.primary_activation,
            grouping=config.grouping,
            separate_convs=config.primary_separate_convs,
            output=config.primary_output,
            eps=config.squash_eps,
        )
        self.class_capsules = DenseCapsules(
            config.primary_types * height * width,
            config.primary_dim,
            num_classes,
            config.capsule_dim,
            routing=DynamicRouting(
                config.num_iterations,
                softmax_over=config.softmax_over,
                stop_gradient=config.stop_gradient,
                leaky=config.leaky,
                eps=config.squash_eps,
            ),
            bias=config.capsule_bias,
            learn_prior=config.learn_prior,
            weight_init=config.weight_init,
            weight_std=config.weight_std,
        )
        self.decoder = (
            Decoder(num_classes, config.capsule_dim, self.in_shape, config.decoder_hidden, init=config.decoder_init)
            if config.decoder
            else None
        )
        self._init_convolutions()

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"] | None = None,
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Classify images, and reconstruct them from one capsule each; several objects in an image each from its own.

        Args:
            images: Pixels 0..1.
            targets: Choose the capsules to decode: labels (B,) or (B, 1), or multi-hot rows (B, J), or, where the
                network sees P objects in an image, their labels (B, P). Without them, the longest capsule is decoded,
                or the P longest, each by itself, the longest first.
            return_coupling: Also return the coupling of the last routing iteration.

        Raises:
            TypeError: Images that are not floating-point or not of the network's dtype, or labels that are no integers.
            ValueError: Images or targets that do not fit, or two objects of one class in an image.
        """
        check_flags("CapsNet", return_coupling=return_coupling)
        poses = self.primary_poses(images)
        coupling = None
        if return_coupling:
            capsules, coupling = self.class_capsules.forward_with_coupling(poses)
        else:
            capsules = self.class_capsules(poses)
        lengths = safe_norm(capsules, eps=self.config.length_eps)
        reconstruction = decoded = None
        if self.decoder is not None and self.config.objects == 1:
            reconstruction = self.decode(mask_capsules(capsules, targets))
        elif self.decoder is not None:
            decoded = self._objects(lengths, targets)
            alone = separate_capsules(capsules, decoded)  # (B, P, J, D)
            reconstruction = self.decode(alone.flatten(0, 1)).unflatten(0, decoded.shape)
        return ModelOutput(lengths, capsules, reconstruction, coupling, decoded=decoded)

    def primary_poses(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B I K"]:
        """The primary capsules u_i of images with pixels 0..1.

        On a CPU, where nothing is learned, some images at a time go through the convolutions, within
        :func:`torchcaps.set_working_memory`.
        """
        check_images("CapsNet", images, self.in_shape, self.conv.weight)
        if not only_infers(images):
            return self._poses(images)
        number = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        wide = number == torch.float32 and self.primary_capsules.is_wide(self._before_primary, len(images))
        return in_parts(self._poses, images, images_in_part(self._largest_map * number.itemsize, wide))

    def _poses(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B I K"]:
        if self.config.standardise:
            images = standardise(images)
        pixels = images if self.config.pixel_scale == 1 else images * self.config.pixel_scale
        features = self.conv_norm(self.conv(self.stem(pixels)))
        if self.config.conv_activation == "relu" and not self.conv.relu:
            features = features.relu_()
        return self.primary_capsules(self.conv_dropout(features))

    def decode(self, capsules: Float[Tensor, "B J D"]) -> Float[Tensor, "B C H W"]:
        """Images from class capsules of which the unwanted ones are zero (:func:`torchcaps.nn.mask_capsules`).

        Raises:
            InputError: The network has no decoder.
        """
        if self.decoder is None:
            raise InputError("this network has no decoder, so there is nothing to reconstruct with; set decoder=True")
        return self.decoder(capsules)

    def decoder_targets(
        self, targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"]
    ) -> Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"] | None:
        """The targets whose capsules the network's source decodes, to be given to :meth:`forward`; None: the longest.

        ``config.decoder_mask`` decides: the label's capsule always, in training mode only, or never.

        Args:
            targets: As for :meth:`loss`.
        """
        mask = self.config.decoder_mask
        by_label = mask == "label" or (mask == "label-in-training" and self.training)
        return targets if by_label else None

    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"],
    ) -> Losses:
        """The loss of this network's source, with its weights and scales.

        With P objects in an image, the reconstruction error is the sum, or the mean, over the pixels of all of them, as
        ``reconstruction_over_pixels`` says. Each reconstruction is compared with the object of its own class; where the
        capsules decoded are not those of the labels, what is left over is compared in the order in which it comes.

        Args:
            output: What the network returned for ``images``.
            images: Pixels 0..1; of P objects in an image each alone, (B, P, C, H, W). A network without decoder does
                not look at them.
            targets: Labels (B,) or (B, 1), or multi-hot rows (B, J); of P objects their labels (B, P).

        Raises:
            TypeError: Labels that are not integers, images that are not floating-point, or another ``output``.
            ValueError: Images or targets that do not fit, or two objects of one class in an image.
        """
        check_output("CapsNet.loss", output)
        classification = self._classification_loss(output.lengths, targets)
        if output.reconstruction is None:
            return Losses(classification, classification)
        config, reconstruction = self.config, output.reconstruction
        if output.decoded is not None:
            check_floating("CapsNet.loss", "images", images)
            check_one_device("CapsNet.loss", reconstruction=reconstruction, images=images)
            if images.shape != reconstruction.shape:
                raise ValueError(
                    f"CapsNet.loss: images must be the objects of each image, each alone, of shape "
                    f"{tuple(reconstruction.shape)}, got {tuple(images.shape)}"
                )
            beside = match(output.decoded, targets)
            images = images.take_along_dim(beside[..., None, None, None], 1)
        over_pixels: Literal["sum_per_image", "mean"] = (
            "sum_per_image" if config.reconstruction_over_pixels == "sum" else "mean"
        )
        error = reconstruction_loss(reconstruction, images, reduction=over_pixels)
        return Losses(classification + config.reconstruction_weight * error, classification, error)

    def _classification_loss(
        self,
        lengths: Float[Tensor, "B J"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"],
    ) -> Float[Tensor, ""]:
        config = self.config
        if config.objects > 1:
            targets = label_rows(lengths, targets, config.objects, "CapsNet.loss")
        if config.classification_loss == "cross-entropy":
            return normalised_cross_entropy(lengths, targets)
        loss = config.margin_scale * margin_loss(
            lengths,
            targets,
            m_plus=config.m_plus,
            m_minus=config.m_minus,
            lam=config.margin_lambda,
            power=config.margin_power,
        )
        return loss / self.num_classes if config.margin_over_classes == "mean" else loss

    def _objects(self, lengths: Float[Tensor, "B J"], labels: Int[Tensor, "B P"] | None) -> Int[Tensor, "B P"]:
        """The classes of the objects to decode: the labels, or else the longest capsules'."""
        if labels is None:
            return longest(lengths, self.config.objects)
        check_labels(labels, (len(lengths), self.config.objects), self.num_classes, "CapsNet")
        check_one_device("CapsNet", images=lengths, targets=labels)
        return labels

    def _init_convolutions(self) -> None:
        if self.config.conv_init == "torch":
            return
        before = [module for module in self.stem.modules() if isinstance(module, Convolution)]
        for convs, std in (([*before, self.conv], 0.05), (self.primary_capsules.convs, 0.1)):
            for conv in convs:
                assert isinstance(conv, Convolution)
                if self.config.conv_init == "glorot":
                    conv.draw(nn.init.xavier_uniform_)
                else:
                    conv.draw(partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std))
                if conv.bias is not None:
                    nn.init.constant_(conv.bias, 0.0 if self.config.conv_init == "glorot" else 0.1)


def _map_sizes(config: CapsNetConfig, in_shape: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """Heights and widths of the map of each convolution; the last are the primary capsules."""
    kernels = [STEM_KERNEL] * len(config.stem_channels) + [config.conv_kernel, config.primary_kernel]
    strides = [*config.stem_strides, config.conv_stride, config.primary_stride]
    stem = f"a stem of {len(config.stem_channels)}, " if config.stem_channels else ""
    first, primary = config.conv_kernel, config.primary_kernel
    words = f"{stem}a {first}×{first} convolution followed by a {primary}×{primary} one"
    return map_sizes(in_shape, kernels, strides, words, config.primary_padding)
