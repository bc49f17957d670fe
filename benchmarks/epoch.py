"""Epochs by the library's own training loop: sabour2017 against the convolutions alone. A part of `run.py`.

Both run `torchcaps train`'s loop in float32 over random images of MNIST's size, at batch 128, shifted by up to 2 px:
batches, forward, loss, backward, Adam, sums, looks at the loss. The other network is the two convolutions by PyTorch's
own `nn.Conv2d`, a mean of squares its loss. Rounds take turns; a round is an epoch of its share of the images.
Validation and checkpoints, which come between epochs, are not in.
"""

from __future__ import annotations

import torch
from measuring import Part, Plan, in_turns, new_part, ratio, summary
from naive import Convolutions
from speed_page import EPOCH
from torch import Tensor
from training_step import new_network

from torchcaps.datasets import Dataset, ImageSet
from torchcaps.models import ModelOutput
from torchcaps.models.output import Losses
from torchcaps.training import make_config
from torchcaps.training.data import run_data
from torchcaps.training.devices import launch
from torchcaps.training.loop import Trainer


class ConvolutionsAlone(Convolutions):
    """The two convolutions, called as the training loop calls a network."""

    def forward(self, images: Tensor, targets: Tensor | None = None) -> ModelOutput:
        """The primary capsules' map in the place of capsules, and ten of its numbers in the place of lengths."""
        maps = super().forward(images)
        return ModelOutput(maps.flatten(1)[:, :10], maps)

    def decoder_targets(self, targets: Tensor) -> None:
        """There is no decoder."""

    def loss(self, output: ModelOutput, images: Tensor, targets: Tensor) -> Losses:
        """The mean of squares."""
        assert output.capsules is not None
        mean = output.capsules.float().square().mean()
        return Losses(mean, mean)


def check(_: Plan) -> list[str]:
    """Nothing to compare: the parts before this one have checked routing and the step."""
    return []


def measure(plan: Plan) -> Part:
    """Seconds of a round's images."""
    images = max(plan.images // plan.epoch_rounds, plan.layer.B)
    trainers = {name: new_trainer(name, images, plan) for name in ("torchcaps fp32 full", "cnn fp32")}
    epochs = {name: lambda trainer=trainer: train_epoch(trainer) for name, trainer in trainers.items()}
    times = in_turns(epochs, plan.epoch_rounds)
    part = new_part()
    for name, values in times.items():
        part.records.append({"images": images, "batch": plan.layer.B, "contender": name, **summary(values)})
    ours, floor = times.values()
    part.figures[EPOCH] = ratio(ours, floor)
    return part


def new_trainer(name: str, images: int, plan: Plan) -> Trainer:
    """A run over random images, before its first step."""
    torch.manual_seed(0)
    network = new_network(dict(plan.network))
    in_shape = network.in_shape
    config = make_config(
        "sabour2017", batch_size=plan.layer.B, precision="32", accelerator="cpu", checkpoint_minutes=1e6
    )
    train, rest = random_images(images, in_shape), random_images(1, in_shape)
    data = Dataset("random", train, rest, rest, tuple("0123456789"))
    module = ConvolutionsAlone(network) if name.startswith("cnn") else network
    fabric = launch(config.accelerator, precision=config.precision)
    batches = run_data(data, config.recipe, fabric, config.seed)
    return Trainer(fabric, module, batches, config.recipe)


def random_images(number: int, in_shape: tuple[int, int, int]) -> ImageSet:
    """Noise with labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, *in_shape), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(10, (number,), generator=generator))


def train_epoch(trainer: Trainer) -> float:
    """The training steps of an epoch; milliseconds."""
    trainer.train_epoch([])  # no signal has come
    seconds = trainer.state.epoch_seconds
    trainer.state.end_epoch({})
    return 1e3 * seconds
