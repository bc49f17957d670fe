"""A task that is not there yet needs a class and an entry in TASKS, and no change elsewhere: masks, as an example."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from support import registered_for_now
from torchcaps.cli.datasets import statistics_to_dict
from torchcaps.datasets import BatchLoader, Dataset, ImageSet, Splits, load_dataset, register_dataset
from torchcaps.errors import InputError
from torchcaps.tasks import TASKS, find_task, guess_task, task_of_targets
from torchcaps.tasks.base import Metric, Task, as_array, found

SIDE = 6


class Pixels(Task):
    """The class of each pixel: uint8 (N, H, W)."""

    name: ClassVar[Any] = "pixels"
    outputs, output, min_outputs, answer_key = "classes", "class", 2, "mask"
    needs = "masks (N, H, W), whole numbers from 0"
    metric = Metric("Dice", "1 − Dice", "of the pixels")

    @property
    def form(self) -> Any:
        return UInt8[Tensor, "N h w"]

    def has_form(self, targets: Tensor) -> bool:
        return targets.dtype == torch.uint8 and targets.ndim == 3

    def bring(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        array = as_array(targets, where)
        if not self.guess(array):
            raise InputError(f"{where} must be {self.needs}, got {found(array)}")
        return torch.from_numpy(array.astype(np.uint8))

    def guess(self, array: np.ndarray) -> bool:
        return array.dtype.kind in "iu" and array.ndim == 3

    def names(self, targets: Any, where: str = "labels") -> tuple[str, ...]:
        return tuple(map(str, range(self.num_outputs(self.bring(targets, None, where)))))

    def num_outputs(self, targets: Tensor) -> int:
        return int(targets.max()) + 1

    def check_targets(self, targets: Tensor, num_outputs: int, where: str) -> None:
        if self.num_outputs(targets) > num_outputs:
            raise InputError(f"{where} has a class beyond {num_outputs - 1}")

    def statistics(self, targets: Tensor, num_outputs: int) -> list[Any]:
        return [(n,) for n in targets.flatten().bincount(minlength=num_outputs).tolist()]

    def describe(self, names: Sequence[str], target: Any) -> str:
        return " + ".join(names[j] for j in target.unique().tolist())

    def limits(self, num_outputs: int) -> str:
        return f"It knows {num_outputs} classes."

    def activate(self, logits: Tensor, network: Any) -> Tensor:
        return logits.softmax(1)

    def loss(self, output: Any, targets: Tensor, network: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(output.logits, targets.long())

    def score(self, scores: Tensor, targets: Tensor, network: Any = None) -> Tensor:
        return (scores.argmax(1) == targets).float().mean((1, 2))

    def decoded_capsules(self, scores: Tensor, targets: Tensor | None) -> Tensor | None:
        return None

    def answer(self, names: Sequence[str], scores: Any, classes: Sequence[int]) -> list[str]:
        return [names[j] for j in classes]

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        return {"classes": answer}


@pytest.fixture
def pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    """The task, and a data set of it."""
    monkeypatch.setitem(TASKS, "pixels", Pixels())
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, SIDE, SIDE), dtype=torch.uint8, generator=random)
    train = ImageSet(images, images[:, 0] // 128)
    with registered_for_now():
        register_dataset("masks", title="Masks", source="here", licence="none")(
            lambda _: Splits(train, None, ("dark", "light"))
        )
        yield load_dataset("masks")


def test_a_data_set_of_a_new_task_is_split_counted_and_read(pixels: Dataset) -> None:
    assert (pixels.task.name, pixels.num_objects, pixels.in_shape) == ("pixels", 1, (1, SIDE, SIDE))
    assert task_of_targets(pixels.test.labels) is guess_task(pixels.test.labels) is TASKS["pixels"]
    (batch,) = BatchLoader(pixels.validation, 40, shuffle=False).batches(0)
    assert batch.labels.equal((batch.images[:, 0] * 255).round().div(128, rounding_mode="floor").to(torch.uint8))
    assert sum(statistics_to_dict(pixels.test, pixels)) == pixels.test.labels.numel()
    assert pixels.task.describe(pixels.class_names, pixels.test.labels[0]) == "dark + light"


def test_other_tasks_refuse_its_targets_and_it_refuses_other_analyses(pixels: Dataset) -> None:
    for name in ("classes", "labels", "regression"):
        with pytest.raises(InputError, match=r'set task="pixels" \(--task pixels\)'):
            find_task(name).bring(pixels.test.labels)
    with pytest.raises(InputError, match="works for the task classes; this network was trained for the task pix"):
        pixels.task.require("routing")
    assert pixels.task.supports("evaluate")
    with pytest.raises(InputError, match="objects must be 1 for the task pixels, got 2"):
        pixels.task.with_objects(2)
