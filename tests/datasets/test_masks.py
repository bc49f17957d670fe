"""Images with masks from folders and arrays; patches of them; and one sentence for each fault."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pixel_support import disc_set, discs, write_folder
from support import assert_raises
from torchcaps.datasets import BatchLoader, Dataset, ImageSet, PatchSet, load_dataset
from torchcaps.datasets.image_set import for_task
from torchcaps.datasets.sources.segmentation_folder import IMAGE_NAMES, MASK_NAMES
from torchcaps.errors import InputError
from torchcaps.ranges import IGNORED
from torchcaps.tasks import find_task
from torchcaps.training import make_config
from torchcaps.training.data import load_run_data

COLOURS = np.array([[0, 0, 0], [0, 255, 0], [200, 30, 0]], np.uint8)


def load(folder: Path, **options: Any) -> Dataset:
    return load_dataset(f"folder:{folder}", task="pixels", **options)


def test_a_folder_of_one_size_is_read_whole(tmp_path: Path) -> None:
    write_folder(tmp_path, 20)
    data = load(tmp_path)
    assert (data.task.name, data.class_names, data.in_shape) == ("pixels", ("0", "1", "2"), (1, 24, 20))
    assert [len(each) for each in (data.train, data.validation, data.test)] == [14, 2, 4]
    images, masks = discs(20)
    found = {image.numpy().tobytes(): mask for each in (data.train, data.test) for image, mask in pairs(each)}
    assert all(
        (found[image.tobytes()].numpy() == mask).all()
        for image, mask in zip(images, masks, strict=True)
        if image.tobytes() in found
    )
    assert load(tmp_path, image_size=12).train.labels.shape[1:] == (12, 12)


def pairs(images: ImageSet) -> Any:
    return zip(images.images, images.labels, strict=True)


def test_parts_names_and_ignored_pixels(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("test", 3)):
        write_folder(tmp_path / part, count)
    write_folder(tmp_path / "val", 2, change=lambda mask: np.where(mask == 1, IGNORED, mask))
    (tmp_path / "classes.txt").write_text("ground\nleaf\nvein\n")
    data = load(tmp_path)
    assert (data.class_names, len(data.train), len(data.validation), len(data.test)) == (
        ("ground", "leaf", "vein"),
        6,
        2,
        3,
    )
    assert data.validation.labels.unique().tolist() == [0, 2, IGNORED]


@pytest.mark.parametrize("table", [True, False])
def test_colours_are_classes(tmp_path: Path, table: bool) -> None:
    write_folder(tmp_path, 8, change=lambda mask: COLOURS[mask])
    if table:
        (tmp_path / "classes.txt").write_text("vein #c81e00\nleaf #00ff00\nground of a wood #000000\n")
    data = load(tmp_path)
    names = ("vein", "leaf", "ground of a wood") if table else ("#000000", "#00ff00", "#c81e00")
    assert data.class_names == names
    counts = torch.stack([torch.tensor([int((mask == j).sum()) for j in range(3)]) for mask in data.train.labels])
    assert (counts.argmax(1) == (2 if table else 0)).all()  # the ground is the largest


def test_colours_of_the_list_are_those_of_predicted_masks(tmp_path: Path) -> None:
    from torchcaps.analysis.mask_answers import write_mask
    from torchcaps.training.image_spec import ImageSpec

    folder = write_folder(tmp_path, 8, change=lambda mask: COLOURS[mask])
    assert load(folder).colours == ("#000000", "#00ff00", "#c81e00")  # those of the masks
    colours = ("#c81e00", "#00ff00", "#000000")
    (folder / "classes.txt").write_text("vein #c81e00\nleaf #00ff00\nground #000000\n")
    assert load(folder).colours == colours
    fields: dict[str, Any] = {"in_shape": [1, 8, 8], "class_names": ["vein", "leaf", "ground"], "task": "pixels"}
    assert ImageSpec.from_dict(fields).colours is None  # a file of an earlier version
    spec = ImageSpec.from_dict(fields | {"colours": list(colours)})
    write_mask(np.array([[0, 1, 2]], np.uint8), tmp_path / "a.png", colours=spec.colours)
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), [[0, 1, 2]])
        assert np.array_equal(np.asarray(image.convert("RGB"))[0], COLOURS[[2, 1, 0]])
    for wrong in (5, ["#c81e00"], ["red", "green", "blue"]):
        assert_raises(InputError, ImageSpec.from_dict, fields | {"colours": wrong}, say="colours cannot be")


def test_a_black_mask_beside_masks_in_colour_is_black(tmp_path: Path) -> None:
    write_folder(tmp_path, 8, change=lambda mask: COLOURS[mask])
    save(tmp_path / "masks/3.png", np.zeros((24, 20, 3), np.uint8))
    assert load(tmp_path).class_names == ("#000000", "#00ff00", "#c81e00")
    (tmp_path / "classes.txt").write_text("ground #000000\nleaf #00ff00\n")
    assert_raises(
        InputError, load, tmp_path, say="has the colour #c81e00, which has no line in classes.txt; add a line"
    )


def test_grey_colours_of_a_list_are_classes(tmp_path: Path) -> None:
    write_folder(tmp_path, 8, change=lambda mask: (100 * mask).astype(np.uint8))
    (tmp_path / "classes.txt").write_text("ground #000000\nleaf #646464\nvein #c8c8c8\n")
    assert load(tmp_path).train.labels.unique().tolist() == [0, 1, 2]
    write_folder(tmp_path, 8)  # numbers, although the list has colours
    assert load(tmp_path).train.labels.unique().tolist() == [0, 1, 2]


def test_masks_of_black_and_white_have_two_classes(tmp_path: Path) -> None:
    write_folder(tmp_path, 8, change=lambda mask: (255 * (mask > 0)).astype(np.uint8))
    data = load(tmp_path)
    assert data.class_names == ("0", "1")
    assert data.train.labels.unique().tolist() == [0, 1]
    write_folder(tmp_path / "bits", 8, change=lambda mask: mask > 0)
    assert load(tmp_path / "bits").train.labels.unique().tolist() == [0, 1]


def test_images_of_different_sizes_become_patches(tmp_path: Path) -> None:
    write_folder(tmp_path, 12, sizes=((24, 20), (40, 37), (13, 60)))
    assert_raises(
        InputError, load, tmp_path, say="has images of 3 sizes (13×60, 24×20, 40×37); train on patches of them"
    )
    data = load(tmp_path, patch=16)
    assert isinstance(data.train, PatchSet)
    assert data.in_shape == (1, 16, 16)
    loader = BatchLoader(data.train, 4, shuffle=True)
    batches = list(loader.batches(0))
    again = list(loader.batches(0, start=1))
    assert torch.equal(batches[1].images, again[0].images)
    assert torch.equal(batches[1].labels, again[0].labels)
    assert all(batch.images.shape == (4, 1, 16, 16) for batch in batches[:-1])
    assert sum(len(batch.labels) for batch in batches) == data.train.epoch_size > len(data.train)
    shares = [
        torch.cat(
            [part.images for part in BatchLoader(data.train, 4, shuffle=True, rank=rank, world_size=2).batches(0)]
        )
        for rank in (0, 1)
    ]
    assert sum(map(len, shares)) == data.train.epoch_size
    whole = list(BatchLoader(data.test, 256, shuffle=False).batches(0))
    assert [batch.labels[0].shape for batch in whole] == [mask.shape for mask in data.test.labels]


def test_half_of_the_patches_lie_around_a_class() -> None:
    mask = torch.zeros(200, 200, dtype=torch.uint8)
    mask[150:153, 20:23], mask[10:13, 180:183] = 1, 2
    images = PatchSet((torch.zeros(1, 200, 200, dtype=torch.uint8),), (mask,), patch=(8, 8))
    _, patches = images.gather(torch.zeros(400, dtype=torch.int64), (0, 0, 0), 400)
    has = [int((patches == j).flatten(1).any(1).sum()) for j in (1, 2)]
    assert all(75 < each < 130 for each in has), has
    places = {tuple((patch == 1).nonzero()[0].tolist()) for patch in patches if (patch == 1).any()}
    assert len(places) > 20  # anywhere in the patch


def test_a_patch_beyond_a_small_image_is_ignored() -> None:
    small = disc_set(1, (24, 20))
    images = PatchSet(tuple(small.images), tuple(small.labels), patch=(32, 16))
    pixels, masks = images.gather(torch.zeros(4, dtype=torch.int64), (0, 0, 0), 4)
    assert (masks[:, 24:] == IGNORED).all()
    assert (masks[:, :24] != IGNORED).all()
    assert (pixels[:, 0, 24:] == pixels[:, 0, 23:24]).all()


@pytest.mark.parametrize("form", ["grey", "last", "first", "volumes", "colour volumes"])
def test_arrays_with_masks(tmp_path: Path, form: str) -> None:
    images, masks = discs(16)
    x: Any = {"grey": images, "last": np.stack([images] * 3, -1), "first": np.stack([images] * 2, 1)}.get(form)
    if x is None:
        masks = np.stack([masks] * 5, 1)
        x = np.stack([images] * 5, 1)
        x = x if form == "volumes" else np.stack([x] * 3, -1)
    np.savez(tmp_path / "own.npz", x=x, y=masks, class_names=np.array(["ground", "disc", "square"]))
    data = load_dataset(f"npz:{tmp_path / 'own.npz'}", task="pixels")
    channels = {"grey": 1, "last": 3, "first": 2, "volumes": 1, "colour volumes": 3}[form]
    assert data.in_shape == (channels, *masks.shape[1:])
    assert load_dataset(f"npz:{tmp_path / 'own.npz'}").task.name == "pixels"  # by its form
    (batch,) = BatchLoader(data.train, len(data.train), shuffle=True).batches(0)
    assert batch.images.shape[2:] == batch.labels.shape[1:] == masks.shape[1:]
    bright = batch.images[:, 0] > 0.7
    assert (batch.labels[bright] == 2).all()
    words = (
        "must be whole numbers from 0, the class of each image, (N,), or one-hot rows (N, J), got uint8 in the shape "
    )
    with pytest.raises(InputError) as caught:
        load_dataset(f"npz:{tmp_path / 'own.npz'}", task="classes")
    assert f'{words}{masks.shape}; set task="pixels" (--task pixels)' in str(caught.value)


def save(path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(path)


PHOTO = np.random.default_rng(0).integers(0, 255, (24, 20), dtype=np.uint8)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "size": (
        lambda folder: save(folder / "masks/3.png", np.zeros((24, 22), np.uint8)),
        "masks/3.png is 24×22, but DIR/images/3.png 24×20 (height × width); a mask has the size of its image",
    ),
    "no mask": (
        lambda folder: (folder / "masks/3.png").unlink(),
        "images/3.png has no mask; put DIR/masks/3.png there, or move the image away",
    ),
    "no image": (
        lambda folder: (folder / "images/3.png").unlink(),
        "masks/3.png has no image in DIR/images; put it there, or move the mask away",
    ),
    "photo": (
        lambda folder: save(folder / "masks/3.png", PHOTO),
        "as a photo does; a mask holds the number of a class",
    ),
    "few values": (
        lambda folder: save(
            folder / "masks/3.png", np.array([0, 35, 70, 105, 140, 200, 240] * 69, np.uint8)[:480].reshape(24, 20)
        ),
        "masks/3.png holds 7 values up to 240, as a photo does; a mask holds the number of a class in each pixel "
        "(255: ignored)",
    ),
    "colour photo": (
        lambda folder: save(folder / "masks/3.png", np.stack([PHOTO, PHOTO.T.reshape(24, 20), PHOTO], -1)),
        "colours, as a photo does",
    ),
    "large values": (
        lambda folder: save(folder / "masks/3.png", np.array([0, 128, 255] * 160, np.uint8).reshape(24, 20)),
        "masks/3.png has the values 0, 128, 255, but a mask holds the number of a class in each pixel (255: ignored); "
        "number the classes 0, 1, 2 and so on, or name them in classes.txt with these numbers, on lines such as "
        "vein =255",
    ),
    "one in colour": (
        lambda folder: save(folder / "masks/3.png", np.full((24, 20, 3), (255, 0, 0), np.uint8)),
        "masks/3.png is in colour, but DIR/masks/0.png has the number 1; save all masks in one way",
    ),
    "all ignored": (
        lambda folder: [save(each, np.full((24, 20), 255, np.uint8)) for each in (folder / "masks").iterdir()],
        "all pixels of the training masks are 255, which is ignored; a mask holds the number of a class",
    ),
    "other letters": (
        lambda folder: [
            (folder / f"{part}/{old}").rename(folder / f"{part}/{new}")
            for part, old, new in (("images", "3.png", "leaf.png"), ("masks", "3.png", "Leaf.png"))
        ],
        "images/leaf.png has no mask; rename DIR/masks/Leaf.png to leaf.png",
    ),
    "an addition to the name": (
        lambda folder: (folder / "masks/3.png").rename(folder / "masks/3_final.png"),
        "images/3.png has no mask; rename DIR/masks/3_final.png to 3.png",
    ),
    "absent class": (
        lambda folder: (folder / "classes.txt").write_text("ground\nleaf\nvein\nhole\n"),
        "no training mask has the class 3 (hole); add images with it",
    ),
    "unnamed class": (
        lambda folder: (folder / "classes.txt").write_text("ground\nleaf\n"),
        "has the class 2, but classes.txt names the classes 0 to 1",
    ),
    "empty line": (lambda folder: (folder / "classes.txt").write_text("ground\n\nleaf\n"), "must have 2 to 255 lines"),
    "damaged mask": (
        lambda folder: (folder / "masks/3.png").write_bytes(b"no"),
        "masks/3.png cannot be read as a mask",
    ),
    "empty": (lambda folder: [each.unlink() for each in (folder / "images").iterdir()], "images has no images"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_with_what_to_do(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, 8)
    break_it, words = FAULTS[name]
    break_it(tmp_path)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert words.replace("DIR", str(tmp_path)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGB", "RGBA", "I;16", "I"])
def test_a_mask_of_numbers_may_be_saved_in_any_mode(tmp_path: Path, mode: str) -> None:
    write_folder(tmp_path, 8)
    wanted = np.asarray(Image.open(tmp_path / "masks/3.png"))
    dtype = {"I;16": np.uint16, "I": np.int32}.get(mode, np.uint8)
    image = Image.fromarray(wanted.astype(dtype))
    (tmp_path / "masks/3.png").unlink()
    (image if dtype != np.uint8 else image.convert(mode)).save(tmp_path / "masks/3.tif")
    found = load(tmp_path)
    labels = [mask.numpy() for part in (found.train, found.validation, found.test) for mask in part.labels]
    assert sum(mask.shape == wanted.shape and bool((mask == wanted).all()) for mask in labels) == 1


def test_names_may_have_dots(tmp_path: Path) -> None:
    write_folder(tmp_path, 8)
    for part in ("images", "masks"):
        for file in sorted((tmp_path / part).iterdir()):
            file.rename(file.with_name(f"scan.{file.name}"))
    assert sum(map(len, (load(tmp_path).train, load(tmp_path).validation, load(tmp_path).test))) == 8


OF_ONE_IMAGE = {
    name: FAULTS[name][0]
    for name in ("size", "no mask", "no image", "photo", "colour photo", "damaged mask", "other letters")
} | {
    "damaged image": lambda folder: (folder / "images/3.png").write_bytes(b"no"),
    "two masks": lambda folder: save(folder / "masks/3.tif", PHOTO),
    "two images": lambda folder: save(folder / "images/3.bmp", PHOTO),
    "a class without a name": lambda folder: [
        (folder / "classes.txt").write_text("ground\nleaf\nvein\n"),
        save(folder / "masks/3.png", np.full((24, 20), 3, np.uint8)),
    ],
}


@pytest.mark.parametrize("name", OF_ONE_IMAGE)
def test_a_fault_of_one_image_can_be_left_out(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, 8)
    OF_ONE_IMAGE[name](tmp_path)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    data = load(tmp_path, skip_damaged=True)
    assert sum(map(len, (data.train, data.validation, data.test))) == 7
    (reason,) = data.skipped
    assert str(caught.value) == f"{reason} (--skip-damaged leaves it out)"


def test_several_faults_are_one_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", 8)
    write_folder(tmp_path / "test", 3)
    for part, names in (("train", ("images/5.png", "masks/3.png")), ("test", ("masks/0.png",))):
        for name in names:
            (tmp_path / part / name).write_bytes(b"no")
    (tmp_path / "train/masks/4.png").unlink()
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    first, *reasons = str(caught.value).split("\n  ")
    assert first == ("4 of 11 images cannot be used; repair or remove them, or leave them out by --skip-damaged:")
    data = load(tmp_path, skip_damaged=True)
    assert list(data.skipped) == reasons
    assert len(data.test) == 2
    assert len(data.train) + len(data.validation) == 5
    for file in (tmp_path / "test/masks").iterdir():
        file.write_bytes(b"no")
    assert_raises(InputError, load, tmp_path, skip_damaged=True, say="none of the test images and masks can be used")


def renamed(folder: Path, images: str, masks: str) -> None:
    for old, new in (("images", images), ("masks", masks)):
        (folder / old).rename(folder / new)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "train"])
@pytest.mark.parametrize(
    ("images", "masks"),
    [
        *(("images", masks) for masks in sorted(MASK_NAMES - {"masks"})),
        *((images, "masks") for images in sorted(IMAGE_NAMES - {"images"})),
        ("Images", "Masks"),
        ("JPEGImages", "SegmentationClass"),
        ("imagesTr", "labelsTr"),
        ("raw", "seg"),
        ("scans", "annot"),
    ],
)
def test_usual_names_of_folders_are_read_as_they_are(tmp_path: Path, images: str, masks: str, part: str) -> None:
    renamed(write_folder(tmp_path / part, 8), images, masks)
    data = load_dataset(f"folder:{tmp_path}")
    assert data.task.name == "pixels"
    own_images, own_masks = discs(8)
    known = {image.tobytes(): mask for image, mask in zip(own_images, own_masks, strict=True)}
    for image, mask in pairs(data.train):
        assert np.array_equal(mask, known[image.numpy().tobytes()])
    save_class(tmp_path / part / "overlays")  # a third folder changes nothing, as the names of the files agree
    with pytest.warns(UserWarning, match=r"has 8 images that are not read, such as .*overlays.page0.png; images and"):
        assert load_dataset(f"folder:{tmp_path}", task="pixels").task.name == "pixels"
    config = make_config("compact", data=f"folder:{tmp_path}")
    words = f"the names of {images}/ and {masks}/ are those of images and masks; set --task pixels if"
    assert_raises(InputError, load_run_data, config, say=words)  # a task that nobody named does not decide
    names = tuple(sorted((images, masks, "overlays")))
    assert load_dataset(f"folder:{tmp_path}", task="classes", image_size=16).class_names == names
    config = make_config("compact", data=f"folder:{tmp_path}", task="classes", image_size=16)
    assert load_run_data(config).class_names == names


def save_class(folder: Path) -> None:
    folder.mkdir()
    for number in range(8):
        save(folder / f"page{number}.png", PHOTO)


@pytest.mark.parametrize("ending", ["", "_mask", "-label"])
def test_a_third_folder_does_not_hide_masks(tmp_path: Path, ending: str) -> None:
    """As in DRIVE: images/21.tif, mask/21_mask.gif and 1st_manual/21_manual1.gif."""
    renamed(write_folder(tmp_path, 8), "images", "mask")
    for file in (tmp_path / "mask").iterdir():
        file.rename(file.with_stem(f"{file.stem}{ending}"))
    save_class(tmp_path / "1st_manual")
    with pytest.warns(UserWarning, match=r"has 8 images that are not read, such as 1st_manual"):
        assert load_dataset(f"folder:{tmp_path}").task.name == "pixels"


def test_images_and_labels_among_other_classes_stay_classes(tmp_path: Path) -> None:
    renamed(write_folder(tmp_path, 8), "images", "labels")
    save_class(tmp_path / "tables")
    for file in (tmp_path / "labels").iterdir():
        file.rename(file.with_name(f"label{file.name}"))
    data = load_dataset(f"folder:{tmp_path}")
    assert (data.task.name, data.class_names) == ("classes", ("images", "labels", "tables"))


@pytest.mark.parametrize("part", ["", "train", "test"])
@pytest.mark.parametrize("names", [("images",), ("masks",), ("cats", "dogs"), ("pictures", "outlines")])
def test_a_part_without_masks_is_named(tmp_path: Path, names: tuple[str, ...], part: str) -> None:
    for each in {part, "train"} if part else {""}:
        write_folder(tmp_path / each, 8)
    for old, new in zip(("images", "masks"), names, strict=False):
        (tmp_path / part / old).rename(tmp_path / part / f"{new}-")
    for name in ("images", "masks"):
        shutil.rmtree(tmp_path / part / name, ignore_errors=True)
    for name in names:
        (tmp_path / part / f"{name}-").rename(tmp_path / part / name)
    if len(names) == 2:
        files = sorted((tmp_path / part / names[1]).iterdir())
        save(files[0].with_suffix(".png"), PHOTO)  # what they hold does not say it either
    words = f"{tmp_path / part} must have images/ and masks/, with an image file of the same name in each"
    assert_raises(InputError, load, tmp_path, say=words)


@pytest.mark.parametrize("part", ["", "train"])
@pytest.mark.parametrize("names", [("pictures", "outlines"), ("b", "a"), ("input", "target")])
@pytest.mark.parametrize("change", [np.asarray, lambda mask: np.uint8(255) * (mask > 0)], ids=["numbers", "0 and 255"])
def test_the_task_decides_where_names_say_nothing(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], names: tuple[str, str], part: str
) -> None:
    renamed(write_folder(tmp_path / "right" / part, 8, change=change), "images", "masks")
    right = load_dataset(f"folder:{tmp_path / 'right'}")
    renamed(write_folder(tmp_path / "own" / part, 8, change=change), *names)
    own = f"folder:{tmp_path / 'own'}"
    for read in (partial(load_dataset, own), partial(load_run_data, make_config("compact", data=own))):
        words = f"{tmp_path / 'own'}: {names[1]}/ holds only numbers of classes"
        assert_raises(InputError, read, say=words)
        assert_raises(InputError, read, say="set --task pixels if they are the masks of")
    data = load_dataset(own, task="pixels")
    assert torch.equal(data.train.images, right.train.images)
    assert torch.equal(data.train.labels, right.train.labels)
    assert load_dataset(own, task="classes").class_names == tuple(sorted(names))
    config = make_config("compact", data=own, task="classes")
    assert load_run_data(config).class_names == tuple(sorted(names))


@pytest.mark.parametrize("change", ["photos", "sizes", "stems", "both", "large numbers"])
def test_classes_of_equal_file_names_stay_classes_without_a_question(tmp_path: Path, change: str) -> None:
    def altered(mask: np.ndarray) -> np.ndarray:
        return mask + 7 if change == "large numbers" else mask

    renamed(write_folder(tmp_path, 8, change=altered), "cats", "dogs")
    file = min((tmp_path / "dogs").iterdir())
    if change == "photos":
        save(file, PHOTO[: discs(1)[1][0].shape[0], : discs(1)[1][0].shape[1]])
    if change == "sizes":
        save(file, np.ones((9, 9), np.uint8))
    if change == "stems":
        file.rename(file.with_stem("other"))
    if change == "both":
        for each in (tmp_path / "dogs").iterdir():
            shutil.copy(each, tmp_path / "cats" / each.name)
    assert load_dataset(f"folder:{tmp_path}", image_size=16).class_names == ("cats", "dogs")


@pytest.mark.parametrize("part", ["", "train", "train/cat"])
@pytest.mark.parametrize("ending", ["_mask", "-seg", "_Label"])
def test_masks_beside_their_images_are_read(tmp_path: Path, ending: str, part: str) -> None:
    write_folder(tmp_path / "right" / part.removesuffix("/cat"), 8)
    right = load_dataset(f"folder:{tmp_path / 'right'}")
    write_folder(root := tmp_path / "own" / part, 8)
    for name in ("images", "masks"):
        for file in (root / name).iterdir():
            file.rename(root / f"{file.stem}{ending if name == 'masks' else ''}{file.suffix}")
        (root / name).rmdir()
    own = f"folder:{tmp_path / 'own'}"
    data = load_dataset(own, task="pixels")
    assert torch.equal(data.train.images, right.train.images)
    assert torch.equal(data.train.labels, right.train.labels)
    if part.endswith("cat"):
        assert_raises(InputError, load_dataset, own, say="has a mask beside it")
    else:
        assert load_dataset(own).task.name == "pixels"
    missing = next(file for file in sorted(root.iterdir()) if file.stem.endswith(ending))
    missing.unlink()
    if not part.endswith("cat"):
        assert_raises(InputError, load_dataset, own, say=f"has no mask; put {missing.with_suffix('.png')} there")


@pytest.mark.parametrize("has_test", [True, False])
def test_folders_of_nnunet_are_read(tmp_path: Path, has_test: bool) -> None:
    for end, count in (("Tr", 10), ("Ts", 4)):
        folder = write_folder(tmp_path / end, count)
        for file in sorted((folder / "images").iterdir()):
            file.rename(file.with_stem(f"{file.stem}_0000"))
        (folder / "images").rename(tmp_path / f"images{end}")
        (folder / "masks").rename(tmp_path / f"labels{end}")
        folder.rmdir()
    if not has_test:
        shutil.rmtree(tmp_path / "labelsTs")
    data = load_dataset(f"folder:{tmp_path}")
    assert data.task.name == "pixels"
    assert (len(data.train) + len(data.validation), len(data.test)) == ((10, 4) if has_test else (8, 2))
    images, masks = discs(10)
    known = {image.tobytes(): mask for image, mask in zip(images, masks, strict=True)}
    for image, mask in pairs(data.train):
        assert np.array_equal(mask, known[image.numpy().tobytes()])
    image = next((tmp_path / "imagesTr").iterdir())
    shutil.copy(image, image.with_name(image.name.replace("_0000", "_0001")))
    assert_raises(InputError, load, tmp_path, say="_0001.png are channels of one image, but")


@pytest.mark.parametrize("names", [("images", "masks"), ("images", "labels")])
def test_parts_below_images_are_moved(tmp_path: Path, names: tuple[str, str]) -> None:
    for part in ("train", "val"):
        write_folder(tmp_path / part, 8)
        for old, new in zip(("images", "masks"), names, strict=True):
            (tmp_path / new).mkdir(exist_ok=True)
            (tmp_path / part / old).rename(tmp_path / new / part)
        (tmp_path / part).rmdir()
    words = (
        "DIR/images has no images but train/; put train/ above images/ and masks/, so that there are DIR/train/images"
    )
    assert_raises(InputError, load, tmp_path, say=words.replace("DIR", str(tmp_path)))


@pytest.mark.parametrize("task", ["classes", "labels", "regression"])
@pytest.mark.parametrize("sizes", [((24, 20),), ((24, 20), (40, 37))], ids=["one size", "sizes"])
def test_masks_beside_images_are_no_labels_of_another_task(tmp_path: Path, task: Any, sizes: Any) -> None:
    write_folder(tmp_path, 8, sizes=sizes)
    for name in ("images", "masks"):
        for file in (tmp_path / name).iterdir():
            file.rename(tmp_path / f"{file.stem}{'_mask' * (name == 'masks')}{file.suffix}")
        (tmp_path / name).rmdir()
    words = f'are masks, but the task is {task}; set task="pixels" (--task pixels)'
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", task=task, say=words)
    data = load(tmp_path, patch=8)
    assert_raises(InputError, for_task, data.train, find_task(task), 3, say=words)


def test_patches_need_masks() -> None:
    assert_raises(InputError, load_dataset, "digits", patch=8, say="digits has no masks")


@pytest.mark.parametrize("value", [0, 1, 2, IGNORED])
def test_masks_of_a_part_may_hold_one_number(tmp_path: Path, value: int) -> None:
    for part, change in (("train", np.asarray), ("val", lambda mask: np.full_like(mask, value))):
        renamed(write_folder(tmp_path / part, 8, change=change), "input", "target")
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", say="target/ holds only numbers of classes")
    data = load_dataset(f"folder:{tmp_path}", task="pixels")
    assert data.validation.labels.unique().tolist() == [value]


@pytest.mark.parametrize(
    "names", [("x.png", "x_mask.png", "x_label.png"), ("images/x.png", "masks/x_1.png", "masks/x_2.png")]
)
@pytest.mark.parametrize("task", ["pixels", None])
def test_several_masks_of_an_image_are_named(tmp_path: Path, names: tuple[str, ...], task: str | None) -> None:
    image, mask = discs(1)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save(tmp_path / name, (image if name == names[0] else mask)[0])
    with pytest.raises(
        InputError, match="but an image has one mask, with the number of a class in each pixel; "
    ) as error:
        load_dataset(f"folder:{tmp_path}", task=task)  # type: ignore[arg-type]
    assert all(str(tmp_path / name) in str(error.value) for name in names[1:])


def test_digits_of_pixels_are_those_of_the_brighter_part() -> None:
    from torchcaps.datasets.pairs import fixed_pairs
    from torchcaps.datasets.sources.multimnist import with_masks

    random = torch.Generator().manual_seed(0)
    digits = ImageSet(torch.randint(0, 256, (20, 1, 5, 6), dtype=torch.uint8, generator=random), torch.arange(20) % 10)
    pairs = fixed_pairs(digits, 1)
    found = with_masks(pairs)
    for n, (parts, labels) in enumerate(zip(pairs.parts[:, :, 0], pairs.labels, strict=True)):
        for y in range(7):
            for x in range(8):
                first, second = parts[:, y, x].tolist()
                true = 0 if max(first, second) <= 76.5 else 1 + int(labels[0 if first >= second else 1])
                assert int(found.labels[n, y, x]) == true
    assert found.images is pairs.images


@pytest.mark.slow
@pytest.mark.mnist
def test_multimnist_has_masks(mnist_dir: Path) -> None:
    data = load_dataset("multimnist-pixels", data_dir=mnist_dir)
    assert (data.task.name, data.num_classes, len(data.train), len(data.validation)) == ("pixels", 11, 55_000, 5_000)
    assert data.train.labels[:1000].unique().tolist() == list(range(11))
    assert (data.test.images[:, 0][data.test.labels == 0] < 160).all()  # two dark parts


@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("Training_Input", "Training_GroundTruth")])
@pytest.mark.parametrize("ending", ["_segmentation", "_mask", "-GT"])
def test_masks_in_a_folder_may_end_with_their_name(tmp_path: Path, images: str, masks: str, ending: str) -> None:
    right = load_dataset(f"folder:{write_folder(tmp_path / 'right', 8)}")
    root = write_folder(tmp_path / "own", 8)
    for file in (root / "masks").iterdir():
        file.rename(file.with_stem(file.stem + ending))
    renamed(root, images, masks)
    if masks != "masks":
        assert_raises(InputError, load_dataset, f"folder:{root}", say=f"{masks}/ holds only numbers of classes")
    data = load_dataset(f"folder:{root}", task="pixels")
    assert torch.equal(data.train.images, right.train.images)
    assert torch.equal(data.train.labels, right.train.labels)
