"""From a preset's name to a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcaps.files import read_json
from torchcaps.models.baseline import BaselineCNN
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.config import CapsNetConfig, CNNConfig
from torchcaps.models.presets import get_preset
from torchcaps.models.pretrained import CONFIG

Model = CapsNet | BaselineCNN


def create_model(
    preset: str, in_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, **overrides: Any
) -> CapsNet | BaselineCNN:
    """Build a published network for images of any size.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        in_shape: Images (C, H, W).
        num_classes: J.
        **overrides: Other values for fields of the preset's :class:`~torchcaps.models.CapsNetConfig` (or CNNConfig).

    Returns:
        A :class:`~torchcaps.models.CapsNet`, or a :class:`~torchcaps.models.BaselineCNN` for the CNN presets; its
        weights are drawn from torch's random generator.

    Raises:
        InputError: An unknown preset or field (the nearest name is given), a value that does not fit its field, or
            images too small for the convolutions.

    Example:
        >>> model = create_model("sabour2017", in_shape=(3, 32, 32), num_iterations=2)
    """
    return build_model(get_preset(preset).with_overrides(overrides).model, in_shape, num_classes)


def build_model(config: CapsNetConfig | CNNConfig, in_shape: Sequence[int], num_classes: int) -> CapsNet | BaselineCNN:
    """The network that a configuration describes."""
    if isinstance(config, CNNConfig):
        return BaselineCNN(config, in_shape, num_classes)
    return CapsNet(config, in_shape, num_classes)


def load_pretrained(folder: str | Path) -> Model:
    """Read a network of any kind that ``save_pretrained`` wrote, in evaluation mode; nothing in it is executed.

    Raises:
        InputError: There is no such folder, or a file in it is missing, damaged, or does not fit the others.
    """
    description = read_json(Path(folder) / CONFIG, "configuration")
    is_cnn = {field.name for field in dataclasses.fields(CNNConfig)} <= description.keys()
    return (BaselineCNN if is_cnn else CapsNet).from_pretrained(folder)
