"""Operations with a hand-written gradient, and the one place that decides where their kernels run.

An :class:`Operation` has two implementations. Its *kernel* is a forward and a backward pass that never hold all votes.
Its *plain formula* consists of PyTorch's operations. :meth:`Operation.runs_kernel` chooses between them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcaps.kernels.memory import get_working_memory, is_working_memory_set
from torchcaps.machine import MIB
from torchcaps.tracing import has_saved_tensor_hooks, is_recording_operations, needs_torch_operations

TensorsT = TypeVar("TensorsT", bound=tuple)  # type: ignore[type-arg]  # of any length
OptionsT = TypeVar("OptionsT", bound=tuple)  # type: ignore[type-arg]  # of any length
ResultsT = TypeVar("ResultsT", bound=tuple)  # type: ignore[type-arg]  # of any length
Backend = Literal["auto", "reference", "recompute"]
"""Implementation of an operation: the best one, the plain formula, or the kernel."""
SCHEMA_TYPES = {bool: "bool", int: "SymInt", float: "float", str: "str"}
"""Types of options in the schemas of PyTorch."""


class Forward(NamedTuple):
    """Outcome of a kernel's forward pass."""

    results: tuple[Tensor, ...]
    kept: Any = None
    """Objects for the backward pass besides tensors. The backward pass may empty them, and must do without them."""


@dataclass(eq=False)
class Operation(Generic[TensorsT, OptionsT, ResultsT]):
    """A function of tensors and options with a hand-written gradient.

    In a graph of ``torch.compile`` the kernel is one opaque operation, ``torchcaps::name``. Its schema follows from the
    annotations of the three named tuples.
    """

    name: str
    """Name in the namespace ``torchcaps``."""
    tensors: type[TensorsT]
    """Named tuple of the tensors that are differentiated; a tensor with the type ``Tensor | None`` may be absent."""
    options: type[OptionsT]
    """Named tuple of numbers, texts and tuples of them."""
    results: type[ResultsT]
    """Named tuple of the results."""
    _: KW_ONLY
    forward: Callable[[TensorsT, OptionsT, Sequence[bool], bool], Forward]
    """Kernel ``(tensors, options, needs_grad, keep) -> Forward``. ``needs_grad`` marks the tensors that need a
    gradient. With ``keep``, objects may be kept for the backward pass."""
    backward: Callable[[TensorsT, OptionsT, Sequence[Any], Any, Sequence[Any], Sequence[bool]], Sequence[Any]]
    """Kernel ``(tensors, options, results, kept, grads, needs_grad) -> gradients``, one for each tensor. ``results``
    has None for a result not in ``read``; ``kept`` is None if nothing is kept. Gradients that are not in ``needs_grad``
    are ignored."""
    plain: Callable[[TensorsT, OptionsT], ResultsT]
    """The plain formula ``(tensors, options) -> results``. Second derivatives are those of this function."""
    fake: Callable[[TensorsT, OptionsT], ResultsT]
    """Function that returns tensors without numbers, with the shapes and strides of the results."""
    suits: Callable[[TensorsT, OptionsT], bool] = lambda *_: True
    """Function that returns True if the kernel is the better choice on a CPU."""
    plain_bytes: Callable[[TensorsT, OptionsT], int] = lambda *_: 0
    """Function that returns the bytes of votes in the plain formula."""
    read: Callable[[OptionsT], Sequence[int]] = lambda _: ()
    """Function of the options that returns the indices of the results that the backward pass reads."""

    def __post_init__(self) -> None:
        self._register()

    def __call__(self, tensors: TensorsT, options: OptionsT, backend: Backend = "auto") -> ResultsT:
        """Compute the results; see :meth:`runs_kernel` for ``backend``."""
        if not self.runs_kernel(tensors, options, backend):
            return self.plain(tensors, options)
        needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
        if is_recording_operations():
            return self.results(*self._compiled(*tensors, needs_grad, *options)[:-1])
        if not any(needs_grad):
            return self.results(*self.forward(tensors, options, needs_grad, False).results)
        return self.results(*_Eager.apply(self, options, *tensors))

    def runs_kernel(self, tensors: TensorsT, options: OptionsT, backend: Backend = "auto") -> bool:
        """Return True if the kernel runs, False for the plain formula.

        - Exported graphs, ``torch.func`` and forward-mode derivatives take the plain formula.
        - On a CPU the kernel runs if it suits the sizes.
        - On other devices the plain formula is faster. It takes more memory, so the kernel runs if the votes exceed a
          working memory that was set by hand.
        - ``backend="recompute"`` takes the kernel wherever it can run, ``backend="reference"`` the plain formula.
        """
        if backend == "reference" or needs_torch_operations():
            return False
        device = next(tensor for tensor in tensors if tensor is not None).device
        if backend == "recompute":
            return True
        if device.type == "cpu":
            return self.suits(tensors, options)
        return is_working_memory_set() and self.plain_bytes(tensors, options) > get_working_memory(device) * MIB

    def _plain_gradients(
        self, tensors: Sequence[Any], options: OptionsT, grads: Sequence[Tensor | None], needs_grad: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return gradients that can be differentiated again."""
        # Aliases limit the gradients to this call, because one tensor may be computed from another.
        leaves: list[Any] = [
            each.view_as(each) if want else each for each, want in zip(tensors, needs_grad, strict=True)
        ]
        results = self.plain(self.tensors(*leaves), options)
        inputs = [each for each, want in zip(leaves, needs_grad, strict=True) if want]
        gradients = iter(differentiate(results, grads, inputs, create_graph=True))
        return [next(gradients) if want else None for want in needs_grad]

    # ---- one operation of compiled graphs

    def _register(self) -> None:
        """Register the kernel's two passes with PyTorch."""
        hints = (typing.get_type_hints(each) for each in (self.tensors, self.options, self.results))
        tensors, options, results = ([f"{_schema_type(hint)} {key}" for key, hint in each.items()] for each in hints)
        grads = [f"Tensor? grad_{key}" for key in self.results._fields]  # type: ignore[attr-defined]  # a named tuple
        read = [f"Tensor? result_{key}" for key in self.results._fields]  # type: ignore[attr-defined]
        self._num_tensors, self._num_results = len(tensors), len(results)
        forward = [*tensors, "bool[] needs_grad", *options]
        backward = [*grads, *tensors, *read, "Tensor token", "bool[] needs_grad", *options]
        self._compiled = _registered(self.name, forward, len(results) + 1, self._compiled_forward, self._forward_fake)
        self._compiled_backward = _registered(
            f"{self.name}_backward", backward, len(tensors), self._run_backward, self._backward_fake
        )
        self._compiled.register_autograd(self._gradients, setup_context=self._save)
        self._compiled_backward.register_autograd(self._refuse_second_derivatives)

    def _compiled_forward(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the results with the promised strides, and a tensor that carries the kept objects."""
        tensors, needs_grad, options = self._split(args)
        results, kept = self.forward(tensors, options, needs_grad, any(needs_grad))
        on_meta: Any = (None if each is None else _on_meta(each) for each in tensors)
        promised = self.fake(self.tensors(*on_meta), options)
        token = results[0].new_zeros(1)
        token.kept = kept  # type: ignore[attr-defined]  # the graph hands the same object to the backward pass
        return *map(_with_strides, results, promised), token

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, _, options = self._split(args)
        results = self.fake(tensors, options)
        return *results, results[0].new_empty(1)

    def _run_backward(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the gradients with the strides of their tensors; an empty tensor for one not in ``needs_grad``."""
        r, grads = self._num_results, args[: self._num_results]
        tensors, rest = self.tensors(*args[r : r + self._num_tensors]), args[r + self._num_tensors :]
        results, token, needs_grad, options = rest[:r], rest[r], rest[r + 1], self.options(*rest[r + 2 :])
        kept = getattr(token, "kept", None)
        gradients = self.backward(tensors, options, results, kept, grads, needs_grad)
        return tuple(
            _with_strides(gradient, torch.empty_like(_on_meta(tensor))) if want else token.new_empty(0)
            for gradient, tensor, want in zip(gradients, tensors, needs_grad, strict=True)
        )

    def _backward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        r, n = self._num_results, self._num_tensors
        tensors, token, needs_grad = args[r : r + n], args[2 * r + n], args[2 * r + n + 1]
        return tuple(
            torch.empty_like(tensor) if want else token.new_empty(0)
            for tensor, want in zip(tensors, needs_grad, strict=True)
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, _, options = self._split(inputs)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(*tensors, *self._read(options, output[:-1]), output[-1])

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> Any:
        needs_grad = list(ctx.needs_input_grad[: self._num_tensors])
        gradients = self._compiled_backward(*grads[:-1], *ctx.saved_tensors, needs_grad, *ctx.options)
        return *(g if want else None for g, want in zip(gradients, needs_grad, strict=True)), *[None] * (
            1 + len(ctx.options)
        )

    def _refuse_second_derivatives(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"{self.name}: a compiled graph has first derivatives only; call the layer without torch.compile"
        )

    def _split(self, args: Sequence[Any]) -> tuple[TensorsT, Sequence[bool], OptionsT]:
        n = self._num_tensors
        return self.tensors(*args[:n]), args[n], self.options(*args[n + 1 :])

    def _read(self, options: OptionsT, results: Sequence[Tensor]) -> list[Tensor | None]:
        indices = self.read(options)
        return [result if n in indices else None for n, result in enumerate(results)]


class _Eager(torch.autograd.Function):
    """The kernel in eager code."""

    @staticmethod
    def forward(ctx: Any, operation: Operation[Any, Any, Any], options: Any, *tensors: Any) -> Any:
        needs_grad = ctx.needs_input_grad[2:]
        # hooks replace saved tensors to save memory, as activation checkpointing does; kept objects would undo that
        results, kept = operation.forward(
            operation.tensors(*tensors), options, needs_grad, not has_saved_tensor_hooks()
        )
        ctx.operation, ctx.options, ctx.kept = operation, options, kept
        ctx.set_materialize_grads(False)
        saved = (*tensors, *operation._read(options, results))
        ctx.is_saved = [tensor is not None for tensor in saved]
        ctx.save_for_backward(*(tensor for tensor in saved if tensor is not None))  # torchviz draws each of them
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        operation, options, needs_grad = ctx.operation, ctx.options, ctx.needs_input_grad[2:]
        if all(grad is None for grad in grads):  # undefined gradients, which stand for zeros
            return (None,) * (2 + len(needs_grad))
        present = iter(ctx.saved_tensors)  # read once, because each reading may compute them again
        saved = [next(present) if is_saved else None for is_saved in ctx.is_saved]
        tensors, results = saved[: len(needs_grad)], saved[len(needs_grad) :]
        if torch.is_grad_enabled():  # the gradients are differentiated again
            return None, None, *operation._plain_gradients(tensors, options, grads, needs_grad)
        gradients = operation.backward(operation.tensors(*tensors), options, results, ctx.kept, grads, needs_grad)
        return None, None, *(g if want else None for g, want in zip(gradients, needs_grad, strict=True))


def differentiate(
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of inputs; zeros for an input without influence on the results.

    They are the gradients of one number, Σ result · grad: ``torch.autograd.grad`` with gradients of the results imports
    SymPy, which takes 35 MiB and 0.4 s.
    """
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    with torch.enable_grad():
        products = [(result * grad).sum() for result, grad in pairs if result.requires_grad]
    if not products:
        return tuple(torch.zeros_like(each) for each in inputs)
    with torch.enable_grad():
        number = torch.stack(products).sum()
    return torch.autograd.grad(number, inputs, create_graph=create_graph, allow_unused=True, materialize_grads=True)


def gradient_rule(rule: type) -> Callable[..., Any]:
    """Return the function of a class with static methods ``forward`` and ``backward``, for use inside a kernel.

    The methods are those of :class:`torch.autograd.Function`; the function has first derivatives only.
    """
    function: Any = type(rule.__name__, (rule, torch.autograd.Function), {})
    apply: Callable[..., Any] = function.apply
    return apply


def _schema_type(hint: Any) -> str:
    """Return the type of an annotation in a schema."""
    if hint in SCHEMA_TYPES:
        return SCHEMA_TYPES[hint]
    if typing.get_origin(hint) is tuple:
        return f"{SCHEMA_TYPES[typing.get_args(hint)[0]]}[]"
    return "Tensor?" if types.NoneType in typing.get_args(hint) else "Tensor"


def _registered(name: str, arguments: list[str], results: int, function: Any, fake: Any) -> Any:
    schema = f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"
    operation = torch.library.custom_op(f"torchcaps::{name}", function, mutates_args=(), schema=schema)
    operation.register_fake(fake)
    return operation


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _with_strides(tensor: Tensor, promised: Tensor) -> Tensor:
    """Return the tensor, or a copy in the memory order that the compiler was told."""
    if tensor.stride() == promised.stride() or tensor.numel() == 0:
        return tensor
    return torch.empty_strided(promised.shape, promised.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )
