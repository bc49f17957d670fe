"""The complete description of a training run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from torchcaps.checks import checked
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import read_json
from torchcaps.models.presets import FITTED as FITTED_TO_IMAGES
from torchcaps.models.presets import get_preset
from torchcaps.parts import Choice, Settings, Tree, flat
from torchcaps.plugins import is_loaded, plugin_options
from torchcaps.ranges import Pixels, PositiveFactor, Processes, Seed
from torchcaps.training.recipe import Recipe

#: What a run consists of, given field by field.
WHOLE = ("preset", "model", "recipe")
Fitted = Literal[
    "epochs",
    "batch_size",
    "learning_rate",
    "patience",
    "select",
    "stem_strides",
    "stack_strides",
    "stem_strides_across",
    "stack_strides_across",
    "decoder_channels",
]
"""What one's own images change, where nobody gave it."""
FITTED: tuple[Fitted, ...] = ("epochs", "batch_size", "learning_rate", "patience", "select", *FITTED_TO_IMAGES)
OWN = {"fill": "edge", "precise_norm": True}
"""Settings of a recipe for one's own images, where nobody gave others."""
#: Settings that say where and how a run is computed, not what.
ELSEWHERE = ("data_dir", "accelerator", "devices", "num_nodes", "checkpoint_minutes", "plugins")

NO_OPTIONS = ("preset", "model", "recipe", "plugins", "fitted")
"""Fields that are no option of their name: the argument PRESET, what is given option by option, --plugin, and which
values the data decided."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """A run: the network, its recipe, the data, and where and how to compute. ``config.json`` of a run folder."""

    kind: ClassVar[str] = "setting"

    preset: str = "sabour2017"
    """The preset that the network and the recipe started from."""
    model: Annotated[Tree, Choice("network")] = field(default_factory=lambda: get_preset("sabour2017").network)
    """The network."""
    recipe: Recipe = field(default_factory=Recipe)
    """How it is trained."""
    data: str = "digits"
    """A data set, folder:PATH, csv:PATH or npz:PATH; by default that of the preset."""
    data_dir: str | None = None
    """Folder that holds the data set's files (else $TORCHCAPS_DATA, else a download)."""
    image_size: Pixels | None = None
    """Resize images to this height and width, pixels."""
    skip_damaged: bool = False
    """Leave out damaged image files: those of a folder that cannot be read; which they are is said."""
    scale: tuple[float, float] | None = None
    """Numbers that become 0 and 1 (LOW,HIGH), for pixels of your own files beyond 8 bits: 0,4095 for 12 bits; by
    default the range of their type."""
    fitted: tuple[Fitted, ...] = ()
    """Fields that the training images decide when the run begins; none from then on."""
    init_from: str | None = None
    """Start from the weights of this network, with a fresh optimizer, instead of random weights: a run folder
    (its best epoch), a folder written by save_pretrained, a network that comes with torchcaps, or a repository of the
    hub. The run does not need it after it has begun."""
    seed: Seed = 0
    """Seed of all chance: initial weights, the order of the images, their changes and the validation split."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """Precision of convolutions and dense layers: float32, or bfloat16 with routing in float32; auto is bfloat16 on
    CUDA GPUs of compute capability 8 or more, and float32 on all other devices. A run folder says which it was."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    devices: Processes = 1
    """Processes on each machine: one for each device."""
    num_nodes: Processes = 1
    """Machines."""
    checkpoint_minutes: PositiveFactor = 5.0
    """Minutes between two checkpoints: at most so many."""
    plugins: tuple[str, ...] = ()
    """Files and entry points that register parts of the run's network, its preset or its data; --plugin names them."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; what is missing takes the preset's values.

        Raises:
            InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
        """
        preset = get_preset(values.get("preset", cls.preset))
        return cls(model=preset.network, recipe=Recipe().replace(preset.recipe)).replace(values)


def make_config(preset: str | None = None, **overrides: Any) -> TrainConfig:
    """The configuration of a run from a preset and any fields that differ from it.

    The data set is the preset's own where ``data`` is not given.

    Of one's own images (``folder:PATH``, ``csv:PATH``, ``npz:PATH``) there may be few, more of one class than of
    another, and they may be large: when the run begins, :data:`FITTED` are fitted to them, unless they are given. Their
    ground need not be black, and they may be textures, so that :data:`OWN` is chosen, unless it is given.

    Args:
        preset: A name from :func:`torchcaps.list_presets`; ``first`` if None.
        **overrides: Fields of :class:`TrainConfig`, :class:`~torchcaps.models.Recipe` and of the preset's network,
            all in one: no name stands twice.

    Raises:
        InputError: An unknown preset or field (the nearest name is given), or a value that does not fit.

    Examples:
        >>> from torchcaps.training import make_config
        >>> make_config("sabour2017", data="mnist", epochs=3, num_iterations=1).recipe.epochs
        3
    """
    base = get_preset("first" if preset is None else preset)
    start = TrainConfig(preset=base.name, model=base.network, recipe=Recipe().replace(base.recipe), data=base.data)
    config = override(start, overrides)
    if ":" not in config.data:  # a named data set, for which recipes were made
        return config
    own = {"fitted": tuple(name for name in FITTED if name not in overrides), **OWN}
    return override(config, {name: value for name, value in own.items() if name not in overrides})


def override(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A copy of ``config`` with other values in some fields of the run, its recipe and its network.

    Raises:
        InputError: An unknown field (the nearest known one is named), or a value that does not fit.
    """
    what = f"field of {config.preset}"
    for name in overrides:
        if name in WHOLE:
            raise unknown_name(what, name, [each for each in flat(config.fields) if each not in WHOLE])
    return config.replace(overrides, what)


@checked
def read_config(path: str | Path) -> TrainConfig:
    """Read a ``config.json``.

    Raises:
        InputError: No such file, no JSON, an unknown field, or a value that does not fit; the file is named.
    """
    values = read_json(path, "configuration")
    try:
        return TrainConfig.from_dict(values)
    except InputError as error:
        # plugins are never loaded because a file names them
        named = values.get("plugins")
        missing = [each for each in named if not is_loaded(str(each))] if isinstance(named, list) else []
        advice = (
            f" The run was made with plugins; add {shlex.join(plugin_options(map(str, missing)))}." if missing else ""
        )
        raise InputError(f"configuration {path}: {error}{advice}") from None
