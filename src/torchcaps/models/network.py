"""What every network is: built from a configuration, called with images, saved and read again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.models.config import NetworkConfig
from torchcaps.models.images import check_num_classes, check_objects, check_shape
from torchcaps.models.output import Losses, ModelOutput
from torchcaps.models.pretrained import Pretrained
from torchcaps.nn import Decoder


class Network(Pretrained):
    """A network for images of one shape and a number of classes.

    Args:
        config: What it is.
        in_shape: Images (C, H, W).
        num_classes: J.

    Raises:
        InputError: A shape or a number that is none, or as many objects in an image as there are classes.
    """

    config: NetworkConfig
    decoder: Decoder | None
    """From the capsule of a class to an image; None where the network draws nothing."""
    layers: nn.ModuleList
    """Its capsule layers, of which the last one has the classes; empty where it has none."""

    def __init__(self, config: NetworkConfig, in_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.in_shape = check_shape(in_shape)
        self.num_classes = check_num_classes(num_classes)
        check_objects(config.objects, num_classes)

    @abstractmethod
    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"] | None = None,
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    @abstractmethod
    def decoder_targets(
        self, targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"]
    ) -> Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"] | None:
        """The targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""

    @abstractmethod
    def loss(
        self,
        output: ModelOutput,
        images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"],
        targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"] | Int[Tensor, "B P"],
    ) -> Losses:
        """The loss that is minimised; see :meth:`torchcaps.CapsNet.loss`."""
