"""The base class of every network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models.output import PRESENT, Losses, ModelOutput, Targets, Task, is_correct
from torchcaps.models.saving import SavedNetwork
from torchcaps.models.scores import ScoresOnly
from torchcaps.nn import Decoder
from torchcaps.ranges import COUNT, Range, image_shape


class Network(SavedNetwork):
    """A network for images of one shape and a number of classes; its options and its weights are saved.

    A subclass is registered by ``@register("network", "mine")``.

    Args:
        in_shape: Images (C, H, W).
        num_classes: J.
        objects: Objects in an image, each of another class; with several, a capsule network decodes each from its own
            capsule alone, and a convolutional one has sigmoid cross-entropy instead of that of a softmax.
        task: What is asked of an image: its class; which of several labels it has (targets (B, J) of zeros and ones,
            scored one by one); or numbers, targets (B, J) of a regression.
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
    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: Task = "classes") -> None:
        super().__init__()
        shape = image_shape(in_shape)
        least = 2 if task == "classes" else 1
        Range(least, COUNT.most, whole=True).check(f"{type(self).__name__}: num_classes", num_classes)
        if objects > 1 and task != "classes":
            raise InputError(f"objects must be 1 for the task {task}, got {objects}")
        if objects >= num_classes > 1:
            raise InputError(
                f"objects must be below num_classes, as they are of different classes, got {objects} objects and "
                f"{num_classes} classes"
            )
        self.in_shape = shape
        self.num_classes, self.objects, self.task = num_classes, objects, task
        if task == "regression":
            self.register_buffer("target_mean", torch.zeros(num_classes))
            self.register_buffer("target_scale", torch.ones(num_classes))

    def fit_targets(self, targets: Float[Tensor, "N J"]) -> None:
        """Set the scale of a regression: its loss is in standard deviations of the training targets, in each of J."""
        self.target_mean.copy_(targets.mean(0))
        self.target_scale.copy_(targets.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny))

    def right(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, "B"]:
        """How right each answer is: whether the class is, the share of the labels that are, or what R² is the mean of.

        That is, of a regression, 1 − the mean of its squared errors in variances of the training targets.
        """
        if self.task == "regression":
            return 1 - ((scores - targets) / self.target_scale).square().mean(1)
        if self.task == "labels":
            return ((scores > PRESENT) == (targets > PRESENT)).to(scores.dtype).mean(1)
        return is_correct(scores, targets).to(scores.dtype)

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
