"""The run folder: its files, and a trained network read back from it.

```text
RUN/config.json      the complete configuration; torchcaps train --config runs it again
    metrics.csv      one line an epoch
    last.ckpt        everything needed to go on, written whole or not at all
    best/            weights of the epoch chosen on the validation images, as save_pretrained writes them
    summary.json     results, hardware, versions, command
    figures/         pictures
    tensorboard/     events, if the configuration asks for them
    .lock.json       the process that trains in it, while one does
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps.analysis.calibration import Calibration
from torchcaps.datasets import Dataset, Preparation, load_dataset
from torchcaps.datasets.registry import look_up
from torchcaps.errors import InputError
from torchcaps.files import could_be_repository, read_json, remove_temporaries
from torchcaps.models import Network, load_pretrained
from torchcaps.models.pretrained import (
    CLASSES,
    CONFIG,
    SHIPPED,
    SHIPPED_DATA,
    WEIGHTS,
    find_pretrained,
    is_shipped,
    load_weights,
    shipped_folder,
)
from torchcaps.training.checkpoint import CHECKPOINT, read_checkpoint
from torchcaps.training.config import TrainConfig, read_config
from torchcaps.training.data import as_seen, load_run_data

METRICS, SUMMARY, BEST, FIGURES = "metrics.csv", "summary.json", "best", "figures"
BEST_FILES = tuple(f"{BEST}/{name}" for name in (CONFIG, WEIGHTS, CLASSES))


@dataclass(frozen=True)
class Run:
    """A trained network, with its configuration and results if they are known."""

    path: Path
    """The run folder, a folder written by save_pretrained, or the name of a repository of the hub."""
    model: Network
    """The network, in evaluation mode."""
    config: TrainConfig | None
    """The configuration of the run; None for a folder that save_pretrained wrote."""
    summary: dict[str, Any] | None
    """The contents of summary.json; None while the run is not finished, or goes on for more epochs."""
    class_names: tuple[str, ...]
    """Names of the classes."""
    preparation: Preparation | None = None
    """How the images that it was trained on were made of drawings, as photos of drawings are prepared for it; None for
    a network that was trained on images of something else, or where that is not known."""
    calibration: Calibration | None = None
    """What is usual for it, measured on its validation images; None where it was not measured."""

    @property
    def image_fit(self) -> Literal["pad", "stretch"]:
        """How images are brought to the network's size: those of a ``folder:`` data set are stretched."""
        return "stretch" if self.config is not None and self.config.data.startswith("folder:") else "pad"

    @property
    def about_images(self) -> dict[str, Any]:
        """What a saved network says of images besides the names of its classes, as JSON has it."""
        about: dict[str, Any] = {"preparation": self.preparation, "calibration": self.calibration}
        return {name: dataclasses.asdict(value) for name, value in about.items() if value is not None}

    @property
    def shown_data(self) -> str | None:
        """The data set to show: the run's own; for a network that comes with torchcaps the embedded one; or None."""
        if self.config is not None:
            return self.config.data
        return SHIPPED_DATA if is_shipped(self.path) else None

    def has_data(self, data: str | None = None, data_dir: str | None = None) -> bool:
        """Whether :meth:`dataset`, called in the same way, needs no download.

        Raises:
            InputError: The data set is not known.
        """
        if self.config is not None and data in (None, self.config.data):
            data, data_dir = self.config.data, data_dir or self.config.data_dir
        return data is not None and look_up(data)[0].is_here(data_dir)

    def dataset(self, data: str | None = None, data_dir: str | None = None) -> Dataset:
        """The data set of the run as the network sees it, or another one, whose images are resized to the network's.

        Args:
            data: The name of another data set than the run's.
            data_dir: The folder of its files.

        Raises:
            InputError: The data do not fit the network, or no data set is known.
        """
        if self.config is not None and data in (None, self.config.data):
            config = dataclasses.replace(self.config, data_dir=data_dir or self.config.data_dir)
            loaded = as_seen(load_run_data(config), config.recipe)
        elif data is not None:
            # the same seed: data sets made of the same images set the same ones apart for validation
            seed = 0 if self.config is None else self.config.seed
            loaded = load_dataset(data, data_dir=data_dir, image_size=self.model.in_shape[1:], seed=seed)
        else:
            raise InputError(f"{self.path} does not say what it was trained on; name a data set with --data")
        if loaded.in_shape != self.model.in_shape or loaded.num_classes != self.model.num_classes:
            raise InputError(
                f"{loaded.name} has images of shape {loaded.in_shape} in {loaded.num_classes} classes; the network of "
                f"{self.path} was made for {self.model.in_shape} in {self.model.num_classes}"
            )
        if loaded.num_objects != self.model.objects:
            raise InputError(
                f"{loaded.name} has images of {loaded.num_objects} objects; the network of {self.path} was made for "
                f"{self.model.objects}"
            )
        return loaded


def load_run(path: str | Path, which: Literal["best", "last"] = "best", device: torch.device | str = "cpu") -> Run:
    """Read a trained network from its run folder, or from what ``save_pretrained`` or ``push_to_hub`` wrote.

    Args:
        path: The folder; or a repository of the hub such as ``"someone/capsnet-mnist"``, if no folder has this name.
        which: The epoch chosen on the validation images, or the last checkpoint, which may lie within an epoch.
        device: The device to put the network on.

    Raises:
        InputError: There is no such folder, and the hub has no such repository or cannot be reached; or a file in it is
            missing, damaged, or does not fit the others.
    """
    path = Path(path)
    folder = find_pretrained(path.as_posix()) if could_be_repository(path) else path
    if not folder.is_dir():
        raise InputError(f"there is no run folder {path}")
    if not (folder / CONFIG).exists():
        raise InputError(f"{path} is no run folder: it holds no {CONFIG}")
    if (folder / WEIGHTS).exists():
        model = load_pretrained(folder).to(device)
        named = (folder / CLASSES).exists()
        if not named:
            return Run(path, model, None, None, tuple(map(str, range(model.num_classes))))
        about = read_json(folder / CLASSES, "list of classes")
        preparation, calibration = _about_images(about, folder / CLASSES)
        return Run(path, model, None, None, _class_names(folder, model.num_classes), preparation, calibration)

    config = read_config(path / CONFIG)
    # metrics.csv is written after the first epoch's network: without it, the network was never written, not lost
    if not (path / METRICS).exists() and not all((path / name).exists() for name in BEST_FILES):
        raise InputError(
            f"{path} has no checkpoint of a finished epoch yet, so there is no network to load; wait for its first "
            "epoch, or go on with it by torchcaps train --resume"
        )
    model = load_pretrained(path / BEST)
    if which == "last":
        checkpoint = read_checkpoint(path / CHECKPOINT)
        load_weights(model, checkpoint["model"], path / CHECKPOINT)
    summary = read_json(path / SUMMARY, "summary") if (path / SUMMARY).exists() else None
    _, calibration = _about_images(summary or {}, path / SUMMARY)
    names = _class_names(path / BEST, model.num_classes)
    return Run(path, model.to(device), config, summary, names, preparation_of(config), calibration)


def start_from(network: Network, source: str) -> None:
    """Give a network the weights that a run starts from; ``source`` is :attr:`TrainConfig.init_from`.

    Raises:
        InputError: As of :func:`load_run`; or the weights are of another network, which is named if a run has it.
    """
    run = load_run(shipped_folder(source) if source in SHIPPED else source)
    try:
        load_weights(network, run.model.state_dict(), Path(source))
    except InputError as error:
        if run.config is None:
            raise
        raise InputError(
            f"{error}; a run of that network, {run.config.preset}, begins with --config {run.path / CONFIG}"
        ) from None


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of a killed process; no process may be writing to the folder now."""
    for name in (CONFIG, METRICS, CHECKPOINT, SUMMARY, *BEST_FILES):
        remove_temporaries(out / name)
    (out / f".{CHECKPOINT}.tmp").unlink(missing_ok=True)  # as earlier versions called it


def _class_names(folder: Path, num_classes: int) -> tuple[str, ...]:
    path = folder / CLASSES
    names = read_json(path, "list of classes").get("class_names")
    if not isinstance(names, list) or len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise InputError(f'list of classes {path} must hold "class_names", {num_classes} names, got {names!r}')
    return tuple(names)


def _about_images(values: Mapping[str, Any], path: Path) -> tuple[Preparation | None, Calibration | None]:
    """How images are prepared and what is usual for the network, as a file has it, also one of an earlier version."""
    try:
        return Preparation.from_json(values.get("preparation")), Calibration.from_json(values.get("calibration"))
    except InputError as error:
        raise InputError(f"{path} cannot be used: {error}") from None


def preparation_of(config: TrainConfig) -> Preparation | None:
    """How the images of a run's data set were made, at the size that the run has them in."""
    try:
        info, _ = look_up(config.data)
    except InputError:  # a data set of a plugin that is not loaded, or a folder that is gone
        return None
    if info.preparation is None or info.in_shape is None or config.image_size is None:
        return info.preparation
    return info.preparation.scaled(config.image_size / info.in_shape[1])
