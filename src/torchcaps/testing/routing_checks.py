"""The properties of a routing: one check each, named after its property."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.nn import BuiltVotes, DenseVotes, Routed
from torchcaps.nn.votes.competition import SoftmaxOver
from torchcaps.testing.measures import Inputs, cotangent, gradients_of, require
from torchcaps.testing.routing_subject import (
    BATCH,
    TOLERANCE,
    Subject,
    fresh,
    named_parts,
    require_finite,
    require_same,
    require_shapes,
    scored_numbers,
)
from torchcaps.words import counted

#: Largest relative difference between a gradient and its finite difference.
GRADIENT_TOLERANCE = 1e-4
#: Largest relative difference between float32 and float64, because iterations magnify rounding.
SINGLE_TOLERANCE = 1e-2


class Check(NamedTuple):
    """The check of one property.

    Args:
        find: Function that returns its measurement in words, or fails.
        cause: Usual cause of a failure.
        moved: True if the property must also hold for randomly changed parameters.
    """

    find: Callable[[Subject], str]
    cause: str
    moved: bool


CHECKS: dict[str, Check] = {}


def check(cause: str, *, moved: bool = True) -> Callable[..., Any]:
    """Register a function as the check of the property that it is named after; arguments as for ``Check``."""

    def register(find: Callable[[Subject], str]) -> Callable[[Subject], str]:
        CHECKS[find.__name__.strip("_").replace("_", " ")] = Check(find, cause, moved)
        return find

    return register


@check("a forward without the arguments of torchcaps.nn.Routing in their order, or without a Routed as its result")
def _call(subject: Subject) -> str:
    for name, tensor in named_parts(subject.call(subject.inputs())):
        require_finite(tensor, name)
    return "it returns finite numbers"


@check("a random start, dropout in training mode, or logits stored from one call to the next")
def _determinism(subject: Subject) -> str:
    inputs = subject.inputs()
    return require_same(subject.call(inputs), subject.call(inputs), "of a first and of a second call")


@check("a squeeze() that also drops a batch axis of size one, or axes in another order")
def _shapes(subject: Subject) -> str:
    for batch in (BATCH, 1):
        inputs = subject.inputs(batch=batch)
        routed = subject.call(inputs)
        require_shapes(routed, subject, batch)
        require_shapes(subject.call(inputs | {"activations": None}), subject, batch)
        silent = subject.call(inputs, return_coupling=False)
        require(silent.coupling is None, "it returns a coupling that was not asked for (return_coupling=False)")
        require_same(silent, routed, "with and without the coupling returned")
    return f"capsules {tuple(routed.poses.shape)} for a batch of one"


@check("a squeeze(), or broadcasting that confuses axes of size one", moved=False)
def _sizes_of_one(subject: Subject) -> str:
    for axis in range(len(subject.sizes)):
        sizes: Any = tuple(1 if n == axis else size for n, size in enumerate(subject.sizes))
        small = fresh(dataclasses.replace(subject, sizes=sizes))
        require_shapes(small.call(small.inputs()), small, BATCH)
    return "one capsule and one component are fine"


@check("view() where reshape(), flatten() or unflatten() is needed")
def _memory_layout(subject: Subject) -> str:
    inputs = subject.inputs()
    laid_out = inputs | {
        "poses": inputs["poses"].mT.contiguous().mT,
        "weight": inputs["weight"].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),  # in memory as (J, D, K, I)
    }
    return require_same(subject.call(laid_out), subject.call(inputs), "of contiguous and of other tensors")


@check("a tensor in a plain attribute; make it a parameter or call register_buffer")
def _state(subject: Subject) -> str:
    plain = {name for name, value in _attributes(subject.module) if isinstance(value, Tensor)}
    require(not plain, f"{', '.join(sorted(plain))} holds a tensor that is neither a parameter nor a buffer")
    inputs = subject.inputs()
    expected = subject.call(inputs)
    file = io.BytesIO()
    torch.save(subject.module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(subject.module)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    routed = dataclasses.replace(subject, module=other).call(inputs)
    return require_same(routed, expected, "before and after saving and loading the state_dict")


@check("a constant without the dtype and device of the poses, or a .float() or .double() without a conversion back")
def _dtypes(subject: Subject) -> str:
    results: list[Routed] = []
    for dtype in (torch.float32, torch.float64):
        routed = subject.to(dtype).call(subject.inputs(dtype))
        for name, tensor in named_parts(routed):
            if tensor is not None:
                require(tensor.dtype == dtype, f"inputs of {dtype} give {name} of {tensor.dtype}")
        results.append(Routed(routed.poses))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        halved = subject.to(torch.float32).call(subject.inputs(torch.float32)).poses
    require(halved.is_floating_point(), f"under bfloat16 autocast, capsules are of {halved.dtype}")
    require(bool(halved.isfinite().all()), "under bfloat16 autocast, capsules are not finite")
    return require_same(results[0], results[1], "in float32 and in float64", SINGLE_TOLERANCE)


@check("an operation in place, such as poses /= length")
def _untouched_inputs(subject: Subject) -> str:
    inputs = subject.inputs()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    subject.call(inputs)
    changed = [name for name in inputs if not torch.equal(inputs[name], before[name])]
    require(not changed, f"its call changes its {' and '.join(changed)} in place")
    return ", ".join(inputs) + " are unchanged"


@check("logits shared or averaged over the batch, a softmax over axis 0, or a normalisation by the batch")
def _batch_independence(subject: Subject) -> str:
    inputs = subject.inputs()
    each = []
    for n in range(BATCH):
        image = {name: tensor if name == "weight" else tensor[n : n + 1] for name, tensor in inputs.items()}
        each.append(subject.call(image))
    alone = Routed(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*each, strict=True)))  # type: ignore[arg-type]
    return require_same(alone, subject.call(inputs), "of each image alone and in a batch")


@check("a normalisation by the batch in training; write by_row = False in the class, and layers pass all rows at once")
def _rows(subject: Subject) -> str:
    if not subject.module.by_row:
        return "it gets all rows at once"
    inputs = subject.inputs(batch=4)
    training = dataclasses.replace(subject, module=copy.deepcopy(subject.module).train())
    together = training.call(inputs)
    if not together.poses.equal(training.call(inputs).poses):
        return "it draws random numbers in training"
    halves = [
        training.call({name: each if name == "weight" else each[part] for name, each in inputs.items()})
        for part in (slice(0, 2), slice(2, 4))
    ]
    joined = Routed(*(None if each[0] is None else torch.cat(each) for each in zip(*halves, strict=True)))  # type: ignore[arg-type]
    return require_same(joined, together, "of rows together and in two halves, in training,")


@check("a reshape or view where a permute or transpose is meant, or a start from the first input capsule", moved=False)
def _input_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(subject.sizes[0]).roll(1)
    moved = {"weight": inputs["weight"][order]} | {name: inputs[name][:, order] for name in ("poses", "activations")}
    expected = subject.call(inputs)
    if expected.coupling is not None:
        expected = expected._replace(coupling=expected.coupling[:, order])
    return require_same(subject.call(moved), expected, "of input capsules in two orders")


@check(
    "a reshape or view where a permute or transpose is meant, or an output capsule with its own parameters", moved=False
)
def _output_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(inputs["weight"].shape[1]).roll(1)
    capsules, activations, coupling = subject.call(inputs)
    expected = Routed(
        capsules[:, order],
        None if activations is None else activations[:, order],
        None if coupling is None else coupling[..., order],
    )
    routed = subject.call(inputs | {"weight": inputs["weight"][:, order]})
    return require_same(routed, expected, "of outputs reordered before and after routing")


@check("a squash, norm or dot product over another axis than the components, or over an axis of size one", moved=False)
def _rotation(subject: Subject) -> str:
    inputs = subject.inputs()
    D = inputs["weight"].shape[2]
    square = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q
    turned = inputs | {"weight": torch.einsum("ed,ijdk->ijek", rotation, inputs["weight"])}
    expected, routed = subject.call(inputs).poses @ rotation.T, subject.call(turned).poses
    return require_same(Routed(routed), Routed(expected), "rotated before and after routing")


@check("no squash, or a squash over another axis than the components")
def _lengths(subject: Subject) -> str:
    inputs = subject.inputs()
    text = "{:.6g} at most"
    most = 0.0
    for factor in (1.0, 100.0):
        routed = subject.call(inputs | {"poses": factor * inputs["poses"]})
        if routed.activations is None:
            most = max(most, float(routed.poses.detach().norm(dim=-1).max()))
            require(most <= 1 + TOLERANCE, f"the longest capsule has the length {most:.4g}, more than one")
            continue
        low, high = (float(each) for each in routed.activations.detach().aminmax())
        fits = low >= -TOLERANCE and high <= 1 + TOLERANCE
        require(fits, f"activations lie in {low:.4g}..{high:.4g} instead of 0..1")
        text, most = "activations of {:.4g} at most", max(most, high)
    return text.format(most)


@check("a softmax over another axis than the competing capsules, or a coupling with the wrong shape", moved=False)
def _coupling(subject: Subject) -> str:
    coupling = subject.call(subject.inputs()).coupling
    if coupling is None:
        return "not returned"
    low, high = (float(each) for each in coupling.detach().aminmax())
    require(low >= -TOLERANCE and high <= 1 + TOLERANCE, f"coupling lies in {low:.4g}..{high:.4g} instead of 0..1")
    axis = subject.module.softmax_over
    if axis is None:
        return "lies in 0..1; there is no axis over which capsules compete"
    sums: dict[SoftmaxOver, Tensor] = {"outputs": coupling.detach().sum(2), "inputs": coupling.detach().sum(1)}
    if subject.module.leaky:
        return _leaky_coupling(subject, sums[axis], axis)
    off = {each: float((total - 1).abs().max()) for each, total in sums.items()}
    low, high = (float(each) for each in sums[axis].aminmax())
    other: SoftmaxOver = "inputs" if axis == "outputs" else "outputs"
    instead = f", but to one over the {other}" if off[other] <= TOLERANCE else ""
    require(off[axis] <= TOLERANCE, f"coupling sums to {low:.4g}..{high:.4g} over the {axis}{instead}")
    return f"sums to one over the {axis}"


def _leaky_coupling(subject: Subject, sums: Tensor, axis: SoftmaxOver) -> str:
    """Check the sums of a coupling whose softmax has one more competitor."""
    low, high = (float(each) for each in sums.aminmax())
    require(
        low > 0 and high < 1, f"leaky coupling sums to {low:.4g}..{high:.4g} over the {axis} instead of less than one"
    )
    inputs = subject.inputs()
    equal = subject.call(inputs | {"poses": 0 * inputs["poses"]}).coupling
    counts = {"outputs": subject.sizes[2], "inputs": subject.sizes[0]}
    for other, count in counts.items():
        is_shared = (
            equal is not None and counts[axis] != count and bool(((equal - 1 / (count + 1)).abs() < TOLERANCE).all())
        )
        require(not is_shared, f"coupling of equal votes is 1/{count + 1}, so a leak competes with the {count} {other}")
    return f"sums to {high:.4g} at most over the {axis}, the rest leaks"


@check(
    "votes.weight, or isinstance(votes, DenseVotes), where votes.weighted_sum, votes.agreement or votes.build is meant"
)
def _other_votes(subject: Subject) -> str:
    inputs = subject.inputs()
    built = BuiltVotes(DenseVotes(inputs["poses"], inputs["weight"]).build(), inputs["poses"])
    routed = subject.route(built, inputs["activations"])
    return require_same(routed, subject.call(inputs), "of built votes and of votes that are not built")


@check("activations that are used in some of the sums only")
def _inactive_capsules(subject: Subject) -> str:
    inputs = subject.inputs()
    silenced = inputs | {"activations": inputs["activations"].clone()}
    silenced["activations"][:, 0] = 0
    plain, expected = (subject.call(each)._replace(coupling=None) for each in (inputs, silenced))
    if torch.equal(scored_numbers(plain), scored_numbers(expected)):
        return "activations are not used"
    poses = inputs["poses"].clone()
    poses[:, 0] = poses[:, 1]
    routed = subject.call(silenced | {"poses": poses})._replace(coupling=None)
    return require_same(routed, expected, "with an inactive input capsule and with another one in its place")


@check("a sum, mean or softmax over the input capsules that does not call the methods of the votes", moved=False)
def _masks(subject: Subject) -> str:
    inputs, (I, K, J, D) = subject.inputs(), subject.sizes
    alone = fresh(dataclasses.replace(subject, sizes=(I - 1, K, J, D)))
    state = subject.module.state_dict()
    with torch.no_grad():
        for name, tensor in alone.module.state_dict().items():
            # if an axis counts input capsules, the first of them is left out
            cut = [slice(-size, None) for size in tensor.shape]
            tensor.copy_(state[name][tuple(cut)])
    few = {name: tensor[1:] if name == "weight" else tensor[:, 1:] for name, tensor in inputs.items()}
    poses = inputs["poses"].clone()
    poses[:, 0] = torch.nan
    mask = torch.ones(BATCH, I, dtype=torch.bool)
    mask[:, 0] = False
    votes = DenseVotes(poses, inputs["weight"]).masked(mask)
    routed = subject.route(votes, inputs["activations"])
    routed = routed._replace(coupling=None if routed.coupling is None else routed.coupling[:, 1:])
    return require_same(routed, alone.call(few), "with a mask and without the masked capsules")


@check(
    "norm() or sqrt() without epsilon (the gradient at zero is not finite), a division by a length or a variance, "
    "or exp() where softmax() is meant",
)
def _finite_numbers(subject: Subject) -> str:
    subject = subject.to(torch.float32)
    inputs = subject.inputs(torch.float32)
    poses = inputs["poses"]
    cases: dict[str, Inputs] = {
        "poses of zero": {"poses": 0 * poses},
        "one image of zeros": {"poses": torch.cat([0 * poses[:1], poses[1:]])},
        "poses of length 1e-20": {"poses": 1e-20 * poses},
        "poses of length 1e6": {"poses": 1e6 * poses},
        "input capsules that all agree": {
            "poses": poses[:, :1].expand_as(poses),
            "weight": inputs["weight"][:1].expand_as(inputs["weight"]),
        },
        "nothing active": {"activations": 0 * inputs["activations"]},
    }
    for case, changed in cases.items():
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in (inputs | changed).items()}
        routed = subject.call(leaves)
        for name, tensor in named_parts(routed):
            require_finite(tensor, f"{name} for {case}")
        for name, gradient in gradients_of(scored_numbers(routed), leaves | subject.parameters()).items():
            require_finite(gradient, f"the gradient of the {name} for {case}")
    return f"for {', '.join(cases)}"


@check("a wrong detach() or no_grad(), an operation in place, or float32 inside")
def _gradients(subject: Subject) -> str:
    inputs = {name: tensor.requires_grad_() for name, tensor in subject.inputs().items()}
    leaves = inputs | subject.parameters()
    seen = scored_numbers(subject.call(inputs))
    weights, gradients = cotangent(seen), gradients_of(seen, leaves)
    random = torch.Generator().manual_seed(2)
    largest = 0.0
    for name, tensor in leaves.items():
        direction = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        direction /= direction.norm()
        step = 1e-5 * max(1.0, float(tensor.detach().norm()))
        ends = []
        for end in (step, -step):
            with torch.no_grad():
                tensor += end * direction
                ends.append(float((scored_numbers(subject.call(inputs)) * weights).sum()))
                tensor -= end * direction
        slope, difference = float((gradients[name] * direction).sum()), (ends[0] - ends[1]) / (2 * step)
        if name in ("poses", "weight"):
            require(max(abs(slope), abs(difference)) > 1e-12, f"capsules do not depend on the {name}")
        typical = float(gradients[name].norm()) / tensor.numel() ** 0.5
        off = abs(slope - difference) / max(typical, abs(difference), 1e-6)
        words = f"along a random direction, the gradient of the {name} is {slope:.6g}, finite differences give"
        require(off <= GRADIENT_TOLERANCE, f"{words} {difference:.6g}")
        largest = max(largest, off)
    return f"off by {largest:.2g} at most"


@check("a parameter that is not used, or cut off by detach()", moved=False)
def _used_parameters(subject: Subject) -> str:
    gradients = gradients_of(scored_numbers(subject.call(subject.inputs())), subject.parameters())
    idle = [name for name, gradient in gradients.items() if not gradient.count_nonzero()]
    require(not idle, f"no gradient reaches the {' and the '.join(idle)}")
    return counted(len(gradients), "parameter")


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield plain attributes of a module and its submodules; lists and tuples item by item."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    yield ".".join(filter(None, (path, name))), each
