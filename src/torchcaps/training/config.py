"""Describe a training run completely: its network, recipe, data and machine."""

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
from torchcaps.nn.layers import current_tree
from torchcaps.parts import Choice, Settings, Tree, flat
from torchcaps.plugins import is_loaded, plugin_options
from torchcaps.ranges import Count, Pages, Pixels, PositiveFactor, Processes, Seed, Spacing
from torchcaps.training.recipe import Recipe

NESTED_FIELDS = ("preset", "model", "recipe")
"""Fields that callers set through the fields inside them, such as ``epochs`` for the recipe."""
AutoField = Literal[
    "task",
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
"""A field that is derived from the training images if the user does not set it; of the task, whether it must be set."""
AUTO_FIELDS: tuple[AutoField, ...] = (
    "task",
    "epochs",
    "batch_size",
    "learning_rate",
    "patience",
    "select",
    *FITTED_TO_IMAGES,
)
"""All fields that are derived from the user's own images."""
OWN_IMAGE_DEFAULTS = {"fill": "edge", "precise_norm": True}
"""Defaults of a recipe for the user's own images."""
SCENE_DEFAULTS = {"max_shift": 0, "max_rotation": 0.0, "max_scaling": 0.0, "flip": False, "crop": None}
SCENE_DEFAULTS |= {"brightness": 0.0, "contrast": 0.0, "decoder": None}
"""Defaults for the patches of a scene, whose spectra are no pixels of 0..1 and whose middle has the label."""
LOCATION_FIELDS = ("data_dir", "accelerator", "devices", "checkpoint_minutes", "plugins")
"""Settings of the machine and its folders. They do not change the results of a run."""
REMOVED_FIELDS = ("num_nodes",)
"""Location fields of older files, which are not read: torchrun says how many machines there are."""

NOT_ON_COMMAND_LINE = ("preset", "model", "recipe", "plugins", "fitted")
"""Fields without a command-line option of the same name. The argument PRESET and the options of
parts set the first three, --plugin sets `plugins`, and the program sets `fitted`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Configuration of a run: network, recipe, data, device. A run folder holds it as ``config.json``."""

    kind: ClassVar[str] = "setting"

    preset: str = "sabour2017"
    """Preset from which the network and the recipe were derived."""
    model: Annotated[Tree, Choice("network")] = field(default_factory=lambda: get_preset("sabour2017").network)
    """The network."""
    recipe: Recipe = field(default_factory=Recipe)
    """The training recipe."""
    data: str = "digits"
    """Data set name, or folder:PATH, csv:PATH, npz:PATH or nifti:PATH. The default is the preset's data set."""
    data_dir: str | None = None
    """Folder of the data set's files. The default is $TORCHCAPS_DATA, else a download."""
    image_size: Pixels | None = None
    """Resize images to this height and width, pixels."""
    skip_damaged: bool = False
    """Leave out images that cannot be used, and list them."""
    scale: tuple[float, float] | None = None
    """Pixel values that become 0 and 1. Set LOW,HIGH for your own files with more than 8 bits, such as 0,4095 for 12
    bits. The default is the range of the files' data type."""
    pages: Pages | None = None
    """Meaning of the pages of TIFF files and the frames of animations. channels: further channels of an image. depth:
    the slices of a volume with a mask. By default, files of several pages are refused."""
    group: str | None = None
    """Images of one group, such as a patient, are never in two parts: a column of the table, an array of the .npz file,
    or a regular expression for the paths of the images, such as '(P\\d+)_'."""
    fold: str | None = None
    """Test on part K of N, as K/N, and train on the other parts, for data without test images."""
    window: Count | None = None
    """Cut sequences into windows of this many steps, which are split by sequence."""
    stride: Count | None = None
    """Steps between two windows. The default is --window."""
    spacing: Spacing | None = None
    """Resample volumes to these distances of neighbouring voxels, mm: depth, height and width, such as 1,1,1. Predicted
    masks go back to the grid of each file. The default is the distances of each volume."""
    pca: Count | None = None
    """Replace the bands of a scene by this many principal components of its training pixels."""
    fitted: tuple[AutoField, ...] = ()
    """Fields still to be derived from the training images; emptied when the run starts."""
    init_from: str | None = None
    """Initial weights from this network: a run folder (its best epoch), a folder written by save_pretrained, a network
    that comes with torchcaps, or a repository of the hub. The optimizer starts afresh. A resumed run does not read
    them again."""
    seed: Seed = 0
    """Random seed, for the initial weights, the order and augmentation of images, and the validation split."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """Numeric precision. 32: float32. bf16: bfloat16 for convolutions and dense layers, float32 for the routing. auto:
    bf16 on CUDA GPUs of compute capability 8 or more, and 32 on all other devices. The run folder records the
    choice."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device."""
    devices: Processes = 1
    """Processes on each machine, one for each device."""
    checkpoint_minutes: PositiveFactor = 5.0
    """Minutes between checkpoints, at most."""
    plugins: tuple[str, ...] = ()
    """Files and entry points that register the run's own parts, presets or data sets. Set by --plugin."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration of a dict made by :meth:`to_dict`. Missing fields take the preset's values.

        Raises:
            InputError: A field is unknown (the error suggests the nearest name), or a value does not fit its field.
        """
        values = {name: current_tree(value) for name, value in values.items() if name not in REMOVED_FIELDS}
        preset = get_preset(values.get("preset", cls.preset))
        return cls(model=preset.network, recipe=Recipe().replace(preset.recipe)).replace(values)


def make_config(preset: str | None = None, **overrides: Any) -> TrainConfig:
    """Return the configuration of a run from a preset and the fields that differ from it.

    A user's own images (``folder:PATH``, ``csv:PATH``, ``npz:PATH``) may be few, large, or uneven in their classes. So
    the fields in :data:`AUTO_FIELDS` are derived from them when the run starts. Their background may not be black, and
    they may be textures, so :data:`OWN_IMAGE_DEFAULTS` apply. ``overrides`` take precedence over both.

    Args:
        preset: A name from :func:`torchcaps.list_presets`. None means ``first``.
        **overrides: Fields of :class:`TrainConfig`, of :class:`~torchcaps.training.Recipe` and of the preset's network.
            Their names are distinct. The default of ``data`` is the preset's data set.

    Raises:
        InputError: A preset or field is unknown (the error suggests the nearest name), or a value does not fit.

    Examples:
        >>> from torchcaps.training import make_config
        >>> make_config("sabour2017", data="mnist", epochs=3, num_iterations=1).recipe.epochs
        3
    """
    base = get_preset("first" if preset is None else preset)
    start = TrainConfig(preset=base.name, model=base.network, recipe=Recipe().replace(base.recipe), data=base.data)
    config = override(start, overrides)
    if ":" not in config.data:  # recipes were made for the named data sets
        return config
    defaults = {"fitted": tuple(name for name in AUTO_FIELDS if name not in overrides), **OWN_IMAGE_DEFAULTS}
    if config.data.startswith("scene:"):
        defaults |= {name: value for name, value in SCENE_DEFAULTS.items() if name in flat(config.fields)}
    return override(config, {name: value for name, value in defaults.items() if name not in overrides})


def override(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return a copy of ``config`` in which fields of the run, its recipe or its network are replaced.

    Raises:
        InputError: A field is unknown (the error suggests the nearest name), or a value does not fit.
    """
    what = f"field of {config.preset}"
    for name in overrides:
        if name in NESTED_FIELDS:
            raise unknown_name(what, name, [each for each in flat(config.fields) if each not in NESTED_FIELDS])
    return config.replace(overrides, what)


@checked
def read_config(path: str | Path) -> TrainConfig:
    """Read a ``config.json``.

    Raises:
        InputError: The file is missing or no JSON, a field is unknown, or a value does not fit.
    """
    values = read_json(path, "configuration")
    try:
        return TrainConfig.from_dict(values)
    except InputError as error:
        # for safety, a file cannot cause plugins to be loaded
        named = values.get("plugins")
        missing = [each for each in named if not is_loaded(str(each))] if isinstance(named, list) else []
        advice = (
            f" The run was made with plugins; add {shlex.join(plugin_options(map(str, missing)))}." if missing else ""
        )
        raise InputError(f"configuration {path}: {error}{advice}") from None
