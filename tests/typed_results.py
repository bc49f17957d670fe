"""What type checkers know of the results of parts. Mypy checks this file with the source; nothing runs it."""

from typing import assert_type

from torch import Tensor

from torchcaps.nn import (
    BuiltVotes,
    CapsuleHead,
    ConvBackbone,
    ConvCapsules,
    Decoder,
    DenseCapsules,
    DynamicRouting,
    PrimaryCapsules,
)


def results_have_types(x: Tensor) -> None:
    """A call of a module gives the type of its ``forward``, not ``Any``."""
    assert_type(DenseCapsules(6, 4, 3)(x).poses, Tensor)
    assert_type(ConvCapsules(6, 4)(PrimaryCapsules(3)(x)).activations, Tensor | None)
    assert_type(CapsuleHead(3, 4)(x).mask, Tensor | None)
    assert_type(DynamicRouting()(BuiltVotes(x)).coupling, Tensor | None)
    assert_type(ConvBackbone(3)(x), Tensor)
    assert_type(Decoder(3, 4, (1, 28, 28))(x), Tensor)
