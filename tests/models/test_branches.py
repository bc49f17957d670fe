"""Networks with branches, held to the equations of their source, written once more in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support import assert_close, assert_raises, small
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.models import BranchedNetwork

SHAPE, CLASSES = (1, 17, 15), 5
NAMES = ("hvc2021-equal", "hvc2021-learned", "hvc2021-random")


def built(name: str = "hvc2021-learned", **overrides: Any) -> BranchedNetwork:
    return create_model(name, SHAPE, CLASSES, **small(name) | overrides).double()


def plain_logits(network: BranchedNetwork, images: Tensor, training: bool) -> Tensor:
    """The equations of the authors' code: TensorFlow's order of axes, sums written out, no module of ours."""

    def normalised(x: Tensor, norm: Any, shift: Tensor) -> Tensor:
        """The last axis has the channels."""
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes, unbiased=False)
        if not training:
            mean, variance = norm.running_mean, norm.running_var
        return (x - mean) / (variance + 1e-3).sqrt() + shift

    x = ((images * 255 / 256) - 0.5) * 2
    logits = []
    for stage, branch in zip(network.stages, network.branches, strict=True):
        for first in range(0, 8, 4):
            convolution, norm, shift, _ = list(stage)[first : first + 4]
            x = F.conv2d(x, convolution.weight)
            x = normalised(x.permute(0, 2, 3, 1), norm, shift.bias).relu().permute(0, 3, 1, 2)
        capsules = x.permute(0, 2, 3, 1).flatten(1, 2)  # (B, H·W, C)
        total = (capsules[:, :, None] * branch.transform.matrices).sum(1)
        outputs = normalised(total, branch.routing.norm, branch.routing.bias).relu()
        logits.append((outputs.square().sum(2) + 1e-24).sqrt())
    weight = torch.ones(len(logits)) if network.classify.weight is None else network.classify.weight
    merged = normalised(torch.stack(logits, 2) * weight, network.classify.norm, network.classify.shift.bias)
    return merged.sum(2)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_the_source(name: str) -> None:
    network, images, labels = built(name), torch.rand(6, *SHAPE).double(), torch.tensor([0, 4, 1, 3, 2, 2])
    for shift in (module for key, module in network.named_parameters() if key.endswith("bias")):
        torch.nn.init.normal_(shift, std=0.3)
    weights = list(network.parameters())
    output = network(images)
    plain = plain_logits(network, images, training=True)
    assert_close(output.logits, plain, 1e-10)
    ours = torch.autograd.grad(network.loss(output, images, labels).total, weights)
    theirs = torch.autograd.grad(F.cross_entropy(plain, labels), weights)
    for each, other in zip(ours, theirs, strict=True):
        assert_close(each, other, 1e-9)
    # in the code the first layer sees 2x − 1 and here 2x: the statistics differ by the sum of the kernel
    network.eval()
    convolution, first, *_ = network.stages[0]
    mean = first.running_mean.clone()
    evaluated = network(images).logits
    first.running_mean.sub_(convolution.weight.sum((1, 2, 3)).detach())
    plain = plain_logits(network, images, training=False)
    first.running_mean.copy_(mean)
    assert_close(evaluated, plain, 1e-10)


def test_parameters_are_those_of_the_source() -> None:
    for name, number in zip(NAMES, (1_513_683, 1_513_686, 1_513_686), strict=True):
        with torch.device("meta"):
            assert sum(each.numel() for each in create_model(name).parameters()) == number


def test_branch_weights_start_as_their_name_says() -> None:
    assert built("hvc2021-equal").classify.weight is None
    assert torch.equal(built("hvc2021-learned").classify.weight, torch.ones(3).double())
    drawn = built("hvc2021-random").classify.weight
    assert len(drawn.unique()) == 3
    assert drawn.abs().max() < 0.5


def test_branches_may_have_other_capsules_and_routings() -> None:
    """Capsules at two scales, with dynamic routing and EM."""
    network = create_model(
        "hvc2021-learned", (3, 20, 24), 4,
        stages=(
            {"name": "conv", "conv_channels": 6, "conv_kernel": 5},
            {"name": "stack", "stack_channels": (8,), "stack_kernels": (3,), "stack_strides": (2,)},
        ),
        stage_capsules=({"name": "conv", "primary_types": 2, "primary_dim": 4, "primary_kernel": 3},) * 2,
        branches=(
            {"name": "dense", "capsule_dim": 6, "transform": "dense", "routing": "dynamic"},
            {"name": "dense", "capsule_dim": 4, "transform": "matrix", "routing": "em"},
        ),
    )  # fmt: skip
    output = network(torch.rand(3, 3, 20, 24))
    network.loss(output, torch.rand(3, 3, 20, 24), torch.tensor([0, 1, 3])).total.backward()
    assert output.scores.shape == (3, 4)
    assert all(each.grad is not None and each.grad.isfinite().all() for each in network.parameters())


@pytest.mark.parametrize(
    ("overrides", "say"),
    [
        (
            {"stages": ("stack",)},
            "stages, stage_capsules and branches must have one value for each branch, got 1, 3 and",
        ),
        ({"num_capsules": 3}, "each of branches must be a dense layer without num_capsules"),
    ],
)
def test_parts_that_do_not_fit_are_refused(overrides: dict[str, Any], say: str) -> None:
    assert_raises(
        InputError, create_model, "hvc2021-learned", SHAPE, CLASSES, **small("hvc2021-learned") | overrides, say=say
    )
