"""The table of presets: a line for the options of one or two parts; other options have their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

# These modules register the networks of the presets.
import torchcaps.models.branches
import torchcaps.models.capsnet
import torchcaps.models.cnn
import torchcaps.models.segmentation_capsules
import torchcaps.models.slots
import torchcaps.models.unet  # noqa: F401
from torchcaps.models.presets.registry import register_preset

# fmt: off

register_preset(
    "sabour2017",
    "The paper's network. The paper does not give three choices: here W starts as in the authors' code, the learning "
    "rate is constant, and training lasts 50 epochs.",
    source="Sabour, Frosst, Hinton: Dynamic Routing Between Capsules, 2017, arXiv:1710.09829",
    network={"weight_init": "truncated-normal", "weight_std": 0.1},
    recipe={"epochs": 50, "max_shift": 2},
    published="0.25 % ± 0.005 test error (MNIST)",
)
register_preset(
    "sabour2017-code",
    "The authors' released code: biases of 0.1, primary capsules from one routing pass, a margin loss 20 times smaller "
    "relative to the reconstruction, a decaying learning rate, and a decoder that always decodes the label's capsule. "
    "700 epochs of MNIST are its 300,000 steps. Its training set holds all 25 shifts of every image; here each shift "
    "is drawn at random within the same ±2 px.",
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
    "ReLU on the primary convolution and two routing iterations. No component of a primary capsule is negative "
    "before the squash. The mean reconstruction error has the paper's weight for the sum, so it is 784 times weaker. "
    "The source validates on the first 5,000 images; here they are chosen at random, unless validation is first.",
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
    "and primary capsules have length one without a squash. The loss is the cross-entropy of the lengths divided by "
    "their sum. It trains one epoch on the first 1,000 images and tests on the first 1,000.",
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
    "No ReLU after the first convolution. Eight separate primary convolutions are flattened and cut into groups of "
    "eight, so a capsule holds neighbouring positions. W has the deviation 1, the softmax is over the input capsules, "
    "and margins are not squared.",
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
    "One primary convolution, flattened and cut into groups of eight. A capsule holds neighbouring positions. W "
    "has the deviation 0.01. Gradients flow through the last weighted sum only. Its squash divides by ‖s‖ + 1e-8; here "
    "it divides by √(‖s‖² + 1e-16), which makes a capsule longer by at most 5e-9 (at ‖s‖ = 1).",
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
    "A first network to train and look at: sabour2017 with 32 channels and 8 types of primary capsules. The "
    "reconstruction has 40 times the paper's weight, so that a minute of training shows the meaning of the components.",
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
    "A small network of our own with dynamic routing: sabour2017 with four normalised 3×3 convolutions in place of the "
    "first one, a quarter of the capsule types, and half of the decoder. It was chosen among nine networks and recipes "
    "by a look at their errors on MNIST's test images, so its own error there may be slightly too low.",
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
    "matrix for each class, shared by all input capsules (as in aff-capsnet), and uniform coupling. The loss is the "
    "cross-entropy of the lengths times a learned scale, and a reconstruction error of similar size, so that the "
    "decoder learns the colours of the images.",
    source="torchcaps: a small network for your own images, chosen by experiment",
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
    "A small network of our own for sequences of any length: two convolutions along the sequence, capsules at each "
    "position, and class capsules with one matrix for each type, shared by all positions. NaN marks padding, which "
    "changes no result.",
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
    "compact with a further layer of capsules on a map between the primary and the class capsules: 8 types and "
    "windows of 3x3. The weights of all layers start balanced.",
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
    "after each ReLU, a depthwise convolution over the whole map, and a squash by 1 - e^-length. Pixels are divided by "
    "256; the decoder draws pixels of 0..1 and starts as Keras's Dense does. The source rotates half of the images by "
    "up to 30 degrees, shifts, squeezes and partly erases them, and keeps the epoch with the best error on the test "
    "images; here images are rotated, shifted and scaled, and validation images choose the epoch.",
    source="Mazzia, Salvetti, Chiaberge: Efficient-CapsNet, 2021, arXiv:2101.12491, and its code",
    network={
        "pixel_scale": 255 / 256,
        "backbone": "stack", "stack_channels": (32, 64, 64, 128), "stack_kernels": (5, 3, 3, 3),
        "stack_strides": (1, 1, 1, 2), "stack_norm": "batch-after", "stack_init": "he",
        "conv_init": "glorot", "primary_types": 16, "primary_kernel": 9, "primary_stride": 1,
        "primary_depthwise": True, "primary_output": "exponential",
        "routing": "self-attention", "weight_init": "truncated-normal",
        "weight_std": 0.044937,  # Keras's he_normal for the shape (10, 16, 8, 16): a fan of 1,280
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
    "compete over types and positions, and class capsules whose weights are shared by all positions. The position of a "
    "capsule is added to its votes for the classes. Spread loss with a growing margin, no decoder. Choices that the "
    "paper does not give are Gritzman's: deviation 1 of the weights, costs times 100·J/I. Both β start at zero. There "
    "is no weight decay (the source has 2e-7).",
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
    "hinton2018-paper with the routing of the authors' released code, which is another algorithm: the centres move by "
    "nine tenths, biases replace the costs, and the class layer has a quarter of the inverse temperature. The code has "
    "other deviations of the weights, and coordinates in hundredths. Two differences remain. Coordinates come from the "
    "last map here, but the code averages them through the layers. The biases of the primary capsules are learned "
    "here, but in the code they are 0, and -1 for activations.",
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
    "hinton2018-paper with variational Bayes routing: batch normalisation after the convolution, after the primary "
    "capsules and after each routing; coordinates in tenths; and the cross-entropy of the softmax of the activations, "
    "which are 0..1. The released code floors the sum of densities, which is an error for poses of 16 components; here "
    "it is normalised as in the paper.",
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
    "class capsules that are a mixture of linear classifiers, with activations but without poses. The loss is the "
    "negative logarithm of the class's activation, because the activations sum to one.",
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
    "sabour2017 without routing, with one matrix for each class that all input capsules share. It trains on digits "
    "placed on a canvas of 40x40 and tests on affinely transformed digits.",
    base="sabour2017",
    source="Gu, Tresp: Improving the robustness of capsule networks to image affine transformations, CVPR 2020, "
    "arXiv:1911.07968",
    network={"transform": "shared", "weight_init": "balanced", "num_iterations": 1},
    recipe={"max_shift": 0},
    data="affnist", in_shape=(1, 40, 40),
    published="93.21 % test accuracy (affNIST)",
)

# Capsules at several depths, without routing.
register_preset(
    "hvc2021-equal",
    "Branches after the third, sixth and ninth convolution, each with vector capsules of the classes. A capsule is the "
    "channels of a position, and a class capsule is the normalised sum of elementwise products. The loss is the "
    "cross-entropy of the sum of the branches' normalised lengths. Training images are rotated, shifted, squeezed and "
    "partly erased, and the weights are averaged for evaluation. Two differences from the code remain. Initial weights "
    "of the convolutions are cut at two standard deviations here. The statistics of batch normalisation are computed "
    "anew for each validation; in the code they move by 0.0003 a step. The code also builds a decoder, which this loss "
    "does not train.",
    source="Byerly, Kalganova, Dear: No routing needed between capsules, 2021, arXiv:2001.09136, and its code",
    network={
        "name": "branches", "pixel_scale": 2 * 255 / 256, "length_eps": 1e-24,
        "stages": [{"name": "stack", "stack_channels": (n, n + 16, n + 32)} for n in (32, 80, 128)],
        "stack_kernels": (3, 3, 3), "stack_strides": (1, 1, 1),
        "stack_norm": "batch-shift", "stack_init": "truncated-normal",
        "stage_capsules": ("positions",) * 3,
        "branches": [
            {"name": "dense", "capsule_dim": dim, "transform": "elementwise", "routing": "hvc"}
            for dim in (64, 112, 160)
        ],
        "weight_init": "normal", "weight_std": 0.05,
    },
    recipe={
        "epochs": 300, "batch_size": 120, "adam": "tensorflow", "adam_eps": 1e-7,
        "schedule": "decay-by-epoch", "decay": 0.98, "min_learning_rate": 1e-7,
        "published_augmentation": "hvc2021", "average_weights": 0.999, "precise_norm": True,
    },
    published="99.83 % test accuracy, the best of 96 networks, chosen on the test images (MNIST)",
)
for weights, words in (("learned", "start at 1"), ("random", "start at random")):
    register_preset(
        f"hvc2021-{weights}",
        f"hvc2021-equal with weights of the branches that are learned and {words}.",
        base="hvc2021-equal", network={"branch_weights": weights},
        published="99.83 % test accuracy, the best of 96 networks, chosen on the test images (MNIST)",
    )

# The paper's network on its other data sets.
register_preset(
    "sabour2017-multimnist",
    "sabour2017 for two overlapping digits. Both are classes of the margin loss, and each is reconstructed from its "
    "own capsule. An image is right only if the two longest capsules are its digits. It has 11.36 M parameters, as in "
    "the paper. The paper makes the decay of the learning rate ten times slower; its start and factor are from the "
    "authors' code. The paper does not give the length of training.",
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
    "mirroring, brightness, contrast and standardisation follow the authors' code; here pixels stay in 0..1 before "
    "they are standardised. The paper gives neither the decoder nor the length of training. The authors' sample "
    "command has no decoder, padded convolutions and 600,000 steps; here a decoder draws the pixels before "
    "standardisation. The published error is of an ensemble of 7 networks.",
    base="sabour2017",
    network={"standardise": True, "primary_types": 64, "leaky": True},
    recipe={"max_shift": 0, "crop": 24, "flip": True, "brightness": 63 / 255, "contrast": 0.8},
    data="cifar10", in_shape=(3, 24, 24),
    published="10.6 % test error, ensemble of 7 (CIFAR-10)",
)
register_preset(
    "sabour2017-smallnorb",
    "sabour2017 for both images of smallNORB's cameras, reduced to 48x48: random crops of 32x32 in training, the "
    "centre in tests. The paper does not give brightness, contrast and standardisation; they follow the authors' code. "
    "Here pixels stay in 0..1 before they are standardised, and the decoder draws the pixels before standardisation. "
    "The paper does not give the length of training.",
    base="sabour2017",
    network={"standardise": True},
    recipe={"max_shift": 0, "crop": 32, "brightness": 63 / 255, "contrast": 0.8},
    data="smallnorb", in_shape=(2, 32, 32), num_classes=5,
    published="2.7 % test error (smallNORB)",
)
register_preset(
    "sabour2017-svhn",
    "sabour2017, smaller, for the 73,257 training images of SVHN: 64 channels, 16 types of primary capsules of 6 "
    "components, class capsules of 8. The paper gives neither augmentation, decoder nor length of training: here there "
    "is no augmentation, the decoder is that for MNIST, and training lasts 50 epochs.",
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
    "max pooling, one dense layer, sigmoid cross-entropy. Only convolutions that keep the size give the paper's 24.56 "
    "M parameters (on 36x36). The paper searched for a decay of the learning rate, but does not give it: here there is "
    "none. There is no dropout, which the paper does not mention.",
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
    "linear layer. With another backbone, it is the baseline of a capsule network on that backbone.",
    source="torchcaps: any backbone without capsules",
    network={
        "name": "pooled", "stack_channels": (32, 64, 64, 128), "stack_kernels": (5, 3, 3, 3),
        "stack_strides": (2, 2, 1, 2), "stack_padding": 1, "stack_norm": "batch",
    },
    recipe={"schedule": "one-cycle", "learning_rate": 3e-3, "max_shift": 2},
)

# Networks that answer each pixel.
SEGCAPS_ROUTING: Final = {"name": "dynamic", "capsule_bias": True, "squash_eps": 1e-24}
UCAPS_ROUTING: Final = SEGCAPS_ROUTING | {"agreement": "cosine", "squash": "last"}


def _map_layers(
    rows: Sequence[tuple[int, int, int, int, int]], routing: Mapping[str, Any], **options: Any
) -> list[Mapping[str, Any]]:
    """Return layers on maps from rows of types, components, kernel, stride and iterations; a stride of -2 goes up."""
    transform = {"name": "shared", **options.pop("weights")}
    layers: list[Mapping[str, Any]] = []
    for types, dim, kernel, stride, iterations in rows:
        layer = {"name": "conv-types"} if stride > 0 else {"name": "deconv"}
        sizes = {"layer_types": types, "capsule_dim": dim, "layer_kernel": kernel, "layer_stride": abs(stride)}
        own = {"transform": transform, "routing": {**routing, "num_iterations": iterations}}
        layers.append({**layer, **sizes, **options, **own})
    return layers


register_preset(
    "segcaps",
    "Capsules down to an eighth of the image and up again, with a score for each pixel. All types of a layer share one "
    "kernel. Two classes are one type of capsule: a pixel whose capsule is shorter than 0.5 is background. It has "
    "1,425,649 parameters for one channel and two classes. The foreground is redrawn from the capsules of the mask, "
    "and at inference from those of the answer (the source: of all pixels). The loss is the cross-entropy of the "
    "softmax of ten times the lengths; in the source it is the binary cross-entropy of the lengths. Adam's first beta "
    "is 0.9 here, and 0.99 in the source.",
    source="LaLonde, Bagci: Capsules for Object Segmentation, 2018, arXiv:1804.04241, and its code",
    network={
        "name": "pixel-capsules", "conv_init": "glorot", "length_eps": 1e-24,
        "layers": _map_layers(
            ((2, 16, 5, 2, 1), (4, 16, 5, 1, 3), (4, 32, 5, 2, 3), (8, 32, 5, 1, 3), (8, 64, 5, 2, 3), (8, 32, 5, 1, 3),
             (8, 32, 4, -2, 3), (4, 32, 5, 1, 3), (4, 16, 4, -2, 3), (4, 16, 5, 1, 3), (2, 16, 4, -2, 3),
             (11, 16, 1, 1, 3)),  # a type for each class
            SEGCAPS_ROUTING, weights={"weight_init": "he"}, layer_padding="same",
        ),
        "decoder": "pixels", "decoder_init": "he", "classification_loss": "pixel-cross-entropy",
        "reconstruction_weight": 131.072,
    },
    recipe={"epochs": 200, "batch_size": 1, "learning_rate": 1e-4, "class_weights": "balanced"},
    data="multimnist-pixels", in_shape=(1, 36, 36), num_classes=11,
    published="98.48 Dice (lungs, LUNA16; U-Net 98.45)",
)
register_preset(
    "ucaps3d",
    "Capsules down to an eighth of a volume, and convolutions up again. Agreement is the cosine of a vote and its "
    "output, and capsules are squashed once. It has 3,368,362 parameters for 2 channels and 4 classes, and 7,124,906 "
    'with a kernel for each type (transform="dense"). The loss is the cross-entropy of the logits, plus a tenth of the '
    "margin loss of the coarsest capsules and a tenth of the error of the redrawn foreground. The source also has a "
    "weight decay of 2e-6, and divides the learning rate by ten when the validation stops improving.",
    source="Nguyen, Hua, Le: 3D-UCaps, MICCAI 2021, arXiv:2203.08965, and its code",
    network={
        "name": "pixel-capsules", "background_type": True,
        "pixel_channels": (16, 32, 64), "pixel_kernels": (5, 5, 5), "pixel_dilations": (1, 2, 2),
        "pixel_norm": "instance", "pixel_activation": "prelu-tanh",
        "layers": _map_layers(
            ((16, 4, 3, 1, 1), (16, 8, 3, 2, 3), (16, 8, 3, 1, 3), (8, 16, 3, 2, 3), (8, 16, 3, 1, 3), (8, 32, 3, 2, 3),
             (4, 64, 3, 1, 3)),
            UCAPS_ROUTING, weights={"weight_init": "normal", "weight_std": 0.1}, layer_padding=1, vote_bias=True,
        ),
        "up_channels": (256, 128, 128, 64, 64),
        "classification_loss": "pixel-cross-entropy",
        "coarse_loss": {"name": "margin", "m_plus": 0.7, "m_minus": 0.3, "margin_scale": 0.5}, "coarse_weight": 0.1,
        "decoder": "pixels", "reconstruction_weight": 0.1, "reconstruction_of": "foreground",
    },
    recipe={"epochs": 200, "batch_size": 1, "learning_rate": 2e-4},
    data="multimnist-pixels", in_shape=(2, 32, 32, 32), num_classes=4,
    published="92.4 Dice (infant brains, iSeg-2017)",
)
register_preset(
    "unet-twin",
    "A U-Net of four levels with as many parameters as segcaps, within 3 %: two 3×3 convolutions a level, instance "
    "normalisation, skips. With parameters_of it is the twin of another network for pixels.",
    source="torchcaps: the U-Net of Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), with instance normalisation",
    network={"name": "unet", "parameters_of": "segcaps"},
    recipe={"epochs": 200, "batch_size": 1, "learning_rate": 1e-3},
    data="multimnist-pixels", in_shape=(1, 36, 36), num_classes=11,
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
register_preset(
    "slots-small",
    "Finds objects without labels: an auto-encoder whose slots compete for the features of an image, and each draw a "
    "part of it. It is small enough for a CPU: learned queries start the slots, positions have four frequencies, and "
    "the decoder begins with a map of 8×8 for images of 24×24. The best epoch has the smallest squared error, so no "
    "mask is used in training.",
    source="after Locatello et al., 2020, arXiv:2006.15055, and Jia, Liu, Huang, 2023, arXiv:2210.08990",
    network={
        "name": "slots", "stack_channels": (32, 32, 32), "stack_kernels": (5, 3, 3), "stack_strides": (3, 1, 1),
        "stack_padding": 1, "layers": ({"name": "slots", "start_from": "queries"},), "broadcast_kernels": (3, 3, 3),
        "feature_frequencies": 4, "broadcast_frequencies": 4,
    },
    recipe={
        "epochs": 16, "batch_size": 32, "learning_rate": 2e-3, "warm_up_steps": 300, "max_gradient_norm": 0.05,
        "average_weights": 0.998, "select": "loss",
    },
    data="tetrominoes", in_shape=(3, 24, 24), num_classes=4,
)
register_preset(
    "slots2020",
    "Slot attention on images of 128×128, after the authors' code: four convolutions of 64 channels at full size, and "
    "seven slots that start from noise. The source trains 500,000 steps with 70,000 images; epochs are counted for "
    "these. Its data, CLEVR6, do not come with torchcaps. PyTorch draws the initial weights; the source has Glorot's.",
    source="Locatello et al.: Object-centric learning with slot attention, 2020, arXiv:2006.15055, and its code",
    base="slots-small",
    network={
        "stack_channels": (64, 64, 64, 64), "stack_kernels": (5, 5, 5, 5), "stack_strides": (1, 1, 1, 1),
        "stack_padding": 2, "start_from": "noise",
        "broadcast_channels": (64, 64, 64, 64, 64), "broadcast_kernels": (5, 5, 5, 5, 5, 3),
        "broadcast_strides": (2, 2, 2, 2, 1, 1), "feature_frequencies": 0, "broadcast_frequencies": 0,
    },
    recipe={
        "epochs": 457, "batch_size": 64, "learning_rate": 4e-4, "schedule": "decay-by-step", "decay": 0.5,
        "decay_steps": 100_000, "warm_up_steps": 10_000, "max_gradient_norm": None, "average_weights": 0.0,
    },
    in_shape=(3, 128, 128), num_classes=7, published="98.8 ± 0.3 FG-ARI (CLEVR6)",
)
