"""Derivatives of whole networks, of every kind that torch has, and networks without numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import torchcaps
from support import assert_close, assert_raises, assert_same, drawn_for, image_presets, labels_for, small
from torchcaps.errors import WrongType
from torchcaps.models.loss import SpreadLoss
from torchcaps.nn import CapsuleHead, DenseCapsules

every_preset = pytest.mark.parametrize("preset", image_presets())
Parameters = dict[str, Tensor]


class Learning(nn.Module):
    """The loss of a small network of a preset in float64, which learns, but draws nothing and counts nothing."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = torchcaps.create_model(preset, **small(preset)).double().train()
        for module in self.network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd | SpreadLoss):
                module.eval()
        for parameter in self.network.parameters():
            if not parameter.any():  # of zeros alone, self-routing's outputs are all alike
                nn.init.normal_(parameter, std=0.1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        output = self.network(images, targets)
        total: Tensor = self.network.loss(output, drawn_for(self.network, images), targets).total
        return total

    def batch(self, number: int = 2) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.rand(number, *self.network.in_shape).double(), labels_for(self.network, number)


def loss_of(learning: Learning) -> Callable[..., Tensor]:
    """The loss as a function of the parameters, images and targets."""
    return lambda parameters, images, targets: functional_call(learning, parameters, (images, targets))


@pytest.mark.slow
@every_preset
def test_gradients_of_each_image_by_vmap(preset: str) -> None:
    network = Learning(preset)
    images, targets = network.batch()
    loss = loss_of(network)
    parameters = dict(network.named_parameters())
    one = lambda parameters, image, target: loss(parameters, image[None], target[None])  # noqa: E731
    found = vmap(grad(one), (None, 0, 0))(parameters, images, targets)
    for n in range(len(images)):
        total = loss(parameters, images[n : n + 1], targets[n : n + 1])
        alone = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
        assert_same({name: each[n] for name, each in found.items()}, dict(zip(parameters, alone, strict=True)), 1e-9)


@pytest.mark.slow
@every_preset
def test_a_gradient_penalty_and_forward_mode(preset: str) -> None:
    """The slope of a gradient's square along a direction: backward twice, and forward over backward."""
    network = Learning(preset)
    images, targets = network.batch()
    loss = loss_of(network)
    parameters = {name: each.detach() for name, each in network.named_parameters()}
    along = {name: torch.randn_like(each) for name, each in parameters.items()}

    def penalty(parameters: Parameters, images: Tensor) -> Tensor:
        return grad(loss, 1)(parameters, images, targets).square().sum()

    leaf = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(dict(network.named_parameters()), leaf, targets), leaf, create_graph=True)
    grads = torch.autograd.grad(
        slope.square().sum(), list(network.parameters()), allow_unused=True, materialize_grads=True
    )
    by_backward = sum((each * step).sum() for each, step in zip(grads, along.values(), strict=True))
    value, by_forward = torch.func.jvp(lambda parameters: penalty(parameters, images), (parameters,), (along,))
    assert_close(slope.square().sum(), value, 1e-9)
    assert_close(by_backward / by_forward, 1.0, 1e-7)


@every_preset
def test_hooks_see_the_gradient_of_every_module(preset: str) -> None:
    network = Learning(preset)
    images, targets = network.batch()
    loss = loss_of(network)
    wanted = grad(loss)(dict(network.named_parameters()), images, targets)
    seen: list[str] = []
    for name, module in network.named_modules():
        module.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    loss(dict(network.named_parameters()), images, targets).backward()
    assert_same({name: each.grad for name, each in network.named_parameters()}, wanted, 1e-9)
    for name, module in network.named_modules():
        assert name in seen or isinstance(module, nn.ModuleList) or not list(module.parameters()), name


@pytest.mark.slow
@every_preset
def test_networks_without_numbers(preset: str) -> None:
    with FakeTensorMode():
        fake = torchcaps.create_model(preset, **small(preset))
        images = torch.rand(2, *fake.in_shape)
        scores = fake(images).scores
    with torch.device("meta"):
        planned = torchcaps.create_model(preset, **small(preset))
    real = torchcaps.create_model(preset, **small(preset))
    fakes, plans, reals = (
        {name: each.shape for name, each in net.state_dict().items()} for net in (fake, planned, real)
    )
    assert fakes == plans == reals
    assert scores.shape == (2, fake.num_classes)


def test_the_margin_of_the_spread_loss_grows_with_steps_of_training_alone() -> None:
    loss = SpreadLoss(spread_growth=2)
    scores, targets = torch.rand(3, 4), torch.arange(3)
    grad(lambda scores: loss(scores, targets))(scores)
    assert loss.steps == 0
    loss(scores, targets)
    assert loss.steps == 1
    loss.eval()(scores, targets)
    assert loss.steps == 1


def test_torch_fx_is_refused() -> None:
    for module in (torchcaps.create_model("first"), DenseCapsules(3, 4, 2, 5), CapsuleHead(3, 10)):
        assert_raises(WrongType, torch.fx.symbolic_trace, module, say="torch.fx.symbolic_trace cannot trace")
