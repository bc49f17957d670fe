"""What the components of a capsule encode: each is changed a little and the capsule decoded again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.figures import MUTED, TILE, Caption, Cell, shorten, tiles
from torchcaps.analysis.inference import (
    as_pixels,
    check_images,
    class_labels,
    inference,
    require_decoder,
)
from torchcaps.analysis.results import Scored, Table
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Network
from torchcaps.models.output import ScoreName
from torchcaps.ranges import COUNT, Range, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_CHANGE = 1_000
#: In errors: the argument, and what it is, as the command line calls it otherwise.
CHANGE = "amplitude, the largest change of a component,"
STEPS = Range(2, 500, whole=True)
MOST_ROWS, MOST_DRAWN = 500, 5_000
"""Rows, and images, in one figure: more would make it larger than the 65,535 pixels that viewers take, or take
hundreds of megabytes."""


@dataclass(frozen=True, eq=False)
class Perturbations:
    """The capsules of one or several images, changed in the same way.

    Args:
        results: From :func:`perturb_capsule`.
        class_names: The name of each class.
        images: What each image is, in words.
        whose: Whose capsules they are, in words, such as ``"the longest"``; empty where one class was named.
        component: The component that is changed, in each image; None for all components of one image.
    """

    results: Sequence[Perturbation]
    class_names: Sequence[str]
    images: Sequence[str]
    whose: str = ""
    component: int | None = None

    def to_dict(self) -> list[dict[str, Any]]:
        """The capsule of each image, and what was added to its components."""
        return [
            {
                "image": words,
                "class": self.class_names[each.target],
                "score": float(each.scores[each.target]),
                "components": list(each.components),
                "offsets": each.offsets.tolist(),
            }
            for words, each in zip(self.images, self.results, strict=True)
        ]

    def tables(self) -> list[Table]:
        """Whose capsule was changed, a line for each image."""
        lines = []
        for words, each in zip(self.images, self.results, strict=True):
            part = "" if self.component is None else f"component {self.component} of "
            name = self.class_names[each.target] + (f" ({self.whose})" if self.whose else "")
            lines.append(f"{words}: {part}capsule {name}, {each.score_name} {each.scores[each.target]:.3f}")
        return [Table((), note=lines)]

    def figures(self) -> dict[str, Figure]:
        """See :func:`figure_perturbation` and :func:`figure_component`."""
        if self.component is None:
            return {"": figure_perturbation(self.results[0], self.class_names)}
        title = f"Component {self.component} of {self.whose} capsule" if self.whose else None
        return {"": figure_component(self.results, self.class_names, title=title)}


@dataclass(frozen=True, eq=False)
class Perturbation(Scored):
    """One capsule, decoded after a change to one of its components at a time.

    Args:
        image: The input, pixels 0..1.
        images: ``images[m, n]`` is decoded from the capsule with ``offsets[n]`` added to ``components[m]``; pixels
            0..1.
        offsets: What is added, in equal steps; exactly zero in the middle of an odd number of −amplitude … amplitude.
        reconstruction: Decoded from the capsule as it is.
        target: The class whose capsule it is.
        scores: All class scores before any change: the lengths ‖v_j‖ of the capsules, or their activations.
        components: Which components are changed, each by itself.
        score_name: What the scores are.
    """

    image: Float[np.ndarray, "C H W"]
    images: Float[np.ndarray, "M steps C H W"]
    offsets: Float[np.ndarray, "steps"]
    reconstruction: Float[np.ndarray, "C H W"]
    target: int
    scores: Float[np.ndarray, "J"]
    components: tuple[int, ...]
    score_name: ScoreName = "length"

    @property
    def score(self) -> str:
        """The score of the capsule that is changed, in words: ``length 0.93``."""
        return f"{self.score_name} {self.scores[self.target]:.2f}"


def perturb_capsule(
    model: Network,
    image: Shaped[Tensor, "C H W"],
    *,
    target: int | None = None,
    components: Sequence[int] | None = None,
    amplitude: float | tuple[float, float] = 0.25,
    steps: int = 11,
    batch_size: int = 256,
) -> Perturbation:
    """Add −amplitude … amplitude to each component of a class capsule of an image, and decode.

    Args:
        model: A network with a decoder; in evaluation mode meanwhile, and afterwards as it was.
        image: uint8 of 0..255 or floating-point of 0..1.
        target: The class whose capsule is changed, such as the image's label; that of the highest score if None.
        components: Which components are changed, each by itself, from 0 to D−1; all of them if None.
        amplitude: Largest change of a component either way, above 0; or the lowest and the highest change, such as
            (-0.5, 1.0). At most 1,000; capsules are shorter than 1.
        steps: How many values each component takes, 2 to 500.
        batch_size: Capsules decoded at a time.

    Raises:
        TypeError: An image of another dtype.
        InputError: A network without decoder, an image it was not built for, or an option out of its range.

    Source: Sabour, Frosst, Hinton 2017, section 5.1 and figure 4 (arXiv:1710.09829): −0.25 … 0.25 by 0.05.
    """
    network = require_decoder(model, "a perturbed capsule")
    check_images(image)
    if target is not None and target not in Range(0, network.num_classes - 1, whole=True):
        raise InputError(f"target must be a class from 0 to {network.num_classes - 1}, got {target}")
    dim = network.class_capsules.out_dim
    changed = tuple(range(dim) if components is None else components)
    if not changed or not all(d in Range(0, dim - 1, whole=True) for d in changed):
        got = ", ".join(map(str, changed)) or "none"
        raise InputError(f"components must be from 0 to {dim - 1}, those of a class capsule, got {got}")
    COUNT.check("batch_size", batch_size)
    offsets = _offsets(amplitude, steps)

    with inference(network):
        pixels = as_pixels(network, image[None])
        output = network(pixels)
        chosen = int(output.scores.argmax()) if target is None else target
        capsule = output.capsules[0, chosen]  # (D)
        # row (m, n) has offset n added to the m-th of the components; the last row is the capsule as it is
        changes = np.kron(np.eye(dim)[list(changed)], offsets[:, None])
        poses = capsule + torch.from_numpy(np.append(changes, np.zeros((1, dim)), 0)).to(capsule)
        decoded = torch.cat([_decode(network, chosen, part) for part in poses.split(batch_size)])
    return Perturbation(
        image=pixels[0].float().cpu().numpy(),
        images=decoded[:-1].unflatten(0, (-1, steps)).numpy(),
        offsets=offsets,
        reconstruction=decoded[-1].numpy(),
        target=chosen,
        scores=output.scores[0].float().cpu().numpy(),
        components=changed,
        score_name=output.score_name,
    )


def figure_perturbation(
    result: Perturbation, class_names: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Decoded images: a row for each component of the capsule, a column for each change; the input beside them.

    Args:
        result: From :func:`perturb_capsule`.
        class_names: The name of each class; its number if None.
        title: Above the figure; by default it says whose capsule is changed.

    Raises:
        InputError: Not one name for each class, or more images than one figure holds (5,000, in 500 rows).
    """
    names = class_labels(class_names, len(result.scores))
    beside: list[Cell] = [result.image, Caption("image", MUTED), result.reconstruction]
    beside.append([Caption("reconstruction", MUTED), Caption(result.score, MUTED)])
    rows: list[list[Cell]] = [[None, None, Caption("component", MUTED)]]
    for own, d, images in itertools.zip_longest(beside, result.components, result.images):
        rows.append([own, None] if images is None else [own, None, str(d), *images])
    title = title or f"Components of the capsule “{names[result.target]}”, changed one at a time"
    return _draw_changes(rows, result.offsets, 3, title)


def figure_component(
    results: Sequence[Perturbation], class_names: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """One component of a capsule of each of several images: a row for each image, a column for each change.

    Beside them stand the image, what is decoded from its capsule as it is, and whose capsule that is.

    Args:
        results: From :func:`perturb_capsule` with ``components=[d]``, the same d and amplitude for all images.
        class_names: The name of each class; its number if None.
        title: Above the figure; by default it says which component of whose capsule is changed.

    Raises:
        InputError: No image, more or other components than one, different changes, or as for
            :func:`figure_perturbation`.

    Example:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import figure_component, perturb_capsule
        >>> from torchcaps.datasets import load_dataset
        >>> model, digits = create_model("tf-notebook"), load_dataset("digits").test
        >>> changed = {"components": [3], "amplitude": 0.5}
        >>> pairs = zip(digits.images[:5], digits.labels[:5])
        >>> figure = figure_component([perturb_capsule(model, image, target=int(j), **changed) for image, j in pairs])

    Source: the figure of Aurélien Géron's TensorFlow notebook on capsule networks, 2017.
    """
    if not results:
        raise InputError("there must be at least one image whose capsule was changed, got none")
    first = results[0]
    for result in results:
        if len(result.components) != 1 or result.components != first.components:
            raise InputError(
                "a row must be an image of which one component was changed, the same of all images, got "
                f"components {first.components} and {result.components}"
            )
        if not np.array_equal(result.offsets, first.offsets) or result.image.shape != first.image.shape:
            raise InputError("all images must have the same shape, changed by the same amplitude and number of steps")
    names = class_labels(class_names, len(first.scores))
    (component,) = first.components
    one = all(result.target == first.target for result in results)
    whose = f"of the capsule “{names[first.target]}”" if one else "of a capsule of each image"
    title = title or f"Component {component} {whose}"
    rows: list[list[Cell]] = [[Caption("image", MUTED), Caption("reconstruction", MUTED)]]
    for each in results:
        capsule = Caption(shorten(f"capsule {names[each.target]}", 2 * TILE))
        rows.append([each.image, each.reconstruction, [capsule, Caption(each.score, MUTED)], *each.images[0]])
    return _draw_changes(rows, first.offsets, 3, title)


def _draw_changes(rows: list[list[Cell]], offsets: Float[np.ndarray, "steps"], before: int, title: str) -> Figure:
    """Draw rows of decoded images, and under their columns, after ``before`` others, what was added."""
    if len(rows) - 1 > MOST_ROWS or (len(rows) - 1) * len(offsets) > MOST_DRAWN:
        raise InputError(
            f"at most {MOST_DRAWN:,} images in {MOST_ROWS} rows are drawn in one figure, got {len(rows) - 1:,} rows of "
            f"{len(offsets):,}"
        )
    words = [Caption(text, bold=text == "0") for text in _signed(offsets)]
    return tiles([*rows, [*[None] * (before - 1), Caption("added", MUTED), *words]], title=title)


def _offsets(amplitude: float | tuple[float, float], steps: int) -> Float[np.ndarray, "steps"]:
    """What is added to a component: from the lowest to the highest change in equal steps."""
    ends = amplitude if isinstance(amplitude, tuple) else (amplitude,)
    STEPS.check("steps", steps)
    if len(ends) not in (1, 2) or not all(map(is_number, ends)):
        raise InputError(f"{CHANGE} must be one number or two, got {amplitude}")
    low, high = ends if len(ends) == 2 else (-ends[0], ends[0])
    if not low < high:
        raise InputError(f"{CHANGE} must be above 0, or a lower and a higher change, got {amplitude}")
    if max(-low, high) > LARGEST_CHANGE:
        raise InputError(
            f"{CHANGE} must be at most {LARGEST_CHANGE:,}, as capsules are shorter than 1, got {amplitude}"
        )
    middle, half = (low + high) / 2, (high - low) / 2
    offsets = middle + half * np.arange(1 - steps, steps, 2) / (steps - 1)
    return np.where(np.abs(offsets) < 1e-12 * half, 0.0, offsets)  # zero, where a step ends there but for rounding


def _decode(network: CapsNet, target: int, poses: Float[Tensor, "n D"]) -> Float[Tensor, "n C H W"]:
    """Images decoded from one class's capsules, the other classes' being zero."""
    capsules = poses.new_zeros(len(poses), network.num_classes, poses.shape[1])
    capsules[:, target] = poses
    return network.decode(capsules).float().cpu()


def _signed(offsets: Float[np.ndarray, "steps"]) -> list[str]:
    """Offsets with their signs and as few decimals, up to four, as tell them exactly."""
    decimals = next(n for n in range(5) if n == 4 or np.allclose(offsets, offsets.round(n), rtol=0, atol=1e-9))
    return [f"{offset:+.{decimals}f}".replace("-", "−") if offset else "0" for offset in offsets]
