"""What a file says of its network survives, and what is not ours is refused."""

from __future__ import annotations

import dataclasses

import pytest

from support import assert_raises
from torchcaps.analysis import Calibration
from torchcaps.datasets import Preparation
from torchcaps.errors import InputError
from torchcaps.export import Description

FULL = Description(
    in_shape=(3, 32, 28),
    class_names=("Katze", "犬"),
    preset="sabour2017",
    objects=2,
    fit="stretch",
    preparation=Preparation(box=22.5),
    calibration=Calibration(score=0.7, error=30.0, images=50),
    version="0.0.1",
)
LATER = ("torchcaps.preparation", "torchcaps.calibration", "torchcaps.task")


def test_round_trip() -> None:
    for description in (FULL, Description(in_shape=(1, 9, 9), class_names=("a", "b"))):
        metadata = description.to_metadata()
        assert all(isinstance(value, str) and name.startswith("torchcaps.") for name, value in metadata.items())
        assert Description.from_metadata(metadata | {"author": "somebody"}) == description


WRONG = {
    "in_shape": ["[1, 28]", "[1, 28, 0]", "[true, 28, 28]", "[1.0, 28, 28]", "[1, 65000, 65000]"],
    "class_names": ['["one"]', "[1, 2]", "[" * 100_000 + "]" * 100_000, "[" + "1," * 10_000 + "1]"],
    "preset": ["7"],
    "objects": ["0", "true", "3", "9" * 5000],
    "fit": ['"crop"', "{not json"],
    "version": ["1"],
}


def test_entries_that_do_not_fit_or_are_missing() -> None:
    metadata = FULL.to_metadata()
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(InputError) as caught:
                Description.from_metadata(metadata | {f"torchcaps.{name}": value})
            assert str(caught.value).startswith(f"its entry torchcaps.{name} ")
            assert len(str(caught.value)) < 200
    for name in metadata.keys() - LATER:
        left = {each: value for each, value in metadata.items() if each != name}
        assert_raises(InputError, Description.from_metadata, left, say=f"it has no entry {name}")


def test_files_of_earlier_versions_say_less() -> None:
    metadata = {name: value for name, value in FULL.to_metadata().items() if name not in LATER}
    assert Description.from_metadata(metadata) == dataclasses.replace(FULL, preparation=None, calibration=None)
    relative = FULL.to_metadata() | {"torchcaps.calibration": '{"score": 0.7, "distance": 0.3, "images": 50}'}
    assert Description.from_metadata(relative).calibration == Calibration(score=0.7, images=50)
    for name in LATER:
        for value in ("7", "[]", "{}", '"mnist"', '{"box": "20", "centre": "mass"}'):
            with pytest.raises(InputError) as caught:
                Description.from_metadata(metadata | {name: value})
            assert len(str(caught.value)) < 200
