"""Random step functions in the native loop, against `lax.scan` of the same step."""

import hypothesis
import jax
import numpy as np
import pytest
import random_steps
from closures import fast_jit
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import OPERATIONS, Spec

import ostinato as ost

needs_cpu = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
sizes = st.integers(1, 7) | st.sampled_from([9, 17])


@st.composite
def specs(draw) -> Spec:
    which = st.integers(0, 9)
    operation = st.tuples(st.sampled_from(list(OPERATIONS)), which, which, which)
    batch = draw(st.sampled_from([1, 2, 3, 9, 17]))
    feature = sizes | st.just(batch)
    return Spec(
        draw(st.lists(operation, min_size=1, max_size=10)),
        draw(st.lists(feature, min_size=1, max_size=3)),
        draw(feature),
        batch,
    )


def program_of(spec, steps, option, dtype, backend):
    """Return a function to results and all gradients, and its arguments."""
    step, params, states = random_steps.make(spec)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((steps, spec.batch, spec.inputs))
    options = {}
    if option == "lengths":
        lengths = rng.integers(0, steps + 1, spec.batch)
        x[np.arange(steps)[:, None] >= lengths] = np.nan
        options["seq_lengths"] = lengths
    elif option == "resets":
        options["resets"] = rng.random((steps, spec.batch)) < 0.4
    elif option == "reverse":
        options["reverse"] = True

    def run(params, states, x):
        out = ost.recurrent_net(
            step, x, states, params=params, time_major=True, backend=backend, **options
        )
        return out.outputs, out.states

    def both(*arguments):
        """Pull back constants: the sum of a loss would be more operations to trace."""
        results, pull = jax.vjp(run, *arguments)
        draw = np.random.default_rng(6).standard_normal
        bar = jax.tree.map(lambda a: draw(a.shape).astype(dtype), results)
        return {"results": results, "gradients": pull(bar)}

    arguments = jax.tree.map(lambda a: np.asarray(a, dtype), (params, states, x))
    return fast_jit(both), arguments


def results_of(*case):
    """Return outputs, states and gradients of everything."""
    function, arguments = program_of(*case)
    return function(*arguments)


def assert_same(got, want, dtype):
    rtol = 1e-8 if dtype == "float64" else 3e-4
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.dtype == b.dtype == dtype
        name = jax.tree_util.keystr(path)
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale, err_msg=name)


@needs_cpu
@settings(max_examples=15)
@given(
    spec=specs(),
    steps=st.sampled_from([4, 1, 0]),
    option=st.sampled_from([None, "lengths", "resets", "reverse"]),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_random_steps(spec, steps, option, dtype):
    try:
        got = results_of(spec, steps, option, dtype, "cpu")
    except NotImplementedError as error:
        assert "cpu loop" in str(error)
        hypothesis.reject()
    want = results_of(spec, steps, option, dtype, "scan")
    # XLA may compute twice, and differently, what it takes a maximum of; then no
    # element is the maximum, and its gradient is 0 / 0.
    hypothesis.assume(all(np.isfinite(a).all() for a in jax.tree.leaves(want)))
    assert_same(got, want, dtype)


@pytest.mark.alike
@needs_cpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_runs_in_the_native_loop(name):
    if name == "erf" and random_steps.ERF_HAS_BITS:
        pytest.skip("the derivative of erf has bits in this JAX, and runs on xla")
    spec = Spec([("matrix", 0, 2, 0), (name, 0, 1, 2)], [5, 3], 4, 3)
    function, arguments = program_of(spec, 2, None, "float64", "cpu")
    lowered = function.lower(*arguments)
    calls = lowered.as_text().count("custom_call @ostinato_step(")
    assert calls == 2, "forward and backward"
    got = lowered.compile()(*arguments)
    assert_same(got, results_of(spec, 2, None, "float64", "scan"), "float64")
