"""A new task is a class and an evaluation, two files, and no change elsewhere: key points, as an example."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support import registered_for_now
from torchcaps.analysis import evaluate
from torchcaps.analysis.collector import ScoreCollector, TaskEvaluation
from torchcaps.analysis.results import Table
from torchcaps.cli.datasets import statistics_to_dict
from torchcaps.datasets import BatchLoader, Dataset, ImageSet, Splits, load_dataset, register_dataset
from torchcaps.errors import InputError
from torchcaps.models import Losses, ModelOutput, Network
from torchcaps.tasks import TASKS, find_task, guess_task, task_of_targets
from torchcaps.tasks.base import Metric, Task, as_array, form_words
from torchcaps.training import Progress, Recipe, fit

SIDE = 6
MAX_MEMBERS = 41
"""Public members of a task, which whoever adds one has to read."""


class Points(Task):
    """Places of J points in an image: float32 (N, J, 2), as shares of its height and width."""

    name, form = "points", ("Float32", "N J 2")
    output = "point"
    needs = "numbers (N, J, 2), the row and column of each point"
    metric = Metric("1 − distance", "distance", "sides of the image", False)
    evaluation = "points_evaluation"

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        array = as_array(targets, where)
        if not self.could_be(array):
            raise InputError(f"{where} must be {self.needs}, got {form_words(array)}")
        return torch.from_numpy(array.astype(np.float32))

    def could_be(self, array: np.ndarray) -> bool:
        return array.dtype.kind == "f" and array.ndim == 3

    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        return tuple(map(str, range(self.convert_targets(targets, None, where).shape[1])))

    def check_targets(
        self,
        targets: Tensor,
        num_outputs: int | None = None,
        where: str = "labels",
        num_images: int | None = None,
    ) -> None:
        super().check_targets(targets, num_outputs, where, num_images)
        if num_outputs not in (None, targets.shape[1]):
            raise InputError(f"{where} must have {num_outputs} points")

    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        return dict(zip(("row", "column"), targets.mean(0).T.tolist(), strict=True))

    def describe(self, names: Sequence[str], target: Any) -> str:
        return ", ".join(f"{name} {y:.1f} {x:.1f}" for name, (y, x) in zip(names, target.tolist(), strict=True))

    def activate(self, logits: Tensor, network: Any) -> Tensor:
        return logits.sigmoid()

    def loss(self, output: Any, targets: Tensor, network: Any) -> Tensor:
        return (output.scores - targets).square().mean()

    def score(self, scores: Tensor, targets: Tensor, network: Any = None) -> Tensor:
        return 1 - (scores - targets).norm(dim=2).mean(1)

    def decoded_capsules(self, scores: Tensor, targets: Tensor | None) -> Tensor | None:
        return None


@dataclass(frozen=True, eq=False)
class PointsEvaluation(TaskEvaluation):
    """Mean distance of the points, the second file of the task."""

    distances: np.ndarray
    loss: float
    class_names: tuple[str, ...]
    title: str = ""
    figure_name: ClassVar[str] = "points"

    @property
    def num_images(self) -> int:
        return len(self.distances)

    @property
    def accuracy(self) -> float:  # type: ignore[override]  # a field of the base class
        return 1 - float(self.distances.mean())

    def tables(self) -> list[Table]:
        return [
            Table([[name, f"{each:.3f}"] for name, each in zip(self.class_names, self.distances.mean(0), strict=True)])
        ]


class PointsCollector(ScoreCollector):
    def result(self, loss: float) -> PointsEvaluation:
        distances = (torch.cat(self._scores) - torch.cat(self._targets)).norm(dim=2)
        return PointsEvaluation(distances.numpy(), loss, self.class_names)


class PointsNetwork(Network):
    """A linear layer for the coordinates."""

    per_pixel = False

    def __init__(self, in_shape: Sequence[int], num_classes: int, *, objects: int = 1, task: Any = "points") -> None:
        super().__init__(in_shape, num_classes, objects)  # a test cannot add a name to TaskName
        self.task = task
        self.layers, self.decoder = nn.ModuleList(), None
        self.linear = nn.Linear(int(np.prod(in_shape)), 2 * num_classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> ModelOutput:
        logits = self.linear(images.flatten(1)).unflatten(1, (-1, 2))
        return ModelOutput(TASKS["points"].activate(logits, self), logits=logits)

    def loss(self, output: ModelOutput, images: Tensor, targets: Tensor) -> Losses:
        loss = TASKS["points"].loss(output, targets, self)
        return Losses(loss, loss)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    """The task, its evaluation, and a data set of it: the first and the last bright pixel."""
    monkeypatch.setitem(TASKS, "points", Points())
    module = ModuleType("points_evaluation")
    module.TaskCollector = PointsCollector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "points_evaluation", module)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, SIDE, SIDE), dtype=torch.uint8, generator=random)
    train = ImageSet(images, places(images))
    with registered_for_now():
        register_dataset("points", title="Points", source="here", licence="none")(
            lambda _: Splits(train, None, ("first", "last"))
        )
        yield load_dataset("points")


def places(images: Tensor) -> Tensor:
    bright = [(image[0] > 127).nonzero() for image in images]
    return torch.stack([torch.stack([each[0], each[-1]]) for each in bright]) / SIDE


def test_a_task_has_few_members() -> None:
    members = {name for name in {**vars(Task), **Task.__annotations__} if not name.startswith("_")}
    assert len(members) <= MAX_MEMBERS, sorted(members)
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]


def test_a_data_set_of_a_new_task_is_split_counted_and_read(points: Dataset) -> None:
    assert (points.task.name, points.num_objects, points.in_shape) == ("points", 1, (1, SIDE, SIDE))
    assert task_of_targets(points.test.labels) is guess_task(points.test.labels) is TASKS["points"]
    (batch,) = BatchLoader(points.validation, 40, shuffle=False).batches(0)
    assert batch.labels.equal(places((batch.images * 255).round()))
    assert len(statistics_to_dict(points.test, points)) == 2
    assert points.task.describe(points.class_names, points.test.labels[0]).startswith("first 0.")


def test_other_tasks_refuse_its_targets_and_it_refuses_other_analyses(points: Dataset) -> None:
    for name in ("classes", "labels", "regression", "pixels"):
        with pytest.raises(InputError, match=r'set task="points" \(--task points\)'):
            find_task(name).convert_targets(points.test.labels + 0.25)
    with pytest.raises(
        InputError, match="works for the task classes or ordinal; this network was trained for the task points"
    ):
        points.task.require("routing")
    assert points.task.supports("evaluate")
    with pytest.raises(InputError, match="objects must be 1 for the task points, got 2"):
        points.task.with_objects(2)


def test_a_network_of_a_new_task_is_trained_and_evaluated(points: Dataset) -> None:
    torch.manual_seed(0)
    network = PointsNetwork(points.in_shape, 2)
    recipe = Recipe(epochs=30, batch_size=14, learning_rate=0.02)
    rows = fit(network, points, recipe, progress=Progress())
    assert rows[-1]["train_accuracy"] > rows[0]["train_accuracy"]
    result = evaluate(network, points.test, class_names=points.class_names)
    assert isinstance(result, PointsEvaluation)
    with torch.no_grad():
        scores = network(points.test.images / 255).scores
    assert result.accuracy == pytest.approx(float(TASKS["points"].score(scores, points.test.labels).mean()))
    assert (result.error, result.warning) == (pytest.approx(1 - result.accuracy), None)
    assert [row[0] for row in result.titled("points").tables()[0].rows] == ["first", "last"]
    for other in ("routing", "robustness"):
        with pytest.raises(InputError, match=f"{other} works for the task classes or ordinal"):
            TASKS["points"].require(other)
