"""``diagnose``: find known mistakes in a capsule layer or network of any origin.

Most mistakes show in the behaviour: the module is called again with one image changed, with zeros, or twice with the
same input. The axis of a softmax is found by recording the operations that torch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.testing.measures import change
from torchcaps.testing.mistakes import LOOKS, MAX_ROUNDING, Severity
from torchcaps.testing.patient import Patient


@dataclass(frozen=True)
class Finding:
    """A mistake or a possible mistake."""

    name: str
    """Name of the mistake, such as ``"mixes-images"``."""
    severity: Severity
    """``"error"``: contradicts every paper; ``"warning"``: rarely intended; ``"note"``: a choice to be aware of."""
    evidence: str
    """Evidence, in numbers."""
    cause: str
    """Usual cause."""
    cure: str
    """Usual remedy."""


@checked
def diagnose(module: nn.Module, shape: Sequence[int], *, mask: Bool[Tensor, "B I"] | None = None) -> list[Finding]:
    """Find known mistakes in a capsule layer or network of any origin, in a few seconds.

    - ``softmax-over-inputs``, a note: the softmax of the logits runs over the input capsules.
    - ``softmax-over-nothing``, an error: the softmax runs over an axis of size one, so all coupling is one.
    - ``mixes-images``, an error: the result of an image depends on the other images of the batch.
    - ``keeps-state``, an error: a result depends on earlier calls.
    - ``random-in-evaluation``, a warning: two calls with the same input give different results.
    - ``nan-at-zero``, an error: the result, or a gradient, is not finite for zeros.
    - ``squash-over-other-axis``, a warning: it bounds single components, or one of all capsules together.
    - ``no-routing``, a warning: the coupling is uniform, or output capsules are a fixed weighted sum of the inputs.
    - ``agreement-not-summed``, an error: logits differ by component, or are a softmax of logits plus agreement.
    - ``no-gradient``, an error: the input or a parameter changes the result but gets no gradient.
    - ``padding-changes-result``, an error: masked capsules, or their number, change the result.
    - ``dead-capsules``, a warning: an output capsule is the same for all inputs, or the same as another one.

    A copy of the module is called, in evaluation mode, in float32 or float64; nothing is trained. An empty list is no
    proof. The axis of the softmax cannot be identified if I = J, ``no-routing`` needs D of at least 3 or a softmax, and
    only torch's own softmax is recorded.

    Args:
        module: Maps poses (B, I, K) to (B, J, D), or images (B, C, H, W) to (B, J) or (B, J, D). It returns a tensor,
            or a tuple, mapping or object whose first tensor has this shape; additional axes of size one are dropped.
        shape: Shape of the input, (B, I, K) or (B, C, H, W), with B at least 2. More is found if all sizes differ.
        mask: True for input capsules that are present; needed for ``padding-changes-result``. The module is called as
            ``module(poses, mask)``, and layers of torchcaps with :class:`torchcaps.nn.Capsules`.

    Returns:
        Findings in the order of this list; empty if there are none.

    Raises:
        InputError: The shape is wrong, the module raises an error, or it does not return such a tensor.

    Examples:
        >>> from torchcaps.nn import DenseCapsules
        >>> from torchcaps.testing import diagnose
        >>> diagnose(DenseCapsules(12, 8, 5, 16), (4, 12, 8))
        []
    """
    with torch.no_grad():
        patient = Patient(module, shape, mask)
        # random numbers from another source than torch would look like other mistakes
        repeats = change(patient.call(patient.poses), patient.result) <= MAX_ROUNDING
        names = LOOKS if repeats else ("random-in-evaluation",)
        evidence = {name: next(LOOKS[name].see(patient), None) for name in names}
    looks = ((name, words, LOOKS[name]) for name, words in evidence.items() if words is not None)
    return [Finding(name, look.severity, words, look.cause, look.cure) for name, words, look in looks]
