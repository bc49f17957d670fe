"""What a file says of its network survives, and what is not ours is refused."""

import json

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


def test_round_trip_and_files_of_earlier_versions_which_say_less() -> None:
    assert Description.from_metadata(FULL.to_metadata() | {"author": "somebody"}) == FULL
    least = Description(in_shape=(1, 9, 9), class_names=("a", "b"))
    for entry in (least.to_metadata(), {"torchcaps": json.dumps({"in_shape": [1, 9, 9], "class_names": ["a", "b"]})}):
        assert Description.from_metadata(entry) == least


WRONG: dict[str, list[object]] = {
    "in_shape": [[1, 28], [1, 28, 0], [True, 28, 28], [1.0, 28, 28], [1, 65000, 65000], None],
    "class_names": [["one"], [1, 2], [1] * 10_000, None],
    "preset": [7],
    "objects": [0, True, 3],
    "fit": ["crop"],
    "version": [1],
    "preparation": [7, [], {}, "mnist", {"box": "20", "centre": "mass"}],
    "calibration": [7, [], {}, "mnist"],
    "task": [7, [], {}, "mnist"],
}


def test_entries_that_do_not_fit_or_are_missing() -> None:
    for name, values in WRONG.items():
        for value in values:
            entry = json.dumps(FULL.to_dict() | {name: value})
            with pytest.raises(InputError) as caught:
                Description.from_metadata({"torchcaps": entry})
            assert str(caught.value).startswith("its entry torchcaps does not fit: ")
            assert len(str(caught.value)) < 250
    for entry, said in (
        ("{not json", "is not valid JSON"),
        ("9" * 5000, "is not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "is not valid JSON"),
        ("[1, 2]", "is not the description of a network"),
    ):
        assert_raises(InputError, Description.from_metadata, {"torchcaps": entry}, say=f"its entry torchcaps {said}")
    assert_raises(InputError, Description.from_metadata, {"author": "somebody"}, say="it has no entry torchcaps")
