"""A folder of images and masks: images/ and masks/ with the same names, or x.png and x_mask.png beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchcaps.datasets.damaged import note_unread, read_each, refuse_damaged
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.images import folders_below, image_files_in, in_one_form, read_pixels, stem_of, subfolders
from torchcaps.datasets.masks import Mask, number_masks, read_classes, read_mask, size_fault
from torchcaps.datasets.patch_set import PatchSet
from torchcaps.datasets.registry import DataRequest
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.scaling import Pixels
from torchcaps.datasets.splits import FILE, GROUP, note_groups
from torchcaps.datasets.volumes import advice_for, channel_of, channels_in
from torchcaps.errors import InputError
from torchcaps.files import paths_from
from torchcaps.ranges import IGNORED, Pages
from torchcaps.words import counted

IMAGES, MASKS, CLASSES, SUBJECT = "images", "masks", "classes.txt", "subject"
MAX_PARTS = 3
"""Parts of a data set that is not split any further: train, validation and test."""
RIGHT = [IMAGES, MASKS]
TEST = ["imagests", "labelsts"]
"""Names, in small letters, of the folders of a test part, beside imagesTr and labelsTr."""
IMAGE_NAMES = {IMAGES, "image", "img", "imgs", "photos", "jpegimages", "imagestr", "raw", "scans"}
"""Names, in small letters, that a folder of images often has in data sets with masks."""
MASK_NAMES = {MASKS, "mask", "labels", "label", "annotations", "annotation", "segmentations", "segmentation"}
MASK_NAMES |= {"segmentationclass", "segmentation_masks", "groundtruth", "ground_truth", "gt", "targets"}
MASK_NAMES |= {"labelstr", "seg", "segs", "annot", "annots"}
"""Names, in small letters, that a folder of masks often has."""
MASK_ENDINGS = [mark + name for name in sorted(MASK_NAMES, key=len, reverse=True) for mark in "_-"]
"""Ends of the names of masks, in small letters, in data sets that have them beside their images."""
MAX_CLASSES = 32
"""Classes of a mask in a folder whose name does not say that it holds masks."""


class Labelled(NamedTuple):
    """An image and the values of its mask."""

    image: Pixels
    mask: Mask
    spacing: tuple[float, ...] | None = None
    """Distances of neighbouring pixels along the axes; None: 1."""


class Pair(NamedTuple):
    """Files of an image and of its mask."""

    images: tuple[Path, ...]
    """The file of the image, or the file of each channel of a subject."""
    mask: Path
    file: Path
    """Name of the image: its file, or the folder of the subject."""


class Sources(NamedTuple):
    """Files of images and of masks, by the name that a pair shares."""

    images: dict[str, list[Path]]
    masks: dict[str, list[Path]]
    mask_of: Callable[[Path], Path]
    """Returns the place of the mask of an image."""


class FileKind(NamedTuple):
    """Kind of files that hold images and masks."""

    files_in: Callable[[Path], list[Path]]
    """Returns the files of this kind in a folder."""
    read: Callable[[Pair, tuple[float, float] | None], Labelled]
    """Reads a pair of files; the second argument is the range of the pixels."""
    suffix: str
    """Usual suffix of masks."""
    words: str
    """A file of this kind in an error."""
    has_subjects: bool = False
    """True if the files of a subject may be its channels."""


def files_beside(files: Sequence[Path]) -> Sources:
    """Return images and the masks beside them, such as x.png and x_mask.png."""
    stems = {(file.parent, stem_of(file).lower()) for file in files}
    images: dict[str, list[Path]] = {}
    masks: dict[str, list[Path]] = {}
    endings = list[str]()
    for file in files:
        stem = stem_of(file)
        ends = (stem[-len(end) :] for end in MASK_ENDINGS if stem.lower().endswith(end))
        ending = next((end for end in ends if (file.parent, stem[: -len(end)].lower()) in stems), "")
        endings += [ending] * (ending != "")
        name = stem.removesuffix(ending).lower()
        (masks if ending else images).setdefault(str(file.parent / name), []).append(file)
    ending = endings[0] if endings else "_mask"
    return Sources(images, masks, lambda image: image.with_name(f"{stem_of(image)}{ending}.png"))


def folders_of_numbers(parts: Sequence[Path], request: DataRequest) -> tuple[str, str] | None:
    """Return the names of the folders of images and of masks in each part, if not they but their files say so.

    Each part has two folders with files of the same names and sizes. Exactly one of them holds only the numbers 0 to
    K - 1, or 0 and 255, as masks do, in all parts together.
    """
    names = [each.name for each in subfolders(parts[0])]
    if len(names) != 2 or any([each.name for each in subfolders(part)] != names for part in parts):
        return None
    listed: dict[str, dict[str, Path]] = {name: {} for name in names}
    for part in parts:
        for name in names:
            (other,) = (part / each for each in names if each != name)
            stems = {stem_of(file) for file in image_files_in(other)}
            by_stem = _by_stem(image_files_in(part / name), stems)
            listed[name] |= {f"{part.name}/{stem}": files[0] for stem, files in by_stem.items()}
    if not listed[names[0]] or listed[names[0]].keys() != listed[names[1]].keys():
        return None
    sizes = {name: size for name in names if (size := _sizes_of_numbers(listed[name], request)) is not None}
    if len(sizes) != 1:
        return None
    ((of_masks, size_of),) = sizes.items()
    (of_images,) = (name for name in names if name != of_masks)
    for stem, file in listed[of_images].items():
        try:
            image = read_pixels(file, scale=request.scale, pages=request.pages)
        except InputError:  # the reader of the data set names it
            continue
        if image.shape[1:] != size_of[stem]:
            return None
    return of_images, of_masks


def _sizes_of_numbers(files: Mapping[str, Path], request: DataRequest) -> dict[str, tuple[int, ...]] | None:
    """Return the sizes of files that hold only numbers of classes, or only 0 and 255; None for other files."""
    values, sizes = set[int](), dict[str, tuple[int, ...]]()
    for stem, file in files.items():
        try:
            mask = read_mask(file, str(file), is_volume=request.pages == "depth")
        except InputError:
            return None
        if any(MAX_CLASSES <= value != IGNORED for value in mask.values):
            return None
        values.update(mask.values)
        sizes[stem] = mask.positions.shape
    numbers = sorted(values - {IGNORED})
    return sizes if len(values) > 1 and numbers == list(range(len(numbers))) else None


def mask_folders(folder: Path, files_in: Callable[[Path], list[Path]]) -> tuple[Path, Path] | None:
    """Return the folders of images and of masks, by their usual names, such as images/ and masks/, or raw/ and seg/.

    None: there are no such folders, or they are among the folders of other classes and the names of their files differ.

    Raises:
        InputError: The folders hold train/ and other parts, which stand above them.
    """
    names = {each.name: each for each in subfolders(folder)}
    alike = [[name for name in names if name.lower() in known] for known in (IMAGE_NAMES, MASK_NAMES)]
    if not all(alike):
        return None
    # the right name first, then the right name in other letters
    chosen = [
        min(each, key=lambda name: (name != right, name.lower() != right))
        for each, right in zip(alike, RIGHT, strict=True)
    ]
    images = {stem_of(file) for file in files_in(names[chosen[0]])}
    masks = set(_by_stem(files_in(names[chosen[1]]), images))
    inner = sorted(set.intersection(*({each.name for each in subfolders(names[name])} for name in chosen)))
    if inner and not images and not masks:
        raise InputError(
            f"{folder / chosen[0]} has no images but {inner[0]}/; put {inner[0]}/ above images/ and masks/, so that "
            f"there are {folder / inner[0] / IMAGES} and {folder / inner[0] / MASKS}"
        )
    is_class = len(names) > 2 and not {_without_channel(each, masks) for each in images} <= masks
    if chosen != RIGHT and (not masks or is_class):
        return None
    return names[chosen[0]], names[chosen[1]]


def load_segmentation_folder(
    root: Path, parts: Mapping[str, Path], request: DataRequest, kind: FileKind | None = None
) -> Splits:
    """Read the images and masks in the folder of each part.

    A mask has the name and size of its image, except for the suffix. ``classes.txt`` beside images/, or beside train/,
    names the classes. Images are in a fixed random order. One error names all images and masks that cannot be used;
    ``skip_damaged`` leaves them out. Without a ``kind`` of files, image files are read.

    Raises:
        InputError: A part has no masks, an image has no mask, a mask has no image or another size, or it holds no
            numbers of classes.
    """
    kind = kind or FileKind(image_files_in, partial(_read_image_files, request.pages), ".png", "an image file")
    names, table = read_classes(root / CLASSES)
    pairs, faults = dict[str, list[Pair]](), list[str]()
    subjects, channels = subject_pairs(parts, kind) if kind.has_subjects else None, tuple[str, ...]()
    if subjects is not None:
        pairs, faults = subjects.pairs, subjects.faults
    else:
        sources = {part: _sources_of(folder, kind, parts, request) for part, folder in parts.items()}
        test = [each for name in TEST for each in subfolders(root) if each.name.lower() == name]
        if len(test) == len(TEST) and "test" not in sources:
            sources["test"] = _sources_in(test[0], test[1], kind)
        channels = _channels_of(sources.values()) if kind.has_subjects else ()
        for part, files in sources.items():
            pairs[part], of_part = _pairs_of(files, channels)
            faults += of_part
        if kind.files_in is image_files_in:
            by_name = (each for files in sources.values() for each in (*files.images.values(), *files.masks.values()))
            note_unread(root, chain(*by_name), "images and masks are in two folders, or beside each other")
    read, skip = partial(_read_pair, kind=kind, scale=request.scale), request.skip_damaged
    check = _check_channels if kind.has_subjects else lambda *_: None
    listed = (pair for part in pairs.values() for pair in part)
    labelled, faults = read_each(listed, read, skip=skip, faults=faults, check=check)
    masks = {str(pair.mask): each.mask for pair, each in labelled.items()}
    numbered, class_names, colours, unknown = number_masks(masks, names, table)
    if unknown and len(unknown) == len(masks):  # not the masks are wrong, but the list
        raise InputError(unknown[0])
    refuse_damaged(unknown, len(masks), skip=skip)
    faults += unknown
    images = {pair.file: each.image for pair, each in labelled.items() if str(pair.mask) in numbered}
    images, sets = in_one_form(images, str(root), request.scale, request.pages), dict[str, ImageSet]()
    for part, of_pairs in pairs.items():
        kept = [pair for pair in of_pairs if pair.file in images]
        if not kept:
            raise InputError(": ".join([f"{root}: none of the {part} images and masks can be used", *faults[:1]]))
        spacing = tuple(each for pair in kept if (each := labelled[pair].spacing) is not None)
        sets[part] = PatchSet(
            tuple(torch.from_numpy(images[pair.file]) for pair in kept),
            tuple(torch.from_numpy(numbered[str(pair.mask)]) for pair in kept),
            spacing=spacing or None,
            names={FILE: paths_from(root, (pair.file for pair in kept))},
        )
    has_names = class_names != tuple(map(str, range(len(class_names))))
    fields: Any = {"skipped": tuple(faults), "task": "pixels", "has_names": has_names, "colours": colours}
    fields["channels"] = channels or None if subjects is None else subjects.channels
    splits = Splits.of(sets, class_names, **fields)
    return splits if subjects is None else _by_subject(splits, root, parts, request)


class Subjects(NamedTuple):
    """Folders of subjects."""

    pairs: dict[str, list[Pair]]
    """The channels and the mask of each, by part."""
    faults: list[str]
    """A sentence for each folder that cannot be used."""
    channels: tuple[str, ...]
    """Names of the channels, in their order."""


def subject_pairs(parts: Mapping[str, Path], kind: FileKind) -> Subjects | None:
    """Return the folders of subjects, also in sub-folders, such as those of sessions; None if there are none.

    A subject has a mask, a file with a usual name such as seg, mask or label. Its other files are the channels, by
    their names: those that at least half of the subjects have.
    """
    if any(mask_folders(folder, kind.files_in) for folder in parts.values()):
        return None
    named = {
        part: {each: files for each in folders_below(folder) if (files := channels_in(each))}
        for part, folder in parts.items()
    }
    listed = [files for of_part in named.values() for files in of_part.values()]
    if not any(name in MASK_NAMES for files in listed for name in files):
        return None
    counts = Counter(name for files in listed for name in files if name not in MASK_NAMES)
    channels = tuple(sorted(name for name, count in counts.items() if 2 * count >= len(listed)))
    usual = Counter(name for files in listed for name in files if name in MASK_NAMES).most_common(1)[0][0]
    pairs, faults = dict[str, list[Pair]](), list[str]()
    for part, of_part in named.items():
        pairs[part] = []
        for subject, files in of_part.items():
            masks = [name for name in files if name in MASK_NAMES]
            if (fault := _subject_fault(files, masks, channels, f"{usual}{kind.suffix}")) is not None:
                faults.append(f"{subject} has {fault}")
            else:
                images = tuple(files[name][0] for name in channels)
                pairs[part].append(Pair(images, files[masks[0]][0], subject))
        pairs[part] = [pairs[part][i] for i in generator(FIXED_SEED).permutation(len(pairs[part]))]
    return Subjects(pairs, faults, channels)


def _subject_fault(
    files: Mapping[str, Sequence[Path]], masks: Sequence[str], channels: Sequence[str], usual: str
) -> str | None:
    """Return why the files of a subject cannot be used, after "it has"; None if they can."""
    others = [name for name in files if name not in (*masks, *channels)]
    lacking = [name for name in channels if name not in files]
    twice = next((each for each in files.values() if len(each) > 1), None)
    if lacking or not channels:
        return f"no {' and no '.join(lacking) or 'image'}, but {', '.join(sorted(files))}; put all channels there"
    if not masks:
        return f"no mask; put {usual} there"
    if len(masks) > 1 or twice is not None:
        return f"{' and '.join(each.name for each in twice or (files[name][0] for name in masks))}; keep one of them"
    if others:
        return f"{' and '.join(others)}, which most other subjects lack; move it away"
    return None


def _by_subject(splits: Splits, root: Path, parts: Mapping[str, Path], request: DataRequest) -> Splits:
    """Return subjects as groups, if the request names them: their images may be in several folders, as of sessions."""
    subjects = {
        part: [(root / file).relative_to(parts[part]).parts[0] for file in images.names[FILE]]
        for part, images in splits.parts.items()
    }
    if request.group == SUBJECT:
        return splits.with_names(GROUP, subjects)
    if request.group is None and request.part is None and len(subjects) < MAX_PARTS:
        note_groups(str(root), {SUBJECT: [subject for each in subjects.values() for subject in each]})
    return splits


def _check_channels(*pair: tuple[Pair, Labelled]) -> None:
    """Raise InputError unless two volumes have as many channels, which are never taken for grey or colours."""
    first, other = (counted(len(each.image), "channel") for _, each in pair)
    if first != other:
        raise InputError(f"{pair[1][0].file} has {other}, but {pair[0][0].file} {first}; all must have the same")


def _read_pair(pair: Pair, kind: FileKind, scale: tuple[float, float] | None) -> Labelled:
    """Read an image and its mask, which must have one size."""
    labelled = kind.read(pair, scale)
    if labelled.image.shape[1:] != labelled.mask.positions.shape:
        raise InputError(size_fault(pair.mask, labelled.mask.positions.shape, pair.file, labelled.image.shape[1:]))
    return labelled


def _sources_of(folder: Path, kind: FileKind, parts: Mapping[str, Path], request: DataRequest) -> Sources:
    """Return the images and masks of a folder: in two folders, or beside each other, also in folders of classes.

    Raises:
        InputError: There are none.
    """
    folders = mask_folders(folder, kind.files_in)
    if folders is None and kind.files_in is image_files_in:
        beside = files_beside(image_files_in(folder, deep=True))
        if beside.masks and (not subfolders(folder) or beside.masks.keys() == beside.images.keys()):
            return beside
        unnamed = [each for each in parts.values() if mask_folders(each, kind.files_in) is None]
        names = folders_of_numbers(unnamed, request)
        folders = names and (folder / names[0], folder / names[1])
    if folders is None:
        pair = next((each for each in subfolders(folder) if mask_folders(each, kind.files_in)), None)
        why = f"; put those of {pair.name}/ and of the others together, one mask for each image" if pair else ""
        or_subjects = ", or a folder for each subject with its channels and a mask called seg" * kind.has_subjects
        raise InputError(
            f"{folder} must have images/ and masks/, with {kind.words} of the same name in each{or_subjects}{why}"
        )
    return _sources_in(*folders, kind)


def masks_of_subjects(files: Sequence[Path]) -> list[Path]:
    """Return the files with the name of a mask, such as seg.png, in a folder of a subject, beside its t1.png."""
    named = [file for file in files if stem_of(file).lower() in MASK_NAMES]
    others = {file.parent for file in files} - {file.parent for file in named}
    return named if len(named) > 1 and not others and len(files) > len(named) else []


def masks_among(files: Sequence[Path]) -> list[Path]:
    """Return the files that are masks of others, by their folders, such as images/ and masks/, or by their names."""
    beside = [mask for masks in files_beside(files).masks.values() for mask in masks] + masks_of_subjects(files)
    around = {file.parent.parent for file in files}
    holders = {each for each in around if any(child.name.lower() in IMAGE_NAMES for child in subfolders(each))}
    return beside + [file for file in files if file.parent.name.lower() in MASK_NAMES and file.parent.parent in holders]


def _sources_in(of_images: Path, of_masks: Path, kind: FileKind) -> Sources:
    """Return the images and masks of two folders.

    Raises:
        InputError: There is no image.
    """
    files = kind.files_in(of_images)
    masks = _by_stem(kind.files_in(of_masks), {stem_of(file) for file in files})
    images: dict[str, list[Path]] = {}
    for file in files:
        images.setdefault(_without_channel(stem_of(file), masks), []).append(file)
    if not images:
        raise InputError(f"{of_images} has no images{advice_for(of_images, of_images.parent)}")
    return Sources(images, masks, lambda image: of_masks / f"{stem_of(image)}{kind.suffix}")


def _channels_of(sources: Iterable[Sources]) -> tuple[str, ...]:
    """Return the usual numbers of channels, such as 0000 and 0001, if each is a file; () if an image is one file."""
    several = (files for each in sources for files in each.images.values() if len(files) > 1)
    usual = Counter(tuple(map(channel_of, files)) for files in several).most_common(1)
    return usual[0][0] if usual and all(usual[0][0]) else ()


def _pairs_of(sources: Sources, channels: Sequence[str] = ()) -> tuple[list[Pair], list[str]]:
    """Return the images with their masks, in a fixed random order, and a sentence for each other file."""
    images, masks = sources.images, sources.masks
    whole = {stem: files for stem, files in images.items() if [*map(channel_of, files)] == [*channels]}
    folder = next((files[0].parent for files in images.values()), "its folder")
    faults = [
        f"{files[0]} and {files[1]} have one name; keep one of them"
        if stem_of(files[0]).lower() == stem_of(files[1]).lower()
        else f"{files[0]} and {files[1]} are {what}; keep one, or join them"
        for by_stem, what in (
            (images, "channels of one image, but an image is one file"),
            (masks, "masks of one image, but an image has one mask, with the number of a class in each pixel"),
        )
        for files in by_stem.values()
        if len(files) > 1 and not (by_stem is images and channels)
    ]
    faults += [
        f"{files[0]} has the channels {', '.join(map(channel_of, files))}, but most images have {', '.join(channels)}; "
        "put all channels there"
        for stem, files in images.items()
        if channels and stem not in whole
    ]
    alone = sorted(masks.keys() - images.keys())
    for stem in sorted(images.keys() - masks.keys()):
        image, place = images[stem][0], sources.mask_of(images[stem][0])
        similar = [each for each in alone if _is_similar(each, stem)]
        alone = [each for each in alone if each not in similar]
        files = [masks[each][0] for each in similar]
        faults.append(
            f"{image} has no mask; put {place} there, or move the image away"
            if not files
            else f"{image} has no mask; rename {files[0]} to {place.name}"
            if len(files) == 1
            else f"{image} has {len(files)} masks, such as {files[0]} and {files[1]}, but an image has one mask, with "
            f"the number of a class in each pixel; join them as {place.name}"
        )
    faults += [f"{masks[stem][0]} has no image in {folder}; put it there, or move the mask away" for stem in alone]
    usable = whole if channels else {stem: files for stem, files in images.items() if len(files) == 1}
    stems = sorted(stem for stem in usable.keys() & masks.keys() if len(masks[stem]) == 1)
    order = generator(FIXED_SEED).permutation(len(stems))
    return [Pair(tuple(images[stems[i]]), masks[stems[i]][0], images[stems[i]][0]) for i in order], faults


def _without_channel(stem: str, masks: Container[str]) -> str:
    """Return the stem of the mask of an image, which lacks the number of the channel."""
    base = stem.removesuffix(f"_{channel_of(Path(stem))}")
    return base if stem not in masks and base in masks else stem


def _by_stem(files: Sequence[Path], others: Container[str]) -> dict[str, list[Path]]:
    """Return the files by their stems, without an ending such as ``_mask`` where the rest is a stem of ``others``."""
    by_stem: dict[str, list[Path]] = {}
    for file in files:
        stem = stem_of(file)
        bases = (stem[: -len(end)] for end in MASK_ENDINGS if stem.lower().endswith(end) and stem not in others)
        by_stem.setdefault(next((base for base in bases if base in others), stem), []).append(file)
    return by_stem


def _is_similar(mask: str, image: str) -> bool:
    """Return True if the name of a mask is that of an image in other letters, or with an addition such as ``_mask``."""
    mask, image = mask.casefold(), image.casefold()
    return mask == image or mask.startswith((f"{image}_", f"{image}-")) or mask.endswith((f"_{image}", f"-{image}"))


def _read_image_files(pages: Pages | None, pair: Pair, scale: tuple[float, float] | None) -> Labelled:
    image = read_pixels(pair.file, scale=scale, pages=pages)
    return Labelled(image, read_mask(pair.mask, str(pair.mask), is_volume=pages == "depth"))
