"""Interests of users: B2I routing against ComiRec's equations, and what recommenders do with interests."""

import copy

import pytest
import torch
from torch import Tensor

from routing_cases import random
from support import assert_close, assert_finite, assert_raises, with_gradients
from torchcaps.errors import InputError
from torchcaps.nn import (
    B2IRouting,
    Capsules,
    DenseCapsules,
    interest_scores,
    interests_of_history,
    label_aware_attention,
)
from torchcaps.nn.routing.b2i import NOISE_ITEMS
from torchcaps.testing import check_routing

HISTORIES = torch.tensor([[1] * 9, [1, 1, 1, 0, 0, 0, 0, 0, 0], [0] * 9, [1] * 6 + [0] * 3], dtype=torch.bool)


def comirec(low: Tensor, mask: Tensor, logits: Tensor, iterations: int) -> Tensor:
    """The capsules of one user as ComiRec's code computes them, item by item; ``low`` (I, J, D) are the votes."""
    for iteration in range(iterations):
        coupling = logits.softmax(1) * mask[:, None]
        high = torch.einsum("ij,ijd->jd", coupling, low)
        squares = high.square().sum(1, keepdim=True)
        high = squares / (1 + squares) * high / (squares + 1e-9).sqrt()
        if iteration < iterations - 1:
            logits = logits + torch.einsum("jd,ijd->ij", high.detach(), low.detach())
    return high


def test_interests_are_those_of_comirecs_equations() -> None:
    for iterations in (1, 3):
        routing = {"name": "b2i", "num_iterations": iterations}
        layer = DenseCapsules(None, 5, 4, 5, transform="common", routing=routing).double().eval()
        items = random(4, 9, 5).requires_grad_()
        prior = layer.routing.prior(layer.votes(Capsules(items, mask=HISTORIES))[0])
        assert prior.abs().max() <= 2
        assert 0.7 < prior.std() < 1.1
        got = layer(Capsules(items, mask=HISTORIES)).poses
        low = (items @ layer.transform.weight.T)[:, :, None].expand(-1, -1, 4, -1)
        wanted = torch.stack([comirec(*each, iterations) for each in zip(low, HISTORIES.double(), prior, strict=True)])
        assert_close(got, wanted, 1e-12)
        leaves = items, layer.transform.weight
        ours, theirs = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (got, wanted))
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, 1e-10)


def test_interests_differ_and_noise_is_drawn_anew_in_training() -> None:
    for start in ("noise", "queries"):
        layer = DenseCapsules(None, 5, 4, 5, transform="common", routing=B2IRouting(start_from=start))
        items = torch.randn(2, 7, 5)
        first, second = layer(items).poses, layer(items).poses
        assert torch.pdist(first[0]).min() > 1e-3
        assert first.equal(second) == (start == "queries")


def test_the_noise_of_evaluation_is_the_same_everywhere() -> None:
    layer = DenseCapsules(None, 5, 4, 5, transform="common", routing="b2i").eval()
    few, many = torch.randn(2, 7, 5), torch.randn(1, NOISE_ITEMS + 1, 5)
    eager = layer(few).poses
    drawn = layer.routing._noise
    longer = layer.routing.prior(layer.votes(many)[0])
    assert longer[0, :NOISE_ITEMS].equal(drawn)
    assert layer(few).poses.equal(eager)
    assert layer.routing.prior(layer.votes(few.double())[0]).equal(drawn[:7].double().expand(2, -1, -1))
    assert copy.deepcopy(layer).to("meta")(few.to("meta")).poses.shape == eager.shape
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(few).poses, eager)
    exported = torch.export.export(layer, (few,)).module()
    torch.testing.assert_close(exported(few).poses, eager)
    fresh = DenseCapsules(None, 5, 4, 5, transform="common", routing="b2i").eval()
    assert_raises(InputError, torch.export.export, fresh, (many,), say="at most 4096 items")


def test_b2i_has_the_properties_of_a_routing() -> None:
    by_place = ("input order", "output order")  # noise belongs to places
    check_routing(B2IRouting().eval(), skip=(*by_place, "gradients"))
    check_routing(B2IRouting(start_from="queries"), skip=("output order", "rotation"))


def test_the_number_of_interests_grows_with_the_history() -> None:
    assert interests_of_history(HISTORIES, 4).sum(1).tolist() == [3, 1, 1, 2]
    assert interests_of_history(torch.ones(1, 500, dtype=torch.bool), 4).sum().item() == 4


def test_a_label_chooses_among_the_interests() -> None:
    interests, items = random(3, 4, 5).abs(), random(3, 5, seed=1).abs()
    mask = torch.tensor([[True] * 4, [True, False, False, False], [True, True, False, False]])
    for power in (0.0, 1.0, 2.0, None):
        got = label_aware_attention(interests, items, power, mask)
        for row in range(3):
            own = interests[row, mask[row]]
            fits = own @ items[row]
            hardest = torch.nn.functional.one_hot(fits.argmax(), len(own)).double()
            weights = hardest if power is None else (fits**power).softmax(0)
            assert_close(got[row], weights @ own)


@pytest.mark.parametrize("power", [None, 0.0, 0.5, 1.0, 2.0, 30.0])
def test_attention_is_finite_for_interests_of_zero_and_for_long_ones(power: float | None) -> None:
    interests, items = torch.zeros(3, 4, 5), torch.ones(3, 5)
    interests[1, 0], interests[2] = 1.0, 1e4
    leaves = {"interests": interests.requires_grad_(), "items": items.requires_grad_()}
    user = label_aware_attention(interests, items, power)
    assert_finite(with_gradients({"user": user}, leaves).values())
    assert_close(user[2], torch.full((5,), 1e4))
    assert not user[0].any()


def test_an_item_is_as_good_as_the_interest_that_fits_it_best() -> None:
    interests, items = random(2, 3, 5), random(7, 5, seed=1)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    scores = interest_scores(interests, items, mask)
    assert torch.allclose(scores[0], (interests[0] @ items.T).amax(0))
    assert torch.allclose(scores[1], interests[1, 0] @ items.T)
