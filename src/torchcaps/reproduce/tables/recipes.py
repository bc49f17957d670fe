"""What several tables share: sizes of networks, and the small budget's recipe."""

from __future__ import annotations

from typing import Any

from torchcaps.models.fields import flat
from torchcaps.models.presets import get_preset
from torchcaps.reproduce.table import Budget, Row

SMALL: tuple[Budget, ...] = ("small",)
FULL: tuple[Budget, ...] = ("full",)
BOTH: tuple[Budget, ...] = ("small", "full")

#: What brings another preset to the size of `compact`.
COMPACT_SIZE = {
    name: flat(get_preset("compact").model)[name]
    for name in (
        "stem_channels",
        "stem_strides",
        "conv_channels",
        "conv_kernel",
        "conv_stride",
        "conv_norm",
        "conv_dropout",
        "primary_types",
        "primary_dim",
        "primary_kernel",
        "primary_stride",
        "capsule_dim",
        "decoder_hidden",
    )
}

# Two CNNs with as many parameters as `compact` on the same images, to 1 %. The twin has `compact`'s own convolutions
# before the primary one, with their normalisation and dropout; then a pooled 5×5 convolution, dense layers and
# cross-entropy where `compact` has primary capsules, class capsules and a decoder. The other is the paper's baseline
# with fewer channels.
TWIN: dict[str, Any] = {
    "stem_channels": (*COMPACT_SIZE["stem_channels"], COMPACT_SIZE["conv_channels"]),
    "stem_strides": (*COMPACT_SIZE["stem_strides"], COMPACT_SIZE["conv_stride"]),
    "conv_norm": COMPACT_SIZE["conv_norm"],
    "conv_dropout": COMPACT_SIZE["conv_dropout"],
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
#: The small budget's recipe on whole MNIST.
SHORT: dict[str, Any] = NOT_TURNED | {
    "epochs": 3,
    "batch_size": 128,
    "schedule": "one-cycle",
    "learning_rate": 3e-3,
    "max_shift": 2,
}


def row(name: str, title: str, preset: str, overrides: dict[str, Any], budgets: tuple[Budget, ...], **more: Any) -> Row:
    """A row on MNIST, unless ``more`` says otherwise."""
    return Row(name=name, title=title, preset=preset, overrides=overrides, budgets=budgets, **{"data": "mnist"} | more)


def percent(error: float) -> dict[str, Any]:
    """A published test error, percent, as a number and in words."""
    return {"published": f"{error} %", "published_error": error}
