"""Mistakes that were found in published capsule networks, each caught by a test of behaviour.

MNIST accuracy hides all of them. Each test states a property, asserts it of the code, and shows that a version with
the mistake breaks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import (
    assert_batch_independent,
    assert_close,
    assert_finite,
    assert_sums_to_one,
    holds,
)
from torchcaps import create_model, dynamic_routing, margin_loss, safe_norm, squash
from torchcaps.nn import DenseCapsules, PrimaryCapsules, Votes
from torchcaps.nn.routing import dynamic


def naive_squash(s: Tensor, dim: int = -1) -> Tensor:
    """As printed in the paper, with ‖s‖."""
    norm = s.norm(dim=dim, keepdim=True)
    return norm**2 / (1 + norm**2) * s / norm


# ---- softmax on the unnamed axis


def test_softmax_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = torch.randn(2, 5, 4, 3)

    def competes_where_it_says(axis: Any) -> None:
        assert_sums_to_one(dynamic_routing(votes, softmax_over=axis, return_coupling=True).coupling, axis)

    competes_where_it_says("outputs")
    competes_where_it_says("inputs")
    # F.softmax(b) without dim takes axis 0 or 1, whatever the rank; dim=-1 is right for one layout of b only
    for dim in (0, 1, 2):
        monkeypatch.setattr(Votes, "compete", lambda _, logits, *__, dim=dim, **___: logits.softmax(dim))
        assert not (holds(competes_where_it_says, "outputs") and holds(competes_where_it_says, "inputs"))
    assert holds(competes_where_it_says, "outputs"), "the last of them is right over the outputs"


# ---- a reshape where a permute was meant


def test_reshape_is_not_permute(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PrimaryCapsules(3, primary_types=4, primary_dim=5, primary_kernel=3, primary_stride=1)
    images = torch.randn(1, 3, 6, 7)
    rows, columns = 4, 5

    def a_capsule_sees_one_location(layer: PrimaryCapsules) -> None:
        """A change of the pixel in the corner reaches, of each type, the capsule in the corner only."""
        changed = images.clone()
        changed[..., 0, 0] += 10
        touched = (layer(images).poses - layer(changed).poses).abs().amax(-1)[0] > 1e-6
        assert touched.nonzero().flatten().tolist() == [t * rows * columns for t in range(4)]

    def reshaped(self: PrimaryCapsules, maps: Tensor) -> Tensor:
        return maps.reshape(len(maps), -1, self.primary_dim).transpose(1, 2)

    a_capsule_sees_one_location(layer)
    monkeypatch.setattr(PrimaryCapsules, "_group", reshaped)
    assert not holds(a_capsule_sees_one_location, layer)


# ---- squash over the wrong axis, or over one of size one


def test_squash_axis() -> None:
    s = torch.randn(2, 5, 8)  # (B, I, K)

    def squashes_capsules(squashed: Tensor) -> None:
        """Each capsule keeps its direction and gets the length n/(1+n)."""
        n = s.square().sum(-1)
        assert_close(squashed.norm(dim=-1), n / (1 + n), 1e-4)
        assert_close(torch.cosine_similarity(squashed, s, dim=-1), torch.ones(2, 5), 1e-4)

    squashes_capsules(squash(s))
    assert not holds(squashes_capsules, squash(s, dim=1)), "over the capsules"
    assert not holds(squashes_capsules, squash(s[..., None]).squeeze(-1)), "over an axis of size one"


def test_layers_squash_the_right_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = torch.randn(2, 5, 4, 3, dtype=torch.float64)

    def capsule_is_its_squashed_sum(_: None = None) -> None:
        capsules, _, coupling = dynamic_routing(votes, return_coupling=True)
        for b, j in itertools.product(range(2), range(4)):
            s = (coupling[b, :, j, None] * votes[b, :, j]).sum(0)
            assert_close(capsules[b, j], s * s.norm() / (1 + s.norm() ** 2), 1e-6)

    capsule_is_its_squashed_sum()
    monkeypatch.setattr(dynamic, "squash", lambda s, eps: squash(s, 1, eps))
    assert not holds(capsule_is_its_squashed_sum)


# ---- softmax of the lengths before the margin loss; square forgotten


def test_no_softmax_before_the_margin_loss() -> None:
    """Perfect capsules cost nothing: the present one longer than 0.9, the absent ones shorter than 0.1."""
    lengths, labels = torch.tensor([[0.95, 0.05, 0.05], [0.01, 0.92, 0.09]]), torch.tensor([0, 1])

    def perfect_capsules_cost_nothing(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        assert_close(loss(lengths, labels), 0.0)

    perfect_capsules_cost_nothing(margin_loss)
    assert not holds(perfect_capsules_cost_nothing, lambda x, y: margin_loss(x.softmax(-1), y))


def test_margins_are_squared() -> None:
    """Twice the shortfall costs four times as much."""

    def grows_with_the_square(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        near, far = (loss(torch.tensor([[length, 0.0]]), torch.tensor([0])) for length in (0.7, 0.5))
        assert_close(far / near, 4.0, 1e-5)

    grows_with_the_square(margin_loss)
    assert not holds(grows_with_the_square, lambda x, y: margin_loss(x, y, power=1))


# ---- logits shared or averaged over the batch


def test_logits_belong_to_one_image() -> None:
    votes = torch.randn(3, 5, 4, 2)

    def averaged(votes: Tensor) -> Tensor:
        logits = torch.zeros(5, 4)  # one for the whole batch
        for _ in range(3):
            capsules = squash(torch.einsum("ij,bijd->bjd", logits.softmax(1), votes))
            logits = logits + torch.einsum("bijd,bjd->bij", votes, capsules).mean(0)
        return capsules

    for axis in ("outputs", "inputs"):
        assert_batch_independent(lambda batch, axis=axis: dynamic_routing(batch, softmax_over=axis).poses, votes)
    assert_close(averaged(votes[:1]), dynamic_routing(votes[:1]).poses, 1e-5)  # with one image nobody sees it
    assert not holds(assert_batch_independent, averaged, votes)


@pytest.mark.parametrize("preset", ["sabour2017", "torch-notebook"])
def test_networks_look_at_one_image_at_a_time(preset: str) -> None:
    model = create_model(preset, (1, 20, 20), conv_channels=4, primary_types=2).eval()
    images = torch.rand(3, 1, 20, 20)
    assert_batch_independent(lambda batch: model(batch).lengths, images)

    def mixed(batch: Tensor) -> Tensor:
        return model(batch - batch.mean(0)).lengths

    assert not holds(assert_batch_independent, mixed, images)


# ---- a decoder with a sigmoid asked for standardised pixels


def test_decoder_can_reach_its_target() -> None:
    """What the decoder is compared with lies in the range of its sigmoid, also where the network scales its pixels."""
    images = torch.rand(2, 1, 20, 20)
    labels = torch.tensor([0, 1])

    def target_is_in_reach(target: Tensor) -> None:
        assert target.min() >= 0
        assert target.max() <= 1

    for scale in (1.0, 255.0):
        model = create_model("sabour2017", (1, 20, 20), conv_channels=4, primary_types=2, pixel_scale=scale)
        output = model(images, labels)
        target_is_in_reach(output.reconstruction)
        error = model.loss(output, images, labels).reconstruction
        assert_close(error, (output.reconstruction - images).square().sum() / 2, 1e-4)
        perfect = output._replace(reconstruction=images)
        assert_close(model.loss(perfect, images, labels).reconstruction, 0.0)
    assert not holds(target_is_in_reach, (images - images.mean()) / images.std())
    assert not holds(target_is_in_reach, images * 255)


# ---- NaN at a zero vector


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_vectors(dtype: torch.dtype) -> None:
    def zero_is_safe(function: Callable[[Tensor], Tensor]) -> None:
        s = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        result = function(s)
        result.sum().backward()
        assert_finite([result, s.grad])

    zero_is_safe(squash)
    zero_is_safe(safe_norm)
    assert not holds(zero_is_safe, naive_squash)
    assert not holds(zero_is_safe, lambda s: s.square().sum(-1).sqrt())


def test_black_images() -> None:
    """All primary capsules zero, nothing NaN."""
    for preset in ("sabour2017", "keras-tutorial", "torch-tutorial"):
        model = create_model(preset, (1, 20, 20), conv_channels=4, primary_types=2)
        for name, parameter in model.named_parameters():
            if "conv" in name and name.endswith("bias"):
                nn.init.zeros_(parameter)
        labels = torch.tensor([0, 1])
        images = torch.zeros(2, 1, 20, 20)
        output = model(images, labels)
        model.loss(output, images, labels).total.backward()
        assert_close(model.primary(images).poses, 0.0)
        assert_finite([output.lengths, *(parameter.grad for parameter in model.parameters())])


# ---- NaN, or nothing, when capsule layers are stacked


def test_vote_scale_in_a_stack() -> None:
    """From its start, a stack of three neither dies nor saturates: gradients of a useful size reach every layer."""

    def stack(factor: float) -> nn.Sequential:
        layers = [DenseCapsules(*sizes) for sizes in ((32, 8, 16, 8), (16, 8, 8, 8), (8, 8, 4, 16))]
        for layer in layers:
            layer.transform.weight.data *= factor
        return nn.Sequential(*layers)

    poses = F.normalize(torch.randn(16, 32, 8), dim=-1)

    def is_alive(network: nn.Sequential) -> None:
        lengths = network(poses).scores()
        lengths.sum().backward()
        gradients = [layer.transform.weight.grad for layer in network]
        assert_finite([lengths, *gradients])
        assert 0.05 < lengths.mean() < 0.95
        assert all(gradient.norm() > 1e-3 for gradient in gradients)
        assert all((layer_lengths > 1e-3).all() for layer_lengths in lengths.std(0))

    is_alive(stack(1))
    assert not holds(is_alive, stack(0.1)), "too small: each layer squares what is left"
    assert not holds(is_alive, stack(30)), "too large: every capsule is as long as can be"


def test_naive_squash_of_a_vanished_stack_is_not_a_number() -> None:
    s = (torch.randn(4, 8) * 1e-30).requires_grad_()

    def gradient_is_finite(function: Callable[[Tensor], Tensor]) -> None:
        (gradient,) = torch.autograd.grad(function(function(s)).sum(), s)
        assert_finite([gradient])

    gradient_is_finite(squash)
    assert not holds(gradient_is_finite, naive_squash)
