"""What several tables share: sizes of networks, and the small rows' recipe."""

from __future__ import annotations

from typing import Any

from torchcaps.models.presets import get_preset
from torchcaps.parts import flat

_COMPACT = flat(get_preset("compact").network)
_SIZES = """stem_channels stem_strides conv_channels conv_kernel conv_stride conv_norm conv_dropout primary_types
            primary_dim primary_kernel primary_stride capsule_dim decoder_hidden"""
#: What brings another preset to the size of `compact`.
COMPACT_SIZE = {name: _COMPACT[name] for name in _SIZES.split()}

# Two CNNs with as many parameters as `compact` on the same images, to 1 %. The twin has `compact`'s own convolutions
# before the primary one, with their normalisation and dropout; then a pooled 5×5 convolution, dense layers and
# cross-entropy where `compact` has primary capsules, class capsules and a decoder. The other is the paper's baseline
# with fewer channels.
TWIN: dict[str, Any] = {
    "stem_channels": (*_COMPACT["stem_channels"], _COMPACT["conv_channels"]),
    "stem_strides": (*_COMPACT["stem_strides"], _COMPACT["conv_stride"]),
    "conv_norm": _COMPACT["conv_norm"],
    "conv_dropout": _COMPACT["conv_dropout"],
    "channels": (64,),
    "kernel": 5,
    "pool": 2,
    "hidden": (563,),
}
TWIN_TITLE = "CNN: compact's stem and parameter count, then a 5×5 convolution and dense layers"
SMALL_BASELINE = {"channels": (32, 32, 16), "hidden": (82, 48)}
SMALL_BASELINE_TITLE = "the paper's CNN with fewer channels, of compact's parameter count"
MATCHED_TITLE = "CNN that pools, of sabour2017's parameter count"

#: What networks that are compared leave out, though `compact`'s own recipe has it.
NOT_TURNED: dict[str, Any] = {"max_rotation": 0.0, "max_scaling": 0.0}
ONE_CYCLE = {"schedule": "one-cycle", "learning_rate": 3e-3}
#: The small rows' recipe on whole MNIST.
SHORT: dict[str, Any] = NOT_TURNED | ONE_CYCLE | {"epochs": 3, "batch_size": 128, "max_shift": 2}
