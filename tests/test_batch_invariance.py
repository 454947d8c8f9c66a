"""Tests that `RNNSpec(batch_invariant=True)` gives the same bits in every batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import export
from tolerance import assert_same_bits

import ostinato as ost

needs_cpu = pytest.mark.skipif(
    not ost.backends()["cpu"], reason=f"no cpu backend: {ost.backends()['cpu'].detail}"
)
SPECS = {
    "lstm": ost.RNNSpec("lstm", 20, 33, proj_size=17, batch_invariant=True),
    "gru": ost.RNNSpec("gru", 20, 40, 2, bidirectional=True, batch_invariant=True),
    "rnn": ost.RNNSpec("rnn_tanh", 20, 70, 2, batch_invariant=True),
}
MOST = 17


@needs_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", SPECS)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(name, dtype):
    spec = SPECS[name]
    weights = ost.init_weights(jax.random.key(0), spec, dtype)
    x = jax.random.normal(jax.random.key(1), (MOST, 3, 20), dtype)
    dy_shape = (MOST, 3, spec.num_directions * spec.output_size)
    dy = jax.random.normal(jax.random.key(2), dy_shape, dtype)
    lengths = jnp.asarray(3 - np.arange(MOST) % 4, jnp.int32)

    @fast_jit
    def run(x, dy, lengths):
        call = lambda x: ost.rnn(spec, weights, x, seq_lengths=lengths)  # noqa: E731
        (y, state), pull = jax.vjp(call, x)
        zeros = jax.tree.map(jnp.zeros_like, state)
        return y, pull(ost.RNNOutput(dy, zeros))[0]

    for steps in (1, 3):
        arguments = x[:, :steps], dy[:, :steps], lengths.clip(0, steps)
        whole = run(*arguments)
        for batch in (1, 4):
            part = run(*(a[:batch] for a in arguments))
            for name, got, want in zip(("y", "dx"), part, whole, strict=True):
                assert_same_bits(got, want[:batch], f"{name}, {steps=}, {batch=}")


@needs_cpu
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "mode, dtype",
    [
        *((m, d) for m in ("lstm", "slstm") for d in ("float32", "float64")),
        *((m, d) for m in ("gru", "rnn_tanh") for d in ("float32", "bfloat16")),
    ],
)
def test_steps_have_the_bits_of_the_whole_sequence(mode, dtype, prepared):
    """In bfloat16 those of an LSTM have others: `c` is rounded between calls."""
    spec = ost.RNNSpec(mode, 20, 33, 2, batch_invariant=True)
    weights = ost.init_weights(jax.random.key(0), spec, dtype)
    x = jax.random.normal(jax.random.key(1), (3, 6, 20), dtype)
    whole = ost.rnn(spec, weights, x)
    if prepared:
        weights = ost.prepare(spec, weights)
    for b in range(3):
        state = None
        for t in range(6):
            y, state = ost.rnn_step(spec, weights, x[b, t], state)
            assert_same_bits(y, whole.y[b, t])
    session = ost.stream(spec, weights, 3)
    y = [session.step(np.asarray(x[:, t]))[:, None] for t in range(3)]
    y.append(session.chunk(np.asarray(x[:, 3:])))
    assert_same_bits(np.concatenate(y, 1), whole.y)


@pytest.mark.parametrize(
    "change, dtype, reason",
    [
        ({}, "float16", "no kernels for float16"),
        ({"mode": "gru", "reset_after": False}, "float32", "reset_after=False"),
    ],
)
@needs_cpu
def test_a_call_that_no_backend_can_keep_the_promise_for_is_an_error(
    change, dtype, reason
):
    spec = ost.RNNSpec(**{"mode": "lstm", "input_size": 2, "hidden_size": 3} | change)
    ost.rnn(spec, jnp.zeros(spec.num_params, dtype), jnp.zeros((1, 2, 2), dtype))
    spec = ost.RNNSpec(
        **{"mode": "lstm", "input_size": 2, "hidden_size": 3, "batch_invariant": True}
        | change
    )
    weights, x = jnp.zeros(spec.num_params, dtype), jnp.zeros((1, 2, 2), dtype)
    with pytest.raises(ost.BackendError, match=rf"(?s)cpu: .*{reason}.*xla: XLA sums"):
        ost.rnn(spec, weights, x)
    with pytest.raises(ost.BackendError, match=rf"(?s)cpu: .*{reason}.*xla: XLA sums"):
        ost.explain(spec, x)


def test_the_xla_backend_refuses():
    spec = SPECS["lstm"]
    weights, x = jnp.zeros(spec.num_params), jnp.zeros((1, 2, 20))
    with pytest.raises(ost.BackendError, match="size of the batch.*backend=None$"):
        ost.rnn(spec, weights, x, backend="xla")


@needs_cpu
def test_an_export_is_refused():
    spec = SPECS["lstm"]
    run = jax.jit(lambda w, x: ost.rnn(spec, w, x).y)
    weights = jax.ShapeDtypeStruct((spec.num_params,), jnp.float32)
    with pytest.raises(ost.BackendError, match="jax.export"):
        export.export(run)(weights, jax.ShapeDtypeStruct((1, 2, 20), jnp.float32))


def test_the_field_must_be_a_bool():
    with pytest.raises(TypeError, match="batch_invariant"):
        ost.RNNSpec("gru", 2, 3, batch_invariant="yes")  # type: ignore[arg-type]
