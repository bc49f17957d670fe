"""A user's own images: a folder with one sub-folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from torchcaps.datasets.dataset import ImageSet, Splits, resize_images
from torchcaps.datasets.images import SUFFIXES, read_pixels, with_channels
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.splits import with_test_set
from torchcaps.errors import InputError

_VALIDATION_NAMES = ("val", "valid", "validation")
_MOST_NAMED = 20  # damaged files in an error

Files = dict[str, dict[str, list[Path]]]
"""The image files of each part, by the names of their classes."""


@register_dataset(
    "folder",
    title="your own images: PNG, JPEG, BMP, GIF, WebP or TIFF in one sub-folder a class",
    source="your folder; test/ and val/ beside train/ are used if they are there",
    licence="yours",
    takes_path=True,
    can_skip_damaged=True,
)
def load_folder(request: DataRequest) -> Splits:
    """Read a folder of class sub-folders, or of train/, test/ and val/ (or validation/) with class sub-folders each.

    Without test/, a fixed stratified fifth of the images is set aside as the test set. Class names are sorted, by
    number where all are numbers. Hidden files and files that are no images are ignored. The images are in a fixed
    random order, so that the first n of them are of all classes. They have one channel if all are grey, else three.
    Images that cannot be read are all named in one error; with ``skip_damaged`` they are left out, as if they were not
    there.

    Raises:
        InputError: There is no class or only one, a class has too few images, the parts differ in classes, images
            cannot be read, or images differ in size and no ``image_size`` was asked for.
    """
    root = request.source
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read images from")
    files = {part: _class_files(folder) for part, folder in _parts(root).items()}
    class_names = _class_names(root, files)
    images, damaged = _read(files, request.image_size, skip=request.skip_damaged)
    read = {
        part: {name: [file for file in listed if file in images] for name, listed in by_class.items()}
        for part, by_class in files.items()
    }
    _check_enough(root, read)
    return with_test_set(root, _sets(read, class_names, images), class_names, tuple(damaged))


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


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class sub-folder, sorted."""
    files = {
        child.name: sorted(
            file
            for file in child.iterdir()
            if file.suffix.lower() in SUFFIXES and file.is_file() and not _is_hidden(file)
        )
        for child in _subfolders(folder)
    }
    if not files:
        raise InputError(f"{folder} has no class sub-folders; put the images of each class in a sub-folder of its own")
    empty = [name for name, images in files.items() if not images]
    if empty:
        suffixes = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise InputError(
            f"the class folder {folder / empty[0]} has no images; put some there ({suffixes}) or remove it"
        )
    return files


def _class_names(root: Path, files: Files) -> tuple[str, ...]:
    """The names of the classes in the order of their labels, the same in all parts."""
    names = set(files["train"])
    if len(names) < 2:
        raise InputError(f"{root} has only the class {min(names)}; at least two are needed")
    for part, by_class in files.items():
        odd = sorted(names ^ set(by_class))
        if odd:
            raise InputError(
                f"{root}: the class {odd[0]} has no folder in {part if odd[0] in names else 'train'}; all parts must "
                "have the same classes"
            )
    numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _check_enough(root: Path, files: Files) -> None:
    """Raise InputError unless each class has an image to train on, and one for each part without a folder."""
    for part, by_class in files.items():
        needed = 1 + (("test" not in files) + ("validation" not in files) if part == "train" else 0)
        for name, images in by_class.items():
            if len(images) < needed:
                raise InputError(
                    f"{root}: the class {name} has {len(images)} {part} image{'s' * (len(images) != 1)} that can be "
                    f"read, but at least {needed} are needed to train, choose the best epoch and test"
                )


def _read(files: Files, size: tuple[int, int] | None, *, skip: bool) -> tuple[dict[Path, np.ndarray], list[str]]:
    """Read all images, which must be of one size.

    Returns:
        The images that can be read, and what is wrong with each of the others, if these are to be skipped.
    """
    images: dict[Path, np.ndarray] = {}
    damaged: list[str] = []
    listed = [file for by_class in files.values() for each in by_class.values() for file in each]
    for file in listed:
        try:
            image = read_pixels(file)
        except InputError as error:
            damaged.append(str(error))
            continue
        if damaged and not skip:  # nothing is trained on: the others are only looked at
            images.clear()
            continue
        images[file] = image if size is None else resize_images(torch.from_numpy(image)[None], size)[0].numpy()
        first = next(iter(images))
        own, other = ("×".join(map(str, images[each].shape[1:])) for each in (file, first))
        if own != other:
            raise InputError(
                f"{file} is {own} pixels (height × width), but {first} is {other}; bring all images to one size with "
                "--image-size"
            )
    if damaged and not skip:
        raise InputError(_listed(damaged, len(listed)))
    return images, damaged


def _listed(damaged: list[str], number: int) -> str:
    """One sentence about a damaged image, or a list of them for several."""
    if len(damaged) == 1:
        return f"{damaged[0]} (mend or remove it, or leave it out by train --skip-damaged)"
    others = len(damaged) - _MOST_NAMED
    more = [f"and {others} more"] if others > 0 else []
    first = f"{len(damaged)} of {number} images cannot be taken; mend or remove them, or leave them out by train "
    return "\n  ".join([f"{first}--skip-damaged:", *damaged[:_MOST_NAMED], *more])


def _sets(files: Files, class_names: tuple[str, ...], images: dict[Path, np.ndarray]) -> dict[str, ImageSet]:
    """The images of each part in a fixed random order, all of one number of channels."""
    channels = max(map(len, images.values()))
    sets = {}
    for part, by_class in files.items():
        labelled = [(file, label) for label, name in enumerate(class_names) for file in by_class[name]]
        shuffled = [labelled[i] for i in generator(FIXED_SEED).permutation(len(labelled))]
        pixels = np.stack([with_channels(images[file], channels) for file, _ in shuffled])
        sets[part] = ImageSet(torch.from_numpy(pixels), torch.tensor([label for _, label in shuffled]))
    return sets
