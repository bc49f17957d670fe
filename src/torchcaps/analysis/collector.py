"""Base class of collectors, which gather the batches of an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from torchcaps.datasets import ImageSet
from torchcaps.models import ModelOutput, Network


class Collector(ABC):
    """Base class of collectors: gather the batches of an evaluation. A task may keep sums instead of all scores.

    Args:
        model: The network.
        class_names: Name of each class.
        image_set: The images, whose batches are added in their order.
    """

    def __init__(self, model: Network, class_names: tuple[str, ...], image_set: ImageSet) -> None:
        self.model, self.class_names, self.image_set = model, class_names, image_set

    @abstractmethod
    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:
        """Add a batch: the output for images of pixels 0..1, and their targets."""

    @abstractmethod
    def result(self, loss: float) -> Any:
        """Return the evaluation of all batches; ``loss`` is the mean over the images."""
