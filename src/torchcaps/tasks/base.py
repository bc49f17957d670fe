"""What a task must say: the form of its targets, its metric, loss and words, and the analyses it takes part in."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchcaps.errors import InputError, WrongType, shown
from torchcaps.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from jaxtyping import Float, Int64
    from torch import Tensor

    Row = tuple[int | float, ...]

TaskName = Literal["classes", "labels", "regression"]
"""What a network is trained for: the class of an image, or the classes of its objects; several labels, each of which
an image has or has not, (B, L); or numbers, (B, T)."""
ALWAYS = frozenset({"train", "evaluate", "predict", "curves", "datasets", "export", "share", "folder"})
"""Commands, and formats of ``torchcaps export``, that take a network of any task."""


@dataclass(frozen=True)
class Metric:
    """How good answers are, 1 at best, and how that is written. Files keep it in columns that are named ``accuracy``.

    Args:
        name: Name in a table, such as "accuracy".
        error: Name of 1 − the metric, such as "error".
        unit: Unit of the error, at the axis of a curve.
        is_share: Whether the metric is a share of the images or labels, written as a percentage. If not, tables and
            curves show the error.
        hub: Name of the metric on the Hugging Face hub, whose value there is the metric of a share, or the error.
    """

    name: str
    error: str
    unit: str
    is_share: bool = True
    hub: str = "accuracy"

    def show(self, value: float | None) -> str:
        """Return a value as a cell of a table: ``97.20 %``, or the error, ``0.0312``; a dash for None."""
        if value is None:
            return "–"
        return f"{100 * value:.2f} %" if self.is_share else self.show_error(1 - value)

    def say(self, value: float, name: str = "") -> str:
        """Return a value for a line of progress or a sentence: ``97.20%`` after a name, or the error after its own."""
        return f"{name}{value:.2%}" if self.is_share else f"{self.error} {1 - value:.4g}"

    def cells(self, value: float, balanced: float | None = None) -> dict[str, str]:
        """Return the cells of a table by their headings: the share, the balanced one if it is known, and the error."""
        shown = {self.name: self.show(value)} if self.is_share else {}
        if balanced is not None:
            shown["balanced"] = self.show(balanced)
        return shown | {self.error: self.show_error(1 - value)}

    def row(self, value: float) -> tuple[str, str]:
        """Return name and value as a row of a table."""
        name, unit = (self.name, "") if self.is_share else (self.error, f"  ({self.unit})")
        return name.capitalize(), f"{self.show(value)}{unit}"

    def show_error(self, error: float) -> str:
        """Return an error as a cell of a table: ``2.80 %``, or ``0.0312``."""
        return f"{100 * error:.2f} %" if self.is_share else f"{error:.4g}"

    def spread(self, errors: Sequence[float]) -> str:
        """Return the mean and the sample standard deviation of the errors of several seeds."""
        factor, unit = (100, " %") if self.is_share else (1, "")
        return f"{factor * statistics.mean(errors):.3f} ± {factor * statistics.stdev(errors):.3f}{unit}"

    def hub_value(self, error: float) -> float:
        """Return the value that the Hugging Face hub expects, from an error."""
        return 1 - error if self.is_share else error

    def errors(self, values: np.ndarray) -> np.ndarray:
        """Return what a curve draws: errors in percent, or in :attr:`unit`."""
        return (100 if self.is_share else 1) * (1 - values)


class Task(ABC):
    """What a network is trained for. A new task is a subclass, a name in :data:`TaskName` and an entry in ``TASKS``.

    Code elsewhere asks the task and never compares its name. Nothing here imports torch before a tensor exists, because
    ``predict`` runs ONNX files without torch.
    """

    name: ClassVar[TaskName]
    outputs: ClassVar[str]
    """What the J outputs of a network are, in the plural: ``"classes"``."""
    output: ClassVar[str]
    """One of them, at the head of a table."""
    min_outputs: ClassVar[int] = 1
    """Smallest number of outputs J."""
    needs: ClassVar[str]
    """The form of targets, as an error goes on after "labels must be"."""
    metric: ClassVar[Metric]
    analyses: ClassVar[frozenset[str]] = frozenset()
    """Commands, functions and export formats for a network of this task, besides :data:`ALWAYS`."""
    reads_poses: ClassVar[bool] = False
    """Whether outputs are numbers read from the poses of capsules, and not the lengths of capsules."""
    objects: int = 1
    """P, the number of objects in an image."""

    # ---- which analyses a network takes part in

    def supports(self, analysis: str) -> bool:
        """Return whether an analysis (a command, a function or an export format) works for this task."""
        return analysis in ALWAYS or analysis in self.analyses

    def require(self, analysis: str, purpose: str | None = None) -> None:
        """Raise InputError unless the task supports an analysis; ``purpose`` is the subject of the sentence."""
        if not self.supports(analysis):
            from torchcaps.tasks import TASKS

            able = " or ".join(each.name for each in TASKS.values() if each.supports(analysis))
            raise InputError(
                f"{purpose or analysis} works for the task {able}; this network was made for the task {self.name}"
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

    @property
    @abstractmethod
    def form(self) -> Any:
        """The annotation of targets in the task's form, such as ``Int64[Tensor, "N"]``."""

    @abstractmethod
    def has_form(self, targets: Tensor) -> bool:
        """Return whether a tensor is in the task's form already."""

    @abstractmethod
    def bring(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        """Convert targets of any form to the tensor that this task takes.

        Args:
            targets: A tensor, an array or a list, for all images of a set.
            num_outputs: J of the network that takes them; None if only the targets tell.
            where: The user's name for them, with which errors begin.
            class_names: Names by which texts are numbered; the sorted texts themselves if None.

        Raises:
            WrongType: Targets that are neither numbers nor texts.
            InputError: Targets that do not fit the task; the error names a task that they do fit.
        """

    @abstractmethod
    def guess(self, array: np.ndarray) -> bool:
        """Return whether targets from a file are of this task if nobody names a task."""

    @abstractmethod
    def names(self, targets: Any, where: str = "labels") -> tuple[str, ...]:
        """Return names of the outputs for the training targets of a set, of any form: their texts, or numbers from 0.

        Raises:
            InputError: The targets do not fit the task, or have no image of the first class.
        """

    @abstractmethod
    def num_outputs(self, targets: Tensor) -> int:
        """Return the smallest number of outputs that targets in form go with."""

    @abstractmethod
    def check_targets(self, targets: Tensor, num_outputs: int, where: str) -> None:
        """Raise InputError unless targets in form go with so many outputs."""

    def check_form(self, targets: Tensor, *, has_parts: bool = False) -> None:
        """Raise InputError unless the values of targets in form are possible.

        Args:
            targets: The targets.
            has_parts: Whether each object of each image is there alone, too.
        """
        if has_parts:
            raise InputError("parts are for images of several objects, whose labels have the shape (N, P)")

    def check_training(self, targets: Tensor, names: Sequence[str], where: str) -> None:  # noqa: B027  few need it
        """Raise InputError unless a network can learn every output from the training targets."""

    def check_labels(self, targets: Tensor, num_outputs: int, num_images: int) -> None:
        """Raise an error unless targets in form belong to the images that a network looks at."""
        if len(targets) != num_images:
            raise InputError(f"labels must be given for each of {num_images} images, got {len(targets)}")
        self.check_targets(targets, num_outputs, "labels")

    def strata(self, targets: Tensor) -> Int64[Tensor, "N"]:
        """Return the group of each image; random splits keep the share of each group."""
        return targets.new_zeros(len(targets)).long()

    statistics_names: ClassVar[tuple[str, ...]] = ("images",)
    """Headings of :meth:`statistics`."""

    @abstractmethod
    def statistics(self, targets: Tensor, num_outputs: int) -> list[Row]:
        """Return for each output what ``torchcaps datasets`` says of its targets, a number for each heading."""

    @abstractmethod
    def describe(self, names: Sequence[str], target: Any) -> str:
        """Return the target of one image in words."""

    def count(self, num_outputs: int) -> str:
        """Return a number of outputs in words: ``3 labels``, ``1 number``."""
        return f"{num_outputs} {self.output if num_outputs == 1 else self.outputs}"

    def count_words(self, num_outputs: int) -> str:
        """Return what a network predicts, as a sentence of its model card goes on after its images."""
        return f"with {self.count(num_outputs)}"

    @abstractmethod
    def limits(self, num_outputs: int) -> str:
        """Return what a model card says of images that the network was not made for."""

    # ---- training

    def buffers(self, num_outputs: int) -> dict[str, Tensor]:
        """Return tensors that a network keeps beside its weights."""
        return {}

    def fit_targets(self, network: Any, targets: Tensor | None) -> None:  # noqa: B027  few need it
        """Set the buffers of a network from the training targets (None if they are not known beforehand)."""

    @abstractmethod
    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        """Convert the last linear layer's numbers to scores."""

    @abstractmethod
    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        """Return the loss of a batch, without the reconstruction.

        Args:
            output: A ``ModelOutput``.
            targets: Targets in form, or what the loss of classes takes.
            network: A capsule network, whose ``classification_loss`` takes the scores; or a network with logits.
        """

    @abstractmethod
    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the metric of each image."""

    @abstractmethod
    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        """Return the classes (B,) or rows (B, J) of the capsules that a decoder draws from; None for all capsules."""

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        """Return the metric of the best answer that is the same for all images, and its standard error.

        None if there is none to compare with.
        """
        return None

    def class_counts(self, targets: Tensor | None) -> Int64[Tensor, "J"] | None:
        """Return the number of images of each class; None if images have no class each, or targets are not known."""
        return None

    def class_weights(self, targets: Tensor | None) -> Float[Tensor, "J"] | None:
        """Return N / (J · N_j), by which all classes count the same; a class without images has 1.

        None if images have no class each, or targets are not known.

        Source: King, Zeng 2001, "Logistic regression in rare events data", and scikit-learn's ``class_weight``.
        """
        counts = self.class_counts(targets)
        if counts is None:
            return None
        return (counts.sum() / (len(counts) * counts.clamp_min(1))).masked_fill(counts == 0, 1.0)

    def images_per_class(self, num_images: int, num_outputs: int) -> float | None:
        """Return how many images a class has on average; None if images have no class each."""
        return None

    # ---- answers

    score_key: ClassVar[str] = "lengths"
    """Name of the scores in JSON."""
    answer_key: ClassVar[str]
    """Heading of the answers in CSV."""

    def score_name(self, output: Any) -> Any:
        """Return what the scores of a ``ModelOutput`` are: lengths, activations, probabilities or values."""
        return output.score_name

    def score_text(self, score: float) -> str:
        """Return a score of 0..1 for a table: a number and a bar."""
        return f"{score:.3f}  {bar(score)}"

    @abstractmethod
    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        """Return the answer for one image, in words; ``classes`` are those of the highest scores."""

    @abstractmethod
    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        """Return the same for JSON."""

    def write(self, path: Path, answers: Any) -> None:
        """Write the answers for image files (a ``PhotoAnswers``) to a path: as a table, a line for each file."""
        write_text(path, answers.to_csv())


class ColumnTask(Task):
    """Base class of tasks whose targets are rows (N, J): a column for each output."""

    means: ClassVar[tuple[str, ...]]
    """Columns of an evaluation's table of which the mean is shown."""
    axes: ClassVar[tuple[str, str]]
    """Names of the axes of an evaluation's figure."""
    figure_name: ClassVar[str]
    """Name of that figure in a run folder."""

    @property
    def form(self) -> Any:
        from jaxtyping import Float32
        from torch import Tensor

        return Float32[Tensor, "N J"]

    def has_form(self, targets: Tensor) -> bool:
        return targets.is_floating_point() and targets.ndim == 2 and self._fits(targets.cpu().numpy())

    def bring(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        import numpy as np
        import torch

        array = as_array(targets, where)
        rows = array[:, None] if array.ndim == 1 else array
        if array.dtype.kind not in "iufb" or rows.ndim != 2 or 0 in rows.shape or not self._fits(rows):
            raise InputError(f"{where} must be {self.needs}, got {found(array)}{advice(array, self)}")
        if num_outputs not in (None, rows.shape[1]):
            raise InputError(f"{where} must have {num_outputs} columns, one for each output, got {rows.shape[1]}")
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        if not np.isfinite(narrow).all():
            raise InputError(f"{where} must be numbers that float32 can hold, got {abs(rows).max():.3g}")
        return torch.from_numpy(narrow)

    @abstractmethod
    def _fits(self, rows: np.ndarray) -> bool:
        """Return whether numbers have the values that this task takes."""

    def names(self, targets: Any, where: str = "labels") -> tuple[str, ...]:
        return tuple(map(str, range(self.bring(targets, None, where).shape[1])))

    def num_outputs(self, targets: Tensor) -> int:
        return targets.shape[1]

    def check_targets(self, targets: Tensor, num_outputs: int, where: str) -> None:
        if targets.shape[1:] != (num_outputs,):
            raise InputError(f"{where} must have {num_outputs} columns, one for each output, got {targets.shape[-1]}")
        if not self.has_form(targets):
            raise InputError(f"{where} must be {self.needs}, got {found(targets.cpu().numpy())}")

    @abstractmethod
    def row(self, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
        """Return the row of an evaluation's table for one output."""

    @abstractmethod
    def draw(self, axes: Any, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"], name: str) -> None:
        """Draw one output into the axes of an evaluation's figure."""


def bar(share: float, width: int = 30) -> str:
    """A horizontal bar: ``share`` 0..1 of ``width`` characters, to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def as_array(values: Any, where: str) -> np.ndarray:
    """Return a list, an array or a tensor as an array of numbers, booleans or texts.

    Raises:
        WrongType: Something else; the error begins with ``where``.
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


def found(array: np.ndarray) -> str:
    """Return the dtype and the shape of targets, as the end of an error."""
    return f"{array.dtype} in the shape {shown(array.shape)}"


def advice(array: np.ndarray, task: Task) -> str:
    """Return the end of an error about targets that do not fit a task: the tasks that they do fit."""
    from torchcaps.tasks import TASKS

    others = [f'task="{each.name}" (--task {each.name})' for each in TASKS.values() if each.guess(array)]
    return f"; set {' or '.join(others)}" if others and not task.guess(array) else ""
