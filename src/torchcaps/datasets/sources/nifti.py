"""Volumes and their masks in the NIfTI format."""

from __future__ import annotations

from functools import partial

import numpy as np

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.masks import as_mask
from torchcaps.datasets.nifti import import_nibabel, resample
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.folder import parts_of
from torchcaps.datasets.sources.segmentation_folder import FileKind, Labelled, Pair, load_segmentation_folder
from torchcaps.datasets.volumes import joined, read_aligned, volumes_in
from torchcaps.errors import InputError


@register_dataset(
    "nifti",
    title="your own volumes: NIfTI files or DICOM series, and masks, in images/ and masks/ or one folder a subject",
    source="your folder; test/ and val/ beside train/ are used if present",
    licence="yours",
    takes_path=True,
    options=("skip_damaged", "scale", "spacing"),
)
def load_nifti(request: DataRequest) -> Splits:
    """Read volumes and masks of the same names from images/ and masks/, or from those in train/, test/ and val/.

    A volume is a NIfTI file, whose further volumes are channels, or a folder of the slices of a DICOM series. Without
    images/ and masks/, each folder that holds a file called seg, mask or label is a subject, and its other files are
    channels, such as t1.nii.gz and flair.nii.gz: see
    :func:`~torchcaps.datasets.sources.segmentation_folder.subject_pairs`.

    Axes follow the directions of the body. ``spacing`` resamples volumes linearly, and masks to the nearest voxel.
    Voxels become 256 steps between the 0.5th and the 99.5th percentile of each channel of a volume, or between the
    numbers of ``scale``. ``classes.txt`` names the classes. One error names all files that cannot be used;
    ``skip_damaged`` leaves them out.

    Raises:
        InputError: nibabel is not installed, or a volume has no mask or one of another size.
    """
    import_nibabel()
    root = request.path
    if not root.is_dir():
        raise InputError(f"there is no folder {root} to read volumes from")
    read = partial(_read, request.spacing)
    kind = FileKind(volumes_in, read, ".nii.gz", "a NIfTI file or a DICOM series", has_subjects=True)
    return load_segmentation_folder(root, parts_of(root), request, kind)


def _read(spacing: tuple[float, ...] | None, pair: Pair, scale: tuple[float, float] | None) -> Labelled:
    *channels, mask = read_aligned([*pair.images, pair.mask])
    image = joined(channels).resampled(spacing, str(pair.file))
    numbers = as_mask(np.moveaxis(mask.values, 0, -1), mask.size, str(pair.mask))
    positions = resample(numbers.positions, image.values.shape[1:], nearest=True)
    return Labelled(image.pixels(scale, str(pair.file)), numbers._replace(positions=positions), image.spacing)
