"""How much memory training will need, by part, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.datasets.augmentation import check_crop
from torchcaps.errors import InputError
from torchcaps.machine import MIB, resident_memory_mib
from torchcaps.machine import available_memory_mib as available_memory_mib
from torchcaps.models import BaselineCNN, Model, build_model
from torchcaps.models.config import CapsNetConfig
from torchcaps.nn import Convolution
from torchcaps.ops.convolution import shape_of, working_mib
from torchcaps.ops.dynamic_routing.recompute.blocks import BLOCK
from torchcaps.ops.memory import get_working_memory
from torchcaps.ranges import COUNT
from torchcaps.training.config import TrainConfig, override
from torchcaps.training.environment import pick_device, resolve_precision
from torchcaps.training.launch import count_processes

#: What the weights need beside their own place, whatever the batch: as much again for each.
LEARNED = ("weights", "gradients", "Adam's moments")
#: Copies of the largest feature map that live at the height of the backward pass, beside those that are kept for it:
#: its gradient before and after the ReLU, and one in the layout that the convolution's weight gradient works in.
WORK_COPIES = 3
#: Likewise where convolutions multiply planes: the gradient alone.
WORK_COPIES_OF_PLANES = 1
#: Copies of the largest convolution's weight in the layouts that forward and backward work in.
WEIGHT_COPIES = 2
#: Copies of the primary capsules' map: the convolution's output, the poses before and after the squash, their gradient.
PRIMARY_COPIES = 4
#: Copies of a batch's images while they are standardised: centred, squared, divided.
STANDARDISE_COPIES = 3
#: Copies of what is drawn: before and after the sigmoid, its distance from the image, and a gradient.
DRAWN_COPIES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of training, MiB, by part."""

    parts: dict[str, float]
    """What needs it, and how much: MiB."""
    batch_size: int
    """Images a step of this process."""

    @property
    def total(self) -> float:
        """MiB."""
        return sum(self.parts.values())


def estimate_memory(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int = 0
) -> MemoryEstimate:
    """Estimate the peak memory of a training process on the CPU, by part.

    Args:
        config: The run. Its global batch is shared out among its processes.
        in_shape: Images of the data set (C, H, W), whole; the network sees them cropped where the recipe crops.
        num_classes: J.
        num_images: Images of the data set, all parts together.

    Returns:
        Parts whose sum is the peak of resident memory; the first is what this process takes already.

    Raises:
        InputError: Images too small for the network's convolutions or for the recipe's crop; or the precision is
            ``auto``, and this machine has not the accelerator that the run names.
    """
    batch = -(-config.recipe.batch_size // count_processes(config).total)
    crop, objects = config.recipe.crop, config.model.objects
    check_crop(in_shape, crop)
    seen = in_shape if crop is None else (in_shape[0], crop, crop)
    half = resolve_precision(config).precision == "bf16"
    value = 2 if half else 4
    with torch.device("meta"):
        network = build_model(config.model, seen, num_classes)
        planes = [] if half else _note_planes(network, batch)
        maps = _feature_maps(network, seen)
    weights = 4 * sum(p.numel() for p in network.parameters()) / MIB
    convolutions = [m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d)]
    low_precision_copies = 2 * sum(p.numel() for p in network.parameters() if p.ndim > 1) / MIB if half else 0.0
    copies_of_maps = WORK_COPIES_OF_PLANES if planes else WORK_COPIES
    alone = objects if objects > 1 else 0  # each object by itself, beside the whole image
    copies = 1 + alone + STANDARDISE_COPIES * bool(getattr(config.model, "standardise", False))
    working = batch * value * copies_of_maps * max(maps.numbers) / MIB + sum(planes)
    parts = {
        "Python and PyTorch": resident_memory_mib() or 0.0,
        "images of the data set": num_images * (1 + alone) * _bytes_an_image(in_shape, config.recipe.max_shift) / MIB,
        "images of a batch": 4 * batch * copies * math.prod(seen) / MIB,
        "weights": weights,
        "gradients": weights,
        "Adam's moments": 2 * weights,
        "weights in other layouts": (0 if planes else 4 * WEIGHT_COPIES * max(convolutions) / MIB)
        + low_precision_copies,
        "feature maps": batch * (value * sum(maps.numbers) + 8 * maps.indices) / MIB,
        "work space of convolutions": max(working, get_working_memory()) if planes else working,  # that much is kept
    }
    if isinstance(config.model, CapsNetConfig):
        parts["primary capsules"] = 4 * PRIMARY_COPIES * maps.numbers[-1] * batch / MIB
        parts["routing"] = min(BLOCK, get_working_memory())
        if config.model.decoder:
            numbers = 2 * sum(config.model.decoder_hidden) + DRAWN_COPIES * math.prod(seen)
            parts["decoder"] = 4 * batch * objects * numbers / MIB
    return MemoryEstimate(parts, batch)


def largest_batch(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int, available: float
) -> int:
    """The largest batch, over all processes, with which those of this machine fit into ``available`` MiB together.

    0 if not even one image a process does.
    """
    processes = count_processes(config)

    def fits(size: int) -> bool:
        if size * processes.total not in COUNT:
            return False
        of_all = override(config, {"batch_size": size * processes.total})
        return estimate_memory(of_all, in_shape, num_classes, num_images).total * processes.devices <= available

    if not fits(1):
        return 0
    most, too_many = 1, 2
    while fits(too_many):
        most, too_many = too_many, 2 * too_many
    while too_many - most > 1:
        between = (most + too_many) // 2
        most, too_many = (between, too_many) if fits(between) else (most, between)
    return most * processes.total


def memory_warning(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int
) -> str | None:
    """A sentence if the estimate for this machine exceeds what is there, with the largest batch that fits.

    Raises:
        InputError: The network cannot be trained on this CPU, whatever the batch: its weights, their gradients and
            Adam's moments alone are more than what is there.
    """
    available = available_memory_mib()
    if available is None:
        return None
    devices = count_processes(config).devices
    estimate = estimate_memory(config, in_shape, num_classes, num_images)
    learned, needed = devices * sum(estimate.parts[name] for name in LEARNED), devices * estimate.total
    if learned > available and pick_device(config.accelerator).type == "cpu":
        raise InputError(
            f"the network's {', '.join(LEARNED[:-1])} and {LEARNED[-1]} would take {learned:,.0f} MiB of memory, but "
            f"must fit into the {available:,.0f} MiB that are there; choose a smaller network, or smaller images"
        )
    if needed <= available:
        return None
    fits = largest_batch(config, in_shape, num_classes, num_images, available)
    advice = f"the largest --batch-size that fits is about {fits}" if fits else "no batch fits"
    return (
        f"training will need about {needed:,.0f} MiB, and {available:,.0f} MiB are there; {advice} "
        "(torchcaps memory shows the parts)"
    )


class _Maps(NamedTuple):
    """What is kept of one image for the backward pass."""

    numbers: list[int]
    """In the map of each convolution, and in what is pooled of it, the last one last."""
    indices: int = 0
    """Of the pixels that pooling chose, 8 bytes each."""


def _feature_maps(network: Model, in_shape: tuple[int, int, int]) -> _Maps:
    """What a network on the meta device keeps of one image."""
    value = torch.empty(1, *in_shape)
    if isinstance(network, BaselineCNN):
        numbers, value = _kept(network.stem.children(), value, network.config.conv_norm)
        indices = 0
        for conv, normed in zip(network.convs, network.norms, strict=True):
            more, value = _kept((conv, normed, nn.ReLU()), value, network.config.conv_norm)
            numbers += more
            if network.config.pool > 1:
                numbers.append((value := network.pool(value)).numel())
                indices += value.numel()
        return _Maps(numbers, indices)
    layers = (*network.stem.children(), network.conv, network.conv_norm, nn.ReLU())
    numbers, value = _kept(layers, value, network.config.conv_norm)
    return _Maps([*numbers, sum(conv(value).numel() for conv in network.primary_capsules.convs)])


def _note_planes(network: Model, batch: int) -> list[float]:
    """A list to which each convolution by products of planes adds the MiB of its planes when it is called."""
    found: list[float] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Convolution)
        (stride, across), (padding, beside) = module.stride, module.zeros
        shape = shape_of(inputs[0], module.weight, (stride, across), (padding, beside))
        if mib := working_mib(shape, batch):
            found.append(mib)

    for module in network.modules():
        if isinstance(module, Convolution):
            module.register_forward_pre_hook(note)
    return found


def _kept(layers: Iterable[nn.Module], value: Tensor, norm: str) -> tuple[list[int], Tensor]:
    """Numbers in the maps that convolutions, each with its ReLU, keep for backward; and the last map.

    What a convolution gives is kept if it is normalised, what a normalisation gives is not.
    """
    numbers = []
    for layer in layers:
        value = layer(value)
        if isinstance(layer, nn.ReLU) or (isinstance(layer, nn.Conv2d) and norm != "none"):
            numbers.append(value.numel())
    return numbers, value


def _bytes_an_image(in_shape: tuple[int, int, int], max_shift: int) -> int:
    """Its pixels, and once more in a frame of zeros that it is shifted in."""
    channels, height, width = in_shape
    return channels * (height * width + (height + 2 * max_shift) * (width + 2 * max_shift))
