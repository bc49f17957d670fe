"""The routing algorithms again, for one image, in NumPy, as their papers index them.

Votes V (I, J, D) of one image, activations a (I).
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, expit, logsumexp

Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))


def log_density(V: Array, mean: Array, variance: Array) -> Array:
    return -0.5 * (np.log(2 * math.pi * variance) + (V - mean) ** 2 / variance).sum(2)


def weighted(shares: Array, numbers: Array) -> Array:
    """Σ_i shares_ij · numbers_ijd."""
    return np.einsum("ij,ijd->jd", shares, numbers)


def dynamic(
    V: Array, iterations: int, over: str, bias: Array, prior: Array, leaky: bool, eps: float
) -> tuple[Array, Array]:
    b, c, v = prior.copy(), np.ones(V.shape[:2]), V.sum(0) + bias  # of no iteration at all
    for _ in range(iterations):
        axis = 1 if over == "outputs" else 0
        c = np.exp(b) / (np.exp(b).sum(axis, keepdims=True) + leaky)
        s = weighted(c, V) + bias
        n = (s**2).sum(1, keepdims=True)
        v = n / (1 + n) * s / np.sqrt(n + eps)
        b += np.einsum("ijd,jd->ij", V, v)
    return v, c


def self_attention(V: Array, bias: Array) -> tuple[Array, Array]:
    c = softmax(np.einsum("ijd,kjd->ij", V, V) / math.sqrt(V.shape[2])) + bias
    s = weighted(c, V)
    n = np.linalg.norm(s, axis=1, keepdims=True)
    return (1 - np.exp(-n)) * s / n, c


def inverted_attention(V: Array, iterations: int, weight: Array, bias: Array, eps: float) -> tuple[Array, Array]:
    I, J, D = V.shape
    c, v = np.full((I, J), 1 / J), np.zeros((J, D))
    for t in range(iterations):
        if t > 0:
            c = softmax(np.einsum("ijd,jd->ij", V, v) / math.sqrt(D))
        s = weighted(c, V)
        v = (s - s.mean(1, keepdims=True)) / np.sqrt(s.var(1, keepdims=True) + eps) * weight + bias
    return v, c


def self_routing(V: Array, a: Array, logits: Array) -> tuple[Array, Array, Array]:
    c = softmax(logits)
    mass = a @ c
    return weighted(c * a[:, None], V) / mass[:, None], mass / a.sum(), c


def em(
    V: Array, a: Array, beta_u: Array, beta_a: Array, iterations: int, final_lambda: float, scale: float
) -> tuple[Array, Array, Array]:
    I, J, _ = V.shape
    r = np.full((I, J), 1 / J)
    for t in range(iterations):
        if t > 0:
            r = softmax(np.log(expit(logit)) + log_density(V, mu, variance))
        R = (a @ r)[:, None]
        mu = weighted(r * a[:, None], V) / R
        variance = weighted(r * a[:, None], (V - mu) ** 2) / R + 1e-9
        cost = scale * ((beta_u[:, None] + np.log(np.sqrt(variance))) * R).sum(1)
        logit = final_lambda * (1 - 0.95 ** (t + 1)) * (beta_a - cost)
    return mu, expit(logit), r


def em_code(
    V: Array, a: Array, sigma_bias: Array, act_bias: Array, iterations: int, final_beta: float, least: float
) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    posterior, center = np.full((I, J), 1 / J), np.zeros((J, D))
    for t in range(iterations):
        if t > 0:
            posterior = softmax(np.log(expit(logit)) + log_density(V, center, variance))
        share = posterior * a[:, None]
        mass = share.sum(0) + 1e-5
        center = 0.9 * weighted(share, V) / mass[:, None] + 0.1 * center
        variance = least + weighted(share, (V - center) ** 2) / mass[:, None]
        win = mass * (-np.log(variance).sum(1) - sigma_bias * D * (math.log(2 * math.pi) + 1))
        logit = final_beta * (1 - 0.95 ** (t + 1)) * (win - 5000 * act_bias)
    return center, expit(logit), posterior


def vb(V: Array, a: Array, beta_u: Array, beta_a: Array, iterations: int) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    R = np.full((I, J), 1 / J)
    for t in range(iterations):
        if t > 0:
            distance = D / kappa + nu * ((V - m) ** 2 / inverse).sum(2)
            R = softmax(logpi + 0.5 * logdet - 0.5 * D * math.log(2 * math.pi) - 0.5 * distance)
        share = R * a[:, None]
        mass = share.sum(0)
        kappa, nu = 1 + mass, D + 1 + mass
        mu = weighted(share, V) / mass[:, None]
        m = (mass / kappa)[:, None] * mu
        inverse = 1 + weighted(share, (V - mu) ** 2) + (mass / kappa)[:, None] * mu**2
        logdet = digamma((nu[:, None] - np.arange(D)) / 2).sum(1) + D * math.log(2) - np.log(inverse).sum(1)
        logpi = digamma(1 + mass) - digamma((1 + mass).sum())
    entropy = 0.5 * D * math.log(2 * math.pi * math.e) - 0.5 * logdet
    return m, beta_a - (np.exp(logpi) * entropy + beta_u), R


def heinsen_matrix(V: Array, a: Array, use: Array, ignore: Array, iterations: int, eps: float) -> tuple[Array, ...]:
    """The source's GenerativeMatrixRouting."""
    I, J, _ = V.shape
    R = np.full((I, J), 1 / J)
    for t in range(iterations):
        if t > 0:
            variance = weighted(share, (V - mu) ** 2) + eps
            R = softmax(np.log(expit(score)) + log_density(V, mu, variance))
        used = a[:, None] * R
        score = (use * used).sum(0) - (ignore * (a[:, None] - used)).sum(0)
        share = used / (used.sum(0) + eps)
        mu = weighted(share, V)
    return mu, expit(score), R


def heinsen_vector(u: Array, own: dict[str, Array], F1: Array, F2: Array, iterations: int) -> tuple[Array, ...]:
    """The source's EfficientVectorRouting of one sequence without padding, u (I, K); ``own`` (I, ...) are parameters.

    Its factors are F1 (J, K) and F2 (K, D).
    """
    I, J = len(u), len(F1)
    x = u / math.sqrt(I)
    f = expit((own["data_weight"] * x).sum(1) + own["data_bias"])[:, None]
    R = np.full((I, J), 1 / J)
    for t in range(iterations):
        if t > 0:
            predicted = v @ own["predict"] * own["predict_scale"] + own["predict_bias"]
            R = softmax(np.log(expit(u @ predicted.T * own["match_scale"] + own["match_bias"])))
        credit = own["beta"][0] * f * R - own["beta"][1] * (f - f * R)
        v = (credit.T @ x * F1) @ F2 + credit.sum(0)[:, None] * own["vote_bias"]
        v = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-5)
    return v, expit(v @ own["score"] + own["score_bias"]), R
