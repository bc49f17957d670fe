"""Tasks: the form of targets, their loss and metric, and the commands that work for them. One file for each task.

Nothing here imports torch when it is loaded, because ``predict`` runs ONNX files without torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from torchcaps.errors import InputError, unknown_name
from torchcaps.tasks.base import PRESENT, TASKS, Metric, Task, as_array, form_words
from torchcaps.tasks.classes import Classes, Objects
from torchcaps.tasks.labels import Labels
from torchcaps.tasks.objects import ObjectDiscovery
from torchcaps.tasks.ordinal import Ordinal
from torchcaps.tasks.regression import Regression
from torchcaps.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PRESENT",
    "TASKS",
    "Metric",
    "Objects",
    "Task",
    "TaskName",
    "any_form",
    "find_task",
    "guess_task",
    "task_of",
    "task_of_targets",
    "widest_task",
]

TASKS.update(
    (task.name, task) for task in (Classes(), Ordinal(), Labels(), Regression(), Segmentation(), ObjectDiscovery())
)
if TYPE_CHECKING:
    TaskName = str
    """Task of a network: the class of an image or the classes of its objects; its grade, one of several classes in
    order; several labels that an image may have, (B, L); numbers, (B, T); the class of each pixel, (B, H, W); or
    its objects, found without labels."""
else:
    TaskName = Literal[tuple(TASKS)]


def find_task(name: str | None, objects: int = 1) -> Task:
    """Return the task with a name, for images of one or several objects.

    Raises:
        InputError: No task has this name, or it takes images of one object only.
    """
    if name is None:
        name = next(iter(TASKS))
    if not isinstance(name, str) or name not in TASKS:
        raise unknown_name("task", str(name), TASKS)
    return TASKS[name].with_objects(objects)


def task_of(model: Any) -> Task:
    """Return the task of a network, or of its description; ``classes`` for any other module."""
    return find_task(getattr(model, "task", None), getattr(model, "objects", 1))


def task_of_targets(targets: Tensor) -> Task:
    """Return the first task whose form a tensor of targets has.

    Raises:
        InputError: No task has that form.
    """
    for task in (*TASKS.values(), Objects(max(targets.shape[-1], 2) if targets.ndim > 1 else 2)):
        if task.has_form(targets):
            return task
    raise InputError(f"labels must be {_forms()}; got {str(targets.dtype).partition('.')[2]} {tuple(targets.shape)}")


def widest_task(tasks: Iterable[Task]) -> Task:
    """Return the last of several tasks in the order of ``TASKS``, because zeros and ones may also be numbers."""
    order = list(TASKS)
    return max(tasks, key=lambda task: order.index(task.name))


def any_form() -> Any:
    """Return the annotation of targets in the form of any task."""
    import jaxtyping
    from torch import Tensor

    forms = (getattr(jaxtyping, task.form[0])[Tensor, task.form[1]] for task in (*TASKS.values(), Objects(2)))
    return functools.reduce(operator.or_, forms)


def guess_task(targets: Any, where: str = "labels") -> Task:
    """Guess the task from targets of any form; one-hot rows are ``classes``.

    Raises:
        InputError: No task takes these targets; the error begins with ``where``.
    """
    array = as_array(targets, where)
    for task in TASKS.values():
        if task.could_be(array):
            return task
    raise InputError(f"{where} must be {_forms()}; got {form_words(array)}")


def _forms() -> str:
    return "; or ".join(f"{each.needs} (task {each.name})" for each in TASKS.values())
