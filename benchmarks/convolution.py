"""The network's two convolutions, each alone: torchcaps against `F.conv2d`. A part of `run.py`.

They are those of sabour2017 on MNIST's size, in float32: the first from images, whose gradient nobody asks for, to 256
channels, and the primary one, with all three gradients; both without ReLU. For `F.conv2d` all tensors lie in memory as
PyTorch lays them out, (B, C, H, W); for torchcaps as its networks have them: features and gradients place by place,
(H, W, B, C), weights with channels last. One more contender is torchcaps with PyTorch's order.

Correctness comes first: outputs and gradients are compared with `F.conv2d` in float64, for random, constant and one-hot
features (and gradients of the output; weights are the network's). The errors of torchcaps and of `F.conv2d` in float32
are written to `convolution_errors.csv`: the sum of their squares and the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measuring import Part, Plan, Record, in_turns, new_part, ratio, summary, timed
from naive import convolutions_of
from speed_page import FIRST, PRIMARY, PRIMARY_FORWARD, PRIMARY_TURNED
from torch import Tensor
from training_step import new_network

from torchcaps.ops.convolution import convolve

Convolution = Callable[[Tensor, Tensor, Tensor, int], Tensor]

CONTENDERS: dict[str, Convolution] = {
    "torchcaps": lambda features, weight, bias, stride: convolve(features, weight, bias, stride),
    "F.conv2d": F.conv2d,
}
INPUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "random": torch.randn,
    "constant": lambda shape: torch.full(shape, 0.3),
    "one-hot": lambda shape: one_hot(shape),
}
#: Images whose errors are summed, and checked before anything is timed.
ERROR_BATCH, CHECK_BATCH = 32, 8
#: An error that is rounding: of random inputs, relative to the result; of others, to the norms of what is multiplied,
#: for a result may be zero.
LAST_BIT, ROUNDING = torch.finfo(torch.float32).eps, 1e-5


class Case(NamedTuple):
    """A convolution with what goes in, forward and backward."""

    features: Tensor
    weight: Tensor
    bias: Tensor
    stride: int
    grad: Tensor
    """Of the output."""

    @property
    def wanted(self) -> dict[str, Tensor]:
        """What a gradient is asked for."""
        found = {"features": self.features, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}

    @property
    def scales(self) -> dict[str, float]:
        """The product of the norms of what each result is made of."""
        features, weight, grad = (t.detach().norm().item() for t in (self.features, self.weight, self.grad))
        return {
            "output": features * weight,
            "gradient of features": grad * weight,
            "gradient of weight": grad * features,
            "gradient of bias": grad,
        }

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another precision."""
        tensors = (self.features, self.weight, self.bias, self.grad)
        features, weight, bias, grad = (t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors)
        return Case(features, weight, bias, self.stride, grad)

    def as_in_networks(self) -> Case:
        """The same numbers in the order in which torchcaps's networks have them in memory."""

        def placed(tensor: Tensor) -> Tensor:
            return tensor.detach().permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)

        features = placed(self.features).requires_grad_(self.features.requires_grad)
        weight = self.weight.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        return self._replace(features=features, weight=weight, grad=placed(self.grad))


def one_hot(shape: tuple[int, ...]) -> Tensor:
    """A single one in each image, at a place of its own."""
    found = torch.zeros(shape)
    flat = found.view(shape[0], -1)
    flat[torch.arange(shape[0]), torch.randint(flat.shape[1], (shape[0],))] = 1
    return found


def new_cases(plan: Plan, batch: int, inputs: str = "random") -> dict[str, Case]:
    """The two convolutions of the network."""
    torch.manual_seed(0)
    network = new_network(dict(plan.network))
    shape = torch.Size((batch, *network.in_shape))
    cases = {}
    for name, convolution in zip(("first", "primary"), convolutions_of(network), strict=True):
        weight = convolution.weight.detach().clone().requires_grad_()
        assert convolution.bias is not None
        bias, stride = convolution.bias.detach().clone().requires_grad_(), convolution.stride[0]
        features = INPUTS[inputs](tuple(shape)).requires_grad_(name == "primary")
        shape = F.conv2d(torch.empty(shape, device="meta"), weight.to("meta"), bias.to("meta"), stride).shape
        cases[name] = Case(features, weight, bias, stride, INPUTS[inputs](tuple(shape)))
    return cases


def run(contender: Convolution, case: Case) -> dict[str, Tensor]:
    """The output and every gradient that is asked for."""
    output = contender(case.features, case.weight, case.bias, case.stride)
    gradients = torch.autograd.grad(output, tuple(case.wanted.values()), case.grad)
    named = {f"gradient of {name}": each for name, each in zip(case.wanted, gradients, strict=True)}
    return {"output": output.detach()} | named


def forward(contender: Convolution, case: Case) -> None:
    """The output alone; nothing is kept for a backward pass."""
    with torch.no_grad():
        contender(case.features, case.weight, case.bias, case.stride)


def errors(plan: Plan, batch: int) -> list[Record]:
    """How far both are from float64: a line for each convolution, input and result."""
    records: list[Record] = []
    for inputs in INPUTS:
        for name, case in new_cases(plan, batch, inputs).items():
            exact = run(F.conv2d, case.to(torch.float64))
            found = {contender: run(work, case) for contender, work in CONTENDERS.items()}
            for of, wanted in exact.items():
                record: Record = {"convolution": name, "input": inputs, "of": of, "batch": batch}
                for suffix, contender in (("", "torchcaps"), ("_conv2d", "F.conv2d")):
                    error = found[contender][of].double() - wanted
                    record[f"squares{suffix}"] = error.square().sum().item()
                    record[f"largest{suffix}"] = error.abs().max().item()
                records.append(record | {"squares_exact": wanted.square().sum().item(), "scale": case.scales[of]})
    return records


def check(plan: Plan) -> list[str]:
    """What is wrong with torchcaps's results; empty if nothing is.

    Its error may be at most twice that of `F.conv2d`; where that happens to be (nearly) exact, as for a single one
    among zeros, rounding is allowed.
    """
    wrong = []
    for record in errors(plan, min(plan.layer.B, CHECK_BATCH)):
        ours, plain, exact = (record[name] ** 0.5 for name in ("squares", "squares_conv2d", "squares_exact"))
        rounding = LAST_BIT * exact if record["input"] == "random" else ROUNDING * record["scale"]
        if not ours <= max(2 * plain, rounding):
            where = f"{record['convolution']} convolution, {record['input']} input, {record['of']}"
            wrong.append(f"{where}: torchcaps is {ours:.1e} off, F.conv2d {plain:.1e}")
    return wrong


def measure(plan: Plan) -> Part:
    """Times of both, and their errors."""
    part = new_part()
    cases = new_cases(plan, plan.layer.B)
    images, primary = cases["first"], cases["primary"]
    ours, plain = CONTENDERS["torchcaps"], CONTENDERS["F.conv2d"]
    first = _times(
        "first",
        "forward + backward",
        plan,
        part,
        run,
        {"torchcaps": (ours, images.as_in_networks()), "F.conv2d": (plain, images)},
    )
    both = {"F.conv2d": (plain, primary), "torchcaps": (ours, primary.as_in_networks())}
    turned = "torchcaps, PyTorch's memory order"
    full = _times("primary", "forward + backward", plan, part, run, both | {turned: (ours, primary)})
    alone = _times("primary", "forward", plan, part, forward, both)
    part.figures[PRIMARY] = ratio(full["torchcaps"], full["F.conv2d"])
    part.figures[PRIMARY_TURNED] = ratio(full[turned], full["F.conv2d"])
    part.figures[FIRST] = ratio(first["torchcaps"], first["F.conv2d"])
    part.figures[PRIMARY_FORWARD] = ratio(alone["torchcaps"], alone["F.conv2d"])
    part.tables["convolution_errors"] = errors(plan, min(plan.layer.B, ERROR_BATCH))
    return part


def _times(
    name: str,
    what: str,
    plan: Plan,
    part: Part,
    work: Callable[[Convolution, Case], object],
    contenders: dict[str, tuple[Convolution, Case]],
) -> dict[str, list[float]]:
    """Milliseconds of each round of some contenders in turns."""
    works = {contender: timed(partial(work, *given)) for contender, given in contenders.items()}
    times = in_turns(works, plan.rounds, warm_up=1)
    for contender, values in times.items():
        record = {"convolution": name, "pass": what, "batch": plan.layer.B, "contender": contender}
        part.records.append(record | summary(values))
    return times
