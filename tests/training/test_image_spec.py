"""The description of a network's images, as files hold it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchcaps.analysis.calibration import Calibration
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError
from torchcaps.files import write_json
from torchcaps.models import create_model
from torchcaps.training.image_spec import MAX_IMAGE_VALUES, ImageSpec
from torchcaps.training.load import _read_spec

PLAIN = ImageSpec(in_shape=(1, 28, 28), class_names=("a", "b", "c"))
FULL = dataclasses.replace(
    PLAIN,
    objects=2,
    fit="stretch",
    preparation=Preparation(box=10.0, centre="box"),
    calibration=Calibration(score=0.7, error=3.5, images=100),
    scale=(-100.0, 400.0),
    pca=((0.5, 1.0), (1.0, 0.0)),
    are_pixels=False,
)


@pytest.mark.parametrize(
    "spec",
    [PLAIN, FULL, dataclasses.replace(PLAIN, task="regression", class_names=("angle",))],
    ids=["defaults", "all fields", "regression"],
)
def test_json_keeps_every_field(spec: ImageSpec) -> None:
    assert ImageSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_missing_entries_take_defaults_and_unknown_ones_are_ignored() -> None:
    assert ImageSpec.from_dict({"in_shape": [1, 28, 28], "class_names": ["a", "b", "c"], "more": 1}) == PLAIN
    older = FULL.to_dict() | {"calibration": {"score": 0.7, "images": 100}}
    assert ImageSpec.from_dict(older).calibration == Calibration(score=0.7, images=100)


@pytest.mark.parametrize("name", ["in_shape", "class_names"])
def test_a_file_must_have_shape_and_names(name: str) -> None:
    values = {key: each for key, each in PLAIN.to_dict().items() if key != name}
    with pytest.raises(InputError, match=name):
        ImageSpec.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_shape", (28, 28)),
        ("in_shape", (1, 0, 28)),
        ("in_shape", (1, 28, 28.5)),
        ("in_shape", (1, MAX_IMAGE_VALUES, 2)),
        ("in_shape", "abc"),
        ("class_names", ()),
        ("class_names", ("a",)),
        ("class_names", ("a", 1)),
        ("class_names", "ab"),
        ("scale", (1.0,)),
        ("scale", (2.0, 1.0)),
        ("scale", "auto"),
        ("objects", 0),
        ("pca", 3),
        ("pca", ()),
        ("pca", ((0.5, 1.0),)),
        ("pca", ((0.5, 1.0), (1.0,))),
        ("pca", ((0.5, math.nan), (1.0, 0.0))),
        ("pca", ((), ())),
        ("pca", ((0.5, 1.0), "ab")),
        ("are_pixels", None),
        ("objects", 4),
        ("objects", 1.5),
        ("fit", "crop"),
        ("preparation", {"box": 3}),
        ("calibration", 0.5),
        ("task", "dreams"),
        ("task", ["classes"]),
    ],
)
def test_values_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        dataclasses.replace(PLAIN, **{name: value})
    with pytest.raises(InputError, match=name):
        ImageSpec.from_dict(PLAIN.to_dict() | {name: value})


@pytest.mark.parametrize(
    ("data", "names", "has_names"),
    [
        ("npz:a.npz", ["0", "1"], False),
        ("npz:a.npz", ["cat", "dog"], True),
        ("folder:photos", ["0", "1"], True),
        ("mnist", ["0", "1"], True),
        (None, ["0", "1"], True),
    ],
)
def test_numbers_of_an_array_are_no_names_in_files_that_do_not_say_so(
    tmp_path: Path, data: str | None, names: list[str], has_names: bool
) -> None:
    model = create_model("compact-shared", (1, 20, 20), 2)
    file = tmp_path / "classes.json"
    write_json(file, {"class_names": names})
    assert _read_spec(file, model, data).has_names == has_names
    write_json(file, {"class_names": names, "has_names": not has_names})
    assert _read_spec(file, model, data).has_names != has_names
