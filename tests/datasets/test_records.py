"""Long records cut into windows: their steps, their labels, their splits, and one answer for each record."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import assert_raises
from torchcaps.analysis import evaluate
from torchcaps.datasets import load_dataset
from torchcaps.datasets.loading import load_part
from torchcaps.datasets.records import cut_records, labels_of_windows
from torchcaps.errors import InputError
from torchcaps.models import create_model

N, L, WINDOW, STRIDE = 12, 50, 16, 8
RECORD = np.arange(N)
VALUES = (100 * RECORD[:, None, None] + np.zeros((1, 2, 1)) + np.arange(L) / 100).astype(np.float32)
"""Records of two channels, whose numbers name the record and the step."""
LENGTHS = np.array([50, 16, 5, 40, 17, 33, 50, 24, 31, 32, 48, 49])
LABELS = {
    "classes": RECORD % 3,
    "labels": np.stack([RECORD % 2, RECORD % 3 == 0], 1).astype(np.int64),
    "regression": RECORD / 2,
}


def starts(length: int) -> list[int]:
    """Beginnings of the windows of a record, one after another."""
    begins = [0]
    while begins[-1] + WINDOW < length:
        begins.append(min(begins[-1] + STRIDE, length - WINDOW))
    return begins


def save(folder: Path, name: str = "r.npz", **arrays: Any) -> str:
    np.savez(folder / name, **({"x": VALUES, "lengths": LENGTHS, "y": LABELS["classes"]} | arrays))
    return f"npz:{folder / name}"


def test_windows_cover_each_record_and_nothing_else() -> None:
    padded = torch.full((N, 2, 1, L), torch.nan)
    for row, values, length in zip(padded, VALUES, LENGTHS, strict=True):
        row[:, 0, :length] = torch.from_numpy(values[:, :length])
    windows = cut_records(padded.numpy(), WINDOW, STRIDE, "x")
    labels = labels_of_windows(LABELS["classes"], windows, None, "x")
    rows = iter(zip(windows.images[:, :, 0], windows.record, windows.start, labels, strict=True))
    for record, length in enumerate(LENGTHS):
        seen = set[float]()
        for begin in starts(length):
            image, number, start, label = next(rows)
            steps = VALUES[record, :, begin : min(begin + WINDOW, length)]
            assert (number, start, label) == (record, begin, record % 3)
            np.testing.assert_array_equal(image[:, : steps.shape[1]], steps)
            assert np.isnan(image[:, steps.shape[1] :]).all()
            seen |= set(steps[0].tolist())
        assert seen == set(VALUES[record, 0, :length].tolist())
    assert next(rows, None) is None


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 60), window=st.integers(1, 40), data=st.data())
def test_any_window_and_stride(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    steps = np.arange(length, dtype=np.float32).reshape(1, 1, 1, length)
    images = cut_records(steps, window, stride, "x").images[:, 0, 0]
    assert images.shape[1] == window
    assert set(images[~np.isnan(images)].tolist()) == set(range(length))
    begins = np.diff(images[:, 0])
    assert ((begins > 0) & (begins <= stride)).all()


@pytest.mark.parametrize("task", LABELS)
@pytest.mark.parametrize("group", [None, "person"])
def test_no_record_is_in_two_parts(task: str, group: str | None, tmp_path: Path) -> None:
    spec = save(tmp_path, y=LABELS[task], person=RECORD // 2)
    units = RECORD if group is None else RECORD // 2
    tested = set[int]()
    for fold in (None, "1/3", "2/3", "3/3"):
        options: Any = {"task": task, "window": WINDOW, "stride": STRIDE, "group": group, "fold": fold}
        data = load_dataset(spec, **options)
        parts = {part: set(of_images(images)) for part, images in data.parts.items()}
        assert sorted(n for each in parts.values() for n in each) == list(range(N))
        of_units = [{int(units[n]) for n in each} for each in parts.values()]
        assert sum(map(len, of_units)) == len(set(units.tolist()))
        for images in data.parts.values():
            assert [f"x[{n}]" for n in of_images(images)] == list(images.names["record"])
        if fold is not None:
            assert tested.isdisjoint(parts["test"])
            tested |= parts["test"]
        again = load_part(spec, "validation", **options)
        assert set(of_images(again.images)) == parts["validation"]
    assert tested == set(range(N))


def of_images(images: Any) -> list[int]:
    """Number of the record of each window, by its numbers."""
    return [round(float(image[0, 0, 0])) // 100 for image in images.images]


@pytest.mark.parametrize("are_columns", [False, True])
def test_labels_of_windows(are_columns: bool, tmp_path: Path) -> None:
    most = max(len(starts(length)) for length in LENGTHS)
    labels = np.full((N, most), -1)
    for record, length in enumerate(LENGTHS):
        labels[record, : len(starts(length))] = (record + np.arange(len(starts(length)))) % 3
    spec = save(tmp_path, y=labels[..., None] if are_columns else labels)
    data = load_dataset(spec, window=WINDOW, stride=STRIDE, task="classes")
    for images in data.parts.values():
        for image, label in zip(images.images, images.labels.tolist(), strict=True):
            record, begin = divmod(round(float(image[0, 0, 0]) * 100), 10_000)
            assert label == (record + starts(LENGTHS[record]).index(begin)) % 3


def test_rows_of_labels_of_windows(tmp_path: Path) -> None:
    most = max(len(starts(length)) for length in LENGTHS)
    rows = np.random.default_rng(0).integers(0, 2, (N, most, 4))
    data = load_dataset(save(tmp_path, y=rows), window=WINDOW, stride=STRIDE, task="labels")
    assert data.train.labels.shape[1] == 4
    for image, row in zip(data.train.images, data.train.labels, strict=True):
        record, begin = divmod(round(float(image[0, 0, 0]) * 100), 10_000)
        assert row.tolist() == rows[record, starts(LENGTHS[record]).index(begin)].tolist()


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({}, {"stride": 4}, "stride (--stride) is for windows; set window (--window)"),
        ({}, {"window": 8, "stride": 9}, "stride (--stride) must be at most window (--window), 8, got 9"),
        (
            {"y": np.zeros((N, 3), int)},
            {"window": 16},
            "or a column for each of 4 windows, got int64 in the shape",
        ),
        ({"y": np.eye(4)[RECORD % 4], "task": None}, {"window": 16}, "could be rows of 12 records"),
        ({"y": np.ones((N, 4)) / 3, "task": None}, {"window": 16}, "could be rows of 12 records"),
        ({"y": np.arange(48).reshape(N, 4) % 3 % 2, "task": None}, {"window": 16}, "could be rows of 12 records"),
        (
            {"y": np.eye(4, dtype=int)[RECORD % 4]},
            {"window": 16},
            "could be rows of 12 records, such as one-hot rows, or labels of 4",
        ),
    ],
)
def test_what_cannot_be_cut(arrays: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path) -> None:
    task = arrays.pop("task", "classes")
    assert_raises(InputError, load_dataset, save(tmp_path, **arrays), task=task, **options, say=said)


def test_images_are_no_records(tmp_path: Path) -> None:
    said = (
        "a.npz: x holds no sequences, which window (--window) cuts: numbers (N, L), or (N, C, L) with an array lengths"
    )
    pictures = np.zeros((9, 8, 8), np.uint8)
    for x in (pictures, pictures / 2, pictures - 5.0, pictures + np.uint16(300), pictures[..., None]):  # of any range
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(9) % 2)
        assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'a.npz'}", window=4, say=said)
    assert_raises(InputError, load_dataset, "digits", window=4, say="digits takes no window (--window), which is for")


@pytest.mark.parametrize("task", LABELS)
def test_an_answer_of_a_record_is_the_mean_of_its_windows(task: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=VALUES.shape).astype(np.float32)
    spec = save(tmp_path, x=values, y=LABELS[task])
    images = load_part(spec, "all", task=task, window=WINDOW, stride=STRIDE).images  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = create_model("sequences", (2, 1, WINDOW), 3 if task == "classes" else images.labels[0].numel(), task=task)
    windows: Any = evaluate(model, images)
    records = windows.records
    assert (windows.num_images, records.num_images) == (len(images), N)
    names = np.array(images.names["record"])
    for n, name in enumerate(sorted(set(names))):
        np.testing.assert_allclose(records.scores[n], windows.scores[names == name].mean(0), rtol=1e-5)
    truth = records.labels if task == "classes" else records.targets
    targets = np.array([LABELS[task][int(name[2:-1])] for name in sorted(set(names))])
    np.testing.assert_allclose(truth, targets.reshape(truth.shape))
    assert windows.to_dict()["records"] == records.to_dict()
    assert any("One answer for each of 12 records" in table.title for table in windows.tables())


def test_windows_of_several_labels_have_no_common_answer(tmp_path: Path) -> None:
    labels = np.arange(N * 4).reshape(N, 4) % 3
    images = load_part(save(tmp_path, y=labels), "all", task="classes", window=WINDOW).images
    evaluation: Any = evaluate(create_model("sequences", (2, 1, WINDOW), 3), images)
    assert evaluation.records is None
    assert "records" not in evaluation.to_dict()
