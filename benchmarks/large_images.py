"""Training on 224×224 images in colour: parameters, peak memory and speed, as a Markdown table.

    python benchmarks/large_images.py                      # on a stack of five convolutions
    python benchmarks/large_images.py --backbone resnet18  # on one of timm, if it is installed
    python benchmarks/large_images.py --quick              # small images, to see that everything works

Each network is trained in a process of its own, by Adam: a backbone with a linear head, the same with a capsule head,
the same frozen, and `compact` and `compact-shared`, with the strides for large images and with those for small ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from measuring import Work, environment, isolated, peak_mib
from torch import nn

from torchcaps import create_model, margin_loss
from torchcaps.models import Network
from torchcaps.nn import CapsuleHead, StackBackbone, TimmBackbone

CLASSES = 10
HEADS = ("linear head", "capsule head", "capsule head, frozen backbone")
PRESETS = ("compact", "compact, strides for small images", "compact-shared", "compact-shared, strides for small images")


def backbone_of(name: str | None) -> nn.Module:
    """One of timm, or a stack that brings images to a 32nd of their size."""
    if name is not None:
        return TimmBackbone(3, timm_model=name)
    sizes = {"stack_channels": (32, 64, 128, 256, 512), "stack_kernels": (3,) * 5, "stack_strides": (2,) * 5}
    return StackBackbone(3, **sizes, stack_padding=1, stack_norm="batch")  # type: ignore[arg-type]


def network_of(what: str, backbone: str | None, side: int) -> nn.Module:
    """The network of a row."""
    preset, _, small = what.partition(", strides")
    if preset in PRESETS:
        kept = {"stem_strides": (1, 1, 2)} if preset == "compact" else {"stack_strides": (1, 2, 1, 2)}
        return create_model(preset, (3, side, side), CLASSES, **({**kept, "decoder_channels": ()} if small else {}))
    features = backbone_of(backbone)
    channels = features(torch.rand(2, 3, side, side)).shape[1]
    if what == "linear head":
        return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    features.requires_grad_("frozen" not in what)
    return nn.Sequential(features, CapsuleHead(channels, CLASSES))


def measure(what: str, backbone: str | None, side: int, batch: int, steps: int) -> tuple[int, float, float]:
    """Parameters, the most memory that training takes, MiB, and its images per second of processor time."""
    torch.manual_seed(0)
    images, labels, seconds = torch.rand(batch, 3, side, side), torch.arange(batch) % CLASSES, list[float]()
    networks = []

    def make() -> Work:
        network = network_of(what, backbone, side)
        networks.append(network)
        optimizer = torch.optim.Adam(network.parameters())

        def step() -> None:
            begin = time.process_time()
            if isinstance(network, Network):
                loss = network.loss(network(images, labels), images, labels).total
            elif what == "linear head":
                loss = F.cross_entropy(network(images), labels)
            else:
                loss = margin_loss(network(images).scores(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.process_time() - begin)

        return step

    peak = peak_mib(make, 1 + steps)
    return sum(each.numel() for each in networks[0].parameters()), peak, batch / statistics.median(seconds[1:])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", metavar="NAME", help="of timm")
    parser.add_argument("--batch", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="that are timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the numbers mean nothing")
    given = parser.parse_args(arguments)
    side, batch, steps = (32, 2, 1) if given.quick else (224, given.batch, given.steps)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print("| network | parameters | peak memory, MiB | images per second of a core |\n|---|---|---|---|")
    for what in (*HEADS, *PRESETS):
        parameters, peak, speed = isolated("large_images", "measure", what, given.backbone, side, batch, steps)
        print(f"| {what} | {parameters:,} | {peak:,.0f} | {speed:.3g} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
