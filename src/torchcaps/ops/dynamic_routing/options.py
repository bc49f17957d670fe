"""The options of a call of :func:`torchcaps.route` as the fast path takes them, one by one after its tensors."""

from __future__ import annotations

from typing import NamedTuple

#: The fields of ``Options`` as arguments of an operation that is registered with torch.
OPTIONS_SCHEMA = "int num_iterations, bool over_inputs, bool stop_gradient, bool leaky, float eps"


class Options(NamedTuple):
    """What :func:`torchcaps.route` is told beside its tensors, in the order of ``OPTIONS_SCHEMA``."""

    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float

    @property
    def constant_coupling(self) -> bool:
        """No gradient flows through the coupling."""
        return self.stop_gradient or self.num_iterations == 0
