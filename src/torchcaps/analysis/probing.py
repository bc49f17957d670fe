"""Linear probes: how well a pose encodes rotation, scale and other known factors of an image.

A ridge regression is fitted on some images and evaluated by R² on others. The factors come with the images, such as the
azimuth and elevation of ``smallnorb``, or images are changed here by known amounts: rotation, scale, shear and shifts.
R² is relative, so there are two baselines: the same regression from the pixels, and regressions on shuffled factors,
whose R² must not exceed 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchcaps.analysis.figures import COLOURS, draw_legend, find_axes, style_axes
from torchcaps.analysis.inference import over_batches, require_one_object, require_pixels, to_pixels
from torchcaps.analysis.results import Comparison, Result, Styled, Table
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.datasets.rng import generator
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.ranges import Fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ANGLES = ("azimuth", "elevation", "rotation")
"""Factors in degrees. Sine and cosine are regressed, because 350° is close to 10°."""
ROTATION, SCALE, SHEAR, SHIFT = 20.0, 0.2, 0.2, 1 / 14
"""Largest changes that :func:`with_affine_factors` makes in either direction: degrees; fraction of the size; pixels to
the right per pixel down; fraction of height and width."""

_PENALTIES = tuple(10.0**power for power in range(-2, 6))
_MIN_IMAGES = 10  # images of a class to fit on
_CHUNK = 512  # images changed at a time
_COMPONENTS = 16  # principal components, as many as a pose has numbers


@dataclass(frozen=True)
class Probe(Result):
    """R² of each factor, regressed from one set of numbers.

    Args:
        numbers: ``"pose"``, ``"features"``, ``"principal components"`` of the features, or ``"pixels"``.
        width: Numbers per image.
        r2: R² of each factor on held-out images, at most 1; predicting the mean gives 0.
        shuffled: R² of each factor after regressions on shuffled factors.
    """

    numbers: str
    width: int
    r2: Mapping[str, float]
    shuffled: Mapping[str, float]


class Probing(Comparison):
    """The probes of several networks beside each other, as :func:`probe` gives them."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"probes": [each.to_dict() for each in probes]} for probes in self.networks.values()]

    def tables(self) -> list[Table]:
        tables = []
        for (name, probes), where in zip(self.networks.items(), self.images.values(), strict=True):
            rows: list[list[str | Styled]] = []
            for each in probes:
                rows.append([each.numbers, str(each.width), *(f"{value:z.3f}" for value in each.r2.values())])
                shuffled = ("  shuffled", "", *(f"{value:z.3f}" for value in each.shuffled.values()))
                rows.append([Styled(cell, "dim") for cell in shuffled])
            tables.append(Table(rows, ("R²", "numbers", *probes[0].r2), f"{name}: fitted and evaluated on {where}"))
        return tables

    def figures(self, *, ax: Axes | None = None) -> dict[str, Figure]:
        """Draw R² of each factor as bars, a colour per network and set of numbers; R² below 0 is drawn as 0.

        If several networks were evaluated on the same images, their pixels are drawn once.

        Args:
            ax: Axes to draw into; None: a new figure.
        """
        shown: dict[str, Probe] = {}
        for name, probes in self.networks.items():
            for each in probes:
                label = f"{each.numbers} ({each.width})"
                if each.numbers != "pixels" or shown.get(label, each) != each:
                    label = f"{name}: {label}"
                shown[label] = each
        names = list(dict.fromkeys(factor for each in shown.values() for factor in each.r2))
        figure, axes = find_axes(ax, 1.3 * len(names) + 1.5, 3.4, self.title)
        style_axes(axes, "Linear probes", "", "R² on held-out images")
        width = 0.8 / len(shown)
        for n, ((name, each), colour) in enumerate(zip(shown.items(), itertools.cycle(COLOURS), strict=False)):
            places = np.array([names.index(factor) for factor in each.r2]) + (n - (len(shown) - 1) / 2) * width
            axes.bar(places, np.maximum(list(each.r2.values()), 0), width, color=colour, label=name)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(0, 1)
        draw_legend(figure, columns=2, ax=ax)
        return {"": figure}


@checked
def with_affine_factors(image_set: ImageSet, *, seed: int = 0, fill: Fill = "zeros") -> ImageSet:
    """Change each image by a random affine map, and keep the changes as factors.

    Changes are drawn uniformly: ``"scale"`` in 0.8..1.2, ``"shear"`` in ±0.2 pixels to the right per pixel down,
    ``"rotation"`` in ±20 degrees (counter-clockwise), ``"shift right"`` and ``"shift down"`` up to a 14th of width and
    height (pixels). The factors do not include the slant and size of the original drawing.

    Args:
        image_set: Images to change.
        seed: Random seed, 0 to 2³² − 1.
        fill: Pixels that enter from outside, as in the training of the network: ``"zeros"``, or the nearest pixel of
            the ``"edge"``.

    Raises:
        InputError: The images have a single row or column, such as sequences.
    """
    if 1 in image_set.in_shape[1:]:
        raise InputError("rotation, scale and shifts need images of several rows and columns, got a single one")
    numbers = torch.from_numpy(2 * generator(seed).random_sample((len(image_set), 5)) - 1)
    height, width = image_set.in_shape[1:]
    ranges = torch.tensor([ROTATION, SCALE, SHEAR, SHIFT * width, SHIFT * height], dtype=torch.float64)
    rotation, scaling, shear, *shift = (numbers * ranges).unbind(1)
    maps = inverse_maps(linear_maps(rotation, 1 + scaling[:, None].expand(-1, 2), shear), torch.stack(shift, 1))
    chunks = zip(image_set.images.split(_CHUNK), maps.split(_CHUNK), strict=True)
    changed = (warp(some, places, (height, width), fill) for some, places in chunks)
    images = torch.cat(
        [each.round_().to(torch.uint8) if image_set.images.dtype == torch.uint8 else each.float() for each in changed]
    )
    names = ("rotation", "scale", "shear", "shift right", "shift down")
    factors = dict(zip(names, (rotation, 1 + scaling, shear, *shift), strict=True))
    return ImageSet(images, image_set.labels, factors=factors)


@checked
def probe(model: Network, fitted: ImageSet, held_out: ImageSet, *, seed: int = 0) -> list[Probe]:
    """Predict the factors of images from the poses of a network by ridge regressions.

    For each class, a regression y ≈ w·x + b is fitted for each factor. x is the pose of the capsule of the true class,
    or the input of a CNN's last layer, divided by the root of the mean variance of its components. (Dividing each
    component by its own deviation would magnify components that hardly vary.) Leave-one-out on ``fitted`` selects the
    penalty from 10⁻² to 10⁵.

    R² = 1 − Σ ‖y − ŷ‖² / Σ ‖y − ȳ‖², with sums over the ``held_out`` images of all classes and their mean ȳ. An angle
    is y = (sin, cos). Factors of dtype int64 are left out, because they are names.

    Args:
        model: A network with one object per image.
        fitted: Images with factors to fit on, at least 10 of each class.
        held_out: Images with the same factors to evaluate on, of other objects if possible.
        seed: Random seed of the shuffled factors, 0 to 2³² − 1.

    Returns:
        Probes of the pose, or of the features of a CNN and of their 16 first principal components; and of the pixels.

    Raises:
        InputError: No factors, different factors, too few images, sequences, or a network without poses and without a
            method ``features``.
    """
    require_one_object(model, "a probe", "probe")
    for each in (fitted, held_out):
        require_pixels(model, each.images, "a probe")
    names = [name for name, values in fitted.factors.items() if values.is_floating_point()]
    if not names:
        raise InputError("the images have no factors that are quantities; make some by with_affine_factors")
    for name in names:
        if name not in held_out.factors:
            raise InputError(f"the held-out images have no factor {name}, but the images to fit on have it")
        if held_out.factors[name].unique().numel() < 2:
            raise InputError(f"the factor {name} is the same in all held-out images, so there is nothing to explain")
    for label in held_out.labels.unique().tolist():
        count = int((fitted.labels == label).sum())
        if count < _MIN_IMAGES:
            raise InputError(
                f"there must be at least {_MIN_IMAGES} images of each class to fit on, got {count} of {label}"
            )
    (name, x), (_, others) = (_numbers(model, images) for images in (fitted, held_out))
    kinds = {name: (x, others)}
    if name == "features":
        from sklearn.decomposition import PCA

        components = PCA(min(_COMPONENTS, *x.shape), random_state=0).fit(x)
        kinds["principal components"] = components.transform(x), components.transform(others)
    rows, other_rows = (to_pixels(model, each.images).flatten(1).float().cpu().numpy() for each in (fitted, held_out))
    kinds["pixels"] = rows, other_rows
    labels = fitted.labels.numpy(), held_out.labels.numpy()
    targets = {name: (_target(name, fitted), _target(name, held_out)) for name in names}
    order = _shuffle_within_classes(labels[0], generator(seed).permutation(len(fitted)))
    mixed = {name: (fit[order], held) for name, (fit, held) in targets.items()}
    return [
        Probe(kind, x.shape[1], _r2_of_factors(x, others, labels, targets), _r2_of_factors(x, others, labels, mixed))
        for kind, (x, others) in kinds.items()
    ]


def _numbers(model: Network, images: ImageSet) -> tuple[str, Float[np.ndarray, "N F"]]:
    """Return the kind of numbers and the numbers: poses of the true classes, or inputs of a CNN's last layer."""
    features: Any = getattr(model, "features", None)
    if not model.has_capsules and features is None:
        raise InputError("the network has neither class capsules nor a method features, which a CNN has, to probe")

    def read(pixels: Tensor, labels: Tensor | None) -> list[Tensor]:
        if not model.has_capsules:
            return [features(pixels).flatten(1).float()]  # of branches, (B, J, N)
        capsules = model(pixels).capsules
        assert labels is not None
        assert capsules is not None
        return [capsules.take_along_dim(labels[:, None, None], 1)[:, 0].float()]

    (rows,) = over_batches(read, model, images.images, images.labels)
    return "pose" if model.has_capsules else "features", rows.numpy()


def _target(name: str, images: ImageSet) -> Float[np.ndarray, "N T"]:
    values = images.factors[name].double().numpy()[:, None]
    if name not in ANGLES:
        return values
    return np.concatenate([np.sin(np.radians(values)), np.cos(np.radians(values))], 1)


def _shuffle_within_classes(labels: Int[np.ndarray, "N"], order: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Return a permutation that moves each image only among the images of its class."""
    mixed = np.empty(len(labels), np.int64)
    mixed[np.argsort(labels, kind="stable")] = order[np.argsort(labels[order], kind="stable")]
    return mixed


def _r2_of_factors(
    fitted: Float[np.ndarray, "N F"],
    held_out: Float[np.ndarray, "M F"],
    labels: tuple[Int[np.ndarray, "N"], Int[np.ndarray, "M"]],
    targets: Mapping[str, tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "M T"]]],
) -> dict[str, float]:
    """Fit a regression per class, and return R² of each factor on the held-out images."""
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import r2_score

    targets_fitted = np.concatenate([fit for fit, _ in targets.values()], 1)
    truth = np.concatenate([held for _, held in targets.values()], 1)
    guess = np.empty_like(truth)
    for label in np.unique(labels[1]):
        mine, others = labels[0] == label, labels[1] == label
        scale = float(fitted[mine].var(0).mean()) ** 0.5 or 1.0
        regression = RidgeCV(_PENALTIES, alpha_per_target=True).fit(fitted[mine] / scale, targets_fitted[mine])
        guess[others] = regression.predict(held_out[others] / scale).reshape(guess[others].shape)
    ends = list(itertools.accumulate((held.shape[1] for _, held in targets.values()), initial=0))
    return {
        name: float(r2_score(truth[:, start:end], guess[:, start:end], multioutput="variance_weighted"))
        for name, (start, end) in zip(targets, itertools.pairwise(ends), strict=True)
    }
