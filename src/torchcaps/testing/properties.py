"""``check_routing``: properties of a routing algorithm of one's own, and the measures that ``diagnose`` has too."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import reason_of, unknown_name
from torchcaps.nn import BuiltVotes, DenseVotes, LayerSize, Routed, Routing, Votes
from torchcaps.nn.competition import SoftmaxOver
from torchcaps.ranges import Range

#: Largest difference, relative to the largest number, of two results in float64 that should be equal.
TOLERANCE = 1e-6
#: The same for a gradient and its finite difference.
GRADIENT_TOLERANCE = 1e-4
#: The same for float32 against float64; iterations magnify rounding.
SINGLE_TOLERANCE = 1e-2
#: How far parameters are moved, a standard deviation, when the properties that hold for any are checked again.
MOVED = 0.1

BATCH = 3

AtLeastTwo = Annotated[int, Range(2, 65_536, whole=True)]
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A routing, as it was given and told its sizes, and the sizes I, K, J, D."""

    given: Routing
    sizes: tuple[int, int, int, int]
    module: Routing

    def inputs(self, dtype: torch.dtype = torch.float64, *, batch: int = BATCH) -> Inputs:
        """Random inputs, the same every time, of lengths near one."""
        I, K, J, D = self.sizes
        shapes = {"poses": (batch, I, K), "weight": (I, J, D, K), "activations": (batch, I)}
        random = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
        drawn["poses"] /= drawn["poses"].norm(dim=-1, keepdim=True)
        drawn["activations"] = drawn["activations"].sigmoid()
        return {name: tensor.to(dtype) for name, tensor in drawn.items()}

    def call(self, inputs: Inputs, *, return_coupling: bool = True) -> Routed:
        """Capsules, and the coupling where there is one, as :class:`torchcaps.nn.DenseCapsules` calls a routing."""
        votes = DenseVotes(inputs["poses"], inputs["weight"])
        return self.route(votes, inputs["activations"], return_coupling=return_coupling)

    def route(self, votes: Votes, activations: Tensor | None, *, return_coupling: bool = True) -> Routed:
        """What a routing gives for votes, and activations of the input capsules where there are some."""
        returned = self.module(votes, activations, return_coupling=return_coupling)
        wanted = "forward must return a torchcaps.nn.Routed of poses, activations or None, coupling or None"
        require(isinstance(returned, Routed), f"{wanted}, got a {type(returned).__name__}")
        return returned

    def to(self, dtype: torch.dtype) -> Subject:
        """The same with the module's parameters in another precision."""
        return dataclasses.replace(self, module=copy.deepcopy(self.module).to(dtype))

    def parameters(self) -> dict[str, Tensor]:
        """What the module learns, by names that no input has."""
        named = self.module.named_parameters()
        return {f"parameter {name}": tensor for name, tensor in named if tensor.requires_grad}


class Check(NamedTuple):
    """A property: what finds it, or fails; what usually breaks it; and whether it holds for any parameters."""

    find: Callable[[Subject], str]
    cause: str
    moved: bool


_CHECKS: dict[str, Check] = {}


def check(cause: str, *, moved: bool = True) -> Callable[..., Any]:
    """Register the check of the property that its function is named after; the arguments are those of ``Check``."""

    def register(find: Callable[[Subject], str]) -> Callable[[Subject], str]:
        _CHECKS[find.__name__.strip("_").replace("_", " ")] = Check(find, cause, moved)
        return find

    return register


@checked
def check_routing(
    routing: Routing,
    *,
    in_capsules: AtLeastTwo = 7,
    in_dim: AtLeastTwo = 6,
    out_capsules: AtLeastTwo = 5,
    out_dim: AtLeastTwo = 4,
    skip: Collection[str] = (),
) -> dict[str, str]:
    """Check that a routing algorithm of one's own does what a capsule layer relies on; in about a second.

    The properties, by the names that ``skip`` takes. Those with a * are checked a second time with parameters that are
    moved at random, as a parameter that starts at zero may hide what it multiplies.

    - ``call`` *: it takes votes, activations and ``return_coupling``, and returns a :class:`torchcaps.nn.Routed` of
      finite numbers.
    - ``determinism`` *: the same input gives the same result again. Nothing else is checked without it.
    - ``shapes`` *: capsules (B, J, D) and coupling (B, I, J), also for a batch of one; no coupling unless asked for.
    - ``sizes of one``: the same with one input capsule, one output capsule, one component.
    - ``memory layout`` *: the weight as :class:`torchcaps.nn.Dense` keeps it and poses as
      :class:`torchcaps.nn.PrimaryCapsules` gives them, neither of them contiguous, change nothing.
    - ``state`` *: ``state_dict`` saves all of it, and ``load_state_dict`` brings all of it back.
    - ``dtypes`` *: after ``.to(float32)`` and ``.to(float64)`` the result has that dtype, and both agree; it runs under
      bfloat16 autocast.
    - ``untouched inputs`` *: nothing that it is given changes.
    - ``batch independence`` *: an image's capsules do not depend on its neighbours in the batch.
    - ``input order``: another order of the input capsules changes nothing (the coupling is reordered with them).
    - ``output order``: another order of the output capsules reorders the result in the same way.
    - ``rotation``: votes rotated in pose space give capsules rotated alike. Routing by dot products, distances and
      lengths has it; one that treats components differently (a bias, layer normalisation, a variance for each
      component) has not, and skips it.
    - ``lengths`` *: capsules are not longer than one, or, where it returns activations, these lie in 0..1, as losses on
      scores expect.
    - ``coupling``: where it is returned, it lies in 0..1 and sums to one over the axis that the routing's attribute
      ``softmax_over`` names; over either of both if that is None.
    - ``other votes`` *: it asks the votes only for what all :class:`torchcaps.nn.Votes` answer, so that it works over
      any transform, and gives the same over votes that are built as over those that are not.
    - ``inactive capsules`` *: if it weighs input capsules by their activations, one with an activation of zero changes
      nothing, whatever its pose.
    - ``masks``: with a mask, the result is that of the capsules that are there alone.
    - ``finite numbers`` *: capsules and gradients, for poses of zero, of 1e-20 and of 1e6, for votes that all agree,
      and where no input capsule is active.
    - ``gradients`` *: those of poses, weight and the routing's own parameters are those of finite differences in
      float64, and neither poses nor weight are without effect. Skip it for a gradient that is stopped on purpose.
    - ``used parameters``: every parameter of the routing gets a gradient.

    Args:
        routing: A :class:`torchcaps.nn.Routing` that belongs to no layer. A copy is checked on the CPU, told the
            sizes by :meth:`~torchcaps.nn.Routing.bind`, in the mode it is in: call ``.eval()`` before if it has
            dropout.
        in_capsules: I to check with; at least 2, as all sizes.
        in_dim: K.
        out_capsules: J.
        out_dim: D.
        skip: Properties that it does not have on purpose.

    Returns:
        What was found for each property, in words.

    Raises:
        AssertionError: It lacks a property; one sentence with the property, the numbers and the usual cause.

    Examples:
        >>> from torchcaps.nn import DynamicRouting
        >>> from torchcaps.testing import check_routing
        >>> check_routing(DynamicRouting(num_iterations=2))["coupling"]
        'sums to one over the outputs'
    """
    sizes = in_capsules, in_dim, out_capsules, out_dim
    return _run(Subject(routing, sizes, routing), skip)


# ---- the properties


@check("a forward without the arguments of torchcaps.nn.Routing, in their order, or that returns no Routed")
def _call(subject: Subject) -> str:
    for name, tensor in _named(subject.call(subject.inputs())):
        _require_finite(tensor, name)
    return "it returns finite numbers"


@check("a random start, dropout in training mode, or logits kept from one call to the next")
def _determinism(subject: Subject) -> str:
    inputs = subject.inputs()
    return _require_same(subject.call(inputs), subject.call(inputs), "of a first and of a second call")


@check("a squeeze() that also drops a batch of one, or axes in another order")
def _shapes(subject: Subject) -> str:
    for batch in (BATCH, 1):
        inputs = subject.inputs(batch=batch)
        routed = subject.call(inputs)
        _require_shapes(routed, subject, batch)
        _require_shapes(subject.call(inputs | {"activations": None}), subject, batch)
        silent = subject.call(inputs, return_coupling=False)
        require(silent.coupling is None, "it returns a coupling that was not asked for (return_coupling=False)")
        _require_same(silent, routed, "with and without the coupling returned")
    return f"capsules {tuple(routed.poses.shape)} for a batch of one"


@check("a squeeze(), or broadcasting that takes an axis of size one for another", moved=False)
def _sizes_of_one(subject: Subject) -> str:
    for axis in range(len(subject.sizes)):
        sizes: Any = tuple(1 if n == axis else size for n, size in enumerate(subject.sizes))
        small = _fresh(dataclasses.replace(subject, sizes=sizes))
        _require_shapes(small.call(small.inputs()), small, BATCH)
    return "one capsule and one component are fine"


@check("view() where reshape(), flatten() or unflatten() is needed")
def _memory_layout(subject: Subject) -> str:
    inputs = subject.inputs()
    laid_out = inputs | {
        "poses": inputs["poses"].mT.contiguous().mT,
        "weight": inputs["weight"].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),  # in memory as (J, D, K, I)
    }
    return _require_same(subject.call(laid_out), subject.call(inputs), "of tensors that are contiguous and of others")


@check("a tensor kept as a plain attribute; make it a parameter or call register_buffer")
def _state(subject: Subject) -> str:
    plain = {name for name, value in _attributes(subject.module) if isinstance(value, Tensor)}
    require(not plain, f"{', '.join(sorted(plain))} holds a tensor that is neither a parameter nor a buffer")
    inputs = subject.inputs()
    wanted = subject.call(inputs)
    file = io.BytesIO()
    torch.save(subject.module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(subject.module)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    got = dataclasses.replace(subject, module=other).call(inputs)
    return _require_same(got, wanted, "before and after saving and loading the state_dict")


@check("a constant made without dtype and device of the poses, or a .float() or .double() that is not undone")
def _dtypes(subject: Subject) -> str:
    results: list[Routed] = []
    for dtype in (torch.float32, torch.float64):
        routed = subject.to(dtype).call(subject.inputs(dtype))
        for name, tensor in _named(routed):
            if tensor is not None:
                require(tensor.dtype == dtype, f"inputs of {dtype} give {name} of {tensor.dtype}")
        results.append(Routed(routed.poses))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        halved = subject.to(torch.float32).call(subject.inputs(torch.float32)).poses
    require(halved.is_floating_point(), f"under bfloat16 autocast, capsules are of {halved.dtype}")
    require(bool(halved.isfinite().all()), "under bfloat16 autocast, capsules are not finite")
    return _require_same(results[0], results[1], "in float32 and in float64", SINGLE_TOLERANCE)


@check("an operation in place, such as poses /= length")
def _untouched_inputs(subject: Subject) -> str:
    inputs = subject.inputs()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    subject.call(inputs)
    changed = [name for name in inputs if not torch.equal(inputs[name], before[name])]
    require(not changed, f"its call changes the {' and the '.join(changed)} that it is given")
    return ", ".join(inputs) + " stay as they are"


@check("logits shared or averaged over the batch, a softmax over axis 0, or a normalisation by the batch")
def _batch_independence(subject: Subject) -> str:
    inputs = subject.inputs()
    each = []
    for n in range(BATCH):
        image = {name: tensor if name == "weight" else tensor[n : n + 1] for name, tensor in inputs.items()}
        each.append(subject.call(image))
    alone = Routed(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*each, strict=True)))  # type: ignore[arg-type]
    return _require_same(alone, subject.call(inputs), "of each image alone and in a batch")


@check("a reshape or view where a permute or transpose is meant, or a start from the first input capsule", moved=False)
def _input_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(subject.sizes[0]).roll(1)
    moved = {"weight": inputs["weight"][order]} | {name: inputs[name][:, order] for name in ("poses", "activations")}
    wanted = subject.call(inputs)
    if wanted.coupling is not None:
        wanted = wanted._replace(coupling=wanted.coupling[:, order])
    return _require_same(subject.call(moved), wanted, "of input capsules in two orders")


@check(
    "a reshape or view where a permute or transpose is meant, or an output capsule with a part of its own", moved=False
)
def _output_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(inputs["weight"].shape[1]).roll(1)
    capsules, activations, coupling = subject.call(inputs)
    wanted = Routed(
        capsules[:, order],
        None if activations is None else activations[:, order],
        None if coupling is None else coupling[..., order],
    )
    got = subject.call(inputs | {"weight": inputs["weight"][:, order]})
    return _require_same(got, wanted, "of outputs reordered before and after routing")


@check("a squash, norm or dot product over another axis than the components', or over one of size one", moved=False)
def _rotation(subject: Subject) -> str:
    inputs = subject.inputs()
    D = inputs["weight"].shape[2]
    square = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q
    turned = inputs | {"weight": torch.einsum("ed,ijdk->ijek", rotation, inputs["weight"])}
    wanted, got = subject.call(inputs).poses @ rotation.T, subject.call(turned).poses
    return _require_same(Routed(got), Routed(wanted), "rotated before and after routing")


@check("no squash, or one over another axis than the components'")
def _lengths(subject: Subject) -> str:
    inputs = subject.inputs()
    found = "{:.6g} at most"
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
        found, most = "activations of {:.4g} at most", max(most, high)
    return found.format(most)


@check(
    "a softmax over another axis than the one that competes, or a coupling of another iteration's shape", moved=False
)
def _coupling(subject: Subject) -> str:
    coupling = subject.call(subject.inputs()).coupling
    if coupling is None:
        return "not returned"
    low, high = (float(each) for each in coupling.detach().aminmax())
    require(low >= -TOLERANCE and high <= 1 + TOLERANCE, f"coupling lies in {low:.4g}..{high:.4g} instead of 0..1")
    sums: dict[SoftmaxOver, Tensor] = {"outputs": coupling.detach().sum(2), "inputs": coupling.detach().sum(1)}
    off = {axis: float((total - 1).abs().max()) for axis, total in sums.items()}
    axis = subject.module.softmax_over or ("outputs" if off["outputs"] <= off["inputs"] else "inputs")
    low, high = (float(each) for each in sums[axis].aminmax())
    other: SoftmaxOver = "inputs" if axis == "outputs" else "outputs"
    instead = f", but to one over the {other}" if off[other] <= TOLERANCE else ""
    require(off[axis] <= TOLERANCE, f"coupling sums to {low:.4g}..{high:.4g} over the {axis}{instead}")
    return f"sums to one over the {axis}"


@check(
    "votes.weight, or isinstance(votes, DenseVotes), where votes.weighted_sum, votes.agreement or votes.build is meant"
)
def _other_votes(subject: Subject) -> str:
    inputs = subject.inputs()
    built = BuiltVotes(DenseVotes(inputs["poses"], inputs["weight"]).build(), inputs["poses"])
    got = subject.route(built, inputs["activations"])
    return _require_same(got, subject.call(inputs), "of votes that are built and of those that are not")


@check("activations that are used for some of the sums only")
def _inactive_capsules(subject: Subject) -> str:
    inputs = subject.inputs()
    silenced = inputs | {"activations": inputs["activations"].clone()}
    silenced["activations"][:, 0] = 0
    plain, wanted = (subject.call(given)._replace(coupling=None) for given in (inputs, silenced))
    if torch.equal(_seen(plain), _seen(wanted)):
        return "activations are not used"
    poses = inputs["poses"].clone()
    poses[:, 0] = poses[:, 1]
    got = subject.call(silenced | {"poses": poses})._replace(coupling=None)
    return _require_same(got, wanted, "with an input capsule that is not active and with another in its place")


@check("a sum, a mean or a softmax over the input capsules that goes past the votes' own", moved=False)
def _masks(subject: Subject) -> str:
    inputs, (I, K, J, D) = subject.inputs(), subject.sizes
    alone = _fresh(dataclasses.replace(subject, sizes=(I - 1, K, J, D)))
    own = subject.module.state_dict()
    with torch.no_grad():
        for name, tensor in alone.module.state_dict().items():
            # where the number of input capsules is a size of it, what belongs to the first is left out
            cut = [slice(-size, None) for size in tensor.shape]
            tensor.copy_(own[name][tuple(cut)])
    few = {name: tensor[1:] if name == "weight" else tensor[:, 1:] for name, tensor in inputs.items()}
    poses = inputs["poses"].clone()
    poses[:, 0] = torch.nan
    mask = torch.ones(BATCH, I, dtype=torch.bool)
    mask[:, 0] = False
    votes = DenseVotes(poses, inputs["weight"]).masked(mask)
    got = subject.route(votes, inputs["activations"])
    got = got._replace(coupling=None if got.coupling is None else got.coupling[:, 1:])
    return _require_same(got, alone.call(few), "of a mask's capsules and of these alone")


@check(
    "norm() or sqrt() without epsilon, whose gradient at zero is not finite, a division by a length or a variance, "
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
        for name, tensor in _named(routed):
            _require_finite(tensor, f"{name} for {case}")
        for name, gradient in gradients_of(_seen(routed), leaves | subject.parameters()).items():
            _require_finite(gradient, f"the gradient of the {name} for {case}")
    return f"for {', '.join(cases)}"


@check("a detach() or no_grad() that should not be there, an operation in place, or float32 inside")
def _gradients(subject: Subject) -> str:
    inputs = {name: tensor.requires_grad_() for name, tensor in subject.inputs().items()}
    leaves = inputs | subject.parameters()
    seen = _seen(subject.call(inputs))
    cotangent, gradients = _cotangent(seen), gradients_of(seen, leaves)
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
                ends.append(float((_seen(subject.call(inputs)) * cotangent).sum()))
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


@check("a parameter that was left over, or cut off by detach()", moved=False)
def _used_parameters(subject: Subject) -> str:
    gradients = gradients_of(_seen(subject.call(subject.inputs())), subject.parameters())
    idle = [name for name, gradient in gradients.items() if not gradient.count_nonzero()]
    require(not idle, f"no gradient reaches the {' and the '.join(idle)}")
    return f"{len(gradients)} parameters"


# ---- running them, and what they share


def _run(subject: Subject, skip: Collection[str]) -> dict[str, str]:
    """What each check finds, with the parameters of the start, and then, where it holds for any, with others."""
    for name in (skip := list(skip)):
        if not isinstance(name, str) or name not in _CHECKS:
            raise unknown_name("check", str(name), _CHECKS)
    found = {name: "skipped" for name in _CHECKS if name in skip}
    for moved in (False, True):
        if moved and not _fresh(subject).parameters():
            break
        for name, each in _CHECKS.items():
            if name not in skip and (each.moved or not moved):
                with _described(subject, name, each.cause, moved):
                    words = each.find(_fresh(subject, moved))
                    found[name] = found[name] if moved else words
    return {name: found[name] for name in _CHECKS}


def _fresh(subject: Subject, moved: bool = False) -> Subject:
    """A copy in float64: no check is misled by what another one left behind, nor is the user's module changed."""
    module = copy.deepcopy(subject.given)
    module.bind(LayerSize(*subject.sizes))
    fresh = dataclasses.replace(subject, module=module.to("cpu", torch.float64))
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in fresh.parameters().values() if moved else ():
            parameter += MOVED * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return fresh


@contextmanager
def _described(subject: Subject, name: str, cause: str, moved: bool) -> Iterator[None]:
    """Failures as one sentence: what lacks which property, the numbers, the usual cause."""
    when = " with its parameters moved at random" if moved else ""
    failure = f"{type(subject.module).__name__} fails “{name}”{when}"
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{failure}: {error}; usual cause: {cause}") from None
    except Exception as error:
        raised = f"it raises {type(error).__name__}: {reason_of(error)} ({place_of(error, subject.module)})"
        raise AssertionError(f"{failure}: {raised}; usual cause: {cause}") from error


def place_of(error: Exception, module: nn.Module) -> str:
    """The file and line where an error came from: the last one in the file of the module's class, if it is there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{Path(last.filename).name}, line {last.lineno}"


def change(new: Tensor, old: Tensor) -> float:
    """The largest difference, beside the largest number."""
    return float((new - old).detach().abs().max().nan_to_num(math.inf) / old.detach().abs().max().clamp_min(1e-30))


def gradients_of(seen: Tensor, leaves: Inputs) -> dict[str, Tensor]:
    """The gradient of each leaf, zeros where none arrives."""
    if not seen.requires_grad or not leaves:
        return {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    total = (seen * _cotangent(seen)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def require(condition: bool, otherwise: str) -> None:
    """Fail a check; also under ``python -O``, which removes assert statements."""
    if not condition:
        raise AssertionError(otherwise)


def _named(routed: Routed) -> Iterable[tuple[str, Tensor | None]]:
    return zip(("capsules", "activations", "coupling"), routed, strict=True)


def _require_shapes(routed: Routed, subject: Subject, batch: int) -> None:
    I, _, J, D = subject.sizes
    wanted = {"capsules": (batch, J, D), "activations": (batch, J), "coupling": (batch, I, J)}
    for name, tensor in _named(routed):
        if tensor is not None or name == "capsules":
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else f"none, being of type {type(tensor).__name__}"
            require(got == wanted[name], f"it returns {name} of shape {got} instead of {wanted[name]}")


def _require_same(got: Routed, wanted: Routed, which: str, tolerance: float = TOLERANCE) -> str:
    """Fail unless capsules, and activations and coupling where both have them, are equal beside the largest number."""
    largest = 0.0
    for (name, one), other in zip(_named(got), wanted, strict=True):
        if one is not None and other is not None:
            what = f"the {name} {which}"
            shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
            require(one.shape == other.shape, f"{what} differ in their shapes, {shapes}")
            apart = change(one, other)
            words = f"{what} differ by {apart:.2g} of the largest number, more than {tolerance:.0e}"
            require(apart <= tolerance, words)
            largest = max(largest, apart)
    return f"differs by {largest:.2g} at most"


def _require_finite(tensor: Tensor | None, what: str) -> None:
    if isinstance(tensor, Tensor):
        bad = int((~tensor.isfinite()).sum())
        require(bad == 0, f"{what}: {bad} of {tensor.numel()} numbers are NaN or infinite")


def _seen(routed: Routed) -> Tensor:
    """All numbers that a loss may see: capsules, and activations where there are some."""
    parts = (routed.poses.flatten(1), routed.activations)
    return torch.cat([part for part in parts if part is not None], 1)


def _cotangent(seen: Tensor) -> Tensor:
    """Fixed random weights, whose sum with these numbers is the number that is differentiated."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(seen.shape, generator=random, dtype=torch.float64).to(seen)


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Plain attributes of a module and its parts, lists and tuples opened."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    yield ".".join(filter(None, (path, name))), each
