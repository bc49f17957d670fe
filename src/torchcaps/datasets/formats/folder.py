"""A user's own images: a folder with one sub-folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.formats.image_files import SUFFIXES, read_pixels, with_channels
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.splits import with_test_set
from torchcaps.errors import InputError

_VALIDATION_NAMES = ("val", "valid", "validation")

ClassFiles = dict[str, list[Path]]
"""The image files of each class, by the name of the class."""


@register_dataset(
    "folder",
    title="your own images: PNG, JPEG, BMP, GIF, WebP or TIFF in one sub-folder a class",
    source="your folder; test/ and val/ beside train/ are used if they are there",
    licence="yours",
    takes_path=True,
)
def load_folder(request: DataRequest) -> Splits:
    """Read a folder of class sub-folders, or of train/, test/ and val/ (or validation/) with class sub-folders each.

    Without test/, a fixed stratified fifth of the images is set aside as the test set. Class names are sorted, by
    number where all are numbers. Hidden files and files that are no images are ignored. The images are in a fixed
    random order, so that the first n of them are of all classes. They have one channel if all are grey, else three.

    Raises:
        InputError: There is no class or only one, a class has too few images, the parts differ in classes, an image
            cannot be read, or images differ in size and no ``image_size`` was asked for.
    """
    root = request.source
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read images from")
    folders = _parts(root)
    files = {part: _class_files(folder) for part, folder in folders.items()}
    class_names = _class_names(folders, files)
    # each class needs one image to train on, and one for each part that has no folder of its own
    _check_enough(folders["train"], files["train"], 1 + ("test" not in files) + ("validation" not in files))

    reader = _Reader(request.image_size)
    images = {part: reader.read(by_class, class_names) for part, by_class in files.items()}
    sets = {part: _stack(pixels, labels, reader.channels) for part, (pixels, labels) in images.items()}
    return with_test_set(root, sets, class_names)


def _parts(root: Path) -> dict[str, Path]:
    """The folder of each part: train/, and test/ and validation/ if they are there; or the root as train."""
    parts: dict[str, Path] = {}
    for folder in _subfolders(root):
        name = folder.name.lower()
        part = "validation" if name in _VALIDATION_NAMES else name
        if part not in ("train", "test", "validation"):
            continue
        if part in parts:
            raise InputError(f"{root} has both {parts[part].name}/ and {folder.name}/; keep one of them")
        parts[part] = folder
    if parts and "train" not in parts:
        raise InputError(f"{root} has {next(iter(parts.values())).name}/ but no train/ beside it")
    return {"train": parts.pop("train", root), **parts}  # train first: the others must have the same classes


def _subfolders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not _is_hidden(child))


def _is_hidden(path: Path) -> bool:
    return path.name.startswith((".", "__MACOSX"))


def _class_files(folder: Path) -> ClassFiles:
    """The image files of each class sub-folder, sorted."""
    classes = _subfolders(folder)
    if not classes:
        raise InputError(f"{folder} has no class sub-folders; put the images of each class in a sub-folder of its own")
    files = {
        child.name: sorted(
            file
            for file in child.iterdir()
            if file.suffix.lower() in SUFFIXES and file.is_file() and not _is_hidden(file)
        )
        for child in classes
    }
    empty = [name for name, images in files.items() if not images]
    if empty:
        raise InputError(
            f"the class folder {folder / empty[0]} has no images; put some there ({_suffix_list()}) or remove it"
        )
    return files


def _suffix_list() -> str:
    return ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))


def _class_names(folders: dict[str, Path], files: dict[str, ClassFiles]) -> tuple[str, ...]:
    """The names of the classes in the order of their labels, the same in all parts."""
    names = set(files["train"])
    if len(names) < 2:
        raise InputError(f"{folders['train']} has only the class {min(names)}; at least two are needed")
    for part, by_class in files.items():
        odd = sorted(names ^ set(by_class))
        if odd:
            holder, lacker = ("train", part) if odd[0] in names else (part, "train")
            raise InputError(
                f"the class {odd[0]} is in {folders[holder]} but not in {folders[lacker]}; "
                "all parts must have the same classes"
            )
    numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _check_enough(folder: Path, by_class: ClassFiles, needed: int) -> None:
    for name, images in by_class.items():
        if len(images) < needed:
            raise InputError(
                f"the class folder {folder / name} has {len(images)} image{'s' * (len(images) != 1)}, but at least "
                f"{needed} are needed to train, choose the best epoch and test"
            )


class _Reader:
    """Reads image files and remembers their common size, and whether one of them has colour."""

    def __init__(self, image_size: tuple[int, int] | None) -> None:
        self.channels = 1
        self._resize_to = image_size
        self._first: tuple[Path, tuple[int, int]] | None = None

    def read(self, by_class: ClassFiles, class_names: tuple[str, ...]) -> tuple[list[np.ndarray], list[int]]:
        """Read pixels, each (1 or 3, H, W), and labels, in a fixed random order."""
        files = [(file, label) for label, name in enumerate(class_names) for file in by_class[name]]
        order = generator(FIXED_SEED).permutation(len(files))
        pixels = [self._read_one(file) for file, _ in files]
        return [pixels[i] for i in order], [files[i][1] for i in order]

    def _read_one(self, file: Path) -> np.ndarray:
        image = read_pixels(file)
        self.channels = max(self.channels, len(image))
        if self._resize_to:
            return resize_images(torch.from_numpy(image)[None], self._resize_to)[0].numpy()
        size = (image.shape[1], image.shape[2])
        self._first = self._first or (file, size)
        if size != self._first[1]:
            raise InputError(
                f"{file} is {size[0]}×{size[1]} pixels (height × width), but {self._first[0]} is "
                f"{self._first[1][0]}×{self._first[1][1]}; bring all images to one size with --image-size"
            )
        return image


def _stack(pixels: list[np.ndarray], labels: list[int], channels: int) -> ImageSet:
    images = np.stack([with_channels(image, channels) for image in pixels])
    return ImageSet(torch.from_numpy(images), torch.tensor(labels))
