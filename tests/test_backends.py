"""Tests of the list of backends, and that `explain` tells which one runs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import ostinato as ost

SPEC = ost.RNNSpec("gru", 2, 3)
BEFORE = ost.RNNSpec("gru", 2, 3, reset_after=False)
needs_cpu = pytest.mark.skipif(
    not ost.backends()["cpu"], reason=f"no cpu backend: {ost.backends()['cpu'].detail}"
)


def traced(spec=SPEC, dtype="float32", **options):
    """Trace values and gradients of one call, ready to be lowered."""

    def loss(weights, x):
        return jnp.sum(ost.rnn(spec, weights, x, **options).y)

    weights = jax.ShapeDtypeStruct((spec.num_params,), jnp.dtype(dtype))
    x = jax.ShapeDtypeStruct((1, 2, 2), jnp.dtype(dtype))
    return jax.jit(jax.value_and_grad(loss)).trace(weights, x)


def native_calls(text: str) -> list[str]:
    """Return the passes of the operator that the native library runs."""
    return re.findall(r"custom_call @ostinato_(rnn_\w+)", text)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("spec", [SPEC, BEFORE], ids=["after", "before"])
def test_what_is_explained_is_what_is_compiled(spec, dtype):
    x = jax.ShapeDtypeStruct((1, 2, 2), jnp.dtype(dtype))
    native = ost.explain(spec, x).backend == "cpu"
    found = native_calls(traced(spec, dtype).lower().as_text())
    assert found == (["rnn_fwd", "rnn_bwd"] if native else [])


@needs_cpu
def test_cpu_says_what_it_does_not_run():
    def reason(spec, dtype):
        x = jax.ShapeDtypeStruct((1, 2, 2), jnp.dtype(dtype))
        return ost.explain(spec, x).rejected.get("cpu", "")

    assert reason(SPEC, "bfloat16") == ""
    assert "float16" in reason(SPEC, "float16")
    assert "reset_after=False" in reason(BEFORE, "float32")


def test_xla_asked_for_is_xla():
    assert native_calls(traced(backend="xla").lower().as_text()) == []


@needs_cpu
def test_every_platform_gets_its_own_form():
    lowered = traced().lower(lowering_platforms=("cpu", "tpu"))
    assert native_calls(lowered.as_text()) == ["rnn_fwd", "rnn_bwd"]
    assert native_calls(traced().lower(lowering_platforms=("tpu",)).as_text()) == []


@needs_cpu
def test_cpu_asked_for_on_another_platform_raises_when_compiling():
    with pytest.raises(ost.BackendError, match="compiled for tpu"):
        traced(backend="cpu").lower(lowering_platforms=("tpu",))


@needs_cpu
def test_export_holds_no_call_of_the_native_library():
    """Check that exported programs run where the native library is missing."""

    def run(weights, x):
        return ost.rnn(SPEC, ost.prepare(SPEC, weights), x).y

    def asked(weights, x):
        return ost.rnn(SPEC, weights, x, backend="cpu").y

    weights, x = jnp.zeros(SPEC.num_params), jnp.ones((1, 2, 2))
    assert native_calls(export.export(jax.jit(run))(weights, x).mlir_module()) == []
    with pytest.raises(ost.BackendError, match="jax.export"):
        export.export(jax.jit(asked))(weights, x)


@needs_cpu
def test_tangents_run_on_xla():
    """Check that tangents ignore `backend`: their operator exists in XLA only."""

    def tangent(weights):
        x = jnp.ones((1, 2, 2))
        run = lambda w: ost.rnn(SPEC, w, x, backend="cpu").y  # noqa: E731
        return jax.jvp(run, (weights,), (weights,))

    text = jax.jit(tangent).lower(jnp.zeros(SPEC.num_params)).as_text()
    assert native_calls(text) == ["rnn_fwd"] and "stablehlo.while" in text
