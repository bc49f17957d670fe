"""How long runs will take: a step of each is timed before the first one starts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from torchcaps.datasets import Batch
from torchcaps.models import Model, build_model
from torchcaps.models.config import CapsNetConfig
from torchcaps.training.config import TrainConfig
from torchcaps.training.data import RunData, load_run_data, training_loader
from torchcaps.training.device import pick_device

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
        judged = epochs * len(data.dataset.validation) + 2 * len(data.dataset.test)
        images = epochs * len(data.train) + JUDGING * judged
        found.append(images * _seconds_an_image(config, data, pick_device(config.accelerator)))
    return found


def _data_key(config: TrainConfig) -> tuple[Any, ...]:
    """All that :func:`~torchcaps.training.data.load_run_data` looks at."""
    recipe, model = config.recipe, config.model
    shown = (config.data, config.data_dir, config.image_size, config.seed)
    cut = (recipe.validation_size, recipe.limit_train, recipe.limit_test, recipe.crop)
    decodes_objects = model.objects > 1 and isinstance(model, CapsNetConfig) and model.decoder
    return (*shown, *cut, model.objects, decodes_objects)


def _seconds_an_image(config: TrainConfig, data: RunData, device: torch.device) -> float:
    """The time of a step of training for one of its images: the first step warms up, the shorter of two more counts."""
    recipe = config.recipe
    count = recipe.batch_size if device.type == "cuda" else min(recipe.batch_size, CPU_IMAGES)
    few = dataclasses.replace(config, recipe=dataclasses.replace(recipe, batch_size=count))
    network = build_model(config.model, data.dataset.in_shape, data.dataset.num_classes).to(device).train()
    optimizer = torch.optim.Adam(network.parameters())
    batch = next(training_loader(few, data.train, device).batches(0))
    times = []
    for _ in range(3):
        begin = time.monotonic()
        _step(network, optimizer, batch, config.precision)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - begin)
    return min(times[1:]) / count


def _step(network: Model, optimizer: torch.optim.Optimizer, batch: Batch, precision: str) -> None:
    drawn = batch.images if batch.parts is None else batch.parts
    with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        output = network(batch.images, network.decoder_targets(batch.labels))
    network.loss(output, drawn, batch.labels).total.backward()
    optimizer.step()
    optimizer.zero_grad()
