"""The shipped tests of properties pass what is right and fail what is wrong, each by the property that is lacking."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_raises
from torchcaps import InputError, dynamic_routing, squash
from torchcaps.errors import WrongType
from torchcaps.nn import (
    Capsules,
    DenseCapsules,
    DenseVotes,
    DynamicRouting,
    Elementwise,
    LayerSize,
    Matrix,
    Routed,
    Routing,
    Shared,
    Votes,
)
from torchcaps.testing import _CHECKS, check_capsule_layer, check_routing

_ROUTING, _LAYER = list(_CHECKS), [name for name, each in _CHECKS.items() if each.layers]


class Plain(Routing):
    """Routing by agreement of built votes, in pieces, for others to get one of them wrong."""

    def build(self, votes: Votes) -> Tensor:
        return votes.build()

    def start(self, votes: Tensor) -> Tensor:
        return votes.new_zeros(votes.shape[:3])

    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(2)

    def gather(self, coupling: Tensor, votes: Tensor) -> Tensor:
        return self.shorten(torch.einsum("bij,bijd->bjd", coupling, votes))

    def shorten(self, total: Tensor) -> Tensor:
        return squash(total)

    def agree(self, logits: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
        return logits + torch.einsum("bijd,bjd->bij", votes, capsules)

    def forward(self, votes: Votes, activations: Any = None, *, return_coupling: bool = False) -> Any:
        built = self.build(votes)
        logits = self.start(built)
        for _ in range(2):
            coupling = self.compete(logits)
            capsules = self.gather(coupling, built)
            logits = self.agree(logits, built, capsules)
        return Routed(capsules, coupling=coupling if return_coupling else None)


# ---- what is right passes


def test_plain_routing_passes() -> None:
    found = check_routing(Plain())
    assert list(found) == list(_ROUTING)
    assert found["coupling"] == "sums to one over the outputs"
    assert found["shapes"] == "capsules (1, 5, 4) for a batch of one"
    assert not any("not supported" in words for words in found.values())


@pytest.mark.parametrize("backend", ["reference", "recompute"])
@pytest.mark.parametrize("axis", ["outputs", "inputs"])
def test_the_librarys_routing_passes(axis: Any, backend: Any) -> None:
    for iterations, stop, leaky in itertools.product((0, 3), (False, True), (False, True)):
        skip = {"gradients"} if stop and iterations else set()
        if leaky or iterations == 0:
            skip.add("coupling")
        if iterations == 0:  # the plain sum of the votes
            skip.add("lengths")
        routing = DynamicRouting(iterations, softmax_over=axis, stop_gradient=stop, leaky=leaky)
        routing.backend = backend
        found = check_routing(routing, skip=skip)
        assert {name for name, words in found.items() if words == "skipped"} == skip
        if "coupling" not in skip:
            assert found["coupling"] == f"sums to one over the {axis}"


def test_other_sizes_and_the_users_module_stays_as_it_is() -> None:
    class PerOutput(Plain):
        """With parameters of its own that fix J."""

        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(3))

        def compete(self, logits: Tensor) -> Tensor:
            return (logits / self.temperature).softmax(2)

    routing = PerOutput()
    before = copy.deepcopy(routing.state_dict())
    skip = ("sizes of one",)
    found = check_routing(routing, in_capsules=4, in_dim=2, out_capsules=3, out_dim=6, skip=skip)
    assert found["used parameters"] == "1 parameters"
    assert routing.temperature.dtype == torch.float32
    assert routing.temperature.grad is None
    assert torch.equal(routing.temperature, before["temperature"])


def test_parameters_made_for_the_sizes_are_checked_too() -> None:
    routing = DynamicRouting(capsule_bias=True, learn_prior=True)
    assert check_routing(routing, skip=["rotation"])["used parameters"] == "2 parameters"
    assert not list(routing.parameters()), "a copy was told its sizes"
    said = failure(check_routing, routing)
    assert said.startswith("DynamicRouting fails “rotation”: "), "a bias does not turn with the votes"
    routing.bind(LayerSize(7, 6, 5, 4))
    assert "raises InputError: DynamicRouting: a routing with parameters belongs to one" in failure(
        check_routing, routing
    )


def test_activations_are_scores() -> None:
    class Certain(Plain):
        """Capsules of any length, and how certain they are; a parameter that only these depend on."""

        def __init__(self, factor: float = 1.0) -> None:
            super().__init__()
            self.factor, self.steepness = factor, nn.Parameter(torch.ones(()))

        def shorten(self, total: Tensor) -> Tensor:
            return total

        def forward(self, *args: Any, **options: Any) -> Any:
            routed = super().forward(*args, **options)
            certain = (self.steepness * routed.poses.square().sum(-1)).tanh()
            return routed._replace(activations=self.factor * certain)

    found = check_routing(Certain())
    assert found["lengths"] == "activations of 1 at most"
    assert found["used parameters"] == "1 parameters"
    assert "activations lie in " in failure(check_routing, Certain(2.0))
    layer = DenseCapsules(7, 6, 5, 4, routing=Certain())
    assert check_capsule_layer(layer)["lengths"].startswith("activations of ")


def test_a_routing_that_asks_is_right_over_any_transform() -> None:
    for transform, K, D in ((Shared, 6, 4), (Elementwise, 4, 4), (Matrix, 4, 4)):
        layer = DenseCapsules(7, K, 5, D, transform=transform(), routing=DynamicRouting(2))
        assert list(check_capsule_layer(layer)) == list(_LAYER)


def test_no_coupling_is_fine_and_noted() -> None:
    class Silent(Plain):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)._replace(coupling=None)

    assert check_routing(Silent())["coupling"] == "not returned"


def test_what_vmap_cannot_do_is_noted() -> None:
    class Deciding(Plain):
        def start(self, votes: Tensor) -> Tensor:
            if votes.sum() > 0:  # a decision on values
                return super().start(votes)
            return super().start(votes) + 0

    assert check_routing(Deciding())["torch.func.vmap"].startswith("not supported: RuntimeError: ")
    assert check_routing(Plain())["torch.func.vmap"] == "differs by 0 at most"


# ---- what is wrong fails, and says so


class SoftmaxOverInputs(Plain):
    """Competes over the inputs, but says outputs."""

    softmax_over = "outputs"

    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)


class SharesOfThoseNotThere(Plain):
    def forward(self, votes, activations=None, *, return_coupling=False):
        coupling = votes.agreement(votes.weighted_sum(None)).softmax(1)
        return Routed(squash(votes.weighted_sum(coupling)), None, coupling if return_coupling else None)


class SoftmaxOverBatch(Plain):
    """``F.softmax(logits)`` without dim, on logits of a rank where that means axis 0."""

    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(0)


class Sigmoid(Plain):
    """Coupling that competes nowhere."""

    def compete(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class CouplingTransposed(Plain):
    def forward(self, *args: Any, **options: Any) -> Any:
        routed = super().forward(*args, **options)
        return routed._replace(coupling=None if routed.coupling is None else routed.coupling.transpose(1, 2))


class CouplingWhenNotAsked(Plain):
    def forward(self, *args: Any, return_coupling: bool = False) -> Any:
        return super().forward(*args, return_coupling=True)


class CapsulesOnly(Plain):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options).poses


class OtherSignature(Plain):
    def forward(self, votes: Votes) -> Any:  # type: ignore[override]
        return super().forward(votes)


class ActivationsLeftOut(Plain):
    """The last sum is weighted by the activations of the input capsules, the agreement is not."""

    def forward(self, votes: Votes, activations: Any = None, *, return_coupling: bool = False) -> Any:
        routed = super().forward(votes, return_coupling=True)
        weights = routed.coupling if activations is None else routed.coupling * activations.unsqueeze(2)
        capsules = self.gather(weights, self.build(votes))
        return Routed(capsules, coupling=routed.coupling if return_coupling else None)


class ActivationsOfInputs(Plain):
    """What comes in is passed on, one for each input capsule."""

    def forward(self, votes: Votes, activations: Any = None, *, return_coupling: bool = False) -> Any:
        routed = super().forward(votes, activations, return_coupling=return_coupling)
        return routed._replace(activations=votes.poses.norm(dim=-1))


class Squeezed(Plain):
    """A batch of one loses its axis."""

    def forward(self, *args: Any, **options: Any) -> Any:
        routed = super().forward(*args, **options)
        return routed._replace(poses=routed.poses.squeeze())


class SqueezedComponents(Plain):
    """Capsules of one component lose theirs."""

    def forward(self, *args: Any, **options: Any) -> Any:
        routed = super().forward(*args, **options)
        return routed._replace(poses=routed.poses.squeeze(-1))


class View(Plain):
    def build(self, votes: Votes) -> Tensor:
        B, I, K = votes.poses.shape
        return votes.build() + 0 * votes.poses.view(B * I * K).sum()


class ReshapedVotes(Plain):
    """A reshape where a permute was meant: input and output capsules are mixed up."""

    def build(self, votes: Votes) -> Tensor:
        built = votes.build()
        B, I, J, D = built.shape
        return built.reshape(B, J, I, D).transpose(1, 2)


class AsksForTheWeight(Plain):
    """Only dense votes have one."""

    def build(self, votes: Votes) -> Tensor:
        assert isinstance(votes, DenseVotes) or not hasattr(votes, "weight")
        return torch.einsum("ijdk,bik->bijd", votes.weight, votes.poses)  # type: ignore[attr-defined]


class KnowsDenseVotes(Plain):
    """Does something else with all others."""

    def build(self, votes: Votes) -> Tensor:
        return votes.build() if isinstance(votes, DenseVotes) else 2 * votes.build()


class FromTheFirst(Plain):
    """Starts from the votes of the first input capsule, as a careless k-means does."""

    def start(self, votes: Tensor) -> Tensor:
        return super().start(votes) + torch.einsum("bijd,bjd->bij", votes, votes[:, 0])


class FavouredOutput(Plain):
    def start(self, votes: Tensor) -> Tensor:
        return super().start(votes) - torch.arange(votes.shape[2], device=votes.device)


class SharedLogits(Plain):
    """One set of logits for the whole batch: agreement averaged over it."""

    def agree(self, logits: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
        return logits + torch.einsum("bijd,bjd->bij", votes, capsules).mean(0)


class BatchNormalised(Plain):
    def build(self, votes: Votes) -> Tensor:
        built = votes.build()
        return built - built.mean(0)


class SquashOverCapsules(Plain):
    def shorten(self, total: Tensor) -> Tensor:
        return squash(total, 1)


class SquashOverOne(Plain):
    """Squash over an axis of size one: each component by itself."""

    def shorten(self, total: Tensor) -> Tensor:
        return squash(total.unsqueeze(-1)).squeeze(-1)


class NoSquash(Plain):
    def shorten(self, total: Tensor) -> Tensor:
        return total


class NaiveSquash(Plain):
    """As printed in the paper."""

    def shorten(self, total: Tensor) -> Tensor:
        length = total.norm(dim=-1, keepdim=True)
        return length**2 / (1 + length**2) * total / length


class NaiveLength(Plain):
    """Finite at zero, but for the gradient."""

    def shorten(self, total: Tensor) -> Tensor:
        return total / (1 + total.square().sum(-1, keepdim=True).sqrt())


class NaiveSoftmax(Plain):
    def compete(self, logits: Tensor) -> Tensor:
        return logits.exp() / logits.exp().sum(2, keepdim=True)


class NaiveVariance(Plain):
    """Agreement measured in deviations, of which there are none when all votes agree."""

    def agree(self, logits: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
        return logits - (votes - votes.mean(1, keepdim=True)).square().sum(-1) / votes.var(
            1, correction=0, keepdim=True
        ).sum(-1)


class ChangesPoses(Plain):
    """Brings them to length one, in place."""

    def build(self, votes: Votes) -> Tensor:
        built = votes.build()
        with torch.no_grad():
            votes.poses.div_(2)
        return built


class RandomStart(Plain):
    def start(self, votes: Tensor) -> Tensor:
        logits = super().start(votes)
        return logits + torch.randn_like(logits)


class Remembers(Plain):
    """Goes on with the logits of the last call."""

    last: Any = None

    def start(self, votes: Tensor) -> Tensor:
        logits = super().start(votes)
        return logits if self.last is None or self.last[0].shape != logits.shape else logits + self.last[0]

    def agree(self, logits: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
        self.last = [super().agree(logits, votes, capsules).detach()]
        return self.last[0]


class PlainTensor(Plain):
    """A constant that neither .to() nor state_dict sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.ones(1), torch.ones(1)]

    def shorten(self, total: Tensor) -> Tensor:
        return squash(total * self.scales[0])


class Unsaved(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def shorten(self, total: Tensor) -> Tensor:
        return squash(total * self.scale)


class SingleInside(Plain):
    def build(self, votes: Votes) -> Tensor:
        return votes.build().float()


class RoundedInside(Plain):
    """float32 on the way, float64 at both ends: only finite differences see it."""

    def build(self, votes: Votes) -> Tensor:
        return votes.build().float().to(votes.poses.dtype)


class SingleOut(Plain):
    def forward(self, *args: Any, **options: Any) -> Any:
        routed = super().forward(*args, **options)
        return routed._replace(poses=routed.poses.float())


class DoubleConstant(Plain):
    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(2) * torch.ones(logits.shape[2], dtype=torch.float64)


class Detached(Plain):
    def build(self, votes: Votes) -> Tensor:
        if isinstance(votes, DenseVotes):
            votes = DenseVotes(votes.poses.detach(), votes.weight)
        return votes.build()


class StopsGradient(Plain):
    def compete(self, logits: Tensor) -> Tensor:
        return super().compete(logits).detach()


class Constant(Plain):
    def build(self, votes: Votes) -> Tensor:
        if isinstance(votes, DenseVotes):
            votes = DenseVotes(torch.ones_like(votes.poses), votes.weight)
        return votes.build()


class Idle(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(2))


class FixedWhenMapped(Plain):
    """A result that depends on how it is called."""

    def start(self, votes: Tensor) -> Tensor:
        mapped = torch._C._functorch.is_batchedtensor(votes)
        return super().start(votes) * (0 if mapped else 1) + (votes.sum(-1) if mapped else 0)


WRONG: list[tuple[type[Plain], str, str]] = [
    (SoftmaxOverInputs, "coupling", "over the outputs, but to one over the inputs; usual cause: a softmax over"),
    (SoftmaxOverBatch, "batch independence", "the capsules of each image alone and in a batch differ by"),
    (Sigmoid, "coupling", r"coupling sums to [\d.]+..[\d.]+ over the (in|out)puts"),
    (CouplingTransposed, "shapes", r"coupling of shape \(3, 5, 7\) instead of \(3, 7, 5\) = \(B, I, J\)"),
    (CouplingWhenNotAsked, "shapes", "returns a coupling that was not asked for"),
    (CapsulesOnly, "call", r"must return a torchcaps.nn.Routed of .*, got a Tensor"),
    (OtherSignature, "call", "raises TypeError: .*; usual cause: a forward without the arguments of"),
    (
        ActivationsLeftOut,
        "inactive capsules",
        "with an input capsule that is not active and with another in",
    ),
    (SharesOfThoseNotThere, "masks", "of a mask's capsules and of these alone"),
    (ActivationsOfInputs, "shapes", r"activations of shape \(3, 7\) instead of \(3, 5\) = \(B, J\)"),
    (Squeezed, "shapes", r"capsules of shape \(5, 4\) instead of \(1, 5, 4\) = \(B, J, D\)"),
    (SqueezedComponents, "sizes of one", r"capsules of shape \(3, 5\) instead of \(3, 5, 1\)"),
    (View, "memory layout", "raises RuntimeError: view size is not compatible.*; usual cause: view"),
    (ReshapedVotes, "input order", "differ.*; usual cause: a reshape or view where a permute"),
    (FromTheFirst, "input order", "differ.* a start from the first input capsule"),
    (FavouredOutput, "output order", "the capsules of outputs reordered before and after routing differ by"),
    (SharedLogits, "batch independence", "differ by .*; usual cause: logits shared or averaged over the batch"),
    (BatchNormalised, "batch independence", "a normalisation by the batch"),
    (SquashOverCapsules, "rotation", "the capsules rotated before and after routing differ by"),
    (SquashOverOne, "rotation", "usual cause: a squash, norm or dot product over another axis"),
    (NoSquash, "lengths", r"the longest capsule has the length \d+.*, more than one; usual cause: no squash"),
    (NaiveSquash, "finite numbers", r"capsules for poses of zero: 60 of 60 numbers are NaN or infinite"),
    (NaiveLength, "finite numbers", "the gradient of the poses for poses of zero: 126 of 126 numbers are NaN"),
    (NaiveSoftmax, "finite numbers", "capsules for poses of length 1e6"),
    (NaiveVariance, "finite numbers", "for (poses of zero|input capsules that all agree): .* a variance"),
    (
        AsksForTheWeight,
        "other votes",
        r"raises AttributeError: .* has no attribute 'weight' .test_testing.py, line \d+.; usual cause: votes.weight",
    ),
    (KnowsDenseVotes, "other votes", "capsules of votes that are built and of those that are not differ by"),
    (
        ChangesPoses,
        "untouched inputs",
        "its call changes the poses that it is given; usual cause: an operation in place",
    ),
    (RandomStart, "determinism", "differ by .*; usual cause: a random start"),
    (Remembers, "determinism", "logits kept from one call to the next"),
    (PlainTensor, "state", "scales holds a tensor that is neither a parameter nor a buffer"),
    (Unsaved, "state", "capsules before and after saving and loading the state_dict differ by"),
    (SingleInside, "dtypes", "inputs of torch.float64 give capsules of torch.float32"),
    (SingleOut, "dtypes", "inputs of torch.float64 give capsules of torch.float32"),
    (DoubleConstant, "dtypes", "raises RuntimeError: expected scalar type"),
    (RoundedInside, "gradients", "finite differences give .*float32 inside"),
    (Detached, "gradients", "along a random direction, the gradient of the poses is 0, finite differences give"),
    (
        StopsGradient,
        "gradients",
        r"the gradient of the (poses|weight) is -?[\d.e-]+, finite differences give -?[\d.e-]+",
    ),
    (Constant, "gradients", "capsules do not depend on the poses"),
    (Idle, "used parameters", "no gradient reaches the parameter beta"),
    (FixedWhenMapped, "torch.func.vmap", "capsules under torch.func.vmap and from a loop differ by"),
]


def failure(check: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(("wrong", "name", "says"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_routing_fails(wrong: type[Plain], name: str, says: str) -> None:
    """By the property that it lacks: with all others skipped, and as the first that is met of those it lacks."""
    skip = set(_ROUTING) - {name}
    for said in (failure(check_routing, wrong(), skip=skip), failure(check_routing, wrong())):
        assert said.count("\n") == 0
        assert "; usual cause: " in said
    said = failure(check_routing, wrong(), skip=skip)
    assert said.startswith(f"{wrong.__name__} fails “{name}”: ")
    assert re.search(says, said), said


def test_every_check_was_shown_to_fail() -> None:
    assert {name for _, name, _ in WRONG} == set(_ROUTING)


class Leak(Plain):
    """Leaks across the batch, times a factor that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(()))

    def gather(self, coupling: Tensor, votes: Tensor) -> Tensor:
        total = torch.einsum("bij,bijd->bjd", coupling, votes)
        return self.shorten(total + self.beta * total.mean(0))


def test_a_factor_that_starts_at_zero_hides_nothing() -> None:
    said = failure(check_routing, Leak())
    assert said.startswith("Leak fails “batch independence” with its parameters moved at random: ")


class Drawn(Plain):
    """Starts from random logits, as MIND does."""

    def start(self, votes: Tensor) -> Tensor:
        return torch.randn(votes.shape[:3], dtype=votes.dtype)


def test_what_is_random_is_said_to_be_so() -> None:
    said = failure(check_routing, Drawn())
    assert said.startswith("Drawn fails “determinism”: ")
    assert "a random start" in said


def test_a_stopped_gradient_is_skipped_by_name() -> None:
    assert check_routing(StopsGradient(), skip=["gradients"])["gradients"] == "skipped"


# ---- layers


def test_the_librarys_layer_passes() -> None:
    layer = DenseCapsules(7, 6, 5, 4, routing=DynamicRouting(capsule_bias=True, learn_prior=True))
    found = check_capsule_layer(layer)
    assert list(found) == list(_LAYER)
    assert found["used parameters"] == "3 parameters"
    assert all(parameter.grad is None for parameter in layer.parameters())
    stack = nn.Sequential(DenseCapsules(6, 4, 5, 3), DenseCapsules(5, 3, 2, 8))
    assert check_capsule_layer(stack, in_capsules=6, in_dim=4)["shapes"] == "capsules (1, 2, 8) for a batch of one"


class Batched(DenseCapsules):
    def forward(self, capsules: Any) -> Capsules:
        return super().forward(capsules - capsules.mean(0))


class Lengths(DenseCapsules):
    def forward(self, capsules: Any) -> Any:
        return super().forward(capsules).scores()


class Unrouted(DenseCapsules):
    def forward(self, capsules: Any) -> Capsules:
        return Capsules(dynamic_routing(self.transform(capsules).build(), 0).poses)


class Spare(DenseCapsules):
    """Has a parameter that nobody uses."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.spare = nn.Parameter(torch.ones(2))


class Halved(DenseCapsules):
    """Says J = 5, gives 2."""

    def forward(self, capsules: Any) -> Any:
        return super().forward(capsules).poses[:, :2]


@pytest.mark.parametrize(
    ("wrong", "options", "name", "says"),
    [
        (Batched, {}, "batch independence", "each image alone and in a batch"),
        (Lengths, {}, "shapes", r"\(3, 5\) instead of \(3, 5, 4\)"),
        (Halved, {}, "shapes", r"\(3, 2, 4\) instead of \(3, 5, 4\)"),
        (Unrouted, {}, "lengths", "more than one"),
        (DenseCapsules, {"routing": DynamicRouting(stop_gradient=True)}, "gradients", "finite differences"),
        (DenseCapsules, {"routing": NaiveSquash()}, "finite numbers", "NaN"),
        (Spare, {}, "used parameters", "no gradient reaches the parameter spare"),
    ],
)
def test_a_wrong_layer_fails(wrong: type[DenseCapsules], options: dict[str, Any], name: str, says: str) -> None:
    layer = wrong(7, 6, 5, 4, **options)
    said = failure(check_capsule_layer, layer, skip=set(_LAYER) - {name})
    assert said.startswith(f"{wrong.__name__} fails “{name}”: ")
    assert re.search(says, said), said
    failure(check_capsule_layer, layer)


# ---- what it is asked


def test_wrong_questions() -> None:
    assert_raises(InputError, check_routing, Plain(), skip=["gradient"], say='did you mean "gradients"?')
    assert_raises(InputError, check_routing, Plain(), in_capsules=1, say="in_capsules must be 2 to 65536, got 1")
    assert_raises(InputError, check_routing, Plain(), softmax_over=1, say="one of outputs, inputs, got 1")
    for wrong in (Plain, lambda: None, nn.ReLU()):
        assert_raises(WrongType, check_routing, wrong, say="routing must be a Routing")
    for wrong in (DenseCapsules, lambda: None):
        assert_raises(WrongType, check_capsule_layer, wrong, say="layer must be a Module")
    stack = nn.Sequential(DenseCapsules(6, 4, 5, 3))
    assert_raises(InputError, check_capsule_layer, stack, in_capsules=6, say="a Sequential does not say its in_dim")
    layer = DenseCapsules(6, 4, 5, 3)
    assert_raises(InputError, check_capsule_layer, layer, in_dim=0, say="in_dim must be 1 to 65536, got 0")
    assert_raises(InputError, check_capsule_layer, layer, skip=["rotation"], say='there is no check "rotation"')


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_routing(DynamicRouting(), device="cuda")
    check_capsule_layer(DenseCapsules(7, 6, 5, 4), device="cuda")
