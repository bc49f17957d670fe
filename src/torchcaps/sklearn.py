"""A capsule network as a scikit-learn classifier: fit, predict, score, in pipelines and grid searches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jaxtyping import Float, UInt8
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from torchcaps.analysis import predict
from torchcaps.datasets import ImageSet
from torchcaps.datasets.batches import WEIGHT
from torchcaps.errors import InputError
from torchcaps.models import Network, create_model
from torchcaps.training import Diverged, Progress, Recipe, fit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from sklearn.utils import Tags

__all__ = ["CapsNetClassifier"]

MOST_CHANNELS = 4
"""An image of at most so many channels may have them last."""
#: What arrays are left as; others, integers above all, become the first.
DTYPES = (np.float64, np.float32, np.uint8)

PixelRange = tuple[float, float] | tuple[np.ndarray, np.ndarray]
BYTES, UNIT = (0.0, 255.0), (0.0, 1.0)
ROUNDING = 1e-6  # how far it may bring pixels out of 0..1


class CapsNetClassifier(ClassifierMixin, BaseEstimator):
    """A network from :func:`torchcaps.create_model`, trained with Adam on a one-cycle schedule.

    Images are an array (N, H, W), (N, C, H, W), (N, H, W, C) with at most four channels, or, with ``image_shape``, flat
    rows of any of these; uint8 of 0..255, or numbers of 0..1, which are rounded to 256 levels. Other numbers are scaled
    to 0..1 by the least and the largest that ``fit`` saw, as by ``MinMaxScaler(clip=True)``; all pixels have one scale,
    but in flat rows with negative numbers, as a ``StandardScaler`` leaves them, each pixel has its own. Labels are of
    any kind, strings too.

    The scores of the classes are the lengths of their capsules, or their activations where the routing gives them, and
    no probabilities: there is :meth:`decision_function` and no ``predict_proba``, which
    :class:`sklearn.calibration.CalibratedClassifierCV` makes of the scores.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        options: Other values for fields of the preset's network, e.g. ``{"conv_channels": 64}``.
        num_iterations: Routing iterations; the preset's if None.
        softmax_over: ``"outputs"`` or ``"inputs"``; the preset's if None.
        image_shape: (H, W), (C, H, W) or (H, W, C) of images that are rows of a flat array; None for arrays of images.
        epochs: Passes over the training images.
        batch_size: Images a step; fewer where there are fewer images.
        learning_rate: The peak of the one-cycle schedule.
        max_shift: Training images are shifted by at most this many pixels in each direction.
        device: Where to compute, e.g. ``"cuda"``.
        precision: Of training: ``"32"`` is float32, ``"bf16"`` bfloat16 convolutions and dense layers, and ``"auto"``
            the second on CUDA GPUs of compute capability 8 or more, the first elsewhere. Scores are float32.
        random_state: An int, a RandomState or None, which decides the initial weights, the order of the images and how
            they are shifted. The same int gives the same network; torch's own random generator of the CPU is left as
            it was.

    Attributes:
        classes_: The labels, sorted.
        network_: The trained network, in evaluation mode, on the CPU.
        loss_curve_: Mean loss of each epoch.
        pixel_range_: The numbers that stand for 0 and 1 in the images: (0, 255) of uint8, (0, 1), or the least and the
            largest that ``fit`` saw, numbers or arrays (C, H, W).
        n_features_in_: Numbers a row; only where the images were given flat.

    Examples:
        >>> from sklearn.datasets import load_digits
        >>> from torchcaps.sklearn import CapsNetClassifier
        >>> digits = load_digits()
        >>> images, labels = digits.images / 16, digits.target
        >>> small = {"conv_kernel": 3, "primary_kernel": 3, "primary_stride": 1, "conv_channels": 32, "decoder": False}
        >>> network = CapsNetClassifier(options=small, epochs=4, learning_rate=5e-3, random_state=0)
        >>> network = network.fit(images[:600], labels[:600])
        >>> network.score(images[600:800], labels[600:800]) > 0.5
        True
    """

    def __init__(
        self,
        preset: str = "sabour2017",
        *,
        options: Mapping[str, Any] | None = None,
        num_iterations: int | None = None,
        softmax_over: str | None = None,
        image_shape: Sequence[int] | None = None,
        epochs: int = 10,
        batch_size: int = 64,
        learning_rate: float = 2e-3,
        max_shift: int = 0,
        device: str = "cpu",
        precision: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.preset, self.options, self.image_shape = preset, options, image_shape
        self.num_iterations, self.softmax_over = num_iterations, softmax_over
        self.epochs, self.batch_size, self.learning_rate, self.max_shift = epochs, batch_size, learning_rate, max_shift
        self.device, self.precision, self.random_state = device, precision, random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train a new network on images and their labels.

        Args:
            X: Images; see the class.
            y: The label of each image.
            sample_weight: How much each image counts in the gradient, 0 or more; all the same if None.

        Raises:
            InputError: An image shape, pixels or an option that do not fit; a ValueError, as scikit-learn expects.
            ValueError: What scikit-learn says of arrays: NaN, lengths that differ, a continuous target.
        """
        images, pixel_range = self._to_images(X)
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_consistent_length(images, labels)
        check_classification_targets(labels)
        weights = {}
        if sample_weight is not None:
            counts = column_or_1d(check_array(sample_weight, ensure_2d=False, dtype=np.float32))
            check_consistent_length(images, counts)
            if counts.min() < 0 or counts.max() == 0:
                raise InputError("sample_weight must not be negative, nor zero for all images")
            weights[WEIGHT] = torch.from_numpy(counts / counts.mean())
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise InputError(f"there must be at least two classes to tell apart, got one class: {classes[0]!r}")
        seed = check_random_state(self.random_state).randint(2**31)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self._build(images.shape[1:], len(classes))
            sizes: dict[str, Any] = {"epochs": self.epochs, "batch_size": min(self.batch_size, len(images))}
            recipe = Recipe(learning_rate=self.learning_rate, max_shift=self.max_shift, schedule="one-cycle", **sizes)
            where: dict[str, Any] = {"accelerator": torch.device(self.device).type, "precision": self.precision}
            data = ImageSet(images, torch.from_numpy(codes), factors=weights)
            try:
                rows = fit(network, data, recipe, seed=seed, progress=Progress(), **where)
            except Diverged:
                said = "the loss became NaN or infinite; learning_rate must be below"
                raise InputError(f"{said} {self.learning_rate}") from None
        # together, so that a fit that fails leaves what an earlier one made
        self.classes_, self.network_, self.loss_curve_ = classes, network.cpu(), [row["train_loss"] for row in rows]
        self.pixel_range_ = pixel_range
        return self

    def capsule_scores(self, X: ArrayLike) -> Float[np.ndarray, "N J"]:
        """The scores of the class capsules, in the order of ``classes_``: lengths ‖v_j‖ in 0..1, or activations.

        Raises:
            NotFittedError: ``fit`` was not called.
            InputError: Images of another shape than those of ``fit``.
        """
        check_is_fitted(self, "network_")
        images, _ = self._to_images(X, self.pixel_range_)
        if tuple(images.shape[1:]) != self.network_.in_shape:
            raise InputError(
                f"the images are {tuple(images.shape[1:])}, but fit saw {self.network_.in_shape} "
                "(channels, height, width)"
            )
        scores = predict(self.network_.to(self.device), images).scores
        self.network_.cpu()
        return scores

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "N J"] | Float[np.ndarray, "N"]:
        """Scores of the classes; of two classes, the second's minus the first's. Errors: see :meth:`capsule_scores`."""
        scores = self.capsule_scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The class with the highest score for each image. Errors: see :meth:`capsule_scores`."""
        scores = self.capsule_scores(X)
        return self.classes_[scores.argmax(1)]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        named = {"num_iterations": self.num_iterations, "softmax_over": self.softmax_over}
        options = {**(self.options or {}), **{name: value for name, value in named.items() if value is not None}}
        network = create_model(self.preset, in_shape, num_classes, **options)
        if network.objects > 1:
            raise InputError(
                f"{self.preset} is for images with {network.objects} objects, but here each has one label; "
                "take another preset, or options={'objects': 1}"
            )
        return network

    def _to_images(
        self, X: ArrayLike, pixel_range: PixelRange | None = None
    ) -> tuple[UInt8[torch.Tensor, "N C H W"], PixelRange]:
        """Any array that the class takes, as the network's pixels, and the range that they were scaled by.

        Without a range, in ``fit``, it is the array's own.
        """
        if self.image_shape is None:
            array = check_array(X, ensure_2d=False, allow_nd=True, dtype=DTYPES)
        else:
            array, shape = validate_data(self, X, reset=pixel_range is None, dtype=DTYPES), tuple(self.image_shape)
            if len(shape) not in (2, 3) or min(shape) < 1:
                raise InputError(f"image_shape must be (H, W), (C, H, W) or (H, W, C), got {self.image_shape!r}")
            if math.prod(shape) != array.shape[1]:
                numbers = f"{math.prod(shape)} numbers an image, but X has {array.shape[1]} features"
                raise InputError(f"image_shape {shape} has {numbers}")
            array = array.reshape(len(array), *shape)
        if array.ndim == 3:
            array = array[:, None]
        if array.ndim != 4:
            raise InputError(
                f"images have the shape {array.shape}; give (N, H, W), (N, C, H, W), (N, H, W, C), or "
                "flat rows with image_shape"
            )
        if array.shape[1] > MOST_CHANNELS >= array.shape[3]:
            array = np.moveaxis(array, 3, 1)
        if pixel_range is None:
            pixel_range = _range_of(array, by_pixel=self.image_shape is not None)
        return torch.from_numpy(np.ascontiguousarray(_to_bytes(array, pixel_range))), pixel_range


def _range_of(array: np.ndarray, *, by_pixel: bool = False) -> PixelRange:
    """What stands for 0 and 1 in images; with ``by_pixel`` each pixel has its own, where there are negative numbers."""
    if array.dtype == np.uint8:
        return BYTES
    low, high = float(array.min()), float(array.max())
    if low >= -ROUNDING and high <= 1 + ROUNDING:
        return UNIT
    return (array.min(0), array.max(0)) if by_pixel and low < 0 else (low, high)


def _to_bytes(array: np.ndarray, pixel_range: PixelRange) -> UInt8[np.ndarray, "N C H W"]:
    """Pixels as 0..255: the ends of the range become 0 and 255, and what lies beyond is clipped.

    Bytes, and numbers of 0..1, stand for the same pixels: a network that was fitted to the one takes the other.
    """
    own: Any = _range_of(array)
    if np.ndim(pixel_range[0]) == 0 and {own, pixel_range} == {BYTES, UNIT}:
        pixel_range = own
    low, high = pixel_range
    width = np.subtract(high, low)
    return (((array - low) / np.where(width == 0, 1, width)).clip(0, 1) * 255).round().astype(np.uint8)
