"""Tolerances for comparing results, computed from dtype and accumulation length."""

import jax.numpy as jnp
import numpy as np


def tolerance(dtype, terms: int) -> float:
    """Return the relative error of `terms` roundings, summed as a tree."""
    eps = float(jnp.finfo(dtype).eps)
    c = 4.0
    if eps > 1e-4:  # 16-bit values are summed in float32, so only storing them rounds
        c = 1.0
    return c * eps * (1.0 + np.log2(max(1, terms)))


def assert_close(got, want, *, dtype=None, terms: int = 1, what: str = "") -> None:
    """Check that `got` has the shape of `want`, and its values up to `tolerance`.

    The absolute tolerance is that of the largest element, since sums that cancel keep
    the rounding errors of their terms.
    """
    dtype = got.dtype if dtype is None else dtype
    wide = np.complex128 if np.issubdtype(dtype, np.complexfloating) else np.float64
    got, want = np.asarray(got, wide), np.asarray(want, wide)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    tol = tolerance(dtype, terms)
    largest = max(1.0, np.abs(want).max(initial=0.0, where=np.isfinite(want)))
    np.testing.assert_allclose(
        got, want, rtol=tol, atol=tol * largest, err_msg=what, equal_nan=False
    )


def assert_same_bits(got, want, what: str = "") -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    assert got.tobytes() == want.tobytes(), f"{what}: other bits\n{got}\n{want}"
