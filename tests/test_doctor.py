"""``diagnose`` names each mistake in a layer that has it alone, and nothing in what is right, in any style."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routing_cases import ROUTINGS
from support import assert_raises, image_presets, small
from torchcaps import InputError, create_model
from torchcaps.models import ModelOutput, get_preset
from torchcaps.nn import B2IRouting, DenseCapsules
from torchcaps.parts import flat
from torchcaps.testing import diagnose

B, I, K, J, D = 4, 12, 8, 5, 16
SHAPE = (B, I, K)
MASK = torch.arange(I) < torch.tensor([[12], [3], [7], [1]])


class Layer(nn.Module):
    """Routing by agreement in pieces, for others to get one of them wrong, or to write it in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(I, J, D, K, generator=torch.Generator().manual_seed(0)))

    def votes(self, poses: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", self.weight, poses)

    def start(self, votes: Tensor) -> Tensor:
        return votes.new_zeros(votes.shape[:3])

    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(2)

    def gather(self, coupling: Tensor, votes: Tensor) -> Tensor:
        return torch.einsum("bij,bijd->bjd", coupling, votes)

    def squash(self, total: Tensor) -> Tensor:
        squared = total.square().sum(-1, keepdim=True)
        return squared / (1 + squared) * total / (squared + 1e-8).sqrt()

    def agree(self, logits: Tensor, coupling: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
        return logits + torch.einsum("bijd,bjd->bij", votes, capsules)

    def forward(self, poses: Tensor) -> Any:
        votes = self.votes(poses)
        logits = self.start(votes)
        for iteration in range(3):
            coupling = self.compete(logits)
            capsules = self.squash(self.gather(coupling, votes))
            if iteration < 2:
                logits = self.agree(logits, coupling, votes, capsules)
        return capsules


def layer(name: str, kind: type[nn.Module] = Layer, **methods: Any) -> nn.Module:
    return type(name, (kind,), methods)()


def names(module: nn.Module, shape: tuple[int, ...] = SHAPE, mask: Tensor | None = None) -> list[str]:
    return [each.name for each in diagnose(module, shape, mask=mask)]


# ---- each mistake, by a layer that makes it alone


def compete_among_few(self: Layer, logits: Tensor) -> Tensor:
    return torch.softmax(logits.unsqueeze(3), dim=-1).squeeze(3) / J


def agree_on_average(self: Layer, logits: Tensor, coupling: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
    return logits + torch.einsum("bijd,bjd->bij", votes, capsules).mean(0, keepdim=True)


class InputsOfAll(Layer):
    """Logits without an axis for images, which compete among the inputs."""

    def start(self, votes: Tensor) -> Tensor:
        return votes.new_zeros(1, I, J)

    def compete(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)

    def gather(self, coupling: Tensor, votes: Tensor) -> Tensor:
        return (coupling.unsqueeze(3) * votes).sum(1)


def agree_by_component(self: Layer, logits: Tensor, coupling: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
    return logits + votes * capsules.unsqueeze(1)


def overwrite_logits(self: Layer, logits: Tensor, coupling: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
    return coupling * 1.5 + torch.einsum("bijd,bjd->bij", votes, capsules)


def overwrite_in_place(self: Layer, logits: Tensor, coupling: Tensor, votes: Tensor, capsules: Tensor) -> Tensor:
    logits = coupling.clone()
    logits += torch.einsum("bijd,bjd->bij", votes, capsules)
    return logits


class KeepsLogits(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.zeros(I, J)

    def forward(self, poses: Tensor) -> Tensor:
        capsules = super().forward(poses)
        agreement = torch.einsum("bijd,bjd->bij", self.votes(poses), capsules)
        self.logits = self.logits + agreement.detach().mean(0)
        return capsules

    def start(self, votes: Tensor) -> Tensor:
        return self.logits.expand(votes.shape[:3])


class Masked(Layer):
    """Right; called with a mask too."""

    def forward(self, poses: Tensor, mask: Tensor | None = None) -> Tensor:
        there = poses.new_ones(poses.shape[:2]) if mask is None else mask.to(poses)
        self.there = there[:, :, None]
        return super().forward(poses)

    def votes(self, poses: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", self.weight[: poses.shape[1]], poses) * self.there.unsqueeze(3)


class Uniform(Layer):
    """Right only if no routing is meant."""

    def forward(self, poses: Tensor) -> Tensor:
        return self.squash(self.votes(poses).mean(1))


def with_weight(of: int, value: Callable[[Tensor], Tensor | float]) -> nn.Module:
    module = Layer()
    module.weight.data[:, of] = value(module.weight.data)
    return module


def mean_of_all(self: Layer, coupling: Tensor, votes: Tensor) -> Tensor:
    return torch.einsum("bij,bijd->bjd", coupling, votes) / votes.shape[1]


def squash_over_capsules(self: Layer, total: Tensor) -> Tensor:
    squared = total.square().sum(1, keepdim=True)
    return squared / (1 + squared) * total / (squared + 1e-8).sqrt()


by_component = {
    "start": lambda self, votes: torch.zeros_like(votes),
    "agree": agree_by_component,
    "gather": lambda self, coupling, votes: (coupling * votes).sum(1),
}
WRONG: list[tuple[str, str, nn.Module]] = [
    ("softmax-over-inputs", "12 input capsules", layer("Inputs", compete=lambda self, logits: logits.softmax(1))),
    ("softmax-over-nothing", "size one", layer("Nothing", compete=compete_among_few)),
    ("mixes-images", "the other images by", layer("Average", agree=agree_on_average)),
    ("mixes-images", "the other images by", layer("Images", compete=lambda self, logits: logits.softmax(0))),
    ("keeps-state", "after a call", KeepsLogits()),
    ("random-in-evaluation", "two calls", layer("Noise", start=lambda self, votes: torch.randn(votes.shape[:3]))),
    ("random-in-evaluation", "two calls", layer("Dropout", squash=lambda self, s: nn.functional.dropout(s, 0.5))),
    ("nan-at-zero", "the result", layer("Divides", squash=lambda self, s: s / s.norm(dim=-1, keepdim=True))),
    ("nan-at-zero", "gradient", layer("Root", squash=lambda self, s: s / (1 + s.square().sum(-1, True).sqrt()))),
    ("squash-over-other-axis", "alone", layer("Alone", squash=lambda self, s: s.abs() * s / (1 + s.square()))),
    ("squash-over-other-axis", "together", layer("Together", squash=squash_over_capsules)),
    ("no-routing", "weighted sum", Uniform()),
    ("no-routing", "always uniform", layer("Forgets", agree=lambda self, logits, *others: logits)),
    ("agreement-not-summed", "16 components", layer("Components", **by_component)),
    ("agreement-not-summed", "earlier softmax", layer("Overwritten", agree=overwrite_logits)),
    ("agreement-not-summed", "earlier softmax", layer("InPlace", agree=overwrite_in_place)),
    (
        "no-gradient",
        "reaches the input",
        layer("Detached", votes=lambda self, poses: Layer.votes(self, poses).detach()),
    ),
    ("padding-changes-result", "other numbers", layer("Unmasked", Masked, votes=lambda *given: Layer.votes(*given))),
    ("padding-changes-result", "without the padding", layer("OverAll", Masked, gather=mean_of_all)),
    ("dead-capsules", "[2]", with_weight(2, lambda weight: 0.0)),
    ("dead-capsules", "[0, 1]", with_weight(1, lambda weight: weight[:, 0])),
]


@pytest.mark.parametrize(
    ("name", "evidence", "module"), WRONG, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(WRONG)]
)
def test_a_mistake_is_named(name: str, evidence: str, module: nn.Module) -> None:
    (finding,) = diagnose(module, SHAPE, mask=MASK if isinstance(module, Masked) else None)
    assert finding.name == name
    assert evidence in finding.evidence
    assert finding.severity == ("note" if name == "softmax-over-inputs" else finding.severity)
    assert finding.cause
    assert finding.cure


def test_several_mistakes_are_named() -> None:
    found = names(layer("Tutorial", InputsOfAll, agree=agree_on_average))
    assert found == ["softmax-over-inputs", "mixes-images"]


def test_weights_that_are_too_short_hide_nothing() -> None:
    module = layer("Average", agree=agree_on_average)
    module.weight.data *= 1e-3
    assert names(module) == ["mixes-images"]


# ---- what is right, in other styles


class Loops(Layer):
    """By loops over images and capsules."""

    def forward(self, poses: Tensor) -> Tensor:
        return torch.stack([self.route(image) for image in poses])

    def route(self, image: Tensor) -> Tensor:
        votes = [[self.weight[i, j] @ image[i] for j in range(J)] for i in range(I)]
        logits = [torch.zeros(J) for _ in range(I)]
        for _ in range(3):
            coupling = [each.softmax(0) for each in logits]
            totals = [sum(coupling[i][j] * votes[i][j] for i in range(I)) for j in range(J)]
            capsules = [self.squash(each) for each in totals]  # type: ignore[arg-type]
            logits = [logits[i] + torch.stack([votes[i][j] @ capsules[j] for j in range(J)]) for i in range(I)]
        return torch.stack(capsules)


class Product(Layer):
    """By matrix products on (J, B, I, 1, D), with logits for each component that are equal."""

    def forward(self, poses: Tensor) -> dict[str, Tensor]:
        votes = poses[None, :, :, None, :] @ self.weight.permute(1, 0, 3, 2)[:, None]
        logits = torch.zeros_like(votes)
        for _ in range(3):
            flat = logits.movedim(0, -1)
            coupling = torch.softmax(flat.reshape(-1, J), 1).view_as(flat).movedim(-1, 0)
            capsules = self.squash((coupling * votes).sum(2, keepdim=True))
            logits = logits + (votes * capsules).sum(-1, keepdim=True)
        return {"capsules": capsules.transpose(0, 1)}


class Transposed(Layer):
    """Logits (B, J, I), and gradients through the last sum only."""

    def forward(self, poses: Tensor) -> tuple[OrderedDict[str, Tensor], None]:
        votes = torch.matmul(self.weight.transpose(0, 1), poses[:, None, :, :, None]).squeeze(-1)  # (B, J, I, D)
        fixed, logits = votes.detach(), poses.new_zeros(len(poses), J, I, 1)
        for _ in range(2):
            capsules = self.squash((logits.softmax(1) * fixed).sum(2))
            logits = logits + fixed @ capsules.unsqueeze(-1)
        capsules = self.squash((logits.softmax(1) * votes).sum(2))
        return OrderedDict(poses=capsules.unsqueeze(-1)), None


class ByHand(Layer):
    """A softmax by hand, and other layers beside."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.LazyLinear(K), nn.BatchNorm1d(I), nn.Dropout(0.5))

    def votes(self, poses: Tensor) -> Tensor:
        return super().votes(self.before(poses))

    def compete(self, logits: Tensor) -> Tensor:
        shares = (logits - logits.amax(2, keepdim=True)).exp()
        return shares / shares.sum(2, keepdim=True)


class Attention(nn.Module):
    """Attention among the inputs, whose softmax is no coupling, before routing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.routing = nn.MultiheadAttention(K, 2, batch_first=True), Layer()

    def forward(self, poses: Tensor) -> Tensor:
        return self.routing(poses + self.attention(poses, poses, poses)[0])


class Heads(nn.Module):
    """Attention among the tokens of images, by as many heads as there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.classes = nn.Conv2d(3, 3 * 8 * J, 4, 4), nn.Linear(8 * J, J)

    def forward(self, images: Tensor) -> Tensor:
        query, key, value = self.tokens(images).flatten(2).unflatten(1, (3, J, 8)).transpose(3, 4).unbind(1)
        seen = (query @ key.transpose(2, 3)).softmax(3) @ value
        return self.classes(seen.mean(2).flatten(1))


class Short(Layer):
    """Capsules of length 0.1 at most, in an object."""

    def forward(self, poses: Tensor) -> SimpleNamespace:
        return SimpleNamespace(name="capsules", poses=super().forward(poses) / 10)


class Network(nn.Module):
    """Of images: a CNN, capsules of pieces of its map, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.layer = nn.Sequential(nn.Conv2d(3, K, 5, 4), nn.BatchNorm2d(K), nn.ReLU()), Layer()

    def forward(self, images: Tensor) -> ModelOutput:
        capsules = self.layer(self.map(images).flatten(2).transpose(1, 2))
        return ModelOutput(capsules.norm(dim=-1).softmax(-1), capsules)


RIGHT: list[Callable[[], nn.Module]] = [Layer, Loops, Product, Transposed, ByHand, Attention, Short]


@pytest.mark.parametrize("kind", RIGHT)
def test_nothing_is_found_in_what_is_right(kind: Callable[[], nn.Module]) -> None:
    assert diagnose(kind(), SHAPE) == []
    module = kind()
    if kind is not ByHand:  # its sizes are not known yet
        assert diagnose(module.double(), (2, *SHAPE[1:])) == [], "in another precision, and with another batch"
        assert diagnose(module.bfloat16(), SHAPE) == []


def test_nothing_is_found_in_masked_layers_and_in_networks() -> None:
    assert diagnose(Masked(), SHAPE, mask=MASK) == []
    for start in ("noise", "queries"):
        module = DenseCapsules(None, D, J, D, transform="common", routing=B2IRouting(start_from=start))
        assert diagnose(module, (B, I, D), mask=MASK) == []
    assert diagnose(Network(), (B, 3, 13, 17)) == []
    assert diagnose(Heads(), (B, 3, 16, 12)) == []
    assert diagnose(nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), (B, 3, 4, 4)) == [], "a network without capsules"


@pytest.mark.parametrize("name", ROUTINGS)
def test_nothing_is_found_in_our_routings(name: str) -> None:
    make, _ = ROUTINGS[name]
    module = DenseCapsules(I, K, J, D, routing=make())
    wanted = ["softmax-over-inputs"] if name == "dynamic, over inputs" else []
    assert names(module) == wanted
    assert names(module, mask=MASK) == wanted


@pytest.mark.parametrize("preset", image_presets())
def test_nothing_is_found_in_our_networks(preset: str) -> None:
    network = create_model(preset, (2, 18, 21), 3, **small(preset))
    options = flat(get_preset(preset).network)
    meant = {"softmax-over-inputs"} if options.get("softmax_over") == "inputs" else set()
    meant |= {"no-routing"} if options.get("num_iterations") == 1 else set()
    assert set(names(network, (B, 2, 18, 21))) <= meant


# ---- what cannot be diagnosed


def test_wrong_input_is_a_sentence() -> None:
    class Raises(nn.Module):
        def forward(self, poses: Tensor) -> Tensor:
            raise KeyError("weights")

    nan = layer("Nan", squash=lambda self, total: total / 0 * 0)
    cases: list[tuple[nn.Module, tuple[int, ...], Tensor | None, str]] = [
        (Layer(), (1, I, K), None, "shape must be (B, I, K) or (B, C, H, W), B at least 2, got (1, 12, 8)"),
        (Layer(), (B, I), None, "shape must be"),
        (Layer(), (B, 0, K), None, "shape must be"),
        (Layer(), (B, I + 1, K), None, "a Layer, called with (4, 13, 8), raises RuntimeError: "),
        (Raises(), SHAPE, None, "raises KeyError: 'weights' (test_doctor.py, line "),
        (nn.Flatten(), SHAPE, None, "must return (B, J, D) first, got (4, 96)"),
        (Masked(), SHAPE, MASK[:2], "mask must have shape (B, I) of poses (4, 12, 8), got (2, 12)"),
        (nan, SHAPE, None, "returns NaN or infinity for random inputs"),
    ]
    for module, shape, mask, says in cases:
        assert_raises(InputError, diagnose, module, shape, mask=mask, say=says)


def test_the_module_and_the_users_chance_stay_as_they_are() -> None:
    module = Layer().train()
    before, state = module.weight.clone(), torch.get_rng_state()
    diagnose(module, SHAPE)
    assert module.training
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
