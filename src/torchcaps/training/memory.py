"""How much memory training will need, by part, before anything runs."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchcaps.datasets.augmentation import check_crop
from torchcaps.errors import InputError
from torchcaps.machine import MIB, resident_memory_mib
from torchcaps.machine import available_memory_mib as available_memory_mib
from torchcaps.models import Network, build_model
from torchcaps.models.fields import flat
from torchcaps.nn import Convolution
from torchcaps.ops.convolution import Shape, shape_of, working_mib
from torchcaps.ops.dynamic_routing.recompute.layer import BLOCK
from torchcaps.ops.memory import get_working_memory
from torchcaps.ranges import COUNT
from torchcaps.training.config import TrainConfig
from torchcaps.training.environment import pick_device, resolve_precision
from torchcaps.training.launch import count_processes

#: What the weights need beside their own place, whatever the batch: as much again for each.
LEARNED = ("weights", "gradients", "Adam's moments")
#: Where a network's modules keep what their backward pass needs; all others keep feature maps.
KEEPERS = {"primary_capsules": "primary capsules", "layers": "capsule layers", "decoder": "decoder"}
MAPS = "feature maps"
#: What is counted by itself: images, and weights.
ELSEWHERE = "elsewhere"
#: Images that are followed through a network: each of a batch needs the same.
FOLLOWED = 2
#: Copies of the largest feature map that live at the height of the backward pass, beside those that are kept for it:
#: its gradient on each side of a normalisation and of a ReLU, both in the layouts that PyTorch's convolutions work in,
#: and what the allocator keeps between them. Measured: 6.3 and 6.4 (compact, 64 and 256 images, AMD EPYC, torch 2.13).
WORK_COPIES = 6
#: Likewise where convolutions multiply planes: the gradient alone.
WORK_COPIES_OF_PLANES = 1
#: Copies of the largest convolution's weight in the layouts that forward and backward work in.
WEIGHT_COPIES = 2
#: MiB of machine code, tables and buffers of PyTorch's libraries that the first step brings in.
FIRST_STEP = 15.0
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
    return _Run(config, in_shape, num_classes, num_images).estimate()


def largest_batch(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int, available: float
) -> int:
    """The largest batch, over all processes, with which those of this machine fit into ``available`` MiB together.

    0 if not even one image a process does.
    """
    return _Run(config, in_shape, num_classes, num_images).largest_batch(available)


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
    run = _Run(config, in_shape, num_classes, num_images)
    devices, estimate = run.processes.devices, run.estimate()
    learned, needed = devices * sum(estimate.parts[name] for name in LEARNED), devices * estimate.total
    if learned > available and pick_device(config.accelerator).type == "cpu":
        raise InputError(
            f"the network's {', '.join(LEARNED[:-1])} and {LEARNED[-1]} would take {learned:,.0f} MiB of memory, but "
            f"must fit into the {available:,.0f} MiB that are there; choose a smaller network, or smaller images"
        )
    if needed <= available:
        return None
    fits = run.largest_batch(available)
    advice = f"the largest --batch-size that fits is about {fits}" if fits else "no batch fits"
    return (
        f"training will need about {needed:,.0f} MiB, and {available:,.0f} MiB are there; {advice} "
        "(torchcaps memory shows the parts)"
    )


class _Run:
    """What is known of a run before its batch is, and the estimates for any batch; see :func:`estimate_memory`."""

    def __init__(self, config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int) -> None:
        self.config, self.processes = config, count_processes(config)
        crop, objects = config.recipe.crop, config.model.objects
        check_crop(in_shape, crop)
        seen = in_shape if crop is None else (in_shape[0], crop, crop)
        self.half = resolve_precision(config).precision == "bf16"
        with torch.device("meta"):
            network = build_model(config.model, seen, num_classes)
            self.kept, self.largest, self.convolutions = _follow(network)
        alone = objects if objects > 1 else 0  # each object by itself, beside the whole image
        copies = 1 + alone + STANDARDISE_COPIES * bool(flat(config.model).get("standardise"))
        weights = 4 * sum(p.numel() for p in network.parameters()) / MIB
        matrices = 2 * sum(p.numel() for p in network.parameters() if p.ndim > 1) / MIB
        convolutions = [4 * each.weight.numel() / MIB for each in network.modules() if isinstance(each, nn.Conv2d)]
        channels, height, width = in_shape
        shift = 2 * config.recipe.max_shift  # images that are shifted lie once more in a frame
        image = channels * (height * width + (height + shift) * (width + shift))
        self.images = copies * 4 * math.prod(seen) / MIB
        self.whatever_the_batch = {
            "Python and PyTorch": (resident_memory_mib() or 0.0) + FIRST_STEP,
            "images of the data set": num_images * (1 + alone) * image / MIB,
            "weights": weights,
            "gradients": weights,
            "Adam's moments": 2 * weights,
            "weights in half precision": matrices * self.half,
            "work space of routing": min(BLOCK, get_working_memory()) * config.model.has_capsules,
        }
        self.reordered = WEIGHT_COPIES * max(convolutions, default=0.0)

    def estimate(self, batch_size: int | None = None) -> MemoryEstimate:
        """The estimate for so many images a step of this process; for the run's if None."""
        batch = -(-self.config.recipe.batch_size // self.processes.total) if batch_size is None else batch_size
        planes = 0.0 if self.half else sum(working_mib(shape, batch) for shape in self.convolutions)
        copies = WORK_COPIES_OF_PLANES if planes else WORK_COPIES
        largest = batch * self.largest / (2 if self.half else 1)
        kept = {name: batch * mib / (2 if self.half and name == MAPS else 1) for name, mib in self.kept.items()}
        working = copies * largest + planes
        parts = self.whatever_the_batch | kept
        parts["images of a batch"] = batch * self.images
        parts["weights in other layouts"] = 0.0 if planes else self.reordered
        # planes are multiplied in memory that is kept from step to step, with the maps that come of them; validation
        # takes all of it
        stays = get_working_memory() - kept[MAPS] if planes else 0.0
        parts["work space of convolutions"] = max(working, stays)
        return MemoryEstimate({name: mib for name, mib in parts.items() if mib}, batch)

    def largest_batch(self, available: float) -> int:
        """See :func:`largest_batch`."""
        total, devices = self.processes.total, self.processes.devices

        def fits(size: int) -> bool:
            return size * total in COUNT and self.estimate(size).total * devices <= available

        if not fits(1):
            return 0
        most, too_many = 1, 2
        while fits(too_many):
            most, too_many = too_many, 2 * too_many
        while too_many - most > 1:
            between = (most + too_many) // 2
            most, too_many = (between, too_many) if fits(between) else (most, between)
        return most * total


def _follow(network: Network) -> tuple[dict[str, float], float, list[Shape]]:
    """Go forward through a training step on the meta device, where tensors have shapes and no numbers.

    Returns:
        What it leaves for the backward pass beside the weights, by part, and the largest feature map among it: MiB an
        image; and the convolutions that may multiply planes.
    """
    made: dict[int, tuple[str, Tensor]] = {}  # memory → the part that it was made in; the tensor keeps it from others
    kept: dict[str, dict[int, int]] = defaultdict(dict)  # part → memory → bytes
    convolutions: list[Shape] = []
    part = MAPS

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        where, _ = made.setdefault(storage._cdata, (part, tensor))
        kept[where][storage._cdata] = storage.nbytes()
        return tensor

    def enter(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal part
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                made.setdefault(tensor.untyped_storage()._cdata, (part, tensor))
        part = KEEPERS.get(name.partition(".")[0], MAPS)
        if isinstance(module, Convolution):
            (stride, across), (padding, beside) = module.stride, module.zeros
            convolutions.append(shape_of(inputs[0], module.weight, (stride, across), (padding, beside)))

    objects = network.config.objects
    images = torch.empty(FOLLOWED, *network.in_shape)
    labels = torch.arange(objects).expand(FOLLOWED, objects) if objects > 1 else torch.zeros(FOLLOWED).long()
    drawn = torch.empty(FOLLOWED, objects, *network.in_shape) if objects > 1 else images
    for tensor in (images, labels, drawn, *network.parameters()):
        made[tensor.untyped_storage()._cdata] = (ELSEWHERE, tensor)
    with ExitStack() as hooks:
        hooks.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        for name, module in network.named_modules():
            hooks.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
        output = network(images, network.decoder_targets(labels))
        network.loss(output, drawn, labels)
    mib = {name: sum(sizes.values()) / FOLLOWED / MIB for name, sizes in kept.items() if name != ELSEWHERE}
    return {MAPS: 0.0} | mib, max(kept[MAPS].values(), default=0) / FOLLOWED / MIB, convolutions
