"""Base class of networks that answer each pixel of a line, a plane or a volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.models.images import check_images
from torchcaps.models.network import Network
from torchcaps.models.output import Losses, ModelOutput
from torchcaps.models.shapes import infer_shapes
from torchcaps.nn import Capsules
from torchcaps.nn.layers import MapLayer
from torchcaps.parts import Choice, Spec, build
from torchcaps.tasks import TaskName
from torchcaps.tracing import is_graph_capture

BYTES_PER_NUMBER, FIXED_BYTES = 6.0, 64 * MIB
"""Memory of a training step: for each number of a map, and besides. Measured: peaks are 0.7 to 1.1 times the estimate,
for segcaps at 128² to 512², ucaps3d at 32³ to 64³ and unet-twin at 256²."""
PixelLoss = Annotated[Spec, Choice("loss")]
Masks = UInt8[Tensor, "B *S"]
"""Class of each pixel; 255: not counted."""


class PixelNetwork(Network):
    """Base class of networks whose scores (B, J, *S) are for each pixel of images (B, C, *S), of one to three axes.

    ``in_shape`` is the shape of a training patch. The network takes images of any size. A size that does not divide by
    ``stride`` is padded with copies of the last pixel, and the output is cut to the size of the image.
    """

    per_pixel: ClassVar[bool] = True
    stride: int
    """Product of the strides on the way to the coarsest map, the same along each axis."""

    def __init__(
        self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName, classification_loss: Spec
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.layers, self.decoder = nn.ModuleList(), None
        self.dims = len(self.in_shape) - 1
        """Number of spatial axes."""
        self.classification_loss = build("loss", classification_loss, num_classes=num_classes)

    def padded(self, images: Float[Tensor, "B C *S"], return_coupling: bool = False) -> Float[Tensor, "B C *S"]:
        """Check images, and return them padded to sizes that divide by the stride."""
        if return_coupling:
            raise InputError(f"{type(self).__name__}: the coupling of networks for pixels cannot be returned")
        check_images(images, self.in_shape, next(self.parameters()), any_size=True)
        return pad_to_multiple(images, self.stride)

    def training_bytes(self, batch_size: int) -> int:
        """Estimate the memory of a training step on patches, without the weights, from the sizes of all maps.

        Votes do not count, because they are computed part by part.
        """
        numbers: list[int] = []

        def note(_module: nn.Module, _inputs: object, output: object) -> None:
            maps = output.poses if isinstance(output, Capsules) else output
            if isinstance(maps, Tensor) and maps.ndim > 2:
                numbers.append(maps.numel())

        counted = [each for each in self.modules() if isinstance(each, MapLayer) or not any(each.children())]
        infer_shapes(self, torch.empty(1, *self.in_shape, device="meta"), note, counted)
        return round(BYTES_PER_NUMBER * batch_size * sum(numbers)) + FIXED_BYTES

    @checked
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "..."],  # noqa: ARG002  used by networks with a decoder
        targets: Masks,
    ) -> Losses:
        """Return the loss of the task; the images are not used.

        Args:
            output: Output of the network for ``images``.
            images: Pixels 0..1.
            targets: Class of each pixel (B, *S).
        """
        loss = self._task.loss(output, targets, self)
        return Losses(loss, loss)


def pad_to_multiple(maps: Float[Tensor, "B C *S"], multiple: int) -> Float[Tensor, "B C *S"]:
    """Repeat the last pixel along each spatial axis until the size divides by ``multiple``."""
    for axis, size in enumerate(maps.shape[2:], 2):
        padded_size = (
            (size + multiple - 1) // multiple * multiple
        )  # not -(-size // multiple): ONNX rounds it towards zero
        if is_graph_capture() or padded_size != size:  # a comparison would fix the size in a graph
            maps = maps.index_select(axis, torch.arange(padded_size, device=maps.device).clamp_max(size - 1))
    return maps


def cut_to(maps: Float[Tensor, "B ..."], sizes: Sequence[int]) -> Float[Tensor, "B ..."]:
    """Return the first positions along the spatial axes, which are the last ones."""
    for axis, size in enumerate(sizes, maps.ndim - len(sizes)):
        if is_graph_capture():  # a slice would need a proof that the map is large enough
            maps = maps.index_select(axis, torch.arange(size, device=maps.device))
        else:
            maps = maps.narrow(axis, 0, size)
    return maps
