"""Several evaluations together are the evaluation of all their images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pixel_support import TinyPixels, disc_set
from support import assert_raises, small
from torchcaps.analysis import evaluate
from torchcaps.analysis.pooled import PooledEvaluation, pooled
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import create_model
from torchcaps.tasks import TASKS, find_task

CNN: Any = {"channels": (4,), "hidden": (8,), "pool": 2, "dropout": 0.0}
IMAGES = torch.randint(256, (20, 1, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = {
    "classes": torch.arange(20) % 3,
    "labels": (torch.arange(60).view(20, 3) % 4 == 0).float(),
    "regression": torch.arange(60).view(20, 3) / 30,
    "ordinal": torch.arange(20) % 3,
}


def case(task: str) -> tuple[Any, ImageSet]:
    torch.manual_seed(0)
    if task == "pixels":
        return TinyPixels((1, 24, 20), 3), disc_set(20)
    if task == "objects":
        return create_model("slots-small", (1, 24, 20), 3, **small("slots-small")), disc_set(20)
    return create_model("baseline-cnn", (1, 12, 12), 3, task=task, **CNN), ImageSet(IMAGES, LABELS[task])


@pytest.mark.parametrize("task", TASKS)
def test_parts_together_are_the_whole(task: str) -> None:
    model, images = case(task)
    parts = [evaluate(model, images.select(index)) for index in (torch.arange(13), torch.arange(13, 20))]
    whole, joined = evaluate(model, images).to_dict(), pooled(parts).to_dict()
    assert_same(joined, whole)
    networks = {"one": parts[0], "two": parts[1]}
    result = PooledEvaluation(
        networks, dict.fromkeys(networks, "images"), find_task(task), [{"run": "a"}, {"run": "b"}]
    )
    values = result.to_dict()
    assert_same(values["pooled"], whole)
    assert values["runs"] == [{"run": name, **part.to_dict()} for name, part in zip("ab", parts, strict=True)]
    accuracies = [part.accuracy for part in parts]
    assert values["mean"]["accuracy"] == pytest.approx(np.mean(accuracies))
    assert values["sd"]["accuracy"] == pytest.approx(np.std(accuracies, ddof=1))
    assert "one" in str(result.tables()[0].rows)
    assert result.figures()


@pytest.mark.parametrize("with_records", [0, 1])
def test_records_of_one_run_only_are_not_joined(with_records: int) -> None:
    """Labels of windows may be the same in all windows of each record of one fold, and differ in another."""
    model, images = case("classes")
    runs = [evaluate(model, images.select(index)) for index in (torch.arange(13), torch.arange(13, 20))]
    runs[with_records] = replace(runs[with_records], records=runs[0])  # type: ignore[type-var]
    assert pooled(runs).records is None
    assert pooled([replace(each, records=each) for each in runs]).records.num_images == 20  # type: ignore[type-var]


def assert_same(joined: Any, whole: Any) -> None:
    """Equal values; floats up to rounding, for means over parts are rounded once more."""
    if isinstance(whole, dict):
        assert joined.keys() == whole.keys()
        for name in whole:
            assert_same(joined[name], whole[name])
    elif isinstance(whole, list):
        for one, other in zip(joined, whole, strict=True):
            assert_same(one, other)
    else:
        assert joined == (pytest.approx(whole, rel=1e-5) if isinstance(whole, float) else whole)


def test_what_cannot_be_joined() -> None:
    first = evaluated("classes")
    for other in (replace(first, class_names=("a", "b", "c")), evaluated("labels")):
        assert_raises(InputError, pooled, [first, other], say="the networks differ in task or classes")


def evaluated(task: str) -> Any:
    model, images = case(task)
    return evaluate(model, images)
