"""A folder of images and masks: images/ and masks/, with the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet, resize_images, resize_masks
from torchcaps.datasets.images import image_files_in, read_pixels, stem_of, subfolders, with_channels
from torchcaps.datasets.masks import number_masks, read_classes, read_mask
from torchcaps.datasets.pixel_set import PixelSet
from torchcaps.datasets.registry import DataRequest
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.errors import InputError

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
MAX_NAMED = 3
"""Files that an error names."""


def has_masks(folder: Path) -> bool:
    """Return True if a folder has images/ and masks/.

    Raises:
        InputError: It has them in other letters, such as Images/, which would be taken for classes.
    """
    names = {each.name: each.name.lower() for each in subfolders(folder)}
    if not {IMAGES, MASKS} <= set(names.values()):
        return False
    for name, lower in names.items():
        if lower in (IMAGES, MASKS) and name not in (IMAGES, MASKS) and lower not in names:
            raise InputError(f"{folder / name} must be named {lower}/, in small letters, for images with masks")
    return True


def load_pixel_folder(root: Path, parts: Mapping[str, Path], request: DataRequest) -> Splits:
    """Read the images and masks of each part.

    A mask has the name and size of its image, except for the suffix. ``classes.txt`` beside images/, or beside train/,
    names the classes. Images are in a fixed random order.

    Args:
        root: Folder of the data set.
        parts: Folder of images/ and masks/ of each part.
        request: Options; with ``patch``, training takes patches of this side.

    Raises:
        InputError: An image has no mask, a mask has no image or another size, it holds no numbers of classes, or images
            differ in size and neither ``patch`` nor ``image_size`` is given.
    """
    pairs = {part: pairs_of(folder, image_files_in) for part, folder in parts.items()}
    names, colours = read_classes(root / CLASSES)
    images, masks, damaged = dict[str, np.ndarray](), dict[str, np.ndarray](), list[str]()
    for pair in (pair for found in pairs.values() for pair in found):
        try:
            image, mask = read_pixels(pair.image), read_mask(pair.mask, str(pair.mask))
        except InputError as error:
            if not request.skip_damaged:
                raise
            damaged.append(str(error))
            continue
        if image.shape[1:] != mask.shape:
            sizes = ["×".join(map(str, size)) for size in (mask.shape, image.shape[1:])]
            raise InputError(
                f"{pair.mask} is {sizes[0]}, but {pair.image} {sizes[1]} (height × width); a mask has the size of its "
                "image"
            )
        images[str(pair.mask)], masks[str(pair.mask)] = image, mask
    sets = {}
    if masks:
        numbered, class_names = number_masks(masks, names, colours)
        channels = max(map(len, images.values()))
    for part, found in pairs.items():
        keys = [str(pair.mask) for pair in found if str(pair.mask) in masks]
        if not keys:
            raise InputError(f"{root}: none of the {part} images and masks can be read")
        pixels = [torch.from_numpy(with_channels(images[key], channels)) for key in keys]
        labels = [torch.from_numpy(numbered[key]) for key in keys]
        sets[part] = to_set(pixels, labels, request, str(root))
    parts_left = (sets["train"], sets.get("test"), class_names, sets.get("validation"))
    return Splits(*parts_left, skipped=tuple(damaged), task="pixels")


class Pair(NamedTuple):
    """Files of an image and of its mask."""

    image: Path
    mask: Path


def pairs_of(folder: Path, files_in: Callable[[Path], list[Path]], end: str = "") -> list[Pair]:
    """Return the images of a folder and their masks, in a fixed random order; ``end`` is the suffix of a missing mask.

    Raises:
        InputError: There is no image, two files have one name, or an image or a mask is alone.
    """
    found: dict[str, dict[str, Path]] = {}
    for name in (IMAGES, MASKS):
        found[name] = {}
        for file in files_in(folder / name):
            stem = stem_of(file)
            if stem in found[name]:
                raise InputError(f"{file} and {found[name][stem]} have one name; keep one of them")
            found[name][stem] = file
    images, masks = found[IMAGES], found[MASKS]
    if not images:
        raise InputError(f"{folder / IMAGES} has no images")
    for stem in sorted(images.keys() - masks.keys())[:1]:
        wanted = folder / MASKS / f"{stem}{end or '.png'}"
        similar = [masks[each] for each in sorted(masks.keys() - images.keys()) if _is_similar(each, stem)]
        advice = f"rename {similar[0]} to {wanted.name}" if similar else f"put {wanted} there, or move the image away"
        raise InputError(f"{images[stem]} has no mask; {advice}")
    for stem in sorted(masks.keys() - images.keys())[:1]:
        raise InputError(f"{masks[stem]} has no image in {folder / IMAGES}; put it there, or move the mask away")
    stems = sorted(images)
    order = generator(FIXED_SEED).permutation(len(stems))
    return [Pair(images[stems[i]], masks[stems[i]]) for i in order]


def _is_similar(mask: str, image: str) -> bool:
    """Return True if the name of a mask is that of an image in other letters, or with an addition such as ``_mask``."""
    mask, image = mask.casefold(), image.casefold()
    return mask == image or mask.startswith((f"{image}_", f"{image}-")) or mask.endswith((f"_{image}", f"-{image}"))


def to_set(
    images: Sequence[UInt8[torch.Tensor, "C *S"]],
    masks: Sequence[UInt8[torch.Tensor, "*S"]],
    request: DataRequest,
    where: str,
    spacing: Sequence[tuple[float, ...]] | None = None,
) -> ImageSet:
    """Return an `ImageSet` of planes of one size, or a `PixelSet` of others and of images to take patches of.

    Raises:
        InputError: Images differ in size, and no patch is given; errors begin with ``where``.
    """
    if request.image_size is not None and masks[0].ndim == 2:
        images = [resize_images(each[None], request.image_size)[0] for each in images]
        masks = [resize_masks(each[None, None], request.image_size)[0, 0] for each in masks]
    sizes = sorted({tuple(each.shape) for each in masks})
    axes, patch = len(sizes[0]), request.patch
    if patch is None and len(sizes) > 1:
        shown_sizes = ", ".join("×".join(map(str, size)) for size in sizes[:MAX_NAMED]) + ", …" * (
            len(sizes) > MAX_NAMED
        )
        side = max(8, min(min(map(min, sizes)), 128) // 8 * 8)
        resize = ", or bring them to one size with --image-size" if axes == 2 else ""
        raise InputError(
            f"{where} has images of {len(sizes)} sizes ({shown_sizes}); train on patches of them with --patch, such as "
            f"--patch {side}{resize}"
        )
    if patch is None and axes == 2:
        return ImageSet(torch.stack(list(images)), torch.stack(list(masks)))
    sides = sizes[0] if patch is None else (patch,) * axes if isinstance(patch, int) else patch
    return PixelSet(tuple(images), tuple(masks), patch=sides, spacing=None if spacing is None else tuple(spacing))
