"""What a network is, part by part, and how its source trains it (``Recipe``): plain, typed fields.

A network is a backbone, primary capsules, a tuple of capsule layers, a decoder and a loss, each a dataclass of its own;
a layer is a transform and a routing. Each says how it is built. Nothing here imports torch before something is built,
so that the command line can list every field at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from torchcaps.errors import InputError
from torchcaps.models.fields import Described, Part, register_part
from torchcaps.ranges import (
    Count,
    Degrees,
    Epsilon,
    Factor,
    Fill,
    Held,
    Iterations,
    Pixels,
    PositiveFactor,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Width,
)

if TYPE_CHECKING:
    from torch import nn

    from torchcaps.models.network import Network
    from torchcaps.nn import Decoder, PrimaryCapsules, Routing, Transform
    from torchcaps.nn.layers import CapsuleLayer

OddKernel = Annotated[int, Range(1, 255, odd=True)]
"""The side of a kernel of a convolution that keeps the size."""
AtLeastOneIteration = Annotated[int, Range(1, 1000)]
"""Iterations of an algorithm that does nothing without any."""
ConvInit = Literal["torch", "glorot", "truncated-normal"]


# ---- what flows between the parts


class TooSmall(InputError):  # noqa: N818  said of a map, and caught where images are known
    """A map that is smaller than the windows that look at it."""


@dataclass(frozen=True)
class CapsuleShape:
    """How many capsules of how many components flow between two layers, and where they stand."""

    number: int
    """Of all capsules of an image."""
    dim: int
    """Components of a pose."""
    grid: tuple[int, int, int] | None = None
    """Types, height, width, where they stand on a map."""


def _positions(sizes: tuple[int, int], kernel: int, stride: int, padding: int, what: str) -> tuple[int, int]:
    """Height and width of what windows make of a map.

    Raises:
        TooSmall: The map is smaller than a window.
    """
    height, width = (size + 2 * padding - kernel for size in sizes)
    if min(height, width) < 0:
        raise TooSmall(f"a map of {sizes[0]}×{sizes[1]} is smaller than {what}")
    return height // stride + 1, width // stride + 1


# ---- routings


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(Part):
    """A routing algorithm. Derive from it, with ``name`` and :meth:`build`, and register it to add your own."""

    choice: ClassVar[str] = "routing"

    def build(self) -> Routing:
        """The module."""
        raise NotImplementedError


@register_part
@dataclass(frozen=True, kw_only=True)
class DynamicRoutingConfig(RoutingConfig):
    """Routing by agreement, :class:`torchcaps.nn.DynamicRouting`."""

    name: ClassVar[str] = "dynamic"

    num_iterations: Iterations = 3
    """Routing iterations: how many times the coupling is computed; 1 is uniform coupling, 0 no routing, no squash."""
    softmax_over: Literal["outputs", "inputs"] = "outputs"
    """The axis on which capsules compete: the paper's outputs, or the inputs."""
    stop_gradient: bool = False
    """Gradients flow through the last weighted sum only."""
    leaky: bool = False
    """Add a "none of the above" competitor to the softmax."""
    capsule_bias: bool = False
    """Learned bias, starting at 0.1, added before the capsules' squash."""
    learn_prior: bool = False
    """Learn the initial routing logits."""
    squash_eps: Epsilon = 1e-7
    """Added under the squash's root. 1e-24 stands for none: it changes no vector longer than 1e-8 in float32, and keeps
    the gradient of a zero vector finite."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn_prior and (self.stop_gradient or self.num_iterations == 0):
            raise InputError(
                "learn_prior needs stop_gradient=False and num_iterations of at least 1: else no gradient reaches it"
            )

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import DynamicRouting

        return DynamicRouting(
            self.num_iterations,
            softmax_over=self.softmax_over,
            stop_gradient=self.stop_gradient,
            leaky=self.leaky,
            bias=self.capsule_bias,
            learn_prior=self.learn_prior,
            eps=self.squash_eps,
        )


@register_part
@dataclass(frozen=True, kw_only=True)
class SelfAttentionConfig(RoutingConfig):
    """Attention among the votes, without iterations, :class:`torchcaps.nn.SelfAttentionRouting`."""

    name: ClassVar[str] = "self-attention"

    attention_bias: bool = True
    """Learn what is added to the coupling of self-attention, from zero."""

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import SelfAttentionRouting

        return SelfAttentionRouting(learn_bias=self.attention_bias)


@register_part
@dataclass(frozen=True, kw_only=True)
class InvertedAttentionConfig(RoutingConfig):
    """Attention whose softmax goes over the receivers, :class:`torchcaps.nn.InvertedAttentionRouting`."""

    name: ClassVar[str] = "inverted-attention"

    num_iterations: AtLeastOneIteration = 2
    """Routing iterations: how many times the coupling is computed; 1 is uniform coupling."""

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import InvertedAttentionRouting

        return InvertedAttentionRouting(self.num_iterations)


@register_part
@dataclass(frozen=True, kw_only=True)
class SelfRoutingConfig(RoutingConfig):
    """Each input capsule chooses for itself, :class:`torchcaps.nn.SelfRouting`."""

    name: ClassVar[str] = "self"

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import SelfRouting

        return SelfRouting()


@register_part
@dataclass(frozen=True, kw_only=True)
class EMConfig(RoutingConfig):
    """A mixture of Gaussians, as the paper has it, :class:`torchcaps.nn.EMRouting`."""

    name: ClassVar[str] = "em"

    num_iterations: AtLeastOneIteration = 3
    """Routing iterations: how often the Gaussians are fitted."""
    final_lambda: PositiveFactor = 0.01
    """The inverse temperature that EM's iterations grow towards."""
    cost_scale: PositiveFactor | None = None
    """Factor on EM's costs, 1 in the paper; 100 times output capsules over input capsules if none is given, so that
    costs do not grow with the number of input capsules."""

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import EMRouting

        return EMRouting(self.num_iterations, final_lambda=self.final_lambda, cost_scale=self.cost_scale)


@register_part
@dataclass(frozen=True, kw_only=True)
class EMCodeConfig(RoutingConfig):
    """A mixture of Gaussians, as the code of EM's authors has it, :class:`torchcaps.nn.EMCodeRouting`."""

    name: ClassVar[str] = "em-code"

    num_iterations: AtLeastOneIteration = 3
    """Routing iterations: how often the Gaussians are fitted."""
    final_beta: PositiveFactor = 0.01
    """The inverse temperature that the iterations of EM's code grow towards."""
    min_variance: PositiveFactor = 0.0005
    """Added to the variances of EM's code."""
    on_map: bool = False
    """Whether the layer is one on a map: EM's code starts its biases otherwise there."""

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import EMCodeRouting

        return EMCodeRouting(
            self.num_iterations, final_beta=self.final_beta, min_variance=self.min_variance, on_map=self.on_map
        )


@register_part
@dataclass(frozen=True, kw_only=True)
class VBConfig(RoutingConfig):
    """A mixture of Gaussians with priors, :class:`torchcaps.nn.VBRouting`."""

    name: ClassVar[str] = "vb"

    num_iterations: AtLeastOneIteration = 3
    """Routing iterations: how often the Gaussians are fitted."""

    def build(self) -> Routing:
        """The module."""
        from torchcaps.nn import VBRouting

        return VBRouting(self.num_iterations)


# ---- transforms


@dataclass(frozen=True, kw_only=True)
class TransformConfig(Part):
    """From capsules to votes. Derive from it, with ``name`` and :meth:`build`, and register it to add your own."""

    choice: ClassVar[str] = "transform"

    def build(self) -> Transform:
        """The module."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _WeightTransformConfig(TransformConfig):
    heading: ClassVar[str] = "Transforms"

    weight_init: Literal["balanced", "normal", "truncated-normal", "fan-in"] = "balanced"
    """Initial distribution of the transformation matrices."""
    weight_std: PositiveFactor = 0.1
    """Its standard deviation, where the distribution takes one."""

    def build(self) -> Transform:
        """The module."""
        from torchcaps.nn import transforms

        kind: type[transforms.WeightTransform] = getattr(transforms, type(self).__name__.removesuffix("Config"))
        return kind(self.weight_init, self.weight_std)


@register_part
@dataclass(frozen=True, kw_only=True)
class DenseConfig(_WeightTransformConfig):
    """A matrix for each pair of capsules, :class:`torchcaps.nn.Dense`."""

    name: ClassVar[str] = "dense"


@register_part
@dataclass(frozen=True, kw_only=True)
class SharedConfig(_WeightTransformConfig):
    """A matrix for each output capsule, which all input capsules share, :class:`torchcaps.nn.Shared`."""

    name: ClassVar[str] = "shared"


@register_part
@dataclass(frozen=True, kw_only=True)
class ElementwiseConfig(_WeightTransformConfig):
    """A vector for each pair of capsules, :class:`torchcaps.nn.Elementwise`."""

    name: ClassVar[str] = "elementwise"


@register_part
@dataclass(frozen=True, kw_only=True)
class MatrixConfig(_WeightTransformConfig):
    """Poses and weights that are square matrices, :class:`torchcaps.nn.Matrix`."""

    name: ClassVar[str] = "matrix"


@register_part
@dataclass(frozen=True, kw_only=True)
class IdentityConfig(TransformConfig):
    """Each input capsule votes with its own pose, :class:`torchcaps.nn.Identity`."""

    name: ClassVar[str] = "identity"

    def build(self) -> Transform:
        """The module."""
        from torchcaps.nn import Identity

        return Identity()


# ---- layers


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Part):
    """A capsule layer: a transform, which makes votes, and a routing, which makes capsules of them."""

    choice: ClassVar[str] = "layer"
    heading: ClassVar[str] = "Capsule layers"

    capsule_dim: Width = 16
    """Components of an output capsule."""
    transform: TransformConfig = DenseConfig()
    """The transform, which makes votes of capsules."""
    routing: RoutingConfig = DynamicRoutingConfig()
    """The routing algorithm, which makes capsules of votes."""

    def build(self, shape: CapsuleShape, num_classes: int) -> CapsuleLayer:
        """The module.

        Args:
            shape: Of the capsules that come in.
            num_classes: J of the network.
        """
        raise NotImplementedError

    def out_shape(self, shape: CapsuleShape, num_classes: int) -> CapsuleShape:
        """Shape of the capsules that go out; arguments as for :meth:`build`.

        Raises:
            TooSmall: Capsules on a map that is too small for it.
        """
        raise NotImplementedError


@register_part
@dataclass(frozen=True, kw_only=True)
class DenseLayerConfig(LayerConfig):
    """Every capsule votes for every capsule, :class:`torchcaps.nn.DenseCapsules`."""

    name: ClassVar[str] = "dense"

    alone: ClassVar[tuple[str, ...]] = ("num_capsules",)
    num_capsules: Width | None = None
    """Output capsules of a dense layer; one for each class if none is given, as the last layer has."""
    share_positions: bool = False
    """The capsules of a type share their weights at all positions of the map that they stand on."""
    coordinates: Literal["none", "centres", "tenths", "hundredths"] = "none"
    """Votes also say where their capsule stands on the map, row and column of n: (i + 1/2)/n or (i + 1)/(10 n) in the
    last column of the first two rows of a matrix, or (i - n/2)/100 in the first two components (EM's code)."""

    def build(self, shape: CapsuleShape, num_classes: int) -> CapsuleLayer:
        """The module."""
        from torchcaps.nn import DenseCapsules

        out = self.out_shape(shape, num_classes)
        if shape.grid is None and (self.share_positions or self.coordinates != "none"):
            raise InputError("share_positions and coordinates need capsules that stand on a map")
        return DenseCapsules(
            shape.number,
            shape.dim,
            out.number,
            out.dim,
            transform=self.transform.build(),
            routing=self.routing.build(),
            grid=shape.grid,
            share_positions=self.share_positions,
            coordinates=self.coordinates,
        )

    def out_shape(self, shape: CapsuleShape, num_classes: int) -> CapsuleShape:  # noqa: ARG002  as all layers
        """See :class:`LayerConfig`."""
        return CapsuleShape(num_classes if self.num_capsules is None else self.num_capsules, self.capsule_dim)


@register_part
@dataclass(frozen=True, kw_only=True)
class ConvLayerConfig(LayerConfig):
    """The capsules of a window vote for those in its middle, :class:`torchcaps.nn.ConvCapsules`."""

    name: ClassVar[str] = "conv"

    layer_types: Width = 16
    """Capsule types that go out of a layer on a map."""
    layer_kernel: Pixels = 3
    """Height and width of a window of a layer on a map, positions."""
    layer_stride: Pixels = 1
    """Stride of a layer on a map, positions."""
    layer_padding: Annotated[int, Range(0, 4095)] = 0
    """Positions without capsules around the map, on each side."""
    pose_norm: bool = False
    """After a layer on a map, batch normalisation of each component of each type of poses, with a learned scale and
    shift."""
    compete_over: Literal["types", "types-and-positions"] = "types"
    """In a layer on a map, the output types at one position compete for a capsule, or those of all positions whose
    windows hold it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_padding >= self.layer_kernel:
            raise InputError(f"layer_padding must be below layer_kernel, {self.layer_kernel}, got {self.layer_padding}")

    def build(self, shape: CapsuleShape, num_classes: int) -> CapsuleLayer:
        """The module."""
        from torchcaps.nn import ConvCapsules

        self.out_shape(shape, num_classes)
        assert shape.grid is not None
        return ConvCapsules(
            shape.grid[0],
            shape.dim,
            self.layer_types,
            self.capsule_dim,
            kernel_size=self.layer_kernel,
            stride=self.layer_stride,
            padding=self.layer_padding,
            norm=self.pose_norm,
            compete_over=self.compete_over,
            transform=self.transform.build(),
            routing=self.routing.build(),
        )

    def out_shape(self, shape: CapsuleShape, num_classes: int) -> CapsuleShape:  # noqa: ARG002  as all layers
        """See :class:`LayerConfig`."""
        if shape.grid is None:
            raise InputError(
                "a conv layer needs capsules on a map: primary capsules with grouping channels, or another conv layer, "
                "must come before it"
            )
        windows = self.layer_kernel, self.layer_stride, self.layer_padding
        height, width = _positions(shape.grid[1:], *windows, "a window of a layer")
        return CapsuleShape(self.layer_types * height * width, self.capsule_dim, (self.layer_types, height, width))


# ---- before the layers


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Part):
    """From images to maps. Derive from it, with ``name`` and :meth:`build`, and register it to add your own."""

    choice: ClassVar[str] = "backbone"

    def build(self, in_shape: tuple[int, int, int]) -> nn.Module:
        """A module from images (B, C, H, W) to maps (B, c, h, w).

        Args:
            in_shape: C, H, W.
        """
        raise NotImplementedError

    def start(self, backbone: nn.Module) -> None:
        """Draw the weights, once the whole network stands; PyTorch's own start is left if this does nothing.

        Args:
            backbone: What :meth:`build` returned.
        """


@dataclass(frozen=True, kw_only=True)
class _ConvolutionsConfig(Described):
    """What the convolutions of any network may have: small ones before all others, normalisation and dropout."""

    heading: ClassVar[str] = "Any network"

    stem_channels: tuple[Width, ...] = ()
    """Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have none."""
    stem_strides: tuple[Pixels, ...] = ()
    """Their strides, pixels, one for each."""
    conv_norm: Literal["none", "channel"] = "none"
    """What comes before the activations of all convolutions except the primary capsules': nothing, or layer
    normalisation over the channels of each location."""
    conv_dropout: ShareBelowOne = 0.0
    """Probability of dropout after the stem and after each other convolution except the primary capsules'; it drops
    whole channels of an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.stem_strides) != len(self.stem_channels):
            raise InputError(
                f"stem_strides must be {len(self.stem_channels)} numbers, one for each of stem_channels, got "
                f"{len(self.stem_strides)}"
            )


@register_part
@dataclass(frozen=True, kw_only=True)
class ConvBackboneConfig(_ConvolutionsConfig, BackboneConfig):
    """(Stem →) convolution, :class:`torchcaps.nn.ConvBackbone`."""

    name: ClassVar[str] = "conv"
    heading: ClassVar[str] = "Backbone conv"

    conv_channels: Width = 256
    """Channels of the first convolution."""
    conv_kernel: Pixels = 9
    """Kernel of the first convolution, pixels."""
    conv_stride: Pixels = 1
    """Stride of the first convolution, pixels."""
    conv_activation: Literal["relu", "none"] = "relu"
    """Activation after the first convolution."""
    conv_init: ConvInit = "torch"
    """Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); or the authors' code's
    (truncated normal of deviation 0.05 and 0.1, bias 0.1)."""

    def build(self, in_shape: tuple[int, int, int]) -> nn.Module:
        """The module."""
        from torchcaps.nn import ConvBackbone

        return ConvBackbone(
            in_shape[0],
            self.conv_channels,
            self.conv_kernel,
            self.conv_stride,
            stem_channels=self.stem_channels,
            stem_strides=self.stem_strides,
            norm=self.conv_norm == "channel",
            dropout=self.conv_dropout,
            activation=self.conv_activation,
        )

    def start(self, backbone: nn.Module) -> None:
        """See :class:`BackboneConfig`."""
        from torchcaps.nn.convolutions import draw_convolutions

        draw_convolutions(backbone, self.conv_init, std=0.05)


@register_part
@dataclass(frozen=True, kw_only=True)
class StackBackboneConfig(BackboneConfig):
    """Convolutions of any kernels with ReLU and batch normalisation, :class:`torchcaps.nn.StackBackbone`."""

    name: ClassVar[str] = "stack"
    heading: ClassVar[str] = "Backbone stack"

    stack_channels: tuple[Width, ...] = (64,)
    """Channels of the stack's convolutions."""
    stack_kernels: tuple[Pixels, ...] = (5,)
    """Their kernels, pixels, one for each."""
    stack_strides: tuple[Pixels, ...] = (2,)
    """Their strides, pixels, one for each."""
    stack_padding: Annotated[int, Range(0, 4095)] = 0
    """Zeros on each side of what each convolution of the stack sees, pixels."""
    stack_norm: Literal["none", "batch", "batch-after"] = "none"
    """Batch normalisation of the stack before each ReLU (PyTorch's), or after it (Keras's)."""
    stack_init: Literal["torch", "he", "truncated-normal"] = "torch"
    """How the stack's convolutions start: torch's default; He et al.'s truncated normal, bias 0; or a truncated normal
    of deviation 0.05, bias 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stack_channels", "stack_kernels", "stack_strides"):
            given = len(getattr(self, name))
            if given != len(self.stack_channels) or not given:
                raise InputError(
                    f"{name} must be {len(self.stack_channels) or 'at least one'} numbers, one for each convolution, "
                    f"got {given}"
                )

    def build(self, in_shape: tuple[int, int, int]) -> nn.Module:
        """The module."""
        from torchcaps.nn import StackBackbone

        return StackBackbone(
            in_shape[0],
            self.stack_channels,
            self.stack_kernels,
            self.stack_strides,
            padding=self.stack_padding,
            norm=self.stack_norm,
            init=self.stack_init,
        )


@dataclass(frozen=True, kw_only=True)
class PrimaryConfig(Described):
    """Primary capsules, :class:`torchcaps.nn.PrimaryCapsules`."""

    heading: ClassVar[str] = "Primary capsules"

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
    primary_output: Literal["squash", "unit", "routed", "exponential", "linear"] = "squash"
    """Primary capsules are squashed; or brought to length one; or votes/types + bias, squashed (authors' code); or
    squashed by 1 - e^-length; or left as the convolution gives them."""
    primary_norm: Literal["none", "batch", "batch-learned"] = "none"
    """After the primary capsules' convolution: nothing, or batch normalisation, plain or with a learned scale and shift
    of each channel."""
    primary_activations: bool = False
    """Primary capsules have activations of their own, the sigmoid of one more channel for each type; else their lengths
    are what says how active they are."""
    primary_depthwise: bool = False
    """Each channel of a primary capsule looks at one channel of the maps, of which there are as many."""
    squash_eps: Epsilon = 1e-7
    """Added under the squash's root. 1e-24 stands for none: it changes no vector longer than 1e-8 in float32, and keeps
    the gradient of a zero vector finite."""
    conv_init: ConvInit = "torch"
    """Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); or the authors' code's
    (truncated normal of deviation 0.05 and 0.1, bias 0.1)."""
    primary_init: Literal["as-convolutions", "matrix-capsules"] = "as-convolutions"
    """Initial weights of the primary capsules: as conv_init says; or those of the matrix capsules' code, a truncated
    normal of deviation 0.5 for poses, bias 0, and of 3 for activations, bias -1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.primary_padding >= self.primary_kernel:  # capsules would see zeros only
            raise InputError(
                f"primary_padding must be below primary_kernel, {self.primary_kernel}, got {self.primary_padding}"
            )

    def grid(self, maps: tuple[int, int, int]) -> tuple[int, int, int]:
        """Types, height and width of the capsules.

        Args:
            maps: Of the backbone: channels, height, width.

        Raises:
            TooSmall: Maps that are smaller than the kernel.
        """
        windows = self.primary_kernel, self.primary_stride, self.primary_padding
        return self.primary_types, *_positions(maps[1:], *windows, "the primary capsules' kernel")

    def out_shape(self, maps: tuple[int, int, int]) -> CapsuleShape:
        """Shape of the capsules; arguments and errors as for :meth:`grid`."""
        types, height, width = grid = self.grid(maps)
        return CapsuleShape(types * height * width, self.primary_dim, None if self.grouping == "raster" else grid)

    def build(self, in_channels: int) -> PrimaryCapsules:
        """The module.

        Args:
            in_channels: Of the backbone's maps.
        """
        from torchcaps.nn import PrimaryCapsules

        return PrimaryCapsules(
            in_channels,
            self.primary_types,
            self.primary_dim,
            kernel_size=self.primary_kernel,
            stride=self.primary_stride,
            padding=self.primary_padding,
            activation=self.primary_activation,
            grouping=self.grouping,
            separate_convs=self.primary_separate_convs,
            output=self.primary_output,
            norm=self.primary_norm,
            activations=self.primary_activations,
            depthwise=self.primary_depthwise,
            eps=self.squash_eps,
        )

    def start(self, primary: PrimaryCapsules) -> None:
        """Draw the weights of its convolutions."""
        from torchcaps.nn.convolutions import draw_convolutions

        if self.primary_init == "as-convolutions":
            draw_convolutions(primary, self.conv_init, std=0.1)
            return
        draw_convolutions(primary, "truncated-normal", std=0.5, bias=0.0)
        if primary.activity is not None:
            draw_convolutions(primary.activity, "truncated-normal", std=3.0, bias=-1.0)


# ---- after the layers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Described):
    """From the capsule of a class to the image, :class:`torchcaps.nn.Decoder`."""

    heading: ClassVar[str] = "Decoder"

    decoder_hidden: tuple[Width, ...] = (512, 1024)
    """Widths of the decoder's hidden layers."""
    decoder_channels: tuple[Width, ...] = ()
    """Channels of the maps that 3x3 convolutions make the image of, each map twice as large as the one before: 64,32,16
    suits colour images from 32 pixels on; the published networks have none."""
    decoder_init: ConvInit = "torch"
    """Initial weights of the decoder: torch's default; TensorFlow's and Keras's (Glorot uniform, bias 0); or the
    authors' code's (truncated normal of deviation 0.1, bias 0.1)."""
    decoder_mask: Literal["label-in-training", "label", "longest"] = "label-in-training"
    """Whose capsule is decoded: the label's in training and the longest at inference; always the label's (where there
    is one); or always the longest."""

    def build(self, num_classes: int, capsule_dim: int, in_shape: Sequence[int]) -> Decoder:
        """The module.

        Args:
            num_classes: J.
            capsule_dim: D.
            in_shape: C, H, W.
        """
        from torchcaps.nn import Decoder

        return Decoder(
            num_classes,
            capsule_dim,
            in_shape,
            self.decoder_hidden,
            channels=self.decoder_channels,
            init=self.decoder_init,
        )


@dataclass(frozen=True, kw_only=True)
class LossConfig(Described):
    """What is minimised: a loss of the class scores, and the reconstruction error with its weight."""

    heading: ClassVar[str] = "Loss"

    classification_loss: Literal["margin", "cross-entropy", "score-cross-entropy", "spread"] = "margin"
    """Margin loss; cross-entropy of the scores divided by their sum; of the softmax of the scores times a scale; or
    spread loss."""
    score_scale: PositiveFactor = 1.0
    """Factor on the scores in the cross-entropy of their softmax; where it starts, if it is learned."""
    learn_score_scale: bool = False
    """Learn that factor."""
    spread_margin: Share = 0.9
    """Spread loss: by how much the class that is present should be above the others, at the end."""
    spread_growth: Count | None = None
    """Spread loss: the margin grows from 0.2 to its end, m = 0.2 + (end - 0.2)·sigmoid(step/growth - 4), with this many
    steps for a unit; from the beginning it is at its end if none is given."""
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


# ---- networks


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Part):
    """A network: :class:`CapsNetConfig`, or one to compare it with."""

    choice: ClassVar[str] = "network"
    heading: ClassVar[str] = "Any network"
    has_capsules: ClassVar[bool] = False
    """Whether classes are capsules."""

    objects: Width = 1
    """Objects in an image, each of another class; with several, a capsule network decodes each from its own capsule
    alone, and a convolutional one has sigmoid cross-entropy instead of that of a softmax."""

    @property
    def decodes(self) -> bool:
        """Whether the network draws what it sees."""
        return False

    def build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        """The network.

        Args:
            in_shape: Images (C, H, W).
            num_classes: J.

        Raises:
            InputError: Images or classes that do not fit.
        """
        raise NotImplementedError


@register_part
@dataclass(frozen=True, kw_only=True)
class CapsNetConfig(NetworkConfig):
    """A capsule network: backbone → primary capsules → capsule layers → decoder, and its loss."""

    kind: ClassVar[str] = "CapsNet field"
    name: ClassVar[str] = "capsules"
    heading: ClassVar[str] = "Capsule network"
    has_capsules: ClassVar[bool] = True

    pixel_scale: PositiveFactor = 1.0
    """What pixels of 0..1 are multiplied with before the network: 255.0 for networks fed with unscaled pixels."""
    standardise: bool = False
    """Bring each image to mean 0 and deviation 1 before the network; the decoder still draws pixels of 0..1."""
    length_eps: Epsilon = 1e-7
    """Added under the root of the class capsules' lengths, which are the scores; as for squash_eps."""
    backbone: BackboneConfig = ConvBackboneConfig()
    """The network that makes feature maps of images."""
    primary: PrimaryConfig = PrimaryConfig()
    """From maps to the first capsules."""
    layers: tuple[LayerConfig, ...] = (DenseLayerConfig(transform=DenseConfig(weight_init="normal")),)
    """From capsules to capsules, one after the other; the last one has a capsule for each class."""
    decoder: DecoderConfig | None = DecoderConfig()
    """Reconstruct the image from the capsule of its class."""
    loss: LossConfig = LossConfig()
    """What is minimised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.standardise and self.pixel_scale != 1:
            raise InputError(f"pixel_scale must be 1 with standardise=True, which undoes it, got {self.pixel_scale}")
        last = self.layers[-1] if self.layers else None
        if not isinstance(last, DenseLayerConfig) or last.num_capsules is not None:
            raise InputError(
                "layers must end with a dense layer without num_capsules, which has a capsule for each class"
            )

    @property
    def decodes(self) -> bool:
        """See :class:`NetworkConfig`."""
        return self.decoder is not None

    def build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        """See :class:`NetworkConfig`."""
        from torchcaps.models.capsnet import CapsNet

        return CapsNet(self, in_shape, num_classes)


@register_part
@dataclass(frozen=True, kw_only=True)
class CNNConfig(_ConvolutionsConfig, NetworkConfig):
    """A convolutional network: (stem →) convolutions that keep the size, max pooling, dense layers, dropout."""

    kind: ClassVar[str] = "CNN field"
    name: ClassVar[str] = "cnn"
    heading: ClassVar[str] = "Baseline CNN"

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
        if not self.channels:
            raise InputError("channels must name at least one convolution, got none")

    def build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        """See :class:`NetworkConfig`."""
        from torchcaps.models.baseline import BaselineCNN

        return BaselineCNN(self, in_shape, num_classes)


@register_part
@dataclass(frozen=True, kw_only=True)
class PooledConfig(NetworkConfig):
    """A convolutional network: any backbone, pooling over the places of its maps, and a linear layer."""

    kind: ClassVar[str] = "CNN field"
    name: ClassVar[str] = "pooled"
    heading: ClassVar[str] = "Pooled CNN"

    backbone: BackboneConfig = StackBackboneConfig()
    """The network that makes feature maps of images."""
    pooling: Literal["average", "max", "none"] = "average"
    """What the linear layer sees: of each channel the mean or the largest value over all places; or all values."""

    def build(self, in_shape: Sequence[int], num_classes: int) -> Network:
        """See :class:`NetworkConfig`."""
        from torchcaps.models.baseline import PooledCNN

        return PooledCNN(self, in_shape, num_classes)


# ---- training


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
    """Images in each step, over all devices."""
    learning_rate: PositiveFactor = 1e-3
    """Adam's learning rate; the peak of the one-cycle schedule."""
    adam: Literal["torch", "tensorflow"] = "torch"
    """Where Adam adds its epsilon to the root of the second moment: after the correction of that moment's bias, as in
    the paper's algorithm and PyTorch, or before it, as in TensorFlow and Keras, where the epsilon of step t is
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
    """Training images are shifted by at most this many pixels in each direction."""
    crop: Pixels | None = None
    """Squares of this many pixels are cut out of the images: at random places in training, else at the centre; whole
    images if none is given."""
    flip: bool = False
    """Half of the training images are mirrored left to right."""
    brightness: Share = 0.0
    """The pixels (0..1) of each training image are made brighter or darker by at most this."""
    contrast: Share = 0.0
    """The contrast of each training image is multiplied by a factor between 1 − this and 1 + this, about the mean of
    each channel."""
    max_rotation: Degrees = 0.0
    """Training images are rotated by at most this many degrees in either direction."""
    max_scaling: ShareBelowOne = 0.0
    """Training images are scaled by a factor between 1 − this and 1 + this."""
    fill: Fill = "zeros"
    """What comes in from outside of a training image that is shifted, rotated or scaled: zeros, or the nearest pixel of
    its edge. One's own images (folder:PATH, npz:PATH) have their edge, unless another is chosen."""
    select: Literal["accuracy", "loss"] = "accuracy"
    """What chooses the best epoch on the validation images (the loss breaks ties of the accuracy)."""
    validation_size: Count | None = None
    """Images kept from training to choose the best epoch; the data set's default if none is given."""
    validation: Held = "random"
    """Which of the training images these are: a random choice with each class's share, or the first or the last ones in
    the order of the data set."""
    limit_train: Count | None = None
    """Train on this many images, the first ones; on all if none is given."""
    limit_test: Count | None = None
    """Test on this many images, the first ones; on all if none is given."""
