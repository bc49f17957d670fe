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
from typing import Any, ClassVar, Literal, TypeVar

from torchcaps.errors import InputError, unknown_name


@dataclass(frozen=True)
class Described:
    """A frozen dataclass whose fields are checked against their annotations when one is made."""

    kind: ClassVar[str] = "field"

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
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

    objects: int = 1
    """Objects in an image, each of another class; with several, each is decoded from its own capsule alone."""
    pixel_scale: float = 1.0
    """What pixels of 0..1 are multiplied with before the network: 255.0 for networks fed with unscaled pixels."""
    standardise: bool = False
    """Bring each image to mean 0 and deviation 1 before the network; the decoder still draws pixels of 0..1."""
    stem_channels: tuple[int, ...] = ()
    """Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have none."""
    stem_strides: tuple[int, ...] = ()
    """Their strides, pixels, one for each."""
    conv_channels: int = 256
    """Channels of the first convolution."""
    conv_kernel: int = 9
    """Kernel of the first convolution, pixels."""
    conv_stride: int = 1
    """Stride of the first convolution, pixels."""
    conv_norm: Literal["none", "channel"] = "none"
    """Before the activations of the stem and the first convolution: nothing, or layer normalisation over the channels
    of each location."""
    conv_dropout: float = 0.0
    """Dropout after the stem and after the first convolution, a probability: whole channels of an image."""
    conv_activation: Literal["relu", "none"] = "relu"
    """Activation after the first convolution."""
    conv_init: Literal["torch", "glorot", "truncated-normal"] = "torch"
    """How the convolutions start: torch's default; Keras's (Glorot uniform, bias 0); or the authors' code's
    (truncated normal of deviation 0.05 and 0.1, bias 0.1)."""
    primary_types: int = 32
    """Types of primary capsules; their number is types x height x width of the second convolution's output."""
    primary_dim: int = 8
    """Components of a primary capsule."""
    primary_kernel: int = 9
    """Kernel of the primary capsules' convolution, pixels."""
    primary_stride: int = 2
    """Stride of the primary capsules' convolution, pixels."""
    primary_padding: int = 0
    """Zeros on each side of what the primary capsules' convolution sees, pixels."""
    primary_activation: Literal["none", "relu"] = "none"
    """Activation on the primary convolution, before capsules are formed."""
    primary_separate_convs: bool = False
    """One convolution for each component of a primary capsule instead of one for all."""
    grouping: Literal["channels", "raster"] = "channels"
    """A primary capsule holds the channels of one location, or neighbouring locations of a flattened map."""
    primary_output: Literal["squash", "unit", "routed"] = "squash"
    """Primary capsules are squashed; or brought to length one; or votes/types + bias, squashed (authors' code)."""
    capsule_dim: int = 16
    """Components of a class capsule."""
    capsule_bias: bool = False
    """Learned bias, starting at 0.1, added before the class capsules' squash."""
    weight_init: Literal["balanced", "normal", "truncated-normal", "fan-in"] = "normal"
    """Distribution of the transformation matrices at the start."""
    weight_std: float = 0.1
    """Its standard deviation, where the distribution takes one."""
    num_iterations: int = 3
    """Routing iterations: how many times the coupling is computed; 1 is uniform coupling, 0 no routing, no squash."""
    softmax_over: Literal["outputs", "inputs"] = "outputs"
    """The axis on which capsules compete: the paper's outputs, or the inputs."""
    stop_gradient: bool = False
    """Gradients flow through the last weighted sum only."""
    leaky: bool = False
    """Add a "none of the above" competitor to the softmax."""
    learn_prior: bool = False
    """Learn the start of the routing logits."""
    squash_eps: float = 1e-7
    """Added under the squash's root."""
    decoder: bool = True
    """Reconstruct the image from the capsule of its class."""
    decoder_hidden: tuple[int, ...] = (512, 1024)
    """Widths of the decoder's hidden layers."""
    decoder_mask: Literal["label-in-training", "label", "longest"] = "label-in-training"
    """Whose capsule is decoded: the label's in training and the longest at inference; always the label's (where there
    is one); or always the longest."""
    classification_loss: Literal["margin", "cross-entropy"] = "margin"
    """Margin loss, or cross-entropy of the lengths divided by their sum."""
    m_plus: float = 0.9
    """Margin loss: length above which a present class costs nothing."""
    m_minus: float = 0.1
    """Margin loss: length below which an absent class costs nothing."""
    margin_lambda: float = 0.5
    """Margin loss: weight of the absent classes."""
    margin_power: int = 2
    """Margin loss: 2 for squared margins, 1 for plain ones."""
    margin_scale: float = 1.0
    """Factor on the margin loss."""
    margin_over_classes: Literal["sum", "mean"] = "sum"
    """Margin loss summed over classes (the paper) or averaged."""
    reconstruction_weight: float = 0.0005
    """Weight of the squared reconstruction error."""
    reconstruction_over_pixels: Literal["sum", "mean"] = "sum"
    """Squared reconstruction error summed over an image's pixels (the paper) or averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "objects",
            "conv_channels",
            "conv_kernel",
            "conv_stride",
            "primary_types",
            "primary_dim",
            "primary_kernel",
            "primary_stride",
            "capsule_dim",
            "margin_power",
        ):
            at_least(name, getattr(self, name), 1)
        for name in ("num_iterations", "primary_padding"):
            at_least(name, getattr(self, name), 0)
        below("primary_padding", self.primary_padding, self.primary_kernel)  # else capsules would see zeros only
        for name in ("pixel_scale", "weight_std", "squash_eps", "margin_scale"):
            above(name, getattr(self, name), 0)
        _check_stem(self)
        for name in ("margin_lambda", "reconstruction_weight"):
            at_least(name, getattr(self, name), 0)
        for number in self.decoder_hidden:
            at_least("decoder_hidden", number, 1)
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

    objects: int = 1
    """Objects in an image, each of another class: softmax cross-entropy for one, sigmoid cross-entropy for more."""
    stem_channels: tuple[int, ...] = ()
    """Channels of 3x3 convolutions with ReLU before the others; the published networks have none."""
    stem_strides: tuple[int, ...] = ()
    """Their strides, pixels, one for each."""
    conv_norm: Literal["none", "channel"] = "none"
    """Before the activations of all convolutions: nothing, or layer normalisation over the channels of each
    location."""
    conv_dropout: float = 0.0
    """Dropout after the stem and after each other convolution, a probability: whole channels of an image."""
    channels: tuple[int, ...] = (256, 256, 128)
    """Channels of the convolutions."""
    kernel: int = 5
    """Kernel of the convolutions, pixels."""
    first_kernel: int | None = None
    """Kernel of the first convolution, pixels; that of the others if none is given."""
    pool: int = 1
    """Max pooling after each convolution: size and stride, pixels; 1 is none."""
    hidden: tuple[int, ...] = (328, 192)
    """Widths of the dense layers."""
    dropout: float = 0.5
    """Dropout before the last layer, a probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("objects", "pool"):
            at_least(name, getattr(self, name), 1)
        _check_stem(self)
        if not self.channels:
            raise InputError("channels must name at least one convolution, got none")
        for name in ("channels", "hidden"):
            for width in getattr(self, name):
                at_least(name, width, 1)
        for name in ("kernel", "first_kernel"):
            size = getattr(self, name)
            if size is not None and (size < 1 or size % 2 == 0):
                raise InputError(f"{name} must be 1 or an odd number above, so that the size is kept, got {size}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, got {self.dropout}")


def _check_stem(config: CapsNetConfig | CNNConfig) -> None:
    at_least("conv_dropout", config.conv_dropout, 0)
    below("conv_dropout", config.conv_dropout, 1)
    for name in ("stem_channels", "stem_strides"):
        for number in getattr(config, name):
            at_least(name, number, 1)
    if len(config.stem_strides) != len(config.stem_channels):
        raise InputError(
            f"stem_strides must be {len(config.stem_channels)} numbers, one for each of stem_channels, got "
            f"{len(config.stem_strides)}"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(Described):
    """How a network is trained. A preset's recipe is its source's."""

    kind: ClassVar[str] = "recipe field"

    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all devices."""
    learning_rate: float = 1e-3
    """Adam's learning rate; the peak of the one-cycle schedule."""
    schedule: Literal["constant", "decay-by-step", "decay-by-epoch", "one-cycle"] = "constant"
    """Constant; times decay^(step/decay_steps); times decay each epoch; or up to the peak and down to zero, once."""
    decay: float = 0.96
    """Factor of the decaying schedules."""
    decay_steps: int = 2000
    """Steps for one factor of the schedule by step."""
    min_learning_rate: float = 0.0
    """The decaying schedules stop here."""
    max_shift: int = 0
    """Training images are shifted by up to so many pixels each way, zeros coming in."""
    crop: int | None = None
    """Squares of so many pixels are cut out of the images: at random places in training, else the centre; whole
    images if none is given."""
    flip: bool = False
    """Half of the training images are mirrored left to right."""
    brightness: float = 0.0
    """Training pixels (0..1) are changed by a number of up to this, one an image, up or down."""
    contrast: float = 0.0
    """Training images' contrast is multiplied by 1 ± up to this, about the mean of each channel."""
    max_rotation: float = 0.0
    """Training images are turned by up to so many degrees either way."""
    max_scaling: float = 0.0
    """Training images are made larger or smaller by up to this share: times 1 ± up to this."""
    select: Literal["accuracy", "loss"] = "accuracy"
    """What chooses the best epoch on the validation images (the loss breaks ties of the accuracy)."""
    validation_size: int | None = None
    """Images kept from training to choose the best epoch; the data set's default if none is given."""
    limit_train: int | None = None
    """Train on the first so many images at most; on all if none is given."""
    limit_test: int | None = None
    """Test on the first so many images at most; on all if none is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size", "decay_steps"):
            at_least(name, getattr(self, name), 1)
        for name in ("crop", "validation_size", "limit_train", "limit_test"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "decay"):
            above(name, getattr(self, name), 0)
        for name in ("max_shift", "min_learning_rate"):
            at_least(name, getattr(self, name), 0)
        for name, most in (("brightness", 1), ("contrast", 1), ("max_rotation", 180)):
            between(name, getattr(self, name), 0, most)
        at_least("max_scaling", self.max_scaling, 0)
        below("max_scaling", self.max_scaling, 1)  # times 0 nothing would be left


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


def at_least(name: str, value: float, least: float) -> None:
    """Raise InputError if a field's value is below its least."""
    if not value >= least:
        raise InputError(f"{name} must be at least {least}, got {value}")


def between(name: str, value: float, least: float, most: float) -> None:
    """Raise InputError if a field's value is not in a range, its ends included."""
    if not least <= value <= most:
        raise InputError(f"{name} must be {least} to {most}, got {value}")


def below(name: str, value: float, bound: float) -> None:
    """Raise InputError if a field's value is not below a bound."""
    if not value < bound:
        raise InputError(f"{name} must be below {bound}, got {value}")


def above(name: str, value: float, bound: float) -> None:
    """Raise InputError if a field's value is not above a bound."""
    if not value > bound:
        raise InputError(f"{name} must be above {bound}, got {value}")


def _checked(name: str, value: Any, hint: Any) -> Any:
    """``value``, as its annotation wants it: ints become floats, lists tuples; anything else must fit already."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise InputError(f"{name} must be one of {', '.join(args)}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return value
        kinds = [arg for arg in args if arg is not type(None)]
        fitting = (arg for arg in kinds if isinstance(arg, type) and isinstance(value, arg))
        return _checked(name, value, next(fitting, kinds[0]))
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise InputError(f"{name} must be a sequence, got {value!r}")
        return tuple(_checked(name, item, args[0]) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{name} must be of type {hint.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be finite, got {value}")
    return value
