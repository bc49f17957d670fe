"""Masks that a network predicts for image files: as files, numbers, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image

from torchcaps.analysis.figures import MUTED, Caption, Cell, tiles
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.analysis.results import Result, Table, percent
from torchcaps.analysis.segmentation import SIDE, coloured, legend_of, middle_slice, palette
from torchcaps.checks import checked
from torchcaps.datasets.images import read_pixels, stem_of, with_channels
from torchcaps.datasets.nifti import Volume, is_volume, read_volume
from torchcaps.datasets.scaling import Pixels, as_bytes, as_floats, as_pixels, inverted, note_dark
from torchcaps.errors import InputError
from torchcaps.files import atomic_path
from torchcaps.models import Network
from torchcaps.ops.segmentation import pixel_classes
from torchcaps.ops.sliding import sliding_windows
from torchcaps.tasks import TaskName, task_of
from torchcaps.words import each_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@checked
def predict_mask(model: Network, image: Pixels) -> UInt8[np.ndarray, "*S"]:
    """Return the class of each pixel of an image of any size, from windows of the network's size if it is larger.

    Raises:
        InputError: The network has another number of channels or axes, or is not for pixels.
    """
    task = task_of(model)
    if not model.per_pixel:
        raise InputError(f"a {type(model).__name__} gives one answer for each image, and no masks")
    _check_image(image, model.in_shape)
    with inference(model):
        output = task.infer(model, to_pixels(model, torch.from_numpy(image)[None]))
    return pixel_classes(output.scores)[0].cpu().numpy()


def exported_mask(
    scores: Callable[[Shaped[np.ndarray, "N C *S"]], Float[np.ndarray, "N J *S"]],
    in_shape: Sequence[int],
    image: Pixels,
) -> UInt8[np.ndarray, "*S"]:
    """Return :func:`predict_mask` of an exported network.

    Args:
        scores: Function from pixels 0..1 to the scores of the exported network.
        in_shape: Shape of the patches (C, *S) on which the network was trained.
        image: Image of any size.

    Raises:
        InputError: The network has another number of channels or axes.
    """
    _check_image(image, in_shape)
    pixels = torch.from_numpy(as_floats(image))[None]
    found = sliding_windows(lambda part: torch.from_numpy(scores(part.numpy())), pixels, in_shape[1:])
    return pixel_classes(found)[0].numpy()


def _check_image(image: Pixels, in_shape: Sequence[int]) -> None:
    """Raise InputError if an image has another number of channels or axes than a network's patches."""
    if image.ndim != len(in_shape) or len(image) != in_shape[0]:
        sizes = ["×".join(map(str, shape)) for shape in (image.shape, in_shape)]
        raise InputError(f"the image is {sizes[0]} (channels first), but the network takes patches of {sizes[1]}")


@dataclass(frozen=True, eq=False)
class MaskAnswers(Result):
    """Masks that a network predicts for image files.

    Args:
        files: Paths of the files.
        images: Pixels of the files.
        masks: Class of each pixel.
        class_names: Name of each class.
        volumes: Volume of each NIfTI file, whose axes and affine map its mask gets; None for other files.
        task: Task of the network.
    """

    files: Sequence[Path]
    images: Sequence[Pixels]
    masks: Sequence[UInt8[np.ndarray, "*S"]]
    class_names: Sequence[str]
    volumes: Sequence[Volume | None] = ()
    task: TaskName = "pixels"

    @property
    def written(self) -> str:
        """Content of the files of :meth:`write`, in words."""
        return f"a mask for {each_of(len(self.files), 'image')}"

    def shares(self, n: int) -> list[float]:
        """Return the share of each class in the pixels of image n."""
        counts = np.bincount(self.masks[n].reshape(-1), minlength=len(self.class_names))
        return (counts / self.masks[n].size).tolist()

    def names(self) -> list[str]:
        """Return the name of the file of each mask: the name of its image with the suffix .png or .nii.gz.

        Raises:
            InputError: Two images have one name.
        """
        found: dict[str, Path] = {}
        for file, volume in zip(self.files, self.volumes, strict=True):
            name = stem_of(file) + (".png" if volume is None else ".nii.gz")
            if name in found:
                raise InputError(f"the masks of {found[name]} and {file} would both be {name}; predict them separately")
            found[name] = file
        return list(found)

    def write(self, folder: Path) -> None:
        """Write each mask into a folder: numbers of classes as a PNG file with a palette, or as a NIfTI file."""
        for name, mask, volume in zip(self.names(), self.masks, self.volumes, strict=True):
            if volume is not None:
                volume.write(mask, folder / name)
                continue
            image = Image.fromarray(mask).convert("P")
            image.putpalette((255 * palette()).round().astype(np.uint8).tobytes())
            with atomic_path(folder / name) as temporary:
                image.save(temporary, format="PNG")

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "image": str(file),
                "size": list(self.masks[n].shape),
                "shares": dict(zip(self.class_names, self.shares(n), strict=True)),
            }
            for n, file in enumerate(self.files)
        ]

    def tables(self) -> list[Table]:
        rows = [[str(file), *map(percent, self.shares(n))] for n, file in enumerate(self.files)]
        return [Table(rows, ("share of the pixels", *self.class_names))]

    def figures(self) -> dict[str, Figure]:
        """Draw each image beside its mask; of volumes, the middle slice."""
        rows: list[list[Cell]] = [[Caption(each, MUTED) for each in ("image", "answer")]]
        for n, (file, image, mask) in enumerate(zip(self.files, self.images, self.masks, strict=True)):
            words = [Caption(file.name, bold=True), *(legend_of(self.class_names) if n == 0 else [])]
            rows.append([as_floats(middle_slice(image)), coloured(middle_slice(mask[None])[0]), words])
        return {"": tiles(rows, side=SIDE)}


def answer_masks(
    answer: Callable[[Pixels], UInt8[np.ndarray, "*S"]],
    paths: Sequence[Path],
    class_names: Sequence[str],
    *,
    channels: int,
    scale: tuple[float, float] | None = None,
    invert: bool = False,
) -> tuple[MaskAnswers, list[str]]:
    """Predict the masks of image files.

    Args:
        answer: Function from an image to its mask.
        paths: Image files, or NIfTI files for a network of volumes.
        class_names: Name of each class.
        channels: Channels of the network's images.
        scale: Numbers that become 0 and 1; None: see :func:`~torchcaps.datasets.scaling.range_of`.
        invert: Invert the pixels.

    Returns:
        The answers, and a sentence for each file that cannot be read.
    """
    found, damaged = list[tuple[Path, np.ndarray, np.ndarray, Volume | None]](), list[str]()
    for path in paths:
        try:
            volume = read_volume(path) if is_volume(path) else None
            if volume is None:
                pixels = with_channels(read_pixels(path, scale=scale), channels)
                note_dark([pixels], "an image file", scale)
            else:
                pixels = as_bytes(as_pixels(volume.values, scale, str(path), "volume"))[None]
            mask = answer(inverted(pixels) if invert else pixels)
        except InputError as error:
            damaged.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        found.append((path, pixels, mask, volume))
    files, images, masks, volumes = zip(*found, strict=True) if found else ((), (), (), ())
    return MaskAnswers(files, images, masks, class_names, volumes), damaged
