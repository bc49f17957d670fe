"""Routing alone: torchcaps against its own reference, the naive formulation, and one of one's own. A part of `run.py`.

The one of one's own is dynamic routing as a user would write it, in three lines over weighted sums and agreements.

Outputs and gradients are checked first: against the reference in float64, torchcaps's error may be at most twice that
of the plain formulation in float32, for the batch that is timed (cut to 8) and for one image, which takes another way.

The large layer (forward and backward once more, then timed) runs in processes of its own, one a contender and round,
in turns. Its peak memory is the process's resident high-water mark (VmHWM in /proc/self/status on Linux, ru_maxrss
elsewhere) less what was resident before the tensors were made: weights and gradients are in, Python and torch not.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from measuring import (
    Part,
    Plan,
    Size,
    available_gib,
    in_turns,
    isolated,
    new_part,
    ratio,
    resident,
    summary,
    timed,
)
from naive import naive_routing
from speed_page import LARGE_MEMORY, LARGE_TIME, OWN_ROUTING, ROUTING
from torch import Tensor

from torchcaps import route, squash
from torchcaps.nn import DenseVotes

VOTES_AT_ONCE = 22  # how often the naive formulation holds what is as large as the votes

Routing = Callable[[Tensor, Tensor, bool], Tensor]
Tensors = tuple[Tensor, Tensor, Tensor]


def own_routing(poses: Tensor, weight: Tensor, stop: bool, num_iterations: int = 3) -> Tensor:
    """Dynamic routing in three lines, over votes that are asked and not built."""
    votes = DenseVotes(poses, weight)
    logits = votes.zeros()
    for iteration in range(1, num_iterations + 1):
        coupling = votes.compete(logits)
        capsules = squash(votes.weighted_sum(coupling.detach() if stop else coupling))
        if iteration < num_iterations:
            logits = logits + votes.agreement(capsules)
    return capsules


CONTENDERS: dict[str, Routing] = {
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference").poses,
    "torchcaps": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop).poses,
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
    "own": own_routing,
}


def make(size: Size, dtype: torch.dtype = torch.float32) -> Tensors:
    """Poses, weights (both in the memory order of the library's layers) and a gradient of the capsules."""
    generator = torch.Generator().manual_seed(0)
    poses = torch.randn(size.B, size.K, size.I, generator=generator).mul_(0.2)
    weight = torch.randn(size.J, size.D, size.K, size.I, generator=generator).mul_(0.1)
    grad = torch.randn(size.B, size.J, size.D, generator=generator)
    poses, weight = poses.to(dtype).transpose(1, 2), weight.to(dtype).permute(3, 0, 1, 2)
    return poses.requires_grad_(), weight.requires_grad_(), grad.to(dtype)


def forward(routing: Routing, poses: Tensor, weight: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        routing(poses, weight, False)


def forward_backward(routing: Routing, poses: Tensor, weight: Tensor, grad: Tensor, stop: bool = False) -> None:
    poses.grad = weight.grad = None
    routing(poses, weight, stop).backward(grad)


CASES: dict[str, Callable[..., None]] = {
    "forward": forward,
    "forward + backward, stopped": partial(forward_backward, stop=True),
    "forward + backward, full": forward_backward,
}


def check(plan: Plan) -> list[str]:
    """What is wrong with the contenders' outputs and gradients; empty if nothing is."""
    wrong = []
    for size in (plan.layer._replace(B=min(plan.layer.B, 8)), plan.layer._replace(B=1)):
        for stop in (False, True):
            wrong += [f"routing, {size}, {stop=}: {what}" for what in _check(size, stop)]
    return wrong


def _check(size: Size, stop: bool) -> list[str]:
    wrong = []
    exact = _results("reference", size, torch.float64, stop)
    plain = _results("reference", size, torch.float32, stop)
    ours = _results("torchcaps", size, torch.float32, stop)
    others = {name: _results(name, size, torch.float64, stop) for name in ("naive", "own")}
    for n, name in enumerate(("capsules", "poses' gradient", "weights' gradient")):
        error, plain_error = ((x[n].double() - exact[n]).norm().item() for x in (ours, plain))
        if not error <= 2 * plain_error:
            wrong.append(f"{name}: torchcaps is {error:.2e} off, plain float32 {plain_error:.2e}")
        for other, results in others.items():
            if not torch.allclose(results[n], exact[n], rtol=1e-8, atol=1e-10):
                wrong.append(f"{name}: the contender {other} computes something else")
    return wrong


def _results(contender: str, size: Size, dtype: torch.dtype, stop: bool) -> Tensors:
    poses, weight, grad = make(size, dtype)
    capsules = CONTENDERS[contender](poses, weight, stop)
    grad_poses, grad_weight = torch.autograd.grad(capsules, (poses, weight), grad)
    return capsules.detach(), grad_poses, grad_weight


def measure(plan: Plan) -> Part:
    """Times of MNIST's layer and of the large one."""
    part = new_part()
    tensors = make(plan.layer)
    for case, work in CASES.items():
        contenders = {name: timed(partial(work, routing, *tensors)) for name, routing in CONTENDERS.items()}
        times = in_turns(contenders, plan.rounds, warm_up=1)
        for name, values in times.items():
            part.records.append({"case": case, "contender": name, **plan.layer._asdict(), **summary(values)})
        part.figures[ROUTING[case]] = ratio(times["naive"], times["torchcaps"])
        part.figures[OWN_ROUTING[case]] = ratio(times["own"], times["torchcaps"])
    if plan.large is None:
        part.left_out.update(dict.fromkeys((LARGE_MEMORY, LARGE_TIME), "left out"))
    else:
        _measure_large(plan.large, plan.large_rounds, part)
    return part


def _measure_large(size: Size, rounds: int, part: Part) -> None:
    needed = VOTES_AT_ONCE * 4 * size.B * size.I * size.J * size.D / 2**30
    if available_gib() < needed:
        why = f"left out: less than {needed:.0f} GiB were free"
        print(f"large layer: {why}", file=sys.stderr)
        part.left_out.update(dict.fromkeys((LARGE_MEMORY, LARGE_TIME), why))
        return
    found = in_turns({name: partial(isolated, probe, name, *size) for name in ("torchcaps", "naive")}, rounds)
    times = {name: [time for time, _ in each] for name, each in found.items()}
    peaks = {name: statistics.median(peak for _, peak in each) for name, each in found.items()}
    for name, values in times.items():
        row = {"case": "forward + backward, full", "contender": name, **size._asdict(), **summary(values)}
        part.records.append(row | {"peak_mib": round(peaks[name], 1)})
    part.figures[LARGE_MEMORY] = peaks["torchcaps"] / peaks["naive"]
    part.figures[LARGE_TIME] = ratio(times["torchcaps"], times["naive"])


def probe(contender: str, *size: int) -> tuple[float, float]:
    """Run a layer twice; the milliseconds of the second run, and the peak of both, MiB."""
    before = resident("VmRSS")
    work = partial(forward_backward, CONTENDERS[contender], *make(Size(*size)))
    work()
    elapsed = timed(work)()
    return elapsed, resident("VmHWM") - before
