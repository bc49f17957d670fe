"""What a network is (``CapsNetConfig``, ``CNNConfig``) and how its source trains it (``Recipe``): plain, typed fields.

Nothing here imports torch, so that the command line can list every field at once.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.ranges import (
    MOST_LAYERS,
    Count,
    Epsilon,
    Factor,
    Iterations,
    Pixels,
    PositiveFactor,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Width,
)

OddKernel = Annotated[int, Range(1, 255, odd=True)]
"""The side of a kernel of a convolution that keeps the size."""


@dataclass(frozen=True)
class Described:
    """A frozen dataclass whose fields are checked against their annotations when one is made.

    A :class:`~torchcaps.ranges.Range` in an annotation says which numbers a field takes; the options of the command
    line show it, too.
    """

    kind: ClassVar[str] = "field"

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Fields and values, as JSON takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
        """
        check_fields(cls, values)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class CapsNetConfig(Described):
    """A capsule network: (stem →) convolution → primary capsules → routing → class capsules → decoder, and its loss."""

    kind: ClassVar[str] = "CapsNet field"

    objects: Width = 1
    """Objects in an image, each of another class; with several, each is decoded from its own capsule alone."""
    pixel_scale: PositiveFactor = 1.0
    """What pixels of 0..1 are multiplied with before the network: 255.0 for networks fed with unscaled pixels."""
    standardise: bool = False
    """Bring each image to mean 0 and deviation 1 before the network; the decoder still draws pixels of 0..1."""
    stem_channels: tuple[Width, ...] = ()
    """Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have none."""
    stem_strides: tuple[Pixels, ...] = ()
    """Their strides, pixels, one for each."""
    conv_channels: Width = 256
    """Channels of the first convolution."""
    conv_kernel: Pixels = 9
    """Kernel of the first convolution, pixels."""
    conv_stride: Pixels = 1
    """Stride of the first convolution, pixels."""
    conv_norm: Literal["none", "channel"] = "none"
    """Before the activations of the stem and the first convolution: nothing, or layer normalisation over the channels
    of each location."""
    conv_dropout: ShareBelowOne = 0.0
    """Dropout after the stem and after the first convolution, a probability: whole channels of an image."""
    conv_activation: Literal["relu", "none"] = "relu"
    """Activation after the first convolution."""
    conv_init: Literal["torch", "glorot", "truncated-normal"] = "torch"
    """How the convolutions start: torch's default; Keras's (Glorot uniform, bias 0); or the authors' code's
    (truncated normal of deviation 0.05 and 0.1, bias 0.1)."""
    primary_types: Width = 32
    """Types of primary capsules; their number is types x height x width of the second convolution's output."""
    primary_dim: Width = 8
    """Components of a primary capsule."""
    primary_kernel: Pixels = 9
    """Kernel of the primary capsules' convolution, pixels."""
    primary_stride: Pixels = 2
    """Stride of the primary capsules' convolution, pixels."""
    primary_padding: Annotated[int, Range(0, 4095)] = 0
    """Zeros on each side of what the primary capsules' convolution sees, pixels."""
    primary_activation: Literal["none", "relu"] = "none"
    """Activation on the primary convolution, before capsules are formed."""
    primary_separate_convs: bool = False
    """One convolution for each component of a primary capsule instead of one for all."""
    grouping: Literal["channels", "raster"] = "channels"
    """A primary capsule holds the channels of one location, or neighbouring locations of a flattened map."""
    primary_output: Literal["squash", "unit", "routed"] = "squash"
    """Primary capsules are squashed; or brought to length one; or votes/types + bias, squashed (authors' code)."""
    capsule_dim: Width = 16
    """Components of a class capsule."""
    capsule_bias: bool = False
    """Learned bias, starting at 0.1, added before the class capsules' squash."""
    weight_init: Literal["balanced", "normal", "truncated-normal", "fan-in"] = "normal"
    """Distribution of the transformation matrices at the start."""
    weight_std: PositiveFactor = 0.1
    """Its standard deviation, where the distribution takes one."""
    num_iterations: Iterations = 3
    """Routing iterations: how many times the coupling is computed; 1 is uniform coupling, 0 no routing, no squash."""
    softmax_over: Literal["outputs", "inputs"] = "outputs"
    """The axis on which capsules compete: the paper's outputs, or the inputs."""
    stop_gradient: bool = False
    """Gradients flow through the last weighted sum only."""
    leaky: bool = False
    """Add a "none of the above" competitor to the softmax."""
    learn_prior: bool = False
    """Learn the start of the routing logits."""
    squash_eps: Epsilon = 1e-7
    """Added under the squash's root. 1e-24 stands for none: it changes no vector longer than 1e-8 in float32, and keeps
    the gradient of a zero vector finite."""
    length_eps: Epsilon = 1e-7
    """Added under the root of the class capsules' lengths, which are the scores; as for squash_eps."""
    decoder: bool = True
    """Reconstruct the image from the capsule of its class."""
    decoder_hidden: tuple[Width, ...] = (512, 1024)
    """Widths of the decoder's hidden layers."""
    decoder_init: Literal["torch", "glorot", "truncated-normal"] = "torch"
    """How the decoder starts: torch's default; TensorFlow's and Keras's (Glorot uniform, bias 0); or the authors'
    code's (truncated normal of deviation 0.1, bias 0.1)."""
    decoder_mask: Literal["label-in-training", "label", "longest"] = "label-in-training"
    """Whose capsule is decoded: the label's in training and the longest at inference; always the label's (where there
    is one); or always the longest."""
    classification_loss: Literal["margin", "cross-entropy"] = "margin"
    """Margin loss, or cross-entropy of the lengths divided by their sum."""
    m_plus: Factor = 0.9
    """Margin loss: length above which a present class costs nothing."""
    m_minus: Factor = 0.1
    """Margin loss: length below which an absent class costs nothing."""
    margin_lambda: Factor = 0.5
    """Margin loss: weight of the absent classes."""
    margin_power: Annotated[int, Range(1, 10)] = 2
    """Margin loss: 2 for squared margins, 1 for plain ones."""
    margin_scale: PositiveFactor = 1.0
    """Factor on the margin loss."""
    margin_over_classes: Literal["sum", "mean"] = "sum"
    """Margin loss summed over classes (the paper) or averaged."""
    reconstruction_weight: Factor = 0.0005
    """Weight of the squared reconstruction error."""
    reconstruction_over_pixels: Literal["sum", "mean"] = "sum"
    """Squared reconstruction error summed over an image's pixels (the paper) or averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stem(self)
        if self.primary_padding >= self.primary_kernel:  # capsules would see zeros only
            raise InputError(
                f"primary_padding must be below primary_kernel, {self.primary_kernel}, got {self.primary_padding}"
            )
        if self.standardise and self.pixel_scale != 1:
            raise InputError(f"pixel_scale must be 1 with standardise=True, which undoes it, got {self.pixel_scale}")
        if self.learn_prior and (self.stop_gradient or self.num_iterations == 0):
            raise InputError(
                "learn_prior needs stop_gradient=False and num_iterations of at least 1: else no gradient reaches it"
            )


@dataclass(frozen=True, kw_only=True)
class CNNConfig(Described):
    """A convolutional network: (stem →) convolutions that keep the size, max pooling, dense layers, dropout."""

    kind: ClassVar[str] = "CNN field"

    objects: Width = 1
    """Objects in an image, each of another class: softmax cross-entropy for one, sigmoid cross-entropy for more."""
    stem_channels: tuple[Width, ...] = ()
    """Channels of 3x3 convolutions with ReLU before the others; the published networks have none."""
    stem_strides: tuple[Pixels, ...] = ()
    """Their strides, pixels, one for each."""
    conv_norm: Literal["none", "channel"] = "none"
    """Before the activations of all convolutions: nothing, or layer normalisation over the channels of each
    location."""
    conv_dropout: ShareBelowOne = 0.0
    """Dropout after the stem and after each other convolution, a probability: whole channels of an image."""
    channels: tuple[Width, ...] = (256, 256, 128)
    """Channels of the convolutions."""
    kernel: OddKernel = 5
    """Kernel of the convolutions, pixels."""
    first_kernel: OddKernel | None = None
    """Kernel of the first convolution, pixels; that of the others if none is given."""
    pool: Pixels = 1
    """Max pooling after each convolution: size and stride, pixels; 1 is none."""
    hidden: tuple[Width, ...] = (328, 192)
    """Widths of the dense layers."""
    dropout: ShareBelowOne = 0.5
    """Dropout before the last layer, a probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stem(self)
        if not self.channels:
            raise InputError("channels must name at least one convolution, got none")


def _check_stem(config: CapsNetConfig | CNNConfig) -> None:
    if len(config.stem_strides) != len(config.stem_channels):
        raise InputError(
            f"stem_strides must be {len(config.stem_channels)} numbers, one for each of stem_channels, got "
            f"{len(config.stem_strides)}"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(Described):
    """How a network is trained. A preset's recipe is its source's."""

    kind: ClassVar[str] = "recipe field"

    epochs: Count = 20
    """Passes over the training images."""
    stop_at: Share | None = None
    """Training ends with the first epoch whose validation accuracy is at least this share; only with the last epoch if
    none is given."""
    batch_size: Count = 128
    """Images a step, over all devices."""
    learning_rate: PositiveFactor = 1e-3
    """Adam's learning rate; the peak of the one-cycle schedule."""
    adam: Literal["torch", "tensorflow"] = "torch"
    """Where Adam adds its epsilon to the root of the second moment: after the correction of that moment's bias, as in
    the paper's algorithm and PyTorch, or before it, as in TensorFlow and Keras. There the epsilon of step t is
    1/√(1 − 0.999^t) times as large: 32 times in the first step, 1.3 times after 1,000."""
    adam_eps: PositiveFactor = 1e-8
    """Adam's epsilon."""
    schedule: Literal["constant", "decay-by-step", "decay-by-epoch", "one-cycle"] = "constant"
    """Constant; times decay^(step/decay_steps); times decay each epoch; or up to the peak and down to zero, once."""
    decay: ShareAboveZero = 0.96
    """Factor of the decaying schedules."""
    decay_steps: Count = 2000
    """Steps for one factor of the schedule by step."""
    min_learning_rate: Factor = 0.0
    """The decaying schedules stop here."""
    max_shift: Annotated[int, Range(0, 4096)] = 0
    """Training images are shifted by up to so many pixels each way, zeros coming in."""
    crop: Pixels | None = None
    """Squares of so many pixels are cut out of the images: at random places in training, else the centre; whole
    images if none is given."""
    flip: bool = False
    """Half of the training images are mirrored left to right."""
    brightness: Share = 0.0
    """Training pixels (0..1) are changed by a number of up to this, one an image, up or down."""
    contrast: Share = 0.0
    """Training images' contrast is multiplied by 1 ± up to this, about the mean of each channel."""
    max_rotation: Annotated[float, Range(0, 180)] = 0.0
    """Training images are turned by up to so many degrees either way."""
    max_scaling: ShareBelowOne = 0.0
    """Training images are made larger or smaller by up to this share: times 1 ± up to this."""
    select: Literal["accuracy", "loss"] = "accuracy"
    """What chooses the best epoch on the validation images (the loss breaks ties of the accuracy)."""
    validation_size: Count | None = None
    """Images kept from training to choose the best epoch; the data set's default if none is given."""
    validation: Literal["random", "first", "last"] = "random"
    """Which of the training images these are: a random choice with each class's share, or the first or the last ones in
    the order of the data set."""
    limit_train: Count | None = None
    """Train on the first so many images at most; on all if none is given."""
    limit_test: Count | None = None
    """Test on the first so many images at most; on all if none is given."""


ConfigT = TypeVar("ConfigT", bound=Described)


def replace(config: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
    """A copy of ``config`` with other values in some fields.

    Raises:
        InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
    """
    check_fields(type(config), overrides)
    return dataclasses.replace(config, **overrides)


def check_fields(config_type: type[Described], names: typing.Iterable[str]) -> None:
    """Raise InputError at the first name that is no field of ``config_type``."""
    known = [field.name for field in dataclasses.fields(config_type)]
    for name in names:
        if name not in known:
            raise unknown_name(config_type.kind, name, known)


def as_text(value: object) -> str:
    """A field's value as a person reads it, and types it: ``on``, ``none``, ``0.001``, ``512,1024``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """``value``, as its annotation wants it: ints become floats, lists tuples; anything else must fit already."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, allowed = args
        value = _checked(name, value, kind)
        allowed.check(name, value)
        return value
    if origin is Literal:
        if value not in args:
            raise InputError(f"{name} must be one of {', '.join(args)}, got {shown(value)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return value
        kinds = [arg for arg in args if arg is not type(None)]
        fitting = (arg for arg in kinds if isinstance(arg, type) and isinstance(value, arg))
        return _checked(name, value, next(fitting, kinds[0]))
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise InputError(f"{name} must be a sequence, got {shown(value)}")
        if len(value) > MOST_LAYERS:
            raise InputError(f"{name} must have at most {MOST_LAYERS} numbers, got {len(value)}")
        return tuple(_checked(name, item, args[0]) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{name} must be of type {hint.__name__}, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be finite, got {value}")
    return value
