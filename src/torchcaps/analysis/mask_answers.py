"""Masks that a network predicts for image files: as files, numbers, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image
from torch import Tensor

from torchcaps.analysis.answers import AnswerOptions, Classifier
from torchcaps.analysis.calibration import Prediction
from torchcaps.analysis.figures import MUTED, Caption, Cell, tiles
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.analysis.photos import MAX_PREVIEW
from torchcaps.analysis.results import Result, Table, percent
from torchcaps.analysis.segmentation import SIDE, coloured, legend_of, middle_slice, palette
from torchcaps.checks import checked
from torchcaps.datasets.images import base_of
from torchcaps.datasets.nifti import Volume
from torchcaps.datasets.scaling import Pixels, as_floats, inverted
from torchcaps.datasets.sources.segmentation_folder import masks_among
from torchcaps.datasets.volumes import is_volume, read_input
from torchcaps.errors import InputError
from torchcaps.files import atomic_path
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import Pages
from torchcaps.tasks import TaskName, task_of
from torchcaps.words import each_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNUSED_OPTIONS = (
    ("group", "prepare", "fit", "coverage", "coverage_over", "poses"),
    "is for networks that give one answer for each image",
)
"""Options of ``torchcaps predict`` that do nothing for masks, and why."""


@checked
def predict_mask(model: Network, image: Pixels) -> UInt8[np.ndarray, "*S"]:
    """Return the class of each pixel of an image of any size, from windows of the network's size if it is larger.

    Raises:
        InputError: The network has another number of channels or axes, or is not for pixels.
    """
    if not (model.per_pixel or model.has_slots):
        raise InputError(f"a {type(model).__name__} gives one answer for each image, and no masks")
    answer: np.ndarray = task_of(model).predict_classes(_pixel_scores(model, image)[None])[0].numpy()
    return answer


class ExportedNetwork(NamedTuple):
    """An exported network, called as a network is."""

    classify: Callable[[Shaped[np.ndarray, "N C *S"]], Prediction]
    """Function from pixels 0..1 to the prediction."""
    in_shape: Sequence[int]
    """Shape of the patches (C, *S) on which the network was trained."""
    task: TaskName

    def __call__(self, images: Float[Tensor, "N C *S"]) -> ModelOutput:
        return ModelOutput(torch.from_numpy(self.classify(images.numpy()).scores))


def _pixel_scores(network: Network | ExportedNetwork, image: Pixels) -> Float[Tensor, "J *S"]:
    """Return the scores of each pixel of an image; InputError if the network has another number of channels or axes."""
    _check_image(image, network.in_shape)
    task = task_of(network)
    if isinstance(network, ExportedNetwork):
        scores = task.infer(network, torch.from_numpy(as_floats(image))[None]).scores
    else:
        with inference(network):
            scores = task.infer(network, to_pixels(network, torch.from_numpy(image)[None])).scores
    return scores[0].cpu()


def _check_image(image: Pixels, in_shape: Sequence[int]) -> None:
    """Raise InputError if an image has another number of channels or axes than a network's patches."""
    if image.ndim != len(in_shape) or len(image) != in_shape[0]:
        sizes = ["×".join(map(str, shape)) for shape in (image.shape, in_shape)]
        raise InputError(f"the image is {sizes[0]} (channels first), but the network takes patches of {sizes[1]}")


@dataclass(frozen=True, eq=False)
class MaskAnswers(Result):
    """Facts about the masks that a network predicts for image files.

    Args:
        files: Paths of the files.
        sizes: Size of each mask, pixels.
        shares: Share of each class in the pixels of each mask, 0..1.
        class_names: Name of each class.
        pictures: Each image (C, H, W) and its mask (H, W), made small; needed only for the figure.
        task: Task of the network.
        colours: Colour of each class; None: those of figures.
    """

    files: Sequence[Path]
    sizes: Sequence[tuple[int, ...]]
    shares: Sequence[Sequence[float]]
    class_names: Sequence[str]
    pictures: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    task: TaskName = "pixels"
    colours: Sequence[str] | None = None

    @property
    def written(self) -> str:
        """Content of the folder of masks, in words."""
        return f"a mask for {each_of(len(self.files), 'image')}"

    def to_dict(self) -> list[dict[str, Any]]:
        facts = zip(self.files, self.sizes, self.shares, strict=True)
        return [
            {"image": str(file), "size": list(size), "shares": dict(zip(self.class_names, shares, strict=True))}
            for file, size, shares in facts
        ]

    def tables(self) -> list[Table]:
        rows = [[str(file), *map(percent, shares)] for file, shares in zip(self.files, self.shares, strict=True)]
        return [Table(rows, ("share of the pixels", *self.class_names))]

    def figures(self) -> dict[str, Figure]:
        """Draw each image beside its mask; of volumes, the middle slice."""
        rows: list[list[Cell]] = [[Caption(each, MUTED) for each in ("image", "answer")]]
        for n, (file, (image, mask)) in enumerate(zip(self.files, self.pictures, strict=True)):
            words = [Caption(file.name, bold=True), *(legend_of(self.class_names, self.colours) if n == 0 else [])]
            rows.append([as_floats(image), coloured(mask, self.colours), words])
        return {"": tiles(rows, side=SIDE)}


def masks_in(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are masks of others by their names, unless all are: they are no images to predict."""
    masks = masks_among([path for path in paths if not is_volume(path)])
    return masks if len(masks) < len(paths) else []


def output_files(out: Path, names: Mapping[Path, Path], pages: Pages | None = None) -> dict[Path, Path]:
    """Return the file of the mask of each image file: the name of the image with the suffix .png or .nii.gz.

    If its ``pages`` are the depth of a volume, the suffix is .tif.

    Args:
        out: Folder of the masks.
        names: Name of each image file below ``out``, with the sub-folders to keep.
        pages: Meaning of the pages of image files.

    Raises:
        InputError: Two images would have one mask, or ``out`` is a file.
    """
    suffix = ".tif" if pages == "depth" else ".png"
    stems = {path: name.name if path.is_dir() else base_of(name.name) for path, name in names.items()}
    ends = {path: ".nii.gz" if is_volume(path) else suffix for path in names}
    return files_below(out, {path: name.parent / (stems[path] + ends[path]) for path, name in names.items()})


def files_below(out: Path, names: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return the files of these names in a folder; InputError if two would be one, or the folder is a file."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, but masks are written into a folder; name a folder")
    owners: dict[Path, Path] = {}
    for path, name in names.items():
        if (other := owners.setdefault(name, path)) != path:
            raise InputError(f"the masks of {other} and {path} would both be {out / name}; predict them separately")
    return {path: out / name for path, name in names.items()}


def write_mask(
    mask: UInt8[np.ndarray, "*S"],
    path: Path,
    volume: Volume | None = None,
    colours: Sequence[str] | None = None,
    *,
    new: bool = False,
) -> None:
    """Write a mask: numbers of classes as a PNG file with a palette, or as a NIfTI file with the axes of its volume.

    A mask of a volume from the pages of an image file becomes a TIFF file of as many pages.
    """
    if volume is not None:
        return volume.write(mask, path, new=new)
    slices = [Image.fromarray(each).convert("P") for each in (mask if mask.ndim == 3 else mask[None])]
    for image in slices:
        image.putpalette((255 * palette(colours)).round().astype(np.uint8).tobytes())
    options: dict[str, Any] = {"format": "PNG"}
    if mask.ndim == 3:
        options = {"format": "TIFF", "save_all": True, "append_images": slices[1:], "compression": "tiff_deflate"}
    with atomic_path(path, new=new) as temporary:
        slices[0].save(temporary, **options)
    return None


class Seen(NamedTuple):
    """The answer to an image of pixels."""

    mask: Shaped[np.ndarray, "*S"]
    """Number of the class of each pixel, from 0."""
    outputs: int
    """Number of outputs of the network."""
    picture: tuple[Shaped[np.ndarray, "C H W"], Shaped[np.ndarray, "H W"]]
    """Image and mask to draw."""
    write: Callable[[Path], None]
    """Writes the mask to a file."""


def answer_files(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions
) -> tuple[MaskAnswers | None, list[str]]:
    """Predict the masks of image files one by one, as :func:`answer_each`."""
    spec = classifier.description
    network = classifier.model or ExportedNetwork(classifier.classify, spec.in_shape, spec.task)

    def look(path: Path) -> Seen:
        pixels, volume = read_input(path, spec.in_shape[0], spec.scale, spec.pages, spec.channels, spec.spacing)
        scores = _pixel_scores(network, inverted(pixels) if options.invert else pixels)
        seen = task_of(network).predict_classes(scores[None])[0].numpy()
        mask = seen if volume is None else volume.restored(seen)
        drawn = middle_slice(pixels), middle_slice(seen[None])[0]
        how: Any = {"volume": volume, "colours": spec.colours, "new": not options.overwrite}
        return Seen(mask, len(scores), drawn, partial(write_mask, mask, **how))

    return answer_each(look, paths, options, spec)


def answer_each(
    look: Callable[[Path], Seen], paths: Sequence[Path], options: AnswerOptions, spec: Any
) -> tuple[MaskAnswers | None, list[str]]:
    """Answer files one by one by ``look``, and write each mask as soon as it is ready.

    Returns:
        Facts about the masks, None if no file can be read; and a sentence for each file that cannot.
    """
    names = task_of(spec).matched_names(spec.class_names)
    read, sizes, shares, pictures, damaged = list[Path](), [], [], [], list[str]()
    for path in paths:
        try:
            seen = look(path)
        except InputError as error:
            damaged.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        names = names or tuple(map(str, range(seen.outputs)))  # slots have numbers, and no names
        if path in options.targets:
            seen.write(options.targets[path])
        read.append(path)
        sizes.append(seen.mask.shape)
        shares.append((np.bincount(seen.mask.reshape(-1), minlength=len(names)) / seen.mask.size).tolist())
        if options.draws:
            image, mask = seen.picture
            pictures.append((_preview(image), _preview(mask[None])[0]))
    return MaskAnswers(read, sizes, shares, names, pictures, spec.task, spec.colours) if read else None, damaged


def _preview(image: Shaped[np.ndarray, "C H W"]) -> Shaped[np.ndarray, "C h w"]:
    """Return every n-th pixel of an image, so that its longer side is at most ``MAX_PREVIEW``."""
    step = -(-max(image.shape[1:]) // MAX_PREVIEW)
    return image[:, ::step, ::step].copy()
