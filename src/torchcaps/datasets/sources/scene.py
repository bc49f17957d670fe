"""A user's own scene: a cube of bands, such as a hyperspectral image, with a class for some of its pixels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.reading import Held, list_arrays, read_arrays
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.scaling import rescaled
from torchcaps.datasets.splits import GROUP, read_groups
from torchcaps.errors import InputError, shown
from torchcaps.machine import check_memory
from torchcaps.ranges import Components
from torchcaps.words import counted

PATCH = 9
"""Usual side of the square around a pixel."""
BLOCKS, PATCHES_IN_BLOCK = 6, 2
"""Blocks along the side of a square scene, and the shortest side of a block in sides of a patch."""
MIN_VARIANCE = 1e-12
"""Smallest variance of a component, as a share of that of the first one; smaller ones are rounding errors."""
MIN_BLOCKS = 3
"""Blocks with labelled pixels, for training, validation and test."""
LARGE = 10.0
"""Numbers of spectra that networks of the usual initial weights do not learn from."""


@register_dataset(
    "scene",
    title="your own scene: arrays cube (H, W, bands) and labels (H, W) in a NumPy .npz file",
    source="your file; labels count from 1, and 0 is unlabelled; class_names is used if present",
    licence="yours",
    takes_path=True,
    options=("scale", "pca"),
)
def load_scene(request: DataRequest) -> Splits:
    """Read the square patch around each labelled pixel of a scene.

    Blocks of the scene are its groups, so a random split takes whole blocks; pixels whose patch shares a pixel with a
    patch of the test, or of the validation, are left out of the others. ``pca`` replaces the bands by principal
    components of the training pixels, each with a mean of 0 and a variance of 1 over them. Without it, spectra stay as
    they are, or ``scale`` maps them to 0..1. Beyond its edge, the scene is mirrored.

    Raises:
        InputError: The file or an array is missing, an array has a wrong shape or type, or the patch is even.
    """
    path, group = request.path, request.group
    if request.image_size is not None:
        raise InputError(f"{path} is cut into patches; set patch (--patch) in place of image_size (--image-size)")
    arrays = _read(path, group)
    cube, labels = arrays["cube"], arrays["labels"]
    count, side = int(labels.max()), _side(request)
    blocks = _blocks(labels.shape, side) if group is None else arrays[group]
    names = arrays.get("class_names", np.arange(1, count + 1).astype(str))
    may_lack = request.part is not None  # a scene that is only evaluated may lack classes
    is_complete = names.ndim == 1 and (len(names) >= count if may_lack else len(names) == count)
    if not is_complete or names.dtype.kind != "U":
        raise InputError(f"{path}: class_names must be {counted(count, 'text')}, got {shown(names.shape)}")
    if not may_lack and (lacking := sorted({*range(1, count + 1)} - {*np.unique(labels).tolist()})):
        raise InputError(
            f"{path}: labels has no pixel of class {lacking[0]} of {count}; number the classes without gaps"
        )
    spectra = cube.astype(np.float32) if request.scale is None else rescaled(cube, *request.scale)
    highest = float(abs(spectra).max())
    if request.pca is None and highest > LARGE:
        warnings.warn(
            f"The spectra of {path} reach {highest:,.6g}, and networks learn best from numbers near 0..1. Set their "
            f"range, such as --scale {cube.min():g},{cube.max():g}, or --pca N.",
            stacklevel=2,
        )
    rows, columns = labels.nonzero()
    if group is None and request.part != "all" and len(set(blocks[rows, columns].tolist())) < MIN_BLOCKS:
        raise InputError(
            f"{path} has {counted(labels.shape[0], 'row')} and {counted(labels.shape[1], 'column')}, too few to split "
            f"them in {MIN_BLOCKS} blocks of {PATCHES_IN_BLOCK} patches of {side}×{side} a side; set a smaller patch "
            "(--patch)"
        )
    places = [f"the pixel in row {row}, column {column}" for row, column in zip(rows, columns, strict=True)]
    pixels = ImageSet(
        torch.from_numpy(spectra[rows, columns])[:, :, None, None],
        torch.from_numpy(labels[rows, columns].astype(np.int64) - 1),
        factors={"row": torch.from_numpy(rows), "column": torch.from_numpy(columns)},
        names={GROUP: read_groups(blocks[rows, columns], len(rows), f"{path}: {group}", places.__getitem__)},
    )
    finish = partial(_finish, torch.from_numpy(spectra).permute(2, 0, 1), side, request.pca, str(path))
    has_names = "class_names" in arrays
    return Splits(pixels, None, tuple(names.tolist()), has_names=has_names, task="classes", finish=finish)


def _read_cube(path: Path, held: Mapping[str, Held], *others: str) -> dict[str, np.ndarray]:
    """Return the cube and these other arrays of a scene, if it has them; InputError if the cube is no cube."""
    if "cube" not in held:
        raise InputError(f'{path} has no array "cube"; it holds {", ".join(map(shown, held))}')
    arrays = read_arrays(path, {key: held[key] for key in ("cube", *others) if key in held})
    cube = arrays["cube"]
    are_numbers = cube.ndim == 3 and cube.dtype.kind in "iuf" and 0 not in cube.shape
    with np.errstate(over="ignore"):
        if not are_numbers or not np.isfinite(cube.astype(np.float32)).all():
            raise InputError(f"{path}: cube must be finite numbers (H, W, bands), got {cube.dtype} {shown(cube.shape)}")
    return arrays


def _read(path: Path, group: str | None) -> dict[str, np.ndarray]:
    """Return the arrays of a scene; raise InputError unless they fit each other."""
    if path.suffix.lower() == ".mat":
        raise InputError(
            f"{path} is a MATLAB file; write its arrays to an .npz file in Python: from scipy.io import loadmat; "
            f'numpy.savez("scene.npz", cube=loadmat("{path.name}")["cube"], labels=loadmat("…_gt.mat")["…_gt"]), with '
            "the names that scipy.io.whosmat lists"
        )
    held = list_arrays(path)
    if not held.keys() & {"labels"}:
        raise InputError(f'{path} has no array "labels"; it holds {", ".join(map(shown, held))}')
    arrays = _read_cube(path, held, "labels", "class_names", *([] if group is None else [group]))
    cube, labels = arrays["cube"], arrays["labels"]
    if labels.dtype.kind == "f" and (labels == labels.round()).all():  # as MATLAB stores numbers
        arrays["labels"] = labels = labels.astype(np.int64)
    are_whole = labels.shape == cube.shape[:2] and labels.dtype.kind in "iu"
    count = int(labels.max()) if are_whole else 0
    if not 1 <= count <= np.count_nonzero(labels) or labels.min() < 0:
        raise InputError(
            f"{path}: labels must be whole numbers {shown(cube.shape[:2])}, from 1 for classes and 0 for unlabelled "
            f"pixels, got {labels.dtype} {shown(labels.shape)}{f' up to {count}' if are_whole else ''}"
        )
    if group is not None and (group not in arrays or arrays[group].shape != labels.shape):
        raise InputError(f"{path}: {group} (--group) must be an array {shown(labels.shape)}, like labels")
    return arrays


def patches_of(path: Path, about: Any) -> Float32[Tensor, "bands H W S S"]:
    """Return the patch around each pixel of a scene, as a view, in the form that a network takes.

    Args:
        path: The file, which needs no labels.
        about: ``ImageSpec`` of the network.

    Raises:
        InputError: The file has no cube, or another number of bands than the network takes.
    """
    cube = _read_cube(path, list_arrays(path))["cube"]
    spectra = torch.from_numpy(cube.astype(np.float32) if about.scale is None else rescaled(cube, *about.scale))
    spectra = spectra.permute(2, 0, 1)
    spectra = spectra if about.pca is None else _reduced(spectra, about.pca, str(path))
    bands, height, width = about.in_shape
    if len(spectra) != bands or height != width or height % 2 == 0:
        shape = "×".join(map(str, about.in_shape))
        raise InputError(
            f"{path} is a scene of {counted(len(spectra), 'band')}, but the network takes {shape}; a network of this "
            f"scene takes {len(spectra)} bands of a square with an odd side"
        )
    return _patches(spectra, about.in_shape[1])


def _patches(cube: Float32[Tensor, "bands H W"], side: int) -> Float32[Tensor, "bands H W S S"]:
    """Return the patch around each pixel, as a view. Beyond its edge, the scene is mirrored."""
    margin = side // 2
    padded = np.pad(cube.numpy(), ((0, 0), (margin, margin), (margin, margin)), "reflect")
    return torch.from_numpy(padded).unfold(1, side, 1).unfold(2, side, 1)


def _blocks(size: tuple[int, ...], side: int) -> np.ndarray:
    """Return the block of each pixel: squares of a sixth of the scene, or of two patches if that is more."""
    length = max(PATCHES_IN_BLOCK * side, round(math.prod(size) ** 0.5 / BLOCKS))
    rows, columns = (
        index * max(round(pixels / length), 1) // pixels for index, pixels in zip(np.indices(size), size, strict=True)
    )
    return np.char.add(np.char.add("block ", rows.astype(str)), np.char.add(",", columns.astype(str)))


def _side(request: DataRequest) -> int:
    """Return the side of a patch."""
    sides = {request.patch} if isinstance(request.patch, int | None) else set(request.patch)
    side = sides.pop() or PATCH
    if sides or side % 2 == 0:
        raise InputError(
            f"patch (--patch) must be an odd number of pixels, as a square around one, got {request.patch}"
        )
    return side


def _finish(
    cube: Float32[Tensor, "bands H W"],
    side: int,
    pca: int | Components | None,
    where: str,
    parts: Mapping[str, ImageSet],
) -> tuple[dict[str, ImageSet], Components | None]:
    """Return parts of pixels as patches that share no pixel with those of another part, and their components."""
    apart = _apart(parts, cube.shape[1:], side)
    left, total = (sum(map(len, each.values())) for each in (apart, parts))
    if left < total:
        warnings.warn(
            f"{total - left:,} of {total:,} labelled pixels of {where} are in no part, because their patches overlap "
            "those of another part.",
            stacklevel=2,
        )
    if isinstance(pca, int):
        if "train" not in apart:
            raise InputError(f"{where}: pca (--pca) needs training pixels, to which components are fitted")
        pca = _fit_components(apart["train"].images[:, :, 0, 0], pca)
    if pca is not None:
        cube = _reduced(cube, pca, where)
    check_memory(4 * left * len(cube) * side**2, f"{left:,} patches of {where}")
    windows = _patches(cube, side)
    return {
        part: replace(each, images=windows[:, each.factors["row"], each.factors["column"]].transpose(0, 1).contiguous())
        for part, each in apart.items()
    }, pca


def _apart(parts: Mapping[str, ImageSet], size: tuple[int, ...], side: int) -> dict[str, ImageSet]:
    """Leave out pixels whose patch overlaps that of a test pixel, and training pixels near a validation pixel."""
    from scipy.ndimage import maximum_filter

    taken, apart = np.zeros(size, bool), dict[str, ImageSet]()
    for part in sorted(parts, key=("test", "validation", "train", "all").index):
        images = parts[part]
        row, column = (images.factors[name].numpy() for name in ("row", "column"))
        near = maximum_filter(taken, 2 * side - 1, mode="constant")[row, column]
        if near.all():
            raise InputError(
                f"no pixel is left for {part}, because all patches overlap those of other parts; set a smaller --patch"
            )
        apart[part] = images.select(torch.from_numpy(np.flatnonzero(~near)))
        taken[row[~near], column[~near]] = True
    return {part: apart[part] for part in parts}


def _fit_components(spectra: Float32[Tensor, "N bands"], count: int) -> Components:
    """Return the mean of these spectra, and the weights of their first principal components, of variance 1."""
    mean = spectra.double().mean(0)
    variances, axes = torch.linalg.eigh(torch.cov((spectra.double() - mean).T).reshape(len(mean), len(mean)))
    fitting = int((variances > MIN_VARIANCE * variances[-1].clamp_min(MIN_VARIANCE)).sum())
    if count > fitting:
        raise InputError(
            f"pca (--pca) must be at most {fitting}, the number of independent bands in "
            f"{counted(len(spectra), 'training pixel')}, got {count}"
        )
    axes, variances = axes[:, -count:].flip(1), variances[-count:].flip(0)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # the sign of an axis is arbitrary
    return tuple(tuple(row) for row in (mean.tolist(), *(axes / variances.sqrt()).T.tolist()))


def _reduced(cube: Float32[Tensor, "bands H W"], pca: Components, where: str) -> Float32[Tensor, "C H W"]:
    """Return components in place of the bands."""
    mean, *weights = torch.tensor(pca, dtype=torch.float64)
    if len(mean) != len(cube):
        raise InputError(f"{where} has {counted(len(cube), 'band')}, but the components were fitted to {len(mean)}")
    return torch.einsum("bhw,cb->chw", cube.double() - mean[:, None, None], torch.stack(weights)).float()
