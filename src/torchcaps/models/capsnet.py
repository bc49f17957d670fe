"""The capsule network: backbone → primary capsules → capsule layers → decoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.config import CapsNetConfig, CapsuleShape
from torchcaps.models.images import backbone_maps, check_images, if_they_fit, standardise
from torchcaps.models.network import Network
from torchcaps.models.objects import check_labels, label_rows, longest, match
from torchcaps.models.output import Losses, ModelOutput, Targets, check_output
from torchcaps.nn import Capsules, DenseCapsules, mask_capsules, separate_capsules
from torchcaps.nn.inference import images_in_part, in_parts, only_infers
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.ops.checks import check_flags, check_floating, check_one_device
from torchcaps.ops.losses import (
    margin_loss,
    normalised_cross_entropy,
    reconstruction_loss,
    score_cross_entropy,
    spread_loss,
)


class CapsNet(Network):
    """A capsule network for images of any size, channels and class count that its parts fit.

    Args:
        config: The network; :func:`torchcaps.create_model` builds it from a preset's name.
        in_shape: Images (C, H, W).
        num_classes: J.
        backbone: From images (B, C, H, W) to maps (B, c, h, w), in place of the one that the configuration describes.
            Such a network can be trained and looked at; to be saved, its backbone must be registered.

    Raises:
        InputError: No configuration of a capsule network, images smaller than the convolutions need (the message gives
            the smallest size that fits), or as many objects in an image as there are classes.

    Source: Sabour, Frosst, Hinton 2017 (arXiv:1710.09829).
    """

    config: CapsNetConfig
    steps: Tensor

    def __init__(
        self,
        config: CapsNetConfig,
        in_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        *,
        backbone: nn.Module | None = None,
    ) -> None:
        if not isinstance(config, CapsNetConfig):
            raise InputError(f"config must be a CapsNetConfig, got {config!r}; create_model takes a preset's name")
        super().__init__(config, in_shape, num_classes)
        self.backbone = config.backbone.build(self.in_shape) if backbone is None else backbone
        #: channels, height, width of the backbone's maps; what goes into each capsule layer and comes out of the last
        self.map_shape, self._largest_map, self.shapes = if_they_fit(
            partial(_shapes, config, self.backbone, num_classes), self.in_shape
        )
        #: types, height, width of the primary capsules
        self.primary_grid = config.primary.grid(self.map_shape)
        self.primary_capsules = config.primary.build(self.map_shape[0])
        self.layers = nn.ModuleList(
            layer.build(shape, num_classes) for layer, shape in zip(config.layers, self.shapes, strict=False)
        )
        self.decoder = None
        if config.decoder is not None:
            self.decoder = config.decoder.build(num_classes, self.shapes[-1].dim, self.in_shape)
        loss = config.loss
        self.score_scale: torch.Tensor | float = loss.score_scale
        if loss.classification_loss == "score-cross-entropy" and loss.learn_score_scale:
            self.score_scale = nn.Parameter(torch.tensor(float(loss.score_scale)))
        if loss.classification_loss == "spread" and loss.spread_growth is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # that the margin has grown
        config.backbone.start(self.backbone)
        config.primary.start(self.primary_capsules)

    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
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
        routed = self.class_capsules.route(self.capsules(images)[-1], return_coupling=return_coupling)
        scores = Capsules(routed.poses, routed.activations).scores(self.config.length_eps)
        reconstruction = decoded = None
        if self.decoder is not None and self.config.objects == 1:
            chosen = scores.argmax(-1) if targets is None else targets
            reconstruction = self.decode(mask_capsules(routed.poses, chosen))
        elif self.decoder is not None:
            if targets is None:
                decoded = longest(scores, self.config.objects)
            else:
                check_labels(targets, (len(scores), self.config.objects), self.num_classes, "CapsNet")
                check_one_device("CapsNet", images=scores, targets=targets)
                decoded = targets
            alone = separate_capsules(routed.poses, decoded)  # (B, P, J, D)
            reconstruction = self.decode(alone.flatten(0, 1)).unflatten(0, decoded.shape)
        return ModelOutput(
            scores, routed.poses, reconstruction, routed.coupling, decoded=decoded, activations=routed.activations
        )

    @property
    def class_capsules(self) -> DenseCapsules:
        """The last layer, which has a capsule for each class."""
        layer = self.layers[-1]
        assert isinstance(layer, DenseCapsules)
        return layer

    @property
    def capsule_dim(self) -> int:
        """D, the components of a class's capsule."""
        return self.class_capsules.out_dim

    def layer(self, number: int) -> CapsuleLayer:
        """A capsule layer, counted from 1."""
        layer = self.layers[number - 1]
        assert isinstance(layer, CapsuleLayer)
        return layer

    def capsules(self, images: Float[Tensor, "B C H W"]) -> list[Capsules]:
        """What goes into each layer: the primary capsules, and the output of each layer but the last.

        Argument and errors are those of :meth:`primary`.
        """
        flow = [self.primary(images)]
        for layer in self.layers[:-1]:
            flow.append(layer(flow[-1]))
        return flow

    def primary(self, images: Float[Tensor, "B C H W"]) -> Capsules:
        """The primary capsules of images.

        On a CPU, where nothing is learned, some images at a time go through the convolutions, within
        :func:`torchcaps.set_working_memory`.

        Args:
            images: Pixels 0..1.

        Raises:
            TypeError: Images that are not floating-point or not of the network's dtype.
            ValueError: Images that do not fit.
        """
        weight = next(self.parameters())
        check_images("CapsNet", images, self.in_shape, weight)
        if not only_infers(images):
            return self._primary(images)
        number = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        wide = number == torch.float32 and self.primary_capsules.is_wide(self.map_shape[1:], len(images))
        return in_parts(self._primary, images, images_in_part(self._largest_map * number.itemsize, wide))

    def _primary(self, images: Float[Tensor, "B C H W"]) -> Capsules:
        if self.config.standardise:
            images = standardise(images)
        pixels = images if self.config.pixel_scale == 1 else images * self.config.pixel_scale
        return self.primary_capsules(self.backbone(pixels))

    def decode(self, capsules: Float[Tensor, "B J D"]) -> Float[Tensor, "B C H W"]:
        """Images from class capsules of which the unwanted ones are zero (:func:`torchcaps.nn.mask_capsules`).

        Raises:
            InputError: The network has no decoder.
        """
        if self.decoder is None:
            raise InputError("this network has no decoder, so there is nothing to reconstruct with; set decoder=True")
        return self.decoder(capsules)

    def decoder_targets(self, targets: Targets) -> Targets | None:
        """The targets whose capsules the network's source decodes, to be given to :meth:`forward`; None: the longest.

        ``config.decoder.decoder_mask`` decides: the label's capsule always, in training mode only, or never.

        Args:
            targets: As for :meth:`loss`.
        """
        mask = None if self.config.decoder is None else self.config.decoder.decoder_mask
        by_label = mask == "label" or (mask == "label-in-training" and self.training)
        return targets if by_label else None

    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
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
        classification = self._classification_loss(output.scores, targets)
        if output.reconstruction is None:
            return Losses(classification, classification)
        config, reconstruction = self.config.loss, output.reconstruction
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

    def _classification_loss(self, lengths: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, ""]:
        config = self.config.loss
        if self.config.objects > 1:
            targets = label_rows(lengths, targets, self.config.objects, "CapsNet.loss")
        if config.classification_loss == "cross-entropy":
            return normalised_cross_entropy(lengths, targets)
        if config.classification_loss == "score-cross-entropy":
            return score_cross_entropy(lengths, targets, scale=self.score_scale)
        if config.classification_loss == "spread":
            return spread_loss(lengths, targets, margin=self._spread_margin())
        loss = config.margin_scale * margin_loss(
            lengths,
            targets,
            m_plus=config.m_plus,
            m_minus=config.m_minus,
            lam=config.margin_lambda,
            power=config.margin_power,
        )
        return loss / self.num_classes if config.margin_over_classes == "mean" else loss

    def _spread_margin(self) -> float | Float[Tensor, ""]:
        """The margin of the spread loss, which grows with each step of training."""
        config = self.config.loss
        if config.spread_growth is None:
            return config.spread_margin
        grown = (self.steps.float() / config.spread_growth).clamp_max(14) - 4
        if self.training:
            self.steps += 1
        return 0.2 + (config.spread_margin - 0.2) * grown.sigmoid()


def _shapes(
    config: CapsNetConfig, backbone: nn.Module, num_classes: int, in_shape: tuple[int, int, int]
) -> tuple[tuple[int, int, int], int, list[CapsuleShape]]:
    """What flows through a network for one image (C, H, W).

    Returns:
        Channels, height and width of the backbone's maps; how many numbers the largest tensor up to there has; and the
        capsules that go into each layer, and that come out of the last.

    Raises:
        TooSmall: A map is smaller than what looks at it.
        InputError: The backbone gives no maps.
    """
    maps, largest = backbone_maps(backbone, in_shape)
    capsules = [config.primary.out_shape(maps)]
    for layer in config.layers:
        capsules.append(layer.out_shape(capsules[-1], num_classes))
    return maps, largest, capsules
