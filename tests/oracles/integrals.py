"""The variance posterior by brute-force integration on a grid."""

import numpy as np


def _log_power_likelihood(variance, mean, values, weights, n):
    """n Σ_j α̃_j log N(v_j; μ, σ²), on a grid of σ² (rows) and μ (columns)."""
    v, m = variance[:, None], mean[None]
    total = np.zeros((len(variance), len(mean)))
    for value, weight in zip(values, weights, strict=True):
        total += weight * (
            -0.5 * np.log(2 * np.pi * v) - (value - m) ** 2 / (2 * v)
        )
    return n * total


def marginal_of_variance(values, weights, points=4001, width=60.0):
    """Grid of σ² and the likelihood with μ integrated out, unnormalised."""
    n = 1 / np.sum(np.square(weights))
    middle = np.sum(weights * values)
    spread = np.sum(weights * (values - middle) ** 2)
    variance = spread * np.geomspace(1e-3, 1e5, 3001)
    # the spread of μ follows σ: one grid of μ per σ², in its own units
    steps = np.linspace(-width, width, points)
    out = np.empty(len(variance))
    for row, s2 in enumerate(variance):
        mean = middle + steps * np.sqrt(s2 / n) / 4
        log = _log_power_likelihood(np.array([s2]), mean, values, weights, n)[
            0
        ]
        out[row] = np.trapezoid(np.exp(log), mean)
    return variance, out


def posterior_moments(values, weights, dof, scale):
    """E[1/σ²] and E[σ⁻⁴] under the scaled-inverse-χ²(dof, scale) prior."""
    variance, likelihood = marginal_of_variance(values, weights)
    prior = variance ** (-dof / 2 - 1) * np.exp(-dof * scale / (2 * variance))
    density = prior * likelihood
    log = np.log(variance)
    mass = np.trapezoid(density * variance, log)  # dσ² = σ² d log σ²
    first = np.trapezoid(density, log) / mass
    second = np.trapezoid(density / variance, log) / mass
    return first, second
