import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_raises
from tiny_runs import save_image
from torchcaps.datasets import Dataset, ImageFiles, load_dataset
from torchcaps.datasets.sources import folder as reader
from torchcaps.errors import InputError


def fill(root: Path, classes: dict[str, int], value: int = 0) -> Path:
    """Class sub-folders of 6×5 images; the first pixel tells the class, the second the image."""
    for label, (name, n) in enumerate(classes.items()):
        for i in range(n):
            pixels = np.full((6, 5), 50, np.uint8)
            pixels[0, :3] = label, i, value
            save_image(root / name / f"{i:03d}.png", pixels)
    return root


def load(root: Path, **options: object) -> Dataset:
    return load_dataset(f"folder:{root}", **options)  # type: ignore[arg-type]


def parts(data: Dataset) -> list[set[tuple[int, ...]]]:
    return [
        {tuple(image[0, 0, :3].tolist()) for image in part.images} for part in (data.train, data.validation, data.test)
    ]


def test_one_folder_is_split_in_three(tmp_path: Path) -> None:
    data = load(fill(tmp_path / "pets", {"cat": 20, "Dog": 30}))
    assert data.class_names == ("Dog", "cat")
    assert data.in_shape == (1, 6, 5)
    split = [part.labels.bincount().tolist() for part in (data.train, data.validation, data.test)]
    assert split == [[22, 14], [2, 2], [6, 4]]
    assert len(set.union(*parts(data))) == 50  # no image in two parts, none lost
    for part in (data.train, data.validation, data.test):
        assert torch.equal(1 - part.images[:, 0, 0, 0].long(), part.labels)  # each with its own label
    pinned = load(fill(tmp_path / "pinned", {"a": 20, "b": 20}))
    held = [(0, 0), (0, 3), (0, 10), (0, 13), (1, 0), (1, 1), (1, 3), (1, 16)]
    assert sorted((label, i) for label, i, _ in parts(pinned)[2]) == held, "results rest on this choice"
    fewest = load(fill(tmp_path / "few", {"10": 3, "9": 3}), limit_train=2)
    assert fewest.class_names == ("9", "10"), "numbers go by their value"
    for part in (fewest.train, fewest.validation, fewest.test):
        assert part.labels.bincount().tolist() == [1, 1], "the first images are of all classes"


def test_folders_of_their_own_are_taken_as_they_are(tmp_path: Path) -> None:
    for names in (("train", "test", "val"), ("Train", "TEST", "validation")):
        root = tmp_path / names[2]
        for value, (name, n) in enumerate(zip(names, (10, 3, 2), strict=True)):
            fill(root / name, {"a": n, "b": n}, value)
        data = load(root)
        assert [{third for *_, third in part} for part in parts(data)] == [{0}, {2}, {1}]
        assert [len(data.train), len(data.validation), len(data.test)] == [20, 4, 6]
    shutil.rmtree(root / names[2])
    data = load(root, validation_size=6)
    assert [len(data.train), len(data.validation), len(data.test)] == [14, 6, 6]


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 5, "b": 5})
    save_image(tmp_path / "a" / "grey-as-rgb.png", np.full((6, 5, 3), 7, np.uint8))
    assert load(tmp_path).in_shape == (1, 6, 5)
    colour = np.zeros((6, 5, 3), np.uint8)
    colour[..., 2] = 200
    save_image(tmp_path / "b" / "colour.png", colour)
    data = load(tmp_path)
    assert data.in_shape == (3, 6, 5)
    images = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert sum(bool((image[0] != image[2]).any()) for image in images) == 1
    assert any(torch.equal(image, torch.from_numpy(colour).permute(2, 0, 1)) for image in images)


def test_hidden_and_other_files_are_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 5, "b": 5})
    for folder in (".git", "__MACOSX", "a/folder.png"):
        (tmp_path / folder).mkdir()
    for file in ("notes.txt", "a/notes.txt", "a/.hidden.png"):
        (tmp_path / file).write_text("x")
    if os.name != "nt":
        os.mkfifo(tmp_path / "a" / "fifo.png")
    data = load(tmp_path)
    assert data.class_names == ("a", "b")
    assert sum(map(len, (data.train, data.validation, data.test))) == 10


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 5, "b": 5})
    odd = save_image(tmp_path / "b" / "odd.png", np.zeros((8, 9), np.uint8))
    with pytest.raises(InputError, match=f"{re.escape(str(odd))} is 8×9 pixels.*000.png is 6×5; .*--image-size"):
        load(tmp_path)
    assert load(tmp_path, image_size=12).in_shape == (1, 12, 12)
    assert load(tmp_path, image_size=(10, 7)).in_shape == (1, 10, 7)


def damage(root: Path, *names: str) -> list[Path]:
    files = [root / name for name in names]
    for file in files:
        file.write_bytes(b"\x89PNG broken")
    return files


def test_unreadable_images_are_named_in_one_list(tmp_path: Path) -> None:
    bad = damage(fill(tmp_path, {"a": 5, "b": 5}), "a/000.png", "b/000.png", "b/003.png")
    with pytest.raises(InputError, match=r"^3 of 10 images cannot be used; .*--skip-damaged:\n") as raised:
        load(tmp_path)
    assert re.findall(r"[^ ]*\.png", str(raised.value)) == list(map(str, bad))
    damage(tmp_path, *(f"a/more{n:02}.png" for n in range(50)))
    with pytest.raises(InputError, match=r"^53 of 60 images (.|\n)*\n  …$") as raised:
        load(tmp_path)
    assert str(raised.value).count(".png") == 20


def test_what_is_skipped_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 15, "b": 15})
    bad = damage(tmp_path, "a/000.png", "a/007.png", "b/new.png")
    data = load(tmp_path, skip_damaged=True)
    assert [why.partition(" cannot be read")[0] for why in data.skipped] == list(map(str, bad))
    for file in bad:
        file.unlink()
    without = load(tmp_path)
    assert without.skipped == ()
    for part in ("train", "validation", "test"):
        one, other = getattr(data, part), getattr(without, part)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert sum(map(len, parts(data))) == 28


def test_too_few_images_are_left(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 4, "b": 4})
    fill(tmp_path / "test", {"a": 2, "b": 2})
    damage(tmp_path / "test" / "a", "000.png", "001.png")
    assert load(tmp_path, skip_damaged=True).test.labels.tolist() == [1, 1]
    damage(tmp_path / "test" / "b", "000.png", "001.png")
    assert_raises(InputError, load, tmp_path, say="none of the test images can be read", skip_damaged=True)
    fill(tmp_path / "test", {"a": 2, "b": 2})
    damage(tmp_path / "train" / "b", *(f"{n:03}.png" for n in range(3)))
    said = "of the class b, 1 of the train images can be read, but at least 2"
    assert_raises(InputError, load, tmp_path, say=said, skip_damaged=True)


@pytest.mark.parametrize("ending", ["_mask", "-mask", "_SEG"])
def test_masks_beside_their_images_are_no_images_of_a_class(tmp_path: Path, ending: str) -> None:
    root = fill(tmp_path, {"cat": 6, "dog": 6})
    files = sorted((root / "dog").iterdir())
    for file in files:
        shutil.copy(file, file.with_stem(file.stem + ending))
    for read in (load, lambda folder: ImageFiles(folder, (1, 6, 5))):
        assert_raises(
            InputError, read, root, say=f"each image of the class dog has a mask beside it, such as {root / 'dog'}"
        )
    files[0].with_stem(files[0].stem + ending).unlink()  # a photo of a mask is a photo
    assert sum(map(len, parts(load(root)))) > 0


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for classes, root, words in (
        ({}, one, "there is no folder"),
        ({"a": 5}, one, "has only the class a; at least two"),
        ({"b": 1}, one, "of the class b, 1 of the train images can be read, but at least 3"),
        ({"test/a": 1}, one, "has test/ beside a/, but no train/"),
        ({"train/a": 5, "train/b": 5, "test/a": 5, "test/c": 5}, two, "the class c of the test images has no folder"),
        ({"val/a": 1, "valid/a": 1}, two, "has both val/ and valid/"),
    ):
        fill(root, classes)
        assert_raises(InputError, load, root, say=words)
        assert_raises(InputError, load, root, say=str(root))
    (tmp_path / "empty" / "b").mkdir(parents=True)
    assert_raises(InputError, load, tmp_path / "empty" / "b", say="has no class sub-folders")
    fill(tmp_path / "empty", {"a": 5})
    assert_raises(InputError, load, tmp_path / "empty", say=f"class folder {tmp_path / 'empty' / 'b'} has no images")


def test_images_of_several_sizes_are_refused_before_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, {"a": 5, "b": 5})
    for n in range(1, 5):
        save_image(tmp_path / f"a/{n:03d}.png", np.zeros((9, 9), np.uint8))
    opened = list[Path]()
    read = reader.read_pixels
    monkeypatch.setattr(reader, "read_pixels", lambda file, **options: opened.append(file) or read(file, **options))
    assert_raises(InputError, load, tmp_path, say="bring all images to one size with --image-size")
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("more", "example"), [("a/scan 1", "a/scan 1/000.png"), (".", "000.png"), ("extra", "extra/000.png")]
)
def test_no_image_of_a_folder_is_left_out_without_a_word(more: str, example: str, tmp_path: Path) -> None:
    root = fill(tmp_path, {"train/a": 6, "train/b": 6})
    fill(root if more == "extra" else root / "train", {more: 3})
    with pytest.warns(UserWarning, match="has 3 images that are not read, such as") as warned:
        load(root)
    assert str(Path(example if more == "extra" else f"train/{example}")) in str(warned[0].message)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (None, "class folder DIR/a has images in sub-folders only, such as DIR/a/images/000.png; move them up"),
        (
            "pixels",
            "DIR must have images/ and masks/, with an image file of the same name in each; put those of a/",
        ),
        ("objects", "DIR/a/masks/000.png is a mask by its name, and one of 12 files that would be read as a picture"),
    ],
)
def test_a_folder_for_each_image_and_its_masks(task: str | None, said: str, tmp_path: Path) -> None:
    """As in the Data Science Bowl of 2018: for objects, masks would be pictures to train on."""
    for name in "abcdef":
        fill(tmp_path / name, {"images": 1, "masks": 2})
    assert_raises(InputError, load, tmp_path, task=task, say=said.replace("DIR", str(tmp_path)))


def test_a_folder_for_each_subject_and_its_mask(tmp_path: Path) -> None:
    for name in "abcdef":
        fill(tmp_path / name, {".": 4})
        (tmp_path / name / "000.png").rename(tmp_path / name / "t1.png")
        (tmp_path / name / "001.png").rename(tmp_path / name / "seg.png")
    mask = tmp_path / "a" / "seg.png"
    assert_raises(InputError, load, tmp_path, say=f"{mask} is a mask by its name, as in each folder")
    assert_raises(InputError, load, tmp_path, task="objects", say=f"{mask} is a mask by its name, and one of 6 files")
    assert load(tmp_path, task="classes").class_names == tuple("abcdef")
    mask.rename(mask.with_stem("t2"))  # names of a class or two may be those of masks
    assert load(tmp_path).class_names == tuple("abcdef")


def test_masks_beside_pictures_are_no_pictures(tmp_path: Path) -> None:
    root = fill(tmp_path, {"a": 6, "b": 6})
    assert len(load(root, task="objects").train) > 0
    for file in sorted((root / "b").iterdir()):
        shutil.copy(file, file.with_stem(file.stem + "_mask"))
    assert_raises(InputError, load, root, task="objects", say="000_mask.png is a mask by its name, and one of 6 files")


@pytest.mark.parametrize(
    "names", [("train", "test", "val"), ("Training", "Testing", "dev"), ("training", "test", "valid")]
)
def test_parts_have_usual_names(tmp_path: Path, names: tuple[str, str, str]) -> None:
    for part, count in zip(names, (8, 3, 2), strict=True):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for n in range(count):
                Image.fromarray(np.full((8, 8), 20 * n + 99, np.uint8)).save(tmp_path / part / name / f"{n}.png")
    data = load_dataset(f"folder:{tmp_path}")
    assert [len(images) for images in (data.train, data.test, data.validation)] == [16, 6, 4]
