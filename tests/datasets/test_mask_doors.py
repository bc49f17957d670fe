"""One rule for masks, whatever the door: folders, volumes, arrays in files, and ``fit``, compared by tensors."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pixel_support import discs
from support import assert_raises
from torchcaps import create_model
from torchcaps.datasets import PatchSet, load_dataset
from torchcaps.datasets.loading import load_part
from torchcaps.datasets.matching import match_outputs
from torchcaps.datasets.user_data import Form, open_data
from torchcaps.errors import InputError
from torchcaps.tasks import find_task
from torchcaps.training.image_spec import ImageSpec

COUNT, SIZE = 12, (24, 20)
IMAGES, MASKS = discs(COUNT, SIZE)
IMAGES[:, 0, 0] = np.arange(COUNT)  # tells the image
# Each third of the images lacks other classes, so what a value means cannot be decided by a third alone.
PARTS = {"train": slice(0, 4), "val": slice(4, 8), "test": slice(8, 12)}
MASKS[PARTS["val"]][MASKS[PARTS["val"]] == 1] = 0
MASKS[PARTS["test"]][MASKS[PARTS["test"]] == 0] = 2
COLOURS = np.array([[0, 0, 0], [0, 0, 255], [255, 128, 0]], np.uint8)
OBJECTS = (MASKS > 0).astype(np.uint8)
IGNORING = MASKS.copy()
IGNORING[:, :5] = 255

FORMS: dict[str, tuple[Any, np.ndarray]] = {
    "numbers": (MASKS, MASKS),
    "int64": (MASKS.astype(np.int64), MASKS),
    "floats": (MASKS.astype(np.float32), MASKS),
    "channel last": (MASKS[..., None], MASKS),
    "channel first": (MASKS[:, None], MASKS),
    "grey, last": (np.repeat(MASKS[..., None], 3, -1), MASKS),
    "grey, first": (np.repeat(MASKS[:, None], 3, 1), MASKS),
    "colour, last": (COLOURS[MASKS], MASKS),
    "colour, first": (np.moveaxis(COLOURS[MASKS], -1, 1), MASKS),
    "one-hot, last": (np.eye(3, dtype=np.uint8)[MASKS], MASKS),
    "one-hot, first": (np.moveaxis(np.eye(3, dtype=np.uint8)[MASKS], -1, 1), MASKS),
    "0 and 255": (OBJECTS * 255, OBJECTS),
    "0 and 255, last": ((OBJECTS * 255)[..., None], OBJECTS),
    "0 and 255, colour": (np.repeat((OBJECTS * 255)[..., None], 3, -1), OBJECTS),
    "True and False": (OBJECTS == 1, OBJECTS),
    "ignored": (IGNORING, IGNORING),
}
"""Forms of masks, and the classes that they are."""
VOLUME_FORMS = ["numbers", "int64", "floats", "channel last", "0 and 255", "True and False", "ignored"]


def by_image(images: Any, masks: Any) -> dict[int, Tensor]:
    """The mask of each image, by its number."""
    return {round(float(image.flatten()[0])): mask for image, mask in zip(images, masks, strict=True)}


def of_dataset(data: Any) -> dict[int, Tensor]:
    found = {}
    for part in (data.train, data.validation, data.test):
        found |= by_image(part.images, part.labels)
    return found


def from_folder(path: Path, masks: np.ndarray, parts: dict[str, slice] | None = None) -> dict[int, Tensor]:
    for part, numbers in (parts or {"": slice(None)}).items():
        for name in ("images", "masks"):
            (path / part / name).mkdir(parents=True)
        for n in range(COUNT)[numbers]:
            Image.fromarray(IMAGES[n]).save(path / part / f"images/{n}.png")
            plain = masks[n][..., 0] if masks[n].ndim == 3 and masks[n].shape[-1] == 1 else masks[n]
            suffix = "tif" if plain.dtype == np.float32 else "png"
            Image.fromarray(plain).save(path / part / f"masks/{n}.{suffix}")
    return of_dataset(load_dataset(f"folder:{path}"))


def from_folder_of_parts(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    return from_folder(path, masks, PARTS)


def from_npz(path: Path, masks: np.ndarray, x: np.ndarray = IMAGES) -> dict[int, Tensor]:
    np.savez(path / "own.npz", x=x, y=masks)
    return of_dataset(load_dataset(f"npz:{path / 'own.npz'}", task="pixels"))


def from_npz_of_parts(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    ends = {"train": "", "val": "_val", "test": "_test"}
    arrays = {f"x{ends[part]}": IMAGES[numbers] for part, numbers in PARTS.items()}
    arrays |= {f"y{ends[part]}": masks[numbers] for part, numbers in PARTS.items()}
    np.savez(path / "own.npz", **arrays)  # type: ignore[arg-type]
    return of_dataset(load_dataset(f"npz:{path / 'own.npz'}", task="pixels"))


def from_keras_npz(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    return from_npz(path, masks, IMAGES[..., None])


def from_torch_npz(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    return from_npz(path, masks, IMAGES[:, None])


def form_of(masks: np.ndarray) -> Form:
    return Form(find_task("pixels"), num_outputs=3, in_shape=(1, *IMAGES.shape[1:]))


def from_fit(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    opened = open_data((IMAGES, masks), form_of(masks))
    return by_image(opened.data.images, opened.data.labels)


def from_fit_of_tensors(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    opened = open_data((torch.from_numpy(IMAGES), list(map(torch.from_numpy, masks))), form_of(masks))
    return by_image(opened.data.images, opened.data.labels)


def from_validation(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    form = form_of(masks)
    table = open_data((IMAGES, masks), form).table
    found = {}
    for n in range(0, COUNT, 4):  # decided by the training masks, not by these four
        part = slice(n, n + 4)
        opened = open_data(
            (IMAGES[part], masks[part]), Form(form.task, 3, form.in_shape, table=table), where="validation"
        )
        found |= by_image(opened.data.images, opened.data.labels)
    return found


def from_lists(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    """Images of two sizes, as patches."""
    images = [*IMAGES, np.pad(IMAGES[0], ((0, 3), (0, 0)))]
    pad = ((0, 3), (0, 0)) if masks.shape[1:3] == SIZE else ((0, 0), (0, 3), (0, 0))
    more = np.pad(masks[0], [*pad, (0, 0)][: masks[0].ndim], mode="edge")
    opened = open_data((images, [*masks, more]), Form(find_task("pixels"), 3, (1, 8, 8)))
    assert isinstance(opened.data, PatchSet)
    assert opened.data.in_shape == (1, 8, 8)
    return by_image(opened.data.images[:-1], opened.data.labels[:-1])


def from_pictures(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    """Lists of Pillow images; numbers have a palette, as in files."""
    pictures = [Image.fromarray(mask) for mask in masks]
    for picture in pictures:
        if picture.mode == "L":
            picture.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    opened = open_data((list(map(Image.fromarray, IMAGES)), pictures), form_of(masks))
    return by_image(opened.data.images, opened.data.labels)


class Stream(torch.utils.data.Dataset[Any]):
    def __init__(self, masks: np.ndarray) -> None:
        self.masks = masks

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, n: int) -> Any:
        return IMAGES[n % COUNT], self.masks[n]


def from_items(path: Path, masks: np.ndarray) -> dict[int, Tensor]:
    return by_image(*open_data(Stream(masks), form_of(masks)).data.read(range(COUNT)))


DOORS: dict[str, Callable[[Path, np.ndarray], dict[int, Tensor]]] = {
    "folder": from_folder,
    "folder of parts": from_folder_of_parts,
    "npz": from_npz,
    "npz of parts": from_npz_of_parts,
    "npz, channels last": from_keras_npz,
    "npz, channels first": from_torch_npz,
    "fit": from_fit,
    "fit of tensors": from_fit_of_tensors,
    "validation": from_validation,
    "lists": from_lists,
    "pictures": from_pictures,
    "items": from_items,
}
NOT_IN_FILES = ("first", "one-hot", "int64")
LACKING = {
    "folder": NOT_IN_FILES,
    "folder of parts": NOT_IN_FILES,
    "pictures": (*NOT_IN_FILES, "channel", "255, last"),
    "items": ("colour", "255"),
}
"""Words of forms that a door does not take."""
CASES = [(door, form) for door in DOORS for form in FORMS if not any(w in form for w in LACKING.get(door, ()))]


@pytest.mark.parametrize(("door", "form"), CASES)
def test_masks_of_any_form_are_the_same_at_every_door(tmp_path: Path, door: str, form: str) -> None:
    masks, classes = FORMS[form]
    found = DOORS[door](tmp_path, masks)
    assert found.keys() == set(range(COUNT))
    for n, mask in found.items():
        assert mask.dtype == torch.uint8
        assert np.array_equal(mask, classes[n]), (n, mask.unique(), np.unique(classes[n]))


def test_the_training_masks_decide_what_values_of_others_are() -> None:
    form = Form(find_task("pixels"), 3, (1, *SIZE))
    colours = np.array([[0, 0, 0], [255, 0, 0], [255, 255, 255]], np.uint8)
    table = open_data((IMAGES, colours[MASKS]), form).table
    validation = Form(form.task, 3, form.in_shape, table=table)
    grey = np.where(MASKS == 1, 0, MASKS)  # black and white, which are colours here
    assert np.array_equal(open_data((IMAGES, colours[grey]), validation, where="validation").data.labels, grey)
    for masks, words in ((COLOURS[MASKS], "the colour #0000ff, which the training"), (MASKS, "the colour #010101")):
        assert_raises(InputError, open_data, (IMAGES, masks), validation, where="validation", say=words)
    table = open_data((IMAGES, OBJECTS), form).table
    validation = Form(form.task, 3, form.in_shape, table=table)
    with pytest.warns(UserWarning, match=r"labels\[0\] holds no number but 0 and 255, but other"):
        open_data((IMAGES, OBJECTS * 255), validation, where="validation")
    assert_raises(InputError, open_data, (IMAGES, COLOURS[MASKS]), validation, where="validation", say="is no number")


def test_0_and_255_beside_numbers_of_classes_are_said(tmp_path: Path) -> None:
    masks = OBJECTS.copy()
    masks[PARTS["test"]] *= 255
    for door in (from_folder_of_parts, from_npz_of_parts):
        (tmp_path / door.__name__).mkdir()
        with pytest.warns(UserWarning, match="no number but 0 and 255, but other masks hold numbers of classes"):
            door(tmp_path / door.__name__, masks)


@pytest.mark.parametrize("listed", [(), (0, 1, 2), (2, 0, 1)], ids=["no list", "list", "another order"])
@pytest.mark.parametrize("door", ["folder", "npz"])
def test_every_door_knows_the_colours_of_its_masks(tmp_path: Path, door: str, listed: tuple[int, ...]) -> None:
    masks, names = COLOURS[MASKS], tuple(f"class {j}" for j in listed)
    hexes = [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in COLOURS]
    if door == "folder":
        if listed:
            (tmp_path / "classes.txt").write_text("".join(f"class {j} {hexes[j]}\n" for j in listed))
        from_folder(tmp_path, masks)
        spec = f"folder:{tmp_path}"
    else:
        names = tuple(sorted(names))  # of an array, colours have their own order
        named = {"class_names": np.array(names)} if listed else {}
        np.savez(tmp_path / "own.npz", x=IMAGES, y=masks, **named)
        spec = f"npz:{tmp_path / 'own.npz'}"
    data = load_dataset(spec)
    assert data.class_names == (names or tuple(hexes))
    assert data.colours == tuple(hexes[j] for j in (listed if listed and door == "folder" else range(3)))
    part = load_part(spec, "all")
    assert part.colours == data.colours
    drawn = np.array([[int(each[k : k + 2], 16) for k in (1, 3, 5)] for each in data.colours], np.uint8)
    for n, mask in by_image(part.images.images, part.images.labels).items():
        assert np.array_equal(drawn[mask], masks[n])
    order = tuple(reversed(data.class_names))
    network = ImageSpec(in_shape=data.in_shape, class_names=order, task="pixels")
    assert match_outputs(part, network).colours == tuple(reversed(data.colours))
    known = ImageSpec(
        in_shape=data.in_shape, class_names=order, task="pixels", colours=("#010203", "#040506", "#070809")
    )
    assert match_outputs(part, known).colours == known.colours
    more = ImageSpec(in_shape=data.in_shape, class_names=(*order, "further"), task="pixels")
    assert match_outputs(part, more).colours is None


@pytest.mark.parametrize("form", VOLUME_FORMS)
@pytest.mark.parametrize("door", ["npz", "npz, channels last", "fit", "nifti"])
def test_masks_of_volumes_are_the_same_at_every_door(tmp_path: Path, door: str, form: str) -> None:
    masks, classes = FORMS[form]
    flat = masks[..., 0] if form == "channel last" else masks
    deep, images = np.stack([flat] * 6, 1), np.stack([IMAGES] * 6, 1)
    deep = deep[..., None] if form == "channel last" else deep
    if door == "nifti":
        nib = pytest.importorskip("nibabel")
        for name, values in (("images", images.astype(np.int16)), ("masks", deep.reshape(images.shape))):
            (tmp_path / name).mkdir()
            for n, each in enumerate(values):
                stored = each.astype(np.uint8) if each.dtype in (bool, np.int64) else each
                nib.save(nib.Nifti1Image(stored.T, np.eye(4)), tmp_path / name / f"{n}.nii")
        data = load_dataset(f"nifti:{tmp_path}", scale=(0, 255))
        found = of_dataset(data)
    elif door == "fit":
        opened = open_data((images[:, None], deep), Form(find_task("pixels"), 3, (1, *images.shape[1:])))
        found = by_image(opened.data.tensors[0], opened.data.tensors[1])
    else:
        found = from_npz(tmp_path, deep, images if door == "npz" else images[..., None])
    for n, mask in found.items():
        assert np.array_equal(mask, np.stack([classes[n]] * 6))


def test_streams_of_0_and_255_are_refused(tmp_path: Path) -> None:
    form = Form(find_task("pixels"), 3, (1, *SIZE))
    for data in (Stream(OBJECTS * 255), torch.utils.data.DataLoader(Stream(OBJECTS * 255), batch_size=4)):
        assert_raises(InputError, open_data, data, form, say="labels of items hold only 0 and 255, but 255 is ignored")
    rare = np.zeros((300, *SIZE), np.uint8)
    rare[[7, 200], 3] = 255
    assert_raises(InputError, open_data, Stream(rare), form, say="labels of items hold only 0 and 255")
    assert_raises(InputError, open_data, Stream(COLOURS[MASKS]), form, say="labels of items are in colour; give the")
    _, labels = open_data(Stream(FORMS["ignored"][0]), form).data.read([0, 1])
    assert np.array_equal(labels, FORMS["ignored"][1][:2])


@pytest.mark.parametrize("largest", [256, 300, 65_535, 2**24, 2**24 + 5, 2**31, 2**32 - 1])
def test_large_numbers_are_ids_and_the_advice_works(tmp_path: Path, largest: int) -> None:
    values = np.array([0, 5, largest], np.uint32)[MASKS]
    words = f"or name them in classes.txt with these numbers, on lines such as vein ={largest}"
    for kind in ("folder", "nifti"):
        folder = tmp_path / kind
        if kind == "nifti":
            nib = pytest.importorskip("nibabel")
        for name, arrays in (("images", IMAGES), ("masks", values)):
            (folder / name).mkdir(parents=True)
            for n, each in enumerate(arrays):
                if kind == "nifti":
                    nib.save(nib.Nifti1Image(each.T[..., None], np.eye(4)), folder / name / f"{n}.nii")
                elif name == "images" or largest < 2**31:
                    Image.fromarray(each if name == "images" else each.astype(np.int32)).save(
                        folder / name / f"{n}.tif"
                    )
        if kind == "folder" and largest >= 2**31:
            continue
        assert_raises(InputError, load_dataset, f"{kind}:{folder}", say=words)
        (folder / "classes.txt").write_text(f"ground =0\ndisc =5\nsquare ={largest}\n")
        data = load_dataset(f"{kind}:{folder}", **({} if kind == "folder" else {"scale": (0, 300)}))
        assert data.class_names == ("ground", "disc", "square")
        if kind == "folder":
            assert all(np.array_equal(mask, MASKS[n]) for n, mask in of_dataset(data).items())
        (folder / "classes.txt").write_text("ground =0\ndisc =5\nsquare =7\n")
        say = f"has the number {largest}, which has no line in classes.txt; add a line such as vein ={largest}"
        with pytest.raises(InputError, match=say):
            load_dataset(f"{kind}:{folder}")
    np.savez(tmp_path / "own.npz", x=IMAGES, y=values)
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'own.npz'}", say="such as by numpy.unique(labels, return")
    np.savez(tmp_path / "own.npz", x=IMAGES, y=np.unique(values, return_inverse=True)[1].reshape(values.shape))
    assert load_dataset(f"npz:{tmp_path / 'own.npz'}").num_classes == 3


def test_masks_of_instances_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for n, image in enumerate(IMAGES):
        mask = np.zeros(SIZE, np.uint8)
        mask.reshape(-1)[: n + 9] = np.arange(1, n + 10)
        Image.fromarray(image).save(folder / f"images/{n}.png")
        Image.fromarray(mask).save(folder / f"masks/{n}.png")
    with pytest.warns(UserWarning, match="as masks do that number the objects of an image"):
        load_dataset(f"folder:{folder}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tmp_path / "discs").mkdir()
        from_folder(tmp_path / "discs", MASKS)


def test_a_network_is_fitted_to_pictures_of_several_sizes() -> None:
    from torchcaps import fit
    from torchcaps.training import Progress, Recipe

    images = [IMAGES[0], IMAGES[1][:, :18], IMAGES[2][:21]]
    masks = [MASKS[0], MASKS[1][:, :18], MASKS[2][:21]]
    model = create_model("unet-twin", (1, 8, 8), 3, parameters_of=None, channels=(2, 2))
    rows = fit(model, (images, masks), Recipe(epochs=1, batch_size=2), progress=Progress())
    assert len(rows) == 1
    wrong = [*masks[:2], MASKS[2]]
    assert_raises(InputError, fit, model, (images, wrong), Recipe(epochs=1), say="a mask has the size of its image")
