"""Facts about a network's training for its model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchcaps.models.presets import Preset


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """Result of one training run: test errors (0..1) of the epoch chosen by validation and of the last epoch."""

    seed: int
    best_epoch: int
    best_error: float
    last_error: float


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Facts about a network's training for its model card."""

    preset: Preset
    """Preset of the network and its recipe."""
    data: str | None
    """Name of the data set for ``load_dataset``; None for the user's own files."""
    data_title: str
    data_source: str
    data_licence: str
    images: Mapping[str, int]
    """Number of images in ``train``, ``validation`` and ``test``."""
    recipe: Mapping[str, Any]
    """Settings of the recipe to show, in their order."""
    last_epoch: int
    precision: Literal["32", "bf16"]
    which: Literal["best", "last"]
    """Epoch of the weights: the best or the last."""
    results: tuple[SeedResult, ...]
    """Result of this network, then results of the same training with other seeds."""
    stored_error: float | None = None
    """Test error (0..1) of the stored weights, if storing rounded them and the error was measured again."""
    command: str
    """Command that repeats the training."""
    seconds: float
    hardware: str
    versions: Mapping[str, str]
    """Versions of torchcaps, torch and Python."""
    preparation: str | None = None
    """Preprocessing of the drawings, in words; None if the images are not drawings."""
