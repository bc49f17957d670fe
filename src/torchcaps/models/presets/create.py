"""Build the network of a preset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torchcaps.models.branches import BranchedNetwork
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.cnn import BaselineCNN, PooledCNN
from torchcaps.models.network import Network
from torchcaps.models.planning import build_network
from torchcaps.models.presets.large_images import fit_to_images
from torchcaps.models.presets.registry import get_preset
from torchcaps.models.segmentation_capsules import PixelCapsules
from torchcaps.models.slots import SlotNetwork
from torchcaps.models.unet import UNet
from torchcaps.parts import override
from torchcaps.ranges import spatial_shape
from torchcaps.tasks import find_task

# Presets by the class of their network, for type checkers; a test compares them with the networks.
# fmt: off
CapsNetName = Literal[
    "first", "compact", "compact-shared", "compact-deep", "sabour2017", "sabour2017-code", "sabour2017-multimnist",
    "sabour2017-cifar10", "sabour2017-smallnorb", "sabour2017-svhn", "sabour2017-r1", "sabour2017-r1-recon",
    "sabour2017-r3", "tf-notebook", "keras-tutorial", "keras-tutorial-r0", "keras-tutorial-r1", "keras-tutorial-r2",
    "keras-tutorial-r3", "keras-tutorial-outputs", "torch-notebook", "torch-tutorial", "sequences",
    "efficient-capsnet-mnist", "hinton2018-paper", "hinton2018-code", "vb2020", "hahn2019-smallnet", "aff-capsnet",
]
BaselineName = Literal["baseline-cnn", "baseline-cnn-multimnist", "cnn-matched"]
PooledCNNName = Literal["cnn-pooled"]
PixelsName = Literal["segcaps", "ucaps3d"]
UNetName = Literal["unet-twin"]
HVCName = Literal["hvc2021-equal", "hvc2021-learned", "hvc2021-random"]
SlotsName = Literal["slots-small", "slots2020"]
_Shape = Sequence[int] | None
_Int = int | None


@overload
def create_model(preset: CapsNetName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> CapsNet: ...
@overload
def create_model(preset: BaselineName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> BaselineCNN: ...
@overload
def create_model(preset: PooledCNNName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> PooledCNN: ...
@overload
def create_model(preset: PixelsName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> PixelCapsules: ...
@overload
def create_model(preset: UNetName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> UNet: ...
@overload
def create_model(preset: HVCName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> BranchedNetwork: ...
@overload
def create_model(preset: SlotsName, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> SlotNetwork: ...
@overload
def create_model(preset: str, in_shape: _Shape = ..., num_classes: _Int = ..., **o: Any) -> Network: ...
# fmt: on
def create_model(
    preset: str, in_shape: Sequence[int] | None = None, num_classes: int | None = None, **overrides: Any
) -> Network:
    """Build the network of a preset for images of any size.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        in_shape: Shape of an image (C, H, W). None: that of the preset's source, (1, 28, 28) for MNIST. If a side is
            longer than 64 pixels, compact and its variants have larger strides along this side and a decoder that ends
            in convolutions, unless ``overrides`` set these options.
        num_classes: Number of classes (J). None: that of the preset's source, 10 for MNIST.
        **overrides: Options of the network and its parts by their names: ``num_iterations=2``, ``routing="dynamic"``,
            ``layers=(…)``. A module as ``backbone`` replaces the preset's backbone.

    Returns:
        A :class:`~torchcaps.CapsNet`; for presets of CNNs and of networks for pixels a network of their classes. Its
        weights are drawn from torch's random generator.

    Raises:
        InputError: The preset or an option is unknown (the message suggests the nearest name), a value does not fit its
            option, the images are too small for the convolutions, or the network does not fit into memory.

    Examples:
        >>> from torchcaps import create_model
        >>> model = create_model("sabour2017", in_shape=(3, 32, 32), num_iterations=2)
        >>> model.in_shape, model.num_classes
        ((3, 32, 32), 10)
    """
    chosen = get_preset(preset)
    tree = override("network", chosen.network, overrides, f"option of {preset}")
    axes = find_task(tree.get("task")).spatial_axes
    shape = chosen.in_shape if in_shape is None else spatial_shape(in_shape, axes)
    return build_network(
        override("network", tree, fit_to_images(chosen, tree, shape, overrides)),
        shape,
        chosen.num_classes if num_classes is None else num_classes,
    )
