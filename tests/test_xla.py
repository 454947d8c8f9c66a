"""Tests of the reference backend on every platform, and of what it compiles to."""

import re

import jax
import jax.numpy as jnp
import pytest
from compile_options import usual_jit
from conformance import Conformance

import ostinato as ost


class TestXla(Conformance):
    backend = "xla"


# All sizes differ, so that shapes in the text identify their arrays.
T, B, I, H = 7, 3, 11, 5  # noqa: E741
DOT = re.compile(
    r"dot_general .*?precision = \[(\w+), (\w+)\] : "
    r"\(tensor<(\S+)xf32>, tensor<(\S+)xf32>\) -> tensor<(\S+)xf32>"
)


def lowered(spec, loss=False, **options) -> str:
    shape = (T, B, I) if options.get("time_major") else (B, T, I)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = jax.ShapeDtypeStruct((spec.num_params,), jnp.float32)

    def run(weights, x):
        out = ost.rnn(spec, weights, x, backend="xla", **options)
        return jnp.sum(out.y) if loss else out

    fn = jax.grad(run, (0, 1)) if loss else run
    return jax.jit(fn).lower(weights, x).as_text()


def dots(text: str) -> list[tuple]:
    """Return precision and the three shapes of every matrix product in the text.

    Products with a vector of ones are sums, so they are left out.
    """
    found = DOT.findall(text)
    assert len(found) == text.count("dot_general")
    every = [
        (precision, *(tuple(map(int, s.split("x"))) for s in shapes))
        for precision, _, *shapes in found
    ]
    return [d for d in every if len(d[1]) > 1 and 1 not in (d[1][-1], d[2][-1])]


@pytest.mark.parametrize("mode, gates", [("rnn_tanh", 1), ("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("time_major", [False, True])
def test_input_product_of_a_layer_is_one_over_all_steps(mode, gates, time_major):
    """Check also that the product in the loop has one row per sequence."""
    spec = ost.RNNSpec(mode, I, H)
    found = dots(lowered(spec, time_major=time_major))
    inputs = [d for d in found if (gates * H, I) in d[1:3]]
    recurrent = [d for d in found if d not in inputs]
    assert len(inputs) == 1 and set(inputs[0][3]) == {T, B, gates * H}
    assert [d[3] for d in recurrent] == [(B, gates * H)]


def test_weight_gradients_are_one_product_over_all_steps():
    """Check that the loop adds up nothing of the size of a weight matrix."""
    found = dots(lowered(ost.RNNSpec("lstm", I, H), loss=True, time_major=True))
    results = sorted(d[3] for d in found)
    for columns in (I, H):
        assert results.count((4 * H, columns)) + results.count((columns, 4 * H)) == 1
    in_loop = [r for r in results if r in ((B, H), (B, 4 * H))]
    assert len(in_loop) == 2  # one product per step forward, one backward


def test_time_major_makes_no_transposed_copy():
    assert "transpose" not in lowered(ost.RNNSpec("gru", I, H), time_major=True)


def test_precision_reaches_every_product_and_its_gradient():
    spec = ost.RNNSpec("lstm", I, H, 2, proj_size=2)
    for loss in (False, True):
        plain = {d[0] for d in dots(lowered(spec, loss))}
        named = {d[0] for d in dots(lowered(spec, loss, precision="highest"))}
        value = jax.lax.Precision.HIGH
        given = {d[0] for d in dots(lowered(spec, loss, precision=value))}
        with jax.default_matmul_precision("highest"):
            default = {d[0] for d in dots(lowered(spec, loss))}
        assert plain == {"DEFAULT"} and given == {"HIGH"}
        assert named == default == {"HIGHEST"}


def test_recompute_runs_the_gates_again_as_products_over_all_steps():
    """Check for two more products, input and recurrent, each over all steps."""
    spec = ost.RNNSpec("lstm", I, H)
    stored = dots(lowered(spec, loss=True, time_major=True))
    again = dots(lowered(spec, loss=True, time_major=True, recompute=True))
    results = [d[3] for d in again]
    for d in stored:
        results.remove(d[3])
    assert len(results) == 2
    assert all(set(r) in ({T, B, 4 * H}, {T * B, 4 * H}) for r in results)


def test_recompute_brings_temporary_bytes_under_60_percent():
    spec = ost.RNNSpec("lstm", 128, 128, 2)
    x = jax.ShapeDtypeStruct((16, 500, 128), jnp.float32)
    weights = jax.ShapeDtypeStruct((spec.num_params,), jnp.float32)

    def temporary(recompute):
        def loss(weights, x):
            out = ost.rnn(spec, weights, x, backend="xla", recompute=recompute)
            return jnp.sum(out.y**2)

        compiled = usual_jit(jax.value_and_grad(loss)).lower(weights, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(True) < 0.6 * temporary(False)
