"""How much memory training will need, by part, before anything runs."""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchcaps.datasets.augmentation import check_crop
from torchcaps.errors import InputError
from torchcaps.machine import MIB, resident_memory_mib
from torchcaps.machine import available_memory_mib as available_memory_mib
from torchcaps.models import Network, build_model
from torchcaps.models.fields import flat
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
#: Images of a step that is followed; twice as many at most.
FOLLOWED = 16
#: Copies of a batch's images while they are standardised: centred, squared, divided.
STANDARDISE_COPIES = 3


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
    with torch.device("meta"):
        network = build_model(config.model, seen, num_classes)
        flow = _flow(network, batch)
    weights = 4 * sum(p.numel() for p in network.parameters()) / MIB
    low_precision_copies = 2 * sum(p.numel() for p in network.parameters() if p.ndim > 1) / MIB if half else 0.0
    alone = objects if objects > 1 else 0  # each object by itself, beside the whole image
    copies = 1 + alone + STANDARDISE_COPIES * bool(flat(config.model).get("standardise"))
    parts = {
        "Python and PyTorch": resident_memory_mib() or 0.0,
        "images of the data set": num_images * (1 + alone) * _bytes_an_image(in_shape, config.recipe.max_shift) / MIB,
        "images of a batch": 4 * batch * copies * math.prod(seen) / MIB,
        "weights": weights,
        "gradients": weights,
        "Adam's moments": 2 * weights,
        "weights in half precision": low_precision_copies,
        "maps, capsules and their gradients": (flow.live / 2 if half else flow.live),
        "work space of convolutions": 0.0 if half else max(flow.planes, get_working_memory() * bool(flow.planes)),
    }
    if config.model.has_capsules:
        parts["work space of routing"] = min(BLOCK, get_working_memory())
    return MemoryEstimate({name: mib for name, mib in parts.items() if mib}, batch)


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


class _Flow(NamedTuple):
    """What a training step needs beside the weights and their gradients, MiB."""

    live: float
    """The most that lived at one time: maps kept for the backward pass, their gradients, and what comes and goes."""
    planes: float
    """The planes of all convolutions that multiply planes; their memory is kept from step to step."""


def _flow(network: Network, batch: int) -> _Flow:
    """What a step of a batch needs: of a large one, what two small ones need says it, as each image needs the same."""
    if batch <= 2 * FOLLOWED:
        return _follow_step(network, batch)
    one, two = _follow_step(network, FOLLOWED), _follow_step(network, 2 * FOLLOWED)
    images = batch / FOLLOWED - 1
    return _Flow(one.live + images * (two.live - one.live), one.planes + images * (two.planes - one.planes))


def _follow_step(network: Network, batch: int) -> _Flow:
    """Go through a training step of a network on the meta device, where tensors have shapes and no numbers."""
    images = torch.empty(batch, *network.in_shape)
    objects = network.config.objects
    labels = torch.arange(objects).expand(batch, objects) if objects > 1 else torch.zeros(batch, dtype=torch.int64)
    drawn = torch.empty(batch, objects, *network.in_shape) if objects > 1 else images
    planes: list[float] = []
    with _Live() as live, ExitStack() as hooks:
        for module in network.modules():
            if isinstance(module, Convolution):
                hooks.callback(module.register_forward_pre_hook(partial(_note_planes, planes)).remove)
        output = network(images, network.decoder_targets(labels))
        network.loss(output, drawn, labels).total.backward()
    return _Flow(live.most / MIB, sum(planes))


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made meanwhile and live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, identity: int, size: int) -> None:
        self.seen.discard(identity)
        self.now -= size


def _note_planes(found: list[float], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Add the MiB of a convolution's planes, if it multiplies planes."""
    assert isinstance(module, Convolution)
    (stride, across), (padding, beside) = module.stride, module.zeros
    shape = shape_of(inputs[0], module.weight, (stride, across), (padding, beside))
    if mib := working_mib(shape, len(inputs[0])):
        found.append(mib)


def _bytes_an_image(in_shape: tuple[int, int, int], max_shift: int) -> int:
    """Its pixels, and once more in a frame of zeros that it is shifted in."""
    channels, height, width = in_shape
    return channels * (height * width + (height + 2 * max_shift) * (width + 2 * max_shift))
