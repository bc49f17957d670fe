"""Base class of tasks: the form of targets, metric, loss, wording, and the supported analyses."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchcaps.errors import InputError, WrongType, shown
from torchcaps.ranges import COUNT, Range
from torchcaps.words import capitalised, each_of, plural

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int64
    from torch import Tensor

TargetAxes = Literal["BHW", "B1HW"]
"""Axes of the masks that a loss of pixels takes; (D, H, W) of volumes take the place of (H, W)."""
ALWAYS = frozenset({"train", "evaluate", "predict", "curves", "datasets", "export", "share", "folder"})
"""Commands, and formats of ``torchcaps export``, that support every task."""
TASKS: dict[str, Task] = {}
"""All tasks by name, filled by the package. The first is the default; if several fit some targets, it is the first."""

PRESENT = 0.5
"""A label, a threshold or a single class is predicted if its score is above this, half way between the margins."""


@dataclass(frozen=True)
class Metric:
    """Metric of a task, at most 1, and its formatting. In files, its columns are named ``accuracy``.

    Args:
        name: Name in a table, such as "accuracy".
        error: Name of 1 − the metric, such as "error".
        unit: Unit of the error, for the axis of a curve.
        is_share: True for a share of the images or labels, shown as a percentage. Otherwise tables and curves show the
            error.
        hub: Name of the metric on the Hugging Face hub. Its value there is the metric if that is a share, else the
            error.
    """

    name: str
    error: str
    unit: str
    is_share: bool = True
    hub: str = "accuracy"

    def show(self, value: float | None) -> str:
        """Format a value for a table: ``97.20 %``, or the error, ``0.0312``; a dash for an unknown one, None or NaN."""
        if value is None or math.isnan(value):
            return "–"
        return f"{100 * value:.2f} %" if self.is_share else self.show_error(1 - value)

    def say(self, value: float, name: str = "") -> str:
        """Format a value for a sentence: ``97.20%`` after ``name``, or the error after the name of the error."""
        return f"{name}{value:.2%}" if self.is_share else f"{self.error} {1 - value:.4g}"

    def cells(self, value: float | None, balanced: float | None = None) -> dict[str, str]:
        """Return cells of a table by heading: the share, the balanced share if given, and the error."""
        value = math.nan if value is None else value
        shown = {self.name: self.show(value)} if self.is_share else {}
        if balanced is not None:
            shown["balanced"] = self.show(balanced)
        return shown | {self.error: self.show_error(1 - value)}

    def row(self, value: float) -> tuple[str, str]:
        """Return name and formatted value as a row of a table."""
        name, unit = (self.name, "") if self.is_share else (self.error, f"  ({self.unit})")
        return capitalised(name), f"{self.show(value)}{unit}"

    def show_error(self, error: float) -> str:
        """Format an error for a table: ``2.80 %``, or ``0.0312``; a dash for NaN."""
        if math.isnan(error):
            return "–"
        return f"{100 * error:.2f} %" if self.is_share else f"{error:.4g}"

    def spread(self, errors: Sequence[float]) -> str:
        """Format the mean and the sample standard deviation of the errors of several seeds; a dash if one is NaN."""
        if any(map(math.isnan, errors)):
            return "–"
        factor, unit = (100, " %") if self.is_share else (1, "")
        return f"{factor * statistics.mean(errors):.3f} ± {factor * statistics.stdev(errors):.3f}{unit}"

    def hub_value(self, error: float) -> float:
        """Convert an error to the value that the Hugging Face hub expects."""
        return 1 - error if self.is_share else error

    def errors(self, values: np.ndarray) -> np.ndarray:
        """Convert values of the metric to errors for a curve: in percent, or in :attr:`unit`."""
        return (100 if self.is_share else 1) * (1 - values)


class Task(ABC):
    """Base class of tasks. A new task is a subclass and a module with its evaluation, which the subclass names.

    An instance stands in the list of the package ``torchcaps.tasks``.

    Code outside this package calls methods of the task and never compares its name. Nothing here imports torch before a
    tensor exists, because ``predict`` runs ONNX files without torch.
    """

    name: ClassVar[str]
    """Name in options and files: ``"classes"``."""
    output: ClassVar[str]
    """Noun for one of the J outputs of a network: ``"class"``."""
    output_range: ClassVar[Range] = COUNT
    """Numbers of outputs J that a network may have."""
    form: ClassVar[tuple[str, str]]
    """Dtype and axes of targets in the task's form, in jaxtyping's words: ``("Int64", "N")``."""
    needs: ClassVar[str]
    """Form of the targets, to continue an error after "labels must be"."""
    metric: ClassVar[Metric]
    analyses: ClassVar[frozenset[str]] = frozenset()
    """Commands, functions and export formats for a network of this task, besides :data:`ALWAYS`."""
    evaluation: ClassVar[str] = "torchcaps.analysis.evaluation"
    """Module whose class ``TaskCollector`` gathers the batches of an evaluation."""
    score_name: ClassVar[Literal["value", "score", "share"] | None] = None
    """``"value"`` if :meth:`activate` computes scores from the poses of capsules, ``"score"`` if from their lengths;
    ``"share"`` if scores are the shares of slots in each pixel. None: the network names its scores, which are lengths
    or activations of capsules, or probabilities."""
    has_masks: ClassVar[bool | None] = False
    """True if the target of an image is a mask, which moves with the image. None: masks may be unknown."""
    spatial_axes: ClassVar[tuple[int, ...]] = (2,)
    """Numbers of spatial axes that images may have: (2,) for images, (1, 2, 3) for lines and volumes too."""
    objects: int = 1
    """Number of objects in an image (P)."""

    # ---- supported analyses

    def supports(self, analysis: str) -> bool:
        """Return True if an analysis (a command, a function or an export format) works for this task."""
        return analysis in ALWAYS or analysis in self.analyses

    def require(self, analysis: str, purpose: str | None = None) -> None:
        """Raise InputError unless the task supports an analysis; ``purpose`` is the subject of the sentence."""
        if not self.supports(analysis):
            able = " or ".join(each.name for each in TASKS.values() if each.supports(analysis))
            raise InputError(
                f"{purpose or analysis} works for the task {able}; this network was trained for the task {self.name}"
            )

    # ---- targets

    def with_objects(self, objects: int) -> Task:
        """Return the task for images of P objects.

        Raises:
            InputError: The task takes images of one object only.
        """
        if objects != 1:
            raise InputError(f"objects must be 1 for the task {self.name}, got {objects}")
        return self

    def has_form(self, targets: Tensor) -> bool:
        """Return True if a tensor already has the task's form."""
        dtype, axes = self.form
        return str(targets.dtype) == f"torch.{dtype.lower()}" and targets.ndim == len(axes.split())

    @abstractmethod
    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        """Convert targets of any form to the tensor that this task takes.

        Args:
            targets: A tensor, an array or a list, for all images of a set.
            num_outputs: Number of outputs of the network (J); None: derived from the targets.
            where: Name of the targets, to begin errors with.
            class_names: Names that give texts their numbers; None: the sorted texts.

        Raises:
            WrongType: The targets are neither numbers nor texts.
            InputError: The targets do not fit the task; the error names the tasks that they fit.
        """

    @abstractmethod
    def could_be(self, array: np.ndarray) -> bool:
        """Return True if targets whose task was not named could belong to this task."""

    @abstractmethod
    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        """Return names of the outputs, derived from targets of any form: their texts, or numbers from 0.

        Args:
            targets: The targets.
            where: Name of the targets, to begin errors with.
            complete: True for training targets, which have all classes from 0; False: some may be absent.

        Raises:
            InputError: The targets do not fit the task, or class numbers do not begin at 0.
        """

    def in_order(self, names: Sequence[str], where: str) -> tuple[str, ...]:
        """Return the sorted names of classes in the task's order: unchanged, except for grades."""
        return tuple(names)

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        """Raise an error unless the values of targets are allowed, and fit the outputs and the images.

        Args:
            targets: Targets in the task's form.
            num_outputs: Number of outputs (J); None: any number.
            where: Name of the targets, to begin errors with.
            num_images: Number of images, each of which needs a target. None: the targets belong to an image set, which
                has checked it.
        """
        if num_images is not None and len(targets) != num_images:
            raise InputError(f"{where} must be given for {each_of(num_images, 'image')}, got {len(targets)}")

    def check_training(self, targets: Tensor, names: Sequence[str], where: str) -> None:  # noqa: B027  optional hook
        """Raise InputError unless a network can learn every output from the training targets."""

    def strata(self, targets: Tensor) -> Int64[Tensor, "N"]:
        """Return the stratum of each image; random splits keep the share of each stratum in both parts."""
        import torch

        return torch.zeros(len(targets), dtype=torch.int64)

    @abstractmethod
    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        """Return a number for each output by heading, such as "images"; shown by ``torchcaps datasets``."""

    @abstractmethod
    def describe(self, names: Sequence[str], target: Any) -> str:
        """Return the target of one image in words."""

    def matched_names(self, names: Sequence[str]) -> Sequence[str]:
        """Return those names of a data set's outputs that are matched with the names of a network: usually all."""
        return names

    def renumbering(self, numbers: Sequence[int], names: Sequence[str], where: str) -> Callable[[Tensor], Tensor]:
        """Return the function that converts targets of a data set for a network.

        Args:
            numbers: Number in the network of each output of the data set.
            names: Names of the network's outputs.
            where: Name of the data set, to begin errors with.

        Raises:
            InputError: The data set lacks an output that it needs.
        """

        def renumber(targets: Tensor) -> Tensor:
            renumbered = targets.clone()
            for before, after in enumerate(numbers):
                renumbered[targets == before] = after
            return renumbered

        return renumber

    # ---- training

    def check_network(self, network: Any) -> None:
        """Raise InputError unless a kind of network has the answers that the task needs."""
        if network.per_pixel:
            raise InputError(
                f'{type(network).__name__} gives an answer for each pixel; set task="pixels" (--task pixels)'
            )
        if network.has_slots:
            raise InputError(
                f'{type(network).__name__} finds objects without labels; set task="objects" (--task objects)'
            )

    def infer(self, network: Any, images: Tensor, *targets: Any) -> Any:
        """Return the output of a network for evaluation; ``targets`` choose the capsules to decode."""
        return network(images, *targets)

    def buffers(self, num_outputs: int, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Return tensors that a network stores beside its weights, by name.

        Args:
            num_outputs: Number of outputs (J).
            targets: Targets of all training images, which decide the values; None: values before training.

        Raises:
            InputError: The targets give no such values.
        """
        return {}

    @abstractmethod
    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        """Convert the output of the last linear layer to scores, or, for grades, lengths of a network's capsules."""

    @abstractmethod
    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        """Return the loss of a batch, without the reconstruction loss.

        Args:
            output: A ``ModelOutput``.
            targets: Targets in the task's form; for classes also rows, see ``torchcaps.ops.losses``.
            network: A capsule network, whose ``classification_loss`` is applied to the scores; or a network with
                logits.
        """

    def loss_of_module(
        self, loss: Callable[[Any, Tensor], Tensor] | None, target_axes: TargetAxes | None
    ) -> Callable[[Any, Tensor], Tensor]:
        """Return the loss of a module that is no network of torchcaps, a function of its output and the targets.

        Args:
            loss: Loss of the user; None: the usual one of the task, for scores that are logits.
            target_axes: Axes of the masks that it takes; None: not said.

        Raises:
            InputError: ``target_axes`` has no use.
        """
        if target_axes is not None:
            raise InputError('target_axes is for a loss of your own for the task pixels; set loss, and task="pixels"')
        return loss or (lambda output, targets: self._module_loss(scores_of(output), targets))

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Return the cross-entropy of a batch, for a module that is no network of torchcaps; its scores are logits."""
        import torch.nn.functional as F

        return F.cross_entropy(scores, targets)

    @abstractmethod
    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the metric of each image."""

    @abstractmethod
    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        """Return the classes (B,) or rows (B, J) of the capsules to decode; None: all capsules."""

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        """Return the metric of the best constant answer, and its standard error; None if there is no such answer."""
        return None

    def class_counts(self, targets: Tensor) -> Int64[Tensor, "J"] | None:
        """Return the number of images of each class, or of its pixels; None unless each has exactly one class."""
        return None

    # ---- answers

    def predict_classes(self, scores: Any) -> Any:
        """Return the predicted class of each image (or pixel) for scores (B, J), a tensor or an array."""
        return scores.argmax(1)

    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        """Return the answer for one image, in words; ``classes`` are the classes with the highest scores."""
        return [names[j] for j in classes]

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        """Return an answer for JSON."""
        return {plural(self.output): answer}

    answers: ClassVar[str] = "torchcaps.analysis.answers"
    """Module that answers image files by its ``answer_files``, ``output_files`` and ``UNUSED_OPTIONS``; its
    ``masks_in`` returns files that are no images."""


def scores_of(output: Any) -> Tensor:
    """Return the scores of an output, which may be the scores themselves."""
    scores: Tensor = getattr(output, "scores", output)
    return scores


def probabilities(scores: Float[Tensor, "B ..."], network: Any) -> Float[Tensor, "B ..."]:
    """Return scores of 0..1 for the metric.

    A module that is no network of torchcaps may give logits: its scores are logits if one of a batch is outside 0..1.
    """
    if hasattr(network, "decoder_targets"):
        return scores
    return scores.sigmoid().where(((scores < 0) | (scores > 1)).any(), scores)


def as_array(values: Any, where: str) -> np.ndarray:
    """Convert a list, an array or a tensor to an array of numbers, booleans or texts.

    Raises:
        WrongType: The values are something else; the error begins with ``where``.
    """
    import numpy as np

    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{where} must be one array, got rows of different lengths") from None
    if array.dtype.kind == "O" and array.ndim:  # such as a column of pandas
        for kind in (str, Integral, Real):
            if all(isinstance(each, kind) for each in array.flat):
                array = np.array(array.tolist())
                break
    if array.dtype.kind not in "biufcUS" or array.ndim == 0:
        got = type(values).__name__ if array.ndim == 0 else f"an array of {array.dtype}"
        raise WrongType(f"{where} must be a tensor, an array or a list of numbers, got {got}")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def form_words(array: np.ndarray) -> str:
    """Describe dtype and shape of targets, for the end of an error."""
    return f"{array.dtype} in the shape {shown(array.shape)}"


def advice(array: np.ndarray, task: Task) -> str:
    """Return the tasks that the targets fit, for the end of an error about a task that they do not fit."""
    others = [f'task="{each.name}" (--task {each.name})' for each in TASKS.values() if each.could_be(array)]
    return f"; set {' or '.join(others)}" if others and not task.could_be(array) else ""
