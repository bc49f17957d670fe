"""How long runs take that nobody has made yet, from a timed step of each row: ``RESULTS/TABLE/estimate.json``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError, shown
from torchcaps.files import COUNT, NAMED_TEXTS, NUMBER, OBJECT, TEXT, check_keys, read_json, write_json
from torchcaps.reproduce.table import Row, Table

if TYPE_CHECKING:
    from torchcaps.datasets import Dataset
    from torchcaps.reproduce.jobs import Job
    from torchcaps.training.config import TrainConfig

ESTIMATE = "estimate.json"
_KEYS = {
    "seconds": NUMBER,
    "hardware.processor": TEXT,
    "hardware.threads": COUNT,
    "versions": NAMED_TEXTS,
    "settings": OBJECT,
}
#: Images of the timed step on a CPU, where the time of an image hardly depends on how many there are.
CPU_IMAGES = 32
#: The share of the time of a training image that an image takes which is only judged.
JUDGING = 1 / 3


@dataclass(frozen=True)
class Timing:
    """How long a run of a row takes, and where the step was timed."""

    seconds: float
    """The time of one run, extrapolated."""
    hardware: Mapping[str, Any]
    """As in the summary of a run."""
    versions: Mapping[str, str]
    """As in the summary of a run."""


def time_jobs(jobs: list[Job]) -> list[Timing]:
    """Estimate how long each run takes on this machine, from a timed step.

    Raises:
        InputError: Data that are not there, or that do not fit.
    """
    from torchcaps.training.data import load_run_data
    from torchcaps.training.environment import hardware, pick_device, versions

    settings, timings = None, []
    for config in (job.config for job in jobs):
        if settings != _data_settings(config):  # rows one after the other share their data
            settings, data = _data_settings(config), load_run_data(config)
        epochs = config.recipe.epochs
        judged = epochs * len(data.validation) + 2 * len(data.test)
        seconds = (epochs * len(data.train) + JUDGING * judged) * _seconds_an_image(config, data)
        device = pick_device(config.accelerator)
        timings.append(Timing(round(seconds, 1), hardware(device), versions(device)))
    return timings


def _data_settings(config: TrainConfig) -> tuple[Any, ...]:
    """The settings that decide which data are loaded."""
    recipe, model = config.recipe, config.model
    named = (config.data, config.data_dir, config.image_size, config.seed)
    cut = (recipe.validation_size, recipe.validation, recipe.limit_train, recipe.limit_test, recipe.crop)
    return (*named, *cut, model.objects, model.decodes)


def _seconds_an_image(config: TrainConfig, data: Dataset) -> float:
    """The time of training's own step for one of its images: the shorter of two, after one that warms up."""
    import torch

    from torchcaps.models import build_model
    from torchcaps.training.data import as_seen, training_loader
    from torchcaps.training.launch import launch
    from torchcaps.training.step import learning_rate, set_up_step

    fabric = launch(config)
    device, recipe = fabric.device, config.recipe
    count = recipe.batch_size if device.type == "cuda" else min(recipe.batch_size, CPU_IMAGES)
    few = dataclasses.replace(config, recipe=dataclasses.replace(recipe, batch_size=count))
    network = build_model(config.model, as_seen(data, recipe).in_shape, data.num_classes).train()
    step = set_up_step(fabric, few, network)
    loader = training_loader(few, data.train, device, fabric.global_rank, fabric.world_size)
    batch = next(loader.batches(0))
    times = []
    for number in range(3):
        begin = time.monotonic()
        step(batch, number, learning_rate(few.recipe, number, len(loader)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - begin)
    return min(times[1:]) / count


def read_timings(results: Path, table: Table) -> dict[str, Timing]:
    """The times of a table's rows, by name, that were estimated with the settings that the rows have now.

    Raises:
        InputError: A file that is damaged.
    """
    rows = {row.name: row for row in table.rows}
    return {
        name: Timing(float(each["seconds"]), each["hardware"], each["versions"])
        for name, each in _read(results, table).items()
        if name in rows and each["settings"] == _settings(rows[name])
    }


def write_timings(results: Path, table: Table, timings: Mapping[str, Timing]) -> Path:
    """Put times of rows, by name, in the place of those that there were.

    Returns:
        The file.
    """
    rows = {row.name: row for row in table.rows}
    new = {name: asdict(timing) | {"settings": _settings(rows[name])} for name, timing in timings.items()}
    merged = _read(results, table) | new
    file = results / table.name / ESTIMATE
    write_json(file, {name: merged[name] for name in rows if name in merged})
    return file


def _read(results: Path, table: Table) -> dict[str, Any]:
    file = results / table.name / ESTIMATE
    if not file.exists():
        return {}
    found = read_json(file, "estimate")
    try:
        for name, each in found.items():
            check_keys(each, _KEYS, f"row {shown(name)}")
    except InputError as error:
        raise InputError(f"estimate {file}: {error}; remove the file, and --estimate writes it anew") from None
    return found


def _settings(row: Row) -> Any:
    """What a row says of its run, as JSON has it."""
    return json.loads(json.dumps({"preset": row.preset, "data": row.data, **row.overrides}))
