"""The section ``step`` of speed.py: training steps, inference, an epoch and peak memory of sabour2017."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from contenders import Contender, Row, Sizes, compare, expect, new_batch
from measuring import Work, isolated, multiplies_bf16, peak_mib
from torch import Tensor, nn

from torchcaps import fit
from torchcaps.datasets import ImageSet
from torchcaps.training import Progress, Recipe


def step(sizes: Sizes) -> Iterator[Row]:
    """Steps, peak memory, inference and an epoch of sabour2017 on MNIST's size."""
    ours, floor = Contender("torchcaps", sizes.network), Contender("convolutions", sizes.network)
    naive, batch = Contender("naive", sizes.network), new_batch(sizes.batch, ours.network)
    small = new_batch(8, ours.network)
    works: dict[str, Work]
    for stop in (True, False):
        pair = [Contender(name, sizes.network, stop) for name in ("torchcaps", "naive")]
        for _ in range(2):  # the second loss is equal where the gradients of all weights were
            expect("loss of a step", pair[0].step(*small), pair[1].step(*small), 1e-4)
        if not stop:
            works = {"torchcaps": partial(ours.step, *batch), "convolutions": partial(floor.step, *batch)}
            yield compare("step, full: torchcaps ÷ convolutions alone", works, sizes.rounds)
        works = {"naive": partial(pair[1].step, *batch), "torchcaps": partial(pair[0].step, *batch)}
        yield compare(f"step, {'stopped' if stop else 'full'}: naive ÷ torchcaps", works, sizes.rounds)
    if multiplies_bf16():
        half = Contender("torchcaps", sizes.network, bf16=True)
        expect("loss in bfloat16", half.loss(*small).detach(), Contender("torchcaps", sizes.network).loss(*small), 5e-2)
        works = {"bf16": partial(half.step, *batch), "float32": partial(ours.step, *batch)}
        yield compare("step, full: torchcaps (bf16) ÷ torchcaps (float32)", works, sizes.rounds)
    peaks = [isolated("steps", "step_peak", name, sizes.batch, sizes.network) for name in ("torchcaps", "naive")]
    yield Row("step, peak memory: torchcaps ÷ naive", peaks[0] / peaks[1])
    image, images = new_batch(1, ours.network), new_batch(sizes.many, ours.network)
    works = {"torchcaps": partial(ours.infer, *image), "convolutions": partial(floor.infer, *image)}
    yield compare("one image, inference: torchcaps ÷ convolutions alone", works, 5 * sizes.rounds, sizes.seconds)
    works = {"naive": partial(naive.infer, *images), "torchcaps": partial(ours.infer, *images)}
    yield compare("512 images, inference: naive ÷ torchcaps", works, sizes.rounds)
    data = (255 * torch.rand(10 * sizes.batch, *ours.network.in_shape)).to(torch.uint8)
    train = ImageSet(data, torch.randint(10, (len(data),)))
    recipe = Recipe(epochs=1, batch_size=sizes.batch, max_shift=2)
    pooled = nn.Sequential(floor.module, nn.AdaptiveAvgPool2d(1), nn.Flatten())  # scores, as fit asks for
    run = partial(fit, dataset=train, recipe=recipe, precision="32", progress=Progress())
    works = {
        "torchcaps": partial(run, ours.network),
        "convolutions": partial(run, pooled, loss=_mean_square),
    }
    yield compare("epoch of torchcaps.fit: torchcaps ÷ convolutions alone", works, max(sizes.rounds // 2, 1))


def _mean_square(output: Tensor, _: Tensor) -> Tensor:
    return output.float().square().mean()


def step_peak(name: str, batch: int, network: dict[str, Any]) -> float:
    """Peak memory of three steps in this process, MiB, beyond Python, torch and what its optimizer imports."""
    torch.optim.Adam([torch.zeros(1, requires_grad=True)], fused=True)

    def make() -> Work:
        contender = Contender(name, network)
        return partial(contender.step, *new_batch(batch, contender.network))

    return peak_mib(make, 3)
