"""The paper in float64 NumPy loops: Algorithms 1 and 2, and Section 3's gradient.

Arrays are `(m, C)`: m elements averaged per feature, C features. `columns` and
`uncolumns` bring other layouts there and back.
"""

import numpy as np


def columns(x, feature_axes=-1):
    """Returns `x` as `(m, C)`, the features in the order of their axes."""
    kept = _kept(x.ndim, feature_axes)
    reduced = [axis for axis in range(x.ndim) if axis not in kept]
    moved = np.transpose(x, [*reduced, *kept])
    m = int(np.prod([x.shape[axis] for axis in reduced]))
    return moved.reshape(m, int(np.prod([x.shape[axis] for axis in kept])))


def uncolumns(values, shape, feature_axes=-1):
    """Returns `(m, C)` values in the layout of an array of that shape."""
    kept = _kept(len(shape), feature_axes)
    order = [axis for axis in range(len(shape)) if axis not in kept] + kept
    moved = values.reshape([shape[axis] for axis in order])
    return np.transpose(moved, np.argsort(order))


def _kept(ndim, feature_axes):
    named = [feature_axes] if isinstance(feature_axes, int) else list(feature_axes)
    return sorted(axis % ndim for axis in named)


def wide(values):
    """Returns the values as they were rounded, in float64 or complex128."""
    values = np.asarray(values)
    return values.astype(np.result_type(values.dtype, np.float64))


def batch_moments(x, mask=None):
    """Returns the mean and biased variance of Algorithm 1, and the count."""
    x = wide(x)
    mask = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    features = x.shape[1]
    mean, var, count = np.zeros(features, x.dtype), np.zeros(features), []
    for k in range(features):
        valid = [value for value, keep in zip(x[:, k], mask[:, k], strict=True) if keep]
        count.append(len(valid))
        for value in valid:
            mean[k] += value / len(valid)
        # The mean is rounded too; a second look takes out what is left.
        mean[k] += sum((value - mean[k] for value in valid), 0.0) / max(len(valid), 1)
        for value in valid:
            var[k] += abs(value - mean[k]) ** 2 / len(valid)
    return mean, var, np.array(count, float)


def batch_norm(x, gamma, beta, epsilon=1e-5, mask=None):
    """Returns y of Algorithm 1, 0 where masked out."""
    mean, var, _ = batch_moments(x, mask)
    y = inference(x, mean, var, gamma, beta, epsilon)
    return y if mask is None else np.where(np.broadcast_to(mask, y.shape), y, 0)


def inference(x, mean, var, gamma, beta, epsilon=1e-5):
    """Returns y of Algorithm 2, step 11, with the subtraction first."""
    x = wide(x)
    y = np.zeros_like(x)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            x_hat = (x[i, k] - mean[k]) / np.sqrt(var[k] + epsilon)
            y[i, k] = gamma[k] * x_hat + beta[k]
    return y


def inference_affine(mean, var, gamma, beta, epsilon=1e-5):
    """Returns the multiplier and offset of Algorithm 2, step 11."""
    multiplier = [g / np.sqrt(v + epsilon) for g, v in zip(gamma, var, strict=True)]
    terms = zip(multiplier, mean, beta, strict=True)
    return np.array(multiplier), np.array([b - a * m for a, m, b in terms])


def gradient(x, gamma, dy, epsilon=1e-5):
    """Returns ∂ℓ/∂x, ∂ℓ/∂γ and ∂ℓ/∂β of Section 3, line by line, of real `x`."""
    x, dy = wide(x), wide(dy)
    m, features = x.shape
    dx, dgamma, dbeta = np.zeros(x.shape), np.zeros(features), np.zeros(features)
    means, variances, _ = batch_moments(x)
    for k in range(features):
        mean, var = means[k], variances[k] + epsilon
        dvar = dmean = 0.0
        for i in range(m):
            dx_hat = dy[i, k] * gamma[k]
            dvar += dx_hat * (x[i, k] - mean) * -0.5 * var**-1.5
        for i in range(m):
            dmean += dy[i, k] * gamma[k] * -1 / np.sqrt(var)
            dmean += dvar * -2 * (x[i, k] - mean) / m
        for i in range(m):
            through_x_hat = dy[i, k] * gamma[k] / np.sqrt(var)
            through_var = dvar * 2 * (x[i, k] - mean) / m
            dx[i, k] = through_x_hat + through_var + dmean / m
            dgamma[k] += dy[i, k] * (x[i, k] - mean) / np.sqrt(var)
            dbeta[k] += dy[i, k]
    return dx, dgamma, dbeta


def population(batches):
    """Returns E[x] and Var[x] of Algorithm 2, step 10, from batches of m elements."""
    moments = [batch_moments(batch) for batch in batches]
    mean = sum(mean for mean, _, _ in moments) / len(moments)
    unbiased = [var * count / (count - 1) for _, var, count in moments]
    return mean, sum(unbiased) / len(unbiased)


def moving_average(old, new, momentum):
    """Returns the running value after one batch; momentum weighs the old one."""
    return momentum * wide(old) + (1 - momentum) * wide(new)
