"""How PyTorch is running: eagerly, compiled, exported, or under transforms such as ``torch.func``'s.

Every question to a private part of torch stands here, so that a new version of torch changes one file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

LAYOUTS = (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]  # torch's types lack it
"""Layouts of tensors that the library computes with; the second is that of ``torch.utils.mkldnn``."""
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def is_exporting() -> bool:
    """Return True while a model is exported (``torch.export``, ONNX) or traced (``torch.jit.trace``)."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it


def needs_torch_operations() -> bool:
    """Return True if only torch's own operations will do.

    Exported graphs must hold no operation of this library, and forward-mode derivatives and ``torch.func`` need rules
    that its functions with hand-written gradients lack.
    """
    if is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_graph_capture() -> bool:
    """Return True if torch records the operations instead of computing them one by one.

    This holds while a model is compiled or exported, under ``torch.func`` and in forward-mode differentiation.
    """
    return torch.compiler.is_compiling() or needs_torch_operations()


def is_recording_operations() -> bool:
    """Return True while ``torch.compile`` records, or makes the graph of a gradient."""
    return torch.compiler.is_compiling() or bool(torch._C._get_dispatch_mode(_PROXY))


def is_eager() -> bool:
    """Return True in plain eager mode: operations are computed at once, and differentiated backward if at all."""
    return not (is_graph_capture() or torch._C._len_torch_dispatch_stack())


def is_in_autocast() -> bool:
    """Return True inside autocast of any device; much faster than to ask for one device."""
    return bool(torch._C._is_any_autocast_enabled())


def is_float32_on_cpu(*tensors: Tensor | None) -> bool:
    """Return True in plain eager mode without autocast if all tensors are ordinary float32 tensors on the CPU.

    None among the tensors is passed over, as for a layer without a bias.
    """
    return is_eager() and _are_float32_on_cpu(tensors)


def is_compiled_as_one(*tensors: Tensor | None) -> bool:
    """Return True if an operation of this library for float32 tensors on the CPU may be part of a compiled graph.

    Unlike :func:`is_float32_on_cpu` this asks nothing of the tensors' class, since they are stand-ins in the graph.
    """
    return torch.compiler.is_compiling() and not needs_torch_operations() and _are_float32_on_cpu(tensors, typed=False)


def _are_float32_on_cpu(tensors: Sequence[Tensor | None], *, typed: bool = True) -> bool:
    return not torch.is_autocast_enabled("cpu") and all(
        (not typed or type(t) in (Tensor, nn.Parameter))
        and (t.device.type, t.dtype, t.layout) == ("cpu", torch.float32, torch.strided)
        for t in tensors
        if t is not None
    )


def can_look(tensor: Tensor) -> bool:
    """Return True if a tensor has values that can be read at once, without waiting for another device.

    A tensor has none on the ``meta`` device, in a graph that is compiled or exported, and under ``torch.vmap``.
    """
    return is_eager() and tensor.device.type == "cpu" and tensor.numel() > 0 and not is_fake(tensor)


def has_saved_tensor_hooks() -> bool:
    """Return True if tensors that autograd saves now are replaced, as for activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def autograd_in_operation() -> contextlib.AbstractContextManager[Any]:
    """Let autograd record inside an operation of a compiled graph, where torch leaves autograd out."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of a module also runs hooks: its own, or global ones."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or torch.nn.modules.module._has_any_global_hook()
