"""Volumes and their masks in the NIfTI format."""

from __future__ import annotations

import numpy as np

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.nifti import import_nibabel, read_volume, volumes_in
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.scaling import as_bytes, as_pixels
from torchcaps.datasets.sources.folder import parts_of
from torchcaps.datasets.sources.segmentation_folder import FileKind, Labelled, Pair, load_segmentation_folder
from torchcaps.errors import InputError


@register_dataset(
    "nifti",
    title="your own volumes: NIfTI files in images/, and their masks in masks/",
    source="your folder; test/ and val/ beside train/ are used if present",
    licence="yours",
    takes_path=True,
    can_skip_damaged=True,
    takes_scale=True,
)
def load_nifti(request: DataRequest) -> Splits:
    """Read volumes and masks of the same names from images/ and masks/, or from those in train/, test/ and val/.

    Axes follow the directions of the body. Voxels become 256 steps between the 0.5th and the 99.5th percentile of each
    volume, or between the numbers of ``scale``. ``classes.txt`` names the classes. One error names all files that
    cannot be used; ``skip_damaged`` leaves them out.

    Raises:
        InputError: nibabel is not installed, a volume has no mask or one of another size, or volumes differ in size and
            ``patch`` is not given.
    """
    import_nibabel()
    root = request.path
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read volumes from")
    kind = FileKind(volumes_in, _read, ".nii.gz", "a NIfTI file")
    return load_segmentation_folder(root, parts_of(root), request, kind)


def _read(pair: Pair, scale: tuple[float, float] | None) -> Labelled:
    image, mask = read_volume(pair.image), read_volume(pair.mask)
    if (mask.values != np.floor(mask.values)).any() or mask.values.min() < 0:
        raise InputError(
            f"{pair.mask} holds fractions or negative numbers; a mask holds the number of a class in each voxel"
        )
    numbers = mask.values.astype(np.min_scalar_type(int(mask.values.max())))
    pixels = as_bytes(as_pixels(image.values, scale, str(pair.image), "volume"))
    return Labelled(pixels[None], numbers, image.spacing)
