"""The task ``classes``: the class of each image, or the classes of the P objects in each image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.files import composed
from torchcaps.ranges import SEVERAL
from torchcaps.tasks.base import Metric, Task, advice, as_array, form_words
from torchcaps.words import counted

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int64
    from torch import Tensor


MAX_NUMBER = 2**20
"""Limit of class numbers in targets that do not have all classes."""


class Classes(Task):
    """Task with one class per image: int64 (N,), from 0.

    Converted to this form: class numbers of any integer dtype, as floats or in a column (N, 1), booleans, one-hot rows
    (N, J), and texts. Other rows (N, J) of 0..1, such as the shares of mixed images, stay rows.
    """

    name, form = "classes", ("Int64", "N")
    output, output_range = "class", SEVERAL
    needs = "whole numbers from 0, the class of each image, (N,), or one-hot rows (N, J)"
    metric = Metric("accuracy", "error", "% of the images")
    analyses = frozenset(
        {
            *("routing", "perturb", "reconstruct", "robustness", "probe", "detect", "explore"),
            *(".onnx", ".pt2", "calibrate", "classifier"),
        }
    )

    def with_objects(self, objects: int) -> Task:
        return self if objects == self.objects else Objects(objects) if objects > 1 else Classes()

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        import numpy as np
        import torch

        original = array = as_array(targets, where)
        is_text = array.dtype.kind in "US"
        if is_text:
            array = _numbered(array, where, class_names, self.in_order)
        elif is_one_hot(array) and num_outputs in (None, array.shape[1]):
            array = array.argmax(1)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim == 2 and array.shape[1] == num_outputs and array.dtype.kind in "iufb" and not is_text:
            rows = array.astype(np.float32)  # several classes per image, or the shares of mixed images
            if not ((rows >= 0) & (rows <= 1)).all():
                raise InputError(f"{where} in rows must lie in 0..1, got {array.min():g}..{array.max():g}")
            return torch.from_numpy(rows)
        is_whole = array.dtype.kind in "iub"
        if array.dtype.kind == "f" and array.size:
            is_whole = bool(np.isfinite(array).all() and (array == np.floor(array)).all())
        if not is_whole or not self._has_objects(array):
            raise InputError(f"{where} must be {self.needs}, got {form_words(original)}{advice(original, self)}")
        if array.size:
            highest = int(array.max())
            _check_range(int(array.min()), highest, num_outputs, where)
            if num_outputs is None and highest >= max(array.size, 2):
                raise InputError(
                    f"{where} has the label {highest}, but labels count from 0, and {len(array)} images can have at "
                    f"most {len(array)} classes"
                )
        return torch.from_numpy(array.astype(np.int64))

    def _has_objects(self, array: np.ndarray) -> bool:
        return array.ndim == 1

    def could_be(self, array: np.ndarray) -> bool:
        is_column = array.ndim == 1 or array.shape[1:] == (1,)
        return (array.dtype.kind in "iuUS" and is_column) or is_one_hot(array)

    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        import numpy as np

        array = as_array(targets, where)
        if array.dtype.kind in "US":
            return self.in_order(np.unique(_decoded(array, where)).tolist(), where)
        if is_one_hot(array):
            return tuple(map(str, range(array.shape[1])))
        numbers = self.convert_targets(array, None if complete else MAX_NUMBER, where)
        least, highest = int(numbers.min()), int(numbers.max())
        if least > 0 and complete:
            raise InputError(
                f"{where} has labels from {least} to {highest}, but classes are counted from 0; subtract {least}"
            )
        return tuple(map(str, range(highest + 1)))

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        from jaxtyping import Int
        from torch import Tensor

        from torchcaps.checks import check

        check(where, targets, Int[Tensor, "..."])
        objects = self.objects
        if num_images is not None and targets.shape != ((num_images,) if objects == 1 else (num_images, objects)):
            shape = f"({num_images},), one" if objects == 1 else f"({num_images}, {objects}), {objects}"
            seen = f"because the network finds {objects} in it, got {tuple(targets.shape)}"
            raise InputError(f"{where} must have shape {shape} for each image, {seen}")
        _check_range(int(targets.min()), int(targets.max()), num_outputs, where)

    def check_training(self, targets: Tensor, names: Sequence[str], where: str) -> None:
        present = set(targets.unique().tolist())
        missing = [name for number, name in enumerate(names) if number not in present]
        if len(names) < self.output_range.least:
            raise InputError(f"{where} has only the {self.output} {names[0]}; at least two are needed")
        if len(names) > self.output_range.most:
            raise InputError(
                f"{where} has {counted(len(names), self.output)}, but the task {self.name} takes at most "
                f'{self.output_range.most}; join some, or set task="regression" (--task regression)'
            )
        if missing:
            are_numbers = list(names) == list(map(str, range(len(names))))
            raise InputError(
                f'{where}: the {self.output} "{missing[0]}" is in none of '
                f"{counted(len(targets), 'training image')}; use more training images"
                f"{', or number the classes without gaps' if are_numbers else ''}"
            )

    def strata(self, targets: Tensor) -> Int64[Tensor, "N"]:
        return targets.view(len(targets), -1)[:, 0]  # with several objects, the class of the first

    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        return {"images": targets.flatten().bincount(minlength=num_outputs).tolist()}

    def describe(self, names: Sequence[str], target: Any) -> str:
        return " + ".join(names[int(j)] for j in target.reshape(-1))

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        return logits.softmax(-1)

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        from torchcaps.ops.losses import multi_hot

        rows = self._rows(output.scores, targets)
        if output.logits is None:
            value: Tensor = network.classification_loss(output.scores, rows)
            return value
        return self._cross_entropy(output.logits, multi_hot(output.scores, rows))

    def _rows(self, scores: Float[Tensor, "B J"], targets: Tensor) -> Tensor:
        return targets

    def _cross_entropy(self, logits: Float[Tensor, "B J"], present: Float[Tensor, "B J"]) -> Float[Tensor, ""]:
        """Return the softmax cross-entropy; the classes of a multi-hot row share the probability."""
        import torch.nn.functional as F

        return F.cross_entropy(logits, present / present.sum(-1, keepdim=True).clamp_min(1))

    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return 1 for an image whose class has the highest score, otherwise 0."""
        from torchcaps.ops.labels import is_correct

        if scores.ndim != 2:
            raise InputError(
                f"the accuracy of classes needs scores (B, J), but they are {tuple(scores.shape)}; for a class of each "
                'pixel, set task="pixels"'
            )
        return is_correct(scores, targets).to(scores.dtype)

    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        return self.predict_classes(scores) if targets is None else targets

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        """Return the accuracy of predicting the most frequent class for every image, and its standard error.

        If p of the N images have this class, the accuracy is p and its standard error √(p·(1 − p) / N). The balanced
        accuracy is p = 1/J, with a standard error of √(p·(1 − p)·Σ_j 1/N_j) / J over the J classes with images. None
        if all images have the same class.
        """
        counts = targets.bincount().double()
        counts = counts[counts > 0]
        if len(counts) < 2:
            return None
        share, scale = float(counts.max()) / len(targets), 1 / len(targets)
        if balanced:
            share, scale = 1 / len(counts), float((1 / counts).sum()) / len(counts) ** 2
        return share, math.sqrt(share * (1 - share) * scale)

    def class_counts(self, targets: Tensor) -> Int64[Tensor, "J"] | None:
        # images of several objects are composed of images of one object, whose classes are counted
        return targets.bincount() if targets.ndim == 1 else None

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        return {"classes": answer} if len(answer) > 1 else {"class": "".join(answer)}


class Objects(Classes):
    """Task with the classes of the P objects in each image, all different: int64 (N, P)."""

    form = ("Int64", "N P")
    needs = "whole numbers from 0, the different classes of the objects in each image, (N, P)"

    def __init__(self, objects: int) -> None:
        self.objects = objects

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        super().check_targets(targets, num_outputs, where, num_images)
        if targets.ndim == 1:  # objects of images that are composed in training
            return
        ordered = targets.sort(1).values
        alike = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        if targets.shape[1] < 2 or alike.any():
            labels = targets[int(alike.int().argmax())].tolist()
            raise InputError(f"an image must have at least two labels, all different, got {labels}")

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        array = as_array(targets, where)
        if array.ndim == 2 and array.shape[1] == num_outputs and array.dtype.kind in "iufb":
            if not ((array == 0) | (array == 1)).all() or (array.sum(1) != self.objects).any():
                raise InputError(f"{where} in rows must be zeros and {self.objects} ones for each image, got others")
            targets = array.nonzero()[1].reshape(len(array), self.objects)
        return super().convert_targets(targets, num_outputs, where, class_names)

    def _has_objects(self, array: np.ndarray) -> bool:
        import numpy as np

        return array.ndim == 2 and not (np.diff(np.sort(array, 1), axis=1) == 0).any()

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        return logits.sigmoid()

    def predict_classes(self, scores: Any) -> Any:
        if not hasattr(scores, "detach"):  # an array, for use without torch
            return (-scores).argsort(axis=1, kind="stable")[:, : self.objects]
        from torchcaps.ops.labels import top_classes

        return top_classes(scores, self.objects)

    def _rows(self, scores: Float[Tensor, "B J"], targets: Tensor) -> Tensor:
        from torchcaps.ops.labels import label_rows

        return label_rows(scores, targets, self.objects)

    def _cross_entropy(self, logits: Float[Tensor, "B J"], present: Float[Tensor, "B J"]) -> Float[Tensor, ""]:
        from torchcaps.ops.labels import sigmoid_cross_entropy

        return sigmoid_cross_entropy(logits, present)

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        return None


def is_one_hot(array: np.ndarray) -> bool:
    """Return True if each row of an array consists of zeros and a single 1."""
    import numpy as np

    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "iufb":
        return False
    return bool(np.isin(array, (0, 1)).all() and (array.sum(1) == 1).all())


def _decoded(texts: np.ndarray, where: str) -> np.ndarray:
    import numpy as np

    try:
        texts = np.char.decode(texts, "utf-8") if texts.dtype.kind == "S" else texts
    except UnicodeDecodeError:
        raise InputError(f"{where} has texts that are not UTF-8") from None
    distinct, positions = np.unique(texts, return_inverse=True)
    return np.array(list(map(composed, distinct)), str)[positions.reshape(texts.shape)]


def _numbered(
    texts: np.ndarray, where: str, class_names: Sequence[str] | None, in_order: Callable[..., tuple[str, ...]]
) -> np.ndarray:
    """Return the number of each text among the class names."""
    import numpy as np

    distinct, positions = np.unique(_decoded(texts, where), return_inverse=True)
    names = in_order(distinct.tolist(), where) if class_names is None else list(class_names)
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [name for name in distinct.tolist() if name not in numbers]
    if unknown:
        raise InputError(f'{where} has the text "{unknown[0]}", which is not the name of a class')
    return np.array([numbers[name] for name in distinct.tolist()])[positions.reshape(texts.shape)]


def _check_range(least: int, highest: int, num_outputs: int | None, where: str) -> None:
    """Raise InputError unless class numbers lie in 0..J−1; without J, unless they are 0 or greater."""
    if least < 0:
        raise InputError(f"{where} must be 0 or greater, got {least}")
    if num_outputs is not None and highest >= num_outputs:
        hint = "; classes are counted from 0, so subtract 1" if least == 1 and highest == num_outputs else ""
        raise InputError(f"{where} must be in 0..{num_outputs - 1}, got {least}..{highest}{hint}")
