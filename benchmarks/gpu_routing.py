"""Routing alone on a GPU: without votes, against the naive formulation; `gpu.py` runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from machine import WARM_UP, Machine, Row
from measuring import Size
from naive import naive_routing
from routing import make
from torch import Tensor

from torchcaps import route

ODD = Size(B=5, I=63, J=7, D=5, K=3)
CASES = ("forward", "forward + backward, stopped", "forward + backward, full")

Step = Callable[[], tuple[Tensor, ...]]
Routing = Callable[[Tensor, Tensor, bool], Tensor]

ROUTINGS: dict[str, Routing] = {
    "recompute": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="recompute").poses,
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference").poses,
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
}


def inputs(machine: Machine, size: Size, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Poses, weights and a gradient of the capsules, on the device."""
    poses, weight, grad = make(size, dtype)
    poses, weight = (tensor.detach().to(machine.device).requires_grad_() for tensor in (poses, weight))
    return poses, weight, grad.to(machine.device)


def step_of(routing: Routing, case: str, tensors: tuple[Tensor, Tensor, Tensor]) -> Step:
    """A pass of a case: capsules, and with a backward pass the gradients of poses and weights."""
    poses, weight, grad = tensors

    def step() -> tuple[Tensor, ...]:
        if case == "forward":
            with torch.no_grad():
                return (routing(poses, weight, False),)
        capsules = routing(poses, weight, case.endswith("stopped"))
        return (capsules.detach(), *torch.autograd.grad(capsules, (poses, weight), grad))

    return step


def check(machine: Machine, size: Size) -> list[str]:
    """What is wrong with the results of recompute; empty if nothing is."""
    wrong = []
    for checked, case in itertools.product((ODD, size), CASES[1:]):
        exact = step_of(ROUTINGS["reference"], case, inputs(machine, checked, torch.float64))()
        plain = step_of(ROUTINGS["reference"], case, inputs(machine, checked))()
        step = step_of(ROUTINGS["recompute"], case, inputs(machine, checked))
        ours, again = step(), step()
        for n, name in enumerate(("capsules", "poses' gradient", "weights' gradient")):
            error, plain_error = (((x[n] - exact[n]).norm() / exact[n].norm()).item() for x in (ours, plain))
            # where plain float32 happens to be all but exact, its last bit is allowed
            if not error <= 2 * max(plain_error, torch.finfo(torch.float32).eps):
                wrong.append(f"{checked}, {case}: {name} is {error:.2e} off, plain float32 {plain_error:.2e}")
        if not all(map(torch.equal, ours, again)):
            wrong.append(f"{checked}, {case}: two runs differ")
    return wrong


def time_all(machine: Machine, size: Size, rounds: int) -> list[Row]:
    """Every contender in every case, in turns."""
    tensors = inputs(machine, size)
    steps: list[tuple[Row, Step]] = []
    for case, (contender, routing) in itertools.product(CASES, ROUTINGS.items()):
        step = step_of(routing, case, tensors)
        for _ in range(WARM_UP):
            step()
        row = Row(case, contender, size.B, [], machine.peak_mib(step))
        steps.append((row, step))
    for _ in range(rounds):
        for row, step in steps:
            row.times_us.append(machine.time_us(step))
    return [row for row, _ in steps]


def print_kernels(machine: Machine, size: Size) -> None:
    """Device time of every kernel in a full forward and backward pass."""
    machine.profile(step_of(ROUTINGS["recompute"], CASES[2], inputs(machine, size)), "a full pass of routing")
