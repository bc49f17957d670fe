"""Masks: each row's result is that of its own capsules alone, whatever is written at the others."""

import itertools

import pytest
import torch
from torch import Tensor

import torchcaps
from routing_cases import random
from support import assert_close, assert_finite, assert_raises, with_gradients
from torchcaps.errors import InputError
from torchcaps.nn import BuiltVotes, Capsules, ConvCapsules, DenseCapsules

B, I, J, D = 4, 7, 3, 4
MASK = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7, [0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)


def spoil(tensor: Tensor, mask: Tensor = MASK) -> Tensor:
    """The tensor with NaN where no capsule is."""
    return tensor.where(mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2)), torch.nan)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_a_row_is_routed_as_its_own_capsules_alone(iterations: int, leaky: bool) -> None:
    poses, weight, bias, prior = random(B, I, 5), random(I, J, D, 5, seed=1), random(J, D, seed=2), random(B, I, J)
    for axis, stop, start in itertools.product(("outputs", "inputs"), (False, True), (None, prior)):
        options = {"softmax_over": axis, "stop_gradient": stop, "leaky": leaky, "bias": bias, "return_coupling": True}
        leaves = {"poses": spoil(poses).requires_grad_(), "weight": weight.clone().requires_grad_()}
        votes = torchcaps.compute_votes(leaves["poses"], leaves["weight"])
        by_loop = torchcaps.dynamic_routing(votes, iterations, **options, prior=start, mask=MASK)
        routed = torchcaps.route(**leaves, num_iterations=iterations, **options, prior=start, mask=MASK)
        for row in (0, 1, 3):
            there = MASK[row]
            cut = None if start is None else start[row : row + 1, there]
            alone = torchcaps.route(poses[row : row + 1, there], weight[there], iterations, **options, prior=cut)
            for got in (by_loop, routed):
                assert_close(got.poses[row], alone.poses[0], 1e-9)
                assert_close(got.coupling[row, there], alone.coupling[0], 1e-9)
                assert not got.poses[2].any()
                assert not got.coupling[~MASK].any()
        assert_finite(with_gradients(routed, leaves).values())
    with pytest.raises(InputError, match="no mask over inputs"):
        torchcaps.route(poses, weight, softmax_over="inputs", mask=MASK, backend="recompute")


def test_capsules_that_are_not_there_change_nothing_on_maps() -> None:
    poses, active, mask = random(2, 12, 4), random(2, 12, seed=3).sigmoid(), random(2, 12, seed=12) > 0
    for options in (
        {"transform": "dense"},
        {"transform": "matrix", "routing": "em", "coordinates": "centres"},
        {"transform": "matrix", "coordinates": "hundredths", "share_positions": True},
        {"transform": "dense", "routing": "vb", "share_positions": True},
    ):
        layer = DenseCapsules((2, 3, 2), 4, J, 4, **options).double().eval()
        votes, activations = layer.votes(Capsules(spoil(poses, mask), active, mask=mask))
        full = layer.votes(Capsules(poses, active))[0].build()
        got = layer.routing(votes, activations, return_coupling=True)
        built = BuiltVotes(full, poses).masked(mask)
        wanted = layer.routing(built, active, return_coupling=True)
        for ours, expected in zip(got, wanted, strict=True):
            if expected is not None:
                assert_close(ours, expected, 1e-9)
        for n, part in enumerate((votes[slice(0, 1)], votes[slice(1, 2)])):
            assert_close(part.weighted_sum(None)[0], votes.weighted_sum(None)[n], 1e-9)


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
def test_layers_on_maps_hand_masks_on(compete_over: str) -> None:
    layer = ConvCapsules(2, 4, 3, 4, compete_over=compete_over, routing={"name": "em", "cost_scale": 1.0}).double()
    poses, active = random(2, 2 * 4 * 5, 4), random(2, 40, seed=3).sigmoid()
    mask = torch.ones(2, 2, 4, 5, dtype=torch.bool)
    mask[0, :, :, 2:] = False
    mask[1] = False
    mask = mask.flatten(1)
    got = layer(Capsules(spoil(poses, mask), active, (2, 4, 5), mask))
    silent = layer(Capsules(poses.where(mask.unsqueeze(2), 5.0), active * mask, (2, 4, 5)))
    there = got.mask.unflatten(1, got.grid)
    assert there[0, :, :, :2].all()
    assert not there[0, :, :, 2:].any()
    assert not there[1].any()
    assert_close(got.poses[got.mask], silent.poses[got.mask], 1e-9)
    assert not got.poses[~got.mask].any()


def test_weights_of_each_capsule_need_their_number() -> None:
    for transform in ("dense", "elementwise", "matrix"):
        assert_raises(InputError, DenseCapsules, None, 4, J, 4, transform=transform, say="in_capsules must be a number")
    said = "SelfRouting has weights for each input capsule"
    assert_raises(InputError, DenseCapsules, None, 4, J, 4, transform="shared", routing="self", say=said)
