"""The shipped tests of properties pass what is right and fail what is wrong, each by the property that is lacking."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import assert_raises
from torchcaps import InputError, squash
from torchcaps.errors import WrongType
from torchcaps.nn import DenseVotes, DynamicRouting, LayerSize, Routed, Routing, Votes
from torchcaps.testing import check_routing
from torchcaps.testing.routing_checks import CHECKS


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


class Learned(Plain):
    """With a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(shape))


def wrong(name: str, kind: type[Plain] = Plain, **methods: Any) -> type[Plain]:
    """A routing with other methods."""
    return type(name, (kind,), methods)


def after(change: Callable[[Routed], Any]) -> dict[str, Any]:
    """A forward that changes what it returns."""
    return {"forward": lambda self, *args, **options: change(Plain.forward(self, *args, **options))}


# ---- what is right passes


def test_plain_routing_passes() -> None:
    found = check_routing(Plain())
    assert list(found) == list(CHECKS)
    assert found["coupling"] == "sums to one over the outputs"
    assert found["shapes"] == "capsules (1, 5, 4) for a batch of one"
    silent = wrong("Silent", **after(lambda routed: routed._replace(coupling=None)))
    assert check_routing(silent())["coupling"] == "not returned"


def leaky_softmax(axis: int) -> Any:
    """A softmax with one more competitor, whose share goes nowhere."""
    return lambda _, logits: (
        F.pad(logits, (0, 1) if axis == 2 else (0, 0, 0, 1)).softmax(axis).narrow(axis, 0, logits.shape[axis])
    )


COMPETES_WITH_NONE = wrong("CompetesWithNone", softmax_over=None, compete=lambda _, logits: logits.sigmoid())
RIGHT: list[tuple[Any, str]] = [
    (wrong("Leaks", leaky=True, compete=leaky_softmax(2))(), "at most over the outputs, the rest leaks"),
    (DynamicRouting(leaky=True), "at most over the outputs, the rest leaks"),
    (DynamicRouting(leaky=True, softmax_over="inputs"), "at most over the inputs, the rest leaks"),
    (DynamicRouting(softmax_over="inputs"), "sums to one over the inputs"),
    (COMPETES_WITH_NONE(), "lies in 0..1; there is no axis over which capsules compete"),
]


@pytest.mark.parametrize(("routing", "said"), RIGHT)
def test_each_kind_of_competition_passes(routing: Any, said: str) -> None:
    assert check_routing(routing)["coupling"].endswith(said)


def test_other_sizes_and_the_users_module_stays_as_it_is() -> None:
    routing = wrong("PerOutput", Learned, compete=lambda self, logits: (logits / self.beta).softmax(2))(3)
    skip = ("sizes of one",)  # the parameter fixes J
    found = check_routing(routing, in_capsules=4, in_dim=2, out_capsules=3, out_dim=6, skip=skip)
    assert found["used parameters"] == "1 parameter"
    assert routing.beta.dtype == torch.float32
    assert routing.beta.grad is None
    assert torch.equal(routing.beta, torch.ones(3))


def test_parameters_made_for_the_sizes_are_checked_too() -> None:
    routing = DynamicRouting(capsule_bias=True, learn_prior=True)
    assert check_routing(routing, skip=["rotation"])["used parameters"] == "2 parameters"
    assert not list(routing.parameters()), "a copy was told its sizes"
    assert failure(check_routing, routing).startswith("DynamicRouting fails “rotation”: "), "a bias does not turn"
    routing.bind(LayerSize(3, 2, 2, 2))
    assert check_routing(routing, skip=["rotation"])["used parameters"] == "2 parameters", "a copy has its own again"


def test_activations_are_scores() -> None:
    found = check_routing(Certain())
    assert found["lengths"] == "activations of 1 at most"
    assert found["used parameters"] == "1 parameter"
    assert "activations lie in " in failure(check_routing, Certain(2.0))


# ---- what is wrong fails, and says so


def past_the_votes(_: Plain, votes: Votes, *args: Any, return_coupling: bool = False) -> Routed:
    coupling = votes.agreement(votes.weighted_sum(None)).softmax(1)
    return Routed(squash(votes.weighted_sum(coupling)), None, coupling if return_coupling else None)


def asks_for_the_weight(_: Plain, votes: Any) -> Tensor:
    assert isinstance(votes, DenseVotes) or not hasattr(votes, "weight")
    return torch.einsum("ijdk,bik->bijd", votes.weight, votes.poses)


def changes_poses(_: Plain, votes: Votes) -> Tensor:
    built = votes.build()
    with torch.no_grad():
        votes.poses.div_(2)
    return built


def normalises_in_training(self: Plain, total: Tensor) -> Tensor:
    return squash(total - total.mean(0) if self.training else total)


def naive_squash(_: Plain, total: Tensor) -> Tensor:
    """As printed in the paper."""
    length = total.norm(dim=-1, keepdim=True)
    return length**2 / (1 + length**2) * total / length


def weighs_the_last_sum(self: Plain, votes: Votes, activations: Any = None, *, return_coupling: bool = False) -> Any:
    """By the activations of the input capsules, but not the agreement."""
    coupling = Plain.forward(self, votes, return_coupling=True).coupling
    weights = coupling if activations is None else coupling * activations.unsqueeze(2)
    return Routed(self.gather(weights, self.build(votes)), coupling=coupling if return_coupling else None)


def of_poses_of_ones(_: Plain, votes: Votes) -> Tensor:
    return (DenseVotes(torch.ones_like(votes.poses), votes.weight) if isinstance(votes, DenseVotes) else votes).build()


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


OVER_INPUTS = wrong("OverInputs", softmax_over="outputs", compete=lambda _, logits: logits.softmax(1))
NAIVE_SQUASH = wrong("NaiveSquash", shorten=naive_squash)
STOPS_GRADIENT = wrong("StopsGradient", compete=lambda self, logits: logits.softmax(2).detach())
DRAWN = wrong("Drawn", start=lambda _, votes: torch.randn(votes.shape[:3], dtype=votes.dtype))
WRONG: list[tuple[type[Plain], str, str]] = [
    (OVER_INPUTS, "coupling", "over the outputs, but to one over the inputs; usual cause: a softmax over"),
    (
        wrong("LeaksOverInputs", leaky=True, compete=leaky_softmax(1)),
        "coupling",
        "coupling of equal votes is 1/8, so a leak competes with the 7 inputs",
    ),
    (
        wrong("LeaksOverOutputs", leaky=True, softmax_over="inputs", compete=leaky_softmax(2)),
        "coupling",
        "leaky coupling sums to .* over the inputs instead of less than one",
    ),
    (wrong("LeaksNothing", leaky=True), "coupling", "sums to 1..1 over the outputs instead of less than one"),
    (
        wrong("AboveOne", softmax_over=None, compete=lambda _, logits: 3 * logits.sigmoid()),
        "coupling",
        "coupling lies in .* instead of 0..1",
    ),
    (
        wrong("OneForAll", agree=lambda _, b, V, v: b + torch.einsum("bijd,bjd->bij", V, v).mean(0)),
        "batch independence",
        "usual cause: logits shared or averaged over",
    ),
    (
        wrong("NormalisedInTraining", shorten=normalises_in_training),
        "rows",
        "the capsules of rows together and in two halves, in training, differ .*; write by_row = False in the class",
    ),
    (
        wrong("Transposed", compete=lambda _, b: b.softmax(2).mT, gather=lambda self, c, V: self.shorten(V.mean(1))),
        "shapes",
        r"coupling of shape \(3, 5, 7\) instead of \(3, 7, 5\)",
    ),
    (
        wrong("NotAsked", forward=lambda self, *args, **_: Plain.forward(self, *args, return_coupling=True)),
        "shapes",
        "returns a coupling that was not asked for",
    ),
    (wrong("Squeezed", shorten=lambda _, s: squash(s).squeeze(-1)), "sizes of one", r"it raises|of shape \(3, 5\)"),
    (wrong("PosesOnly", **after(lambda routed: routed.poses)), "call", r"must return .*Routed of .*, got a Tensor"),
    (wrong("Bare", forward=lambda self, votes: Plain.forward(self, votes)), "call", "raises TypeError: .*; usual"),
    (wrong("LeftOut", forward=weighs_the_last_sum), "inactive capsules", "with an inactive input capsule"),
    (wrong("NotThere", forward=past_the_votes), "masks", "with a mask and without the masked capsules"),
    (
        wrong("View", build=lambda _, votes: votes.build() + 0 * votes.poses.view(votes.poses.numel()).sum()),
        "memory layout",
        "raises RuntimeError: view size is not.*; usual cause: view",
    ),
    (
        wrong("FromTheFirst", start=lambda _, V: torch.einsum("bijd,bjd->bij", V, V[:, 0])),
        "input order",
        "differ.* a start from the first input capsule",
    ),
    (
        wrong("Favoured", start=lambda _, V: V.new_zeros(V.shape[:3]) - torch.arange(V.shape[2])),
        "output order",
        "the capsules of outputs reordered before and after",
    ),
    (wrong("OverCapsules", shorten=lambda _, s: squash(s, 1)), "rotation", "the capsules rotated before and after"),
    (wrong("NoSquash", shorten=lambda _, s: s), "lengths", r"the longest capsule has the length \d+.*, more than one"),
    (NAIVE_SQUASH, "finite numbers", r"capsules for poses of zero: 60 of 60 numbers are NaN or infinite"),
    (wrong("Asks", build=asks_for_the_weight), "other votes", r"no attribute 'weight' .test_testing.py, line \d+.;"),
    (wrong("ChangesPoses", build=changes_poses), "untouched inputs", "its call changes its poses in place"),
    (DRAWN, "determinism", "differ by .*; usual cause: a random start"),
    (PlainTensor, "state", "scales holds a tensor that is neither a parameter nor a buffer"),
    (Unsaved, "state", "capsules before and after saving and loading the state_dict differ by"),
    (wrong("Single", build=lambda _, votes: votes.build().float()), "dtypes", "inputs of torch.float64 give capsules"),
    (STOPS_GRADIENT, "gradients", r"the gradient of the (poses|weight) is -?[\d.e-]+, finite differences give -?\d"),
    (wrong("Constant", build=of_poses_of_ones), "gradients", "capsules do not depend on the poses"),
    (Learned, "used parameters", "no gradient reaches the parameter beta"),
]


def failure(check: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **options)
    return str(caught.value)


def test_a_wrong_routing_fails() -> None:
    for kind, name, says in WRONG:
        said = failure(check_routing, kind(), skip=CHECKS.keys() - {name})
        assert said.startswith(f"{kind.__name__} fails “{name}”: ")
        assert "; usual cause: " in said
        assert "\n" not in said
        assert re.search(says, said), said
    assert {name for _, name, _ in WRONG} == CHECKS.keys(), "every check was shown to fail"
    assert check_routing(STOPS_GRADIENT(), skip=["gradients"])["gradients"] == "skipped"
    assert failure(check_routing, DRAWN()).startswith("Drawn fails “determinism”: ")


def test_a_factor_that_starts_at_zero_hides_nothing() -> None:
    def leak(self: Any, coupling: Tensor, votes: Tensor) -> Tensor:
        total = torch.einsum("bij,bijd->bjd", coupling, votes)
        return squash(total + (self.beta - 1) * total.mean(0))

    said = failure(check_routing, wrong("Leak", Learned, gather=leak)())
    assert said.startswith("Leak fails “batch independence” with its parameters moved at random: ")


# ---- what it is asked


def test_wrong_questions() -> None:
    assert_raises(InputError, check_routing, Plain(), skip=["gradient"], say='did you mean "gradients"?')
    assert_raises(InputError, check_routing, Plain(), in_capsules=1, say="in_capsules must be 2 to 65536, got 1")
    assert_raises(WrongType, check_routing, Plain, say="routing must be a Routing")
