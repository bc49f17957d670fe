"""Base class of tasks with a column of targets for each output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchcaps.errors import InputError
from torchcaps.tasks.base import Task, advice, as_array, form_words
from torchcaps.words import counted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class ColumnTask(Task):
    """Base class of tasks with targets in rows (N, J), a column for each output."""

    form = ("Float32", "N J")
    evaluation = "torchcaps.analysis.targets"
    columns: ClassVar[str]
    """Class in that module that computes the table and draws the figure of an evaluation."""

    def has_form(self, targets: Tensor) -> bool:
        return targets.is_floating_point() and targets.ndim == 2 and self._fits(targets.cpu().numpy())

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
        rows = array[:, None] if array.ndim == 1 else array
        if array.dtype.kind not in "iufb" or rows.ndim != 2 or 0 in rows.shape or not self._fits(rows):
            raise InputError(f"{where} must be {self.needs}, got {form_words(array)}{advice(array, self)}")
        if num_outputs not in (None, rows.shape[1]):
            raise InputError(
                f"{where} must have {counted(num_outputs, 'column')}, one for each output, got {rows.shape[1]}"
            )
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        if not np.isfinite(narrow).all():
            raise InputError(f"{where} must be numbers within the range of float32, got {abs(rows).max():.3g}")
        return torch.from_numpy(narrow)

    @abstractmethod
    def _fits(self, rows: np.ndarray) -> bool:
        """Return True if the numbers have values that this task takes."""

    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        return tuple(map(str, range(self.convert_targets(targets, None, where).shape[1])))

    def renumbering(self, numbers: Sequence[int], names: Sequence[str], where: str) -> Callable[[Tensor], Tensor]:
        if absent := [name for j, name in enumerate(names) if j not in numbers]:
            self._check_absent(absent, where)

        def renumber(targets: Tensor) -> Tensor:
            renumbered = targets.new_zeros(len(targets), len(names))
            renumbered[:, list(numbers)] = targets
            return renumbered

        return renumber

    @abstractmethod
    def _check_absent(self, names: Sequence[str], where: str) -> None:
        """Raise InputError, or warn, because a data set has no targets for these outputs of a network."""

    def check_targets(
        self, targets: Tensor, num_outputs: int | None = None, where: str = "labels", num_images: int | None = None
    ) -> None:
        super().check_targets(targets, num_outputs, where, num_images)
        if num_outputs is None:
            return
        if targets.shape[1:] != (num_outputs,):
            raise InputError(
                f"{where} must have {counted(num_outputs, 'column')}, one for each output, got {targets.shape[-1]}"
            )
        if not self.has_form(targets):
            raise InputError(f"{where} must be {self.needs}, got {form_words(targets.cpu().numpy())}")
