"""One layer, written out in loops over tokens, heads and features."""

import math

import numpy as np


def relu(x):
    return max(x, 0.0), float(x > 0)


def gelu(x):
    cdf = 0.5 * (1 + math.erf(x / math.sqrt(2)))
    pdf = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * pdf


def silu(x):
    s = 1 / (1 + math.exp(-x))
    return x * s, s + x * s * (1 - s)


def tanh(x):
    return math.tanh(x), 1 / math.cosh(x) ** 2


ACTIVATIONS = {"relu": relu, "gelu": gelu, "silu": silu, "tanh": tanh}
GATED = {"reglu": relu, "geglu": gelu, "swiglu": silu}


def softmax(scores):
    top = max(scores)
    e = [math.exp(s - top) for s in scores]
    return [x / sum(e) for x in e]


def kriging(q, k, v, precision, c, visible):
    """One head. q (T, d), k and v (S, d), precision and c (S,).

    Returns weights (T, S), mean and dispersion (T, d), n_eff (T,) and
    neighbour variance (T,); rows that see nothing are zero.
    """
    queries, keys = len(q), len(k)
    weights = np.zeros((queries, keys))
    mean = np.zeros((queries, v.shape[1]))
    spread = np.zeros_like(mean)
    n_eff, around = np.zeros(queries), np.zeros(queries)
    for t in range(queries):
        seen = [j for j in range(keys) if visible[t][j]]
        if not seen:
            continue
        # softmax first, then times the precision, then renormalised
        relevance = softmax(
            [q[t] @ k[j] / math.sqrt(q.shape[1]) for j in seen]
        )
        raw = [a * precision[j] for a, j in zip(relevance, seen, strict=True)]
        for a, j in zip(raw, seen, strict=True):
            weights[t, j] = a / sum(raw)
        for i in range(v.shape[1]):
            mean[t, i] = sum(weights[t, j] * v[j, i] for j in seen)
            spread[t, i] = sum(
                weights[t, j] * (v[j, i] - mean[t, i]) ** 2 for j in seen
            )
        n_eff[t] = 1 / sum(weights[t, j] ** 2 for j in seen)
        around[t] = sum(weights[t, j] * c[j] for j in seen)
    return weights, mean, spread, n_eff, around


def observation_variance(spread, n, s0, nu0, reading):
    s2 = (nu0 * s0 + n * spread) / (nu0 + n - 1)
    return {"prediction": s2 * (1 + 1 / n), "mean": s2 / n, "value": s2}[
        reading
    ]


def norm_jacobian(x, gamma, beta, eps, centred):
    """Output, its dense Jacobian (d, d), and the scale, for one token."""
    d = len(x)
    middle = sum(x) / d if centred else 0.0
    scale = math.sqrt(sum((a - middle) ** 2 for a in x) / d + eps)
    z = [(a - middle) / scale for a in x]
    jacobian = np.zeros((d, d))
    for i in range(d):
        for k in range(d):
            entry = float(i == k) - z[i] * z[k] / d
            if centred:
                entry -= 1 / d
            jacobian[i, k] = gamma[i] * entry / scale
    return np.array(z) * gamma + beta, jacobian, scale


def ffn_jacobian(x, w1, b1, w2, b2, activation):
    """Output and dense Jacobian of the network for one token."""
    a = w1 @ x + b1
    if activation in GATED:
        half = len(a) // 2
        pairs = [GATED[activation](g) for g in a[:half]]
        phi = np.array([p[0] for p in pairs])
        slope = np.array([p[1] for p in pairs])
        gate_in, up_in = w1[:half], w1[half:]
        hidden = phi * a[half:]
        d_hidden = (slope * a[half:])[:, None] * gate_in + phi[:, None] * up_in
    else:
        pairs = [ACTIVATIONS[activation](g) for g in a]
        hidden = np.array([p[0] for p in pairs])
        d_hidden = np.array([p[1] for p in pairs])[:, None] * w1
    return w2 @ hidden + b2, w2 @ d_hidden


def rotated(x, base, start=0):
    """Pairs (i, i + d/2) as complex numbers, turned by position·rate."""
    half = x.shape[1] // 2
    out = np.empty_like(x)
    for t in range(len(x)):
        for i in range(half):
            turn = (start + t) * base ** (-i / half)
            w = complex(x[t, i], x[t, i + half])
            w *= complex(math.cos(turn), math.sin(turn))
            out[t, i], out[t, i + half] = w.real, w.imag
    return out


def layer(
    p,
    h,
    precision,
    visible,
    *,
    heads,
    activation,
    norm_first,
    centred=True,
    kv_heads=None,
    token=False,
    reading="prediction",
    prior="neighbours",
    nu0=1.0,
    project_variance=True,
    rotary_base=None,
    eps=1e-5,
    stationary=None,
    difference=False,
):
    """One sequence through one layer.

    p: parameters by their state-dict names; h (T, d); precision (T, d), or
    (T, 1) if ``token``; visible (T, T). Returns mean, precision, and a dict
    of weights, n_eff, observation precision, gain, growth (1 + J)².
    """
    tokens, d = h.shape
    kv_heads = kv_heads or heads
    size = d // heads
    kv = kv_heads * size
    zeros, ones = np.zeros(d), np.ones(d)
    gamma1, beta1 = p.get("norm1.weight", ones), p.get("norm1.bias", zeros)
    gamma2, beta2 = p.get("norm2.weight", ones), p.get("norm2.bias", zeros)

    # observe
    x, c = np.array(h), np.zeros(tokens)
    token_precision = np.zeros(tokens)
    for t in range(tokens):
        scale = 1.0
        if norm_first:
            x[t], _, scale = norm_jacobian(h[t], gamma1, beta1, eps, centred)
        token_precision[t] = sum(precision[t]) / len(precision[t])
        variance = sum(1 / a for a in precision[t]) / len(precision[t])
        c[t] = variance / scale**2 if prior == "neighbours" else 1.0
    w, b = p["self_attn.in_proj_weight"], p["self_attn.in_proj_bias"]
    q = x @ w[:d].T + b[:d]
    k = x @ w[d : d + kv].T + b[d : d + kv]
    v = x @ w[d + kv :].T + b[d + kv :]
    w_v = w[d + kv :]
    pieces, variances, n_eff, weights = [], [], [], []
    for a in range(heads):
        mine = slice(a * size, (a + 1) * size)
        g = a * kv_heads // heads
        theirs = slice(g * size, (g + 1) * size)
        qa, ka = q[:, mine], k[:, theirs]
        if rotary_base is not None:
            qa, ka = rotated(qa, rotary_base), rotated(ka, rotary_base)
        alpha, mu, spread, n, around = kriging(
            qa, ka, v[:, theirs], token_precision, c, visible
        )
        variance = np.ones_like(mu)
        for t in range(tokens):
            for i in range(size):
                row = w_v[g * size + i]
                gain_i = sum(
                    (row[m] * (gamma1[m] if norm_first else 1.0)) ** 2
                    for m in range(d)
                )
                if n[t] > 0:
                    variance[t, i] = observation_variance(
                        spread[t, i], n[t], gain_i * around[t], nu0, reading
                    )
        pieces.append(mu)
        variances.append(variance)
        n_eff.append(n)
        weights.append(alpha)
    mu, value_variance = np.hstack(pieces), np.hstack(variances)
    n_eff = np.array(n_eff)
    w_o, b_o = p["self_attn.out_proj.weight"], p["self_attn.out_proj.bias"]
    innovation = mu @ w_o.T + b_o

    out = np.zeros_like(h)
    width = 1 if token else d
    lam_obs, gain = np.zeros((tokens, width)), np.zeros((tokens, width))
    growth, lam = np.zeros((tokens, width)), np.zeros((tokens, width))
    for t in range(tokens):
        if n_eff[0, t] > 0:
            carried = (
                np.array(
                    [
                        sum(
                            w_o[i, m] ** 2 * value_variance[t, m]
                            for m in range(d)
                        )
                        for i in range(d)
                    ]
                )
                if project_variance
                else value_variance[t]
            )
            lam_obs[t] = 1 / (carried.mean() if token else carried)
        # update
        gain[t] = lam_obs[t] / (precision[t] + lam_obs[t])
        mean = h[t] + gain[t] * innovation[t]
        if difference:
            mean = (1 - gain[t]) * h[t] + gain[t] * innovation[t]
        lam_t = precision[t] + lam_obs[t]

        def through(mean, lam_t, gamma, beta):
            mean, jac, _ = norm_jacobian(mean, gamma, beta, eps, centred)
            var = jac**2 @ (np.ones(d) / lam_t)
            return mean, 1 / (var.mean(keepdims=True) if token else var)

        if not norm_first:
            mean, lam_t = through(mean, lam_t, gamma1, beta1)
        # predict
        y, jac = mean, np.eye(d)
        if norm_first:
            y, jac, _ = norm_jacobian(mean, gamma2, beta2, eps, centred)
        step, a = ffn_jacobian(
            y,
            p["linear1.weight"],
            p["linear1.bias"],
            p["linear2.weight"],
            p["linear2.bias"],
            activation,
        )
        j = np.diag(a @ jac)
        growth[t] = (1 + (j.mean() if token else j)) ** 2
        mean = mean + step
        noise = np.exp(p["log_process_noise"])
        kept = 1.0
        if stationary is not None:
            kept = stationary / (stationary + noise)
            noise = (1 - kept) * stationary
        lam_t = 1 / (kept * growth[t] / lam_t + noise)
        if not norm_first:
            mean, lam_t = through(mean, lam_t, gamma2, beta2)
        out[t], lam[t] = mean, lam_t
    return (
        out,
        lam,
        {
            "weights": np.array(weights),
            "n_eff": n_eff,
            "observation_precision": lam_obs,
            "gain": gain,
            "growth": growth,
        },
    )


def unnormalised(a, v, s0, nu0, estimator):
    """Variance of o_t = Σ_j a_tj v_j, row by row; None where Σa² = 0."""
    out = []
    for row in a:
        total = sum(x * x for x in row)
        if total == 0:
            out.append(None)
            continue
        p = [x * x if estimator == "sandwich" else abs(x) for x in row]
        n = sum(p) ** 2 / sum(x * x for x in p)
        p = [x / sum(p) for x in p]
        per_feature = []
        for i in range(v.shape[1]):
            middle = sum(x * y for x, y in zip(p, v[:, i], strict=True))
            spread = sum(
                x * (y - middle) ** 2 for x, y in zip(p, v[:, i], strict=True)
            )
            s2 = (nu0 * s0 + n * spread) / (nu0 + n - 1)
            per_feature.append(s2 * total)
        out.append(per_feature)
    return out
