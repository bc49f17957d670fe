"""What the decoder makes of the capsules: images beside their reconstructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.figures import MUTED, WRONG, Caption, draw_tiles
from torchcaps.analysis.inference import as_pixels, class_labels, require_decoder
from torchcaps.analysis.predictions import predict
from torchcaps.errors import InputError
from torchcaps.models import Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Reconstructions:
    """Images, and what the decoder makes of one of their capsules.

    Args:
        images: Pixels 0..1.
        reconstructions: Pixels 0..1.
        labels: The images' classes, where known.
        classes: The class of the longest capsule.
        lengths: All lengths ‖v_j‖.
        decoded: The class whose capsule was decoded.
    """

    images: Float[np.ndarray, "N C H W"]
    reconstructions: Float[np.ndarray, "N C H W"]
    labels: Int[np.ndarray, "N"] | None
    classes: Int[np.ndarray, "N"]
    lengths: Float[np.ndarray, "N J"]
    decoded: Int[np.ndarray, "N"]

    @property
    def squared_error(self) -> Float[np.ndarray, "N"]:
        """Squared error of each reconstruction, summed over its pixels."""
        return np.square(self.reconstructions - self.images).reshape(len(self.images), -1).sum(1)


def reconstruct(
    model: Model,
    images: Shaped[Tensor, "N C H W"],
    labels: Int[Tensor, "N"] | None = None,
    *,
    capsule: Literal["source", "longest", "label"] = "source",
    batch_size: int = 256,
) -> Reconstructions:
    """Decode images from one capsule each.

    Args:
        model: A network with a decoder; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: The images' classes, where known.
        capsule: Which capsule is decoded: ``"longest"``, ``"label"``, or as the network's ``"source"`` does at
            inference (the label's where ``decoder_mask`` is ``"label"`` and labels are given, else the longest).
        batch_size: Images at a time.

    Raises:
        TypeError: Images or labels of another dtype.
        InputError: A network without decoder, images or labels that do not fit it, ``capsule="label"`` without
            labels, or an unknown ``capsule``.

    Source: Sabour, Frosst, Hinton 2017, figure 3 (arXiv:1710.09829).
    """
    network = require_decoder(model, "a reconstruction")
    if capsule not in ("source", "longest", "label"):
        raise InputError(f'capsule must be "source", "longest" or "label", got {capsule!r}')
    if capsule == "label" and labels is None:
        raise InputError('capsule="label" needs the labels of the images, got none')
    source = labels if network.config.decoder_mask == "label" else None
    targets = {"source": source, "longest": None, "label": labels}[capsule]
    predictions = predict(network, images, targets, batch_size=batch_size)
    assert predictions.reconstructions is not None  # there is a decoder
    return Reconstructions(
        images=as_pixels(network, images).float().cpu().numpy(),
        reconstructions=predictions.reconstructions,
        labels=None if labels is None else labels.cpu().numpy(),
        classes=predictions.classes,
        lengths=predictions.lengths,
        decoded=predictions.classes if targets is None else targets.cpu().numpy(),
    )


def figure_reconstructions(
    result: Reconstructions, class_names: Sequence[str] | None = None, *, columns: int = 10, title: str | None = None
) -> Figure:
    """Images over their reconstructions; under each its label, the class it was given and that capsule's length.

    Args:
        result: From :func:`reconstruct`.
        class_names: The name of each class; its number if None.
        columns: Images side by side; the others go below.
        title: Above the figure.

    Returns:
        A figure; a class that is not the label is red.
    """
    names = class_labels(class_names, result.lengths.shape[1])
    lines = {
        "class": [
            Caption(names[j], WRONG if result.labels is not None and j != result.labels[n] else None)
            for n, j in enumerate(result.classes)
        ],
        "length": [Caption(f"{length:.2f}", MUTED) for length in result.lengths.max(1)],
    }
    if result.labels is not None:
        lines = {"label": [Caption(names[j]) for j in result.labels], **lines}
    if (result.decoded != result.classes).any():
        lines["decoded"] = [Caption(names[j], MUTED) for j in result.decoded]
    return draw_tiles({"image": result.images, "reconstruction": result.reconstructions}, lines, columns, title)
