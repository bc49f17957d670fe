"""Three ways to write the squash, side by side. A part of `run.py`.

    as printed    ‖s‖² / (1 + ‖s‖²) · s / ‖s‖             the paper, and tutorials; NaN at zero
    XifengGuo     ‖s‖² / (1 + ‖s‖²) / (‖s‖ + 1e-8) · s    a widely copied repository
    torchcaps     n / (1 + n) · s / √(n + eps),  n = ‖s‖²

Outputs and gradients are compared first, in float64. Timed on as many vectors as a batch has primary capsules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measuring import Part, Plan, Size, in_turns, new_part, ratio, summary, timed
from speed_page import SQUASH
from torch import Tensor

from torchcaps import squash

Squash = Callable[[Tensor], Tensor]
CALLS = 10  # in one measurement: a single one takes a millisecond or two


def as_printed(s: Tensor) -> Tensor:
    norm = torch.norm(s, dim=-1, keepdim=True)
    return norm**2 / (1 + norm**2) * s / norm


def with_added_norm(s: Tensor) -> Tensor:
    norm = torch.norm(s, dim=-1, keepdim=True)
    return norm**2 / (1 + norm**2) / (norm + 1e-8) * s


CONTENDERS: dict[str, Squash] = {"as printed": as_printed, "XifengGuo": with_added_norm, "torchcaps": squash}


def make(size: Size, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Vectors of lengths about one, and a gradient of what becomes of them; (B, I, K) both."""
    generator = torch.Generator().manual_seed(0)
    vectors, grad = (torch.randn(size.B, size.I, size.K, dtype=dtype, generator=generator) for _ in range(2))
    return (vectors * size.K**-0.5).requires_grad_(), grad


def forward(function: Squash, vectors: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        for _call in range(CALLS):
            function(vectors)


def forward_backward(function: Squash, vectors: Tensor, grad: Tensor) -> None:
    for _call in range(CALLS):
        torch.autograd.grad(function(vectors), vectors, grad)


CASES: dict[str, Callable[..., None]] = {"forward": forward, "forward + backward": forward_backward}


def check(plan: Plan) -> list[str]:
    """Where the contenders do not compute the same; empty if they do."""
    vectors, grad = make(plan.layer, torch.float64)
    found = {name: _results(function, vectors, grad) for name, function in CONTENDERS.items()}
    return [
        f"squash, {name}: {what} differ from the printed formula's"
        for name, results in found.items()
        for what, got, wanted in zip(("outputs", "gradients"), results, found["as printed"], strict=True)
        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)
    ]


def _results(function: Squash, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    squashed = function(vectors)
    return squashed.detach(), torch.autograd.grad(squashed, vectors, grad)[0]


def measure(plan: Plan) -> Part:
    """Times of the primary capsules' squash."""
    part = new_part()
    tensors = make(plan.layer)
    for case, work in CASES.items():
        contenders = {name: timed(partial(work, function, *tensors)) for name, function in CONTENDERS.items()}
        times = in_turns(contenders, plan.rounds, warm_up=1)
        for name, values in times.items():
            size = {"B": plan.layer.B, "I": plan.layer.I, "K": plan.layer.K}
            part.records.append({"case": case, "contender": name, "calls": CALLS, **size, **summary(values)})
        for name in ("as printed", "XifengGuo"):
            part.figures[SQUASH[case, name]] = ratio(times[name], times["torchcaps"])
    return part
