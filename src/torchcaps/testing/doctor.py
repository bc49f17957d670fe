"""``diagnose``: known mistakes in a capsule layer or network of any origin.

Most are found by behaviour: the module is called again with one image changed, with zeros, in evaluation twice. What
its softmaxes run over is seen by watching the operations that torch computes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchcaps.checks import checked
from torchcaps.errors import InputError, reason_of
from torchcaps.nn import CapsuleLayer, Capsules
from torchcaps.testing.properties import place_of

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

    =========================  ========  ==========================================================================
    ``softmax-over-inputs``    note      the softmax of the logits runs over the input capsules
    ``softmax-over-nothing``   error     it runs over an axis of size one, so all coupling is one
    ``mixes-images``           error     an image's result depends on the other images of the batch
    ``keeps-state``            error     a result depends on earlier calls
    ``random-in-evaluation``   warning   the same input gives another result at the next call
    ``nan-at-zero``            error     the result or a gradient is not finite for zeros
    ``no-routing``             warning   output capsules are a fixed weighted sum of the inputs, up to their lengths
    ``agreement-not-summed``   error     logits differ by component, or hold a softmax of logits instead of their sum
    ``no-gradient``            error     the input or a parameter changes the result, and gets no gradient
    ``padding-changes-result`` error     what stands at masked places, or their number, changes the result
    ``dead-capsules``          warning   output capsules are the same for all inputs, or the same as another one
    =========================  ========  ==========================================================================

    A copy is called, in evaluation mode, in the precision of its parameters; nothing is trained. No finding is no
    proof: what the softmax runs over is not seen where I = J, ``no-routing`` needs D of at least 3 or a softmax, and
    only torch's own softmax is watched.

    Args:
        module: Maps poses (B, I, K) to (B, J, D), or images (B, C, H, W) to (B, J) or (B, J, D). It returns a tensor,
            or a tuple, mapping or dataclass whose first tensor is that; axes of size one more are left out.
        shape: Of its input, (B, I, K) or (B, C, H, W), B at least 2; sizes that differ from each other show more.
        mask: Which input capsules are there. The module is called as ``module(poses, mask)``, a
            :class:`torchcaps.nn.CapsuleLayer` with :class:`torchcaps.nn.Capsules`; ``padding-changes-result`` needs it.

    Returns:
        What was found, in the order of the table; an empty list if nothing was.

    Raises:
        InputError: The shape is none of these; or the module raises an error, or does not return such a tensor.

    Example:
        >>> from torchcaps.nn import DenseCapsules
        >>> from torchcaps.testing import diagnose
        >>> diagnose(DenseCapsules(12, 8, 5, 16), (4, 12, 8))
        []
    """
    with torch.no_grad():
        patient = Patient(module, shape, mask)
        # chance of another source than torch's hides all else
        names = _LOOKS if patient.repeats() else ("random-in-evaluation",)
        found = [(name, _LOOKS[name], _LOOKS[name].see(patient)) for name in names]
    return [Finding(name, look.severity, words, look.cause, look.cure) for name, look, words in found if words]


# ---- the module, as it is called and watched


class Patient:
    """A module of any origin, the inputs that it is called with, and what it gives for them."""

    def __init__(self, module: nn.Module, shape: Sequence[int], mask: Tensor | None) -> None:
        if len(shape) not in (3, 4) or not all(isinstance(size, int) and size > 0 for size in shape) or shape[0] < 2:
            raise InputError(f"diagnose: shape must be (B, I, K) or (B, C, H, W), B at least 2, got {tuple(shape)}")
        if mask is not None and (len(shape) == 4 or tuple(mask.shape) != tuple(shape[:2])):
            raise InputError(f"diagnose: a mask is for poses (B, I, K), {tuple(shape)}, got one of {tuple(mask.shape)}")
        self.name, self.shape, self.mask, self.factor = type(module).__name__, tuple(shape), mask, 1.0
        self.of_images = len(shape) == 4
        numbers = (each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point())
        self.like = next(numbers, torch.empty(0)).detach()
        try:
            self.module = copy.deepcopy(module).eval()
        except Exception as error:
            raise InputError(f"diagnose: a {self.name} cannot be copied: {reason_of(error)}") from error
        if any(map(nn.parameter.is_lazy, self.module.parameters())):  # all copies begin with the same weights
            self.call(self.inputs(), module=self.module)
        for factor in (1.0,) if self.of_images else FACTORS:  # of votes that are too short, nothing can be seen
            self.factor = factor
            self.poses = self.inputs()
            self.result = self.call(self.poses)
            if float(self.result.norm(dim=-1).max()) >= LENGTH:
                break
        if not self.result.isfinite().all():
            raise InputError(f"diagnose: a {self.name} gives NaN or infinity for random inputs, so nothing can be told")
        self.out_capsules = self.result.shape[1]
        self.out_dim = self.result.shape[2] if self.result.ndim == 3 else 1
        # a batch of a size that no other axis has, where the module takes that
        sizes = {*self.shape[1:], self.out_capsules, self.out_dim}
        self.batch = next(size for size in (self.shape[0], 3, 5, 7, 11, 13, 17, 19) if size not in sizes)
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
            raise InputError(
                f"{called} raises {type(error).__name__}: {reason_of(error)} ({place_of(error, module)})"
            ) from error
        if result is None:
            raise InputError(f"{called} returns no tensor")
        wanted, axis = 3, result.ndim - 1
        while result.ndim > wanted and axis > 0:
            result = result.squeeze(axis) if result.shape[axis] == 1 else result
            axis -= 1
        if result.ndim not in ((2, 3) if self.of_images else (3,)) or len(result) != len(inputs):
            meant = "(B, J) or (B, J, D)" if self.of_images else "(B, J, D)"
            raise InputError(f"{called} must return {meant} first, got {tuple(result.shape)}")
        return result

    def repeats(self) -> bool:
        """Whether a fresh copy gives the same result from the same seed."""
        return change(self.call(self.poses), self.result) <= CHANGED

    def watched(self, module: nn.Module | None = None) -> list[Softmax]:
        """The softmaxes of a call."""
        mask = None if self.mask is None else self.mask[torch.arange(self.batch) % len(self.mask)]
        with Watch() as watch:
            self.call(self.inputs(batch=self.batch), mask, module=module)
        return watch.softmaxes

    def coupled(
        self, over: Literal["outputs", "inputs", "nothing"], softmaxes: Sequence[Softmax] | None = None
    ) -> list[Softmax]:
        """The softmaxes of logits, one for each pair of capsules, that run over these; of the first call if None."""
        J, D, B = self.out_capsules, self.out_dim, self.batch
        found = []
        for each in self.softmaxes if softmaxes is None else softmaxes:
            size, others = each.shape[each.axis], each.shape[: each.axis] + each.shape[each.axis + 1 :]
            among = any(other in (J, J * D) or other % (B * J) == 0 for other in others)
            is_inputs = size not in (1, J, D, B) and (self.of_images or size == self.shape[1])
            runs = {
                "outputs": size == J and math.prod(others) > B,
                "inputs": is_inputs and among,
                "nothing": size == 1 and among and (self.of_images or self.shape[1] > 1),
            }
            if J > 1 and runs[over]:
                found.append(each)
        return found


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, random = func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags
        if name in self.SOFTMAXES or name == "_log_softmax":
            self._note(*args[:2])
        result = func(*args, **(kwargs or {}))
        if self.still and random and isinstance(result, Tensor):
            result.zero_()
        if isinstance(result, Tensor):
            self._follow(name, func._schema.is_mutable, [each for each in args if isinstance(each, Tensor)], result)
        return result

    def _note(self, logits: Tensor, axis: int) -> None:
        numbers = logits.detach().nan_to_num()
        rounding = CHANGED * float(numbers.abs().max()) if numbers.numel() else 0.0
        differs = tuple(float((numbers.amax(n) - numbers.amin(n)).max()) > rounding for n in range(numbers.ndim))
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
    parts: Any = ()
    if isinstance(returned, Mapping):
        parts = returned.values()
    elif isinstance(returned, (tuple, list)):
        parts = returned
    elif is_dataclass(returned):
        parts = vars(returned).values()
    return next((found for found in map(first_tensor, parts) if found is not None), None)


def change(new: Tensor, old: Tensor) -> float:
    """The largest difference, beside the largest number."""
    return float((new - old).detach().abs().max().nan_to_num(math.inf) / old.detach().abs().max().clamp_min(1e-30))


def move(tensor: Tensor, by: float) -> None:
    """Add random numbers, such a part of the tensor's own size, or of one where it is zero."""
    random = torch.Generator().manual_seed(3)
    size = float(tensor.square().mean().sqrt()) or 1.0
    tensor += by * size * torch.randn(tensor.shape, generator=random).to(tensor)


# ---- what is looked for


class Look(NamedTuple):
    """What finds a mistake, giving the evidence or nothing, and what is said of it."""

    see: Callable[[Patient], str | None]
    severity: Severity
    cause: str
    cure: str


_LOOKS: dict[str, Look] = {}


def finds(severity: Severity, cause: str, cure: str) -> Callable[..., Any]:
    """Register what finds the mistake that its function is named after."""

    def register(see: Callable[[Patient], str | None]) -> Callable[[Patient], str | None]:
        _LOOKS[see.__name__.strip("_").replace("_", "-")] = Look(see, severity, cause, cure)
        return see

    return register


def _count(softmaxes: list[Softmax], words: str) -> str | None:
    if not softmaxes:
        return None
    shape, axis = softmaxes[0].shape, softmaxes[0].axis
    return (
        f"{len(softmaxes)} softmaxes run over {words} (axis {axis} of {shape})"
        if len(softmaxes) > 1
        else (f"a softmax runs over {words} (axis {axis} of {shape})")
    )


@finds(
    "note",
    "softmax(dim=1) on logits (B, I, J), or a softmax without dim, which then takes axis 0 or 1; some mean it",
    "for the paper's routing, take the axis of the output capsules; where inputs compete, mask them before the softmax",
)
def _softmax_over_inputs(patient: Patient) -> str | None:
    found = patient.coupled("inputs")
    return _count(found, f"the {found[0].shape[found[0].axis]} input capsules" if found else "")


@finds(
    "error",
    "a softmax over the last axis of logits (B, I, J, 1)",
    "take the axis of the output capsules",
)
def _softmax_over_nothing(patient: Patient) -> str | None:
    return _count(patient.coupled("nothing"), "an axis of size one")


@finds(
    "error",
    "agreement averaged over the batch, logits without a batch axis, or a softmax over axis 0",
    "give every image its own logits, (B, I, J), and average over nothing",
)
def _mixes_images(patient: Patient) -> str | None:
    inputs = patient.poses.clone()
    inputs[0] = patient.inputs(seed=1)[0]
    off = change(patient.call(inputs)[1:], patient.result[1:])
    return (
        f"another first image changes the results of the others by {off:.2g} of the largest" if off > CHANGED else None
    )


@finds(
    "error",
    "logits kept as an attribute, buffer or parameter that the call adds to",
    "make the logits anew in every call",
)
def _keeps_state(patient: Patient) -> str | None:
    module = copy.deepcopy(patient.module)
    patient.call(patient.inputs(seed=1), module=module, seed=1)
    off = change(patient.call(patient.poses, module=module), patient.result)
    return f"after a call with other inputs, the result differs by {off:.2g} of the largest" if off > CHANGED else None


@finds(
    "warning",
    "logits that start from noise, or dropout that evaluation does not turn off",
    "in evaluation, draw from a generator with a fixed seed, start from learned logits, or use nn.Dropout",
)
def _random_in_evaluation(patient: Patient) -> str | None:
    off = change(patient.call(patient.poses, seed=1), patient.result)
    off = max(off, change(patient.call(patient.poses), patient.result))
    return f"two calls with the same input differ by {off:.2g} of the largest" if off > CHANGED else None


@finds(
    "error",
    "a squash that divides by a length, or takes the root of a squared one, without epsilon",
    "add an epsilon under the root: s² / (1 + s²) · s / sqrt(s² + eps)",
)
def _nan_at_zero(patient: Patient) -> str | None:
    first, capsule = patient.poses.clone(), patient.poses.clone()
    first[0], capsule[:, 0] = 0, 0
    cases = {"an input of zeros": 0 * patient.poses, "one image of zeros": first}
    if not patient.of_images:
        cases["one input capsule of zeros"] = capsule
    for case, inputs in cases.items():
        try:
            result, gradients = _gradients(patient, inputs)
        except RuntimeError:  # said by no-gradient
            result, gradients = patient.call(inputs), {}
        for what, numbers in {"the result": result, **gradients}.items():
            bad = 0 if numbers is None else int((~numbers.isfinite()).sum())
            if bad:
                assert numbers is not None
                what = what if what == "the result" else f"the gradient of {what}"
                return f"for {case}, {bad} of {numbers.numel()} numbers of {what} are NaN or infinite"
    return None


@finds(
    "warning",
    "one iteration only, agreement that is computed and not used, or logits too small to matter",
    "compute the coupling again after each agreement, and use the last one; if no routing is meant, nothing is wrong",
)
def _no_routing(patient: Patient) -> str | None:
    if patient.coupled("nothing"):  # which says it
        return None
    moved = copy.deepcopy(patient.module)
    for parameter in moved.parameters():
        move(parameter, 0.1)  # one that starts at zero hides what it multiplies
    softmaxes = patient.watched(moved)
    coupling = patient.coupled("outputs", softmaxes) + patient.coupled("inputs", softmaxes)
    if coupling and not any(each.differs[each.axis] for each in coupling):
        return f"all {len(coupling)} softmaxes see equal logits, so the coupling is always uniform"
    if patient.of_images or patient.out_dim < 3:
        return None
    step = patient.inputs(seed=2)
    for factor in FACTORS:
        line = [factor * (patient.poses + t * step) for t in (0.0, 0.3, 0.6, 1.0, 2.0)]
        along = torch.stack([patient.call(inputs, module=copy.deepcopy(moved)) for inputs in line], 2).double()
        directions = along / along.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # (B, J, 5, D)
        values = torch.linalg.svdvals(directions.nan_to_num())
        if float((values[..., 2] / values[..., 0].clamp_min(1e-30)).max()) > FLAT:
            return None
    return "along a line of inputs, the directions of output capsules stay in a plane: they are a fixed weighted sum"


@finds(
    "error",
    "votes times capsules without the sum over components, or the softmax of logits stored in place of the logits",
    "b = b + (votes * capsules).sum(-1), and keep c = softmax(b) under another name",
)
def _agreement_not_summed(patient: Patient) -> str | None:
    I, J, D = patient.shape[1], patient.out_capsules, patient.out_dim
    if not patient.of_images and len({I, J, D, patient.batch, 1}) == 5:
        for shape, axis, differs, _ in patient.softmaxes:
            if {I, J, D} <= {*shape} and axis != shape.index(D) and differs[shape.index(D)]:
                return f"logits of shape {shape} differ along their axis {shape.index(D)}, the {D} components"
    again = [each for each in patient.softmaxes if each.of_softmax]
    return _count(again, "the result of an earlier softmax plus something, instead of the sum of logits and agreement")


@finds(
    "error",
    "detach() or no_grad() around all iterations, .data, numpy, or a tensor made anew from a parameter",
    "let gradients through the last weighted sum at least",
)
def _no_gradient(patient: Patient) -> str | None:
    try:
        _, gradients = _gradients(patient, patient.poses)
    except RuntimeError as error:
        return f"backward() raises {type(error).__name__}: {reason_of(error)}"
    found = []
    for name in [name for name, each in gradients.items() if each is None or not each.count_nonzero()]:
        module, inputs = copy.deepcopy(patient.module), patient.poses.clone()
        move(inputs if name == INPUT else module.get_parameter(name), 0.01)
        off = change(patient.call(inputs, module=module), patient.result)
        if off > CHANGED:
            found.append(f"{name} (moved by 1 %, it changes the result by {off:.2g} of the largest)")
    return f"no gradient reaches {', '.join(found)}" if found else None


@finds(
    "error",
    "a softmax over the inputs before the mask, or sums, means and norms that include masked places",
    "set votes, and logits where inputs compete, to zero and -inf at masked places before anything is summed",
)
def _padding_changes_result(patient: Patient) -> str | None:
    mask = patient.mask
    if mask is None:
        return None
    poses, others = patient.poses * mask.unsqueeze(2), patient.inputs(seed=4)
    with Watch(still=True):
        padded = patient.call(poses)
        filled = patient.call(poses.where(mask.unsqueeze(2), others))
    there = mask.any(1)
    off = change(filled[there], padded[there])
    if off > CHANGED:
        return f"other numbers at masked places change the result by {off:.2g} of the largest"
    most = 0.0
    for length in sorted(set(mask.sum(1).tolist()) - {0}):
        rows = mask.sum(1) == length
        rows &= mask[:, :length].all(1)  # padded at the end
        if not rows.any():
            continue
        try:
            with Watch(still=True):
                cut = patient.call(poses[:, :length], mask[:, :length])
        except InputError:  # it takes so many capsules only
            return None
        most = max(most, change(cut[rows], padded[rows]))
    return f"without the padding, the result differs by {most:.2g} of the largest" if most > CHANGED_BY_SHAPE else None


@finds(
    "warning",
    "weights of zero, a ReLU that is never positive, or equal logits where all pairs share their weights",
    "look at how weights and logits start; with weights that all pairs share, logits must start from noise or queries",
)
def _dead_capsules(patient: Patient) -> str | None:
    results = torch.cat([patient.result, *(patient.call(patient.inputs(seed=seed)) for seed in (5, 6, 7))])
    largest = results.abs().max().clamp_min(1e-30)
    by_capsule = results.movedim(1, 0).flatten(2) if results.ndim == 3 else results.T.unsqueeze(2)  # (J, B, D)
    varies = (by_capsule - by_capsule[:, :1]).abs().amax((1, 2)) > CHANGED * 1e-2 * by_capsule.abs().amax((1, 2))
    dead = (~varies).nonzero().flatten().tolist()
    if dead and not (patient.of_images and len(dead) == len(varies)):  # a last layer may start from zeros
        return f"output capsules {dead[:10]} of {len(varies)} give the same for all of {len(results)} inputs"
    if patient.of_images:
        return None
    for j in range(len(by_capsule) - 1):
        same = (by_capsule[j + 1 :] - by_capsule[j]).abs().amax((1, 2)) <= CHANGED * 1e-1 * largest
        if same.any():
            other = j + 1 + int(same.nonzero()[0])
            return f"output capsules {j} and {other} of {len(varies)} are the same for all of {len(results)} inputs"
    return None


INPUT = "the input"


def _gradients(patient: Patient, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The result, and the gradients of the input and of each parameter, None where there is none."""
    module, inputs = copy.deepcopy(patient.module), inputs.clone().requires_grad_()
    named = {INPUT: inputs, **{name: each for name, each in module.named_parameters() if each.requires_grad}}
    with torch.enable_grad():
        result = patient.call(inputs, module=module)
        if not result.requires_grad:
            return result, dict.fromkeys(named)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(8)).to(result)
        total = (result * weights).sum()
    return result.detach(), dict(
        zip(named, torch.autograd.grad(total, list(named.values()), allow_unused=True), strict=True)
    )
