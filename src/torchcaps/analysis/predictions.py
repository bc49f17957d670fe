"""What a network says about single images, from files too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from torchcaps.analysis.calibration import USUAL, Calibration, Prediction, distances
from torchcaps.analysis.inference import classes_of, in_batches, inference
from torchcaps.datasets.images import Fit, read_image
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError
from torchcaps.models import Network

BRIGHTEST = 1e15
"""A pixel whose square float32 still holds, summed over any image."""


def load_image(
    path: str | Path,
    in_shape: Sequence[int],
    *,
    preparation: Preparation | None = None,
    invert: bool = False,
    fit: Fit = "pad",
    name: str | None = None,
) -> UInt8[Tensor, "C H W"]:
    """Read an image file and bring it to the shape a network takes: :func:`torchcaps.datasets.read_image` as a tensor.

    Arguments and errors are those of :func:`torchcaps.datasets.read_image`.
    """
    image = read_image(path, in_shape, preparation=preparation, invert=invert, fit=fit, name=name)
    return torch.from_numpy(image)


def predict(
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    targets: Int[Tensor, "N"] | Int[Tensor, "N P"] | None = None,
    *,
    calibration: Calibration | None = None,
    batch_size: int = 256,
) -> Prediction:
    """Classify images, and decode each from one capsule where the network has a decoder.

    Args:
        model: The network; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1; N at least 1.
        targets: The classes whose capsules are decoded instead of that of the highest score; they do not change the
            classification.
        calibration: What is usual for the network; what holds for any if None.
        batch_size: Images at a time.

    Raises:
        TypeError: Images of another dtype.
        InputError: Images of a shape the network was not built for, no image, or targets that do not fit.
    """
    given, parts, reconstructions = [], [], []
    with inference(model):
        for pixels, classes in in_batches(model, images, targets, batch_size):
            output = model(pixels, classes)
            given.append(pixels.float().cpu())
            parts.append(output.scores.float().cpu())
            if output.reconstruction is not None:
                reconstructions.append(output.reconstruction.float().cpu())
    scores = torch.cat(parts)
    decoded = torch.cat(reconstructions).numpy() if reconstructions else None
    found = classes_of(scores, model.objects).numpy()
    shown = torch.cat(given).numpy()
    return Prediction.of(shown, found, scores.numpy(), decoded, calibration, score_name=output.score_name)


def calibrate(model: Network, images: Shaped[Tensor, "N C H W"], *, batch_size: int = 256) -> Calibration:
    """Measure what is usual for a network: the bounds that 99 % of images keep to, see `Calibration`.

    Args:
        model: The network; in evaluation mode meanwhile.
        images: Images like those that it was trained on, but that it was not trained on; as for :func:`predict`.
        batch_size: Images at a time.

    Raises:
        TypeError: As for :func:`predict`.
        InputError: The same; or pixels that are NaN, or so large that their squares are infinite.
    """
    scores, off = [], []
    with inference(model):
        for pixels, _ in in_batches(model, images, None, batch_size):
            if not (pixels.float().abs() <= BRIGHTEST).all():
                raise InputError(f"what is usual is measured on pixels of 0..1, got NaN or one beyond {BRIGHTEST:g}")
            output = model(pixels)
            scores.append(output.scores.float().sort(1, descending=True).values[:, model.objects - 1].cpu())
            if output.reconstruction is not None:
                off.append(distances(pixels.float().cpu().numpy(), output.reconstruction.float().cpu().numpy()))
    return Calibration(
        score=round(float(np.quantile(torch.cat(scores).numpy(), 1 - USUAL)), 4),
        distance=round(float(np.quantile(np.concatenate(off), USUAL)), 4) if off else Calibration.distance,
        images=len(images),
    )
