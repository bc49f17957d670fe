"""The base class of every network."""

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
from torchcaps.ranges import COUNT, Range, image_shape
from torchcaps.tasks import TaskName, find_task


class Network(SavedNetwork):
    """A network for images of one shape and a number of classes; its options and its weights are saved.

    A subclass is registered by ``@register("network", "mine")``.

    Args:
        in_shape: Images (C, H, W).
        num_classes: J.
        objects: Objects in an image, each of another class; with several, a capsule network decodes each from its own
            capsule alone, and a convolutional one has sigmoid cross-entropy instead of that of a softmax.
        task: What is predicted: the class of an image; which of several labels it has (targets (B, J) of zeros and
            ones, scored one by one); or numbers, targets (B, J) of a regression.
    """

    has_capsules: ClassVar[bool] = False
    """Whether classes are capsules."""
    decoder: Decoder | None
    """From the capsule of a class to an image; None where the network draws nothing."""
    layers: nn.ModuleList
    """Its capsule layers, of which the last one has the classes; empty where it has none."""
    length_eps: float = 1e-7
    """Added under the root of the class capsules' lengths."""
    target_mean: Float[Tensor, "J"]
    target_scale: Float[Tensor, "J"]

    @checked
    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName = "classes") -> None:
        super().__init__()
        shape = image_shape(in_shape)
        self._task = find_task(task, objects)
        outputs = Range(self._task.min_outputs, COUNT.most, whole=True)
        outputs.check(f"{type(self).__name__}: num_classes", num_classes)
        if objects >= num_classes > 1:
            raise InputError(
                f"objects must be below num_classes, as they are of different classes, got {objects} objects and "
                f"{num_classes} classes"
            )
        self.in_shape = shape
        self.num_classes, self.objects, self.task = num_classes, objects, task
        for name, value in self._task.buffers(num_classes).items():
            self.register_buffer(name, value)

    def fit_targets(self, targets: Tensor | None) -> None:
        """Set what depends on the training targets: mean and scale of the numbers of a regression.

        Args:
            targets: Those of all training images; None if they are not known, which changes nothing.
        """
        self._task.fit_targets(self, targets)

    def right(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, "B"]:
        """Return the metric of each image, as its task defines it.

        It is 1 if the class is right, or else 0; the share of correct labels; for a regression 1 − the mean of its
        squared errors in variances of the training targets.
        """
        return self._task.score(scores, targets, self)

    @property
    def capsule_dim(self) -> int:
        """D, the components of a class's capsule; 0 where there are no capsules."""
        return 0

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    def scores_only(self) -> ScoresOnly:
        """Return a module that gives the scores (B, J) alone, for tools that expect a tensor of a network.

        Such tools are Captum, skorch and ``torch.jit.trace``. The module shares the network's parameters.

        Examples:
            >>> import torch, torchcaps
            >>> network = torchcaps.create_model("first").eval()
            >>> network.scores_only()(torch.rand(2, 1, 28, 28)).shape
            torch.Size([2, 10])
        """
        return ScoresOnly(self)

    def decoder_targets(self, targets: Targets) -> Targets | None:  # noqa: ARG002  where something is decoded
        """The targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""
        return None

    @abstractmethod
    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
    ) -> Losses:
        """The loss that is minimised; see :meth:`torchcaps.CapsNet.loss`."""
