"""Auto-encoder with slots: it finds objects without labels, by redrawing the image slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.images import check_images
from torchcaps.models.network import Network
from torchcaps.models.output import Losses, ModelOutput
from torchcaps.models.segmentation import Masks
from torchcaps.models.shapes import build_layers, infer_map_shape
from torchcaps.nn import BroadcastDecoder, Capsules
from torchcaps.nn.broadcast import Positions
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import IGNORED, Frequencies, Width
from torchcaps.tasks import TaskName


@register("network", "slots")
class SlotNetwork(Network):
    """Auto-encoder for the task ``objects``: backbone → positions → layers of slots → broadcast decoder.

    Each position of the backbone's maps is an input capsule. The scores are the masks m_j (B, J, H, W) of the slots.
    The loss is the mean squared error of the image, so it needs no labels.

    Args:
        in_shape: Shape of an image (C, H, W).
        num_classes: Number of slots (J), unless the last layer has ``num_capsules``.
        backbone: Network that turns images into feature maps.
        feature_frequencies: Frequencies of the positions that are added to the feature maps, see
            :class:`torchcaps.nn.broadcast.Positions`.
        feature_width: Components of an input capsule, and hidden width of the perceptron that computes it.
        layers: Layers from input capsules to slots, one after another. A capsule layer may take the place of slots.
        decoder: Network that draws the image from the slots.

    Raises:
        InputError: There is no layer or no decoder.

    Source: Locatello et al. 2020, "Object-centric learning with slot attention" (arXiv:2006.15055).
    """

    has_slots: ClassVar[bool] = True

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "objects",
        backbone: Annotated[Spec, Choice("backbone")] = "stack",
        feature_frequencies: Frequencies = 0,
        feature_width: Width = 64,
        layers: Annotated[Sequence[Spec], Choice("layer", many=True)] = ("slots",),
        decoder: Annotated[Spec, Choice("decoder", optional=True)] = "broadcast",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.feature_frequencies, self.feature_width = feature_frequencies, feature_width
        self.backbone = build("backbone", backbone, in_channels=self.in_shape[0], in_shape=self.in_shape)
        channels, height, width = infer_map_shape(self.backbone, self.in_shape)[0].shape[1:]
        self.positions = Positions(channels, feature_frequencies)
        self.features = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, feature_width),
            nn.ReLU(),
            nn.Linear(feature_width, feature_width),
        )
        inputs = Capsules(torch.empty(2, height * width, feature_width, device="meta"))
        self.layers, self.flow = build_layers(layers, inputs, num_classes)
        if not len(self.layers):
            raise InputError("layers must hold at least one layer, whose output capsules are the slots, got none")
        if self.num_slots > IGNORED:  # the masks hold bytes
            raise InputError(
                f"a network has at most {IGNORED} slots, got {self.num_slots}; choose a smaller num_capsules"
            )
        if decoder is None or decoder is False:
            raise InputError("a network with slots learns by redrawing images, so it needs a decoder")
        sizes: dict[str, Any] = {"num_capsules": self.num_slots, "capsule_dim": self.capsule_dim}
        self.decoder = build("decoder", decoder, **sizes, slot_dim=self.capsule_dim, out_shape=self.in_shape)
        if not isinstance(self.decoder, BroadcastDecoder):
            name = type(self.decoder).__name__
            raise InputError(f'decoder must be "broadcast", which draws a mask of each slot, got {name}')
        if self.backbone is not backbone and hasattr(self.backbone, "init_weights"):
            self.backbone.init_weights()

    @property
    def num_slots(self) -> int:
        """Number of slots; that of the data set's outputs, unless ``num_capsules`` of the last layer sets it."""
        return int(self.flow[-1].poses.shape[1])

    @property
    def num_outputs(self) -> int:
        return self.num_slots

    @property
    def capsule_dim(self) -> int:
        """Components of a slot (D)."""
        return int(self.flow[-1].poses.shape[2])

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Masks | None = None,  # noqa: ARG002  all networks have the same arguments
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Find the objects of images, and redraw the images.

        Args:
            images: Pixels 0..1.
            targets: Not used.
            return_coupling: Also return the attention of the last layer's last iteration, (B, h·w, J).

        Raises:
            InputError: The images do not fit the network.
        """
        check_images(images, self.in_shape, next(self.parameters()))
        maps = self.positions(self.backbone(images))
        capsules, coupling = Capsules(self.features(maps.flatten(2).transpose(1, 2))), None
        for layer in self.layers[:-1]:
            capsules = layer(capsules)
        if return_coupling:
            routed = self.layers[-1].route(capsules, return_coupling=True)  # type: ignore[operator]
            slots, coupling = routed.poses, routed.coupling
        else:
            slots = self.layers[-1](capsules).poses
        assert self.decoder is not None
        reconstruction, masks = self.decoder(slots)
        return ModelOutput(masks, slots, reconstruction, coupling)

    @checked
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"],
        targets: Masks,  # noqa: ARG002  all networks have the same arguments
    ) -> Losses:
        """Return the mean squared error of the redrawn images.

        Args:
            output: Output of the network for ``images``.
            images: Pixels 0..1.
            targets: Not used.
        """
        if output.reconstruction is None:
            raise InputError("SlotNetwork.loss: output must have a reconstruction")
        error = F.mse_loss(output.reconstruction, images)
        return Losses(error, error.new_zeros(()), error)
