"""EM and variational Bayes as published PyTorch code commonly writes them: the yardstick, not a part of the library.

All votes of a batch are built, squares and weighted sums are elementwise products and sums over them, and all of it is
left to autograd. Nothing here uses the library's ledger; of it come only the layers, their parameters and their votes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.nn import CapsuleLayer, EMRouting, Routed, Routing, VBRouting, Votes

LOG_2_PI = math.log(2 * math.pi)


class NaiveMixture(Routing):
    """The plain formulation of an EM or VB routing, with the parameters of that routing."""

    def __init__(self, routing: EMRouting | VBRouting) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        assert activations is not None
        assert not return_coupling
        fit: Any = _em if isinstance(self.routing, EMRouting) else _vb
        return Routed(*self.routing.finish(*fit(self.routing, votes, votes.build(), activations.unsqueeze(2))))


def naive_network(network: nn.Module) -> nn.Module:
    """A copy of a network, or of a layer, whose mixtures are fitted plainly."""
    plain = copy.deepcopy(network)
    for layer in plain.modules():
        if isinstance(layer, CapsuleLayer) and isinstance(layer.routing, (EMRouting, VBRouting)):
            layer.routing = NaiveMixture(layer.routing)
    return plain


def _em(routing: EMRouting, votes: Votes, V: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    _, I, J, D = V.shape
    scale = 100 * J / I if routing.cost_scale is None else routing.cost_scale
    log_coupling = votes.log_compete(torch.zeros_like(V[..., 0]))
    for t in range(routing.num_iterations):
        shares = log_coupling.exp() * a  # (B, I, J)
        mass = shares.sum(1)
        shares = shares / mass.unsqueeze(1).clamp_min(1e-30)
        means = (shares.unsqueeze(3) * V).sum(1)
        squares = (V - means.unsqueeze(1)) ** 2
        variances = (shares.unsqueeze(3) * squares).sum(1) + 1e-9
        spread = variances.log().sum(2)
        threshold = routing.beta_a / routing.final_lambda
        costs = mass * (D * routing.beta_u + spread / 2)
        logits = routing.final_lambda * (1 - 0.95 ** (t + 1)) * (threshold - scale * costs)
        if t < routing.num_iterations - 1:
            far = (squares / variances.unsqueeze(1)).sum(3) + (spread + D * LOG_2_PI).unsqueeze(1)
            log_coupling = votes.log_compete(F.logsigmoid(logits).unsqueeze(1) - far / 2)
    return means, logits


def _vb(routing: VBRouting, votes: Votes, V: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    D = V.shape[3]
    steps = torch.arange(D, dtype=V.dtype, device=V.device)
    log_coupling = torch.full_like(V[..., 0], -math.log(V.shape[2]))  # on maps too
    for t in range(routing.num_iterations):
        shares = log_coupling.exp() * a  # (B, I, J)
        mass = shares.sum(1)  # (B, J)
        R = mass.unsqueeze(2)
        means = (shares.unsqueeze(3) * V).sum(1) / R.clamp_min(1e-30)
        scatter = (shares.unsqueeze(3) * (V - means.unsqueeze(1)) ** 2).sum(1)
        centres = R / (1 + R) * means
        inverse_scale = 1 + scatter + centres * means
        degrees = D + 1 + mass
        half = torch.digamma((degrees.unsqueeze(2) - steps) / 2).sum(2)
        log_precision = half + D * math.log(2) - inverse_scale.log().sum(2)
        log_share = torch.digamma(1 + mass) - torch.digamma((1 + mass).sum(1, keepdim=True))
        entropy = (D * (LOG_2_PI + 1) - log_precision) / 2
        logits = routing.beta_a - (log_share.exp() * entropy + routing.beta_u)
        if t < routing.num_iterations - 1:
            far = ((V - centres.unsqueeze(1)) ** 2 / inverse_scale.unsqueeze(1)).sum(3)
            known = log_share + (log_precision - D * LOG_2_PI - D / (1 + mass)) / 2
            log_coupling = votes.log_compete(known.unsqueeze(1) - degrees.unsqueeze(1) * far / 2)
    return centres, logits
