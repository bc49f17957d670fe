"""Predict single images, also from files, and calibrate the thresholds of unsure answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.calibration import CALIBRATED_SHARE, Calibration, Prediction, squared_errors
from torchcaps.analysis.certainty import Certainty
from torchcaps.analysis.inference import Labels, over_batches
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.datasets.images import read_image
from torchcaps.datasets.pixels import prepare_images
from torchcaps.datasets.scaling import Scale
from torchcaps.datasets.splits import group_names
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, ModelOutput, Network
from torchcaps.nn import Capsules
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


@checked
def fit_certainty(model: Network, validation: ImageSet) -> Certainty | None:
    """Measure the probabilities and sets of classes of a network's answers, see `Certainty`.

    Args:
        model: The network.
        validation: Validation images: similar to the training images, but not among them. Groups among their names
            allow sets over groups.

    Returns:
        The certainty; None for several objects in an image.

    Raises:
        InputError: The task of the network is not ``classes``.
    """
    task = task_of(model)
    task.require("calibrate", "a certainty")
    if model.objects > 1:
        return None
    (scores,) = over_batches(lambda pixels, _: [model(pixels).scores.float()], model, validation.images)
    labels, classes = validation.labels.cpu().numpy(), task.predict_classes(scores).numpy()
    groups = group_names(validation.names)
    return Certainty.fit(scores.numpy(), labels, classes, groups, are_probabilities=not model.has_capsules)


@checked
def class_poses(
    model: Network, images: Any, *, scale: Scale = "auto"
) -> tuple[Float[np.ndarray, "N J D"], Float[np.ndarray, "N J"]]:
    """Return the poses of the class capsules of images, and their lengths or activations.

    Args:
        model: A network with capsules.
        images: As for :func:`predict`.
        scale: As for :func:`predict`.

    Raises:
        InputError: The network has no class capsules, or the images do not fit it.
    """
    if model.per_pixel or not isinstance(model, CapsNet):
        raise InputError(f"a {type(model).__name__} has no class capsules, so it has no poses")

    def read(pixels: Tensor, _: object) -> list[Tensor]:
        output = model(pixels)
        assert output.capsules is not None
        capsules = Capsules(output.capsules, output.activations)
        return [capsules.poses.float(), capsules.scores(model.length_eps).float()]

    poses, lengths = over_batches(read, model, prepare_images(images, model.in_shape, scale))
    return poses.numpy(), lengths.numpy()
