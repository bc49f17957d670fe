"""What a network says about single images, from files too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from torchcaps.analysis.calibration import USUAL, Calibration, Prediction, squared_errors
from torchcaps.analysis.inference import Labels, classes_of, over_batches
from torchcaps.checks import checked
from torchcaps.datasets.images import read_image
from torchcaps.datasets.pixels import Scale, prepare_images
from torchcaps.models import ModelOutput, Network
from torchcaps.tasks import task_of


def load_image(path: str | Path, in_shape: Sequence[int], **options: Any) -> UInt8[Tensor, "C H W"]:
    """Read an image file and bring it to the shape a network takes: :func:`torchcaps.datasets.read_image` as a tensor.

    Options and errors are those of :func:`torchcaps.datasets.read_image`.
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
    """Classify images, and decode each from one capsule where the network has a decoder.

    Args:
        model: The network.
        images: N images of any form that :func:`torchcaps.fit` takes in memory: a tensor, an array, a list, or Pillow
            images, whose channels may be last; N at least 1.
        targets: The classes (or labels) whose capsules are decoded instead of those of the highest scores; they do not
            change the answers.
        calibration: What is usual for the network; what holds for any if None.
        scale: How pixels become 0..1, as for :func:`torchcaps.fit`.

    Raises:
        InputError: The images do not fit the network.
    """
    images = prepare_images(images, model.in_shape, scale)
    outputs: list[ModelOutput] = []

    def look(pixels: Tensor, classes: Tensor | None) -> list[Tensor]:
        output = model(pixels, classes)
        outputs[:] = [output]
        decoded = [] if output.reconstruction is None else [output.reconstruction.float()]
        return [pixels.float(), output.scores.float(), *decoded]

    given, scores, *decoded = over_batches(look, model, images, targets)
    classes = classes_of(scores, model.objects).numpy()
    drawn = decoded[0].numpy() if decoded else None
    task = task_of(model)
    name = task.score_name(outputs[0])
    if not task.supports("calibrate"):  # no answer is unsure by a threshold
        return Prediction(classes, scores.numpy(), drawn, [()] * len(classes), name)
    return Prediction.of(given.numpy(), classes, scores.numpy(), drawn, calibration, score_name=name)


@checked
def calibrate(model: Network, images: Shaped[Tensor, "N C H W"]) -> Calibration:
    """Measure what is usual for a network: the bounds that 99 % of images keep to, see `Calibration`.

    Args:
        model: The network.
        images: Images like those that it was trained on, but that it was not trained on; as for :func:`predict`.

    Raises:
        InputError: A bound that is no finite number, as of pixels that are NaN.
    """
    task_of(model).require("calibrate", "a calibration")

    def look(pixels: Tensor, _: object) -> list[Tensor]:
        output = model(pixels)
        last = output.scores.float().sort(1, descending=True).values[:, model.objects - 1]
        if output.reconstruction is None:
            return [last]
        off = squared_errors(pixels.float().cpu().numpy(), output.reconstruction.float().cpu().numpy())
        return [last, torch.from_numpy(off)]

    scores, *off = over_batches(look, model, images)
    return Calibration(
        score=round(float(np.quantile(scores.numpy(), 1 - USUAL)), 4),
        error=round(float(np.quantile(off[0].numpy(), USUAL)), 4) if off else None,
        images=len(images),
    )
