"""The mistakes that ``diagnose`` looks for: one function each, named after its mistake."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchcaps.errors import InputError, reason_of
from torchcaps.testing.measures import change, gradients_of, move
from torchcaps.testing.patient import FACTORS, Patient
from torchcaps.testing.softmaxes import Watch
from torchcaps.words import counted, each_of

Severity: TypeAlias = Literal["error", "warning", "note"]

#: Largest relative change of a result by rounding: between inputs of one shape, and between different shapes.
MAX_ROUNDING, MAX_ROUNDING_BY_SHAPE = 1e-5, 1e-3
#: Factors on the poses at which a squash is expected to saturate.
LONG_FACTORS = (1e2, 1e3, 1e4, 1e6)
#: Largest ratio of the third to the first singular value if the directions of a result span only a plane.
MAX_FLAT_RATIO = 1e-4


class Look(NamedTuple):
    """The search for one mistake: a generator of evidence, and the text of the finding."""

    see: Callable[[Patient], Iterator[str]]
    severity: Severity
    cause: str
    cure: str


LOOKS: dict[str, Look] = {}
RESULT, INPUT = "the result", "the input"


def finds(severity: Severity, cause: str, cure: str) -> Callable[..., Any]:
    """Register a function that yields evidence of the mistake that it is named after."""

    def register(see: Callable[[Patient], Iterator[str]]) -> Callable[[Patient], Iterator[str]]:
        LOOKS[see.__name__.strip("_").replace("_", "-")] = Look(see, severity, cause, cure)
        return see

    return register


@finds(
    "note",
    "softmax(dim=1) on logits (B, I, J), or a softmax without dim, which uses axis 0 or 1; it may be intended",
    "for the paper's routing, use the axis of the output capsules; if inputs compete, mask them before the softmax",
)
def _softmax_over_inputs(patient: Patient) -> Iterator[str]:
    for each in patient.softmaxes:
        if patient.over(each) == "inputs":
            yield f"a softmax runs over the {each.shape[each.axis]} input capsules, axis {each.axis} of {each.shape}"


@finds("error", "a softmax over the last axis of logits (B, I, J, 1)", "use the axis of the output capsules")
def _softmax_over_nothing(patient: Patient) -> Iterator[str]:
    for each in patient.softmaxes:
        if patient.over(each) == "nothing":
            yield f"a softmax runs over an axis of size one, axis {each.axis} of {each.shape}"


@finds(
    "error",
    "agreement averaged over the batch, logits without a batch axis, or a softmax over axis 0",
    "give every image its own logits, (B, I, J), and do not average them",
)
def _mixes_images(patient: Patient) -> Iterator[str]:
    inputs = patient.poses.clone()
    inputs[0] = patient.inputs(seed=1)[0]
    off = change(patient.call(inputs)[1:], patient.result[1:])
    if off > MAX_ROUNDING:
        yield f"another first image changes the results of the other images by {off:.2g} of the largest number"


@finds(
    "error",
    "logits stored in an attribute, buffer or parameter that each call changes",
    "create the logits in every call",
)
def _keeps_state(patient: Patient) -> Iterator[str]:
    off = change(patient.after_others[1], patient.result)
    if off > MAX_ROUNDING:
        yield f"after a call with other inputs, the result differs by {off:.2g} of the largest number"


@finds(
    "warning",
    "logits that start from noise, or dropout that evaluation mode does not switch off",
    "in evaluation, draw from a generator with a fixed seed, start from learned logits, or use nn.Dropout",
)
def _random_in_evaluation(patient: Patient) -> Iterator[str]:
    off = change(patient.call(patient.poses, seed=1), patient.result)
    if off > MAX_ROUNDING:
        yield f"two calls with the same input differ by {off:.2g} of the largest number"


@finds(
    "error",
    "a squash that divides by a length, or takes the root of a squared length, without epsilon",
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
        except RuntimeError:  # from backward(), which no-gradient reports
            numbers = {RESULT: patient.call(inputs)}
        for name, each in numbers.items():
            if bad := int((~each.isfinite()).sum()):
                what = name if name == RESULT else f"the gradient of {name}"
                yield f"for {case}, {bad} of {each.numel()} numbers of {what} are NaN or infinite"


@finds(
    "warning",
    "a squash over the wrong axis: on sums (B, 1, J, D, 1), dim=-1 has size one and dim=2 is J",
    "squash over the D components of each output capsule, so that its length stays below one",
)
def _squash_over_other_axis(patient: Patient) -> Iterator[str]:
    if patient.of_images or patient.out_capsules < 2 or patient.out_dim < 3:
        return
    for factor in LONG_FACTORS:  # until the squash saturates
        size = patient.call(patient.poses * factor).abs()  # (B, J, D)
        size = size.nan_to_num(0.0, math.inf)  # NaN if no vote reaches a capsule
        sums = size.square().sum(1).sqrt()
        longest = float(size.norm(dim=-1).max())
        if size.any() and _are_one(size[size > 0]):
            yield f"for long inputs, each component alone is squashed to 1, and lengths reach {longest:.2g}"
            return
        if _are_one(sums):
            yield f"for long inputs, the {patient.out_capsules} capsules together have length 1 in each component"
            return


def _are_one(numbers: Tensor) -> bool:
    """Return whether nearly all numbers are one."""
    return float(((numbers - 1).abs() < 0.01).float().mean()) > 0.95


@finds(
    "warning",
    "a single iteration, agreement that is not used, or logits that do not affect the last sum",
    "compute the coupling again after each agreement, and use the last one; ignore this if no routing is intended",
)
def _no_routing(patient: Patient) -> Iterator[str]:
    runs = {*map(patient.over, patient.softmaxes)}
    # softmax-over-nothing reports the first case
    if "nothing" in runs or (patient.of_images and not runs & {"outputs", "inputs"}):
        return
    moved = copy.deepcopy(patient.module)
    for parameter in moved.parameters():
        move(parameter, 0.1)  # a parameter of zero would hide the rest of a product
    coupling = [each for each in patient.watched(moved) if patient.over(each) in ("outputs", "inputs")]
    if coupling and not any(each.differs[each.axis] for each in coupling):
        yield (f"the logits of {each_of(len(coupling), 'softmax')} are equal, so the coupling is always uniform")
    if patient.of_images or patient.out_dim < 3:
        return
    step = patient.inputs(seed=2)
    for factor in FACTORS:
        line = [factor * (patient.poses + t * step) for t in (0.0, 0.3, 0.6, 1.0, 2.0)]
        along = torch.stack([patient.call(inputs, module=copy.deepcopy(moved)) for inputs in line], 2).double()
        directions = along / along.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # (B, J, 5, D)
        values = torch.linalg.svdvals(directions.nan_to_num())
        if float((values[..., 2] / values[..., 0].clamp_min(1e-30)).max()) > MAX_FLAT_RATIO:
            return
    yield "along a line of inputs, output capsules stay in a plane, because they are a fixed weighted sum"


@finds(
    "error",
    "votes times capsules without the sum over components, or the softmax of logits stored in place of the logits",
    "b = b + (votes * capsules).sum(-1), and keep c = softmax(b) under another name",
)
def _agreement_not_summed(patient: Patient) -> Iterator[str]:
    I, J, D = patient.shape[1], patient.out_capsules, patient.out_dim
    sizes_differ = not patient.of_images and len({I, J, D, patient.batch, 1}) == 5
    for shape, axis, differs, of_softmax in patient.softmaxes:
        components = shape.index(D) if sizes_differ and {I, J, D} <= {*shape} else axis
        if components != axis and differs[components]:
            yield f"logits of shape {shape} differ along axis {components}, the {counted(D, 'component')}"
        if of_softmax:
            yield f"logits of shape {shape} are the result of an earlier softmax, with something added"


@finds(
    "error",
    "detach() or no_grad() around all iterations, .data, numpy, or a new tensor made from a parameter",
    "let gradients flow at least through the last weighted sum",
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
        if off <= MAX_ROUNDING and names == without:  # such as the parameters of a decoder, whose output is not checked
            return
        if off > MAX_ROUNDING and len(names) == 1:
            yield f"no gradient reaches {names[0]}; moved by 1 %, it changes the result by {off:.2g} of the maximum"


def _with_gradients(patient: Patient, inputs: Tensor) -> dict[str, Tensor]:
    """Return the result, and the gradients of the input and of each parameter; zeros without a gradient."""
    module, inputs = copy.deepcopy(patient.module), inputs.clone().requires_grad_()
    named = {INPUT: inputs, **{name: each for name, each in module.named_parameters() if each.requires_grad}}
    with torch.enable_grad():
        result = patient.call(inputs, module=module)
        return {RESULT: result.detach()} | gradients_of(result, named)


@finds(
    "error",
    "a softmax over the inputs before masking, or sums, means and norms that include masked capsules",
    "set votes of masked capsules to zero, and their logits to -inf if inputs compete, before anything is summed",
)
def _padding_changes_result(patient: Patient) -> Iterator[str]:
    mask = patient.mask
    if mask is None:
        return
    poses, others = patient.poses * mask.unsqueeze(2), patient.inputs(seed=4)
    lengths, not_empty = mask.sum(1), mask.any(1)
    with Watch(still=True):
        padded = patient.call(poses)
        off = change(patient.call(poses.where(mask.unsqueeze(2), others))[not_empty], padded[not_empty])
        if off > MAX_ROUNDING:
            yield f"other numbers in masked capsules change the result by {off:.2g} of the largest number"
        for length in lengths[lengths > 1].unique().tolist():  # one capsule may be broadcast
            rows = (lengths == length) & mask[:, :length].all(1)  # padded at the end
            try:
                off = change(patient.call(poses[:, :length], mask[:, :length])[rows], padded[rows])
            except (InputError, RuntimeError):  # the module needs a fixed number of capsules, or no row matches
                continue
            if off > MAX_ROUNDING_BY_SHAPE:
                yield f"without the padding, the result differs by {off:.2g} of the largest number"


@finds(
    "warning",
    "weights of zero, a ReLU that is never positive, or equal logits with weights that all pairs share",
    "check the initial weights and logits; with weights that all pairs share, start logits from noise or queries",
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
    same = (apart < MAX_ROUNDING).triu(1).nonzero().tolist()
    if same and not patient.of_images:
        yield f"these two are equal {where}: {same[0]}"
