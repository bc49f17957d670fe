"""Define data sets of medical images with masks: grey and white matter of one head, in slices and in blocks.

    pip install nilearn nibabel
    python examples/brain_tissue.py                                                       # a sheet of the slices
    torchcaps train segcaps --plugin examples/brain_tissue.py --data brain-slices         # use them

The head is the ICBM 152 template, the average of 152 people after alignment, with the probability of each tissue. The
package nilearn contains it, so nothing is downloaded. There is only ONE head: a test tells how well a network fills in
parts of a head of which it knows other parts, not how it does on a new person.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from torchcaps.datasets import DataRequest, ImageSet, Splits, register_dataset
from torchcaps.datasets.nifti import read_volume
from torchcaps.datasets.patch_set import PatchSet
from torchcaps.errors import InputError

CLASS_NAMES = ("background", "grey matter", "white matter")
SPACING = 2  # side of a voxel in mm; those of the files have 1 mm
#: The part of the files' volumes that is used, voxels of 1 mm: from bottom to top, back to front, left to right.
CUT = (slice(16, 156), slice(24, 216), slice(26, 170))
SHAPE = tuple((each.stop - each.start) // SPACING for each in CUT)  # 70, 96, 72
GAP = 2  # slices left out between two parts
SLICES = 8  # neighbouring slices that are in one part
SLICE_PARTS = ("train", "test", "train", "validation")  # repeated from bottom to top
SIDE = 20  # of a block, voxels
BLOCK_PARTS = ("train", "test", "train", "validation")  # from back to front
_FILE = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
_FILES = tuple(map(_FILE.format, ("t1", "gm", "wm")))


def find_head(data_dir: Path | None) -> Path | None:
    """Return the folder of the three files: ``mni152`` in ``data_dir``, or nilearn's; None: there is none."""
    package = find_spec("nilearn")
    folders = [] if data_dir is None else [data_dir / "mni152"]
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "datasets" / "data")
    return next((each for each in folders if all((each / file).is_file() for file in _FILES)), None)


def read_head(data_dir: Path | None) -> tuple[UInt8[np.ndarray, "D H W"], UInt8[np.ndarray, "D H W"]]:
    """Return the T1 image of the head and the class of each voxel, at 2 mm.

    Each voxel is the mean of 2×2×2 of the files. Its class is the most probable of background, grey and white matter.

    Raises:
        InputError: The files, nilearn or nibabel are missing.
    """
    folder = find_head(data_dir)
    if folder is None:
        raise InputError("the head is a part of the package nilearn: pip install nilearn")
    image, grey, white = (_coarse(read_volume(folder / file).values[0][CUT]) for file in _FILES)
    classes = np.stack((255 - grey - white, grey, white)).argmax(0)
    return image.round().astype(np.uint8), classes.astype(np.uint8)


_INFO = {
    "source": "ICBM 152 nonlinear symmetric 2009a, Fonov and others (2011), in the package nilearn",
    "licence": "of the Montreal Neurological Institute: free use with its notice",
    "class_names": CLASS_NAMES,
    "find": find_head,
}


def _coarse(values: np.ndarray) -> np.ndarray:
    """Return the means of 2×2×2 voxels."""
    sides = [part for side in values.shape for part in (side // SPACING, SPACING)]
    return values.reshape(sides).mean((1, 3, 5), dtype=np.float32)


@register_dataset(
    "brain-slices",
    title="Grey and white matter in slices of one head",
    in_shape=(1, *SHAPE[1:]),
    **_INFO,
)
def load_slices(request: DataRequest) -> Splits:
    """Load horizontal slices of 96×72 voxels of 2 mm.

    Eight neighbouring slices make a block; two slices (4 mm) between blocks are left out. From bottom to top the blocks
    are for training, test, training and validation, again and again, because neighbouring slices are nearly the same.

    Raises:
        InputError: The files, nilearn or nibabel are missing.
    """
    head = read_head(request.data_dir)
    starts = range(0, SHAPE[0], SLICES + GAP)
    parts = {start: SLICE_PARTS[n % len(SLICE_PARTS)] for n, start in enumerate(starts)}

    def of(part: str) -> ImageSet:
        chosen = [n for start in starts if parts[start] == part for n in range(start, min(start + SLICES, SHAPE[0]))]
        image, classes = (torch.from_numpy(each[chosen]) for each in head)
        return ImageSet(image[:, None], classes)

    return Splits(of("train"), of("test"), CLASS_NAMES, of("validation"), task="pixels")


@register_dataset(
    "brain-blocks",
    title="Grey and white matter in blocks of one head",
    **_INFO,
)
def load_blocks(request: DataRequest) -> Splits:
    """Load blocks of 20×20×20 voxels of 2 mm.

    From back to front the head is cut into four layers of blocks: training, test, training, validation, with two voxels
    (4 mm) left out between them. It is not cut into left and right, because its halves are mirror images. Training
    blocks overlap by half; blocks without tissue are left out.

    Raises:
        InputError: The files, nilearn or nibabel are missing.
    """
    head = read_head(request.data_dir)

    def of(part: str) -> ImageSet:
        back = [n * (SIDE + GAP) for n, each in enumerate(BLOCK_PARTS) if each == part]
        step = SIDE // 2 if part == "train" else SIDE
        places = (range(0, SHAPE[0] - SIDE + 1, step), back, range(0, SHAPE[2] - SIDE + 1, step))
        blocks = [tuple(slice(start, start + SIDE) for start in place) for place in itertools.product(*places)]
        image, classes = ([torch.from_numpy(each[block]) for block in blocks] for each in head)
        tissue = [n for n, each in enumerate(classes) if each.any()]
        return PatchSet([image[n][None] for n in tissue], [classes[n] for n in tissue], patch=(SIDE,) * 3)

    return Splits(of("train"), of("test"), CLASS_NAMES, of("validation"), task="pixels")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the training slices, and their masks below them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the three files in mni152; otherwise nilearn's")
    parser.add_argument("--out", type=Path, default=Path("brain.png"))
    given = parser.parse_args(arguments)
    from PIL import Image

    slices = load_slices(DataRequest(data_dir=given.data_dir)).train
    rows = [
        np.concatenate([*each], axis=1) for each in (slices.images[::4, 0].numpy(), 127 * slices.labels[::4].numpy())
    ]
    Image.fromarray(np.concatenate(rows)).save(given.out)
    print(f"wrote {given.out}: 8 of {len(slices)} training slices, and their masks")


if __name__ == "__main__":
    main()
