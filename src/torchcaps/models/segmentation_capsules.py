"""Capsule networks that answer each pixel: capsules down and up again, with skips joined along the types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.output import Losses, ModelOutput
from torchcaps.models.segmentation import Masks, PixelLoss, PixelNetwork, cut_to, pad_to_multiple
from torchcaps.models.shapes import infer_shapes
from torchcaps.nn import Capsules, ConvTypeCapsules, DeconvCapsules, join_types
from torchcaps.nn.convolutions import MAP_MODULES
from torchcaps.nn.layers import MapLayer
from torchcaps.nn.segmentation import InstanceNorm
from torchcaps.ops.precision import in_full_precision
from torchcaps.ops.squash import safe_norm
from torchcaps.parts import Choice, Spec, build, complete, register
from torchcaps.ranges import IGNORED, Epsilon, Factor, Width
from torchcaps.tasks import TaskName
from torchcaps.words import counted

SMALL_LAYERS: tuple[Mapping[str, Any], ...] = (
    {"name": "conv-types", "layer_types": 4, "layer_stride": 2, "layer_padding": "same"},
    {"name": "deconv", "layer_types": 2},
    {"name": "conv-types", "layer_kernel": 1},
)
INTERPOLATIONS = {1: "linear", 2: "bilinear", 3: "trilinear"}
NO_FOREGROUND = 1e-8
"""Added to the number of pixels of the foreground, so that an image without foreground has an error of zero."""


@register("network", "pixel-capsules")
class PixelCapsules(PixelNetwork):
    """Capsule network for the pixels of lines, planes and volumes of any size.

    The backbone's maps are capsules of one type. Each layer with a stride sees a smaller map. Each ``deconv`` layer
    brings back the size; its types are joined with the types of the map before the layer with this stride.
    The last layer has a type for each class. If it lies on a smaller map, ``up_channels`` are convolutions that go back
    to the size of the image from the capsules' components, and they return the logits.

    Args:
        length_eps: Number added under the root of the class capsules' lengths, which are the scores; see squash_eps.
        backbone: Network that turns images into feature maps.
        layers: Capsule layers on maps, one after another; the last one gets a type for each class.
        background_type: Give the background a capsule type even if there are only two classes. Otherwise the only
            type is class 1, and a pixel whose capsule is shorter than 0.5 is background.
        up_channels: Channels of the convolutions behind the capsule layers, for each stride but the last a transposed
            one and one of size 3, then a transposed one; none: the capsule layers return to the size of the image.
        decoder: Network that draws the foreground, class 1 and above: from the capsule of a pixel's class, or with
            up_channels from the maps before the logits.
        classification_loss: Loss of the scores of the pixels.
        coarse_loss: Loss of the lengths of the class capsules on their smaller map, for up_channels; its targets are
            the shares of the classes in the pixels under a capsule.
        coarse_weight: Weight of the coarse loss.
        reconstruction_weight: Weight of the squared reconstruction error.
        reconstruction_of: Mean squared reconstruction error over the image, where pixels of the background are to be
            black; or over the pixels of the foreground of each image, summed over channels.

    Raises:
        InputError: The layers do not return to the size of the image, a skip has other components, or a layer is none
            of the layers "conv-types" and "deconv".

    Source: LaLonde, Bagci 2018, "Capsules for Object Segmentation" (arXiv:1804.04241); for ``up_channels`` Nguyen, Hua,
    Le 2021, "3D-UCaps" (arXiv:2203.08965).
    """

    has_capsules: ClassVar[bool] = True

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "pixels",
        length_eps: Epsilon = 1e-7,
        backbone: Annotated[Spec, Choice("backbone")] = "pixels",
        layers: Annotated[Sequence[Spec], Choice("layer", many=True)] = SMALL_LAYERS,
        background_type: bool = False,
        up_channels: tuple[Width, ...] = (),
        decoder: Annotated[Spec, Choice("decoder", optional=True)] = None,
        classification_loss: PixelLoss = "dice-cross-entropy",
        coarse_loss: Annotated[Spec, Choice("loss", optional=True)] = None,
        coarse_weight: Factor = 1.0,
        reconstruction_weight: Factor = 0.0005,
        reconstruction_of: Literal["image", "foreground"] = "image",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task, classification_loss)
        self.length_eps, self.background_type, self.up_channels = length_eps, background_type, tuple(up_channels)
        self.coarse_weight, self.reconstruction_weight = coarse_weight, reconstruction_weight
        self.reconstruction_of = reconstruction_of
        self.types = 1 if num_classes == 2 and not background_type else num_classes
        """Types of class capsules."""
        self.backbone = build("backbone", backbone, in_channels=self.in_shape[0], in_shape=self.in_shape)
        skips = self._build_layers(layers)
        dim = self.flow[-1].poses.shape[2]
        self.decoded_channels = self._build_up(skips) if up_channels else (num_classes - 1) * dim
        """Numbers at each pixel that the decoder draws from."""
        if skips and not up_channels:
            raise InputError(
                f"layers must return to the size of the image, but {len(skips)} of their strides have no deconv layer; "
                "add one for each, or set up_channels"
            )
        self.coarse_loss = None
        if coarse_loss is not None and coarse_loss is not False:
            if not up_channels:
                raise InputError("coarse_loss needs up_channels; without them the capsules lie on no smaller map")
            self.coarse_loss = build("loss", coarse_loss, num_classes=num_classes)
        if decoder is not None and decoder is not False:
            self.decoder = build("decoder", decoder, in_channels=self.decoded_channels, out_shape=self.in_shape)
        if self.backbone is not backbone and hasattr(self.backbone, "init_weights"):
            self.backbone.init_weights()

    def _build_layers(self, layers: Sequence[Spec]) -> list[Capsules]:
        """Build the capsule layers, and return the maps that no deconv layer has joined, from the finest on."""
        specs = [complete("layer", spec) for spec in layers]
        self.stride = math.prod(map(_stride_down, specs))
        sizes = [-(-size // self.stride) * self.stride for size in self.in_shape[1:]]
        maps, _ = infer_shapes(self.backbone, torch.empty(2, self.in_shape[0], *sizes, device="meta"))
        if not isinstance(maps, Tensor) or [*maps.shape[2:]] != sizes:
            raise InputError(
                f"{type(self.backbone).__name__} must keep the size of the image, as the backbone pixels does; for "
                f"{sizes} it returns {[*getattr(maps, 'shape', ())][2:]}"
            )
        capsules, skips = as_one_type(maps), list[Capsules]()
        # of each layer: is its input a skip, and is a skip joined to its output
        self._ways: list[tuple[bool, bool]] = []
        self.flow = [capsules]
        """Input of each capsule layer, then the output of the last layer, on the meta device: shapes only."""
        for number, spec in enumerate(specs, 1):
            if isinstance(spec, dict) and number == len(specs):
                spec = spec | {"layer_types": self.types}
            assert capsules.grid is not None
            layer = build("layer", spec, in_types=capsules.grid[0], in_dim=capsules.poses.shape[2], dims=self.dims)
            is_up = isinstance(layer, DeconvCapsules)
            if not is_up and not isinstance(layer, ConvTypeCapsules):
                raise InputError(f"layers must be deconv or conv-types, got {type(layer).__name__}")
            if is_up and (not skips or number == len(specs)):
                raise InputError(
                    "layers must have a layer with a stride for each deconv layer, and end with a conv-types layer"
                )
            self.layers.append(layer)
            self._ways.append((is_down := _stride_down(layer) > 1, is_up))
            if is_down:
                skips.append(capsules)
            before = capsules.grid[1:]
            capsules, _ = infer_shapes(layer, capsules)
            assert capsules.grid is not None
            _check_size(number, layer, before, capsules.grid[1:])
            capsules = join_types(capsules, skips.pop()) if is_up else capsules
            self.flow.append(capsules)
        if not specs:
            raise InputError("layers must be at least one layer, got none")
        return skips

    def _build_up(self, skips: Sequence[Capsules]) -> int:
        """Build the convolutions behind the capsules, and return the channels of the maps before the logits."""
        if len(self.up_channels) != (up_count := 2 * len(skips) - 1):
            raise InputError(
                f"up_channels must be {counted(up_count, 'number')} for {counted(len(skips), 'stride')}, got "
                f"{self.up_channels}"
            )
        strides = [stride for stride in map(_stride_down, self.layers) if stride > 1][: len(skips)]
        modules, widths, before = MAP_MODULES[self.dims], iter(self.up_channels), _channels(self.flow[-1])
        self.up, self.join = nn.ModuleList(), nn.ModuleList()
        for stride, skip in zip(reversed(strides), reversed(skips), strict=True):
            if len(self.up):
                width = next(widths)
                conv = modules.convolution(before, width, 3, padding=1, bias=False)
                self.join.append(nn.Sequential(conv, InstanceNorm(width), nn.PReLU()))
                before = width
            width = next(widths)
            self.up.append(modules.transposed(before, width, stride, stride))
            before = width + _channels(skip)
        self.classify = modules.convolution(before, self.num_classes, 1)
        return before

    @property
    def capsule_dim(self) -> int:
        """Components of a class capsule (D)."""
        return self.flow[-1].poses.shape[2]

    def forward(
        self, images: Float[Tensor, "B C *S"], targets: Masks | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Return the scores of each pixel, and redraw the foreground; see :class:`PixelNetwork` for sizes.

        Args:
            images: Pixels 0..1.
            targets: Class of each pixel (B, *S), which chooses the capsule to decode. None: the class with the highest
                score.
            return_coupling: Not allowed.

        Raises:
            InputError: Images or targets do not fit the network, or ``return_coupling`` is set.
        """
        sizes = images.shape[2:]
        if targets is not None and targets.shape != (len(images), *sizes):
            raise InputError(
                f"PixelCapsules: targets must be the class of each pixel, {(len(images), *sizes)}, got "
                f"{tuple(targets.shape)}"
            )
        capsules, skips = self._capsules(self.padded(images, return_coupling))
        poses, activations = poses_on_map(capsules), capsules.activations
        assert capsules.grid is not None
        scores = capsules.scores(self.length_eps).unflatten(1, capsules.grid)
        if activations is not None:
            activations = scores
        logits = None
        if self.up_channels:
            features = cut_to(self._features(poses, skips), sizes)
            logits = in_full_precision(self.classify(features))
            scores = self._task.activate(logits, self)
        else:
            scores, poses = cut_to(scores, sizes), cut_to(poses, sizes)
            activations = None if activations is None else scores
            features = poses if self.decoder is None else self._decoded(poses, scores, targets)
        reconstruction = None
        if self.decoder is not None:
            reconstruction = self.decoder(features.to(next(self.decoder.parameters(), features).dtype))
        return ModelOutput(scores, poses, reconstruction, logits=logits, activations=activations)

    def _capsules(self, images: Float[Tensor, "B C *S"]) -> tuple[Capsules, list[Capsules]]:
        """Return the class capsules, and the maps that no deconv layer has joined, from the finest on."""
        capsules = as_one_type(self.backbone(images))
        skips: list[Capsules] = []
        for layer, (is_down, is_up) in zip(self.layers, self._ways, strict=True):
            if is_down:
                skips.append(capsules)
            capsules = layer(capsules)
            if is_up:
                capsules = join_types(capsules, skips.pop())
        return capsules, skips

    def _features(self, poses: Float[Tensor, "B T D *S"], skips: Sequence[Capsules]) -> Float[Tensor, "B c *S"]:
        """Return the maps before the logits."""
        maps = poses.flatten(1, 2).to(self.classify.weight.dtype)
        for number, (up, skip) in enumerate(zip(self.up, reversed(skips), strict=True)):
            maps = self.join[number - 1](maps) if number else maps
            maps = torch.cat([up(maps), poses_on_map(skip).flatten(1, 2).to(maps.dtype)], 1)
        return maps

    def _decoded(
        self, poses: Float[Tensor, "B T D *S"], scores: Float[Tensor, "B T *S"], targets: Masks | None
    ) -> Float[Tensor, "B c *S"]:
        """Return the capsules of the foreground, all zero but the one of the class of each pixel."""
        classes = self._task.decoded_capsules(scores, targets)
        assert classes is not None
        numbers = torch.arange(1, self.num_classes, device=classes.device).view(-1, *[1] * self.dims)
        keep = (classes.unsqueeze(1) == numbers).unsqueeze(2)
        return (poses[:, -len(numbers) :] * keep).flatten(1, 2)

    def decoder_targets(self, targets: Masks) -> Masks | None:
        """Return the targets that choose the capsules to decode: in training mode the masks, otherwise None."""
        return targets if self.training and self.decoder is not None and not self.up_channels else None

    @checked
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "..."],
        targets: Masks,
    ) -> Losses:
        """Return the loss of the scores, the coarse loss and the reconstruction error, each with its weight.

        Args:
            output: Output of the network for ``images``. Without capsules, as from windows over larger images, there
                is no coarse loss.
            images: Pixels 0..1 (B, C, *S). Not used without a decoder.
            targets: Class of each pixel (B, *S); pixels of 255 do not count.

        Raises:
            InputError: Masks of another size than the images, or with a class that the network does not have.
        """
        classification = self._task.loss(output, targets, self)
        if self.coarse_loss is not None and output.capsules is not None:
            classification = classification + self.coarse_weight * self._coarse_loss(output, targets)
        if output.reconstruction is None:
            return Losses(classification, classification)
        counted = (targets != IGNORED).unsqueeze(1)
        foreground = counted & (targets != 0).unsqueeze(1)
        difference = in_full_precision(output.reconstruction) - in_full_precision(images) * foreground
        if self.reconstruction_of == "image":
            error = (difference.square() * counted).sum() / (counted.sum() * images.shape[1]).clamp_min(1)
        else:
            number = foreground.flatten(1).sum(1) + NO_FOREGROUND
            error = ((difference.square() * foreground).flatten(1).sum(1) / number).mean()
        return Losses(classification + self.reconstruction_weight * error, classification, error)

    def _coarse_loss(self, output: ModelOutput, targets: Masks) -> Float[Tensor, ""]:
        """Return the loss of the class capsules; masks are interpolated at the capsules' positions."""
        assert output.capsules is not None
        assert self.coarse_loss is not None
        lengths = (
            safe_norm(output.capsules, 2, eps=self.length_eps) if output.activations is None else output.activations
        )
        masks = pad_to_multiple(targets.unsqueeze(1), self.stride)
        numbers = torch.arange(self.num_classes - self.types, self.num_classes, device=masks.device)
        present = torch.cat([masks == numbers.view(-1, *[1] * self.dims), masks != IGNORED], 1).to(lengths.dtype)
        shares = F.interpolate(
            present, scale_factor=1 / self.stride, mode=INTERPOLATIONS[self.dims], align_corners=False
        )
        counted = (shares[:, -1:] > 0).to(shares)  # elsewhere lengths and targets are zero, so that nothing is learned
        shares = (shares[:, :-1] / shares[:, -1:].clamp_min(0.01)).clamp(0, 1)
        rows = (each.movedim(1, -1).flatten(0, -2) for each in (lengths * counted, shares * counted))
        value: Tensor = self.coarse_loss(*rows)
        return value


def as_one_type(maps: Float[Tensor, "B C *S"]) -> Capsules:
    """Return maps as capsules of one type with C components."""
    return Capsules(maps.flatten(2).transpose(1, 2), grid=(1, *maps.shape[2:]))


def poses_on_map(capsules: Capsules) -> Float[Tensor, "B T D *S"]:
    """Return poses with an axis for the types and for each axis of the map."""
    assert capsules.grid is not None
    return capsules.poses.unflatten(1, capsules.grid).movedim(-1, 2)


def _channels(capsules: Capsules) -> int:
    """Return the numbers at a position of a map: types times components."""
    assert capsules.grid is not None
    return capsules.grid[0] * capsules.poses.shape[2]


def _check_size(number: int, layer: MapLayer, before: Sequence[int], after: Sequence[int]) -> None:
    """Raise InputError unless a layer changes the size of maps by its stride alone."""
    stride, up = layer.window.stride, layer.repeat
    if layer.window.up:
        stride, up = 1, stride
    expected = [size * up // stride for size in before]
    if [*after] != expected:
        raise InputError(
            f"layer {number} of layers must turn maps of {_as_sizes(before)} into {_as_sizes(expected)}, but makes "
            f'{_as_sizes(after)}; set its layer_padding to "same"'
        )


def _as_sizes(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _stride_down(layer: Any) -> int:
    """Return the factor by which a layer, or the layer that a specification describes, makes a map smaller."""
    if isinstance(layer, Mapping):
        return layer["layer_stride"] if layer["name"] == "conv-types" else 1
    return layer.layer_stride if isinstance(layer, ConvTypeCapsules) else 1
