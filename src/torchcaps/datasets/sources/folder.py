"""A user's own images: a folder with one sub-folder for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from torchcaps.checks import checked
from torchcaps.datasets.damaged import note_unread, read_each
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.images import SUFFIXES, image_files_in, in_one_form, read_image, read_pixels, subfolders
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.scaling import Pixels, Scale, as_bytes, as_floats, check_scale
from torchcaps.datasets.sources.segmentation_folder import (
    IMAGES,
    MASKS,
    files_beside,
    folders_of_numbers,
    load_segmentation_folder,
    mask_folders,
    masks_among,
    masks_of_subjects,
)
from torchcaps.datasets.splits import FILE
from torchcaps.datasets.volumes import advice_for
from torchcaps.errors import InputError
from torchcaps.files import composed, paths_from, user_path
from torchcaps.ranges import Pages
from torchcaps.tasks import find_task
from torchcaps.words import counted

PARTS = {"train": "train", "test": "test"} | dict.fromkeys(("val", "valid", "validation", "dev"), "validation")
PARTS |= {"training": "train", "testing": "test"}
"""Parts of a data set by the usual names of their folders, in small letters."""

Files = dict[str, dict[str, list[Path]]]
"""Image files by part and class name."""


@register_dataset(
    "folder",
    title="your own images: PNG, JPEG, BMP, GIF, WebP, TIFF or PNM in one sub-folder a class",
    source="your folder; test/ and val/ beside train/ are used if present",
    licence="yours",
    takes_path=True,
    options=("skip_damaged", "scale", "pages"),
)
def load_folder(request: DataRequest) -> Splits:
    """Read a folder of class sub-folders, or of train/, test/ and val/ (or validation/) with class sub-folders each.

    Without test/, a fixed stratified fifth of the images becomes the test set. Class names are sorted, as numbers if
    all are numbers. Hidden files and files that are no images are ignored. Images are in a fixed random order, so the
    first n come from all classes. They have one channel if all are grey, else three. One error names all unreadable
    images; ``skip_damaged`` leaves them out.

    A folder, or its train/, with images/ and masks/, or with x.png and x_mask.png, has a mask for each image, for the
    task ``pixels``: see :func:`~torchcaps.datasets.sources.segmentation_folder.load_segmentation_folder`. If only the
    files of two folders look like images and masks, the task must be named. A named task always decides on two folders.

    The task ``objects`` takes pictures without labels, in any sub-folders: see :func:`load_pictures`.

    Raises:
        InputError: There are fewer than two classes, a class has too few images, the parts differ in classes, images
            cannot be read, every image of a class has a mask beside it, or images differ in size and ``image_size`` is
            not given.
    """
    root = request.path
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read images from")
    parts = parts_of(root)
    are_named = any(mask_folders(each, image_files_in) for each in parts.values())
    are_beside = any(not subfolders(each) and files_beside(image_files_in(each)).masks for each in parts.values())
    if request.wants_masks or are_beside or (are_named and request.wants_masks is None):
        return load_segmentation_folder(root, parts, request)
    if request.task is not None and request.wants_masks is None:
        return load_pictures(root, parts, request)
    if request.task is None:
        ask_for_task(request)
    files = _files(root)
    class_names = find_task(request.task).in_order(_class_names(files), str(root))
    every = [file for by_class in files.values() for listed in by_class.values() for file in listed]
    if request.task is None and (masks := masks_of_subjects(every)):
        raise InputError(
            f"{masks[0]} is a mask by its name, as in each folder of {root}; to learn masks, put all images into "
            f"{root / IMAGES} and the masks, with the names of their images, into {root / MASKS}; if they are images "
            "of a class, set --task classes"
        )
    listed, targets = dict[str, list[Path]](), dict[str, Tensor]()
    for part, by_class in files.items():
        labelled = [(file, label) for label, name in enumerate(class_names) for file in by_class.get(name, ())]
        listed[part], targets[part] = [file for file, _ in labelled], torch.tensor([label for _, label in labelled])
    note_unread(root, every, "the images of a class are in its folder, without sub-folders")
    sets, damaged = read_labelled(listed, targets, request, str(root))
    if request.part is None and "train" in sets:
        needed = 1 + ("test" not in files) + ("validation" not in files)
        for name, count in zip(class_names, sets["train"].labels.bincount(minlength=len(class_names)), strict=True):
            if count < needed:
                raise InputError(
                    f"{root}: of the class {name}, {count} of the train images can be read, but at least {needed} "
                    "are needed to train, choose the best epoch and test"
                )
    return Splits.of(sets, class_names, skipped=tuple(damaged))


def load_pictures(root: Path, parts: Mapping[str, Path], request: DataRequest) -> Splits:
    """Read all pictures of the folder of each part, and of its sub-folders, with unknown masks.

    A network has seven slots for them, unless its option ``num_capsules`` sets another number.

    Raises:
        InputError: There are no pictures, they cannot be read, or they differ in size without ``image_size``.
    """
    files = {part: image_files_in(folder, deep=True) for part, folder in parts.items()}
    for part, listed in files.items():
        if not listed:
            raise InputError(f"{root}: there are no {part} pictures in {parts[part]} or its sub-folders")
        if masks := masks_among(listed):
            raise InputError(
                f"{masks[0]} is a mask by its name, and one of {counted(len(masks), 'file')} that would be read as a "
                f"picture; put all pictures into {parts[part] / IMAGES} and the masks into {parts[part] / MASKS}, or "
                "move the masks away"
            )
    targets = {part: torch.zeros(len(listed), dtype=torch.int64) for part, listed in files.items()}
    sets, damaged = read_labelled(files, targets, request, str(root))
    return Splits.of_pictures(sets, request.task, skipped=tuple(damaged))


def ask_for_task(request: DataRequest) -> None:
    """Raise InputError if the folders of a data set could be two classes, or images and their masks."""
    takes_pictures = request.task is not None and request.wants_masks is None  # with masks or without
    if request.wants_masks or takes_pictures or not request.path.is_dir():
        return
    parts = [*parts_of(request.path).values()]
    folders = next(filter(None, (mask_folders(each, image_files_in) for each in parts)), None)
    names = folders_of_numbers(parts, request) if folders is None else (folders[0].name, folders[1].name)
    if names is None:
        return
    images, masks = names
    why = (
        f"{masks}/ holds only numbers of classes, as masks do, in files with the names and sizes of those in {images}/"
        if folders is None
        else f"the names of {images}/ and {masks}/ are those of images and masks"
    )
    raise InputError(
        f"{request.path}: {why}; set --task pixels if they are the masks of {images}/, or --task classes if {images} "
        f"and {masks} are two classes of images"
    )


class ImageFiles(TorchDataset[tuple[Tensor, int]]):
    """Images in one sub-folder for each class, read when they are needed: for more images than fit in memory.

    Give it to :func:`torchcaps.fit`.

    Args:
        path: Folder of the images.
        in_shape: Shape to convert the images to, (C, H, W); C is 1 or 3, or the channels of all ``pages``.
        part: Part to read; without test/ and val/, ``"train"`` has all images.
        scale: Numbers (low, high) that become 0 and 1, for files with more than 8 bits. Images are then float32 of
            0..1. None: uint8, files with 16 bits rounded to 256 steps.
        pages: As for `load_dataset`.

    Raises:
        InputError: There is no class, the part is missing, every image of a class has a mask beside it, or (on access)
            a file cannot be read.
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        in_shape: Sequence[int],
        part: Literal["train", "validation", "test"] = "train",
        scale: Scale | None = None,
        pages: Pages | None = None,
    ) -> None:
        root, self.in_shape, self.scale, self.pages = user_path(path), tuple(in_shape), scale, pages
        check_scale("auto" if scale is None else scale)
        files = _files(root)
        if part not in files:
            raise InputError(f"{root} has no folder of {part} images")
        self.class_names = _class_names(files)
        self.files = [(file, label) for label, name in enumerate(self.class_names) for file in files[part][name]]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"], int]:
        file, label = self.files[index]
        image = read_image(file, self.in_shape, fit="stretch", scale=self.scale, pages=self.pages)
        return torch.from_numpy(as_bytes(image) if self.scale is None else as_floats(image)), label


def _class_names(files: Files) -> tuple[str, ...]:
    names = set().union(*files.values())
    numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _files(root: Path) -> Files:
    """Return the files of each part; train/, or the root itself, comes first. It has all classes if it exists."""
    files = {part: _class_files(folder, part) for part, folder in parts_of(root).items()}
    for part, by_class in files.items():
        for name in sorted(by_class.keys() - files.get("train", by_class).keys()):
            raise InputError(
                f"{root}: the class {name} of the {part} images has no folder in train; put training images of it "
                "there, or move its images away"
            )
    return files


def parts_of(root: Path) -> dict[str, Path]:
    """Return the folder of each part; train/, or the root itself, comes first. There may be test/ or val/ alone."""
    folders: dict[str, Path] = {}
    for folder in subfolders(root):
        if (part := PARTS.get(folder.name.lower())) is not None:
            if part in folders:
                raise InputError(f"{root} has both {folders[part].name}/ and {folder.name}/; keep one of them")
            folders[part] = folder
    if others := [
        each.name for each in subfolders(root) if folders and "train" not in folders and each not in folders.values()
    ]:
        raise InputError(f"{root} has {next(iter(folders.values())).name}/ beside {others[0]}/, but no train/")
    return dict(sorted(folders.items(), key=lambda each: each[0] != "train")) if folders else {"train": root}


def _class_files(folder: Path, part: str) -> dict[str, list[Path]]:
    """Return the image files of each class sub-folder, sorted; only training images must have all classes."""
    files = dict[str, list[Path]]()
    for child in subfolders(folder):
        inside = image_files_in(child)
        files.setdefault(composed(child.name), []).extend(inside)
        if not inside and part == "train":
            suffixes, below = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES)), image_files_in(child, deep=True)
            why = f"no images{advice_for(child, folder) or f'; put some there ({suffixes}) or remove it'}"
            if any(child.glob("*/.lock.json")):
                why = "a run folder; choose a folder elsewhere for the run (--out)"
            elif below:
                why = f"images in sub-folders only, such as {below[0]}; move them up, or list all in a table, csv:PATH"
            raise InputError(f"the class folder {child} has {why}")
        _refuse_masks(child.name, inside)
    if not files:
        raise InputError(f"{folder} has no class sub-folders; put the images of each class in a separate sub-folder")
    return files


def _refuse_masks(name: str, files: Sequence[Path]) -> None:
    """Raise InputError if every image of a class has a mask beside it, which would be taken for another image."""
    beside = files_beside(files)
    if beside.masks and beside.masks.keys() == beside.images.keys():
        mask = min(beside.masks.values())[0]
        raise InputError(
            f"each image of the class {name} has a mask beside it, such as {mask}; set --task pixels to read the "
            "masks, or, for classes, move them away"
        )


def read_labelled(
    files: Mapping[str, Sequence[Path]],
    targets: Mapping[str, Tensor],
    request: DataRequest,
    where: str,
    names_of: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> tuple[dict[str, ImageSet], list[str]]:
    """Read the image files of each part, with a target and perhaps names for each, in a fixed random order.

    Images have one size, and they are grey if all are grey, otherwise in colour.

    Returns:
        The sets by part, and a sentence for each image that is left out (only with ``skip_damaged``).

    Raises:
        InputError: An image cannot be read, none of a part can, or images differ in size; errors begin with ``where``.
    """
    listed = [file for part in files.values() for file in part]
    read, skip = partial(_read_image, request=request), request.skip_damaged
    images, damaged = read_each(listed, read, skip=skip, check=_check_sizes)
    root = request.path if request.path.is_dir() else request.path.parent
    images, sets = in_one_form(images, where, request.scale, request.pages), dict[str, ImageSet]()
    for part, of_part in files.items():
        kept = [n for n, file in enumerate(of_part) if file in images]
        if not kept:
            raise InputError(f"{where}: none of the {part} images can be read")
        order = [kept[n] for n in generator(FIXED_SEED).permutation(len(kept))]
        pixels = np.stack([images[of_part[n]] for n in order])
        names = {kind: tuple(texts[part][n] for n in order) for kind, texts in (names_of or {}).items()}
        names[FILE] = paths_from(root, (of_part[n] for n in order))
        sets[part] = ImageSet(torch.from_numpy(pixels), targets[part][order], names=names)
    return sets, damaged


def _check_sizes(*pair: tuple[Path, Pixels]) -> None:
    """Raise InputError unless two images have one size."""
    sizes = ["×".join(map(str, image.shape[1:])) for _, image in pair]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{pair[1][0]} is {sizes[1]} pixels (height × width), but {pair[0][0]} is {sizes[0]}; bring all images to "
            "one size with --image-size"
        )


def _read_image(file: Path, request: DataRequest) -> Pixels:
    """Read an image file, whose pages may be channels, and resize it: files differ in size, and may be large."""
    if request.pages == "depth":
        raise InputError(f"{file} has no mask, and only volumes with masks have a depth; set --pages channels")
    image = read_pixels(file, scale=request.scale, pages=request.pages)
    size = request.image_size
    return image if size is None else resize_images(torch.from_numpy(image)[None], size)[0].numpy()
