"""Base class of every network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.models.saving import SavedNetwork
from torchcaps.models.scores import ScoresOnly
from torchcaps.nn import Decoder
from torchcaps.ranges import COUNT, Range, spatial_shape
from torchcaps.tasks import TaskName, find_task
from torchcaps.words import counted


class Network(SavedNetwork):
    """Network for images of one shape and a number of classes; its options and weights can be saved.

    Register a subclass with ``@register("network", "mine")``.

    Args:
        in_shape: Shape of an image (C, H, W); in a network for pixels (C, *S), of a patch of one to three axes.
        num_classes: Number of classes (J).
        objects: Number of objects in an image, all of different classes. With several, a capsule network decodes each
            object from its own capsule, and a CNN has sigmoid instead of softmax cross-entropy.
        task: Prediction: the class of an image; several labels of an image, targets (B, J) of zeros and ones;
            numbers, targets (B, J) of a regression; or the class of each pixel, targets (B, H, W).
    """

    has_capsules: ClassVar[bool] = False
    """True if classes are capsules."""
    per_pixel: ClassVar[bool] = False
    """True if the network has scores (B, J, *S) for each pixel of images (B, C, *S) of one to three axes."""
    decoder: Decoder | None
    """Network that draws an image from the capsule of a class; None without reconstructions."""
    layers: nn.ModuleList
    """Capsule layers; the last one has the class capsules. Empty in a CNN."""
    length_eps: float = 1e-7
    """Number added under the root of the class capsules' lengths."""
    target_mean: Float[Tensor, "J"]
    target_scale: Float[Tensor, "J"]

    @checked
    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName = "classes") -> None:
        super().__init__()
        self._task = find_task(task, objects)
        self._task.check_network(self)
        shape = spatial_shape(in_shape, self._task.spatial_axes)
        outputs = Range(self._task.min_outputs, COUNT.most, whole=True)
        outputs.check(f"{type(self).__name__}: num_classes", num_classes)
        if objects >= num_classes > 1:
            raise InputError(
                f"objects must be below num_classes, because all objects have different classes, got "
                f"{counted(objects, 'object')} "
                f"and {counted(num_classes, 'class', 'classes')}"
            )
        self.in_shape = shape
        self.num_classes, self.objects, self.task = num_classes, objects, task
        for name, value in self._task.buffers(num_classes).items():
            self.register_buffer(name, value)

    def fit_targets(self, targets: Tensor | None) -> None:
        """Set the mean and scale of a regression's numbers from the training targets; other tasks need nothing.

        Args:
            targets: Targets of all training images; None if unknown, which changes nothing.
        """
        self._task.fit_targets(self, targets)

    def score(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, "B"]:
        """Return the score of each image, as its task defines it.

        - classes: 1 if the class is right, else 0;
        - labels: the share of correct labels;
        - regression: 1 − (mean squared error ÷ variance of the training targets), whose mean over images is R².
        """
        return self._task.score(scores, targets, self)

    @property
    def capsule_dim(self) -> int:
        """Components of a class capsule (D); 0 in a CNN."""
        return 0

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    def scores_only(self) -> ScoresOnly:
        """Return a module that returns only the scores (B, J), for tools that expect a tensor.

        Such tools are Captum, skorch and ``torch.jit.trace``. The module shares the network's parameters.

        Examples:
            >>> import torch, torchcaps
            >>> network = torchcaps.create_model("first").eval()
            >>> network.scores_only()(torch.rand(2, 1, 28, 28)).shape
            torch.Size([2, 10])
        """
        return ScoresOnly(self)

    def decoder_targets(self, targets: Targets) -> Targets | None:  # noqa: ARG002  used by networks with a decoder
        """Return the targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""
        return None

    @abstractmethod
    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
    ) -> Losses:
        """Return the loss to minimise; see :meth:`torchcaps.CapsNet.loss`."""
