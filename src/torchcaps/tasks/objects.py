"""The task ``objects``: find the objects of an image without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.ranges import IGNORED
from torchcaps.tasks.base import Metric, TargetAxes, Task
from torchcaps.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor


class ObjectDiscovery(Segmentation):
    """Task without labels: a mask for each object. Nothing is trained on masks; those of the data only measure.

    Masks are those of :class:`Segmentation`, with numbers of objects in place of classes: 0 is the background. A mask
    that holds only 255 is unknown. An image may hold more objects than a network has outputs. The
    metric is the adjusted Rand index of the foreground pixels.
    """

    name = "objects"
    output, answer_key = "slot", "slots"
    needs = "masks, the number of the object at each pixel (0: background; 255: unknown), (N, H, W)"
    metric = Metric("FG-ARI", "1 − FG-ARI", "%, mean over the images", hub="adjusted_rand_index")
    evaluation = "torchcaps.analysis.objects"
    has_masks = None
    spatial_axes = (2,)
    analyses = frozenset({".onnx", ".pt2", "explore"})
    score_name = "share"

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        return super().convert_targets(targets, None, where, class_names)

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        super().check_targets(targets, None, where, num_images)

    def check_training(self, targets: Tensor, names: Sequence[str], where: str) -> None:
        """Check nothing, because nothing is learned from masks."""

    def describe(self, names: Sequence[str], target: Any) -> str:
        numbers = [number for number in target.unique().tolist() if number != IGNORED]
        return f"{sum(number > 0 for number in numbers)} objects" if numbers else "no mask"

    def matched_names(self, names: Sequence[str]) -> Sequence[str]:
        return ()  # an object of one image has nothing to do with that of another

    def check_network(self, network: Any) -> None:
        if not network.has_slots:
            raise InputError(
                f"{type(network).__name__} has no slots, but the task objects needs a mask for each; choose a network "
                "with slots, such as slots-small"
            )

    def infer(self, network: Any, images: Tensor, *targets: Any) -> Any:
        return Task.infer(self, network, images, *targets)  # no windows, because slots of two windows do not match

    def loss_of_module(
        self, loss: Callable[[Any, Tensor], Tensor] | None, target_axes: TargetAxes | None
    ) -> Callable[[Any, Tensor], Tensor]:
        return Task.loss_of_module(self, loss, target_axes)  # masks are nothing to learn from

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        raise InputError(
            "a module of your own for the task objects needs a loss of its own, because masks teach nothing"
        )

    def score(self, scores: Float[Tensor, "B J H W"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the FG-ARI of each image; 0, as by chance, for an image without a mask or without objects."""
        from torchcaps.ops.segmentation import foreground_ari

        return foreground_ari(self.predict_classes(scores), targets).nan_to_num(0).to(scores.dtype)

    def predict_classes(self, scores: Any) -> Any:
        slots = scores.argmax(1)  # of a single slot 0, where a single class would be 1
        return slots.byte() if hasattr(slots, "detach") else slots.astype("uint8")

    def decoded_capsules(self, scores: Float[Tensor, "B J H W"], targets: Tensor | None) -> Tensor | None:
        return None

    def chance(self, targets: Tensor | Sequence[Tensor], *, balanced: bool = False) -> tuple[float, float] | None:
        return None

    def class_counts(self, targets: Tensor | Sequence[Tensor]) -> Int64[Tensor, "J"] | None:
        return None
