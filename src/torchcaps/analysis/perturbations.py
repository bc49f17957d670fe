"""Perturb the components of a capsule one at a time and decode it, to see what each component encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.figures import MUTED, TILE, Caption, Cell, shorten, tiles
from torchcaps.analysis.inference import BATCH, as_pixels, class_labels, inference, require_decoder
from torchcaps.analysis.results import Result, Scored, Table, lower_first
from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.models.output import ScoreName
from torchcaps.ranges import Range
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CHANGE = 1_000


@dataclass(frozen=True, eq=False)
class Perturbation(Scored):
    """One capsule, decoded after a change to one of its components at a time.

    Args:
        image: The input, pixels 0..1.
        images: ``images[m, n]`` is decoded from the capsule with ``offsets[n]`` added to ``components[m]``; pixels
            0..1.
        offsets: Added values, in equal steps; the middle one of an odd number is exactly 0 if the range is symmetric.
        reconstruction: Decoded from the unchanged capsule, pixels 0..1.
        target: Class of the capsule.
        scores: All class scores before any change: lengths ‖v_j‖ of the capsules, or activations.
        components: The changed components, one at a time.
        score_name: ``"length"`` or ``"activation"``.
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
        """The score of the changed capsule, such as ``length 0.93``."""
        return f"{self.score_name} {self.scores[self.target]:.2f}"


@dataclass(frozen=True, eq=False)
class Perturbations(Result):
    """The capsules of one or several images, changed in the same way.

    Args:
        results: From :func:`perturb_capsule`: one image; or several images of one shape with the same single
            component, amplitude and steps.
        class_names: Name of each class; None: its number.
        images: Description of each image.
        whose: How the capsules were chosen, such as ``"the longest"``; empty if the user named a class.
        network: Name of the network, for the figure.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import Perturbations, perturb_capsule
        >>> from torchcaps.datasets import load_dataset
        >>> model, digits = create_model("tf-notebook"), load_dataset("digits").test
        >>> changed = {"components": [3], "amplitude": 0.5}
        >>> pairs = zip(digits.images[:5], digits.labels[:5])
        >>> results = [perturb_capsule(model, image, target=int(j), **changed) for image, j in pairs]
        >>> figure = Perturbations(results).figures()[""]
    """

    results: Sequence[Perturbation]
    class_names: Sequence[str] | None = None
    images: Sequence[str] = ()
    whose: str = ""
    network: str = "a network"

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        return class_labels(self.class_names, len(self.results[0].scores))

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "image": words,
                "class": self.names[each.target],
                "score": float(each.scores[each.target]),
                "components": list(each.components),
                "offsets": each.offsets.tolist(),
            }
            for words, each in zip(self.images, self.results, strict=True)
        ]

    def tables(self) -> list[Table]:
        part = f"component {self.results[0].components[0]} of " if len(self.results[0].components) == 1 else ""
        lines = []
        for words, each in zip(self.images, self.results, strict=True):
            name = self.names[each.target] + (f" ({self.whose})" if self.whose else "")
            lines.append(f"{words}: {part}capsule {name}, {each.score_name} {each.scores[each.target]:.3f}")
        return [Table(note=lines)]

    def figures(self) -> dict[str, Figure]:
        """Draw decoded images: a column per change, a row per component of one capsule, or per image.

        The first columns show the image and the reconstruction from its unchanged capsule. If one component was
        changed, the class of the capsule is written beside them.

        Source: Sabour, Frosst, Hinton 2017, figure 4 (arXiv:1710.09829); of several images Aurélien Géron's TensorFlow
        notebook on capsule networks, 2017.
        """
        results = self.results
        alike = {(each.components, each.images.shape, each.offsets.tobytes()) for each in results}
        if len(alike) != 1 or (len(results) > 1 and len(results[0].components) != 1):
            raise InputError(
                "the rows must be images of one shape of which the same one component was changed by the same amounts, "
                f"got components {', '.join(str(each.components) for each in results) or 'of no image'}"
            )
        first = results[0]
        names = self.names
        rows: list[list[Cell]] = [[Caption("image", MUTED), Caption("reconstruction", MUTED)]]
        if len(first.components) > 1:
            title = f"Components of the capsule “{names[first.target]}”, {first.score}, changed one at a time"
            pairs = zip(first.components, first.images, strict=True)
            rows += [[None, None, f"component {component}", *images] for component, images in pairs]
            rows[1][:2] = first.image, first.reconstruction
        else:
            one = all(each.target == first.target for each in results)
            whose = (
                f"{self.whose} capsule"
                if self.whose
                else f"the capsule “{names[first.target]}”"
                if one
                else "a capsule of each image"
            )
            title = f"Component {first.components[0]} of {whose}"
            for each in results:
                capsule = Caption(shorten(f"capsule {names[each.target]}", 2 * TILE))
                rows.append([each.image, each.reconstruction, [capsule, Caption(each.score, MUTED)], *each.images[0]])
        signed = [f"{offset:+.4g}".replace("-", "−") if offset else "0" for offset in first.offsets]
        added = [Caption(text, bold=text == "0") for text in signed]
        alone = f": {lower_first(self.images[0])}" if len(results) == 1 and self.images else ""
        subtitle = self.network + alone
        return {"": tiles([*rows, [None, None, Caption("added", MUTED), *added]], title=title, subtitle=subtitle)}


@checked
def perturb_capsule(
    model: Network,
    image: Shaped[Tensor, "C H W"],
    *,
    target: int | None = None,
    components: Sequence[int] = (),
    amplitude: float | tuple[float, float] = 0.25,
    steps: Annotated[int, Range(2, 500, whole=True)] = 11,
) -> Perturbation:
    """Add −amplitude … amplitude to each component of a class capsule of an image, and decode.

    Args:
        model: A network with a decoder.
        image: uint8 of 0..255 or floating-point of 0..1.
        target: Class of the capsule to change, such as the label; None: the class with the highest score.
        components: Components to change, one at a time, from 0 to D−1; empty: all.
        amplitude: Largest change in either direction, above 0; or the lowest and the highest change, such as
            (-0.5, 1.0). At most 1,000; capsules are shorter than 1.
        steps: Number of values of each component.

    Source: Sabour, Frosst, Hinton 2017, section 5.1 and figure 4 (arXiv:1710.09829): −0.25 … 0.25 by 0.05.
    """
    network = require_decoder(model, "a perturbed capsule", "perturb")
    if target is not None:
        Range(0, network.num_classes - 1, whole=True).check("target", target)
    dim = network.class_capsules.out_dim
    changed = tuple(components or range(dim))
    for component in changed:
        Range(0, dim - 1, whole=True).check("components", component)
    offsets = _offsets(amplitude, steps)
    with inference(network):
        pixels = as_pixels(network, image[None])
        output = network(pixels)
        assert output.capsules is not None
        predicted = task_of(network).predict_classes(output.scores)
        chosen = int(predicted.flatten()[0]) if target is None else target
        # row (m, n) has offset n added to the m-th of the components; the last row is the unchanged capsule
        changes = np.append(np.kron(np.eye(dim)[list(changed)], offsets[:, None]), np.zeros((1, dim)), 0)
        decoded = []
        for some in torch.from_numpy(changes).split(BATCH):
            capsules = pixels.new_zeros(len(some), network.num_classes, dim)  # the other classes' are zero
            capsules[:, chosen] = output.capsules[0, chosen] + some.to(output.capsules)
            decoded.append(network.decode(capsules).float().cpu())
    *images, reconstruction = torch.cat(decoded).split([steps] * len(changed) + [1])
    return Perturbation(
        image=pixels[0].float().cpu().numpy(),
        images=torch.stack(images).numpy(),
        offsets=offsets,
        reconstruction=reconstruction[0].numpy(),
        target=chosen,
        scores=output.scores[0].float().cpu().numpy(),
        components=changed,
        score_name=task_of(network).score_name or output.score_name,
    )


@checked
def visibility(model: Network, images: Shaped[Tensor, "N C H W"], *, amplitude: float = 0.25) -> float:
    """Measure how much a pose changes the decoded image: 0 if the decoder ignores it, at most 1.

    The mean, over the images and all components of their longest (or most active) capsules, of the largest change of
    a pixel (0..1) between the component with −amplitude and with +amplitude added.

    Args:
        model: A network with a decoder.
        images: uint8 of 0..255 or floating-point of 0..1; ten test images are enough to compare networks.
        amplitude: Value added to a component in either direction, above 0 and at most 1,000.
    """
    ends = [perturb_capsule(model, image, amplitude=amplitude, steps=2).images for image in images]
    if not ends:
        raise InputError("visibility is a mean over images; give at least one image")
    return float(np.mean([np.ptp(each, axis=1).max((1, 2, 3)) for each in ends]))


def _offsets(amplitude: float | tuple[float, float], steps: int) -> Float[np.ndarray, "steps"]:
    """Return the values added to a component: from the lowest to the highest change in equal steps."""
    low, high = amplitude if isinstance(amplitude, tuple) else (-amplitude, amplitude)
    if not -MAX_CHANGE <= low < high <= MAX_CHANGE:
        bounds = f"above 0, or a lower and a higher change, at most {MAX_CHANGE:,} either way"
        raise InputError(f"amplitude must be {bounds}, got {amplitude}")
    middle, half = (low + high) / 2, (high - low) / 2
    offsets = middle + half * np.arange(1 - steps, steps, 2) / (steps - 1)
    return np.where(np.abs(offsets) < 1e-12 * half, 0.0, offsets)  # zero, where a step ends there but for rounding
