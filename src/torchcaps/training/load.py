"""Read a run from its folder: its network, configuration, results and images."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps.checks import checked
from torchcaps.datasets import Dataset, ImageSet, Preparation, find_dataset, load_dataset
from torchcaps.datasets.dataset import Part
from torchcaps.datasets.features import are_features
from torchcaps.datasets.loading import PartName, joined, load_part
from torchcaps.datasets.matching import Loaded, match_outputs, note_order
from torchcaps.datasets.registry import READING
from torchcaps.errors import InputError, names_shown
from torchcaps.files import could_be_repository, read_json, reading
from torchcaps.models import Network, load_pretrained
from torchcaps.models.files import CLASSES, CONFIG, SHIPPED, SHIPPED_DATA, WEIGHTS, find_pretrained
from torchcaps.models.files.weights import load_weights
from torchcaps.tasks import TaskName
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.config import TrainConfig, read_config
from torchcaps.training.data import cropped, load_run_data
from torchcaps.training.folder import BEST, BEST_FILES, CHECKPOINT, METRICS, SUMMARY, read_summary
from torchcaps.training.image_spec import ImageSpec
from torchcaps.words import counted


@dataclass(frozen=True)
class Run:
    """A trained network, with its configuration and results if it has them."""

    path: Path
    """The run folder, a folder written by save_pretrained, or the name of a repository of the hub."""
    model: Network
    """The network, in evaluation mode."""
    config: TrainConfig | None
    """Configuration of the run. None: the folder was written by save_pretrained."""
    summary: dict[str, Any] | None
    """Contents of summary.json. None: the run is not finished."""
    images: ImageSpec
    """Description of the images: class names, preprocessing of photos, and calibration."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class."""
        return self.images.class_names

    @property
    def shown_data(self) -> str | None:
        """The data set of the run, or the embedded one for a network that comes with torchcaps. None: unknown."""
        if self.config is not None:
            return self.config.data
        return SHIPPED_DATA if self.path in SHIPPED.values() else None

    def has_data(self, data: str | None = None, data_dir: str | None = None) -> bool:
        """Return True if :meth:`dataset` with the same arguments needs no download.

        Raises:
            InputError: The data set is unknown.
        """
        if self.config is not None and data in (None, self.config.data):
            data, data_dir = self.config.data, data_dir or self.config.data_dir
        return data is not None and find_dataset(data)[0].is_downloaded(data_dir)

    def reading_options(self, data: str) -> dict[str, Any]:
        """Return options of ``load_dataset``, so that other images are read as the run's own ones were."""
        taken = find_dataset(data)[0].options
        return {name: getattr(self.images, name) for name in READING if name in taken}

    def dataset(
        self, data: str | Dataset | None = None, data_dir: str | None = None, *, by_number: bool = False
    ) -> Dataset:
        """Return the data set of the run, or another one with its images resized and its classes put in order.

        Args:
            data: Name of a data set, or a loaded one. None: the run's data set.
            data_dir: Folder of its files.
            by_number: Match classes by number; usually they are matched by name if the data set and the run have names,
                see :func:`~torchcaps.datasets.matching.match_outputs`.

        Raises:
            InputError: The data do not fit the network, a name is no class of the run, or the run's data set is
                unknown.
        """
        if isinstance(data, Dataset):
            return self._matched(data, by_number=by_number)
        if self._is_own(data):
            assert self.config is not None
            config = dataclasses.replace(self.config, data_dir=data_dir or self.config.data_dir)
            loaded = cropped(load_run_data(config), config.recipe)
        else:
            loaded = load_dataset(self._named(data), **self._options(data, data_dir))
        return self._matched(loaded, by_number=by_number)

    def part(
        self,
        part: PartName = "test",
        data: str | None = None,
        data_dir: str | None = None,
        *,
        by_number: bool = False,
        group: str | None = None,
    ) -> Part:
        """Return images to evaluate the network on, of the run's data set or of another one.

        Training images that are generated on demand are always the same.

        Args:
            part: The part, or ``"all"`` images of the data set; see :func:`~torchcaps.datasets.loading.load_part`.
            data: Name of a data set. None: the run's data set.
            data_dir: Folder of its files.
            by_number: As for :meth:`dataset`.
            group: Groups of another data set, as for ``load_dataset``; the run's has those of its training.

        Raises:
            InputError: As for :meth:`dataset`, or the data set has no such part.
        """
        if not self._is_own(data):
            options = self._options(data, data_dir) | {"group": group}
            return self._matched(load_part(self._named(data), part, **options), by_number=by_number)
        if group is not None:
            raise InputError("group (--group) is for another data set; images of the run's own have their groups")
        own = self.dataset(data, data_dir, by_number=by_number)
        images = joined(list(own.parts.values()), own.name) if part == "all" else own.parts[part]
        words = f"images of {own.name}" if part == "all" else f"{part} images of {own.name}"
        images = images.preview(len(images))
        return Part(own.name, words, images, own.class_names, task_name=own.task_name, **own.naming)

    def other_images(self, data: str, data_dir: str | None = None, task: TaskName | None = None) -> ImageSet:
        """Return the test images of a data set with any classes, in the network's shape.

        Args:
            data: Name of a data set.
            data_dir: Folder of its files; a data set without a folder of its own ignores it.
            task: Task to read its targets for; None: their form decides.

        Raises:
            InputError: The images have other channels than the network's.
        """
        own = find_dataset(data)[0].find is not None
        options = self._options(data, data_dir if own else None) | {"task": task}
        images = load_part(data, **options).images
        if images.in_shape != self.model.in_shape:
            raise InputError(
                f"{data} has images of {counted(images.in_shape[0], 'channel')}, but the network takes "
                f"{self.model.in_shape[0]}"
            )
        return images

    def _is_own(self, data: str | None) -> bool:
        """Return True for the run's own data set."""
        return self.config is not None and data in (None, self.config.data)

    def _named(self, data: str | None) -> str:
        """Return the name of a data set; None: the one of :attr:`shown_data`."""
        if (name := self.shown_data if data is None else data) is None:
            raise InputError(f"{self.path} does not say what it was trained on; name a data set with --data")
        return name

    def _options(self, data: str | None, data_dir: str | None) -> dict[str, Any]:
        """Return options to load another data set than the run's."""
        # with the same seed, data sets made from the same images have the same validation images
        seed = 0 if self.config is None else self.config.seed
        options: dict[str, Any] = {"data_dir": data_dir, "seed": seed, "task": self.model.task}
        cuts_patches = "pca" in find_dataset(self._named(data))[0].options  # of a scene
        size = "patch" if self.model.per_pixel or cuts_patches else "image_size"
        options |= {} if are_features(self.model.in_shape) else {size: self.model.in_shape[1:]}
        return options | self.reading_options(self._named(data))

    def _matched(self, loaded: Loaded, *, by_number: bool) -> Loaded:
        """Return a data set with the classes of the network; raise InputError if its images do not fit."""
        names, known = loaded.channels, self.images.channels
        if names is not None and known is not None and names != known:
            if sorted(names) != sorted(known):
                raise InputError(
                    f"{loaded.name} has the channels {names_shown(names)}; the network of {self.path} was made for "
                    f"{names_shown(known)}"
                )
            order = [names.index(each) for each in known]
            parts: Any = loaded.parts
            changed: Any = {part: each.with_pixels(lambda pixels: pixels[:, order]) for part, each in parts.items()}
            loaded = dataclasses.replace(loaded, channels=known, **changed)
        images: Any = next(iter(loaded.parts.values()))
        shape, required = (
            f"images of shape {each.in_shape} with {counted(objects, 'object')} in each"
            for each, objects in ((images, images.num_objects), (self.model, self.model.objects))
        )
        if shape != required:
            raise InputError(f"{loaded.name} has {shape}; the network of {self.path} was made for {required}")
        if not by_number:
            note_order(names, known, loaded.name, "feature" if are_features(self.model.in_shape) else "channel")
        return match_outputs(loaded, self.images, by_number=by_number)


@checked
def load_run(path: str | Path, which: Literal["best", "last"] = "best", device: torch.device | str = "cpu") -> Run:
    """Read a trained network from a run folder, a folder of ``save_pretrained``, or a repository of the hub.

    Args:
        path: The folder. If it does not exist, a repository of the hub such as ``"someone/capsnet-mnist"``.
        which: ``"best"``: the best epoch on the validation images. ``"last"``: the last checkpoint, maybe within an
            epoch.
        device: Device of the network.

    Raises:
        InputError: No such folder or repository exists, the hub cannot be reached, or a file is missing, damaged, or
            does not fit the rest.
    """
    path = Path(path)
    folder = find_pretrained(path.as_posix()) if could_be_repository(path) else path
    if not folder.is_dir():
        raise InputError(f"there is no run folder {path}")
    if not (folder / CONFIG).exists():
        raise InputError(f"{path} is no run folder: it holds no {CONFIG}")
    if (folder / WEIGHTS).exists():
        if which == "last":
            raise InputError(f"{path} is a saved network with one set of weights; omit --which last")
        model = load_pretrained(folder).to(device)
        return Run(path, model, None, None, _read_spec(folder / CLASSES, model))

    config = read_config(path / CONFIG)
    # metrics.csv is written after the first network, so without it no network was written yet
    if not (path / METRICS).exists() and not all((path / name).exists() for name in BEST_FILES):
        raise InputError(
            f"{path} has no network yet, because no epoch is finished; wait for the end of its first epoch, or resume "
            f"it with torchcaps train --resume {path}"
        )
    model = load_pretrained(path / BEST)
    is_best = True
    if which == "last":
        checkpoint, best = read_checkpoint(path / CHECKPOINT), copy.deepcopy(model.state_dict())
        load_weights(model, checkpoint["model"], path / CHECKPOINT)
        is_best = all(torch.equal(values, best[name]) for name, values in model.state_dict().items())
    summary = read_summary(path / SUMMARY) if (path / SUMMARY).exists() else None
    images = _read_spec(path / BEST / CLASSES, model, config.data)
    if not is_best:
        images = dataclasses.replace(images, calibration=None, certainty=None)  # they were measured on the best epoch
    return Run(path, model.to(device), config, summary, images)


def _read_spec(path: Path, model: Network, data: str | None = None) -> ImageSpec:
    """Read the description of the images beside the weights; ``data`` is the data set of a run.

    Only a saved network may lack it; the class names are then numbers. Without "has_names", as of runs of earlier
    versions, numbers are no names if they come from an array.
    """
    from_network = {"in_shape": model.in_shape, "objects": model.objects, "task": model.task}
    names = tuple(map(str, range(model.num_classes)))
    if data is None and not path.exists():
        return ImageSpec.from_dict({"class_names": names, "has_names": False, **from_network})
    values = read_json(path, "list of classes")
    with reading(path, "list of classes"):
        of_array = data is not None and data.startswith("npz:") and values.get("class_names") == list(names)
        spec = ImageSpec.from_dict({"has_names": not of_array} | values | from_network)
        if len(spec.class_names) != model.num_classes:
            raise InputError(f"it must have {counted(model.num_classes, 'name')}, one for each class of the network")
    return spec


def load_initial_weights(network: Network, source: str) -> None:
    """Load the initial weights of a run from ``source``, its :attr:`TrainConfig.init_from`.

    Raises:
        InputError: As for :func:`load_run`, or the weights do not fit the network.
    """
    run = load_run(SHIPPED.get(source, source))
    try:
        load_weights(network, run.model.state_dict(), Path(source))
    except InputError as error:
        words = "" if run.config is None else f"; to train the same network, {run.config.preset}, use --config "
        raise InputError(f"{error}{words}{words and run.path / CONFIG}") from None


def preparation_of(config: TrainConfig) -> Preparation | None:
    """Return the preprocessing of a run's data set, scaled to the run's image size."""
    info, _ = find_dataset(config.data)
    if info.preparation is None or info.in_shape is None or config.image_size is None:
        return info.preparation
    return info.preparation.scaled(config.image_size / info.in_shape[1])
