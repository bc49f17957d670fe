"""Features without images: rows of numbers in .npz files and tables, which keep their values and their names."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_raises
from torchcaps.analysis import predict
from torchcaps.datasets import load_dataset
from torchcaps.datasets.features import read_rows
from torchcaps.datasets.loading import load_part
from torchcaps.datasets.user_data import Form, open_data
from torchcaps.errors import InputError
from torchcaps.models import create_model
from torchcaps.tasks import find_task

N, F = 48, 5
RANDOM = np.random.default_rng(0)
PATIENT = np.arange(N) % 12
VALUES = RANDOM.normal(size=(N, F)).astype(np.float32) * 100
VALUES[:, 0] = PATIENT
TARGETS: dict[str, Any] = {
    "classes": np.array(["a", "b", "c"])[PATIENT % 3],
    "ordinal": PATIENT % 3,
    "regression": PATIENT + 0.5,
    "labels": np.stack([PATIENT % 2, PATIENT % 3 == 0], 1).astype(np.int64),
}
LABELS = {"labels": [" |".join(["x"] * row[0] + ["y"] * row[1]).replace(" ", "") for row in TARGETS["labels"]]}


def by_npz(folder: Path, task: str) -> tuple[str, str]:
    np.savez(folder / "f.npz", features=VALUES, y=TARGETS[task], patient=PATIENT)
    return f"npz:{folder / 'f.npz'}", "patient"


def by_table(folder: Path, task: str) -> tuple[str, str]:
    rows = zip(PATIENT, LABELS.get(task, TARGETS[task]), VALUES.tolist(), strict=True)
    return write_table(
        folder / "f.csv", ["patient", "label"], [[f"P{who}", label, *values] for who, label, values in rows]
    )


def write_table(path: Path, columns: list[str], rows: list[list[Any]]) -> tuple[str, str]:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*columns, *(f"e{j}" for j in range(F))], *rows])
    return f"csv:{path}", "patient"


DOORS = [by_npz, by_table]


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("door", DOORS)
def test_features_keep_their_values_and_groups(door: Any, task: str, tmp_path: Path) -> None:
    spec, group = door(tmp_path, task)
    rows = {tuple(row): n for n, row in enumerate(VALUES.tolist())}
    tested = set[int]()
    for fold in (None, "1/3", "2/3", "3/3"):
        data = load_dataset(spec, task=task, group=group, fold=fold)  # type: ignore[arg-type]
        assert data.in_shape == (F, 1, 1)
        assert data.channels == (None if door is by_npz else tuple(f"e{j}" for j in range(F)))
        parts = dict[str, set[int]]()
        for part, images in data.parts.items():
            numbers = [rows[tuple(row)] for row in images.images[:, :, 0, 0].tolist()]  # type: ignore[attr-defined]
            parts[part] = set(PATIENT[numbers].tolist())
            if task == "labels":
                assert np.array_equal(images.labels, TARGETS[task][numbers])
            elif task == "regression":
                np.testing.assert_allclose(images.labels[:, 0], TARGETS[task][numbers])
            else:
                assert [data.class_names[j] for j in images.labels] == TARGETS[task][numbers].astype(str).tolist()
            assert not images.can_be_augmented
        assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 12
        if fold is not None:
            assert tested.isdisjoint(parts["test"])
            tested |= parts["test"]
    assert tested == set(range(12))


def test_parts_of_a_table_and_of_arrays(tmp_path: Path) -> None:
    split = ["test"] * 9 + ["val"] * 6 + ["train"] * (N - 15)
    rows = [[part, n % 3, *VALUES[n].tolist()] for n, part in enumerate(split)]
    spec, _ = write_table(tmp_path / "f.csv", ["split", "class"], rows)
    data = load_dataset(spec)
    assert [len(data.train), len(data.validation), len(data.test)] == [N - 15, 6, 9]
    for file, row in zip(data.test.names["file"], data.test.images[:, :, 0, 0].tolist(), strict=True):
        assert row == VALUES[int(file.removeprefix("f.csv, line ")) - 2].tolist()
    y = np.arange(N) % 3
    np.savez(tmp_path / "f.npz", features=VALUES, y=y, features_test=VALUES[:9], y_test=y[:9])
    assert len(load_dataset(f"npz:{tmp_path / 'f.npz'}").test) == 9
    np.savez(tmp_path / "f.npz", features_test=VALUES[:9], y_test=y[:9])
    assert torch.equal(load_part(f"npz:{tmp_path / 'f.npz'}").images.images, data_of(VALUES[:9]))


def data_of(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)[:, :, None, None]


Y = np.arange(N) % 3
ARRAYS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "with images": ({"x": VALUES}, {}, "has arrays x and features; keep the one to train on"),
    "other axes": (
        {"features": VALUES[:, None]},
        {},
        "must hold numbers in the shape (N, F), got float32 in the shape",
    ),
    "texts": ({"features": VALUES.astype(str)}, {}, "must hold numbers in the shape (N, F)"),
    "NaN": ({"features": np.full((N, F), np.nan)}, {}, "has a number that is NaN, infinite or beyond float32"),
    "beyond float32": ({"features": np.full((N, F), 1e200)}, {}, "has a number that is NaN, infinite or beyond"),
    "other labels": ({"y": Y[1:]}, {}, "y must be given for each of 48 images of features, got 47"),
    "other names": ({"train_features": VALUES}, {}, "has an array 'train_features', which is not read"),
    "scale": ({}, {"scale": (0, 1)}, "which are no images and keep their values; leave scale (--scale) out"),
    "image size": ({}, {"image_size": 8}, "leave image_size (--image-size) out"),
    "window": ({}, {"window": 8}, "leave window (--window) out"),
    "patch": ({}, {"patch": 8}, "has no masks, and only images with masks are trained on in patches"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_fault_of_arrays_is_one_sentence(name: str, tmp_path: Path) -> None:
    arrays, options, said = ARRAYS[name]
    np.savez(tmp_path / "f.npz", **({"features": VALUES, "y": Y} | arrays))  # type: ignore[arg-type]
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'f.npz'}", **options, say=said)


def lines(columns: str = "label,e0,e1", cell: str = "1.5", **_: Any) -> str:
    return "\n".join([columns, *(f"{n % 3},{n},{cell if n == 7 else n / 2}" for n in range(N))])


TABLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no labels": (
        lines("e0,e1,e2"),
        {},
        "a table of features has one column called label (or class, category, target)",
    ),
    "no header": (lines("1,2,3"), {}, "a table of features has one column called label"),
    "two labels": (lines("label,class,e1"), {}, "a table of features has one column called label"),
    "a text": (lines(cell="much"), {}, "line 9: the column e1 has 'much' in place of a number, written like 1.5"),
    "missing": (lines(cell="NA"), {}, "line 9: the column e1 has 'NA' in place of a number"),
    "empty": (lines(cell=""), {}, "line 9: the column e1 has '' in place of a number"),
    "a patient": (
        lines("label,patient,e1"),
        {},
        "has the column patient, which would be read as a feature; rename or remove it, or split by it",
    ),
    "pandas": (lines("label,,e1"), {}, "has a column without a name, such as pandas adds, which would be read"),
    "no group": (lines(), {"group": "who"}, "has no column 'who' (--group); its columns are label, e0, e1"),
    "only labels": (lines("label,split,e1"), {"group": "e1"}, "has no columns of features, only"),
    "scale": (lines(), {"scale": (0, 1)}, "which are no images and keep their values; leave scale (--scale) out"),
    "pages": (lines(), {"pages": "channels"}, "leave pages (--pages) out"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_fault_of_a_table_is_one_sentence(name: str, tmp_path: Path) -> None:
    text, options, said = TABLES[name]
    (tmp_path / "f.csv").write_text(text)
    assert_raises(InputError, load_dataset, f"csv:{tmp_path / 'f.csv'}", **options, say=said)


def about(in_shape: tuple[int, ...], channels: tuple[str, ...] | None = None) -> SimpleNamespace:
    return SimpleNamespace(in_shape=in_shape, channels=channels, window=None, stride=None)


def test_rows_for_a_network_are_matched_by_name(tmp_path: Path) -> None:
    by_table(tmp_path, "classes")
    by_npz(tmp_path, "classes")
    ((names, features, _),) = read_rows(tmp_path / "f.csv", about((2, 1, 1), ("e3", "e1")))
    assert np.array_equal(features[:, :, 0, 0], VALUES[:, [3, 1]])
    assert names[0] == f"{tmp_path / 'f.csv'}, line 2"
    assert np.array_equal(read_rows(tmp_path / "f.npz", about((F, 1, 1)))[0].inputs[:, :, 0, 0], VALUES)
    for path, shape, known, said in (
        ("f.csv", (2, 1, 1), ("e3", "e9"), "has no column e9, which the network takes"),
        ("f.npz", (4, 1, 1), None, "has 5 features in a row, but the network takes 4"),
        ("f.csv", (7, 1, 1), None, "has the column patient, which would be read as a feature"),
    ):
        assert_raises(InputError, read_rows, tmp_path / path, about(shape, known), say=said)
    np.savez(tmp_path / "x.npz", x=VALUES)
    assert_raises(InputError, read_rows, tmp_path / "x.npz", about((F, 1, 1)), say='has no array "features"; it holds')


def test_features_in_memory() -> None:
    network = create_model("sequences", (F, 1, 1), 3, sequence_kernel=1)
    opened = open_data((VALUES, Y), Form(find_task("classes"), 3, (F, 1, 1)))
    assert torch.equal(opened.data.tensors[0], data_of(VALUES))
    assert torch.equal(torch.from_numpy(predict(network, VALUES).scores), network.eval()(data_of(VALUES)).scores)
