"""Tests of properties for a routing algorithm or a capsule layer of one's own, to be called from one's own tests.

    def test_my_routing():
        check_routing(MyRouting())

Every check states one property that accuracy does not show, and was shown to fail on a routing that lacks it.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.errors import InputError, unknown_name
from torchcaps.nn import Capsules, DenseVotes, LayerSize, Routed, Routing, Votes
from torchcaps.ops.dynamic_routing import SoftmaxOver
from torchcaps.ops.votes import BuiltVotes
from torchcaps.ranges import WIDTH, Range

__all__ = ["check_capsule_layer", "check_routing"]

#: Largest difference, relative to the largest number, of two results in float64 that should be equal.
TOLERANCE = 1e-6
#: The same for a gradient and its finite difference.
GRADIENT_TOLERANCE = 1e-4
#: The same for float32 against float64; iterations magnify rounding.
SINGLE_TOLERANCE = 1e-2

BATCH = 3

Inputs = dict[str, Tensor]
RESULTS = ("capsules", "activations", "coupling")
"""What a routing returns, by the names that failures say."""


class Sizes(NamedTuple):
    """Capsules and components that go in and that come out; None where a layer does not say it."""

    I: int
    K: int
    J: int | None
    D: int | None


@dataclass(frozen=True)
class Subject:
    """What is checked."""

    module: nn.Module
    sizes: Sizes
    device: torch.device
    softmax_over: SoftmaxOver | None = None
    """The axis over which coupling sums to one, if it is known."""
    given: nn.Module | None = None
    """A routing as it was given, not yet told its sizes; None for a layer."""

    @property
    def is_layer(self) -> bool:
        """Called with poses alone, instead of with the votes of poses and a weight."""
        return self.given is None

    def inputs(self, dtype: torch.dtype = torch.float64, *, batch: int = BATCH) -> Inputs:
        """Random inputs, the same every time, of lengths near one."""
        I, K, *out = self.sizes
        shapes = {"poses": [batch, I, K]}
        if not self.is_layer:
            shapes |= {"weight": [I, *(size for size in out if size is not None), K], "activations": [batch, I]}
        random = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
        drawn["poses"] /= drawn["poses"].norm(dim=-1, keepdim=True)
        if not self.is_layer:
            drawn["activations"] = drawn["activations"].sigmoid()
        return {name: tensor.to(self.device, dtype) for name, tensor in drawn.items()}

    def call(self, inputs: Inputs, *, return_coupling: bool = True) -> Routed:
        """Capsules, and the coupling where there is one, as :class:`torchcaps.nn.DenseCapsules` calls a routing."""
        if self.is_layer:
            return Routed(*Capsules.of(self.module(inputs["poses"]))[:2])
        votes = DenseVotes(inputs["poses"], inputs["weight"])
        return self.route(votes, inputs.get("activations"), return_coupling=return_coupling)

    def route(self, votes: Votes, activations: Tensor | None, *, return_coupling: bool = True) -> Routed:
        """What a routing gives for votes, and activations of the input capsules where there are some."""
        returned = self.module(votes, activations, return_coupling=return_coupling)
        require(
            isinstance(returned, Routed),
            "forward must return a torchcaps.nn.Routed of poses, activations or None, coupling or None, got a "
            f"{type(returned).__name__}",
        )
        return returned

    def to(self, dtype: torch.dtype) -> Subject:
        """The same with the module's parameters in another precision."""
        return self.replaced(copy.deepcopy(self.module).to(dtype))

    def replaced(self, module: nn.Module) -> Subject:
        """The same with another module."""
        return dataclasses.replace(self, module=module)


Finder = Callable[[Subject], str]
"""Says what it found, or fails."""

# the checks of each property, with what usually breaks it
_ROUTING: dict[str, tuple[Finder, str]] = {}
_LAYER: dict[str, tuple[Finder, str]] = {}


def check(name: str, cause: str, *, layers: bool = False) -> Callable[[Finder], Finder]:
    """Register the check of a property, which ``cause`` usually breaks, and which ``layers`` may have too."""

    def register(function: Finder) -> Finder:
        for registry in (_ROUTING, _LAYER) if layers else (_ROUTING,):
            registry[name] = function, cause
        return function

    return register


def check_routing(
    routing: nn.Module,
    *,
    softmax_over: SoftmaxOver | None = None,
    in_capsules: int = 7,
    in_dim: int = 6,
    out_capsules: int = 5,
    out_dim: int = 4,
    device: torch.device | str = "cpu",
    skip: Collection[str] = (),
) -> dict[str, str]:
    """Check that a routing algorithm of one's own does what a capsule layer relies on; in less than a second.

    The properties, by the names that ``skip`` takes:

    - ``call``: it takes votes, activations and ``return_coupling``, and returns a :class:`torchcaps.nn.Routed` of
      finite numbers.
    - ``shapes``: capsules (B, J, D) and coupling (B, I, J), also for a batch of one; no coupling unless asked for.
    - ``sizes of one``: the same with one input capsule, one output capsule, one component.
    - ``memory layout``: the weight as :class:`torchcaps.nn.Dense` keeps it and poses as
      :class:`torchcaps.nn.PrimaryCapsules` gives them, neither of them contiguous, change nothing.
    - ``state``: ``state_dict`` saves all of it, and ``load_state_dict`` brings all of it back.
    - ``dtypes``: after ``.to(float32)`` and ``.to(float64)`` the result has that dtype, and both agree; it runs under
      bfloat16 autocast.
    - ``untouched inputs``: nothing that it is given changes.
    - ``determinism``: the same input gives the same result again.
    - ``batch independence``: an image's capsules do not depend on its neighbours in the batch.
    - ``input order``: another order of the input capsules changes nothing (the coupling is reordered with them).
    - ``output order``: another order of the output capsules reorders the result in the same way.
    - ``rotation``: votes rotated in pose space give capsules rotated alike. Routing by dot products, distances and
      lengths has it; one that treats components differently (a bias, layer normalisation, a variance for each
      component) has not, and skips it.
    - ``lengths``: capsules are not longer than one, or, where it returns activations, these lie in 0..1, as losses on
      scores expect.
    - ``coupling``: where it is returned, it lies in 0..1 and sums to one over the axis that ``softmax_over`` names.
    - ``other votes``: it asks the votes only for what all :class:`torchcaps.nn.Votes` answer, so that it works over any
      transform, and gives the same over votes that are built as over those that are not.
    - ``inactive capsules``: if it weighs input capsules by their activations, one with an activation of zero changes
      nothing, whatever its pose.
    - ``finite numbers``: capsules and gradients, for poses of zero, of 1e-20 and of 1e6, for votes that all agree,
      and where no input capsule is active.
    - ``gradients``: those of poses, weight and the routing's own parameters are those of finite differences in
      float64, and neither poses nor weight are without effect. Skip it for a gradient that is stopped on purpose.
    - ``used parameters``: every parameter of the routing gets a gradient.
    - ``torch.func.vmap``: gives what a loop gives, or an error that says that it cannot.

    Args:
        routing: A :class:`torchcaps.nn.Routing` that belongs to no layer. A copy is checked, told the sizes by
            :meth:`~torchcaps.nn.Routing.bind`, in the mode it is in: call ``.eval()`` before if it has dropout.
            Where it makes parameters there, the properties are those of their start.
        softmax_over: The axis over which its coupling sums to one, ``"outputs"`` or ``"inputs"``; its own attribute
            ``softmax_over`` if None, and either of both if that is None.
        in_capsules: I to check with; at least 2, as all sizes.
        in_dim: K.
        out_capsules: J.
        out_dim: D.
        device: Where to check, e.g. ``"cuda"``; it must have float64.
        skip: Properties that it does not have on purpose.

    Returns:
        What was found for each property, in words.

    Raises:
        AssertionError: It lacks a property; one sentence with the property, the numbers and the usual cause.
        InputError: An unknown name in ``skip``, or a size below 2.
        TypeError: ``routing`` is no :class:`torchcaps.nn.Routing`.

    Example:
        >>> from torchcaps.nn import DynamicRouting
        >>> from torchcaps.testing import check_routing
        >>> check_routing(DynamicRouting(num_iterations=2))["coupling"]
        'sums to one over the outputs'
    """
    _check_kind("check_routing", routing, Routing)
    given = {"in_capsules": in_capsules, "in_dim": in_dim, "out_capsules": out_capsules, "out_dim": out_dim}
    for name, size in given.items():
        _check_size("check_routing", name, size, 2)
    sizes = Sizes(in_capsules, in_dim, out_capsules, out_dim)
    if softmax_over not in (None, "outputs", "inputs"):
        raise InputError(f'check_routing: softmax_over must be "outputs" or "inputs", got {softmax_over!r}')
    named = softmax_over or getattr(routing, "softmax_over", None)
    axis = named if named in ("outputs", "inputs") else None
    subject = Subject(routing, sizes, torch.device(device), axis, given=routing)
    return _run(_ROUTING, subject, skip)


def check_capsule_layer(
    layer: nn.Module,
    *,
    in_capsules: int | None = None,
    in_dim: int | None = None,
    device: torch.device | str = "cpu",
    skip: Collection[str] = (),
) -> dict[str, str]:
    """Check that a layer from capsules (B, I, K) to capsules (B, J, D) can stand in a network.

    Of the properties of :func:`check_routing`, those of a layer: ``shapes``, ``memory layout``, ``state``, ``dtypes``,
    ``untouched inputs``, ``determinism``, ``batch independence``, ``lengths``, ``finite numbers``, ``gradients``,
    ``used parameters`` and ``torch.func.vmap``.

    Args:
        layer: Called with poses (B, I, K); gives :class:`torchcaps.nn.Capsules`, or poses (B, J, D) alone. A copy is
            checked, in the mode it is in.
        in_capsules: I; the layer's attribute of that name if None.
        in_dim: K; the layer's attribute of that name if None.
        device: Where to check; it must have float64.
        skip: Properties that it does not have on purpose.

    Returns:
        What was found for each property, in words.

    Raises:
        AssertionError: It lacks a property; one sentence with the property, the numbers and the usual cause.
        InputError: An unknown name in ``skip``, or ``in_capsules`` or ``in_dim`` that nobody says.
        TypeError: ``layer`` is no module.
    """
    _check_kind("check_capsule_layer", layer, nn.Module)
    own = (getattr(layer, name, None) for name in ("in_capsules", "in_dim", "out_capsules", "out_dim"))
    I, K, J, D = (size if isinstance(size, int) else None for size in own)
    sizes = Sizes(_known(layer, "in_capsules", in_capsules, I), _known(layer, "in_dim", in_dim, K), J, D)
    return _run(_LAYER, Subject(layer, sizes, torch.device(device)), skip)


# ---- the properties


@check("call", "a forward without the arguments of torchcaps.nn.Routing, in their order, or that returns no Routed")
def _call(subject: Subject) -> str:
    routed = subject.call(subject.inputs())
    for name, tensor in zip(RESULTS, routed, strict=True):
        _require_finite(tensor, name)
    return "it returns finite numbers"


@check("shapes", "a squeeze() that also drops a batch of one, or axes in another order", layers=True)
def _shapes(subject: Subject) -> str:
    for batch in (BATCH, 1):
        inputs = subject.inputs(batch=batch)
        routed = subject.call(inputs)
        _require_shapes(routed, subject.sizes, batch)
        if not subject.is_layer:
            _require_shapes(subject.call({**inputs, "activations": None}), subject.sizes, batch)  # type: ignore[dict-item]
            silent = subject.call(inputs, return_coupling=False)
            require(silent.coupling is None, "it returns a coupling that was not asked for (return_coupling=False)")
            _require_same(silent, routed, "with and without the coupling returned")
    return f"capsules {tuple(routed.poses.shape)} for a batch of one"


@check("sizes of one", "a squeeze(), or broadcasting that takes an axis of size one for another")
def _sizes_of_one(subject: Subject) -> str:
    for axis in range(len(subject.sizes)):
        numbers = [1 if n == axis else size for n, size in enumerate(subject.sizes)]
        sizes = Sizes(*numbers)  # type: ignore[arg-type]  # all of them are known for a routing
        small = _fresh(dataclasses.replace(subject, sizes=sizes))
        _require_shapes(small.call(small.inputs()), sizes, BATCH)
    return "one capsule and one component are fine"


@check("memory layout", "view() where reshape(), flatten() or unflatten() is needed", layers=True)
def _memory_layout(subject: Subject) -> str:
    inputs = subject.inputs()
    laid_out = inputs | {"poses": inputs["poses"].transpose(1, 2).contiguous().transpose(1, 2)}
    if not subject.is_layer:  # in memory as (J, D, K, I)
        laid_out["weight"] = inputs["weight"].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    return _require_same(subject.call(laid_out), subject.call(inputs), "of tensors that are contiguous and of others")


@check("state", "a tensor kept as a plain attribute; make it a parameter or call register_buffer", layers=True)
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
    other.load_state_dict(torch.load(file, map_location=subject.device, weights_only=True))
    got = subject.replaced(other).call(inputs)
    return _require_same(got, wanted, "before and after saving and loading the state_dict")


@check(
    "dtypes",
    "a constant made without dtype and device of the poses, or a .float() or .double() that is not undone",
    layers=True,
)
def _dtypes(subject: Subject) -> str:
    results = {}
    for dtype in (torch.float64, torch.float32):
        routed = subject.to(dtype).call(subject.inputs(dtype))
        for name, tensor in zip(RESULTS, routed, strict=True):
            if tensor is not None:
                require(tensor.dtype == dtype, f"inputs of {dtype} give {name} of {tensor.dtype}")
        results[dtype] = routed.poses
    with torch.autocast(subject.device.type, torch.bfloat16), torch.no_grad():
        halved = subject.to(torch.float32).call(subject.inputs(torch.float32)).poses
    require(halved.is_floating_point(), f"under bfloat16 autocast, capsules are of {halved.dtype}")
    require(bool(halved.isfinite().all()), "under bfloat16 autocast, capsules are not finite")
    single, double = (Routed(results[dtype]) for dtype in (torch.float32, torch.float64))
    return _require_same(single, double, "in float32 and in float64", SINGLE_TOLERANCE)


@check("untouched inputs", "an operation in place, such as poses /= length", layers=True)
def _untouched_inputs(subject: Subject) -> str:
    inputs = subject.inputs()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    subject.call(inputs)
    changed = [name for name in inputs if not torch.equal(inputs[name], before[name])]
    require(not changed, f"its call changes the {' and the '.join(changed)} that it is given")
    return ", ".join(inputs) + " stay as they are"


@check("determinism", "a random start, dropout in training mode, or logits kept from one call to the next", layers=True)
def _determinism(subject: Subject) -> str:
    inputs = subject.inputs()
    return _require_same(subject.call(inputs), subject.call(inputs), "of a first and of a second call")


@check(
    "batch independence",
    "logits shared or averaged over the batch, a softmax over axis 0, or a normalisation by the batch",
    layers=True,
)
def _batch_independence(subject: Subject) -> str:
    inputs = subject.inputs()
    batched = {name: tensor.split(1) for name, tensor in inputs.items() if name != "weight"}
    alone_in = [dict(zip(batched, parts, strict=True)) for parts in zip(*batched.values(), strict=True)]
    each = zip(*(subject.call(inputs | image) for image in alone_in), strict=True)
    alone = Routed(*(None if parts[0] is None else torch.cat(parts) for parts in each))  # type: ignore[arg-type]
    return _require_same(alone, subject.call(inputs), "of each image alone and in a batch")


@check(
    "input order", "a reshape or view where a permute or transpose is meant, or a start from the first input capsule"
)
def _input_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(subject.sizes.I, device=subject.device).roll(1)
    moved = {"weight": inputs["weight"][order]} | {name: inputs[name][:, order] for name in ("poses", "activations")}
    wanted = subject.call(inputs)
    if wanted.coupling is not None:
        wanted = wanted._replace(coupling=wanted.coupling[:, order])
    return _require_same(subject.call(moved), wanted, "of input capsules in two orders")


@check(
    "output order",
    "a reshape or view where a permute or transpose is meant, or an output capsule with a part of its own",
)
def _output_order(subject: Subject) -> str:
    inputs = subject.inputs()
    order = torch.arange(inputs["weight"].shape[1], device=subject.device).roll(1)
    capsules, activations, coupling = subject.call(inputs)
    wanted = Routed(
        capsules[:, order],
        None if activations is None else activations[:, order],
        None if coupling is None else coupling[..., order],
    )
    return _require_same(
        subject.call(inputs | {"weight": inputs["weight"][:, order]}),
        wanted,
        "of outputs reordered before and after routing",
    )


@check("rotation", "a squash, norm or dot product over another axis than the components', or over one of size one")
def _rotation(subject: Subject) -> str:
    inputs = subject.inputs()
    D = inputs["weight"].shape[2]
    square = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q.to(subject.device)
    turned = inputs | {"weight": torch.einsum("ed,ijdk->ijek", rotation, inputs["weight"])}
    wanted, got = subject.call(inputs).poses @ rotation.T, subject.call(turned).poses
    return _require_same(Routed(got), Routed(wanted), "rotated before and after routing")


@check("lengths", "no squash, or one over another axis than the components'", layers=True)
def _lengths(subject: Subject) -> str:
    inputs = subject.inputs()
    longest, low, high = 0.0, 1.0, 0.0
    for factor in (1.0, 100.0):
        routed = subject.call(inputs | {"poses": factor * inputs["poses"]})
        if routed.activations is None:
            longest = max(longest, float(routed.poses.detach().norm(dim=-1).max()))
        else:
            least, most = (float(each) for each in routed.activations.detach().aminmax())
            low, high = min(low, least), max(high, most)
    fits = low >= -TOLERANCE and high <= 1 + TOLERANCE
    require(fits or low > high, f"activations lie in {low:.4g}..{high:.4g} instead of 0..1")
    require(longest <= 1 + TOLERANCE, f"the longest capsule has the length {longest:.4g}, more than one")
    return f"{longest:.6g} at most" if low > high else f"activations lie in {low:.4g}..{high:.4g}"


@check("coupling", "a softmax over another axis than the one that competes, or a coupling of another iteration's shape")
def _coupling(subject: Subject) -> str:
    coupling = subject.call(subject.inputs()).coupling
    if coupling is None:
        return "not returned"
    coupling = coupling.detach()
    low, high = float(coupling.min()), float(coupling.max())
    require(low >= -TOLERANCE and high <= 1 + TOLERANCE, f"coupling lies in {low:.4g}..{high:.4g} instead of 0..1")
    sums: dict[SoftmaxOver, Tensor] = {"outputs": coupling.sum(2), "inputs": coupling.sum(1)}
    off = {axis: float((total - 1).abs().max()) for axis, total in sums.items()}
    axis = subject.softmax_over
    if axis is None:
        axis = "outputs" if off["outputs"] <= off["inputs"] else "inputs"
    low, high = float(sums[axis].min()), float(sums[axis].max())
    other: SoftmaxOver = "inputs" if axis == "outputs" else "outputs"
    instead = f", but to one over the {other}" if off[other] <= TOLERANCE else ""
    require(off[axis] <= TOLERANCE, f"coupling sums to {low:.4g}..{high:.4g} over the {axis}{instead}")
    return f"sums to one over the {axis}"


@check(
    "other votes",
    "votes.weight, or isinstance(votes, DenseVotes), where votes.weighted_sum, votes.agreement or votes.build is meant",
)
def _other_votes(subject: Subject) -> str:
    inputs = subject.inputs()
    got = subject.route(_BuiltVotes(DenseVotes(inputs["poses"], inputs["weight"])), inputs["activations"])
    return _require_same(got, subject.call(inputs), "of votes that are built and of those that are not")


class _BuiltVotes(Votes):
    """Votes that were built at once, as a transform without weights may have them."""

    def __init__(self, votes: Votes) -> None:
        super().__init__(votes.poses, votes.size)
        self._built = BuiltVotes(votes.build())

    def weighted_sum(self, coupling: Tensor | None) -> Tensor:
        """See :class:`torchcaps.nn.Votes`."""
        return self._built.weighted_sum(coupling)

    def agreement(self, parents: Tensor) -> Tensor:
        """See :class:`torchcaps.nn.Votes`."""
        return self._built.agreement(parents)

    def build(self) -> Tensor:
        """See :class:`torchcaps.nn.Votes`."""
        return self._built.votes


@check("inactive capsules", "activations that are used for some of the sums only")
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


@check(
    "finite numbers",
    "norm() or sqrt() without epsilon, whose gradient at zero is not finite, a division by a length or a variance, "
    "or exp() where softmax() is meant",
    layers=True,
)
def _finite_numbers(subject: Subject) -> str:
    subject = subject.to(torch.float32)
    inputs = subject.inputs(torch.float32)
    poses = inputs["poses"]
    cases = {
        "poses of zero": 0 * poses,
        "one image of zeros": torch.cat([0 * poses[:1], poses[1:]]),
        "poses of length 1e-20": 1e-20 * poses,
        "poses of length 1e6": 1e6 * poses,
        "input capsules that all agree": poses[:, :1].expand_as(poses),
    }
    if not subject.is_layer:
        cases["nothing active"] = poses
    for case, changed in cases.items():
        given = inputs | {"poses": changed}
        if case == "nothing active":
            given["activations"] = 0 * inputs["activations"]
        if case.endswith("agree") and not subject.is_layer:
            given["weight"] = inputs["weight"][:1].expand_as(inputs["weight"])
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        routed = subject.call(leaves)
        gradients = _gradients(_seen(routed), leaves | _parameters(subject))
        for name, tensor in zip(RESULTS, routed, strict=True):
            _require_finite(tensor, f"{name} for {case}")
        for name, gradient in gradients.items():
            _require_finite(gradient, f"the gradient of the {name} for {case}")
    return f"for {', '.join(cases)}"


@check(
    "gradients",
    "a detach() or no_grad() that should not be there, an operation in place, or float32 inside",
    layers=True,
)
def _gradients_agree(subject: Subject) -> str:
    inputs = {name: tensor.requires_grad_() for name, tensor in subject.inputs().items()}
    seen = _seen(subject.call(inputs))
    cotangent = _cotangent(seen)
    gradients = _gradients(seen, inputs | _parameters(subject))
    random = torch.Generator().manual_seed(2)
    largest = 0.0
    for name, tensor in (inputs | _parameters(subject)).items():
        direction = torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(subject.device)
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
        require(
            off <= GRADIENT_TOLERANCE,
            f"along a random direction, the gradient of the {name} is {slope:.6g}, finite differences give "
            f"{difference:.6g}",
        )
        largest = max(largest, off)
    return f"off by {largest:.2g} at most"


@check("used parameters", "a parameter that was left over, or cut off by detach()", layers=True)
def _used_parameters(subject: Subject) -> str:
    gradients = _gradients(_seen(subject.call(subject.inputs())), _parameters(subject))
    idle = [name for name, gradient in gradients.items() if not gradient.count_nonzero()]
    require(not idle, f"no gradient reaches the {' and the '.join(idle)}")
    return f"{len(gradients)} parameters"


@check("torch.func.vmap", "a decision on the values of a tensor, or a result kept outside of the call", layers=True)
def _vmap(subject: Subject) -> str:
    inputs = subject.inputs()
    stacked = torch.stack([inputs["poses"], inputs["poses"].flip(0)])  # the same activations

    def capsules(poses: Tensor) -> Tensor:
        return subject.call(inputs | {"poses": poses}).poses

    wanted = torch.stack([capsules(poses) for poses in stacked])
    try:
        got = torch.func.vmap(capsules)(stacked)
    except Exception as error:
        return f"not supported: {type(error).__name__}: {_first_line(error)}"
    return _require_same(Routed(got), Routed(wanted), "under torch.func.vmap and from a loop")


# ---- running them, and what they share


def _run(checks: dict[str, tuple[Finder, str]], subject: Subject, skip: Collection[str]) -> dict[str, str]:
    """What each check finds."""
    skip = list(skip)
    for name in skip:
        if not isinstance(name, str) or name not in checks:
            raise unknown_name("check", name, checks)
    found = {}
    for name, (function, cause) in checks.items():
        if name in skip:
            found[name] = "skipped"
        else:
            with _described(subject, name, cause):
                found[name] = function(_fresh(subject))
    return found


def _fresh(subject: Subject) -> Subject:
    """A copy in float64: no check is misled by what another one left behind, nor is the user's module changed."""
    module = copy.deepcopy(subject.module if subject.given is None else subject.given)
    if isinstance(module, Routing):
        module.bind(LayerSize(*subject.sizes))  # type: ignore[arg-type]  # all of them are known for a routing
    return subject.replaced(module.to(subject.device, torch.float64))


@contextmanager
def _described(subject: Subject, name: str, cause: str) -> Iterator[None]:
    """Failures as one sentence: what lacks which property, the numbers, the usual cause."""
    failure = f"{type(subject.module).__name__} fails “{name}”"
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{failure}: {error}; usual cause: {cause}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = getattr(sys.modules.get(type(subject.module).__module__), "__file__", None)
        last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        raised = (
            f"it raises {type(error).__name__}: {_first_line(error)} ({Path(last.filename).name}, line {last.lineno})"
        )
        raise AssertionError(f"{failure}: {raised}; usual cause: {cause}") from error


def require(condition: bool, otherwise: str) -> None:
    """Fail a check; also under ``python -O``, which removes assert statements."""
    if not condition:
        raise AssertionError(otherwise)


def _require_shapes(routed: Routed, sizes: Sizes, batch: int) -> None:
    I, _, J, D = sizes
    capsules, activations, coupling = routed
    require(isinstance(capsules, Tensor), f"capsules are a {type(capsules).__name__} instead of a tensor")
    shape = tuple(capsules.shape)
    fits = len(shape) == 3 and all(wanted in (None, size) for size, wanted in zip(shape, (batch, J, D), strict=True))
    wanted = f"({batch}, {J or 'J'}, {D or 'D'}) = (B, J, D)"
    require(fits, f"capsules have the shape {shape} instead of {wanted}")
    if activations is not None:
        of, shape = tuple(capsules.shape[:2]), tuple(activations.shape)
        require(shape == of, f"activations have the shape {shape} instead of {of} = (B, J)")
    if coupling is not None:
        shape = tuple(coupling.shape)
        require(shape == (batch, I, J), f"coupling has the shape {shape} instead of ({batch}, {I}, {J}) = (B, I, J)")


def _require_same(got: Routed, wanted: Routed, which: str, tolerance: float = TOLERANCE) -> str:
    """Fail unless capsules, and activations and coupling where both have them, are equal beside the largest number."""
    largest = 0.0
    for name, one, other in zip(RESULTS, got, wanted, strict=True):
        if one is not None and other is not None:
            what = f"the {name} {which}"
            shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
            require(one.shape == other.shape, f"{what} differ in their shapes, {shapes}")
            off = (one - other).detach().abs() / max(float(other.detach().abs().max()), 1e-30)
            apart = float(off.nan_to_num(float("inf")).max())
            require(
                apart <= tolerance, f"{what} differ by {apart:.2g} of the largest number, more than {tolerance:.0e}"
            )
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


def _parameters(subject: Subject) -> Inputs:
    """The module's own parameters that are trained, by names that no input has."""
    return {f"parameter {name}": tensor for name, tensor in subject.module.named_parameters() if tensor.requires_grad}


def _gradients(seen: Tensor, leaves: Inputs) -> Inputs:
    """The gradient of each leaf, zeros where none arrives."""
    if not seen.requires_grad or not leaves:
        return {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    total = (seen * _cotangent(seen)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Plain attributes of a module and its parts, lists and tuples opened."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    yield ".".join(filter(None, (path, name))), each


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _check_kind(caller: str, module: object, kind: type[nn.Module]) -> None:
    if not isinstance(module, kind):
        hint = "; give an instance, not the class" if isinstance(module, type) else ""
        wanted = "torchcaps.nn.Routing" if kind is Routing else "torch.nn.Module"
        raise TypeError(f"{caller}: expected a {wanted}, got {module!r}{hint}")


def _known(layer: nn.Module, name: str, given: int | None, own: int | None) -> int:
    """A size that is given, or else the layer's own."""
    size = own if given is None else given
    if size is None:
        raise InputError(f"check_capsule_layer: a {type(layer).__name__} does not say its {name}; give it by name")
    _check_size("check_capsule_layer", name, size, 1)
    return size


def _check_size(caller: str, name: str, size: int, least: int) -> None:
    Range(least, WIDTH.most, whole=True).check(f"{caller}: {name}", size)
