"""Which backends there are, and that the explanation is what happens."""

import jax
import jax.numpy as jnp
import pytest

import ostinato as ost

SPEC = ost.RNNSpec("gru", 2, 3)


def test_every_backend_is_listed_with_a_reason():
    found = ost.backends()
    assert set(found) == {"xla", "cpu", "cuda"}
    for status in found.values():
        assert bool(status) is status.available and status.detail
    assert found["xla"].available and jax.default_backend() in found["xla"].detail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
def test_explained_backend_runs_and_rejected_ones_do_not(dtype):
    x = jax.ShapeDtypeStruct((1, 2, 2), jnp.dtype(dtype))
    told = ost.explain(SPEC, x)
    weights = jnp.zeros(SPEC.num_params, dtype)
    y, _ = ost.rnn(SPEC, weights, jnp.ones(x.shape, dtype), backend=told.backend)
    assert y.dtype == x.dtype and told.why
    assert told.backend not in told.rejected
    for name, reason in told.rejected.items():
        with pytest.raises(ost.BackendError) as info:
            ost.rnn(SPEC, weights, jnp.ones(x.shape, dtype), backend=name)
        assert reason in str(info.value)
        assert name in str(told) and reason in str(told)
