"""What the components of a capsule encode: each is changed a little and the capsule decoded again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.figures import GAP, LINE, MARGIN, MUTED, TITLE, Sheet, drawable, text_width, tile_size
from torchcaps.analysis.inference import as_pixels, class_labels, inference, require_decoder
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Perturbation:
    """One capsule, decoded after a change to one of its components at a time.

    Args:
        image: The input, pixels 0..1.
        images: ``images[d, n]`` is decoded from the capsule with ``offsets[n]`` added to component d; pixels 0..1.
        offsets: What is added, from −amplitude to amplitude in equal steps; exactly zero in the middle of an odd
            number of them.
        reconstruction: Decoded from the capsule as it is.
        target: The class whose capsule it is.
        lengths: All lengths ‖v_j‖ before any change.
    """

    image: Float[np.ndarray, "C H W"]
    images: Float[np.ndarray, "D steps C H W"]
    offsets: Float[np.ndarray, "steps"]
    reconstruction: Float[np.ndarray, "C H W"]
    target: int
    lengths: Float[np.ndarray, "J"]


def perturb_capsule(
    model: Model,
    image: Shaped[Tensor, "C H W"],
    *,
    target: int | None = None,
    amplitude: float = 0.25,
    steps: int = 11,
    batch_size: int = 256,
) -> Perturbation:
    """Add −amplitude … amplitude to each component of a class capsule of an image, and decode.

    Args:
        model: A network with a decoder; in evaluation mode meanwhile, and afterwards as it was.
        image: uint8 of 0..255 or floating-point of 0..1.
        target: The class whose capsule is changed; the longest one's if None.
        amplitude: Largest change of a component, above 0; capsules are shorter than 1.
        steps: How many values each component takes, at least 2.
        batch_size: Capsules decoded at a time.

    Raises:
        TypeError: An image of another dtype.
        InputError: A network without decoder, an image it was not built for, or an option out of its range.

    Source: Sabour, Frosst, Hinton 2017, section 5.1 and figure 4 (arXiv:1710.09829): −0.25 … 0.25 by 0.05.
    """
    network = require_decoder(model, "a perturbed capsule")
    if target is not None and not 0 <= target < network.num_classes:
        raise InputError(f"target must be a class from 0 to {network.num_classes - 1}, got {target}")
    if not (math.isfinite(amplitude) and amplitude > 0):
        raise InputError(f"amplitude must be above 0, got {amplitude}")
    if steps < 2:
        raise InputError(f"steps must be at least 2, got {steps}")
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    offsets = amplitude * np.arange(1 - steps, steps, 2) / (steps - 1)

    with inference(network):
        pixels = as_pixels(network, image[None])
        output = network(pixels)
        chosen = int(output.lengths.argmax()) if target is None else target
        capsule = output.capsules[0, chosen]  # (D)
        # row (d, n) has offset n added to component d; the last row is the capsule as it is
        changes = np.kron(np.eye(len(capsule)), offsets[:, None])
        poses = capsule + torch.from_numpy(np.append(changes, np.zeros((1, len(capsule))), 0)).to(capsule)
        decoded = torch.cat([_decode(network, chosen, part) for part in poses.split(batch_size)])
    return Perturbation(
        image=pixels[0].float().cpu().numpy(),
        images=decoded[:-1].unflatten(0, (-1, steps)).numpy(),
        offsets=offsets,
        reconstruction=decoded[-1].numpy(),
        target=chosen,
        lengths=output.lengths[0].float().cpu().numpy(),
    )


def figure_perturbation(
    result: Perturbation, class_names: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Decoded images: a row for each component of the capsule, a column for each change; the input beside them.

    Args:
        result: From :func:`perturb_capsule`.
        class_names: The name of each class; its number if None.
        title: Above the figure; by default it says whose capsule is changed.
    """
    names = drawable(class_labels(class_names, len(result.lengths)))
    components, steps, _, height, width = result.images.shape
    tile = tile_size(height, width)
    pitch = (tile[0] + GAP, tile[1] + GAP)
    offsets = _signed(result.offsets)
    title = title or f"Components of the capsule “{names[result.target]}”, changed one at a time"
    beside = max(tile[0], text_width(["reconstruction"]))  # the column of the input
    left = MARGIN + beside + 2 * MARGIN + text_width([str(components - 1)]) + LINE + GAP
    top = MARGIN + 0.35
    bottom = top + components * pitch[1]
    right = max(left + steps * pitch[0] - GAP, MARGIN + text_width([title], TITLE))
    sheet = Sheet(right + MARGIN, max(bottom + 2 * LINE + GAP, top + 2 * (tile[1] + 3 * LINE)) + MARGIN)
    sheet.text(title, MARGIN, MARGIN, size=TITLE)

    centre = MARGIN + beside / 2
    words = [["image"], ["reconstruction", f"length {result.lengths[result.target]:.2f}"]]
    y = top
    for image, lines in zip((result.image, result.reconstruction), words, strict=True):
        sheet.image(image, centre - tile[0] / 2, y, tile)
        for n, line in enumerate(lines):
            sheet.text(line, centre, y + tile[1] + GAP / 2 + n * LINE, ha="center", color=MUTED)
        y += tile[1] + GAP + 2 * LINE

    for d in range(components):
        y = top + d * pitch[1]
        sheet.text(str(d), left - GAP, y + tile[1] / 2, ha="right", va="center")
        for n in range(steps):
            sheet.image(result.images[d, n], left + n * pitch[0], y, tile)
    sheet.text(
        "component", left - GAP - text_width([str(components - 1)]) - LINE / 2, (top + bottom) / 2,
        rotation=90, ha="center", va="center", color=MUTED,
    )  # fmt: skip
    for n, offset in enumerate(offsets):
        weight = "bold" if result.offsets[n] == 0 else "normal"
        sheet.text(offset, left + n * pitch[0] + tile[0] / 2, bottom, ha="center", weight=weight)
    sheet.text("added to the component", left + (steps * pitch[0] - GAP) / 2, bottom + LINE, ha="center", color=MUTED)
    return sheet.figure


def _decode(network: CapsNet, target: int, poses: Float[Tensor, "n D"]) -> Float[Tensor, "n C H W"]:
    """Images decoded from one class's capsules, the other classes' being zero."""
    capsules = poses.new_zeros(len(poses), network.num_classes, poses.shape[1])
    capsules[:, target] = poses
    return network.decode(capsules).float().cpu()


def _signed(offsets: Float[np.ndarray, "steps"]) -> list[str]:
    """Offsets with their signs and as few decimals, up to four, as tell them exactly."""
    decimals = next(n for n in range(5) if n == 4 or np.allclose(offsets, offsets.round(n), rtol=0, atol=1e-9))
    return [f"{offset:+.{decimals}f}".replace("-", "−") if offset else "0" for offset in offsets]
