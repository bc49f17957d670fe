"""What every routing function asks of its arguments."""

from __future__ import annotations

from torch import Tensor

from torchcaps.errors import shown
from torchcaps.ops.checks import check_flags, check_numbers, check_one_device, check_tensor
from torchcaps.ranges import ITERATIONS, Range


def check_options(caller: str, num_iterations: int, softmax_over: str, eps: float, **flags: bool) -> None:
    """Raise if an option is out of its range, or one of the ``flags`` neither True nor False."""
    check_iterations(caller, num_iterations)
    if not isinstance(softmax_over, str) or softmax_over not in ("outputs", "inputs"):
        raise ValueError(f'{caller}: softmax_over must be "outputs" or "inputs", got {softmax_over!r}')
    check_numbers(caller, eps=eps)
    if not eps > 0:
        raise ValueError(f"{caller}: eps must be positive, got {eps}")
    check_flags(caller, **flags)


def check_iterations(caller: str, num_iterations: int, *, least: int = 0) -> None:
    """Raise unless there are ``least`` to 1,000 iterations."""
    allowed = Range(least, ITERATIONS.most)
    if not isinstance(num_iterations, int) or num_iterations not in allowed:  # True is an int, but in no range
        raise ValueError(f"{caller}: num_iterations must be an integer from {allowed}, got {shown(num_iterations)}")


def check_votes(caller: str, votes: Tensor, *, bias: Tensor | None = None, prior: Tensor | None = None) -> None:
    """Raise if votes (B, I, J, D), bias (J, D) and prior (I, J) do not fit each other."""
    check_tensor(caller, "votes", votes, ("B", "I", "J", "D"))
    _, I, J, D = votes.shape
    _check_extras(caller, I, J, D, bias, prior)
    check_one_device(caller, votes=votes, bias=bias, prior=prior)


def check_active_votes(caller: str, votes: Tensor, activations: Tensor) -> None:
    """Raise if votes (B, I, J, D) and activations (B, I) do not fit each other."""
    check_votes(caller, votes)
    check_tensor(caller, "activations", activations, votes.shape[:2])
    check_one_device(caller, votes=votes, activations=activations)


def check_route(
    caller: str, poses: Tensor, weight: Tensor, bias: Tensor | None = None, prior: Tensor | None = None
) -> None:
    """Raise if poses (B, I, K), weight (I, J, D, K), bias (J, D) and prior (I, J) do not fit each other."""
    check_tensor(caller, "poses", poses, ("B", "I", "K"))
    check_tensor(caller, "weight", weight, ("I", "J", "D", "K"))
    _, I, K = poses.shape
    if weight.shape[0] != I or weight.shape[3] != K:
        raise ValueError(
            f"{caller}: poses {tuple(poses.shape)} = (B, I, K) need a weight of shape ({I}, J, D, {K}), "
            f"got {tuple(weight.shape)}"
        )
    _check_extras(caller, I, weight.shape[1], weight.shape[2], bias, prior)
    check_one_device(caller, poses=poses, weight=weight, bias=bias, prior=prior)


def _check_extras(caller: str, I: int, J: int, D: int, bias: Tensor | None, prior: Tensor | None) -> None:
    if min(I, J, D) == 0:
        raise ValueError(f"{caller}: there must be at least one capsule and component, got I={I}, J={J}, D={D}")
    for name, tensor, shape in (("bias", bias, (J, D)), ("prior", prior, (I, J))):
        if tensor is not None:
            check_tensor(caller, name, tensor, shape)
