"""Capsule network as a scikit-learn classifier for pipelines and grid searches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Shaped, UInt8
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from torchcaps.analysis import class_poses, predict
from torchcaps.analysis.inference import over_batches
from torchcaps.datasets import ImageSet, stratified_split
from torchcaps.datasets.batches import WEIGHT
from torchcaps.datasets.pixels import as_numbers, channels_first, to_bytes
from torchcaps.datasets.scaling import note_dark, range_of, rescaled
from torchcaps.datasets.splits import GROUP, groups_of, read_groups
from torchcaps.errors import InputError
from torchcaps.models import Network, create_model
from torchcaps.tasks import task_of
from torchcaps.tasks.base import as_array
from torchcaps.training import Diverged, Progress, Recipe, fit
from torchcaps.words import counted

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from sklearn.utils import Tags

__all__ = ["CapsNetClassifier"]

#: Dtypes that arrays keep. Other dtypes, such as integers, are converted to the first.
DTYPES = (np.float64, np.float32, np.uint8)

PixelRange = tuple[float, float] | tuple[np.ndarray, np.ndarray]
BYTES, UNIT = (0.0, 255.0), (0.0, 1.0)
MAX_SCORE_SCALE = 100.0
"""Largest factor of scores before the softmax of `predict_proba`."""


class CapsNetClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):
    """A network from :func:`torchcaps.create_model`, trained with Adam on a one-cycle schedule.

    Images are an array (N, H, W), (N, C, H, W) or (N, H, W, C), or, with ``image_shape``, flat rows of any of these.
    Labels may have any type, including strings. Pixels are converted to 256 levels:

    - uint8 of 0..255 stay unchanged;
    - numbers of 0..1 are rounded;
    - other numbers are scaled to 0..1 by the minimum and maximum in ``fit``, as by ``MinMaxScaler(clip=True)``. All
      pixels have one scale. Only flat rows with negative numbers, as from a ``StandardScaler``, and rows of features,
      ``image_shape=(1, -1)``, have a scale for each column.

    :meth:`decision_function` returns the scores of the classes: the lengths of their capsules, or their activations if
    the routing computes activations. :meth:`predict_proba` returns softmax(t · scores). The factor t minimises the
    cross-entropy on the held-out images of ``early_stopping``, or else on the training images. Training images make
    probabilities too certain; use :class:`sklearn.calibration.CalibratedClassifierCV` instead. The scores of CNN
    presets are already probabilities of a softmax and do not change.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        options: Options of the preset's network to change, e.g. ``{"conv_channels": 64}``.
        num_iterations: Routing iterations; None: the preset's.
        softmax_over: ``"outputs"`` or ``"inputs"``; None: the preset's.
        image_shape: (H, W), (C, H, W) or (H, W, C) of images in the rows of a flat array; None: arrays of images. One
            of these numbers may be -1 and follows from the array. (1, -1) accepts rows of any number of features; with
            ``conv_kernel`` and ``primary_kernel`` 1, each feature becomes capsules.
        channels: ``"first"`` or ``"last"``, the axis of the channels; None: the axis of 1 to 4, if one is so short.
        epochs: Largest number of passes over the training images.
        batch_size: Images in a step, at most the number of training images.
        learning_rate: Peak of the one-cycle schedule.
        max_shift: Largest random shift of training images, pixels in each direction.
        class_weight: Weight of each class in the gradient, multiplied by ``sample_weight``: a mapping from labels to
            numbers, ``"balanced"`` for N / (J · images of the class), or None for 1.
        early_stopping: Hold out images of each class, stop when their accuracy no longer improves, and keep the best
            epoch.
        validation_fraction: Share of the images to hold out.
        n_iter_no_change: Number of epochs without improvement before training stops.
        device: Device for training and prediction, e.g. ``"cuda"`` or ``"cuda:1"``.
        precision: Precision of training. ``"32"``: float32. ``"bf16"``: bfloat16 convolutions and dense layers.
            ``"auto"``: ``"bf16"`` on CUDA GPUs of compute capability 8 or more, else ``"32"``. Scores are float32.
        random_state: An int, a RandomState or None. It determines the initial weights, the order of the images and
            their shifts. The same int gives the same network. The state of torch's random generator does not change.

    Attributes:
        classes_: The labels, sorted.
        network_: The trained network, in evaluation mode, on the CPU.
        loss_curve_: Mean loss of each epoch.
        validation_scores_: Accuracy on the held-out images after each epoch; None without ``early_stopping``.
        n_iter_: Number of trained epochs.
        score_scale_: Factor t of :meth:`predict_proba`; None if scores are probabilities.
        pixel_range_: Numbers in the images that are scaled to 0 and 1: (0, 255) for uint8; (0, 1); or the minimum and
            maximum in ``fit``, as numbers or as arrays of the shape of an image.
        n_features_in_: Numbers in a row, for flat images.

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
        channels: Literal["first", "last"] | None = None,
        epochs: int = 10,
        batch_size: int = 64,
        learning_rate: float = 2e-3,
        max_shift: int = 0,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        device: str = "cpu",
        precision: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.preset, self.options, self.image_shape, self.channels = preset, options, image_shape, channels
        self.num_iterations, self.softmax_over = num_iterations, softmax_over
        self.epochs, self.batch_size, self.learning_rate, self.max_shift = epochs, batch_size, learning_rate, max_shift
        self.class_weight, self.early_stopping = class_weight, early_stopping
        self.validation_fraction, self.n_iter_no_change = validation_fraction, n_iter_no_change
        self.device, self.precision, self.random_state = device, precision, random_state

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> Self:
        """Train a new network on images and their labels.

        Args:
            X: Images; see the class.
            y: Label of each image.
            sample_weight: Weight of each image in the gradient, 0 or more; None: 1.
            groups: Group of each image, such as its patient; ``early_stopping`` holds out whole groups. None: images
                are held out one by one.

        Raises:
            InputError: An image shape, pixels or an option do not fit; a ValueError, as scikit-learn expects.
            ValueError: Errors of scikit-learn about arrays: NaN, different lengths, a continuous target.
        """
        array = self._read(X, reset=True)
        by_pixel = self._takes_rows() or (self.image_shape is not None and bool(array.min() < 0))
        pixel_range = _range_of(array, by_pixel=by_pixel)
        images = self._scaled(array, pixel_range)
        note_dark(
            [images.numpy()], "X", any_bits=True, advice="Of floats, such as X.astype(float), the largest is white"
        )
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_consistent_length(images, labels)
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise InputError(f"y must have at least two classes, got one class: {classes[0]!r}")
        weights = self._weights(labels, sample_weight)
        seed = check_random_state(self.random_state).randint(2**31)
        train, held_out = self._split(codes, groups, seed)
        data = _image_set(images, codes, weights, train)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self._build(images.shape[1:], len(classes))
            sizes: dict[str, Any] = {"epochs": self.epochs, "batch_size": min(self.batch_size, len(data))}
            recipe = Recipe(
                learning_rate=self.learning_rate,
                max_shift=self.max_shift,
                schedule="one-cycle",
                patience=None if held_out is None else self.n_iter_no_change,
                **sizes,
            )
            run: dict[str, Any] = {"accelerator": str(self.device), "precision": self.precision, "progress": Progress()}
            run |= {} if held_out is None else {"validation": _image_set(images, codes, weights, held_out)}
            try:
                rows = fit(network, data, recipe, seed=seed, **run)
            except Diverged:
                message = "the loss became NaN or infinite; learning_rate must be below"
                raise InputError(f"{message} {self.learning_rate}") from None
        measured = train if held_out is None else held_out
        scale = _score_scale(network, images[measured], codes[measured], weights[measured])
        # set all together at the end, so that a failed fit keeps the results of an earlier one
        self.classes_, self.network_, self.loss_curve_ = classes, network.cpu(), [row["train_loss"] for row in rows]
        self.validation_scores_ = None if held_out is None else [row["validation_accuracy"] for row in rows]
        self.n_iter_, self.pixel_range_, self.score_scale_ = len(rows), pixel_range, scale
        return self

    def capsule_scores(self, X: ArrayLike) -> Float[np.ndarray, "N J"]:
        """Return the scores of the class capsules in the order of ``classes_``: lengths ‖v_j‖ in 0..1, or activations.

        Raises:
            NotFittedError: ``fit`` was not called.
            InputError: The images have another shape than in ``fit``.
        """
        images = self._images(X)
        scores = predict(self.network_.to(self.device), images).scores
        self.network_.cpu()
        return scores

    def _images(self, X: ArrayLike) -> UInt8[torch.Tensor, "N C H W"]:
        """Return images of the shape of those in ``fit``, scaled as they were."""
        check_is_fitted(self, "network_")
        array = self._read(X, reset=False)
        if tuple(array.shape[1:]) != self.network_.in_shape:
            raise InputError(
                f"the images are {tuple(array.shape[1:])}, but fit saw {self.network_.in_shape} "
                "(channels, height, width)"
            )
        return self._scaled(array, self.pixel_range_)

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "N J"] | Float[np.ndarray, "N"]:
        """Return the scores of the classes; for two classes, the second score minus the first.

        Errors: see :meth:`capsule_scores`.
        """
        scores = self.capsule_scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: ArrayLike) -> Float[np.ndarray, "N J"]:
        """Return the probabilities of the classes in the order of ``classes_``: softmax(``score_scale_`` · scores).

        Scores of a CNN are already probabilities. The class describes the choice of ``score_scale_``. Errors: see
        :meth:`capsule_scores`.
        """
        scores = self.capsule_scores(X).astype(np.float64)
        if self.score_scale_ is None:
            return scores / scores.sum(1, keepdims=True)
        return softmax(self.score_scale_ * scores, axis=1)

    def transform(self, X: ArrayLike) -> Float[np.ndarray, "N F"]:
        """Return numbers that describe each image, for other models.

        They are the poses of the class capsules, class by class in the order of ``classes_``; of a CNN the input of its
        last layer. Errors: see :meth:`capsule_scores`.
        """
        return self._described(self._images(X))

    @property
    def _n_features_out(self) -> int:
        """Number of columns of :meth:`transform`, for ``get_feature_names_out`` and ``set_output``."""
        return self._described(torch.zeros(1, *self.network_.in_shape, dtype=torch.uint8)).shape[1]

    def _described(self, images: UInt8[torch.Tensor, "N C H W"]) -> Float[np.ndarray, "N F"]:
        network = self.network_.to(self.device)
        if network.has_capsules:
            poses, _ = class_poses(network, images)
            rows = poses.reshape(len(poses), -1)
        else:
            features: Any = network.features  # of every CNN
            (inputs,) = over_batches(lambda pixels, _: [features(pixels).float()], network, images)
            rows = inputs.numpy()
        self.network_.cpu()
        return rows

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the class with the highest score for each image. Errors: see :meth:`capsule_scores`."""
        scores = self.capsule_scores(X)
        return self.classes_[scores.argmax(1)]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = self._takes_rows()  # the tag means rows of any width: an image_shape with -1
        tags.input_tags.three_d_array = self.image_shape is None
        tags.transformer_tags.preserves_dtype = []  # poses are float32
        return tags

    def _takes_rows(self) -> bool:
        """Return True if images are rows of any number of features."""
        return self.image_shape is not None and -1 in tuple(self.image_shape)

    def _build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        named = {"num_iterations": self.num_iterations, "softmax_over": self.softmax_over}
        options = {**(self.options or {}), **{name: value for name, value in named.items() if value is not None}}
        network = create_model(self.preset, in_shape, num_classes, **options)
        task_of(network).require("classifier", "a classifier")
        if network.objects > 1:
            raise InputError(
                f"{self.preset} is for images with {network.objects} objects, but here each image has one label; "
                "choose another preset, or options={'objects': 1}"
            )
        return network

    def _weights(self, labels: np.ndarray, sample_weight: ArrayLike | None) -> Float32[np.ndarray, "N"]:
        """Return the weight of each image in the gradient."""
        weights = np.asarray(compute_sample_weight(self.class_weight, labels), np.float32)
        if sample_weight is not None:
            counts = column_or_1d(check_array(sample_weight, ensure_2d=False, dtype=np.float32))
            check_consistent_length(labels, counts)
            weights *= counts
        if weights.min() < 0 or weights.max() == 0:
            raise InputError("sample_weight and class_weight must not be negative, nor zero for all images")
        return weights

    def _split(self, codes: Int64[np.ndarray, "N"], groups: ArrayLike | None, seed: int) -> tuple[Any, Any]:
        """Return the indices of the training images and of the held-out images (None without early stopping)."""
        if groups is not None and not self.early_stopping:
            raise InputError(
                "groups say which images early_stopping holds out; set early_stopping, or leave groups out"
            )
        if not self.early_stopping:
            return slice(None), None
        if groups is not None:
            members = groups_of({GROUP: read_groups(groups, len(codes), "groups")})
            size = max(round(self.validation_fraction * len(codes)), 1)
            return stratified_split(torch.from_numpy(codes), size, seed=seed, groups=members)
        parts = train_test_split(
            np.arange(len(codes)), test_size=self.validation_fraction, stratify=codes, random_state=seed
        )
        return parts[0], parts[1]

    def _read(self, X: ArrayLike, *, reset: bool) -> Shaped[torch.Tensor, "N C H W"]:
        """Return images in any form that the class accepts with channels first; numbers do not change."""
        X = as_array(as_numbers(X, "X"), "X") if isinstance(X, torch.Tensor) else X
        if self.image_shape is None:
            array = check_array(X, ensure_2d=False, allow_nd=True, dtype=DTYPES)
            if array.ndim not in (3, 4):
                raise InputError(
                    f"images must have shape (N, H, W), (N, C, H, W), (N, H, W, C), or be flat rows with "
                    f"image_shape, got {array.shape}"
                )
        else:
            array, shape = validate_data(self, X, reset=reset, dtype=DTYPES), tuple(self.image_shape)
            known = math.prod(size for size in shape if size != -1)
            if len(shape) not in (2, 3) or known < 1 or min(shape) < -1 or shape.count(-1) > 1:
                raise InputError(
                    f"image_shape must be (H, W), (C, H, W) or (H, W, C), of which one may be -1, got {shape!r}"
                )
            if array.shape[1] != known if -1 not in shape else array.shape[1] % known:
                multiple = "a multiple of " if -1 in shape else ""
                numbers = (
                    f"{multiple}{counted(known, 'number')} an image, but X has {counted(array.shape[1], 'feature')}"
                )
                raise InputError(f"image_shape {shape} has {numbers}")
            array = array.reshape(len(array), *shape)
        array = np.ascontiguousarray(array)
        return channels_first(torch.from_numpy(array if array.flags.writeable else array.copy()), "X", self.channels)

    def _scaled(
        self, array: Shaped[torch.Tensor, "N C H W"], pixel_range: PixelRange
    ) -> UInt8[torch.Tensor, "N C H W"]:
        """Scale pixels to 0..255: the ends of the range become 0 and 255, and numbers beyond it are clipped.

        Bytes and numbers of 0..1 are equivalent: a network fitted to one accepts the other.
        """
        low, high = pixel_range
        if np.ndim(low) == 0:
            own = _range_of(array)
            if {own, pixel_range} == {BYTES, UNIT}:
                pixel_range = own
            if pixel_range == BYTES and array.dtype == torch.uint8:
                return array.contiguous()
            low, high = pixel_range
        return to_bytes(torch.from_numpy(rescaled(array.numpy(), low, np.where(np.equal(low, high), high + 1, high))))


def _image_set(images: torch.Tensor, codes: np.ndarray, weights: np.ndarray, part: Any) -> ImageSet:
    """Return some of the images with their classes and weights; the weights have the mean 1."""
    own = weights[part]
    if own.max() == 0:
        raise InputError("sample_weight is zero for all images that are not held out")
    counts = torch.from_numpy(own / own.mean())
    factors = {} if (own == own[0]).all() else {WEIGHT: counts}
    return ImageSet(images[part], torch.from_numpy(codes[part]), factors=factors)


def _score_scale(network: Network, images: torch.Tensor, codes: np.ndarray, weights: np.ndarray) -> float | None:
    """Return the factor t with the smallest cross-entropy of softmax(t · scores); None if scores are probabilities."""
    prediction = predict(network, images)
    if prediction.score_name == "probability":
        return None
    scores = prediction.scores.astype(np.float64)
    weights = weights if weights.any() else np.ones_like(weights)

    def cross_entropy(scale: float) -> float:
        chosen = np.take_along_axis(log_softmax(scale * scores, axis=1), codes[:, None], 1)[:, 0]
        return float(-np.average(chosen, weights=weights))

    return float(minimize_scalar(cross_entropy, bounds=(1e-3, MAX_SCORE_SCALE), method="bounded").x)


def _range_of(array: Shaped[torch.Tensor, "N C H W"], *, by_pixel: bool = False) -> PixelRange:
    """Return the numbers that become 0 and 1: for bytes, for 0..1, or the minimum and maximum (``by_pixel``: each)."""
    ends = range_of(array.numpy(), source="estimator")
    if by_pixel and ends not in (BYTES, UNIT):
        return array.amin(0).numpy(), array.amax(0).numpy()
    return ends
