"""Predict single images, also from files, and calibrate the thresholds of unsure answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from torchcaps.analysis.calibration import CALIBRATED_SHARE, Calibration, Prediction, squared_errors
from torchcaps.analysis.inference import Labels, over_batches
from torchcaps.checks import checked
from torchcaps.datasets.images import read_image
from torchcaps.datasets.pixels import prepare_images
from torchcaps.datasets.scaling import Scale
from torchcaps.models import ModelOutput, Network
from torchcaps.tasks import task_of


def load_image(path: str | Path, in_shape: Sequence[int], **options: Any) -> Shaped[Tensor, "C H W"]:
    """Read an image file and bring it to the input shape of a network.

    Calls :func:`torchcaps.datasets.read_image` with the same options and errors, and returns a tensor.
    """
    return torch.from_numpy(read_image(path, in_shape, **options))


@checked
def predict(
    model: Network,
    images: Any,
    targets: Labels | None = None,
    *,
    calibration: Calibration | None = None,
    scale: Scale = "auto",
) -> Prediction:
    """Classify images, and reconstruct each from one capsule if the network has a decoder.

    For a network for pixels the classes are masks (N, *S). Its images may have any size; if they are larger than the
    network's input, the scores are computed in windows, and there are no reconstructions.

    Args:
        model: The network.
        images: N images (at least 1) in any form that :func:`torchcaps.fit` takes in memory: a tensor, an array, a
            list, or Pillow images. Channels may be last.
        targets: Classes (or labels) whose capsules are decoded, instead of the classes with the highest scores. They do
            not change the answers.
        calibration: Thresholds of unsure answers; None: the defaults of :class:`Calibration`.
        scale: Conversion of pixels to 0..1, as for :func:`torchcaps.fit`.

    Raises:
        InputError: The images do not fit the network.
    """
    task = task_of(model)
    images = prepare_images(images, model.in_shape, scale, any_size=model.per_pixel)
    outputs: list[ModelOutput] = []

    def look(pixels: Tensor, classes: Tensor | None) -> list[Tensor]:
        output = task.infer(model, pixels, classes)
        outputs[:] = [output]
        decoded = [] if output.reconstruction is None else [output.reconstruction.float()]
        return [pixels.float(), output.scores.float(), *decoded]

    pixels, scores, *decoded = over_batches(look, model, images, targets)
    classes = task.predict_classes(scores).numpy()
    drawn = decoded[0].numpy() if decoded else None
    name = task.score_name or outputs[0].score_name
    return Prediction.of(pixels.numpy(), classes, scores.numpy(), drawn, calibration, name, task)


@checked
def calibrate(model: Network, images: Shaped[Tensor, "N C H W"]) -> Calibration:
    """Measure the thresholds of a network that 99 % of the images pass, see `Calibration`.

    Args:
        model: The network.
        images: Validation images: similar to the training images, but not among them; in a form of :func:`predict`.

    Raises:
        InputError: A threshold is not finite, for example because of NaN in the pixels.
    """
    task = task_of(model)
    task.require("calibrate", "a calibration")

    def look(pixels: Tensor, _: object) -> list[Tensor]:
        output = model(pixels)
        scores = output.scores.float()
        predicted = task.predict_classes(scores).view(len(scores), -1)  # the last of several has the lowest score
        lowest = scores.take_along_dim(predicted[:, -1:], 1)[:, 0]
        if output.reconstruction is None:
            return [lowest]
        errors = squared_errors(pixels.float().cpu().numpy(), output.reconstruction.float().cpu().numpy())
        return [lowest, torch.from_numpy(errors)]

    scores, *errors = over_batches(look, model, images)
    return Calibration(
        score=round(float(np.quantile(scores.numpy(), 1 - CALIBRATED_SHARE)), 4),
        error=round(float(np.quantile(errors[0].numpy(), CALIBRATED_SHARE)), 4) if errors else None,
        images=len(images),
    )
