"""Facts from a run for its model card and for exported files, and images to compare an exported file on."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.datasets import DatasetInfo, find_dataset
from torchcaps.datasets.features import are_features
from torchcaps.errors import InputError
from torchcaps.export.card import SeedResult, TrainingRecord
from torchcaps.export.description import Description
from torchcaps.files import could_be_repository, reading
from torchcaps.models import get_preset
from torchcaps.models.files import CONFIG, SHIPPED
from torchcaps.parts import flat
from torchcaps.ranges import Count, spatial_shape
from torchcaps.training import Recipe, Run, TrainConfig, read_config
from torchcaps.training.config import AUTO_FIELDS, LOCATION_FIELDS, OWN_IMAGE_DEFAULTS
from torchcaps.training.folder import SUMMARY, read_summary
from torchcaps.words import counted, each_of

SAMPLE_SIZE = 32
"""Number of images for the comparison of an exported file with its network."""
MAY_DIFFER = ("seed", *LOCATION_FIELDS)
"""Settings that may differ between runs of the same training: the seed, and settings of the machine."""


@checked
def describe_run(run: Run) -> Description:
    """Return the description of a run's network for an exported file."""
    preset = None if run.config is None else run.config.preset
    return Description(**vars(run.images), preset=preset)


@checked
def sample_images(run: Run) -> tuple[Shaped[Tensor, "N C H W"], str]:
    """Return at most 32 test images of a run's data, and a description of them in words.

    If the data are not on this machine, the images are random, because nothing is downloaded. For a network that comes
    with torchcaps they are the embedded digits.
    """
    data = run.shown_data
    try:
        if data is None:
            why = f"{run.path} has no record of its data"
        elif run.has_data(data):
            images: Any = run.dataset(data).test.images[:SAMPLE_SIZE]  # a tuple if they differ in size
            if isinstance(images, Tensor):
                return images, f"the first {counted(len(images), 'test image')} of {data}"
            if corners := _corners(images, run.model.in_shape[1:]):
                return torch.stack(corners), f"a patch of {each_of(len(corners), 'test image')} of {data}"
            why = f"{data} has no image as large as a patch"
        else:
            why = f"{data} is not on this machine"
    except InputError as error:
        why = f"the data cannot be read: {error}"
    return random_images(run.model.in_shape), f"{SAMPLE_SIZE} random images ({why})"


def _corners(images: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
    """Return the first pixels along each axis of the images (C, *S) that are at least this large."""
    corners = (image[(slice(None), *map(slice, sizes))] for image in images)
    return [each for each in corners if each.shape[1:] == sizes]


@checked
def random_images(in_shape: Sequence[int], count: Count = SAMPLE_SIZE) -> UInt8[Tensor, "N C *S"]:
    """Return images of noise, the same ones in each call."""
    generator = torch.Generator().manual_seed(0)
    shape = spatial_shape(in_shape, (1, 2, 3))
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


@checked
def training_record(
    run: Run, which: Literal["best", "last"] = "best", others: Sequence[str | Path] = ()
) -> TrainingRecord:
    """Return the facts about a run's training for a model card.

    Args:
        run: A finished run.
        which: Epoch of the weights of ``run.model``.
        others: Folders of finished runs of the same configuration with other seeds, for a mean over seeds.

    Raises:
        InputError: The run is not finished; another run has a different configuration or the same seed; or the data
            set is unknown.
    """
    if run.config is None:
        raise InputError(f"{run.path} is a saved network without a record of its training; export a run folder instead")
    summary = _finished(run.path, run.summary)
    summaries = [summary, *(_same_training(run.path, run.config, Path(folder)) for folder in others)]
    seeds = [each["result"].seed for each in summaries]
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise InputError(f"two of the runs have the seed {seed}; a mean over seeds needs different seeds")
    info, _ = find_dataset(run.config.data)
    return TrainingRecord(
        preset=get_preset(run.config.preset),
        data=None if info.takes_path else info.name,
        data_title="own images" if info.takes_path else info.title,
        data_source="not published" if info.takes_path else info.source,
        data_licence="not published" if info.takes_path else info.licence,
        images=summary["images"],
        recipe=_shown_recipe(run.config.recipe.replace({"epochs": summary["epochs"]})),
        last_epoch=summary["epochs"],
        precision="bf16" if run.config.precision == "bf16" else "32",
        which=which,
        results=tuple(each["result"] for each in summaries),
        command=_command(run.config, info),
        seconds=summary["seconds"],
        hardware=summary["hardware"],
        versions=summary["versions"],
        example=_example(run, info),
        has_pixels=run.images.are_pixels,
        preparation=None if run.images.preparation is None else str(run.images.preparation),
    )


def _example(run: Run, info: DatasetInfo) -> str:
    """Return the name of a file that a network answers, in the words of the command line."""
    if info.name == "scene":
        return "scene:cube.npz"
    if run.images.takes_rows:
        return "features.npz" if are_features(run.images.in_shape) else "records.npz"
    return "volume.nii.gz" if info.name == "nifti" else "image.png"


def _shown_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the settings to show: the most important ones, and all that differ from their defaults."""
    always, defaults = {"epochs", "batch_size", "learning_rate", "schedule"}, flat(Recipe().fields)
    if recipe.schedule.startswith("decay"):
        always |= {"decay", "min_learning_rate"}
    if recipe.schedule == "decay-by-step":
        always |= {"decay_steps"}
    return {name: each for name, each in flat(recipe.fields).items() if name in always or each != defaults.get(name)}


def _finished(folder: Path, summary: dict[str, Any] | None) -> dict[str, Any]:
    """Return the facts for a card from a run's summary; raise InputError if the run is not finished."""
    if summary is None:
        raise InputError(
            f"{folder} has no {SUMMARY}, because the run is not finished; finish it with "
            f"torchcaps train --resume {folder}"
        )
    with reading(folder / SUMMARY, "summary"):
        names = ("images", "epochs", "seconds", "versions")
        tested = {
            f"{which}_error": float(math.nan if (error := summary["test"][which]["error"]) is None else error)
            for which in ("best", "last")
        }
        result = SeedResult(seed=summary["seed"], best_epoch=summary["best_epoch"], **tested)
        hardware, threads = summary["hardware"], summary["hardware"]["threads"]
        where = hardware.get("gpu") or hardware.get("processor") or "an unnamed processor"
        where += f" ({counted(threads, 'thread')})"
        if (processes := hardware.get("processes") or 1) > 1:
            where += f", {processes} processes"
        return {name: summary[name] for name in names} | {"result": result, "hardware": where}


def _same_training(first: Path, config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Return the summary of another run; raise InputError if its configuration is not the same."""
    other = read_config(folder / CONFIG).to_dict()
    for name, value in config.to_dict().items():
        if name not in MAY_DIFFER and other[name] != value:
            raise InputError(f"{folder} must have the same settings as {first}, but {name} differs")
    return _finished(folder, read_summary(folder / SUMMARY) if (folder / SUMMARY).exists() else None)


def _command(config: TrainConfig, info: DatasetInfo) -> str:
    """Return the command that repeats a run, without settings of this machine, such as paths and the precision."""
    preset = get_preset(config.preset)
    plain = TrainConfig(preset=preset.name, model=preset.network, recipe=Recipe().replace(preset.recipe))
    words = ["torchcaps", "train", preset.name, "--data", info.spec, "--seed", str(config.seed)]
    for plugin in config.plugins:
        words += ["--plugin", shlex.quote(Path(plugin).name)]
    usual = flat(plain.fields)
    for name, value in flat(config.fields).items():
        if name == "init_from" and value not in (None, *SHIPPED) and not could_be_repository(Path(value)):
            value = "RUN"
        by_itself = value == usual.get(name) and (
            name not in (*AUTO_FIELDS, *OWN_IMAGE_DEFAULTS) or ":" not in config.data
        )
        if name not in ("preset", "model", "data", "precision", *MAY_DIFFER) and not by_itself:
            words += _option(name, value)
    return " ".join(words)


def _option(name: str, value: Any) -> list[str]:
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{words}" if value else f"--no-{words}"]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [f"--{words}", "none" if value in (None, ()) else text]
