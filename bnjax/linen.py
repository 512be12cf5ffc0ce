"""Batch Normalization for Flax Linen."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.nn import initializers

from bnjax.arguments import check_batch_stats, check_momentum
from bnjax.functional import normalize, normalize_batch
from bnjax.reduction import canonical_axes
from bnjax.statistics import BatchStats, update_batch_stats
from bnjax.transform import promote


class BatchNorm(nn.Module):
    """Batch Normalization; takes the place of `flax.linen.BatchNorm`.

    Variables and their names are Flax's, so its checkpoints load: `params/scale`,
    `params/bias` (γ, β) and `batch_stats/mean`, `batch_stats/var`, `(C,)` each.

    What differs from Flax, on purpose: the running variance is the population's,
    m/(m−1) times the batch's (`unbiased=False` gives Flax's); statistics over devices
    and masks are pooled; `y` is 0 where masked out; a far mean costs no accuracy;
    running values are float32 whatever the other dtypes, and carry no gradient; a
    flag given both to the class and to the call is the call's.

    Attributes:
      use_running_average: Normalize with the running values, not with the batch.
      axis: The feature axis or axes of the input.
      momentum: Weight of the old running value, in [0, 1].
      epsilon: ε, added to the variance under the root.
      dtype: Of the result. None: what input and parameters promote to.
      param_dtype: Of scale and bias.
      use_bias: Learn β.
      use_scale: Learn γ.
      bias_init: Initializer of β.
      scale_init: Initializer of γ.
      axis_name: Mapped axis or axes whose devices share statistics in training. It
        need not be bound in evaluation, nor while the module is initialized.
      axis_index_groups: Groups of device indices that share among themselves.
      use_fast_variance: False always takes a second pass (and all-reduce) over the
        input; True does so only while the running mean is far from the data.
      force_float32_reductions: Accepted for Flax; statistics always are.
      update_stats: Move the running values in training.
      unbiased: Move the running variance by m/(m−1) times the batch's.
    """

    use_running_average: bool | None = None
    axis: int | tuple[int, ...] = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: initializers.Initializer = initializers.zeros
    scale_init: initializers.Initializer = initializers.ones
    axis_name: str | tuple[str, ...] | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    update_stats: bool = True
    unbiased: bool = True

    @nn.compact
    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
    ) -> Array:
        """Returns the normalized input.

        Args:
          x: `(N, ..., C)`, or with its features in `axis`.
          use_running_average: Takes precedence over the module's.
          mask: True where an element counts; of the rank of `x`, or aligned with its
            leading axes: `(N,)` for examples, `(N, H, W)` for positions.

        Returns:
          The shape of `x`, in `dtype`; 0 where masked out.
        """
        check_momentum(self.momentum)
        if use_running_average is None:
            use_running_average = nn.merge_param(
                "use_running_average", self.use_running_average, None
            )
        features = tuple(x.shape[axis] for axis in canonical_axes(x.ndim, self.axis))
        mean = self.variable("batch_stats", "mean", jnp.zeros, features, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, features, jnp.float32)
        scale = self._parameter("scale", self.use_scale, self.scale_init, features)
        bias = self._parameter("bias", self.use_bias, self.bias_init, features)
        dtype = result_dtype(self.dtype, x, scale, bias)
        options: dict[str, Any] = {
            "scale": scale,
            "bias": bias,
            "epsilon": self.epsilon,
            "feature_axes": self.axis,
            "mask": mask,
        }
        x = x.astype(promote(x.dtype, dtype))
        if use_running_average:
            return normalize(x, mean.value, var.value, **options).astype(dtype)
        check_batch_stats((mean.value, var.value))
        starting = self.is_initializing()
        y, moments = normalize_batch(
            x,
            mean.value,
            axis_name=None if starting else self.axis_name,
            axis_index_groups=None if starting else self.axis_index_groups,
            two_pass=not self.use_fast_variance,
            allow_single=starting,
            **options,
        )
        if self.update_stats and not starting:
            mean.value, var.value = update_batch_stats(
                BatchStats(mean.value, var.value),
                moments,
                momentum=self.momentum,
                unbiased=self.unbiased,
            )
        return y.astype(dtype)

    def _parameter(
        self, name: str, used: bool, init: Any, features: tuple[int, ...]
    ) -> Array | None:
        return self.param(name, init, features, self.param_dtype) if used else None


def result_dtype(dtype: Any, *values: Array | None) -> Any:
    """Returns `dtype`, or else what the values promote to, by the rule of Flax."""
    if dtype is not None:
        return jnp.dtype(dtype)
    dtype = promote(*(value.dtype for value in values if value is not None))
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if inexact else promote(dtype, jnp.float32)
