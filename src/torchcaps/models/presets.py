"""The published networks, each under its own name, as its source has it, quirks included.

A new one is a call of :func:`register_preset`; it is then listed, built, trained and tested like the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

# They register what presets are made of.
import torchcaps.models.capsnet
import torchcaps.models.cnn  # noqa: F401
from torchcaps.checks import checked
from torchcaps.errors import InputError, shown
from torchcaps.models.building import build_network
from torchcaps.models.network import Network
from torchcaps.parts import Registry, Tree, complete, find, flat, override
from torchcaps.ranges import image_shape

SIDE = 64
"""Pixels of a side, up to which a network that grows has the strides of its preset along this side."""
STRIDES: Final = {"stem_strides": "stem_strides_across", "stack_strides": "stack_strides_across"}
"""Strides of a backbone that larger images change: those along both sides, or down, and those across."""
RECOMMENDED: Final = ("first", "compact", "compact-shared")
"""Presets to start with, listed before the published networks."""
FITTED: Final = ("stem_strides", "stack_strides", "stem_strides_across", "stack_strides_across", "decoder_channels")
"""Options that larger images change, where nobody gave them."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named network with the recipe of its source."""

    name: str
    """What the user types."""
    description: str
    """What is particular about it, in a sentence or two."""
    source: str = "unpublished"
    """Where it was published."""
    network: Tree
    """The complete tree of the network's parts."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How its source trains it; of the recipe's other settings, the defaults are meant."""
    data: str = "mnist"
    """The data set of its source."""
    in_shape: tuple[int, int, int] = (1, 28, 28)
    """Its images (C, H, W), as the network sees them: cut, where the recipe cuts them."""
    num_classes: int = 10
    """Their classes."""
    published: str = "–"
    """The result that its source reports."""
    grows: bool = False
    """Whether its strides grow with its images; see :func:`fit_to_images`."""
    base: str | None = None
    """The preset that it started from."""

    @property
    def has_capsules(self) -> bool:
        """Whether classes are capsules."""
        return bool(getattr(find("network", self.network["name"]), "has_capsules", False))


_PRESETS: Registry[Preset] = Registry("preset")


@checked
def register_preset(
    name: str,
    description: str,
    *,
    base: str | None = None,
    network: Mapping[str, Any] = {},
    recipe: Mapping[str, Any] = {},
    **others: Any,
) -> Preset:
    """Add a preset, so that it is listed, built and tested.

    Args:
        name: What the user types.
        description: What is particular about it, in a sentence or two.
        base: A preset to start from: where nothing else is given, its values stand, but not its published result.
        network: Options of the network and its parts by their names; without a base also ``"name"``, the network
            itself: ``"capsules"`` if it is not given, ``"cnn"``, ``"pooled"`` or one of your own.
        recipe: Settings of the recipe by their names, where they are not the usual ones.
        **others: ``source``, ``data``, ``in_shape``, ``num_classes``, ``published`` and ``grows``, as :class:`Preset`
            has them.

    Raises:
        InputError: The name is taken, there is no such base or option (the nearest name is given), or a value does not
            fit its option.
    """
    changes = dict(network)
    if base is None:
        tree = complete("network", changes.pop("name", "capsules"))
        start = Preset(name=name, description=description, network=tree)
    else:
        start = dataclasses.replace(get_preset(base), published=Preset.published)
    preset = dataclasses.replace(
        start,
        name=name,
        description=description,
        network=override("network", start.network, changes, f"option of {name}"),
        recipe={**start.recipe, **recipe},
        base=base,
        **others,
    )
    _PRESETS.add(name, preset)
    return preset


def list_presets() -> list[str]:
    """Return the names of all presets: `RECOMMENDED`, then the rest in the order of registration."""
    return [*RECOMMENDED, *(name for name in _PRESETS if name not in RECOMMENDED)]


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: There is none (the nearest name is given), or ``name`` is no string.
    """
    if not isinstance(name, str):
        raise InputError(f'preset must be a name such as "sabour2017", got {shown(name)}')
    return _PRESETS[name]


def create_model(
    preset: str, in_shape: Sequence[int] | None = None, num_classes: int | None = None, **overrides: Any
) -> Network:
    """Build a published network for images of any size.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        in_shape: Images (C, H, W); those of the preset's source if None: (1, 28, 28) for MNIST's. For images with a
            side of more than 64 pixels, compact and its relatives have larger strides along this side and a decoder
            that ends in convolutions, unless ``overrides`` say otherwise.
        num_classes: J; that of the preset's source if None: 10 for MNIST's.
        **overrides: Other values for options of the network and its parts, by their own names: ``num_iterations=2``,
            ``routing="dynamic"``, ``layers=(…)``. A module as ``backbone`` stands in place of the preset's.

    Returns:
        A :class:`~torchcaps.CapsNet`, or a :class:`~torchcaps.models.BaselineCNN` for the CNN presets; its weights are
        drawn from torch's random generator.

    Raises:
        InputError: An unknown preset or option (the nearest name is given), a value that does not fit its option,
            images too small for the convolutions, or a network that does not fit into memory.

    Examples:
        >>> from torchcaps import create_model
        >>> model = create_model("sabour2017", in_shape=(3, 32, 32), num_iterations=2)
        >>> model.in_shape, model.num_classes
        ((3, 32, 32), 10)
    """
    chosen = get_preset(preset)
    tree = override("network", chosen.network, overrides, f"option of {preset}")
    shape = chosen.in_shape if in_shape is None else image_shape(in_shape)
    return build_network(
        override("network", tree, fit_to_images(chosen, tree, shape, overrides)),
        shape,
        chosen.num_classes if num_classes is None else num_classes,
    )


def fit_to_images(preset: Preset, tree: Tree, in_shape: tuple[int, int, int], given: Container[str]) -> Tree:
    """Values for options of a network of our own, so that it stays small where its images are larger than `SIDE`.

    Each time that a side is twice as long, the smallest stride of the backbone along this side, the first of equal
    ones, is doubled, so that maps have as many places. For each doubling of the longer side the decoder ends in one
    more convolution, and in two to begin with. Options that are not the preset's, and those that are ``given``, stay.
    """
    down, across = (max(0, math.ceil(math.log2(side / SIDE))) for side in in_shape[1:])
    if not preset.grows or down == across == 0:
        return {}
    values, usual = flat(tree), flat(preset.network)
    free = {name for name in FITTED if name in usual and name not in given and values.get(name) == usual[name]}
    fitted: Tree = {}
    for strides, strides_across in STRIDES.items():
        if strides in free and usual[strides]:
            if down:
                fitted[strides] = _larger(usual[strides], down)
            if strides_across in free and across != down:
                fitted[strides_across] = _larger(usual[strides], across)
    if "decoder_channels" in free:
        fitted["decoder_channels"] = (64,) * (max(down, across) + 1) + (32, 16)
    return fitted


def _larger(strides: Sequence[int], doublings: int) -> tuple[int, ...]:
    larger = list(strides)
    for _ in range(doublings):
        larger[larger.index(min(larger))] *= 2
    return tuple(larger)


@checked
def load_pretrained(source: str | Path = "compact", *, device: torch.device | str = "cpu", **download: Any) -> Network:
    """Read a trained network of any kind, in evaluation mode; nothing in its files is executed.

    Args:
        source: A folder that ``save_pretrained`` wrote; the name of a network that comes with torchcaps,
            ``"compact"``; or a repository of the Hugging Face hub such as ``"someone/capsnet-mnist"``.
        device: Where to put the network.
        **download: For the hub, as for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: As for :meth:`torchcaps.CapsNet.from_pretrained`.

    Examples:
        >>> from torchcaps import create_model, load_pretrained
        >>> create_model("compact").save_pretrained("my-network")
        >>> load_pretrained("my-network").in_shape
        (1, 28, 28)
    """
    return Network.from_pretrained(source, device=device, **download)


# ---- the table: a row of values for a part or two; what is not said has its default
# fmt: off

register_preset(
    "sabour2017",
    "The paper's network. What the paper leaves open: W starts as in the authors' code, the learning rate is constant, "
    "training lasts 50 epochs.",
    source="Sabour, Frosst, Hinton: Dynamic Routing Between Capsules, 2017, arXiv:1710.09829",
    network={"weight_init": "truncated-normal", "weight_std": 0.1},
    recipe={"epochs": 50, "max_shift": 2},
    published="0.25 % ± 0.005 test error (MNIST)",
)
register_preset(
    "sabour2017-code",
    "The authors' released code: biases of 0.1, primary capsules from one routing pass, a margin loss 20 times smaller "
    "relative to the reconstruction, a decaying learning rate, the decoder always masked by the label. 700 epochs of "
    "MNIST are its 300,000 steps. Its training set holds all 25 shifts of every image; here the shift is drawn at "
    "random within the same ±2 px.",
    source="the authors' code, TensorFlow, 2018",
    network={
        "conv_init": "truncated-normal", "primary_output": "routed",
        "weight_init": "truncated-normal", "weight_std": 0.1, "capsule_bias": True,
        "squash_eps": 1e-24, "length_eps": 1e-24,
        "margin_scale": 0.5, "margin_over_classes": "mean",
        "decoder_init": "truncated-normal", "decoder_mask": "label",
    },
    recipe={
        "epochs": 700, "adam": "tensorflow", "schedule": "decay-by-step", "min_learning_rate": 1e-6, "max_shift": 2,
    },
)
register_preset(
    "tf-notebook",
    "ReLU on the primary convolution and two routing iterations. No component of a primary capsule is negative before "
    "the squash; the mean reconstruction error has the paper's weight, so that it is 784 times weaker. Its validation "
    "images are the first 5,000; here they are chosen at random, unless validation is first.",
    source="Géron: TensorFlow notebook on capsule networks, 2017",
    network={
        "conv_init": "glorot", "primary_activation": "relu",
        "weight_init": "normal", "weight_std": 0.1, "num_iterations": 2,
        "decoder_init": "glorot", "reconstruction_over_pixels": "mean",
    },
    recipe={"epochs": 10, "batch_size": 50, "adam": "tensorflow", "select": "loss"},
    published="99.53 % test accuracy after 10 epochs that went on from an earlier checkpoint (MNIST)",
)
register_preset(
    "keras-tutorial",
    "Softmax over the input capsules, four iterations, no decoder. Pixels are 0..255, ReLU follows both convolutions, "
    "primary capsules have length one without squash, the loss is the cross-entropy of the lengths divided by their "
    "sum; trained one epoch on the first 1,000 images, tested on the first 1,000.",
    source='Keras tutorial, "Capsule Networks Part II: Dynamic Routing", 2023',
    network={
        "pixel_scale": 255.0, "conv_init": "glorot", "primary_activation": "relu", "primary_output": "unit",
        "weight_init": "fan-in", "num_iterations": 4, "softmax_over": "inputs",
        "classification_loss": "cross-entropy", "decoder": False,
    },
    recipe={
        "epochs": 1, "batch_size": 10, "adam": "tensorflow", "adam_eps": 1e-7, "limit_train": 1000, "limit_test": 1000,
    },
    published="softmax over outputs is significantly worse in this set-up",
)
register_preset(
    "torch-notebook",
    "No ReLU after the first convolution; eight separate primary convolutions, flattened and cut in eights, so that a "
    "capsule holds neighbouring locations; W of deviation 1; softmax over the input capsules; margins not squared.",
    source="PyTorch notebook, after gram-ai's code",
    network={
        "conv_activation": "none", "primary_separate_convs": True, "grouping": "raster",
        "weight_init": "normal", "weight_std": 1.0, "softmax_over": "inputs", "squash_eps": 1e-24, "length_eps": 1e-24,
        "margin_power": 1, "decoder_mask": "label",
    },
    recipe={"batch_size": 100},
)
register_preset(
    "torch-tutorial",
    "One primary convolution, flattened and cut in eights. So a capsule holds neighbouring locations; W has the "
    "deviation 0.01; gradients flow through the last weighted sum only. Its squash divides by ‖s‖ + 1e-8; here by "
    "√(‖s‖² + 1e-16), which makes a capsule longer by 5e-9 at most (at ‖s‖ = 1).",
    source="PyTorch article, after XifengGuo's code",
    network={
        "grouping": "raster",
        "weight_init": "normal", "weight_std": 0.01, "stop_gradient": True, "squash_eps": 1e-16, "length_eps": 1e-24,
        "reconstruction_weight": 0.392, "reconstruction_over_pixels": "mean",
    },
    recipe={"epochs": 50, "batch_size": 100, "schedule": "decay-by-epoch", "decay": 0.9, "max_shift": 2},
    published="0.34 % ± 0.029 test error after 50 epochs (MNIST)",
)

# Small networks of our own.
register_preset(
    "first",
    "A first network to train and look at: sabour2017 with 32 channels and 8 types of primary capsules. Its "
    "reconstruction has 40 times the paper's weight, so that the components of a pose are seen after a minute.",
    base="sabour2017",
    source="torchcaps: sabour2017, narrowed, chosen by experiment",
    network={"conv_channels": 32, "primary_types": 8, "weight_init": "balanced", "reconstruction_weight": 0.02},
    recipe={
        "epochs": 20, "batch_size": 32, "schedule": "one-cycle", "learning_rate": 3e-3,
        "max_rotation": 10.0, "max_scaling": 0.1,
    },
    data="digits",
    published="99.35 ± 0.16 % test accuracy (digits)",
)
register_preset(
    "compact",
    "A small network of our own, with capsules and dynamic routing throughout: four normalised 3×3 convolutions in "
    "place of sabour2017's first one, a fifth into a quarter of its capsule types, half of its decoder. It was chosen "
    "among nine networks and recipes whose errors on MNIST's test images were seen, so its own error there may be "
    "slightly too low.",
    source="torchcaps: a small network, chosen by experiment",
    grows=True,
    network={
        "stem_channels": (32, 32, 64), "stem_strides": (1, 1, 2), "conv_channels": 64, "conv_kernel": 3,
        "conv_norm": "channel", "conv_dropout": 0.1,
        "primary_types": 8, "primary_kernel": 4, "primary_stride": 1,
        "weight_init": "truncated-normal", "weight_std": 0.1,
        "decoder_hidden": (256, 512),
    },
    recipe={
        "schedule": "one-cycle", "learning_rate": 3e-3,
        "max_shift": 2, "max_rotation": 10.0, "max_scaling": 0.1,
    },
    published="99.67 ± 0.03 % test accuracy (MNIST)",
)
register_preset(
    "compact-shared",
    "A small network of our own that learns from few images: four 3×3 convolutions with batch normalisation, one "
    "matrix for each class, which all its input capsules share (as in aff-capsnet), uniform coupling, cross-entropy of "
    "the lengths times a learned scale, and a reconstruction that counts for as much, so that it has the colours of "
    "the image.",
    source="torchcaps: a small network for images of one's own, chosen by experiment",
    grows=True,
    network={
        "backbone": "stack", "stack_channels": (32, 64, 64, 64), "stack_kernels": (3, 3, 3, 3),
        "stack_strides": (1, 2, 1, 2), "stack_padding": 1, "stack_norm": "batch",
        "primary_types": 8, "primary_dim": 16, "primary_kernel": 3, "primary_padding": 1, "primary_norm": "batch",
        "transform": "shared", "weight_init": "balanced", "num_iterations": 1,
        "classification_loss": "score-cross-entropy", "score_scale": 10.0, "learn_score_scale": True,
        "decoder_hidden": (256, 512), "reconstruction_weight": 60.0, "reconstruction_over_pixels": "mean",
    },
    recipe={
        "schedule": "one-cycle", "learning_rate": 8e-3,
        "max_shift": 4, "max_rotation": 10.0, "max_scaling": 0.2,
    },
)
register_preset(
    "sequences",
    "A small network of our own for sequences of any lengths: two convolutions along the places, a layer of capsules "
    "at each, and class capsules with one matrix for each type at all places. Padded places, which are NaN, change "
    "nothing.",
    source="torchcaps: a small network for sequences",
    network={
        "backbone": "sequence", "sequence_channels": (32, 32),
        "primary_capsules": "sequence", "primary_types": 8, "primary_dim": 8,
        "share_positions": True, "weight_init": "balanced", "decoder": False,
    },
    recipe={"batch_size": 16, "schedule": "one-cycle", "learning_rate": 1e-2},
    data="aeon:JapaneseVowels", in_shape=(12, 1, 29), num_classes=9,
)
register_preset(
    "compact-deep",
    "compact with a layer of capsules on a map between its primary and its class capsules: three capsule layers, of "
    "which the middle one has 8 types and looks through windows of 3x3. Every layer starts balanced.",
    base="compact",
    network={
        "layers": [
            {"name": "conv", "layer_types": 8, "capsule_dim": 8, "layer_stride": 2, "layer_padding": 1},
            {"name": "dense"},
        ],
        "weight_init": "balanced",
    },
)

# Other routings, each as its source has it.
register_preset(
    "efficient-capsnet-mnist",
    "16 primary capsules and self-attention routing without iterations. Four convolutions with batch normalisation "
    "after each ReLU, a depthwise convolution over the whole map, a squash by 1 - e^-length. Pixels are divided by "
    "256; the decoder draws pixels of 0..1 and starts as Keras's Dense does. The source turns half of the images by up "
    "to 30 degrees, shifts, squeezes and partly erases them, and keeps the epoch with the best error on the test "
    "images; here images are turned, shifted and scaled, and validation images choose.",
    source="Mazzia, Salvetti, Chiaberge: Efficient-CapsNet, 2021, arXiv:2101.12491, and its code",
    network={
        "pixel_scale": 255 / 256,
        "backbone": "stack", "stack_channels": (32, 64, 64, 128), "stack_kernels": (5, 3, 3, 3),
        "stack_strides": (1, 1, 1, 2), "stack_norm": "batch-after", "stack_init": "he",
        "conv_init": "glorot", "primary_types": 16, "primary_kernel": 9, "primary_stride": 1,
        "primary_depthwise": True, "primary_output": "exponential",
        "routing": "self-attention", "weight_init": "truncated-normal",
        "weight_std": 0.044937,  # Keras's he_normal of the shape (10, 16, 8, 16), which it takes for a fan of 1,280
        "decoder_init": "glorot", "reconstruction_weight": 0.392, "reconstruction_over_pixels": "mean",
    },
    recipe={
        "epochs": 150, "batch_size": 16, "learning_rate": 5e-4, "adam": "tensorflow", "adam_eps": 1e-7,
        "schedule": "decay-by-epoch", "decay": 0.97, "min_learning_rate": 5e-5,
        "max_shift": 2, "max_rotation": 15.0, "max_scaling": 0.1,
    },
    published="99.74 % test accuracy, the best epoch on the test images (MNIST)",
)
register_preset(
    "hinton2018-paper",
    "Matrix capsules with EM routing, the small network (A=64, B=8, C=D=16): two layers on maps whose output capsules "
    "compete over types and positions, class capsules whose weights are the same at all positions and which are told "
    "where a capsule stands, spread loss with a growing margin, no decoder. What the paper leaves open is Gritzman's: "
    "deviation 1 of the weights, costs times 100·J/I. Both β start at zero; there is no weight decay (the source has "
    "2e-7).",
    source="Hinton, Sabour, Frosst: Matrix capsules with EM routing, ICLR 2018; Gritzman 2019, arXiv:1907.00652",
    network={
        "standardise": True, "backbone": "stack", "stack_init": "truncated-normal",
        "primary_types": 8, "primary_dim": 16, "primary_kernel": 1, "primary_stride": 1, "primary_output": "linear",
        "primary_activations": True,
        "layers": [
            {"name": "conv", "layer_stride": 2, "compete_over": "types-and-positions"},
            {"name": "conv", "compete_over": "types-and-positions"},
            {"name": "dense", "share_positions": True, "coordinates": "centres"},
        ],
        "capsule_dim": 16, "transform": "matrix", "weight_init": "truncated-normal", "weight_std": 1.0, "routing": "em",
        "classification_loss": "spread", "spread_growth": 50_000, "decoder": False,
    },
    recipe={
        "epochs": 50, "batch_size": 64, "learning_rate": 3e-3, "schedule": "decay-by-step", "decay_steps": 20_000,
        "crop": 32, "brightness": 63 / 255, "contrast": 0.8,
    },
    data="smallnorb", in_shape=(2, 32, 32), num_classes=5,
    published="2.2 % test error (smallNORB)",
)
register_preset(
    "hinton2018-code",
    "The same network as its authors' released code routes it, which is another algorithm: the centres move by nine "
    "tenths, biases take the place of the costs, and the class layer has a quarter of the inverse temperature. Its own "
    "deviations of the weights, and coordinates in hundredths; these are those of the last map, where the code "
    "averages them through the layers. The biases of the primary capsules are learned, which in the code are 0 and, of "
    "activations, -1.",
    base="hinton2018-paper",
    source="the authors' code, TensorFlow, google-research/google-research, capsule_em",
    network={
        "primary_init": "matrix-capsules",
        "layers": [
            {"routing": {"name": "em-code", "on_map": True}, "weight_std": 0.3},
            {"routing": {"name": "em-code", "on_map": True}, "weight_std": 0.3},
            {"routing": {"name": "em-code", "final_beta": 0.0025}, "weight_std": 0.01, "coordinates": "hundredths"},
        ],
    },
    recipe={"learning_rate": 0.01},
    published="1.8 % test error with 32 capsule types a layer, as its README says (smallNORB)",
)
register_preset(
    "vb2020",
    "The same shape with variational Bayes routing: batch normalisation after the convolution, of the primary "
    "capsules, and of the output of each routing; coordinates in tenths; cross-entropy of the softmax of the "
    "activations, which are 0..1. The released code floors the sum of densities, which is an error for poses of 16 "
    "components; here it is normalised as the paper has it.",
    base="hinton2018-paper",
    source="De Sousa Ribeiro, Leontidis, Kollias: Capsule routing via variational Bayes, AAAI 2020, arXiv:1905.11455",
    network={
        "stack_norm": "batch", "stack_init": "torch", "primary_norm": "batch-learned",
        "weight_init": "balanced", "routing": "vb", "coordinates": "tenths",
        "classification_loss": "score-cross-entropy",
    },
    recipe={"epochs": 350, "batch_size": 128, "learning_rate": 1e-3, "schedule": "constant"},
    published="1.6 ± 0.06 % test error (smallNORB)",
)
register_preset(
    "hahn2019-smallnet",
    "Self-routing without agreement: batch normalisation of the convolutions and of the poses, one layer on a map, and "
    "class capsules that are a mixture of linear classifiers: they have activations, and no poses of their own. The "
    "loss is the negative logarithm of the activation of the class, since activations sum to one.",
    source="Hahn, Pyeon, Kim: Self-routing capsule networks, NeurIPS 2019, and its code",
    network={
        "standardise": True,
        "backbone": "stack", "stack_channels": (256,), "stack_kernels": (7,), "stack_padding": 1, "stack_norm": "batch",
        "primary_types": 16, "primary_dim": 16, "primary_kernel": 5, "primary_stride": 1, "primary_padding": 1,
        "primary_output": "linear", "primary_norm": "batch-learned", "primary_activations": True,
        "layers": [
            {"name": "conv", "layer_types": 16, "layer_stride": 2, "layer_padding": 1, "pose_norm": True,
             "weight_init": "fan-in"},
            {"name": "dense", "transform": "identity"},
        ],
        "routing": "self", "classification_loss": "cross-entropy", "decoder": False,
    },
    recipe={"epochs": 200, "batch_size": 64, "crop": 32, "brightness": 0.25, "contrast": 0.5},
    data="smallnorb", in_shape=(2, 32, 32), num_classes=5,
)
register_preset(
    "aff-capsnet",
    "sabour2017 without routing and with one matrix for each class. All input capsules share it; digits are moved on a "
    "canvas of 40x40, and tests are on affinely transformed ones.",
    base="sabour2017",
    source="Gu, Tresp: Improving the robustness of capsule networks to image affine transformations, CVPR 2020, "
    "arXiv:1911.07968",
    network={"transform": "shared", "weight_init": "balanced", "num_iterations": 1},
    recipe={"max_shift": 0},
    data="affnist", in_shape=(1, 40, 40),
    published="93.21 % test accuracy (affNIST)",
)

# The paper's network on its other data sets.
register_preset(
    "sabour2017-multimnist",
    "sabour2017 for two overlapping digits: both are classes of the margin loss, each is reconstructed from its own "
    "capsule, an image is right only if the two longest capsules are its digits; 11.36 M parameters as the paper says. "
    "The paper stretches the decay of the learning rate ten times, its start and factor are those of the authors' "
    "code; it leaves open how long it trained.",
    base="sabour2017",
    network={"objects": 2},
    recipe={
        "schedule": "decay-by-step", "decay_steps": 20_000, "min_learning_rate": 1e-6,
        "max_shift": 0,  # the digits are shifted where they are put together
    },
    data="multimnist", in_shape=(1, 36, 36),
    published="5.2 % test error (MultiMNIST)",
)
register_preset(
    "sabour2017-cifar10",
    'sabour2017 for crops of CIFAR-10: 64 capsule types and a "none of the above" in the routing softmax. Crops, '
    "mirroring, brightness, contrast and standardisation are those of the authors' code; here pixels stay in 0..1 "
    "before they are standardised. The paper does not say whether it reconstructs, nor for how long it trained: the "
    "authors' sample command has no decoder, padded convolutions and 600,000 steps; here the decoder draws the pixels "
    "before standardisation. The published error is that of 7 networks together.",
    base="sabour2017",
    network={"standardise": True, "primary_types": 64, "leaky": True},
    recipe={"max_shift": 0, "crop": 24, "flip": True, "brightness": 63 / 255, "contrast": 0.8},
    data="cifar10", in_shape=(3, 24, 24),
    published="10.6 % test error, ensemble of 7 (CIFAR-10)",
)
register_preset(
    "sabour2017-smallnorb",
    "sabour2017 for both images of smallNORB's cameras, reduced to 48x48: random crops of 32x32 in training, the "
    "centre at the test. Brightness, contrast and standardisation, of which the paper says nothing, are those of the "
    "authors' code; here pixels stay in 0..1 before they are standardised, and the decoder draws them as they were "
    "before it. The length of the training is left open.",
    base="sabour2017",
    network={"standardise": True},
    recipe={"max_shift": 0, "crop": 32, "brightness": 63 / 255, "contrast": 0.8},
    data="smallnorb", in_shape=(2, 32, 32), num_classes=5,
    published="2.7 % test error (smallNORB)",
)
register_preset(
    "sabour2017-svhn",
    "sabour2017, smaller, for the 73,257 training images of SVHN: 64 channels, 16 types of primary capsules of 6 "
    "components, class capsules of 8. Augmentation, decoder and length of training are left open: none, as for MNIST, "
    "and 50 epochs.",
    base="sabour2017",
    network={"conv_channels": 64, "primary_types": 16, "primary_dim": 6, "capsule_dim": 8},
    recipe={"max_shift": 0},
    data="svhn", in_shape=(3, 32, 32),
    published="4.3 % test error (SVHN)",
)

# Convolutional networks to compare with.
register_preset(
    "baseline-cnn",
    "The paper's convolutional baseline, 35.4 M parameters: three convolutions of stride 1 that keep the size, two "
    "dense layers, dropout, softmax cross-entropy.",
    source="Sabour, Frosst, Hinton 2017, section 5, arXiv:1710.09829",
    network={"name": "cnn", "channels": (256, 256, 128), "kernel": 5, "hidden": (328, 192), "dropout": 0.5},
    recipe={"epochs": 50, "max_shift": 2},
    published="0.39 % test error (MNIST)",
)
register_preset(
    "baseline-cnn-multimnist",
    "The paper's convolutional baseline for two overlapping digits: two convolutions of stride 1, each followed by 2x2 "
    "max pooling, one dense layer, sigmoid cross-entropy. Only convolutions that keep the size have the 24.56 M "
    "parameters that the paper says (on 36x36). It searched for a decay of the learning rate and does not give it: "
    "here there is none, and no dropout, which it does not mention.",
    source="Sabour, Frosst, Hinton 2017, section 6, arXiv:1710.09829",
    network={
        "name": "cnn", "objects": 2, "channels": (512, 256), "first_kernel": 9, "kernel": 5, "pool": 2,
        "hidden": (1024,), "dropout": 0.0,
    },
    recipe={"epochs": 50},
    data="multimnist", in_shape=(1, 36, 36),
    published="8.1 % test error (MultiMNIST)",
)
register_preset(
    "cnn-matched",
    "A convolutional network of our own with as many parameters as sabour2017 on MNIST, 8.2 M to 0.03 %: three "
    "convolutions, each followed by 2x2 max pooling, one dense layer, dropout, softmax cross-entropy.",
    source="torchcaps: a CNN with as many parameters as sabour2017",
    network={"name": "cnn", "channels": (64, 128, 256), "pool": 2, "hidden": (1750,)},
    recipe={"epochs": 50, "max_shift": 2},
)
register_preset(
    "cnn-pooled",
    "A convolutional network of our own: four convolutions with batch normalisation, the mean of each channel, and a "
    "linear layer. With another backbone, one of your own too, it is what a capsule network of that backbone is "
    "compared with.",
    source="torchcaps: any backbone without capsules",
    network={
        "name": "pooled", "stack_channels": (32, 64, 64, 128), "stack_kernels": (5, 3, 3, 3),
        "stack_strides": (2, 2, 1, 2), "stack_padding": 1, "stack_norm": "batch",
    },
    recipe={"schedule": "one-cycle", "learning_rate": 3e-3, "max_shift": 2},
)

# The variants that the sources compare.
for rounds, words in enumerate((
    "no routing: the plain sum of the votes, not squashed", "one routing iteration: uniform coupling",
    "two routing iterations", "three routing iterations",
)):
    register_preset(
        f"keras-tutorial-r{rounds}", f"keras-tutorial with {words}.",
        base="keras-tutorial", network={"num_iterations": rounds},
    )
register_preset(
    "keras-tutorial-outputs",
    "keras-tutorial with the softmax over the output capsules, as in the paper.",
    base="keras-tutorial", network={"softmax_over": "outputs"},
    published="significantly worse than softmax over inputs",
)
for row, words, changes, error in (
    ("r1", "1 iteration, no decoder", {"num_iterations": 1, "decoder": False}, 0.34),
    ("r1-recon", "1 iteration, with decoder", {"num_iterations": 1}, 0.29),
    ("r3", "3 iterations, no decoder", {"decoder": False}, 0.35),
):
    register_preset(
        f"sabour2017-{row}", f"sabour2017 as in the paper's table 1: {words}.",
        base="sabour2017", network=changes, published=f"{error} % test error (MNIST)",
    )
