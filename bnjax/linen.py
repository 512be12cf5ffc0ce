"""Batch Normalization for Flax Linen."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.nn import initializers

from bnjax.layer import call_layer, counts_calls, result_dtype, stored_batch_stats
from bnjax.pooling import POOL, update_pool
from bnjax.reduction import canonical_axes
from bnjax.statistics import Moments, update_batch_stats
from bnjax.transform import Renorm


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
      momentum: Weight of the old running value, in [0, 1]. None: the plain average
        over all calls, whose number is kept in `batch_stats/count`.
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
      virtual_batch_size: Examples that normalize each other in training: consecutive
        ones of a device; what is left over joins the last group. None: all.
      renorm: Batch Renormalization in training (Ioffe 2017).
      debias: Start the running values at 0 and read them divided by 1 − momentumᵗ
        after t calls, kept in `batch_stats/count`; 0 and 1 before the first. So they
        are right from the first call on.
    """

    use_running_average: bool | None = None
    axis: int | tuple[int, ...] = -1
    momentum: float | None = 0.99
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
    virtual_batch_size: int | None = None
    renorm: Renorm | None = None
    debias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        scale: Array | None = None,
        bias: Array | None = None,
        renorm: Renorm | None = None,
    ) -> Array:
        """Returns the normalized input.

        Args:
          x: `(N, ..., C)`, or with its features in `axis`.
          use_running_average: Takes precedence over the module's.
          mask: True where an element counts; of the rank of `x`, or aligned with its
            leading axes: `(N,)` for examples, `(N, H, W)` for positions.
          scale: γ in place of the module's parameter, which it then does not have:
            `(C,)`, `(N, C)` for each example, or of the rank of `x`.
          bias: β, likewise.
          renorm: In place of the module's; a schedule may be traced.

        Returns:
          The shape of `x`, in `dtype`; 0 where masked out.
        """
        if use_running_average is None:
            use_running_average = nn.merge_param(
                "use_running_average", self.use_running_average, None
            )
        features = tuple(x.shape[axis] for axis in canonical_axes(x.ndim, self.axis))
        stats = self._running_values(features)
        if scale is None and self.use_scale:
            scale = self.param("scale", self.scale_init, features, self.param_dtype)
        if bias is None and self.use_bias:
            bias = self.param("bias", self.bias_init, features, self.param_dtype)
        starting = self.is_initializing()
        y, moments = call_layer(
            self,
            x,
            stored_batch_stats(self, {n: each.value for n, each in stats.items()}),
            scale=scale,
            bias=bias,
            use_running_average=use_running_average,
            mask=mask,
            renorm=self.renorm if renorm is None else renorm,
            dtype=result_dtype(self.dtype, x, scale, bias),
            # An unbatched call, as when shapes are tried out, has no batch to lack.
            single="fine" if starting or x.ndim == len(features) else "error",
            starting=starting,
        )
        if moments is not None and self.update_stats and not starting:
            self._move(stats, moments)
        return y

    @nn.nowrap
    def _running_values(self, features: tuple[int, ...]) -> dict[str, nn.Variable]:
        """Returns the variables of `batch_stats`, new ones while initializing."""
        inits = {"mean": jnp.zeros, "var": jnp.zeros if self.debias else jnp.ones}
        if counts_calls(self):
            inits["count"] = jnp.zeros
        return {
            name: self.variable("batch_stats", name, init, features, jnp.float32)
            for name, init in inits.items()
        }

    @nn.nowrap
    def _move(self, stats: dict[str, nn.Variable], moments: Moments) -> None:
        """Moves the running values towards a batch, or to all that are pooled."""
        options: dict[str, Any] = {
            "momentum": self.momentum,
            "unbiased": self.unbiased,
        }
        if self.has_variable("batch_stats", POOL):
            pool = self.get_variable("batch_stats", POOL)
            pool, new = update_pool(pool, moments, **options)
            self.put_variable("batch_stats", POOL, pool)
        else:
            values = {name: each.value for name, each in stats.items()}
            new = update_batch_stats(
                stored_batch_stats(self, values), moments, **options
            )
        for name, variable in stats.items():
            variable.value = getattr(new, name)
