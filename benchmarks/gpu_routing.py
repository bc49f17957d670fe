"""Routing alone on a GPU: the fused kernels against the naive formulation; `gpu.py` runs it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from machine import Machine, Row
from measuring import Size
from naive import naive_routing
from routing import make
from torch import Tensor

from torchcaps import route
from torchcaps.ops.dynamic_routing import triton as backend
from torchcaps.training.capture import WARM_UP

ODD = Size(B=5, I=63, J=7, D=5, K=3)
CASES = ("forward", "forward + backward, stopped", "forward + backward, full")

Step = Callable[[], tuple[Tensor, ...]]
Routing = Callable[[Tensor, Tensor, bool], Tensor]

ROUTINGS: dict[str, Routing] = {
    "triton": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="triton"),
    "recompute": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="recompute"),
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference"),
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
}


def fast(machine: Machine) -> str:
    """The contender that is captured, too: the kernels, or in a dry run without Triton's interpreter recompute."""
    return "triton" if not machine.dry or backend.is_available() else "recompute"


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


def captured(machine: Machine, step: Step) -> Step:
    """The same pass, recorded and replayed."""
    results: list[Tensor] = []

    def work() -> None:
        results[:] = step()

    capture = machine.new_capture()
    for _ in range(WARM_UP):  # compiles the kernels, which cannot be done while recording
        capture.run(work)
    replay = capture.record(work)

    def again() -> tuple[Tensor, ...]:
        replay()
        return tuple(results)

    return again


def check(machine: Machine, size: Size) -> list[str]:
    """What is wrong with the kernels' results; empty if nothing is."""
    wrong = []
    ours_is = ROUTINGS[fast(machine)]
    for checked, case in itertools.product((ODD, size), CASES[1:]):
        exact = step_of(ROUTINGS["reference"], case, inputs(machine, checked, torch.float64))()
        plain = step_of(ROUTINGS["reference"], case, inputs(machine, checked))()
        step = step_of(ours_is, case, inputs(machine, checked))
        ours, again = step(), step()
        for n, name in enumerate(("capsules", "poses' gradient", "weights' gradient")):
            error, plain_error = (((x[n] - exact[n]).norm() / exact[n].norm()).item() for x in (ours, plain))
            # where plain float32 happens to be all but exact, its last bit is allowed
            if not error <= 2 * max(plain_error, torch.finfo(torch.float32).eps):
                wrong.append(f"{checked}, {case}: {name} is {error:.2e} off, plain float32 {plain_error:.2e}")
        if not all(map(torch.equal, ours, again)):
            wrong.append(f"{checked}, {case}: two runs differ")
        if not all(map(torch.equal, ours, captured(machine, step)())):
            wrong.append(f"{checked}, {case}: a captured run differs")
    return wrong


def time_all(machine: Machine, size: Size, rounds: int) -> list[Row]:
    """Every contender in every case, in turns."""
    tensors = inputs(machine, size)
    steps: list[tuple[Row, Step]] = []
    routings = {name: routing for name, routing in ROUTINGS.items() if name != "triton" or fast(machine) == name}
    for case, (contender, routing) in itertools.product(CASES, routings.items()):
        step = step_of(routing, case, tensors)
        for _ in range(WARM_UP):
            step()
        row = Row(case, contender, size.B, [], machine.peak_mib(step))
        steps.append((row, step))
        if contender == fast(machine):
            steps.append((row._replace(contender="captured", times_us=[]), captured(machine, step)))
    for _ in range(rounds):
        for row, step in steps:
            row.times_us.append(machine.time_us(step))
    return [row for row, _ in steps]


def print_kernels(machine: Machine, size: Size) -> None:
    """Device time of every kernel in a full forward and backward pass."""
    machine.profile(step_of(ROUTINGS[fast(machine)], CASES[2], inputs(machine, size)), "a full pass of routing")


def tune(machine: Machine, size: Size, rounds: int) -> None:
    """Time the full pass, captured, with other sizes of the kernels' programs than those the backend chooses."""
    tensors = inputs(machine, size)
    chosen = backend._choose_blocks(size.B, size.I, size.D, size.K)
    choose, programs = backend._choose_blocks, backend.PROGRAMS
    found = []
    try:
        for changes in (
            *({"warps": n} for n in (2, 4, 8)),
            *({"images": n} for n in (1, 2, 4, 8)),
            *({"warps_of_sum": n} for n in (2, 4, 8, 16)),
            *({"images_of_sum": n} for n in (1, 2, 4, 8)),
            *({"components": n} for n in (2, 4, 8, 16) if size.D % n == 0),
            *({"PROGRAMS": n} for n in (128, 256, 384, 512, 1024)),
        ):
            blocks = chosen._replace(**{name: n for name, n in changes.items() if name != "PROGRAMS"})
            backend._choose_blocks = lambda *_, blocks=blocks: blocks
            backend.PROGRAMS = changes.get("PROGRAMS", programs)
            step = captured(machine, step_of(ROUTINGS[fast(machine)], CASES[2], tensors))
            step()
            found.append((statistics.median(machine.time_us(step) for _ in range(rounds)), changes))
    finally:
        backend._choose_blocks, backend.PROGRAMS = choose, programs
    print(f"\nfull pass, captured, with one thing changed in {chosen}, PROGRAMS={programs}:")
    for time_us, changes in sorted(found, key=lambda pair: pair[0]):
        print(f"{time_us:>10.1f} µs  {changes}")
