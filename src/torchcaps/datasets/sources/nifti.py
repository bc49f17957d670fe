"""Volumes and their masks in the NIfTI format."""

from __future__ import annotations

import warnings

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.masks import as_mask
from torchcaps.datasets.nifti import Volume, import_nibabel, read_volume, volumes_in
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.folder import parts_of
from torchcaps.datasets.sources.segmentation_folder import FileKind, Labelled, Pair, load_segmentation_folder
from torchcaps.errors import InputError

MAX_OFF = 0.1
"""Largest distance between the voxels of a volume and of its mask, in sides of a voxel: a difference by rounding."""


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
        InputError: nibabel is not installed, or a volume has no mask or one of another size.
    """
    import_nibabel()
    root = request.path
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read volumes from")
    kind = FileKind(volumes_in, _read, ".nii.gz", "a NIfTI file")
    return load_segmentation_folder(root, parts_of(root), request, kind)


def _in_one_place(pair: Pair) -> tuple[Volume, Volume]:
    """Return a volume and its mask, whose voxels lie at the same positions.

    Raises:
        InputError: They lie at different positions.
    """
    image, mask = read_volume(pair.image), read_volume(pair.mask)
    if image.has_place and mask.has_place:
        if image.values.shape == mask.values.shape and (off := image.distance(mask)) > MAX_OFF * min(image.spacing):
            raise InputError(
                f"{pair.mask} lies up to {off:.3g} mm away from {pair.image}, by the positions in both files; resample "
                "the mask to the grid of its image, or copy the header of the image"
            )
        return image, mask
    warnings.warn(
        "Some volumes or masks do not say where they lie (their qform and sform codes are 0); their voxels are matched "
        "in the order of the files.",
        stacklevel=2,
    )
    if image.has_place:
        return image, read_volume(pair.mask, image.source.affine)
    return (read_volume(pair.image, mask.source.affine) if mask.has_place else image), mask


def _read(pair: Pair, scale: tuple[float, float] | None) -> Labelled:
    image, mask = _in_one_place(pair)
    numbers = as_mask(mask.values, mask.values.shape, str(pair.mask))
    return Labelled(image.pixels(scale, str(pair.image)), numbers, image.spacing)
