"""The capsule network: backbone → primary capsules → capsule layers → decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

import torchcaps.models.loss  # noqa: F401  registers the losses
from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.chunks import map_chunks
from torchcaps.models.images import check_images, standardise
from torchcaps.models.network import Network
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.models.shapes import build_layers, infer_map_shape, infer_shapes
from torchcaps.nn import (
    CapsuleLayer,
    Capsules,
    DenseCapsules,
    PrimaryCapsules,
    mask_capsules,
    separate_capsules,
)
from torchcaps.nn.slots import SlotLayer
from torchcaps.ops.labels import label_rows, match_labels, top_classes
from torchcaps.ops.losses import reconstruction_loss
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import Epsilon, Factor, PositiveFactor, Width
from torchcaps.tasks import TaskName
from torchcaps.tracing import is_graph_capture

DEFAULT_LAYERS: tuple[Mapping[str, Any], ...] = (
    {"name": "dense", "transform": {"name": "dense", "weight_init": "normal"}},
)


@register("network", "capsules")
class CapsNet(Network):
    """Capsule network for images of any size, number of channels and number of classes.

    :func:`torchcaps.create_model` builds it from a preset's name.

    Args:
        pixel_scale: Factor on the pixels (0..1) before the network: 255.0 for networks fed with unscaled pixels.
        standardise: Scale each image to mean 0 and deviation 1 before the network; the decoder still draws pixels of
            0..1.
        length_eps: Number added under the root of the class capsules' lengths, which are the scores; see squash_eps.
        backbone: Network that turns images into feature maps.
        primary_capsules: Layer that turns feature maps into the first capsules.
        layers: Capsule layers, one after another; the last one has a capsule for each class.
        decoder: Network that reconstructs the image from the capsule of its class.
        classification_loss: Loss of the class scores: margin loss; cross-entropy of the scores divided by their sum;
            cross-entropy of the softmax of scaled scores; or spread loss.
        reconstruction_weight: Weight of the squared reconstruction error.
        reconstruction_over_pixels: Squared reconstruction error summed over an image's pixels (the paper) or averaged.

    Raises:
        TooSmall: The images are smaller than the convolutions need.
        InputError: The parts do not fit each other, or an image has as many objects as there are classes.

    Source: Sabour, Frosst, Hinton 2017 (arXiv:1710.09829).
    """

    has_capsules: ClassVar[bool] = True

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "classes",
        pixel_scale: PositiveFactor = 1.0,
        standardise: bool = False,
        length_eps: Epsilon = 1e-7,
        backbone: Annotated[Spec, Choice("backbone")] = "conv",
        primary_capsules: Annotated[Spec, Choice("primary")] = "conv",
        layers: Annotated[Sequence[Spec], Choice("layer", many=True)] = DEFAULT_LAYERS,
        decoder: Annotated[Spec, Choice("decoder", optional=True)] = "dense",
        classification_loss: Annotated[Spec, Choice("loss")] = "margin",
        reconstruction_weight: Factor = 0.0005,
        reconstruction_over_pixels: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        if standardise and pixel_scale != 1:
            raise InputError(f"pixel_scale must be 1 with standardise=True, which cancels it, got {pixel_scale}")
        self.pixel_scale, self.standardise, self.length_eps = pixel_scale, standardise, length_eps
        self.reconstruction_weight = reconstruction_weight
        self.reconstruction_over_pixels = reconstruction_over_pixels

        self.backbone = build("backbone", backbone, in_channels=self.in_shape[0], in_shape=self.in_shape)
        maps, self._largest_map = infer_map_shape(self.backbone, self.in_shape)
        self.map_shape = tuple(maps.shape[1:])
        """Channels, height and width of the backbone's maps."""
        self.primary_capsules: PrimaryCapsules = build("primary", primary_capsules, in_channels=maps.shape[1])
        capsules: Capsules = infer_shapes(self.primary_capsules, maps)[0]
        self.layers, self.flow = build_layers(layers, capsules, num_classes)
        last = self.layers[-1] if len(self.layers) else None
        if not isinstance(last, DenseCapsules) or last.out_capsules != num_classes:
            raise InputError(
                "layers must end with a dense layer without num_capsules, so that each class has a capsule"
            )
        self.decoder = None
        if decoder is not None and decoder is not False:
            sizes = {"num_capsules": num_classes, "capsule_dim": last.out_dim, "out_shape": self.in_shape}
            self.decoder = build("decoder", decoder, **sizes)
        self.readout = Readout(num_classes, last.out_dim) if self._task.score_name == "value" else None
        self.classification_loss = build("loss", classification_loss, num_classes=num_classes)
        for part, spec in ((self.backbone, backbone), (self.primary_capsules, primary_capsules)):
            if part is not spec and hasattr(part, "init_weights"):
                part.init_weights()

    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images and reconstruct each from one capsule; with several objects in an image, one for each object.

        Args:
            images: Pixels 0..1.
            targets: Labels that choose the capsules to decode: (B,) or (B, 1); multi-hot rows (B, J); or (B, P) for P
                objects in an image. None: decode the longest capsule, or the P longest ones separately, the longest
                first.
            return_coupling: Also return the coupling of the last routing iteration.

        Raises:
            InputError: Images or targets do not fit the network, or an image has two objects of one class.
        """
        return self.classify(self.capsules(images)[-1], targets, return_coupling)

    def classify(
        self, capsules: Capsules, targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Return the output for the capsules that go into the last layer.

        Used to follow routing and to classify with one pass through the backbone.

        Args:
            capsules: The last of :meth:`capsules`.
            targets: As for :meth:`forward`.
            return_coupling: As for :meth:`forward`.

        Raises:
            InputError: Targets that do not fit, or two objects of one class in an image.
        """
        coupling = None
        if return_coupling:
            poses, activations, coupling = self.class_capsules.route(capsules, return_coupling=True)
        else:
            poses, activations, *_ = self.class_capsules(capsules)  # a call of the module, so that its hooks run
        scores = Capsules(poses, activations).scores(self.length_eps) if self.readout is None else self.readout(poses)
        if self._task.score_name is not None:
            scores = self._task.activate(scores, self)
        reconstruction = decoded = None
        if self.decoder is not None and self.objects == 1:
            reconstruction = self.decode(self._decoded(poses, scores, targets))
        elif self.decoder is not None:
            if targets is None:
                decoded = top_classes(scores, self.objects)
            else:
                label_rows(scores, targets, self.objects)  # raises an error if targets do not fit
                decoded = targets
            alone = separate_capsules(poses, decoded)  # (B, P, J, D)
            reconstruction = self.decode(alone.flatten(0, 1)).unflatten(0, decoded.shape)
        return ModelOutput(scores, poses, reconstruction, coupling, decoded=decoded, activations=activations)

    def _decoded(self, poses: Float[Tensor, "B J D"], scores: Float[Tensor, "B J"], targets: Targets | None) -> Tensor:
        """Return the poses to decode, with zeros for other capsules: of the class, of the labels, or all."""
        chosen = self._task.decoded_capsules(scores, targets)
        return poses if chosen is None else mask_capsules(poses, chosen)

    @property
    def class_capsules(self) -> DenseCapsules:
        """Last capsule layer, with a capsule for each class."""
        return cast(DenseCapsules, self.layers[-1])

    @property
    def capsule_dim(self) -> int:
        """Components of a class capsule (D)."""
        return self.class_capsules.out_dim

    def layer(self, number: int) -> CapsuleLayer:
        """Return a capsule layer by its number, from 1.

        Raises:
            InputError: The layer has no votes, as a layer of slots.
        """
        layer = self.layers[number - 1]
        if isinstance(layer, SlotLayer):
            raise InputError(f"layer {number} is a {type(layer).__name__}, which has no votes and no routing")
        return cast(CapsuleLayer, layer)

    def capsules(self, images: Float[Tensor, "B C H W"]) -> list[Capsules]:
        """Return the input of each capsule layer: the primary capsules, and the output of each layer but the last."""
        flow = [self.primary(images)]
        for layer in self.layers[:-1]:
            flow.append(layer(flow[-1]))
        return flow

    def primary(self, images: Float[Tensor, "B C H W"]) -> Capsules:
        """Return the primary capsules of images.

        During inference on a CPU, the convolutions process a few images at a time, to keep within the limit of
        :func:`torchcaps.set_working_memory`.

        Args:
            images: Pixels 0..1.

        Raises:
            InputError: The images do not fit the network.
        """
        check_images(images, self.in_shape, next(self.parameters()))
        if images.device.type != "cpu" or torch.is_grad_enabled() or is_graph_capture():
            return self._primary(images)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        is_wide = getattr(self.primary_capsules, "is_wide", None)  # optional in parts of plugins
        wide = dtype == torch.float32 and is_wide is not None and is_wide(self.map_shape[1:], len(images))
        return map_chunks(self._primary, images, self._largest_map * dtype.itemsize, wide)

    def _primary(self, images: Float[Tensor, "B C H W"]) -> Capsules:
        if self.standardise:
            images = standardise(images)
        pixels = images if self.pixel_scale == 1 else images * self.pixel_scale
        return self.primary_capsules(self.backbone(pixels))

    def decode(self, capsules: Float[Tensor, "B J D"]) -> Float[Tensor, "B C H W"]:
        """Draw images from masked class capsules; see :func:`torchcaps.nn.mask_capsules`.

        Raises:
            InputError: The network has no decoder.
        """
        if self.decoder is None:
            raise InputError("this network has no decoder and cannot reconstruct images; set decoder=True")
        return self.decoder(capsules)

    def decoder_targets(self, targets: Targets) -> Targets | None:
        """Return the targets to give to :meth:`forward` for decoding, as the network's source does; None: the longest.

        The option ``decoder_mask`` decides: decode the label's capsule always, in training mode only, or never.

        Args:
            targets: As for :meth:`loss`.
        """
        mask = getattr(self.decoder, "decoder_mask", None)  # optional in decoders of plugins
        by_label = mask == "label" or (mask == "label-in-training" and self.training)
        return targets if by_label else None

    @checked
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"],
        targets: Targets,
    ) -> Losses:
        """Return the loss of the network's source, with its weights and scales.

        With P objects in an image, the reconstruction error is the sum or the mean over the pixels of all of them
        (``reconstruction_over_pixels``). Each reconstruction is compared with the object of its class. If the decoded
        classes and the labels differ, the remaining reconstructions and objects are compared in their order.

        Args:
            output: Output of the network for ``images``.
            images: Pixels 0..1; with P objects in an image, each object alone, (B, P, C, H, W). Not used without a
                decoder.
            targets: Labels (B,) or (B, 1), or multi-hot rows (B, J); labels (B, P) of P objects; or numbers (B, J) of
                a regression, whose loss is the mean squared error.

        Raises:
            InputError: Images or targets do not fit the network, or an image has two objects of one class.
        """
        classification = self._task.loss(output, targets, self)
        reconstruction = output.reconstruction
        if reconstruction is None:
            return Losses(classification, classification)
        if output.decoded is not None:
            if images.shape != reconstruction.shape:
                raise InputError(
                    "CapsNet.loss: images must show each object of an image alone and have shape "
                    f"{tuple(reconstruction.shape)}, got {tuple(images.shape)}"
                )
            images = images.take_along_dim(match_labels(output.decoded, targets)[..., None, None, None], 1)
        mean = self.reconstruction_over_pixels == "mean"
        error = reconstruction_loss(reconstruction, images, reduction="mean" if mean else "sum_per_image")
        return Losses(classification + self.reconstruction_weight * error, classification, error)


class Readout(nn.Module):
    """Linear readout of a number from the pose of each capsule: ⟨w_j, v_j⟩ + b_j."""

    def __init__(self, num_capsules: int, capsule_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_capsules, capsule_dim))
        self.bias = nn.Parameter(torch.empty(num_capsules))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights, and set the biases to zero."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, poses: Float[Tensor, "B J D"]) -> Float[Tensor, "B J"]:
        """Return the numbers."""
        return (poses * self.weight).sum(-1) + self.bias
