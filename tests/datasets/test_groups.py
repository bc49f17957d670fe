"""No group is on two sides of a split: of a validation part, a test part or folds, by any door, for any task."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import MASKS, assert_raises, registered_for_now
from tiny_runs import save_image
from torchcaps.datasets import load_dataset, register_dataset, stratified_split
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.loading import load_part
from torchcaps.datasets.splits import groups_of, read_groups, stratified_folds
from torchcaps.errors import InputError
from torchcaps.models import create_model
from torchcaps.sklearn import CapsNetClassifier
from torchcaps.tasks import TASKS
from torchcaps.training import Progress, Recipe, fit
from torchcaps.training.loop import Trainer
from torchcaps.training.small_data import narrow_message

PATIENTS, EACH, SIDE = 12, 2, 8
N = PATIENTS * EACH
PATIENT = np.arange(N) % PATIENTS  # neighbours are of different patients
GREY = (10 * PATIENT[:, None, None] + np.zeros((1, SIDE, SIDE))).astype(np.uint8)
"""Images whose every pixel names the patient, so that tests read it off the pixels."""
DRAWN = np.broadcast_to(PATIENT[:, None, None] % 2, GREY.shape).astype(np.uint8)
"""Masks of the same patients."""
TARGETS: dict[str, np.ndarray] = {
    "classes": PATIENT % 3,
    "labels": np.stack([PATIENT % 2, PATIENT % 3 == 0], 1).astype(np.int64),
    "regression": PATIENT + 0.5,
    "ordinal": PATIENT % 3,
    "pixels": DRAWN,
    "objects": DRAWN,
}
FOLDS = 4


def by_npz(folder: Path, task: str) -> tuple[str, str]:
    np.savez(folder / "a.npz", x=GREY, y=TARGETS[task], patient=PATIENT)
    return f"npz:{folder / 'a.npz'}", "patient"


def by_table(folder: Path, task: str) -> tuple[str, str]:
    rows = TARGETS[task].reshape(N, -1)
    lines = [[f"{n}.png", f"P{PATIENT[n]}", *row.tolist()] for n, row in enumerate(rows)]
    for n, image in enumerate(GREY):
        save_image(folder / f"{n}.png", image)
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "who", *(f"y{j}" for j in range(rows.shape[1]))], *lines])
    return f"csv:{folder / 't.csv'}", "who"


def by_paths_of_a_table(folder: Path, task: str) -> tuple[str, str]:
    for n, image in enumerate(GREY):
        save_image(folder / f"P{PATIENT[n]}_{n}.png", image)
    rows = TARGETS[task].reshape(N, -1)
    lines = [[f"P{PATIENT[n]}_{n}.png", *row.tolist()] for n, row in enumerate(rows)]
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", *(f"y{j}" for j in range(rows.shape[1]))], *lines])
    return f"csv:{folder / 't.csv'}", r"(P\d+)_"


def by_folder(folder: Path, task: str) -> tuple[str, str]:
    for n, image in enumerate(GREY):
        name = f"P{PATIENT[n]}_{n}.png"
        if task in MASKS:
            save_image(folder / "images" / name, image)
            save_image(folder / "masks" / name, TARGETS[task][n])
        else:
            save_image(folder / f"class{TARGETS[task][n]}" / name, image)
    return f"folder:{folder}", r"(P\d+)_"


def by_nifti(folder: Path, task: str) -> tuple[str, str]:
    nib = pytest.importorskip("nibabel")
    for n, image in enumerate(GREY):
        for name, values in (("images", image), ("masks", TARGETS[task][n])):
            (folder / name).mkdir(exist_ok=True)
            volume = nib.Nifti1Image(np.repeat(values[..., None], 2, 2), np.eye(4))
            nib.save(volume, folder / name / f"P{PATIENT[n]}_{n}.nii")
    return f"nifti:{folder}", r"(P\d+)_"


def by_subjects(folder: Path, task: str) -> tuple[str, str]:
    nib = pytest.importorskip("nibabel")
    for n, image in enumerate(GREY):
        for name, values in (("t1", image), ("seg", TARGETS[task][n])):
            (day := folder / f"P{PATIENT[n]}/{n}").mkdir(exist_ok=True, parents=True)
            nib.save(nib.Nifti1Image(np.repeat(values[..., None], 2, 2), np.eye(4)), day / f"{name}.nii")
    return f"nifti:{folder}", "subject"


OF_IMAGES = [task for task in TASKS if task not in MASKS]
DOORS: list[tuple[Callable[[Path, str], tuple[str, str]], list[str]]] = [
    (by_npz, list(TASKS)),
    (by_table, OF_IMAGES),
    (by_paths_of_a_table, OF_IMAGES),
    (by_folder, ["classes", "pixels", "objects"]),
    (by_nifti, ["pixels"]),
    (by_subjects, ["pixels"]),
]
CELLS = [pytest.param(door, task, id=f"{door.__name__}-{task}") for door, tasks in DOORS for task in tasks]


def patients(images: Any) -> set[int]:
    """Patients of images, by their pixels."""
    return {
        round(float(image.flatten()[0]) * (1 if image.dtype == torch.uint8 else 255)) // 10 for image in images.images
    }


def assert_apart(parts: dict[str, Any], images: int = N) -> None:
    of_parts = {part: patients(each) for part, each in parts.items()}
    assert sum(map(len, parts.values())) == images
    assert set.union(*of_parts.values()) == set(range(PATIENTS))
    assert sum(map(len, of_parts.values())) == PATIENTS, of_parts


@pytest.mark.slow
@pytest.mark.parametrize(("door", "task"), CELLS)
def test_no_group_is_in_two_parts(door: Callable[[Path, str], tuple[str, str]], task: str, tmp_path: Path) -> None:
    assert TARGETS.keys() >= TASKS.keys(), "a new task: give it targets"
    spec, group = door(tmp_path, task)
    options: Any = {"task": task, "group": group} | ({"scale": (0, 255)} if door in (by_nifti, by_subjects) else {})
    tested = set[int]()
    for fold in (None, *(f"{n + 1}/{FOLDS}" for n in range(FOLDS))):
        for seed in (0, 1):
            data = load_dataset(spec, fold=fold, seed=seed, **options)
            assert_apart(data.parts)
        assert data.num_groups == {part: len(patients(images)) for part, images in data.parts.items()}
        for part in ("train", "validation", "test"):
            again = load_part(spec, part, fold=fold, seed=1, **options)  # type: ignore[arg-type]
            assert patients(again.images) == patients(data.parts[part])
        if fold is not None:
            assert tested.isdisjoint(patients(data.test))
            tested |= patients(data.test)
    assert tested == set(range(PATIENTS))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), groups=st.lists(st.integers(0, 30), min_size=4, max_size=80), seed=st.integers(0, 5))
def test_splits_and_folds_keep_groups_whole(data: st.DataObject, groups: list[int], seed: int) -> None:
    numbers = torch.tensor(groups)
    labels = torch.tensor([data.draw(st.integers(0, 3)) for _ in groups])
    folds = data.draw(st.integers(2, min(6, len(groups))))
    if numbers.unique().numel() < folds:
        assert_raises(InputError, stratified_folds, labels, folds, numbers, say="cannot be split into")
    else:
        of_images = stratified_folds(labels, folds, numbers)
        assert of_images.unique().tolist() == list(range(folds))
        assert all(len(of_images[numbers == group].unique()) == 1 for group in numbers.unique())
    size = data.draw(st.integers(1, max(1, len(groups) // 3)))
    if size > len(groups) - labels.unique().numel():
        return
    try:
        rest, held = stratified_split(labels, size, seed=seed, groups=numbers)
    except InputError as error:
        only = [set(numbers[labels == label].tolist()) for label in labels.unique()]
        assert "can be held out, because" in str(error)  # noqa: PT017
        assert all({group} in only for group in numbers.unique().tolist())
        return
    assert torch.equal(torch.cat([rest, held]).sort().values, torch.arange(len(groups)))
    assert not set(numbers[rest].tolist()) & set(numbers[held].tolist())
    assert set(labels[rest].tolist()) == set(labels.tolist())


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_parts_have_about_their_share_of_each_class(share: float) -> None:
    rng = np.random.default_rng(0)
    groups = torch.from_numpy(np.repeat(np.arange(60), rng.integers(2, 20, 60)))
    labels = torch.from_numpy(rng.integers(0, 3, 60))[groups]
    counts = labels.bincount()
    for seed in range(5):
        held = labels[stratified_split(labels, round(share * len(labels)), seed=seed, groups=groups)[1]].bincount()
        assert ((held / counts - share).abs() < share / 2).all()
    folds = stratified_folds(labels, 5, groups)
    for fold in range(5):
        assert ((labels[folds == fold].bincount(minlength=3) / counts - 0.2).abs() < 0.04).all()


def test_folds_without_groups_are_stratified() -> None:
    labels = torch.arange(90) % 3
    folds = stratified_folds(labels, 4)
    assert folds.bincount().tolist() == [23, 23, 22, 22]
    assert all((labels[folds == fold].bincount() - 7.5).abs().max() < 1 for fold in range(4))
    assert not torch.equal(folds.sort().values, folds)


def test_a_factor_of_a_named_data_set_groups_it() -> None:
    images = torch.from_numpy(GREY)[:, None]
    full = ImageSet(images, torch.from_numpy(TARGETS["classes"]), factors={"toy": torch.from_numpy(PATIENT)})
    with registered_for_now():
        register_dataset("toys", title="Toys", source="here", licence="none")(
            lambda _: Splits(full, None, ("a", "b", "c"))
        )
        assert_apart(load_dataset("toys", group="toy").parts)
        said = "toys has nothing called 'patient' to group images by (--group); its factors are toy"
        assert_raises(InputError, load_dataset, "toys", group="patient", say=said)


def test_groups_that_parts_of_the_source_share_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(
        path, x=GREY, y=PATIENT % 3, patient=PATIENT, x_test=GREY[:3], y_test=PATIENT[:3] % 3, patient_test=[0, 20.0, 2]
    )
    said = "has images of 2 groups both in its train part and in its test part: 0, 2"
    assert_raises(InputError, load_dataset, f"npz:{path}", group="patient", say=said)
    load_dataset(f"npz:{path}")
    assert_raises(InputError, load_dataset, f"npz:{path}", fold="1/3", say="has its own test images; leave fold")


SAME_GROUPS: list[Any] = [
    [1, 20],
    [1.0, 20.0],
    ["1", "20"],
    [b"1", b"20"],
    [" 1", "20 "],
    [[1], [20]],
    np.array([1, 20], np.uint8),
    np.array([1, "20"], object),
    torch.tensor([1, 20]),
    torch.tensor([1.0, 20.0]),
]


@pytest.mark.parametrize("values", SAME_GROUPS, ids=repr)
def test_a_group_has_one_name_in_any_form(values: Any) -> None:
    assert read_groups(values, 2, "groups") == ("1", "20")
    assert len(set(read_groups(["Ren\u00e9", "Rene\u0301"], 2, "groups"))) == 1
    assert read_groups([2**53 + 1, 2**53 + 2], 2, "groups") == (str(2**53 + 1), str(2**53 + 2))


def door_npz(values: Any, folder: Path) -> None:
    np.savez(folder / "a.npz", x=GREY, y=PATIENT % 3, who=values)
    load_dataset(f"npz:{folder / 'a.npz'}", group="who")


def door_records(values: Any, folder: Path) -> None:
    records = np.zeros((N, 1, 9), np.float32)
    np.savez(folder / "a.npz", x=records, y=PATIENT % 3, lengths=np.full(N, 9), who=values)
    load_dataset(f"npz:{folder / 'a.npz'}", group="who", window=3)


def door_table(values: Any, folder: Path) -> None:
    spec, _ = by_table(folder, "classes")
    lines = (folder / "t.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    cells = [",".join([row[0], str(value), row[2]]) for row, value in zip(rows, values, strict=True)]
    (folder / "t.csv").write_text("\n".join([lines[0], *cells]))
    load_dataset(spec, group="who")


def door_scene(values: Any, folder: Path) -> None:
    labels = np.arange(N).reshape(3, 8) % 2 + 1
    np.savez(folder / "s.npz", cube=np.ones((3, 8, 3)), labels=labels, who=np.reshape(values, (3, 8)))
    load_dataset(f"scene:{folder / 's.npz'}", group="who", patch=1)


def door_factor(values: Any, _: Path) -> None:
    images = ImageSet(
        torch.from_numpy(GREY)[:, None], torch.from_numpy(PATIENT % 3), factors={"who": torch.tensor(values)}
    )
    Splits(images, None, ("a", "b", "c")).in_groups("who", "toys")


def door_fit(values: Any, _: Path) -> None:
    network = create_model("sabour2017", (1, SIDE, SIDE), 3, **SMALL)
    fit(network, (GREY, PATIENT % 3), RECIPE, groups=values, progress=Progress())


def door_estimator(values: Any, _: Path) -> None:
    estimator = CapsNetClassifier("sabour2017", options=SMALL, epochs=1, early_stopping=True, random_state=0)
    estimator.fit(GREY, PATIENT % 3, groups=values)


@pytest.mark.parametrize("missing", [np.nan, None, "", " ", "NA"])
@pytest.mark.parametrize(
    "door", [door_npz, door_records, door_table, door_scene, door_factor, door_fit, door_estimator]
)
def test_images_without_a_group_are_not_one_group(door: Any, missing: Any, tmp_path: Path) -> None:
    """Else all patients whose name is missing would count as one patient."""
    if missing is None and door in (door_npz, door_records, door_scene):
        return  # only pickles hold None
    if isinstance(missing, str | None) and door is door_factor:
        return
    values: list[Any] = [missing if n == 5 else float(n % 12) for n in range(N)]
    assert_raises(
        InputError,
        door,
        [str(n) if isinstance(missing, str) else n for n in values],
        tmp_path,
        say="in place of a group",
    )


@pytest.mark.parametrize("door", [door_npz, door_records, door_fit, door_estimator])
def test_groups_of_another_number_than_images(door: Any, tmp_path: Path) -> None:
    assert_raises(InputError, door, list(range(N - 1)), tmp_path, say="one for each of 24 images, got int64 in the")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group": "(P[0-9]+)?"}, "matches no text of 0.png; it must match one in every path; the columns of"),
        ({"group": "("}, "--group must be a regular expression, got '('"),
        (
            {"group": "who2"},
            "--group 'who2' does not match 0.png; it must match the path of every image; the columns of",
        ),
        ({"group": "who", "validation": "first"}, "the first images may divide a group; leave validation"),
        ({"group": "who", "fold": "1/13"}, "12 groups cannot be split into 13 folds; leave fold (--fold 1/13) out"),
        ({"fold": "0/5"}, "fold must be K/N, such as 2/5 for the second of five parts, got '0/5'"),
        ({"fold": "6/5"}, "fold must be K/N"),
        ({"fold": "1/1"}, "fold must be K/N"),
        ({"fold": "2"}, "fold must be K/N"),
    ],
)
def test_what_cannot_be_split(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    spec, _ = by_table(tmp_path, "classes")
    assert_raises(InputError, load_dataset, spec, task="classes", **({"group": "who"} | options), say=said)


@pytest.mark.parametrize(("patients", "words"), [(4, ["group"]), (6, ["group and one class"]), (12, [])])
def test_narrow_validation_images_get_a_word(patients: int, words: list[str], tmp_path: Path) -> None:
    """They choose the best epoch, so one patient, or one class, would choose it."""
    patient = np.arange(60) % patients
    labels = np.arange(60) // patients % 2 if patients == 4 else patient % 2
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 6, 6), np.uint8), y=labels, patient=patient)
    dataset = load_dataset(f"npz:{tmp_path / 'a.npz'}", group="patient", validation_size=15 if patients == 12 else None)
    assert [each.partition("of one ")[2].partition(".")[0] for each in narrow_message(dataset)] == words


def test_patients_of_one_class_each_that_are_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=GREY, y=PATIENT, patient=PATIENT)
    said = "none of 12 groups can be held out, because each has a class that no other group has; give more groups"
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'a.npz'}", group="patient", say=said)


@pytest.mark.parametrize(
    ("name", "is_said"),
    [("patient", True), ("subjectID", True), ("lesion_id", True), ("identity", False), ("place", False)],
)
def test_a_column_that_looks_like_patients_gets_a_word(
    name: str, is_said: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    spec, _ = by_table(tmp_path, "classes")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text.replace("file,who,y0", f"file,{name},label"))
    load_dataset(spec)
    words = [str(each.message) for each in recwarn if "split by it" in str(each.message)]
    assert len(words) == is_said
    assert all(f"group={name!r} (--group {name})" in each for each in words)


@pytest.mark.parametrize(("values", "is_said"), [(PATIENT, True), (np.arange(N), False), (np.zeros(N), False)])
def test_an_array_that_looks_like_patients_gets_a_word(
    values: np.ndarray, is_said: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    np.savez(tmp_path / "a.npz", x=GREY, y=PATIENT % 3, id=values, case=np.array(["a", None], object))
    load_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert [str(each.message) for each in recwarn if "split by it" in str(each.message)] == [
        f"{tmp_path / 'a.npz'} has id, but images of one id may be both in training and in the test. If they are "
        "alike, as those of a patient are, split by it with group='id' (--group id)."
    ] * is_said


def test_no_word_where_nothing_is_split_or_every_cell_differs(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    spec, _ = by_table(tmp_path, "classes")
    text = (tmp_path / "t.csv").read_text().replace("file,who,y0", "file,patient,label")
    (tmp_path / "t.csv").write_text(text)
    load_dataset(spec, group="patient")
    load_part(spec, "all")
    lines = text.splitlines()
    (tmp_path / "t.csv").write_text(
        "\n".join([lines[0], *(line.replace(",P", f",{n}P") for n, line in enumerate(lines[1:]))])
    )
    load_dataset(spec)
    assert not [each for each in recwarn if "split by it" in str(each.message)]


def test_names_stay_with_their_images() -> None:
    images = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4), names={"group": tuple("aabc")})
    assert images.select(torch.tensor([3, 0])).names == {"group": ("c", "a")}
    assert images.take(3).to("cpu").names == {"group": ("a", "a", "b")}
    assert images.take(1).followed_by(images.select(torch.tensor([2]))).names == {"group": ("a", "b")}
    assert images.resize((4, 4)).with_labels(lambda labels: labels).names == images.names
    assert groups_of(images.names).tolist() == [0, 0, 1, 2]  # type: ignore[union-attr]
    assert groups_of({}) is None
    assert_raises(
        InputError, ImageSet, images.images, images.labels, names={"group": ("a",)}, say="4 texts, one for each"
    )


# ---- fit, and the estimator


class Grouped(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images that are read one by one."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(GREY[index])[None], int(PATIENT[index] % 3)


SMALL: Any = {"conv_kernel": 3, "primary_kernel": 3, "primary_stride": 1, "conv_channels": 8, "decoder": False}
RECIPE = Recipe(epochs=1, batch_size=8, max_shift=0)
FLOATS = torch.from_numpy(GREY)[:, None] / 255
GIVEN_TO_FIT: dict[str, Any] = {
    "arrays": (GREY, PATIENT % 3),
    "floats": (FLOATS, torch.from_numpy(PATIENT % 3)),
    "image set": ImageSet(torch.from_numpy(GREY)[:, None], torch.from_numpy(PATIENT % 3)),
    "items": Grouped(),
    "loader": torch.utils.data.DataLoader(Grouped(), batch_size=8, shuffle=True),
}


def patients_of_loader(loader: Any) -> set[int]:
    pixels = torch.cat([batch.images.flatten(1)[:, 0] for batch in loader.batches(0)])
    return set((255 * pixels / 10).round().int().tolist())


@pytest.mark.parametrize("form", GIVEN_TO_FIT)
@pytest.mark.parametrize("validation", [None, 0.25])
def test_fit_holds_out_whole_groups(form: str, validation: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setattr(Trainer, "fit", lambda trainer: seen.append(trainer.data))
    monkeypatch.setattr(Trainer, "take_best", lambda _: None)
    network = create_model("sabour2017", (1, SIDE, SIDE), 3, **SMALL)
    for seed in range(2):
        fit(network, GIVEN_TO_FIT[form], RECIPE, groups=PATIENT, validation=validation, seed=seed, progress=Progress())
    for data in seen:
        train, held = patients_of_loader(data.train), patients_of_loader(data.validation)
        assert (train | held, train & held) == (set(range(PATIENTS)), set())
        assert data.train.num_images + data.validation.num_images == N
        assert data.validation.num_images >= N * (validation or 0.1) / 2


def test_fit_refuses_groups_that_it_cannot_use() -> None:
    network, data = create_model("sabour2017", (1, SIDE, SIDE), 3, **SMALL), (GREY, PATIENT % 3)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * N, N)
    loader = torch.utils.data.DataLoader(Grouped(), batch_size=8, sampler=sampler)
    for options, said in (
        ({"groups": PATIENT, "validation": data}, "validation has images of its own; leave groups out"),
        (
            {"groups": PATIENT[:4]},
            "groups must be numbers or texts, one for each of 24 images, got int64 in the",
        ),
        ({"validation": 1.0}, "validation must be above 0 and below 1"),
    ):
        assert_raises(InputError, fit, network, data, RECIPE, progress=Progress(), **options, say=said)
    said = "a sampler draws the images of the DataLoader"
    assert_raises(InputError, fit, network, loader, RECIPE, groups=PATIENT, progress=Progress(), say=said)


def test_the_estimator_holds_out_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[Any, Any]]()
    original = CapsNetClassifier._split
    monkeypatch.setattr(CapsNetClassifier, "_split", lambda *args: seen.append(original(*args)) or seen[-1])
    estimator = CapsNetClassifier("sabour2017", options=SMALL, epochs=1, early_stopping=True, random_state=0)
    estimator.fit(GREY, PATIENT % 3, groups=[f"P{n}" for n in PATIENT])
    ((train, held),) = seen
    assert set(PATIENT[train]) | set(PATIENT[held]) == set(range(PATIENTS))
    assert not set(PATIENT[train]) & set(PATIENT[held])
    estimator.set_params(early_stopping=False)
    assert_raises(
        InputError,
        estimator.fit,
        GREY,
        PATIENT % 3,
        groups=PATIENT,
        say="groups say which images early_stopping holds out",
    )
