"""``diagnose``: known mistakes in a capsule layer or network of any origin.

Most are found by behaviour: the module is called again with one image changed, with zeros, in evaluation twice. What
its softmaxes run over is seen by watching the operations that torch computes.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError, reason_of
from torchcaps.nn import CapsuleLayer, Capsules
from torchcaps.testing.properties import change, gradients_of, place_of
from torchcaps.tracing import TorchDispatchMode

Severity: TypeAlias = Literal["error", "warning", "note"]

#: Relative change of a result that is no rounding: of calls with inputs of one shape, and of different shapes.
CHANGED, CHANGED_BY_SHAPE = 1e-5, 1e-3
#: Lengths of output capsules, at least, to diagnose with, and factors on the inputs, of length one, that may bring it.
LENGTH, FACTORS = 0.3, (1.0, 10.0, 100.0, 1e3, 1e4)
#: A result whose directions span a plane: the third singular value beside the first.
FLAT = 1e-4


@dataclass(frozen=True)
class Finding:
    """A mistake, or what may be one."""

    name: str
    """Such as ``"mixes-images"``."""
    severity: Severity
    """An ``"error"`` is wrong by any paper; a ``"warning"`` should be meant; a ``"note"`` is a choice to know of."""
    evidence: str
    """What was seen, in numbers."""
    cause: str
    """What it usually comes from."""
    cure: str
    """What usually mends it."""


@checked
def diagnose(module: nn.Module, shape: Sequence[int], *, mask: Bool[Tensor, "B I"] | None = None) -> list[Finding]:
    """Look for known mistakes in a capsule layer, or a network, of any origin; in a few seconds.

    - ``softmax-over-inputs``, a note: the softmax of the logits runs over the input capsules.
    - ``softmax-over-nothing``, an error: it runs over an axis of size one, so all coupling is one.
    - ``mixes-images``, an error: an image's result depends on the other images of the batch.
    - ``keeps-state``, an error: a result depends on earlier calls.
    - ``random-in-evaluation``, a warning: the same input gives another result at the next call.
    - ``nan-at-zero``, an error: the result, or a gradient, is not finite for zeros.
    - ``no-routing``, a warning: the coupling is uniform, or output capsules are a fixed weighted sum of the inputs.
    - ``agreement-not-summed``, an error: logits differ by component, or are a softmax of logits plus agreement.
    - ``no-gradient``, an error: the input or a parameter changes the result, and gets no gradient.
    - ``padding-changes-result``, an error: what stands at masked places, or their number, changes the result.
    - ``dead-capsules``, a warning: an output capsule is the same for all inputs, or the same as another one.

    A copy is called, in evaluation mode, in float32 or float64; nothing is trained. No finding is no
    proof: what the softmax runs over is not seen where I = J, ``no-routing`` needs D of at least 3 or a softmax, and
    only torch's own softmax is watched.

    Args:
        module: Maps poses (B, I, K) to (B, J, D), or images (B, C, H, W) to (B, J) or (B, J, D). It returns a tensor,
            or a tuple, mapping or object whose first tensor is that; axes of size one more are left out.
        shape: Of its input, (B, I, K) or (B, C, H, W), B at least 2; sizes that differ from each other show more.
        mask: Which input capsules are there. The module is called as ``module(poses, mask)``, a
            :class:`torchcaps.nn.CapsuleLayer` with :class:`torchcaps.nn.Capsules`; ``padding-changes-result`` needs it.

    Returns:
        What was found, in the order of the table; an empty list if nothing was.

    Raises:
        InputError: The shape is none of these; or the module raises an error, or does not return such a tensor.

    Examples:
        >>> from torchcaps.nn import DenseCapsules
        >>> from torchcaps.testing import diagnose
        >>> diagnose(DenseCapsules(12, 8, 5, 16), (4, 12, 8))
        []
    """
    with torch.no_grad():
        patient = Patient(module, shape, mask)
        # random numbers of another source than torch's hide all else
        repeats = change(patient.call(patient.poses), patient.result) <= CHANGED
        names = _LOOKS if repeats else ("random-in-evaluation",)
        found = {name: next(_LOOKS[name].see(patient), None) for name in names}
    looks = ((name, words, _LOOKS[name]) for name, words in found.items() if words is not None)
    return [Finding(name, look.severity, words, look.cause, look.cure) for name, words, look in looks]


# ---- the module, as it is called and watched


class Patient:
    """A module of any origin, the inputs that it is called with, and what it gives for them."""

    def __init__(self, module: nn.Module, shape: Sequence[int], mask: Tensor | None) -> None:
        if len(shape) not in (3, 4) or not all(isinstance(size, int) and size > 0 for size in shape) or shape[0] < 2:
            raise InputError(f"diagnose: shape must be (B, I, K) or (B, C, H, W), B at least 2, got {tuple(shape)}")
        if mask is not None and (len(shape) == 4 or tuple(mask.shape) != tuple(shape[:2])):
            raise InputError(f"diagnose: a mask is for poses (B, I, K), {tuple(shape)}, got one of {tuple(mask.shape)}")
        self.name, self.shape, self.factor = type(module).__name__, tuple(shape), 1.0
        self.of_images = len(shape) == 4
        numbers = (each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point())
        self.like = next(numbers, torch.empty(0)).detach()
        self.mask = None if mask is None else mask.to(self.like.device)
        try:
            self.module = copy.deepcopy(module).eval()
        except Exception as error:
            raise InputError(f"diagnose: a {self.name} cannot be copied: {reason_of(error)}") from error
        if self.like.dtype in (torch.float16, torch.bfloat16):
            self.module, self.like = self.module.float(), self.like.float()
        if any(map(nn.parameter.is_lazy, self.module.parameters())):  # all copies begin with the same weights
            self.call(self.inputs(), module=self.module)
        length = 0.0
        for factor in (1.0,) if self.of_images else FACTORS:  # of votes that are too short, nothing can be seen
            self.factor = factor
            self.poses = self.inputs()
            self.result = self.call(self.poses)
            before, length = length, float(self.result.norm(dim=-1).max())
            if length >= LENGTH or length < 1.5 * before:
                break
        if not self.result.isfinite().all():
            raise InputError(f"diagnose: a {self.name} gives NaN or infinity for random inputs, so nothing can be told")
        self.out_capsules = self.result.shape[1]
        self.out_dim = self.result.shape[2] if self.result.ndim == 3 else 1
        # a batch by whose size its axis is known, where the module takes that
        sizes = {*self.shape[1:], self.out_capsules, self.out_dim}
        known = (n for n in (7, 11, 13, 17, 19, 23, 29) if all(size % n for size in sizes))
        self.batch = next(known, self.shape[0])
        try:
            self.softmaxes = self.watched()
        except InputError:
            self.batch = self.shape[0]
            self.softmaxes = self.watched()

    def inputs(self, seed: int = 0, batch: int | None = None) -> Tensor:
        """Random poses, of length one times the factor, or images of pixels 0..1."""
        random, shape = torch.Generator().manual_seed(seed), (batch or self.shape[0], *self.shape[1:])
        if self.of_images:
            return torch.rand(shape, generator=random).to(self.like)
        poses = torch.randn(shape, generator=random)
        return (self.factor * poses / poses.norm(dim=-1, keepdim=True)).to(self.like)

    def call(
        self, inputs: Tensor, mask: Tensor | None = None, *, module: nn.Module | None = None, seed: int = 0
    ) -> Tensor:
        """The result (B, J, D), or (B, J) of a network, of a fresh copy or of the module given."""
        module = copy.deepcopy(self.module) if module is None else module
        mask = self.mask if mask is None else mask
        inputs = inputs.clone()  # the call may change it
        given: tuple[Any, ...] = (inputs,) if mask is None else (inputs, mask)
        if mask is not None and isinstance(module, CapsuleLayer):
            given = (Capsules(inputs, mask=mask),)
        device = self.like.device
        called = f"diagnose: a {self.name}, called with {tuple(inputs.shape)},"
        try:
            with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                warnings.simplefilter("ignore")
                torch.manual_seed(seed)
                result = first_tensor(module(*given))
        except Exception as error:
            raised = f"{type(error).__name__}: {reason_of(error)} ({place_of(error, module)})"
            raise InputError(f"{called} raises {raised}") from error
        if result is None:
            raise InputError(f"{called} returns no tensor")
        for axis in range(result.ndim - 1, 0, -1):
            result = result.squeeze(axis) if result.ndim > 3 else result  # of size one only
        if result.ndim not in ((2, 3) if self.of_images else (3,)) or len(result) != len(inputs):
            meant = "(B, J) or (B, J, D)" if self.of_images else "(B, J, D)"
            raise InputError(f"{called} must return {meant} first, got {tuple(result.shape)}")
        return result

    @functools.cached_property
    def after_others(self) -> tuple[Tensor, Tensor]:
        """The result for other inputs, and, from the same copy, that for the inputs again."""
        module = copy.deepcopy(self.module)
        return self.call(self.inputs(seed=1), module=module, seed=1), self.call(self.poses, module=module)

    def watched(self, module: nn.Module | None = None) -> list[Softmax]:
        """The softmaxes of a call."""
        mask = None if self.mask is None else self.mask[torch.arange(self.batch) % len(self.mask)]
        with Watch() as watch:
            self.call(self.inputs(batch=self.batch), mask, module=module)
        return watch.softmaxes

    def over(self, softmax: Softmax) -> Literal["outputs", "inputs", "nothing", "something else"]:
        """What a softmax runs over, if its logits are one, or D, for each pair of capsules of each image."""
        J, D, B = self.out_capsules, self.out_dim, self.batch
        size, others = softmax.shape[softmax.axis], [*softmax.shape]
        del others[softmax.axis]
        if J == 1 or size in others:  # the latter as in attention among tokens
            return "something else"
        if size == J:
            return "outputs" if math.prod(others) > B else "something else"  # such as scores
        of_pairs = not {J, J * D, B * J, B * J * D}.isdisjoint(others)
        if of_pairs and size == 1 and (self.of_images or self.shape[1] > 1):
            return "nothing"
        is_inputs = size not in (1, D, B) if self.of_images else size == self.shape[1] not in (1, D, B)
        return "inputs" if of_pairs and is_inputs else "something else"


class Softmax(NamedTuple):
    """A softmax that was computed: the shape of its logits, its axis, along which axes they differ, what they are."""

    shape: tuple[int, ...]
    axis: int
    differs: tuple[bool, ...]
    of_softmax: bool
    """Whether the logits are the result of another softmax, with something added."""


class Watch(TorchDispatchMode):
    """Notes every softmax that torch computes, and follows its result as far as to the logits of another one.

    Args:
        still: Set all random numbers to zero.
    """

    SOFTMAXES = ("softmax", "_softmax")
    KEEPS = ("mul", "div", "minimum", "maximum", "clamp", "where", "masked_fill", "clone", "_to_copy")
    """Operations that only scale, mask or copy."""

    def __init__(self, *, still: bool = False) -> None:
        super().__init__()
        self.still, self.softmaxes = still, list[Softmax]()
        self.followed: dict[int, tuple[Tensor, bool]] = {}  # by memory: the tensor keeps it, whether anything was added

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would first import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, random = func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags
        if name in (*self.SOFTMAXES, "_log_softmax") and args[0].ndim and args[0].numel():
            self._note(*args[:2])
        result = func(*args, **(kwargs or {}))
        if self.still and random and isinstance(result, Tensor):
            result.zero_()
        if isinstance(result, Tensor):
            self._follow(name, func._schema.is_mutable, [each for each in args if isinstance(each, Tensor)], result)
        return result

    def _note(self, logits: Tensor, axis: int) -> None:
        numbers = logits.detach()
        differs = tuple(bool((numbers != numbers.narrow(n, 0, 1)).any()) for n in range(numbers.ndim))
        of_softmax = self.followed.get(memory(logits), (logits, False))[1]
        self.softmaxes.append(Softmax(tuple(logits.shape), axis % logits.ndim, differs, of_softmax))

    def _follow(self, name: str, in_place: bool, given: list[Tensor], result: Tensor) -> None:
        followed = [each for each in given if memory(each) in self.followed]
        name = name.removesuffix("_")
        if name in self.SOFTMAXES:
            self.followed[memory(result)] = (result, False)
        elif followed and (in_place or memory(result) not in map(memory, given)):  # no view
            added = any(self.followed[memory(each)][1] for each in followed)
            self.followed.pop(memory(result), None)
            if name in ("add", "sub") and len(given) == 2:
                added = True
            elif name not in ("add", "sub", *self.KEEPS):
                return
            if result.numel() == followed[0].numel():
                self.followed[memory(result)] = (result, added)


def memory(tensor: Tensor) -> int:
    """Where the numbers of a tensor and of its views are."""
    return tensor.untyped_storage().data_ptr()


def first_tensor(returned: object) -> Tensor | None:
    """The first tensor in what a module returns."""
    if isinstance(returned, Tensor):
        return returned
    if not isinstance(returned, (tuple, list, Mapping)):
        returned = getattr(returned, "__dict__", ())
    parts: Any = returned.values() if isinstance(returned, Mapping) else returned
    return next((found for found in map(first_tensor, parts) if found is not None), None)


def move(tensor: Tensor, by: float) -> None:
    """Add random numbers, such a part of the tensor's own size, or of one where it is zero."""
    random = torch.Generator().manual_seed(3)
    size = float(tensor.square().mean().sqrt()) or 1.0
    tensor += by * size * torch.randn(tensor.shape, generator=random).to(tensor)


# ---- what is looked for


class Look(NamedTuple):
    """A mistake: what yields the evidence if it is there, and what is said of it."""

    see: Callable[[Patient], Iterator[str]]
    severity: Severity
    cause: str
    cure: str


_LOOKS: dict[str, Look] = {}
RESULT, INPUT = "the result", "the input"


def finds(severity: Severity, cause: str, cure: str) -> Callable[..., Any]:
    """Register what finds the mistake that its function is named after."""

    def register(see: Callable[[Patient], Iterator[str]]) -> Callable[[Patient], Iterator[str]]:
        _LOOKS[see.__name__.strip("_").replace("_", "-")] = Look(see, severity, cause, cure)
        return see

    return register


@finds(
    "note",
    "softmax(dim=1) on logits (B, I, J), or a softmax without dim, which then takes axis 0 or 1; some mean it",
    "for the paper's routing, take the axis of the output capsules; where inputs compete, mask them before the softmax",
)
def _softmax_over_inputs(patient: Patient) -> Iterator[str]:
    for each in patient.softmaxes:
        if patient.over(each) == "inputs":
            yield f"a softmax runs over the {each.shape[each.axis]} input capsules, axis {each.axis} of {each.shape}"


@finds("error", "a softmax over the last axis of logits (B, I, J, 1)", "take the axis of the output capsules")
def _softmax_over_nothing(patient: Patient) -> Iterator[str]:
    for each in patient.softmaxes:
        if patient.over(each) == "nothing":
            yield f"a softmax runs over an axis of size one, axis {each.axis} of {each.shape}"


@finds(
    "error",
    "agreement averaged over the batch, logits without a batch axis, or a softmax over axis 0",
    "give every image its own logits, (B, I, J), and average over nothing",
)
def _mixes_images(patient: Patient) -> Iterator[str]:
    inputs = patient.poses.clone()
    inputs[0] = patient.inputs(seed=1)[0]
    off = change(patient.call(inputs)[1:], patient.result[1:])
    if off > CHANGED:
        yield f"another first image changes the results of the others by {off:.2g} of the largest"


@finds(
    "error",
    "logits kept as an attribute, buffer or parameter that the call adds to",
    "make the logits anew in every call",
)
def _keeps_state(patient: Patient) -> Iterator[str]:
    off = change(patient.after_others[1], patient.result)
    if off > CHANGED:
        yield f"after a call with other inputs, the result differs by {off:.2g} of the largest"


@finds(
    "warning",
    "logits that start from noise, or dropout that evaluation does not turn off",
    "in evaluation, draw from a generator with a fixed seed, start from learned logits, or use nn.Dropout",
)
def _random_in_evaluation(patient: Patient) -> Iterator[str]:
    off = change(patient.call(patient.poses, seed=1), patient.result)
    if off > CHANGED:
        yield f"two calls with the same input differ by {off:.2g} of the largest"


@finds(
    "error",
    "a squash that divides by a length, or takes the root of a squared one, without epsilon",
    "add an epsilon under the root: s² / (1 + s²) · s / sqrt(s² + eps)",
)
def _nan_at_zero(patient: Patient) -> Iterator[str]:
    first, capsule = patient.poses.clone(), patient.poses.clone()
    first[0], capsule[:, 0] = 0, 0
    cases = {"an input of zeros": 0 * patient.poses}
    if not patient.of_images:
        cases |= {"one image of zeros": first, "one input capsule of zeros": capsule}
    for case, inputs in cases.items():
        try:
            numbers = _with_gradients(patient, inputs)
        except RuntimeError:  # of backward(), which no-gradient says
            numbers = {RESULT: patient.call(inputs)}
        for name, each in numbers.items():
            if bad := int((~each.isfinite()).sum()):
                what = name if name == RESULT else f"the gradient of {name}"
                yield f"for {case}, {bad} of {each.numel()} numbers of {what} are NaN or infinite"


@finds(
    "warning",
    "one iteration only, agreement that is computed and not used, or logits that do not reach the last sum",
    "compute the coupling again after each agreement, and use the last one; if no routing is meant, nothing is wrong",
)
def _no_routing(patient: Patient) -> Iterator[str]:
    runs = {*map(patient.over, patient.softmaxes)}
    if "nothing" in runs or (patient.of_images and not runs & {"outputs", "inputs"}):  # the first says it
        return
    moved = copy.deepcopy(patient.module)
    for parameter in moved.parameters():
        move(parameter, 0.1)  # one that starts at zero hides what it multiplies
    coupling = [each for each in patient.watched(moved) if patient.over(each) in ("outputs", "inputs")]
    if coupling and not any(each.differs[each.axis] for each in coupling):
        yield f"all {len(coupling)} softmaxes see equal logits, so the coupling is always uniform"
    if patient.of_images or patient.out_dim < 3:
        return
    step = patient.inputs(seed=2)
    for factor in FACTORS:
        line = [factor * (patient.poses + t * step) for t in (0.0, 0.3, 0.6, 1.0, 2.0)]
        along = torch.stack([patient.call(inputs, module=copy.deepcopy(moved)) for inputs in line], 2).double()
        directions = along / along.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # (B, J, 5, D)
        values = torch.linalg.svdvals(directions.nan_to_num())
        if float((values[..., 2] / values[..., 0].clamp_min(1e-30)).max()) > FLAT:
            return
    yield "along a line of inputs, the directions of output capsules stay in a plane: they are a fixed weighted sum"


@finds(
    "error",
    "votes times capsules without the sum over components, or the softmax of logits stored in place of the logits",
    "b = b + (votes * capsules).sum(-1), and keep c = softmax(b) under another name",
)
def _agreement_not_summed(patient: Patient) -> Iterator[str]:
    I, J, D = patient.shape[1], patient.out_capsules, patient.out_dim
    told_apart = not patient.of_images and len({I, J, D, patient.batch, 1}) == 5
    for shape, axis, differs, of_softmax in patient.softmaxes:
        components = shape.index(D) if told_apart and {I, J, D} <= {*shape} else axis
        if components != axis and differs[components]:
            yield f"logits of shape {shape} differ along axis {components}, the {D} components"
        if of_softmax:
            yield f"logits of shape {shape} are the result of an earlier softmax, with something added"


@finds(
    "error",
    "detach() or no_grad() around all iterations, .data, numpy, or a tensor made anew from a parameter",
    "let gradients through the last weighted sum at least",
)
def _no_gradient(patient: Patient) -> Iterator[str]:
    try:
        gradients = _with_gradients(patient, patient.poses)
    except RuntimeError as error:
        yield f"backward() raises {type(error).__name__}: {reason_of(error)}"
        return
    without = [name for name, each in gradients.items() if name != RESULT and not each.count_nonzero()]
    for names in [without, *([name] for name in without)]:
        module, inputs = copy.deepcopy(patient.module), patient.poses.clone()
        for name in names:
            move(inputs if name == INPUT else module.get_parameter(name), 0.01)
        off = change(patient.call(inputs, module=module), patient.result)
        if off <= CHANGED and names == without:  # such as a decoder, whose output is not looked at
            return
        if off > CHANGED and len(names) == 1:
            yield f"no gradient reaches {names[0]}; moved by 1 %, it changes the result by {off:.2g} of the largest"


def _with_gradients(patient: Patient, inputs: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of the input and of each parameter; zeros where none arrives."""
    module, inputs = copy.deepcopy(patient.module), inputs.clone().requires_grad_()
    named = {INPUT: inputs, **{name: each for name, each in module.named_parameters() if each.requires_grad}}
    with torch.enable_grad():
        result = patient.call(inputs, module=module)
        return {RESULT: result.detach()} | gradients_of(result, named)


@finds(
    "error",
    "a softmax over the inputs before the mask, or sums, means and norms that include masked places",
    "set votes, and logits where inputs compete, to zero and -inf at masked places before anything is summed",
)
def _padding_changes_result(patient: Patient) -> Iterator[str]:
    mask = patient.mask
    if mask is None:
        return
    poses, others = patient.poses * mask.unsqueeze(2), patient.inputs(seed=4)
    lengths, there = mask.sum(1), mask.any(1)
    with Watch(still=True):
        padded = patient.call(poses)
        off = change(patient.call(poses.where(mask.unsqueeze(2), others))[there], padded[there])
        if off > CHANGED:
            yield f"other numbers at masked places change the result by {off:.2g} of the largest"
        for length in lengths[lengths > 1].unique().tolist():  # one capsule may be broadcast
            rows = (lengths == length) & mask[:, :length].all(1)  # padded at the end
            try:
                off = change(patient.call(poses[:, :length], mask[:, :length])[rows], padded[rows])
            except (InputError, RuntimeError):  # it takes so many capsules only, or no row is
                continue
            if off > CHANGED_BY_SHAPE:
                yield f"without the padding, the result differs by {off:.2g} of the largest"


@finds(
    "warning",
    "weights of zero, a ReLU that is never positive, or equal logits where all pairs share their weights",
    "look at how weights and logits start; with weights that all pairs share, logits must start from noise or queries",
)
def _dead_capsules(patient: Patient) -> Iterator[str]:
    results = torch.cat([patient.result, patient.after_others[0]])
    capsules = results.movedim(1, 0).reshape(patient.out_capsules, len(results), -1)  # (J, B, D)
    varies = (capsules - capsules[:, :1]).flatten(1).any(1)
    where = f"of {len(varies)} capsules, for all of {len(results)} inputs"
    # a network's last layer may start from zeros
    if not varies.all() and (varies.any() or not patient.of_images):
        yield f"these are the same {where}: {(~varies).nonzero().flatten().tolist()[:10]}"
    apart = torch.cdist(capsules.flatten(1), capsules.flatten(1)) / capsules.flatten(1).norm(dim=1).clamp_min(1e-30)
    same = (apart < CHANGED).triu(1).nonzero().tolist()
    if same and not patient.of_images:
        yield f"these two are equal {where}: {same[0]}"
