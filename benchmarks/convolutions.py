"""The sections ``convolution`` and ``choice`` of speed.py: our convolutions beside those of PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from contenders import Row, Sizes, compare, expect, new_network
from measuring import Ratio, Work, ratio, times_in_turns
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model
from torchcaps.ops.convolution import Backend, convolve

Convolution = Callable[..., Tensor]


class ConvolutionCase(NamedTuple):
    """A convolution of a network with random features and a random gradient of its output."""

    features: Tensor
    weight: Tensor
    bias: Tensor
    stride: int

    def placed(self) -> ConvolutionCase:
        """The same numbers in the memory order of torchcaps' networks: features (H, W, B, C)."""
        features = self.features.detach().permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        return self._replace(features=features.requires_grad_(self.features.requires_grad))

    def forward(self, convolution: Convolution) -> Tensor:
        """The output alone; nothing is kept for a backward pass."""
        with torch.no_grad():
            return convolution(*self)

    def both(self, convolution: Convolution) -> tuple[Tensor, ...]:
        """The output and the gradients of weight, bias and, but for images, features."""
        output = convolution(*self)
        wanted = [each for each in self[:3] if each.requires_grad]
        return (output.detach(), *torch.autograd.grad(output, wanted, torch.cos(output.detach())))


def convolution_cases(network: CapsNet, batch: int) -> Iterator[ConvolutionCase]:
    """The convolutions of a network up to its primary capsules, one after the other."""
    found = [each for each in network.backbone.modules() if isinstance(each, nn.Conv2d)]
    shape = torch.Size((batch, *network.in_shape))
    for n, each in enumerate([*found, network.primary_capsules.convs[0]]):
        assert isinstance(each, nn.Conv2d)
        weight = each.weight.detach().clone().requires_grad_()
        bias = torch.zeros(len(weight)) if each.bias is None else each.bias.detach().clone()
        yield ConvolutionCase(
            torch.randn(shape).requires_grad_(n > 0), weight, bias.requires_grad_(), int(each.stride[0])
        )
        shape = F.conv2d(torch.empty(shape, device="meta"), weight.to("meta"), stride=each.stride).shape


def convolution(sizes: Sizes) -> Iterator[Row]:
    """The two convolutions of sabour2017, each alone, against `F.conv2d` in PyTorch's memory order."""
    torch.manual_seed(0)
    first, primary = convolution_cases(new_network(sizes), sizes.batch)
    for name, case in (("first", first), ("primary", primary)):
        small = case._replace(features=case.features.detach()[:8].requires_grad_(case.features.requires_grad))
        for ours, wanted in zip(small.placed().both(convolve), small.both(F.conv2d), strict=True):
            expect(f"{name} convolution", ours, wanted, 1e-4)
    for name, case, run, what in (
        ("primary", primary, ConvolutionCase.both, "forward + backward"),
        ("first", first, ConvolutionCase.both, "forward + backward"),
        ("primary", primary, ConvolutionCase.forward, "forward only, weights unchanged"),
    ):
        works = {"torchcaps": partial(run, case.placed(), convolve), "F.conv2d": partial(run, case, F.conv2d)}
        yield compare(f"{name} convolution, {what}: torchcaps ÷ F.conv2d", works, sizes.rounds)


def choice(sizes: Sizes) -> Iterator[Row]:
    """The way that `convolve` chooses against each way by force, on the convolutions of the presets."""
    ways: tuple[Backend, ...] = ("plain", "columns", "transform")
    auto: Backend = "auto"
    worst = Row("", 0.0)
    for preset, batch in itertools.product(sizes.choice_presets, sizes.choice_batches):
        network = create_model(preset)
        assert isinstance(network, CapsNet)
        for n, case in enumerate(convolution_cases(network, batch)):
            for way in (auto, *ways[1:]):
                both = case.both(partial(convolve, backend=way)), case.both(partial(convolve, backend="plain"))
                for ours, wanted in zip(*both, strict=True):
                    expect(f"{preset}, convolution {n + 1}, {way}", ours, wanted, 1e-4)
            for run in (ConvolutionCase.forward, ConvolutionCase.both):
                works: dict[str, Work] = {
                    way: partial(run, case.placed(), partial(convolve, backend=way)) for way in (auto, *ways)
                }
                times = times_in_turns(works, max(sizes.rounds // 2, 1), sizes.seconds / 4)
                best = max((ratio(times["auto"], times[way]) for way in ways), key=lambda found: found.value)
                if not isinstance(worst.ratio, Ratio) or best.value > worst.ratio.value:
                    worst = Row(f"{preset}, convolution {n + 1}, {run.__name__}, batch {batch}", best, times)
    print(f"the worst choice: {worst.what}")
    yield worst._replace(what="the way that is chosen ÷ the fastest way, worst of all shapes")
