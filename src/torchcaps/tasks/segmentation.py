"""The task ``pixels``: the class of each pixel of an image, or of each voxel of a volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchcaps.errors import InputError, reason_of
from torchcaps.ranges import IGNORED, SEVERAL
from torchcaps.tasks.base import (
    PRESENT,
    Metric,
    TargetAxes,
    Task,
    advice,
    as_array,
    form_words,
    probabilities,
    scores_of,
)

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int64
    from torch import Tensor


class Segmentation(Task):
    """Task with a mask for each image: uint8 (N, H, W), the class of each pixel from 0; 255: ignored.

    Masks of any integer dtype, of True and False, of whole floats, and with a channel axis of length 1 are converted to
    this form. Masks of volumes have the shape (N, D, H, W). Class 0 is the background: it has a row in tables, but does
    not count in the mean Dice score. Two classes may have a single score, that of class 1.
    """

    name, form = "pixels", ("UInt8", "N H W")
    output, output_range = "class", SEVERAL
    needs = "masks, the class of each pixel as a whole number from 0 (255: ignored), (N, H, W) or (N, D, H, W)"
    metric = Metric("Dice", "1 − Dice", "%, mean over the images", hub="dice")
    evaluation = "torchcaps.analysis.segmentation"
    answers = "torchcaps.analysis.mask_answers"
    has_masks: ClassVar[bool | None] = True
    spatial_axes: ClassVar[tuple[int, ...]] = (1, 2, 3)
    analyses = frozenset({".onnx", ".pt2"})

    def has_form(self, targets: Tensor) -> bool:
        return str(targets.dtype) == "torch.uint8" and targets.ndim in (3, 4)

    def could_be(self, array: np.ndarray) -> bool:
        return array.dtype.kind in "iub" and array.ndim in (3, 4)

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        import numpy as np
        import torch

        array = as_array(targets, where)
        masks = array[:, 0] if array.ndim == 4 and array.shape[1] == 1 else array
        is_whole = array.dtype.kind in "iub" or (array.dtype.kind == "f" and bool((masks == np.floor(masks)).all()))
        if not is_whole or masks.ndim not in (3, 4) or 0 in masks.shape:
            raise InputError(f"{where} must be {self.needs}, got {form_words(array)}{advice(array, self)}")
        counted = masks[masks != IGNORED]
        if counted.size:
            self._check_range(counted.min(), counted.max(), num_outputs, where)
        return torch.from_numpy(np.ascontiguousarray(masks, np.uint8))

    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        return tuple(map(str, range(self._num_classes(self.convert_targets(targets, None, where)))))

    def _num_classes(self, targets: Tensor | Sequence[Tensor]) -> int:
        highest = (int(mask.masked_fill(mask == IGNORED, 0).max()) for mask in targets)
        return max(max(highest) + 1, int(self.output_range.least))

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        super().check_targets(targets, num_outputs, where, num_images)
        if num_outputs is not None:
            self._check_range(0, self._num_classes(targets) - 1, num_outputs, where)

    def _check_range(self, lowest: float, highest: float, num_outputs: int | None, where: str) -> None:
        """Raise InputError unless class numbers lie in 0..J−1."""
        most = (IGNORED if num_outputs is None else num_outputs) - 1
        if not 0 <= lowest <= highest <= most:
            raise InputError(
                f"{where} must be in 0..{most}, or {IGNORED} for ignored pixels, got {lowest:g}..{highest:g}; number "
                "the classes 0, 1, 2 and so on, such as by numpy.unique(labels, return_inverse=True)[1].reshape("
                "labels.shape)"
            )

    def check_training(self, targets: Tensor, names: Sequence[str], where: str) -> None:
        if not self._counts(targets, len(names)).any():
            raise InputError(
                f"{where}: all pixels of the training masks are {IGNORED}, which is ignored; a mask holds the number "
                "of a class in each pixel"
            )
        for number, images in enumerate(self.statistics(targets, len(names))["images"]):
            if not images:
                name = f" ({names[number]})" if names[number] != str(number) else ""
                raise InputError(
                    f"{where}: no training mask has the class {number}{name}; add images with it, or number the "
                    "classes without it"
                )

    def _counts(self, targets: Tensor | Sequence[Tensor], num_outputs: int) -> Int64[Tensor, "N J"]:
        """Return the number of pixels of each class in each mask."""
        import torch

        return torch.stack([mask[mask != IGNORED].flatten().bincount(minlength=num_outputs) for mask in targets])

    def statistics(self, targets: Tensor | Sequence[Tensor], num_outputs: int) -> dict[str, list[Any]]:
        counts = self._counts(targets, num_outputs)
        shares = 100 * counts.sum(0).double() / counts.sum().clamp_min(1)
        return {"images": (counts > 0).sum(0).tolist(), "% of pixels": shares.tolist()}

    def describe(self, names: Sequence[str], target: Any) -> str:
        return " + ".join(names[j] for j in target.unique().tolist() if j != IGNORED) or "none"

    def check_network(self, network: Any) -> None:
        if not network.per_pixel:
            raise InputError(
                f"{type(network).__name__} gives one answer for each image, but the task pixels needs a score for each "
                "pixel; choose a network for pixels, such as segcaps or unet-twin"
            )

    def infer(self, network: Any, images: Tensor, *targets: Any) -> Any:
        """Return the output for images of any size.

        For images larger than the input of the network, scores (and logits) are the mean over sliding windows as large
        as the input, and there are no capsules and no reconstructions.
        """
        import torch

        from torchcaps.ops.sliding import sliding_windows

        window = getattr(network, "in_shape", (0, *images.shape[2:]))[1:]
        if all(size <= side for size, side in zip(images.shape[2:], window, strict=True)):
            return network(images, *targets)
        outputs: list[Any] = []

        def look(part: Tensor) -> Tensor:
            output = network(part)
            outputs[:] = [output]
            return torch.cat([each.float() for each in (output.scores, output.logits) if each is not None], 1)

        outputs_of_windows = sliding_windows(look, images.float(), window)
        parts = outputs_of_windows.split(outputs[0].scores.shape[1], 1)
        logits = parts[1] if len(parts) > 1 else None
        return type(outputs[0])(scores=parts[0], logits=logits)

    def activate(self, logits: Float[Tensor, "B J *S"], network: Any) -> Float[Tensor, "B J *S"]:
        return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        logits = () if output.logits is None else (output.logits,)
        value: Tensor = network.classification_loss(output.scores, targets, *logits)
        return value

    def loss_of_module(
        self, loss: Callable[[Any, Tensor], Tensor] | None, target_axes: TargetAxes | None
    ) -> Callable[[Any, Tensor], Tensor]:
        """Return the loss of a module as the base class does, which gets masks of these axes.

        For several scores of a pixel, masks are class numbers, int64. For a single score, they are zeros and ones in
        the dtype of the scores.
        """
        if loss is None:
            return super().loss_of_module(loss, target_axes)
        axes = 'set target_axes of fit to the axes of the masks that the loss takes, "BHW" or "B1HW"'

        def compute(output: Any, masks: Tensor) -> Tensor:
            scores = scores_of(output)
            sizes = f"the scores are {tuple(scores.shape)} and the masks {tuple(masks.shape)}; {axes}"
            if scores.shape[1] > 1:
                targets = masks.long()
            elif target_axes is None:  # a guess would be broadcast in silence
                raise InputError(f"a loss of a single score for each pixel is ambiguous, because {sizes}")
            elif bool((masks == IGNORED).any()):
                raise InputError(
                    f"masks have ignored pixels ({IGNORED}), but a loss of a single score takes zeros and ones; give "
                    "the network two scores for each pixel, or leave out ignored pixels and augmentation that moves "
                    "images"
                )
            else:
                targets = masks.to(scores.dtype)
            try:
                return loss(output, targets.unsqueeze(1) if target_axes == "B1HW" else targets)
            except Exception as error:
                if isinstance(error, InputError | MemoryError) or "OutOfMemory" in type(error).__name__:
                    raise
                reason = f"the loss raised {type(error).__name__}: {reason_of(error)}"
                raise InputError(f"{reason}; {sizes}") from error

        return compute

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        from torchcaps.ops.segmentation import pixel_cross_entropy, pixel_logits

        return pixel_cross_entropy(pixel_logits(scores, scores), targets)

    def score(self, scores: Float[Tensor, "B J *S"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the mean Dice score of each image over its classes except the background, class 0.

        Single scores are converted by :func:`probabilities`.
        """
        from torchcaps.ops.segmentation import confusions, mean_dice, pixel_classes

        if scores.shape[1] == 1:
            scores = probabilities(scores, network)
        counts = confusions(pixel_classes(scores), targets, max(scores.shape[1], int(self.output_range.least)))
        return mean_dice(counts).to(scores.dtype)

    def predict_classes(self, scores: Any) -> Any:
        if not hasattr(scores, "detach"):  # an array, for use without torch
            return (scores[:, 0] > PRESENT if scores.shape[1] == 1 else scores.argmax(1)).astype("uint8")
        from torchcaps.ops.segmentation import pixel_classes

        return pixel_classes(scores)

    def decoded_capsules(self, scores: Float[Tensor, "B J *S"], targets: Tensor | None) -> Tensor | None:
        return self.predict_classes(scores) if targets is None else targets

    def chance(self, targets: Tensor | Sequence[Tensor], *, balanced: bool = False) -> tuple[float, float] | None:
        """Return the mean Dice score of giving all pixels the best single class, and its standard error."""
        import torch

        from torchcaps.ops.segmentation import mean_dice

        counts = self._counts(targets, self._num_classes(targets))
        answers = torch.eye(counts.shape[1], dtype=torch.int64)
        constant = [mean_dice(counts[:, :, None] * answer) for answer in answers]
        best = max(constant, key=lambda dice: float(dice.mean()))
        return (float(best.mean()), float(best.std() / len(best) ** 0.5)) if len(best) > 1 else None

    def class_counts(self, targets: Tensor | Sequence[Tensor]) -> Int64[Tensor, "J"] | None:
        return self._counts(targets, self._num_classes(targets)).sum(0)
