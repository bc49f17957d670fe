"""Optimizers as parts, chosen by name: ``optimizer="adamw"``.

One's own is ``@register("optimizer", "mine")`` on a class of torch's kind whose constructor takes ``params`` and
``learning_rate``, and options with defaults. The learning rate of each step is written into its parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from torchcaps.parts import register
from torchcaps.ranges import Factor, PositiveFactor, ShareBelowOne

Parameters = Iterable[nn.Parameter]
BETAS = {"torch": (0.9, 0.999), "tensorflow": (torch.tensor(0.9).item(), torch.tensor(0.999).item())}
"""β₁ and β₂ of Adam's moments. TensorFlow keeps them in float32: 1 − β₂ is 1.3e-5 of itself smaller than 0.001."""


def _is_fused(params: list[nn.Parameter]) -> bool:
    """Whether torch makes the whole step in one operation on the device of the parameters."""
    return all(each.device.type in ("cpu", "cuda") for each in params)


@register("optimizer", "adam")
class Adam(torch.optim.Adam):
    """Adam, in PyTorch's form or in TensorFlow's.

    TensorFlow corrects the bias of both moments by a factor on its rate, so that its epsilon is added to a root that is
    not yet corrected: ``rate · √(1 − β₂^t) / (1 − β₁^t) · m / (√v + eps)``. That is PyTorch's step with an epsilon of
    ``eps / √(1 − β₂^t)``.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        adam: Where Adam adds its epsilon to the root of the second moment: after the correction of that moment's bias,
            as in the paper's algorithm and PyTorch, or before it, as in TensorFlow and Keras, where the epsilon of step
            t is 1/√(1 − 0.999^t) times as large: 32 times in the first step, 1.3 times after 1,000.
        adam_eps: Adam's epsilon.

    Source: Kingma, Ba 2015 (arXiv:1412.6980), algorithm 1, and the end of section 2.
    """

    def __init__(
        self,
        params: Parameters,
        learning_rate: float,
        *,
        adam: Literal["torch", "tensorflow"] = "torch",
        adam_eps: PositiveFactor = 1e-8,
    ) -> None:
        params = list(params)
        super().__init__(params, lr=learning_rate, betas=BETAS[adam], eps=adam_eps, fused=_is_fused(params))
        self.adam, self.adam_eps = adam, adam_eps

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step."""
        if self.adam == "tensorflow":
            made = next((float(state["step"]) for state in self.state.values()), 0.0)
            for group in self.param_groups:
                group["eps"] = self.adam_eps / math.sqrt(1 - group["betas"][1] ** (made + 1))
        return super().step(closure)


@register("optimizer", "adamw")
class AdamW(torch.optim.AdamW):
    """Adam with a decay of the weights that does not pass through the moments.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        adam_eps: Adam's epsilon.
        weight_decay: In each step, weights shrink by this times the learning rate.

    Source: Loshchilov, Hutter 2019 (arXiv:1711.05101).
    """

    def __init__(
        self, params: Parameters, learning_rate: float, *, adam_eps: PositiveFactor = 1e-8, weight_decay: Factor = 0.01
    ) -> None:
        params = list(params)
        super().__init__(params, lr=learning_rate, eps=adam_eps, weight_decay=weight_decay, fused=_is_fused(params))


@register("optimizer", "sgd")
class SGD(torch.optim.SGD):
    """Stochastic gradient descent.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        momentum: Share of the last step that is made again.
        weight_decay: Factor of the weights that is added to their gradients.
    """

    def __init__(
        self, params: Parameters, learning_rate: float, *, momentum: ShareBelowOne = 0.9, weight_decay: Factor = 0.0
    ) -> None:
        params = list(params)
        super().__init__(
            params, lr=learning_rate, momentum=momentum, weight_decay=weight_decay, fused=_is_fused(params)
        )
