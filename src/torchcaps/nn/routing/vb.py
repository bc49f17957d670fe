"""Variational Bayes routing: EM routing with priors on the Gaussians, which prevent their collapse."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.nn.capsules import LayerSize, Routed
from torchcaps.nn.convolutions import normalise
from torchcaps.nn.routing.mixture import Gaussians, MixtureInputs, MixtureRouting, equations, route_mixture
from torchcaps.nn.votes import Votes
from torchcaps.ops.mixtures import LOG_2_PI
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration
from torchcaps.tracing import is_exporting


@checked
def vb_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: AtLeastOneIteration = 3,
    *,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """Variational Bayes routing: Gaussians with a Dirichlet and a Gaussian–Wishart prior, fitted to the votes V_ij.

    The priors are α₀ = 1, m₀ = 0, κ₀ = 1, Ψ₀ = identity, ν₀ = D + 1; ψ is the digamma function.

        c_ij ← 1/J
        repeat num_iterations times:
            R_j = Σ_i c_ij a_i,   α_j = 1 + R_j,   κ_j = 1 + R_j,   ν_j = D + 1 + R_j
            μ_j = Σ_i c_ij a_i V_ij / R_j,   m_j = R_j μ_j / κ_j
            p_jh = 1 + Σ_i c_ij a_i (V_ijh - μ_jh)² + (R_j / κ_j) μ_jh²                 (the inverse of Ψ_j)
            ln|Λ_j| = Σ_{d=0}^{D-1} ψ((ν_j - d) / 2) + D ln 2 - Σ_h ln p_jh,   ln π_j = ψ(α_j) - ψ(Σ_j α_j)
            ln q_ij = ½ ln|Λ_j| - ½ D ln 2π - ½ (D / κ_j + ν_j Σ_h (V_ijh - m_jh)² / p_jh)
            c_ij ← softmax_j(ln π_j + ln q_ij)                                          (not after the last iteration)
        pose_j = m_j
        l_j    = β_a,j - (exp(ln π_j) H_j + β_u,j),   H_j = ½ D ln(2πe) - ½ ln|Λ_j|

    The coupling is normalised in logarithms. The released code floors the sum of densities at 1e-11 instead, but with
    D = 16 the sums of many capsules are smaller. The votes are processed some images at a time, within
    :func:`torchcaps.set_working_memory`.

    Args:
        votes: Votes V_ij of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        activations: Activations a_i of the input capsules, at least 0. An input capsule with 0 has no influence.
        beta_u: Cost of an active output capsule, learned.
        beta_a: Threshold of the activation, learned.
        num_iterations: Number of fits of the Gaussians, 1 to 1,000.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij of the last fit, without the factor a_i.

    Returns:
        Poses m_j, and as activations the *logits* l_j, to which a layer applies batch normalisation and a sigmoid. Both
        are in the dtype of ``votes`` (half precision is computed in float32). Also c_ij if requested.

    Source: De Sousa Ribeiro, Leontidis, Kollias 2020, "Capsule routing via variational Bayes", algorithm 1
    (arXiv:1905.11455).
    """
    return route_mixture(
        "vb",
        num_iterations,
        (),
        (beta_u, beta_a),
        votes,
        activations,
        mask=mask,
        return_coupling=return_coupling,
        finish=lambda poses, logits: (poses, logits),
    )


@equations("vb")
def fit(
    inputs: MixtureInputs, beta_u: Float[Tensor, "J"], beta_a: Float[Tensor, "J"], num_iterations: int
) -> Gaussians:
    """Compute the equations of :func:`vb_routing`."""
    votes, log_posterior = inputs.votes, None
    _, J, D, _ = votes.shape
    log_coupling = inputs.uniform()  # even on maps
    components = torch.arange(D, dtype=inputs.activations.dtype, device=inputs.activations.device)
    for iteration in range(1, num_iterations + 1):
        shares, mass = votes.share_out(log_coupling, inputs.activations)  # (B, J, I)
        mass = mass.expand(-1, J)  # (B, J)
        R = mass.unsqueeze(2)  # (B, J, 1)
        means, scatter = votes.moments(shares)  # (B, J, D)
        priors = 1 + mass  # α_j and κ_j
        centres = R / priors.unsqueeze(2) * means
        inverse_scale = torch.addcmul(1 + R * scatter, centres, means)
        degrees = (D + priors).unsqueeze(2)  # (B, J, 1)
        # ln|Λ_j| without its constant D ln 2
        log_precision = digamma((degrees - components) / 2).sum(2) - inverse_scale.log().sum(2)
        log_share = digamma(priors) - digamma(priors.sum(1, keepdim=True))
        is_last = iteration == num_iterations
        if is_last or inputs.rounds is not None:
            entropy = (D * (LOG_2_PI + 1 - math.log(2)) - log_precision) / 2
            logits = beta_a - (log_share.exp() * entropy + beta_u)
        if is_last and inputs.rounds is None:
            break
        constant = log_share - D * (LOG_2_PI - math.log(2)) / 2  # (B, J)
        constant = torch.add(constant, torch.sub(log_precision, priors.reciprocal(), alpha=D), alpha=0.5)
        precision, logits_before = degrees / inverse_scale, log_posterior
        log_posterior = votes.log_densities(constant, precision, centres)  # (B, J, I)
        if inputs.rounds is not None:
            inputs.note(logits_before, log_coupling, means, centres, log_posterior, log_share, logits)
        log_coupling = inputs.log_compete(log_posterior)
    return centres, logits, log_coupling


def digamma(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the digamma function of numbers of at least one. Exported graphs use only operations that ONNX has.

    They use ψ(x) = ψ(x + 6) - Σ_{k<6} 1 / (x + k), with Stirling's series for ψ(x + 6); its error is below 1e-9.
    """
    if not is_exporting():
        return torch.digamma(x)
    y = x + 6
    square = 1 / y.square()
    series = y.log() - 1 / (2 * y) - square * (1 / 12 - square * (1 / 120 - square / 252))
    return series - sum(1 / (x + k) for k in range(6))


@register("routing", "vb")
class VBRouting(MixtureRouting):
    """Variational Bayes routing: :func:`torchcaps.vb_routing`; β_u and β_a are initially zero.

    The logits of the activations and the poses are normalised over the batch, without scale and shift, as in the
    source. A training batch of one image uses the running statistics.
    """

    equations = "vb"
    by_row = False

    def bind(self, size: LayerSize) -> None:
        super().bind(size)
        self.pose_norm = nn.BatchNorm1d(size.out_capsules, affine=False).train(self.training)
        self.activation_norm = nn.BatchNorm1d(size.out_capsules, affine=False).train(self.training)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; the value of the source, where 4×4 matrices have an initial variance of about 1/(16·I).

        The prior has variance one. Votes with a smaller variance have an initial coupling near uniform, and the
        normalisation scales poses of any length to variance one. Three layers with votes of variance one learn nothing
        in the first hundred steps.
        """
        return 1 / (2 * math.sqrt(max(size.in_capsules, 1) * size.out_dim))

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        return batch_normalised(poses, self.pose_norm), batch_normalised(logits, self.activation_norm).sigmoid()


def batch_normalised(x: Float[Tensor, "B J *D"], norm: nn.BatchNorm1d) -> Float[Tensor, "B J *D"]:
    """Apply batch normalisation. A single row uses the running statistics, because it has no variance."""
    if norm.training and x.shape[0] > 1:
        return normalise(norm, x)
    mean, variance = (each.to(x.dtype) for each in (norm.running_mean, norm.running_var) if each is not None)
    return F.batch_norm(x, mean, variance, eps=norm.eps)
