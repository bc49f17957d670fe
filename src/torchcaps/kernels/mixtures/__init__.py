"""The kernel of mixtures of Gaussians: EM, its authors' code, variational Bayes and Heinsen's matrix routing.

- :mod:`.fitting`: the two passes over blocks of votes, from top to bottom;
- :mod:`.makers`: the votes of a block from poses and weights, and the gradients of these from the votes' gradient;
- :mod:`.ledger`: the sums that the equations ask for, and the ledger of their gradients.
"""

from __future__ import annotations

from torchcaps.kernels.mixtures.fitting import Options, Results, Tensors, mixture_operation
from torchcaps.kernels.mixtures.ledger import Sums
from torchcaps.kernels.mixtures.makers import VoteFactors

__all__ = ["Options", "Results", "Sums", "Tensors", "VoteFactors", "mixture_operation"]
