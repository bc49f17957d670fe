"""A run read back from its folder: its network, configuration, results and images."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps.checks import checked
from torchcaps.datasets import Dataset, Preparation, find_dataset, load_dataset
from torchcaps.errors import InputError
from torchcaps.files import could_be_repository, read_json, reading
from torchcaps.image_spec import ImageSpec
from torchcaps.models import Network, load_pretrained
from torchcaps.models.older_files import FORMAT, to_current_weights
from torchcaps.models.pretrained import CLASSES, CONFIG, SHIPPED, SHIPPED_DATA, WEIGHTS, find_pretrained, load_weights
from torchcaps.tasks import task_of
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.config import TrainConfig, read_config
from torchcaps.training.data import cropped, load_run_data
from torchcaps.training.folder import BEST, BEST_FILES, CHECKPOINT, METRICS, SUMMARY, read_summary


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
    images: ImageSpec
    """What is known of its images: the names of their classes, how photos are prepared, what is usual for them."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class."""
        return self.images.class_names

    @property
    def shown_data(self) -> str | None:
        """The data set to show: the run's own; for a network that comes with torchcaps the embedded one; or None."""
        if self.config is not None:
            return self.config.data
        return SHIPPED_DATA if self.path in SHIPPED.values() else None

    def has_data(self, data: str | None = None, data_dir: str | None = None) -> bool:
        """Whether :meth:`dataset`, called in the same way, needs no download.

        Raises:
            InputError: The data set is not known.
        """
        if self.config is not None and data in (None, self.config.data):
            data, data_dir = self.config.data, data_dir or self.config.data_dir
        return data is not None and find_dataset(data)[0].is_downloaded(data_dir)

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
            loaded = cropped(load_run_data(config), config.recipe)
        elif data is not None:
            # the same seed: data sets made of the same images set the same ones apart for validation
            seed = 0 if self.config is None else self.config.seed
            size, task = self.model.in_shape[1:], self.model.task
            loaded = load_dataset(data, data_dir=data_dir, image_size=size, seed=seed, task=task)
        else:
            raise InputError(f"{self.path} does not say what it was trained on; name a data set with --data")
        found, made_for = (
            f"images of shape {each.in_shape} with {each.num_classes} {task_of(self.model).outputs}, {objects} in each"
            for each, objects in ((loaded, loaded.num_objects), (self.model, self.model.objects))
        )
        if found != made_for:
            raise InputError(f"{loaded.name} has {found}; the network of {self.path} was made for {made_for}")
        return loaded


@checked
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
        if which == "last":
            raise InputError(f"{path} is a saved network, which has one set of weights; leave --which last out")
        model = load_pretrained(folder).to(device)
        return Run(path, model, None, None, _read_spec(folder / CLASSES, model, must_exist=False))

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
        with reading(path / CHECKPOINT, "checkpoint"):
            weights = to_current_weights(model, checkpoint["model"], checkpoint[FORMAT])
        load_weights(model, weights, path / CHECKPOINT)
    summary = read_summary(path / SUMMARY) if (path / SUMMARY).exists() else None
    images = _read_spec(path / BEST / CLASSES, model, must_exist=True)
    return Run(path, model.to(device), config, summary, images)


def _read_spec(path: Path, model: Network, *, must_exist: bool) -> ImageSpec:
    """What a file beside the weights says of the images; without it classes are called by their numbers."""
    known = {"in_shape": model.in_shape, "objects": model.objects, "task": model.task}
    if not must_exist and not path.exists():
        return ImageSpec.from_dict({"class_names": tuple(map(str, range(model.num_classes))), **known})
    values = read_json(path, "list of classes")
    with reading(path, "list of classes"):
        spec = ImageSpec.from_dict(values | known)
        if len(spec.class_names) != model.num_classes:
            raise InputError(f"it must have {model.num_classes} names, as the network has classes")
    return spec


def start_from(network: Network, source: str) -> None:
    """Give a network the weights that a run starts from; ``source`` is :attr:`TrainConfig.init_from`.

    Raises:
        InputError: As of :func:`load_run`; or the weights are of another network, which is named if a run has it.
    """
    run = load_run(SHIPPED.get(source, source))
    try:
        load_weights(network, run.model.state_dict(), Path(source))
    except InputError as error:
        words = "" if run.config is None else f"; a run of that network, {run.config.preset}, begins with --config "
        raise InputError(f"{error}{words}{words and run.path / CONFIG}") from None


def preparation_of(config: TrainConfig) -> Preparation | None:
    """How the images of a run's data set were made, at the size that the run has them in."""
    info, _ = find_dataset(config.data)
    if info.preparation is None or info.in_shape is None or config.image_size is None:
        return info.preparation
    return info.preparation.scaled(config.image_size / info.in_shape[1])
