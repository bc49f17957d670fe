"""The whole training step on a GPU, plain and compiled, and an epoch of MNIST's size; `gpu.py` runs it."""

from __future__ import annotations

import itertools
import statistics
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from machine import WARM_UP, Machine, Row
from naive import naive_routing
from torch import Tensor

from torchcaps.datasets import Batch, Dataset, ImageSet
from torchcaps.models import CapsNet, create_model
from torchcaps.nn import DenseVotes, Routed, Routing, Votes
from torchcaps.training import Recipe, TrainConfig, make_config
from torchcaps.training.data import RunData, run_data
from torchcaps.training.devices import launch
from torchcaps.training.loop import Trainer

PRECISIONS = {"fp32": "32", "bf16": "bf16"}
CONTENDERS = ("plain", "compiled", "naive")

# each compiled network counts: with too many, torch.compile would leave the later ones as they are
torch._dynamo.config.recompile_limit = 64

#: Batches that are trained on in turn, random and resident on the device.
BATCHES = 8
#: Steps between two looks at the clock.
IN_A_ROW = 20
#: Steps whose losses are compared.
CHECKED = 8
#: How far losses of a compiled network may be from the plain ones': its sums are in another order.
COMPILED_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}

#: Images of MNIST to train on and to validate by, and the same for a dry run.
MNIST, TINY = (55_000, 5_000), (64, 16)
EPOCHS = 5


class NaiveRouting(Routing):
    """``naive.py`` as a routing algorithm of a layer."""

    def __init__(self, stop_gradient: bool) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        """Capsules; the coupling is not kept."""
        assert isinstance(votes, DenseVotes)
        return Routed(naive_routing(votes.poses, votes.weight, 3, self.stop_gradient))


class Contender:
    """A network with its way of making steps.

    Args:
        machine: Where.
        precision: ``"fp32"`` or ``"bf16"``.
        name: One of `CONTENDERS`.
        batch: Images a step.
    """

    def __init__(self, machine: Machine, precision: str, name: str, batch: int) -> None:
        torch.manual_seed(0)
        network = new_network(machine).train()
        if name == "naive":
            network.class_capsules.routing = NaiveRouting(stop_gradient=False)
        fabric = launch_for(config_of(machine, precision, batch))
        compiled = torch.compile(network, backend="eager" if machine.dry else "inductor")
        recipe = Recipe(batch_size=batch, schedule="decay-by-step")  # a rate that changes
        data = RunData(range(1000), None, None, [])  # of which a step asks only for its length
        self.trainer = Trainer(fabric, compiled if name == "compiled" else network, data, recipe)
        self.network = network
        self._batches = new_batches(machine, batch, network.in_shape)

    def train(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            self.trainer.step(self._batches[self.trainer.state.step % BATCHES])

    def losses(self, steps: int) -> torch.Tensor:
        """The loss of each of so many steps."""
        found = []
        for _ in range(steps):
            self.train(1)
            found.append(float(self.trainer.last_loss))
        return torch.tensor(found)


def config_of(machine: Machine, precision: str, batch: int) -> TrainConfig:
    """A run of sabour2017 here."""
    overrides = {"batch_size": batch, "precision": PRECISIONS[precision], "accelerator": machine.device.type}
    return make_config("sabour2017", max_shift=2, checkpoint_minutes=1e6, **overrides)  # there is no run folder


def launch_for(config: TrainConfig) -> Fabric:
    """Its device and precision."""
    return launch(config.accelerator, precision=config.precision)


def new_network(machine: Machine) -> CapsNet:
    """sabour2017 for MNIST, or a tiny one."""
    tiny = {"in_shape": (1, 18, 18), "conv_channels": 4, "primary_types": 1, "decoder_hidden": (8,)}
    network = create_model("sabour2017", **(tiny if machine.dry else {}))
    assert isinstance(network, CapsNet)
    return network


def new_batches(machine: Machine, size: int, in_shape: tuple[int, int, int]) -> list[Batch]:
    """Random images and labels on the device."""
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.rand(size, *in_shape, generator=generator).to(machine.device),
            torch.randint(10, (size,), generator=generator).to(machine.device),
        )
        for _ in range(BATCHES)
    ]


def check(machine: Machine, batch: int) -> list[str]:
    """What is wrong with compiled steps; empty if nothing is."""
    wrong = []
    for precision in PRECISIONS:
        plain, compiled = (Contender(machine, precision, name, batch).losses(CHECKED) for name in ("plain", "compiled"))
        if not torch.allclose(compiled, plain, rtol=COMPILED_TOLERANCE[precision]):
            wrong.append(f"{precision}: losses compiled {compiled.tolist()}, plain {plain.tolist()}")
    return wrong


def time_all(machine: Machine, batch: int, rounds: int, *, compiled: bool) -> list[Row]:
    """Every contender in both precisions, in turns."""
    contenders = []
    for precision, name in itertools.product(PRECISIONS, CONTENDERS):
        if name == "compiled" and not compiled:
            continue
        contender = Contender(machine, precision, name, batch)
        peak = machine.peak_mib(lambda contender=contender: contender.train(WARM_UP + 2))
        contenders.append((Row(f"training step, {precision}", name, batch, [], peak), contender))
    in_a_row = 2 if machine.dry else IN_A_ROW
    for _ in range(rounds):
        for row, contender in contenders:
            seconds = machine.wall_seconds(lambda contender=contender: contender.train(in_a_row))
            row.times_us.append(1e6 * seconds / in_a_row)
    return [row for row, _ in contenders]


class Epoch(NamedTuple):
    """The training loop over one epoch, bf16."""

    steps: int
    seconds: float
    """Of the training steps."""
    validation_seconds: float
    rows: list[Row]
    """Both, for the table."""


def time_epoch(machine: Machine, batch: int) -> Epoch:
    """Run `torchcaps train`'s own loop over random images, shifted by up to two pixels, and its validation."""
    network = new_network(machine)
    train, validation = (random_images(n, network.in_shape) for n in (TINY if machine.dry else MNIST))
    dataset = Dataset("random", train, validation, validation, tuple("0123456789"))
    config = config_of(machine, "bf16", batch)
    fabric = launch_for(config)
    batches = run_data(dataset, config.recipe, fabric, config.seed)
    trainer = Trainer(fabric, network, batches, config.recipe)
    assert batches.validation is not None
    judged = batches.validation
    print_waits(machine, config, train)
    rows = [Row(f"epoch of {len(train):,} images, bf16", what, batch, [], 0.0) for what in ("training", "validation")]
    for n in range(EPOCHS + 1):
        seconds = (
            machine.wall_seconds(lambda: trainer.train_epoch([])),
            machine.wall_seconds(lambda: trainer.judge(judged)),
        )
        trainer.state.end_epoch({})
        for row, each in zip(rows, seconds, strict=True):
            if n > 0:  # the first epoch warms up
                row.times_us.append(1e6 * each)
    return Epoch(trainer.steps, *(statistics.median(row.times_us) / 1e6 for row in rows), rows)


def print_waits(machine: Machine, config: TrainConfig, train: ImageSet) -> None:
    """How often the host waits for the device within an epoch, where it should never do so."""
    contender = Contender(machine, "bf16", "plain", config.recipe.batch_size)
    contender.train(WARM_UP)
    batches = run_data(train, config.recipe, launch_for(config), config.seed).train.batches(0)
    next(batches)
    waits = {
        "a step": machine.waits(lambda: contender.train(1)),
        "the making of a batch": machine.waits(lambda: next(batches)),
    }
    print("the host waits for the device: " + ", ".join(f"{n} times in {what}" for what, n in waits.items()))


def random_images(number: int, in_shape: tuple[int, int, int]) -> ImageSet:
    """Noise with labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, *in_shape), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(10, (number,), generator=generator))


def print_kernels(machine: Machine, batch: int) -> None:
    """Device time of every kernel of a plain step."""
    contender = Contender(machine, "bf16", "plain", batch)
    contender.train(WARM_UP)
    machine.profile(lambda: contender.train(1), "a training step, bf16")
