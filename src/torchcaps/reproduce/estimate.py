"""How long runs will take: a step of each is timed before the first one starts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from torchcaps.datasets import Dataset
from torchcaps.models import build_model
from torchcaps.training.capture import WARM_UP, set_up_steps
from torchcaps.training.config import TrainConfig
from torchcaps.training.data import as_seen, load_run_data, training_loader
from torchcaps.training.launch import launch
from torchcaps.training.step import learning_rate

#: Images of the timed step on a CPU, where the time of an image hardly depends on how many there are.
CPU_IMAGES = 32
#: An image that is only judged costs about a third of one that is learned from.
JUDGING = 1 / 3


def estimate_seconds(configs: list[TrainConfig]) -> list[float]:
    """Seconds that runs will take, from a timed step of each; also sees that their data can be loaded.

    Args:
        configs: The runs.

    Raises:
        InputError: Data that are not there, or that do not fit.
    """
    key, data, found = None, None, []
    for config in configs:
        if data is None or key != _data_key(config):  # one data set at a time: rows one after the other share it
            key, data = _data_key(config), load_run_data(config)
        epochs = config.recipe.epochs
        judged = epochs * len(data.validation) + 2 * len(data.test)
        images = epochs * len(data.train) + JUDGING * judged
        found.append(images * _seconds_an_image(config, data))
    return found


def _data_key(config: TrainConfig) -> tuple[Any, ...]:
    """All that :func:`~torchcaps.training.data.load_run_data` looks at."""
    recipe, model = config.recipe, config.model
    shown = (config.data, config.data_dir, config.image_size, config.seed)
    cut = (recipe.validation_size, recipe.validation, recipe.limit_train, recipe.limit_test, recipe.crop)
    decodes_objects = model.objects > 1 and model.decodes
    return (*shown, *cut, model.objects, decodes_objects)


def _seconds_an_image(config: TrainConfig, data: Dataset) -> float:
    """The time of training's own step for one of its images: the shorter of two, after those that warm up."""
    fabric = launch(config)
    device, recipe = fabric.device, config.recipe
    count = recipe.batch_size if device.type == "cuda" else min(recipe.batch_size, CPU_IMAGES)
    few = dataclasses.replace(config, recipe=dataclasses.replace(recipe, batch_size=count))
    network = build_model(config.model, as_seen(data, recipe).in_shape, data.num_classes).train()
    steps = set_up_steps(fabric, few, network)
    loader = training_loader(few, data.train, device, fabric.global_rank, fabric.world_size)
    batch = next(loader.batches(0))
    warm_up = 1 if steps.captured is None else WARM_UP + 1  # the step after them is recorded
    times = []
    for number in range(warm_up + 2):
        begin = time.monotonic()
        steps.make(batch, number, learning_rate(few.recipe, number, len(loader)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - begin)
    return min(times[warm_up:]) / count
