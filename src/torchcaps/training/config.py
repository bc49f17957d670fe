"""The complete description of a training run. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.files import read_json
from torchcaps.models.config import CapsNetConfig, CNNConfig, Described, Recipe, check_fields, replace
from torchcaps.models.presets import get_preset
from torchcaps.ranges import Pixels, PositiveFactor, Processes, Seed

#: Settings that say where and how a run is computed, not what.
ELSEWHERE = ("data_dir", "accelerator", "capture", "devices", "num_nodes", "checkpoint_minutes", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Described):
    """A run: the network, its recipe, the data, and where and how to compute. ``config.json`` of a run folder."""

    kind: ClassVar[str] = "setting"

    preset: str = "sabour2017"
    """The preset that the network and the recipe started from."""
    model: CapsNetConfig | CNNConfig = field(default_factory=CapsNetConfig)
    """The network."""
    recipe: Recipe = field(default_factory=Recipe)
    """How it is trained."""
    data: str = "digits"
    """Data set: a name, or folder:PATH, or npz:PATH."""
    data_dir: str | None = None
    """Folder that holds the data set's files (else $TORCHCAPS_DATA, else a download)."""
    image_size: Pixels | None = None
    """Resize images to this height and width, pixels."""
    init_from: str | None = None
    """Start from the weights of this trained network, and a fresh Adam, instead of random weights: a run folder (its
    best epoch), a folder written by save_pretrained, a network that comes with torchcaps, or a repository of the hub.
    Once the run has begun, it is needed no more."""
    seed: Seed = 0
    """Of the weights, the order of images, their shifts and the validation split."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """float32, or bfloat16 convolutions and dense layers with routing in float32; auto is bfloat16 on CUDA GPUs of
    compute capability 8 or more, and float32 on all other devices. A run folder holds what it came to."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the training step as a CUDA graph and replay it, which keeps a GPU busy: wherever it can be done, which is
    on CUDA with one process; for certain, or an error; or never. Experimental: it was tested without a GPU only."""
    devices: Processes = 1
    """Processes (one a device) on each machine."""
    num_nodes: Processes = 1
    """Machines."""
    checkpoint_minutes: PositiveFactor = 5.0
    """Longest time between two checkpoints, minutes."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra torchcaps[tensorboard])."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; what is missing takes the preset's values.

        Raises:
            InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
        """
        check_fields(cls, values)
        preset = get_preset(values.get("preset", cls.preset))
        parts = {"model": preset.model, "recipe": preset.recipe}
        for name in parts:
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f'"{name}" must be a JSON object of fields, got {shown(values[name])}')
            parts[name] = replace(parts[name], values.get(name, {}))
        return cls(**{**values, **parts})


def make_config(preset: str = "sabour2017", **overrides: Any) -> TrainConfig:
    """The configuration of a run from a preset and any fields that differ from it.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        **overrides: Fields of :class:`TrainConfig`, :class:`~torchcaps.models.Recipe` and of the preset's network,
            all in one: no name stands twice.

    Raises:
        InputError: An unknown preset or field (the nearest name is given), or a value that does not fit.

    Example:
        >>> from torchcaps.training import make_config
        >>> make_config("sabour2017", data="mnist", epochs=3, num_iterations=1).recipe.epochs
        3
    """
    base = get_preset(preset)
    return override(TrainConfig(preset=preset, model=base.model, recipe=base.recipe), overrides)


def override(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A copy of ``config`` with other values in some fields of the run, its recipe and its network.

    Raises:
        InputError: An unknown field (the nearest known one is named), or a value that does not fit.
    """
    parts: dict[str, dict[str, Any]] = {"model": {}, "recipe": {}, "run": {}}
    owners = {name: part for part, names in field_names(config).items() for name in names}
    for name, value in overrides.items():
        if name not in owners:
            raise unknown_name(f"field of {config.preset}", name, owners)
        parts[owners[name]][name] = value
    return dataclasses.replace(
        config,
        model=replace(config.model, parts["model"]),
        recipe=replace(config.recipe, parts["recipe"]),
        **parts["run"],
    )


def field_names(config: TrainConfig) -> dict[str, list[str]]:
    """Names of the fields of the network, the recipe and the run itself, which may be given together."""
    own = [f.name for f in dataclasses.fields(config) if f.name not in ("preset", "model", "recipe")]
    return {
        "model": [f.name for f in dataclasses.fields(config.model)],
        "recipe": [f.name for f in dataclasses.fields(config.recipe)],
        "run": own,
    }


def read_config(path: str | Path) -> TrainConfig:
    """Read a ``config.json``.

    Raises:
        InputError: No such file, no JSON, an unknown field, or a value that does not fit; the file is named.
    """
    values = read_json(path, "configuration")
    try:
        return TrainConfig.from_dict(values)
    except InputError as error:
        raise InputError(f"configuration {path}: {error}") from None
