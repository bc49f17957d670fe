"""What a network says about single images, from files too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from torchcaps.analysis.inference import in_batches, inference
from torchcaps.datasets.images import read_pixels, resize_images, with_channels
from torchcaps.errors import InputError
from torchcaps.models import Model


def load_image(
    path: str | Path, in_shape: Sequence[int], *, invert: bool = False, fit: Literal["pad", "stretch"] = "pad"
) -> UInt8[Tensor, "C H W"]:
    """Read an image file of any size and bring it to the shape a network takes.

    Colour becomes grey by ITU-R 601 luma where the network takes one channel; transparent parts show white, as on a
    page; a photo is turned upright as its EXIF data say; 16-bit greys are scaled; of several frames the first counts.

    Args:
        path: A PNG, JPEG, BMP, GIF, WebP or TIFF file.
        in_shape: (C, H, W), C being 1 or 3.
        invert: Turn dark on light, such as pen on paper, into light on dark, as MNIST has it.
        fit: ``"pad"`` keeps the aspect ratio: the image is resized to fit inside H×W, centred, and surrounded by the
            median colour of its own border. ``"stretch"`` resizes height and width each by its own factor, as images
            of a ``folder:`` data set are.

    Returns:
        Pixels of 0..255. Resizing is bicubic, smoothed first where the image shrinks.

    Raises:
        InputError: The file is missing, no image or a broken one; C is neither 1 nor 3; or an unknown ``fit``.
    """
    if fit not in ("pad", "stretch"):
        raise InputError(f'fit must be "pad" or "stretch", got {fit!r}')
    channels, height, width = in_shape
    image = with_channels(read_pixels(Path(path)), channels)
    if invert:
        image = 255 - image
    if fit == "stretch":
        return resize_images(image[None], (height, width))[0]
    scale = min(height / image.shape[1], width / image.shape[2])
    size = (max(round(image.shape[1] * scale), 1), max(round(image.shape[2] * scale), 1))
    canvas = _border_colour(image)[:, None, None].repeat(1, height, width)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    canvas[:, top : top + size[0], left : left + size[1]] = resize_images(image[None], size)[0]
    return canvas


def _border_colour(image: UInt8[Tensor, "C H W"]) -> UInt8[Tensor, "C"]:
    sides = (image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1])
    return torch.cat(sides, 1).median(1).values


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a network says about images.

    Args:
        classes: The class of the longest capsule (or of the highest probability).
        lengths: All class scores ‖v_j‖, 0..1.
        reconstructions: The image decoded from the longest capsule, pixels 0..1; None without a decoder.
    """

    classes: Int[np.ndarray, "N"]
    lengths: Float[np.ndarray, "N J"]
    reconstructions: Float[np.ndarray, "N C H W"] | None


def predict(
    model: Model,
    images: Shaped[Tensor, "N C H W"],
    targets: Int[Tensor, "N"] | None = None,
    *,
    batch_size: int = 256,
) -> Predictions:
    """Classify images, and decode each from one capsule where the network has a decoder.

    Args:
        model: The network; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1; N at least 1.
        targets: The classes whose capsules are decoded instead of the longest; they do not change the classification.
        batch_size: Images at a time.

    Raises:
        TypeError: Images of another dtype.
        InputError: Images of a shape the network was not built for, no image, or targets that do not fit.
    """
    lengths, reconstructions = [], []
    with inference(model):
        for pixels, classes in in_batches(model, images, targets, batch_size):
            output = model(pixels, classes)
            lengths.append(output.lengths.float().cpu())
            if output.reconstruction is not None:
                reconstructions.append(output.reconstruction.float().cpu())
    scores = torch.cat(lengths)
    return Predictions(
        scores.argmax(-1).numpy(), scores.numpy(), torch.cat(reconstructions).numpy() if reconstructions else None
    )
