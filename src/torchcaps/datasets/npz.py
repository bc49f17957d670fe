"""A user's own images: the arrays of a NumPy .npz file."""

from __future__ import annotations

import difflib
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from torchcaps.datasets.registry import DataRequest, Splits, register_dataset
from torchcaps.datasets.splits import with_test_set
from torchcaps.datasets.types import ImageSet
from torchcaps.errors import InputError

_MAX_CHANNELS = 4
_PAIRS = {"train": ("x", "y"), "test": ("x_test", "y_test"), "validation": ("x_val", "y_val")}
_NAMES = "class_names"
_KEYS = (*(key for pair in _PAIRS.values() for key in pair), _NAMES)


@register_dataset(
    "npz",
    title="your own images: arrays x and y in a NumPy .npz file",
    source="your file; x_test, y_test, x_val, y_val and class_names are used where they are there",
    licence="yours",
    takes_path=True,
)
def load_npz(request: DataRequest) -> Splits:
    """Read images and labels from the arrays of an .npz file.

    ``x`` holds the images: (N, H, W), (N, H, W, C) or (N, C, H, W) with C from 1 to 4, uint8 of 0..255 or floats of
    0..1 (which are rounded to 255 steps). ``y`` (N,) holds whole numbers from 0, every class up to the highest
    among them. ``x_test`` and ``y_test`` are the test set; without them, a fixed stratified fifth of the images is.
    ``x_val`` and ``y_val`` are the validation images, ``class_names`` (J,) the names of the classes, where there.

    Raises:
        InputError: When the file is missing, truncated or corrupt, or an array is missing or has another form.
    """
    path = request.source
    arrays = _read_arrays(path)
    _check_keys(path, arrays)
    sets = {part: _image_set(path, arrays, *keys) for part, keys in _PAIRS.items() if keys[0] in arrays}
    class_names = _class_names(path, arrays, sets["train"])
    for part, images in sets.items():
        if images.labels.max() >= len(class_names):
            raise InputError(
                f"{path}: {_PAIRS[part][1]} has the label {int(images.labels.max())}, but the "
                f"{len(class_names)} classes of y go from 0 to {len(class_names) - 1}"
            )
    return with_test_set(path, sets, class_names)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The file's arrays by name; those that are not used stay unread, and nothing is ever unpickled."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path):  # else NumPy would take any other file for a pickle, and say so
            pass
        with np.load(path, allow_pickle=False) as file:
            return {key: _array(file, key) if key in _KEYS else np.empty(0) for key in file.files}
    # an encrypted array is a RuntimeError
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is no .npz file of plain arrays, or a truncated or corrupt one: {error}") from error


def _array(file: np.lib.npyio.NpzFile, key: str) -> np.ndarray:
    found = file[key]
    if not isinstance(found, np.ndarray):  # NumPy gives the bytes of what is in the file and no array
        raise ValueError(f"its {key} is no array of NumPy's")
    return found


def _check_keys(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Each array that is needed is there, and none without its partner."""
    for x, y in _PAIRS.values():
        for key, partner in ((x, y), (y, x)):
            if key in arrays or (key not in _PAIRS["train"] and partner not in arrays):
                continue
            others = sorted(set(arrays) - set(_KEYS))
            near = difflib.get_close_matches(key, [other.lower() for other in others], n=1, cutoff=0.3)
            hint = f' (rename "{next(o for o in others if o.lower() == near[0])}"?)' if near else ""
            raise InputError(f'{path} has no array "{key}"{hint}; it holds {", ".join(sorted(arrays)) or "nothing"}')


def _image_set(path: Path, arrays: dict[str, np.ndarray], x: str, y: str) -> ImageSet:
    images = _channels_first(_to_uint8(arrays[x], f"{path}: {x}"), f"{path}: {x}")
    labels = arrays[y]
    if labels.dtype.kind not in "iu":
        raise InputError(f"{path}: {y} must hold whole numbers from 0, got {labels.dtype}")
    if labels.shape != (len(images),):
        raise InputError(
            f"{path}: {y} must have the shape ({len(images)},), one label for each image of {x}, got {labels.shape}"
        )
    if labels.min() < 0:
        raise InputError(f"{path}: {y} has the label {labels.min()}, but labels are whole numbers from 0")
    most = len(arrays[_PAIRS["train"][0]])  # every class needs an image to train on; counting relies on this bound
    if labels.max() >= most:
        raise InputError(
            f"{path}: {y} has the label {labels.max()}, but the {most} images of x can be of {most} classes at most, "
            f"0 to {most - 1}"
        )
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _to_uint8(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise InputError(f"{where} must be uint8 of 0..255 or floats of 0..1, got {images.dtype}")
    if images.size and not (images.min() >= 0 and images.max() <= 1):  # false for NaN too
        raise InputError(
            f"{where} must be floats of 0..1 or uint8 of 0..255, got floats from {images.min():g} to {images.max():g}"
        )
    return np.round(images * 255).astype(np.uint8)


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """Any of the three layouts to (N, C, H, W); the axis of 4 or less is the channels', the last one of two."""
    if images.size and images.ndim == 3:
        return images[:, None]
    if images.size and images.ndim == 4 and images.shape[3] <= _MAX_CHANNELS:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.size and images.ndim == 4 and images.shape[1] <= _MAX_CHANNELS:
        return images
    raise InputError(
        f"{where} must have the shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C from 1 to {_MAX_CHANNELS} and "
        f"no axis empty, got {images.shape}"
    )


def _class_names(path: Path, arrays: dict[str, np.ndarray], train: ImageSet) -> tuple[str, ...]:
    """The given names, or the labels as text; every class must occur among the training images."""
    counts = torch.bincount(train.labels)
    if _NAMES in arrays:
        names = arrays[_NAMES]
        if names.dtype.kind != "U" or names.ndim != 1 or len(names) < len(counts):
            raise InputError(
                f"{path}: {_NAMES} must be {len(counts)} texts, one for each class of y, "
                f"got {names.dtype} of the shape {names.shape}"
            )
        counts = torch.bincount(train.labels, minlength=len(names))
    if not counts.all():
        raise InputError(
            f"{path}: y has no image of class {int((counts == 0).nonzero()[0])}; "
            f"every class from 0 to {len(counts) - 1} needs one"
        )
    if len(counts) < 2:
        raise InputError(f"{path}: y has only the class 0; at least two are needed")
    return tuple(map(str, arrays[_NAMES])) if _NAMES in arrays else tuple(map(str, range(len(counts))))
