"""A user's own images: the arrays of a NumPy .npz file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.features import FEATURES, as_features
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.masks import MAX_COLOURS, as_mask, channel_axis, colours_of, number_array, number_values
from torchcaps.datasets.patch_set import PatchSet
from torchcaps.datasets.pixels import MAX_CHANNELS, channels_first, scale_pixels
from torchcaps.datasets.reading import Held, list_arrays, read_arrays
from torchcaps.datasets.records import LENGTHS, as_sequences, cut_records, labels_of_windows, no_sequences
from torchcaps.datasets.registry import FEATURES_STAY, OPTIONS_OF_PIXELS, DataRequest, register_dataset
from torchcaps.datasets.scaling import Scale, alike, as_bytes, note_dark
from torchcaps.datasets.splits import GROUP, RECORD, START, note_groups, read_groups
from torchcaps.datasets.table_file import is_group_name
from torchcaps.errors import InputError, shown
from torchcaps.files import composed
from torchcaps.tasks import Task, find_task, guess_task
from torchcaps.words import counted, each_of

_MAX_LISTED = 20  # names of arrays in an error
Names = dict[str, tuple[str, str]]
"""Names of the arrays of images and labels, by part."""
_OURS: Names = {"train": ("x", "y"), "test": ("x_test", "y_test"), "validation": ("x_val", "y_val")}
_KERAS: Names = _OURS | {"train": ("x_train", "y_train")}
_MEDMNIST: Names = {
    part: (f"{key}_images", f"{key}_labels")
    for part, key in (("train", "train"), ("test", "test"), ("validation", "val"))
}
_FEATURES: Names = {part: (x.replace("x", FEATURES, 1), y) for part, (x, y) in _OURS.items()}
_OPTIONS = ("class_names", "channels")
_PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"})
_WORDS = frozenset(
    {"x", "y", "image", "images", "label", "labels", "target", "targets", "mask", "masks", "lengths", FEATURES}
)


@register_dataset(
    "npz",
    title="your own images: arrays x and y in a NumPy .npz file",
    source="your file; x_test, y_test, x_val, y_val, class_names and channels are used if present",
    licence="yours",
    takes_path=True,
    options=("scale", "window", "stride"),
)
def load_npz(request: DataRequest) -> Splits:
    """Read images and labels from the arrays of an .npz file.

    - ``x`` or ``x_train``: images (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or other numbers that
      :func:`~torchcaps.datasets.scaling.range_of` takes. Numbers (N, L) are sequences of one channel and keep their
      values.
    - ``features``, ``features_test``, ``features_val`` (N, F) in place of ``x``: features without images, such as the
      embeddings of a pretrained network, which keep their values.
    - ``y`` or ``y_train``: for classes whole numbers (N,) from 0 without gaps, texts, or one-hot rows (N, J). For
      several labels zeros and ones (N, L), or True and False. For a regression floats (N,) or (N, T). For pixels masks
      (N, H, W), or (N, D, H, W) of volumes ``x`` (N, D, H, W) or (N, D, H, W, C); 255: ignored. ``task`` decides if
      numbers could be read in several ways.
      Files without labels are pictures for the task objects.
    - ``x_test``, ``y_test``: the test set. Without them, a fixed stratified fifth of the images becomes the test set.
    - ``x_val``, ``y_val``: validation images, optional.
    - ``group`` of the request: the name of an array (N,), with the group of each image; ``…_test`` and ``…_val`` are
      those of the other parts.
    - ``class_names`` (J,): names of the classes, optional.
    - ``channels``: "first" or "last", needed unless exactly one of the two axes is 1 to 4 long.
    - ``lengths`` (N,), ``lengths_test``, ``lengths_val``: with them, ``x`` holds sequences (N, C, L) of any numbers,
      each read up to its length.

    Upper and lower case do not matter. Files of MedMNIST work unchanged: ``train_images``, ``train_labels`` (N, 1), and
    the same for ``val`` and ``test``. The unpacked size is checked against the memory before anything is unpacked.
    Pickled objects are never read.

    Raises:
        InputError: The file is missing, truncated or corrupt, an array is missing or has a wrong shape or dtype, or the
            images do not fit into memory.
    """
    path = request.path
    held = list_arrays(path)
    pairs = _array_names(held, request)
    takes_pictures = request.task is not None and request.wants_masks is None and pairs is not _FEATURES
    if takes_pictures and not any(y in held for _, y in pairs.values()):
        pairs = {part: (x, x) for part, (x, _) in pairs.items()}  # pictures without masks
    groups = {} if request.group is None else _group_arrays(path, pairs, held, request.group)
    keys = {*(key for pair in pairs.values() for key in pair), *LENGTHS.values(), *_OPTIONS} & held.keys()
    keys |= set(groups.values())
    others = sorted({each.name for each in held.values()} - {held[key].name for key in keys})
    _check_names(path, pairs, held, others)
    arrays = read_arrays(path, {key: held[key] for key in keys})
    labelled = {part: pair for part, pair in pairs.items() if pair[0] in arrays}
    counts = {part: len(np.atleast_1d(arrays[x])) for part, (x, _) in labelled.items()}
    groups_of_parts = {part: read_groups(arrays[key], counts[part], f"{path}: {key}") for part, key in groups.items()}
    if request.group is None and request.part is None and len(labelled) < len(pairs):
        _note_groups(path, {name: held[name] for name in others}, counts.get("train"))
    scale: Scale = "auto" if request.scale is None else request.scale
    if any(x == y for x, y in labelled.values()):
        pixels = {part: _images(path, arrays, x, f"{path}: {x}", scale) for part, (x, _) in labelled.items()}
        sets = {part: ImageSet(each, torch.zeros(len(each), dtype=torch.int64)) for part, each in pixels.items()}
        return Splits.of_pictures(sets, request.task).with_names(GROUP, groups_of_parts)
    if any(np.ndim(arrays[y]) > 2 for _, y in labelled.values()) and request.window is None:
        return _with_masks(path, labelled, arrays, request).with_names(GROUP, groups_of_parts)
    for x, _ in labelled.values():
        if request.window is not None and arrays[x].ndim != 2 and not _has_lengths(arrays, x):
            raise no_sequences(f"{path}: {x}")
    pixels = {part: _images(path, arrays, x, f"{path}: {x}", scale) for part, (x, _) in labelled.items()}
    for part, (x, y) in labelled.items():
        if (num_labels := len(np.atleast_1d(arrays[y]))) != (count := len(pixels[part])):
            raise InputError(f"{path}: {y} must be given for {each_of(count, 'image')} of {x}, got {num_labels}")
    records, starts = dict[str, list[str]](), dict[str, dict[str, Tensor]]()
    for part, (x, y) in labelled.items() if request.window is not None else ():
        assert request.window is not None
        windows = cut_records(pixels[part].numpy(), request.window, request.stride, f"{path}: {x}")
        pixels[part], starts[part] = torch.from_numpy(windows.images), {START: torch.from_numpy(windows.start)}
        arrays[y] = labels_of_windows(arrays[y], windows, request.task, f"{path}: {x}")
        records[part] = [f"{x}[{n}]" for n in windows.record]
        if part in groups_of_parts:
            groups_of_parts[part] = tuple(groups_of_parts[part][n] for n in windows.record)
    class_names, has_names, task = _class_names(path, labelled, arrays, request)
    sets = {}
    for part, (_, y) in labelled.items():
        labels = task.convert_targets(arrays[y], len(class_names), f"{path}: {y}", class_names)
        sets[part] = ImageSet(pixels[part], labels, factors=starts.get(part, {}))
    splits = Splits.of(sets, class_names, task=task.name, has_names=has_names)
    return splits.with_names(GROUP, groups_of_parts).with_names(RECORD, records)


def _array_names(held: Mapping[str, Held], request: DataRequest) -> Names:
    """Return the names of the arrays of images and targets of each part, as the file spells them."""
    pairs = _MEDMNIST if "train_images" in held else _KERAS if "x_train" in held and "x" not in held else _OURS
    if all(features not in held for features, _ in _FEATURES.values()):
        return pairs
    if images := [x for x, _ in pairs.values() if x in held]:
        raise InputError(f"{request.path} has arrays {images[0]} and {FEATURES}; keep the one to train on")
    request.refuse((*OPTIONS_OF_PIXELS, "window"), FEATURES_STAY)
    return _FEATURES


def _check_names(path: Path, pairs: Names, held: Mapping[str, Held], others: Sequence[str]) -> None:
    """Raise InputError if an array is missing, or one that is not read has the name of a part."""
    for part, pair in pairs.items():
        for key in pair:
            is_needed = part == "train" and pairs["test"][0] not in held
            if key not in held and (is_needed or any(each in held for each in pair)):
                own = sorted({each.name for each in held.values()})
                listed = ", ".join(map(shown, own[:_MAX_LISTED])) + ", …" * (len(own) > _MAX_LISTED)
                raise InputError(f'{path} has no array "{key}"; it holds {listed or "nothing"}')
    for name in others:
        if (words := set(name.lower().split("_"))) <= _WORDS | _PARTS and words & _PARTS:
            ours = ", ".join(key for pair in pairs.values() for key in pair)
            raise InputError(
                f"{path} has an array {shown(name)}, which is not read; the names are {ours}; rename the array or "
                "leave it out"
            )


def _note_groups(path: Path, others: Mapping[str, Held], images: int | None) -> None:
    """Warn if an array that is not read looks like the groups of the training images."""
    for name, each in others.items():
        if is_group_name(name) and _PARTS.isdisjoint(name.lower().split("_")):
            with contextlib.suppress(InputError):  # such as pickled objects, which nothing reads
                cells = read_arrays(path, {name: each})[name].reshape(-1).tolist()
                note_groups(str(path), {name: cells} if len(cells) == images else {})


def _group_arrays(path: Path, pairs: Names, held: Mapping[str, Held], group: str) -> dict[str, str]:
    """Return the name of the array of groups of each part that the file has."""
    arrays = {}
    for part, (x, _) in pairs.items():
        short = "val" if part == "validation" else part
        names = (f"{group}_{short}", f"{short}_{group}", *[group] * (part == "train"))
        if x in held:
            arrays[part] = next((name for name in names if name in held), "")
            if not arrays[part]:
                listed = ", ".join(map(shown, list(held)[:_MAX_LISTED]))
                raise InputError(
                    f"{path} has no array {shown(names[-1] if part == 'train' else names[0])} with the group of each "
                    f"image of {x}; it holds {listed}"
                )
    return arrays


def _with_masks(path: Path, pairs: Names, arrays: Mapping[str, Any], request: DataRequest) -> Splits:
    """Return images (N, *S), (N, *S, C) or (N, C, *S) with masks (N, *S); S is (H, W), or (D, H, W) for volumes."""
    scale: Scale = "auto" if request.scale is None else request.scale
    axes, colours = {part: _channel_axis(path, arrays, x, y) for part, (x, y) in pairs.items()}, None
    if request.wants_masks is not False:
        masks = {
            y: as_mask(arrays[y], _without(arrays[x].shape, axes[part]), f"{path}: {y}")
            for part, (x, y) in pairs.items()
        }
        masks, table = number_values(masks)
        arrays = {**arrays, **{y: number_array(mask, table) for y, mask in masks.items()}}
        colours = colours_of(table)
        arrays = ({} if colours is None else {"class_names": np.array(colours)}) | arrays
    names, has_names, task = _class_names(path, pairs, arrays, request)
    colours = colours if colours is not None and len(colours) == len(names) else None  # masks may lack classes
    sets = {}
    for part, (x, y) in pairs.items():
        labels = task.convert_targets(arrays[y], len(names), f"{path}: {y}")
        pixels = _scaled(arrays[x], scale, f"{path}: {x}", is_volume=labels.ndim == 4)
        axis = axes[part]
        pixels = (pixels.unsqueeze(1) if axis is None else pixels.movedim(axis, 1)).contiguous()
        sets[part] = ImageSet(pixels, labels) if labels.ndim == 3 else PatchSet(tuple(pixels), tuple(labels))
    return Splits.of(sets, names, task=task.name, has_names=has_names, colours=colours)


def _channel_axis(path: Path, arrays: Mapping[str, Any], x: str, y: str) -> int | None:
    """Return the axis of the channels of images with masks: the last one, 1, or None for images without channels.

    The array ``channels`` decides, if there is one. Otherwise the images have as many axes as their masks allow, but a
    volume is never one voxel wide.
    """
    shape, of_masks = arrays[x].shape, arrays[y].shape
    order = str(arrays.get("channels", ""))
    options = {"first": [1], "last": [len(shape) - 1]}.get(order, [len(shape) - 1, 1, None])
    fitting = [
        axis
        for axis in options
        if (axis is None or order or shape[axis] <= MAX_CHANNELS)
        and len(size := _without(shape, axis)) in (3, 4)
        and (size == of_masks or channel_axis(of_masks, size) is not None)
    ]
    if not fitting:
        raise InputError(f"{path}: {y} has the shape {of_masks}, but {x} {shape}; a mask has the size of its image")
    has_colours = shape[1] in (3, 4) and arrays[y].max() > MAX_COLOURS  # rather than a volume of three planes
    is_flat = 1 in (shape[1], shape[-1]) or shape[-1] in (3, 4) or has_colours
    plain = [axis for axis in fitting if _without(shape, axis) == of_masks]  # masks without channels
    return plain[0] if plain and not (plain == [None] and is_flat) else fitting[0]


def _without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _has_lengths(arrays: Mapping[str, Any], x: str) -> bool:
    """Return True if the file has lengths, so that ``x`` holds sequences."""
    return x in LENGTHS and not arrays.keys().isdisjoint(LENGTHS.values())


def _images(
    path: Path, arrays: Mapping[str, Any], x: str, where: str, scale: Scale
) -> UInt8[Tensor, "N C H W"] | Float32[Tensor, "N C 1 L"]:
    """Return pixels; or sequences of numbers, if the file has lengths or ``x`` has only two axes."""
    if _has_lengths(arrays, x):
        lengths = arrays.get(LENGTHS[x], np.zeros(0))
        return torch.from_numpy(as_sequences(arrays[x], lengths, where, LENGTHS[x]))
    values, order = arrays[x], arrays.get("channels")
    if x.startswith(FEATURES):
        return torch.from_numpy(as_features(values, where))
    if values.ndim == 2 and values.dtype.kind in "fiu" and 0 not in values.shape:
        return torch.from_numpy(as_sequences(values, None, where, ""))
    if order is not None and str(order) not in ("first", "last"):
        raise InputError(f'{path}: channels must be "first" or "last", got {shown(order)}')
    named: Any = None if order is None else str(order)
    try:
        pixels = _scaled(values, scale, where)
    except InputError as error:
        if values.ndim != 3 or x not in LENGTHS or values.dtype == np.uint8:
            raise
        raise InputError(f"{error}; if these are sequences (N, C, L), add an array {LENGTHS[x]} (N,)") from None
    try:
        return channels_first(pixels, where, named, "an array channels").contiguous()
    except InputError as error:
        if values.ndim < 4:
            raise
        raise InputError(f"{error}; volumes (N, D, H, W) are trained with masks only (task pixels)") from None


def _scaled(values: np.ndarray, scale: Scale, where: str, *, is_volume: bool = False) -> Tensor:
    """Return pixels: uint8 if that changes none of them, and for volumes, which take much memory; otherwise float32."""
    pixels = scale_pixels(values, scale, where).numpy()
    note_dark([pixels], where, scale, any_bits=True)
    return torch.from_numpy(as_bytes(pixels) if is_volume else alike([pixels])[0])


def _class_names(
    path: Path, pairs: Names, arrays: Mapping[str, Any], request: DataRequest
) -> tuple[tuple[str, ...], bool, Task]:
    """Return the names of the outputs, whether the file holds them, and the task.

    The names are ``class_names``, else the texts among the targets, else numbers. Targets that are only evaluated may
    lack classes.
    """
    complete, part = request.part is None and "train" in pairs, "train" if "train" in pairs else "test"
    y = pairs[part][1]
    targets, where, stored = arrays[y], f"{path}: {y}", arrays.get("class_names")
    task = find_task(request.task or guess_task(targets, where).name)
    is_texts = stored is not None and stored.dtype.kind == "U" and stored.ndim == 1
    if stored is not None and is_texts and np.asarray(targets).dtype.kind in "US":  # they also order grades
        return tuple(map(composed, stored.tolist())), True, task
    if complete:
        names = task.names(targets, where)
    else:
        names = max((task.names(arrays[each], where, complete=False) for _, each in pairs.values()), key=len)
    if stored is None:
        return names, np.asarray(targets).dtype.kind in "US", task
    if is_texts and len(stored) < len(names):  # the task raises a clearer error, such as labels counted from 1
        task.convert_targets(targets, len(stored), f"{where} (class_names has {counted(len(stored), 'text')})")
    may_lack = not complete and targets.ndim == 1
    if not is_texts or (len(stored) < len(names) if may_lack else len(stored) != len(names)):
        raise InputError(
            f"{path}: class_names must be {counted(len(names), 'text')}, one for each class or column of {y}, got "
            f"{stored.dtype} of the shape {shown(stored.shape)}"
        )
    return tuple(map(composed, stored.tolist())), True, task
