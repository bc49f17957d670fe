"""The routing algorithms again, number by number in NumPy, as their papers index them: slow and plain.

Votes V (I, J, D) of one image, activations a (I).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, expit, logsumexp

Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))


def log_density(V: Array, mean: Array, variance: Array) -> Array:
    I, J, _ = V.shape
    found = np.zeros((I, J))
    for i in range(I):
        for j in range(J):
            found[i, j] = -0.5 * (np.log(2 * math.pi * variance[j]) + (V[i, j] - mean[j]) ** 2 / variance[j]).sum()
    return found


def dynamic(
    V: Array, iterations: int, over: str, bias: Array, prior: Array, leaky: bool, eps: float
) -> tuple[Array, Array]:
    I, J, _ = V.shape
    b, c, v = prior.copy(), np.ones((I, J)), V.sum(0) + bias  # of no iteration at all
    for _ in range(iterations):
        for i in range(I):
            for j in range(J):
                rivals = b[i] if over == "outputs" else b[:, j]
                c[i, j] = math.exp(b[i, j]) / (sum(math.exp(rival) for rival in rivals) + leaky)
        for j in range(J):
            s = sum(c[i, j] * V[i, j] for i in range(I)) + bias[j]
            n = s @ s
            v[j] = n / (1 + n) * s / math.sqrt(n + eps)
        b += np.array([[V[i, j] @ v[j] for j in range(J)] for i in range(I)])
    return v, c


def self_attention(V: Array, bias: Array | None = None) -> tuple[Array, Array]:
    I, J, D = V.shape
    logits = np.zeros((I, J))
    for i in range(I):
        for j in range(J):
            logits[i, j] = sum(V[i, j] @ V[k, j] for k in range(I)) / math.sqrt(D)
    c = softmax(logits)
    if bias is not None:
        c = c + bias
    v = np.zeros((J, D))
    for j in range(J):
        s = sum(c[i, j] * V[i, j] for i in range(I))
        n = math.sqrt(s @ s)
        v[j] = (1 - math.exp(-n)) * s / n
    return v, c


def inverted_attention(V: Array, iterations: int, weight: Array, bias: Array, eps: float) -> tuple[Array, Array]:
    I, J, D = V.shape
    c = np.full((I, J), 1 / J)
    v = np.zeros((J, D))
    for t in range(iterations):
        if t > 0:
            c = softmax(np.array([[V[i, j] @ v[j] for j in range(J)] for i in range(I)]) / math.sqrt(D))
        for j in range(J):
            s = sum(c[i, j] * V[i, j] for i in range(I))
            v[j] = (s - s.mean()) / math.sqrt(((s - s.mean()) ** 2).mean() + eps) * weight + bias
    return v, c


def self_routing(V: Array, a: Array, logits: Array) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    c = softmax(logits)
    poses, out = np.zeros((J, D)), np.zeros(J)
    for j in range(J):
        mass = sum(c[i, j] * a[i] for i in range(I))
        poses[j] = sum(c[i, j] * a[i] * V[i, j] for i in range(I)) / mass
        out[j] = mass / a.sum()
    return poses, out, c


def em(
    V: Array, a: Array, beta_u: Array, beta_a: Array, iterations: int, final_lambda: float, scale: float
) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    r = np.full((I, J), 1 / J)
    mu, variance, logit = np.zeros((J, D)), np.zeros((J, D)), np.zeros(J)
    for t in range(iterations):
        if t > 0:
            r = softmax(np.log(expit(logit)) + log_density(V, mu, variance))
        for j in range(J):
            R = (r[:, j] * a).sum()
            mu[j] = sum(r[i, j] * a[i] * V[i, j] for i in range(I)) / R
            variance[j] = sum(r[i, j] * a[i] * (V[i, j] - mu[j]) ** 2 for i in range(I)) / R + 1e-9
            cost = scale * ((beta_u[j] + np.log(np.sqrt(variance[j]))) * R).sum()
            logit[j] = final_lambda * (1 - 0.95 ** (t + 1)) * (beta_a[j] - cost)
    return mu, expit(logit), r


def em_code(
    V: Array, a: Array, sigma_bias: Array, act_bias: Array, iterations: int, final_beta: float, least: float
) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    posterior = np.full((I, J), 1 / J)
    center, variance, logit = np.zeros((J, D)), np.zeros((J, D)), np.zeros(J)
    for t in range(iterations):
        if t > 0:
            posterior = softmax(np.log(expit(logit)) + log_density(V, center, variance))
        for j in range(J):
            share = posterior[:, j] * a
            mass = share.sum() + 1e-5
            center[j] = 0.9 * (share[:, None] * V[:, j]).sum(0) / mass + 0.1 * center[j]
            variance[j] = least + (share[:, None] * (V[:, j] - center[j]) ** 2).sum(0) / mass
            win = mass * (-np.log(variance[j]).sum() - sigma_bias[j] * D * (math.log(2 * math.pi) + 1))
            logit[j] = final_beta * (1 - 0.95 ** (t + 1)) * (win - 5000 * act_bias[j])
    return center, expit(logit), posterior


def vb(V: Array, a: Array, beta_u: Array, beta_a: Array, iterations: int) -> tuple[Array, Array, Array]:
    I, J, D = V.shape
    R = np.full((I, J), 1 / J)
    m, inverse, logdet, logpi, nu, kappa = (np.zeros((J, D)), np.zeros((J, D)), *np.zeros((4, J)))
    for t in range(iterations):
        if t > 0:
            log_p = np.zeros((I, J))
            for i in range(I):
                for j in range(J):
                    distance = D / kappa[j] + nu[j] * ((V[i, j] - m[j]) ** 2 / inverse[j]).sum()
                    log_p[i, j] = 0.5 * logdet[j] - 0.5 * D * math.log(2 * math.pi) - 0.5 * distance
            R = softmax(logpi + log_p)
        mass = (R * a[:, None]).sum(0)
        for j in range(J):
            kappa[j], nu[j] = 1 + mass[j], D + 1 + mass[j]
            mu = ((R[:, j] * a)[:, None] * V[:, j]).sum(0) / mass[j]
            m[j] = mass[j] * mu / kappa[j]
            scatter = ((R[:, j] * a)[:, None] * (V[:, j] - mu) ** 2).sum(0)
            inverse[j] = 1 + scatter + mass[j] / kappa[j] * mu**2
            logdet[j] = sum(digamma((nu[j] - d) / 2) for d in range(D)) + D * math.log(2) - np.log(inverse[j]).sum()
        logpi = digamma(1 + mass) - digamma((1 + mass).sum())
    entropy = 0.5 * D * math.log(2 * math.pi * math.e) - 0.5 * logdet
    return m, beta_a - (np.exp(logpi) * entropy + beta_u), R


def heinsen_matrix(V: Array, a: Array, use: Array, ignore: Array, iterations: int, eps: float) -> tuple[Array, ...]:
    """The source's GenerativeMatrixRouting."""
    I, J, D = V.shape
    R = np.full((I, J), 1 / J)
    score, mu, variance = np.zeros(J), np.zeros((J, D)), np.zeros((J, D))
    for t in range(iterations):
        if t > 0:
            R = softmax(np.log(expit(score)) + log_density(V, mu, variance))
        for j in range(J):
            used = a * R[:, j]
            score[j] = (use[:, j] * used).sum() - (ignore[:, j] * (a - used)).sum()
            share = used / (used.sum() + eps)
            mu[j] = sum(share[i] * V[i, j] for i in range(I))
            variance[j] = sum(share[i] * (V[i, j] - mu[j]) ** 2 for i in range(I)) + eps
    return mu, expit(score), R


def heinsen_vector(u: Array, own: dict[str, Array], F1: Array, F2: Array, iterations: int) -> tuple[Array, ...]:
    """The source's EfficientVectorRouting of one sequence without padding, u (I, K); ``own`` (I, ...) are parameters.

    Its factors are F1 (J, K) and F2 (K, D).
    """
    (I, K), J, D = u.shape, len(F1), F2.shape[1]
    x = u / math.sqrt(I)
    f = np.array([expit(own["data_weight"][i] @ x[i] + own["data_bias"][i]) for i in range(I)])
    R = np.full((I, J), 1 / J)
    for t in range(iterations):
        if t > 0:
            S = np.zeros((I, J))
            for j in range(J):
                predicted = v[j] @ own["predict"] * own["predict_scale"][j] + own["predict_bias"][j]
                for i in range(I):
                    S[i, j] = np.log(expit(u[i] @ predicted * own["match_scale"][i, j] + own["match_bias"][i, j]))
            R = softmax(S)
        v = np.zeros((J, D))
        for j in range(J):
            credited = np.zeros(K)
            for i in range(I):
                credit = own["beta"][0, i, j] * f[i] * R[i, j] - own["beta"][1, i, j] * (f[i] - f[i] * R[i, j])
                credited += credit * x[i]
                v[j] += credit * own["vote_bias"][j]
            v[j] += (credited * F1[j]) @ F2
            v[j] = (v[j] - v[j].mean()) / np.sqrt(v[j].var() + 1e-5)
    return v, expit(v @ own["score"] + own["score_bias"]), R
