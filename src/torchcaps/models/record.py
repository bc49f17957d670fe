"""What a model card says of a network's training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchcaps.models.presets import Preset


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """The result of one training run: errors on the test images, 0..1, of the epoch that validation chose, and last."""

    seed: int
    best_epoch: int
    best_error: float
    last_error: float


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What a card says of a network's training."""

    preset: Preset
    """What the network and the recipe started from."""
    data: str | None
    """The data set as ``load_dataset`` knows it; None for somebody's own files."""
    data_title: str
    data_source: str
    data_licence: str
    images: Mapping[str, int]
    """How many images there were: ``train``, ``validation``, ``test``."""
    recipe: Mapping[str, Any]
    """The settings of the recipe that are worth showing, in their order."""
    last_epoch: int
    precision: Literal["32", "bf16"]
    which: Literal["best", "last"]
    """The epoch whose weights these are."""
    results: tuple[SeedResult, ...]
    """This network's own result first, then those of the same training from other seeds."""
    stored_error: float | None = None
    """Test error of the weights as they were stored, 0..1, where storing rounded them and it was measured."""
    command: str
    """What trains it again."""
    seconds: float
    hardware: str
    versions: Mapping[str, str]
    """Of torchcaps, torch and Python."""
    preparation: str | None = None
    """How the images were made of drawings, in words; None for images of something else."""
