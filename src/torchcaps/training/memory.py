"""How much memory training will need, by part, before anything runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchcaps.models import BaselineCNN, Model, build_model
from torchcaps.models.config import CapsNetConfig
from torchcaps.ops.dynamic_routing.recompute import get_working_memory
from torchcaps.training.config import TrainConfig, override
from torchcaps.training.environment import resident_memory_mib

MIB = 2**20
#: Copies of the largest feature map that live at the height of the backward pass, beside those that are kept for it:
#: its gradient before and after the ReLU, and one in the layout that the convolution's weight gradient works in.
WORK_COPIES = 3
#: Copies of the largest convolution's weight in the layouts that forward and backward work in.
WEIGHT_COPIES = 2
#: Copies of the primary capsules' map: the convolution's output, the poses before and after the squash, their gradient.
PRIMARY_COPIES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of training, MiB, by part."""

    parts: dict[str, float]
    """What needs it, and how much: MiB."""
    batch_size: int
    """Images a step on one device."""

    @property
    def total(self) -> float:
        """MiB."""
        return sum(self.parts.values())


def estimate_memory(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int = 0
) -> MemoryEstimate:
    """Estimate the peak memory of a training process on the CPU, by part.

    Args:
        config: The run. Its global batch is shared out among its devices.
        in_shape: Images (C, H, W).
        num_classes: J.
        num_images: Images of the data set, all parts together.

    Returns:
        Parts whose sum is the peak of resident memory; the first is what this process takes already.

    Raises:
        InputError: Images too small for the network's convolutions.
    """
    batch = -(-config.recipe.batch_size // (config.devices * config.num_nodes))
    with torch.device("meta"):
        network = build_model(config.model, in_shape, num_classes)
        maps = _feature_maps(network, in_shape)
    half = config.precision == "bf16"
    value = 2 if half else 4
    weights = 4 * sum(p.numel() for p in network.parameters()) / MIB
    convolutions = [m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d)]
    low_precision_copies = 2 * sum(p.numel() for p in network.parameters() if p.ndim > 1) / MIB if half else 0.0
    side = 2 * config.recipe.max_shift
    pixels = in_shape[0] * (in_shape[1] * in_shape[2] + (in_shape[1] + side) * (in_shape[2] + side))
    parts = {
        "Python and PyTorch": resident_memory_mib() or 0.0,
        "images of the data set": num_images * pixels / MIB,
        "weights": weights,
        "gradients": weights,
        "Adam's moments": 2 * weights,
        "weights in other layouts": 4 * WEIGHT_COPIES * max(convolutions) / MIB + low_precision_copies,
        "feature maps": batch * value * sum(maps) / MIB,
        "work space of convolutions": batch * value * WORK_COPIES * max(maps) / MIB,
    }
    if isinstance(config.model, CapsNetConfig):
        primary = 4 * PRIMARY_COPIES * maps[-1] * batch / MIB
        parts["primary capsules"] = primary
        parts["routing"] = get_working_memory()
    return MemoryEstimate(parts, batch)


def largest_batch(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int, available: float
) -> int:
    """The largest batch on one device whose estimate fits into ``available`` MiB; 0 if not even one image does."""
    one, two = (
        estimate_memory(_with_batch(config, size), in_shape, num_classes, num_images).total for size in (1, 1001)
    )
    per_image = (two - one) / 1000
    return max(0, int((available - one) / per_image) + 1)


def available_memory_mib() -> float | None:
    """Memory that this process can still take, with what it has: MiB; None where unknown."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) / 1024 + (resident_memory_mib() or 0.0)
    if sys.platform == "darwin":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    return None


def memory_warning(
    config: TrainConfig, in_shape: tuple[int, int, int], num_classes: int, num_images: int
) -> str | None:
    """A sentence if the estimate for this machine exceeds what is there, with the largest batch that fits."""
    available = available_memory_mib()
    processes = config.devices
    if available is None:
        return None
    estimate = estimate_memory(config, in_shape, num_classes, num_images)
    if estimate.total * processes <= available:
        return None
    fits = largest_batch(config, in_shape, num_classes, num_images, available / processes) * processes
    advice = f"the largest --batch-size that fits is about {fits}" if fits >= processes else "no batch fits"
    return (
        f"training will need about {estimate.total * processes:,.0f} MiB, and {available:,.0f} MiB are there; {advice} "
        "(torchcaps memory shows the parts)"
    )


def _with_batch(config: TrainConfig, per_device: int) -> TrainConfig:
    return override(config, {"batch_size": per_device * config.devices * config.num_nodes})


def _feature_maps(network: Model, in_shape: tuple[int, int, int]) -> list[int]:
    """Numbers in the map of each convolution of a network on the meta device, for one image, the last map last."""
    value = torch.empty(1, *in_shape)
    if isinstance(network, BaselineCNN):
        return [(value := conv(value)).numel() for conv in network.convs]
    features = network.conv(value)
    return [features.numel(), sum(conv(features).numel() for conv in network.primary_capsules.convs)]
