"""Equalities that hold for any rank, feature axes, dtype and mask."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import bnjax
import bnjax.linen
import bnjax.nnx

FEW = settings(max_examples=15)  # each compiles for a new shape
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Case:
    """One input, and what goes with it."""

    values: np.ndarray
    dtype: str
    feature_axes: tuple[int, ...]
    rows: int  # an axis that is reduced, of two elements or more
    kept: np.ndarray | None

    @property
    def x(self):
        return jnp.asarray(self.values, self.dtype)

    @property
    def mask(self):
        return None if self.kept is None else jnp.asarray(self.kept)

    @property
    def features(self):
        return tuple(self.x.shape[axis] for axis in self.feature_axes)

    @property
    def tolerance(self):
        """Of results up to about 4, summed in another order."""
        eps = float(jnp.finfo(self.x.dtype).eps)
        return {"rtol": max(2 * eps, 1e-5), "atol": max(8 * eps, 1e-5)}

    def parameters(self):
        scale = jnp.linspace(0.5, 2.0, int(np.prod(self.features)), dtype=jnp.float32)
        scale = scale.reshape(self.features)
        return {"scale": scale, "bias": 1 - scale}

    def train(self, x=None, **options):
        return bnjax.batch_norm(
            self.x if x is None else x,
            bnjax.init_batch_stats(self.features),
            **{**self.parameters(), "mask": self.mask, **options},
            feature_axes=self.feature_axes,
        )


@st.composite
def cases(draw, dtypes=DTYPES, masked=True, first=False):
    rank = draw(st.integers(1, 5))
    rows = 0 if first else draw(st.integers(0, rank - 1))
    shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    shape[rows] = draw(st.integers(2, 6))
    kept = [axis for axis in range(rank) if axis != rows and draw(st.booleans())]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    x = rng.normal(draw(st.sampled_from([0.0, 3.0, -20.0])), 2.0, shape)
    mask = None
    if masked and draw(st.booleans()):
        mask = rng.random([n if draw(st.booleans()) else 1 for n in shape]) < 0.7
    return Case(x, draw(st.sampled_from(dtypes)), tuple(kept), rows, mask)


def in_float64(test):
    """Runs a test where float64 exists."""

    @functools.wraps(test)
    def wrapped(*args, **kwargs):
        with jax.enable_x64(True):
            test(*args, **kwargs)

    return wrapped


@pytest.mark.report(25)
@FEW
@given(case=cases(masked=False), data=st.data())
@in_float64
def test_masking_equals_dropping(case, data):
    number = case.x.shape[case.rows]
    keep = np.array(
        data.draw(st.lists(st.booleans(), min_size=number, max_size=number))
    )
    keep[0] = keep[1] = True
    along = [number if axis == case.rows else 1 for axis in range(case.x.ndim)]
    mask = jnp.asarray(keep.reshape(along))
    kept = functools.partial(jnp.compress, keep, axis=case.rows)
    y, stats = case.train(jnp.where(mask, case.x, jnp.nan), mask=mask)
    right, expected = case.train(kept(case.x))
    chex.assert_trees_all_close(kept(y), right, **case.tolerance)
    chex.assert_trees_all_close(stats, expected, rtol=1e-5, atol=1e-5)
    assert not jnp.compress(~keep, y, axis=case.rows).any()


@FEW
@given(case=cases(), data=st.data())
@in_float64
def test_the_parts_merge_into_the_whole(case, data):
    at = data.draw(st.integers(0, case.x.shape[case.rows]))
    mask = jnp.ones((1,) * case.x.ndim, bool) if case.mask is None else case.mask
    mask = jnp.broadcast_to(mask, case.x.shape)
    parts = zip(*(jnp.split(a, [at], case.rows) for a in (case.x, mask)), strict=True)
    moments = [
        bnjax.batch_moments(x, mask=mask, feature_axes=case.feature_axes)
        for x, mask in parts
    ]
    whole = bnjax.batch_moments(case.x, mask=mask, feature_axes=case.feature_axes)
    merged = bnjax.merge_moments(*moments)
    chex.assert_trees_all_close(merged, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.report(4, 17)
@FEW
@given(case=cases(first=True), shards=st.integers(1, 4), seed=st.integers(0, 99))
@in_float64
def test_shards_together_are_the_whole(case, shards, seed):
    values = np.concatenate([case.values] * shards)
    case = dataclasses.replace(case, values=values, kept=None)
    keep = jnp.asarray(np.random.default_rng(seed).random(len(values)) < 0.6)

    def loss(x, mask, **options):
        y, stats = case.train(x, mask=mask, **options)
        return (y.astype(jnp.float32) ** 3).sum(), (y, stats)

    gradient = jax.grad(functools.partial(loss, axis_name="i"), has_aux=True)
    split = (a.reshape(shards, -1, *a.shape[1:]) for a in (case.x, keep))
    found, (y, stats) = jax.jit(jax.vmap(gradient, axis_name="i"))(*split)
    right, (whole, expected) = jax.jit(jax.grad(loss, has_aux=True))(case.x, keep)
    chex.assert_trees_all_close(y.reshape(whole.shape), whole, **case.tolerance)
    # Third powers, and sums of them over up to 24 rows.
    tolerance = {"rtol": 1e-2, "atol": 20 * case.tolerance["atol"]}
    chex.assert_trees_all_close(found.reshape(right.shape), right, **tolerance)
    first = jax.tree.map(lambda a: a[:1], stats)
    chex.assert_trees_all_equal(
        stats, jax.tree.map(lambda a: jnp.concatenate([a] * shards), first)
    )
    first = jax.tree.map(lambda a: a[0], first)
    chex.assert_trees_all_close(first, expected, rtol=1e-5, atol=1e-5)


@FEW
@given(case=cases(masked=False), seed=st.integers(0, 99))
@in_float64
def test_the_order_of_the_examples_does_not_matter(case, seed):
    order = np.random.default_rng(seed).permutation(case.x.shape[case.rows])
    reorder = functools.partial(jnp.take, indices=order, axis=case.rows)
    y, stats = case.train()
    moved, same = case.train(reorder(case.x))
    chex.assert_trees_all_close(moved, reorder(y), **case.tolerance)
    chex.assert_trees_all_close(same, stats, rtol=1e-5, atol=1e-5)


@FEW
@given(
    case=cases(dtypes=("float32", "float64")),
    a=st.floats(0.1, 10.0),
    b=st.floats(-100.0, 100.0),
)
@in_float64
def test_scaling_and_shifting_the_input_changes_nothing(case, a, b):
    # ε in proportion: Section 3.3 holds where it does not matter.
    y, _ = case.train(epsilon=1e-3)
    moved, _ = case.train(a * case.x + b, epsilon=1e-3 * a * a)
    # The sum rounds x to 6e-8 of up to 300, and divides by a std of 0.2 or so.
    chex.assert_trees_all_close(moved, y, rtol=1e-3, atol=1e-3)


@FEW
@given(case=cases())
@in_float64
def test_jit_equals_eager(case):
    eager, jitted = case.train(), jax.jit(lambda x: case.train(x))(case.x)
    chex.assert_trees_all_close(jitted[0], eager[0], **case.tolerance)
    chex.assert_trees_all_close(jitted[1], eager[1], rtol=1e-5, atol=1e-6)


@FEW
@given(case=cases(dtypes=("float32", "float64")))
@in_float64
def test_linen_is_the_core(case):
    layer = bnjax.linen.BatchNorm(axis=case.feature_axes)
    variables = {
        "params": case.parameters(),
        "batch_stats": bnjax.init_batch_stats(case.features)._asdict(),
    }
    found, new = layer.apply(
        variables, case.x, False, mask=case.mask, mutable=["batch_stats"]
    )
    y, stats = case.train()
    chex.assert_trees_all_equal((found, new["batch_stats"]), (y, stats._asdict()))


@FEW
@given(case=cases(dtypes=("float32", "bfloat16")), data=st.data())
def test_nnx_is_linen(case, data):
    assume(case.x.ndim > 1)
    others = [axis for axis in range(case.x.ndim) if axis != case.rows]
    options = {"axis": data.draw(st.sampled_from(others)), "dtype": jnp.float32}
    options |= {"use_scale": False, "use_bias": False}
    size = case.x.shape[options["axis"]]
    module = bnjax.nnx.BatchNorm(size, **options, rngs=nnx.Rngs(0))
    stats = {"batch_stats": bnjax.init_batch_stats(size)._asdict()}
    y, new = bnjax.linen.BatchNorm(**options).apply(
        stats, case.x, False, mask=case.mask, mutable=["batch_stats"]
    )
    chex.assert_trees_all_equal(module(case.x, mask=case.mask), y)
    found = {"mean": module.mean[...], "var": module.var[...]}
    chex.assert_trees_all_equal(found, new["batch_stats"])
