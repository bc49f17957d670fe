"""Volumes and their masks in the NIfTI format."""

from __future__ import annotations

import numpy as np
import torch

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.masks import number_masks, read_classes
from torchcaps.datasets.nifti import import_nibabel, read_volume, to_uint8, volumes_in
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.folder import parts_of
from torchcaps.datasets.sources.pixel_folder import CLASSES, has_masks, pairs_of, to_set
from torchcaps.errors import InputError


@register_dataset(
    "nifti",
    title="your own volumes: NIfTI files in images/, and their masks in masks/",
    source="your folder; test/ and val/ beside train/ are used if present",
    licence="yours",
    takes_path=True,
    takes_scale=True,
)
def load_nifti(request: DataRequest) -> Splits:
    """Read volumes and masks of the same names from images/ and masks/, or from those in train/, test/ and val/.

    Axes follow the directions of the body. Voxels become 256 steps between the 0.5th and the 99.5th percentile of each
    volume, or between the numbers of ``scale``. ``classes.txt`` names the classes.

    Raises:
        InputError: nibabel is not installed, a volume has no mask or one of another size, or volumes differ in size and
            ``patch`` is not given.
    """
    import_nibabel()
    root = request.path
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read volumes from")
    parts = parts_of(root)
    for folder in parts.values():
        if not has_masks(folder):
            raise InputError(f"{folder} must have images/ and masks/, with a NIfTI file of the same name in each")
    names, colours = read_classes(root / CLASSES)
    images, masks, spacings = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, tuple[float, ...]]()
    pairs = {part: pairs_of(folder, volumes_in, ".nii.gz") for part, folder in parts.items()}
    for pair in (pair for found in pairs.values() for pair in found):
        image, mask = read_volume(pair.image), read_volume(pair.mask)
        if image.values.shape != mask.values.shape:
            sizes = ["×".join(map(str, each.values.shape)) for each in (mask, image)]
            raise InputError(
                f"{pair.mask} is {sizes[0]}, but {pair.image} {sizes[1]}; a mask has the size of its image"
            )
        if (mask.values != np.floor(mask.values)).any() or mask.values.min() < 0:
            raise InputError(
                f"{pair.mask} holds fractions or negative numbers; a mask holds the number of a class in each voxel"
            )
        key = str(pair.mask)
        images[key], masks[key] = (
            to_uint8(image.values, request.scale),
            mask.values.astype(np.min_scalar_type(int(mask.values.max()))),
        )
        spacings[key] = image.spacing
    numbered, class_names = number_masks(masks, names, colours)
    sets = {}
    for part, found in pairs.items():
        keys = [str(pair.mask) for pair in found]
        pixels = [torch.from_numpy(images[key][None]) for key in keys]
        labels = [torch.from_numpy(numbered[key]) for key in keys]
        sets[part] = to_set(pixels, labels, request, str(root), [spacings[key] for key in keys])
    return Splits(sets["train"], sets.get("test"), class_names, sets.get("validation"), task="pixels")
