"""Tests of bad input: errors name the argument, what was wanted and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_says

import ostinato as ost

T, B, I, H = 4, 3, 5, 7  # noqa: E741
LSTM = ost.RNNSpec("lstm", I, H, 2)
BIDIRECTIONAL = ost.RNNSpec("gru", I, H, bidirectional=True)
GRU = ost.RNNSpec("gru", I, H)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def weights_of(spec, dtype=jnp.float32):
    return zeros(spec.num_params, dtype=dtype)


def call(spec=LSTM, weights=None, x=None, *args, **options):
    weights = weights_of(spec) if weights is None else weights
    return ost.rnn(spec, weights, zeros(B, T, I) if x is None else x, *args, **options)


STATE = zeros(2, B, H)
# The call, the exception, and words that the message must contain.
CALLS = {
    # x
    "x-rank-1": (lambda: call(x=zeros(I)), ValueError, "`x` [B, T, I] [T, I] [5]"),
    "x-rank-4": (lambda: call(x=zeros(1, B, T, I)), ValueError, "`x` [1, 3, 4, 5]"),
    "x-rank-time-major": (
        lambda: call(x=zeros(I), time_major=True),
        ValueError,
        "`x` [T, B, I] [T, I]",
    ),
    "x-features": (
        lambda: call(x=zeros(B, T, I + 1)),
        ValueError,
        "`x` input_size=5 6",
    ),
    "x-list": (lambda: call(x=[[[0.0] * I]]), TypeError, "`x` array list"),
    "x-none": (lambda: ost.rnn(LSTM, weights_of(LSTM), None), TypeError, "`x` None"),
    "x-int": (
        lambda: call(x=zeros(B, T, I, dtype=jnp.int32)),
        TypeError,
        "`x` float32 bfloat16 float64 float16 int32",
    ),
    "x-complex": (
        lambda: call(x=zeros(B, T, I, dtype=jnp.complex64)),
        TypeError,
        "`x` float32 complex64",
    ),
    "x-other-dtype": (
        lambda: call(x=zeros(B, T, I, dtype=jnp.float64)),
        TypeError,
        "`weights` `x` float64 float32",
    ),
    # spec and weights
    "spec-string": (
        lambda: ost.rnn("lstm", weights_of(LSTM), zeros(B, T, I)),
        TypeError,
        "`spec` RNNSpec str 'lstm'",
    ),
    "weights-list": (
        lambda: call(weights=[0.5]),
        TypeError,
        "`weights` array list",
    ),
    "weights-layers": (
        lambda: call(weights=ost.unpack_weights(weights_of(LSTM), LSTM)),
        TypeError,
        "`weights` [num_params] layers pack_weights(weights, spec)",
    ),
    "weights-length": (
        lambda: call(weights=zeros(9)),
        ValueError,
        f"`weights` [{LSTM.num_params}] mode='lstm' input_size=5 hidden_size=7 "
        "num_layers=2 bidirectional=False proj_size=0 bias='double' [9]",
    ),
    "weights-rank": (
        lambda: call(weights=weights_of(LSTM)[None]),
        ValueError,
        f"`weights` [{LSTM.num_params}] [1, {LSTM.num_params}]",
    ),
    # initial_state
    "state-one-for-lstm": (
        lambda: call(LSTM, None, None, STATE),
        TypeError,
        "`initial_state` (h, c) 'lstm' float32[2, 3, 7]",
    ),
    "state-three-for-lstm": (
        lambda: call(LSTM, None, None, (STATE,) * 3),
        TypeError,
        "`initial_state` (h, c) tuple 3",
    ),
    "state-two-for-gru": (
        lambda: call(GRU, None, None, (STATE, STATE)),
        TypeError,
        "`initial_state` one 'gru' tuple 2",
    ),
    "state-no-array": (lambda: call(GRU, None, None, 0.0), TypeError, "initial_state"),
    "state-batch": (
        lambda: call(LSTM, None, None, (STATE, zeros(2, 1, H))),
        ValueError,
        "`initial_state[1]` (2, 3, 7) (2, 1, 7)",
    ),
    "state-layers": (
        lambda: call(BIDIRECTIONAL, None, None, zeros(1, B, H)),
        ValueError,
        "`initial_state` (2, 3, 7) (1, 3, 7)",
    ),
    "state-no-batch-axis": (
        lambda: call(GRU, None, None, zeros(1, H)),
        ValueError,
        "`initial_state` (1, 3, 7) (1, 7)",
    ),
    "state-batch-axis-for-one-sequence": (
        lambda: call(GRU, None, zeros(T, I), zeros(1, 1, H)),
        ValueError,
        "`initial_state` (1, 7) (1, 1, 7)",
    ),
    "state-dtype": (
        lambda: call(LSTM, None, None, (STATE, STATE.astype(jnp.float64))),
        TypeError,
        "`initial_state[1]` float32 float64",
    ),
    "state-projection": (
        lambda: call(
            ost.RNNSpec("lstm", I, H, proj_size=2), None, None, (STATE[:1], STATE[:1])
        ),
        ValueError,
        "`initial_state[0]` (1, 3, 2) (1, 3, 7)",
    ),
    # seq_lengths
    "lengths-above": (
        lambda: call(seq_lengths=[1, 5, 2]),
        ValueError,
        "`seq_lengths` 0..4 5 sequence 1",
    ),
    "lengths-below": (
        lambda: call(seq_lengths=jnp.array([1, 2, -1])),
        ValueError,
        "`seq_lengths` 0..4 -1 sequence 2",
    ),
    "lengths-wide": (
        lambda: call(seq_lengths=np.array([0, 2**32, 0])),
        ValueError,
        f"`seq_lengths` 0..4 {2**32}",
    ),
    "lengths-float": (
        lambda: call(seq_lengths=jnp.ones(B)),
        TypeError,
        "`seq_lengths` integers float64[3]",
    ),
    "lengths-bool": (
        lambda: call(seq_lengths=np.ones(B, bool)),
        TypeError,
        "`seq_lengths` integers bool[3]",
    ),
    "lengths-shape": (
        lambda: call(seq_lengths=np.ones(B + 1, int)),
        ValueError,
        "`seq_lengths` (B) (3,) (4,)",
    ),
    "lengths-scalar-for-a-batch": (
        lambda: call(seq_lengths=2),
        ValueError,
        "`seq_lengths` (3,) ()",
    ),
    "lengths-vector-for-one-sequence": (
        lambda: call(x=zeros(T, I), seq_lengths=[2]),
        ValueError,
        "`seq_lengths` () (1,)",
    ),
    "lengths-one-sequence": (
        lambda: call(x=zeros(T, I), seq_lengths=9),
        ValueError,
        "`seq_lengths` 0..4 9",
    ),
    # resets
    "resets-bidirectional": (
        lambda: call(BIDIRECTIONAL, resets=jnp.zeros((B, T), bool)),
        ValueError,
        "`resets` unidirectional bidirectional=True",
    ),
    "resets-int": (
        lambda: call(resets=zeros(B, T, dtype=jnp.int32)),
        TypeError,
        "`resets` bool int32[3, 4]",
    ),
    "resets-list": (lambda: call(resets=[True]), ValueError, "`resets` (B, T) (1,)"),
    "resets-numbers": (
        lambda: call(resets=[[0] * T] * B),
        TypeError,
        "`resets` bool int64[3, 4]",
    ),
    "resets-shape": (
        lambda: call(resets=jnp.zeros((T, B), bool)),
        ValueError,
        "`resets` (B, T) (3, 4) (4, 3)",
    ),
    "resets-shape-time-major": (
        lambda: call(x=zeros(T, B, I), resets=jnp.zeros((B, T), bool), time_major=True),
        ValueError,
        "`resets` (T, B) (4, 3) (3, 4)",
    ),
    "resets-shape-one-sequence": (
        lambda: call(x=zeros(T, I), resets=jnp.zeros((1, T), bool)),
        ValueError,
        "`resets` (4,) (1, 4)",
    ),
    "x-byte-order": (
        lambda: call(x=np.ones((B, T, I), ">f4")),
        TypeError,
        "`x` byte order >f4[3, 4, 5] astype",
    ),
    "x-objects": (
        lambda: call(x=np.ones((B, T, I), object)),
        TypeError,
        "`x` numbers |O[3, 4, 5]",
    ),
    "x-masked": (
        lambda: call(x=np.ma.ones((B, T, I))),
        ValueError,
        "`x` masked arrays filled",
    ),
    "padding-array": (
        lambda: call(padding=np.array(["zero", "hold"])),
        ValueError,
        "`padding`",
    ),
    # key
    "key-int": (lambda: call(key=0), TypeError, "`key` PRNG jax.random.key int 0"),
    "key-float": (lambda: call(key=zeros(2)), TypeError, "`key` PRNG float32[2]"),
    "key-many": (
        lambda: call(key=jax.random.split(jax.random.key(0), 3)),
        TypeError,
        "`key` one [3]",
    ),
    # options
    "padding": (
        lambda: call(padding="same"),
        ValueError,
        "`padding` 'zero' 'hold' 'drop' 'same'",
    ),
    "padding-none": (lambda: call(padding=None), ValueError, "`padding` None"),
    "backend": (
        lambda: call(backend="tpu"),
        ValueError,
        "`backend` 'xla' 'cpu' 'cuda' 'tpu'",
    ),
    "time_major": (lambda: call(time_major=1), TypeError, "`time_major` True 1"),
    "recompute": (lambda: call(recompute="yes"), TypeError, "`recompute` 'yes'"),
    "precision": (lambda: call(precision="exact"), ValueError, "`precision` 'exact'"),
    "precision-unhashable": (
        lambda: call(precision={}),
        (TypeError, ValueError),
        "`precision` {}",
    ),
    # rnn_step
    "step-bidirectional": (
        lambda: ost.rnn_step(BIDIRECTIONAL, weights_of(BIDIRECTIONAL), zeros(B, I)),
        ValueError,
        "`spec` unidirectional bidirectional=True",
    ),
    "step-rank": (
        lambda: ost.rnn_step(GRU, weights_of(GRU), zeros(B, T, I)),
        ValueError,
        "`x_t` [B, I] [I] [3, 4, 5]",
    ),
    "step-features": (
        lambda: ost.rnn_step(GRU, weights_of(GRU), zeros(B, 2)),
        ValueError,
        "`x_t` input_size=5 2",
    ),
    "step-dtype": (
        lambda: ost.rnn_step(GRU, weights_of(GRU), zeros(B, I, dtype=jnp.int32)),
        TypeError,
        "`x_t` float32 int32",
    ),
    "step-state": (
        lambda: ost.rnn_step(GRU, weights_of(GRU), zeros(B, I), zeros(1, 1, H)),
        ValueError,
        "`state` (1, 3, 7) (1, 1, 7)",
    ),
    "step-state-dtype": (
        lambda: ost.rnn_step(
            GRU, weights_of(GRU), zeros(B, I), zeros(1, B, H, dtype=jnp.bfloat16)
        ),
        TypeError,
        "`x_t` float32 `state` bfloat16",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_argument_raises_with_name_want_and_got(name):
    run, error, words = CALLS[name]
    with pytest.raises(error) as info:
        run()
    assert_says(info, words)


@pytest.mark.parametrize("name", ["x-features", "weights-length", "resets-shape"])
def test_bad_argument_raises_under_jit_too(name):
    run, error, words = CALLS[name]
    with pytest.raises(error) as info:
        jax.jit(run)()
    assert_says(info, words)


def test_good_arguments_raise_nothing():
    """Check that the arguments are valid before the cases above change one of them."""
    y, (h_n, c_n) = call(
        LSTM,
        None,
        None,
        (STATE, STATE),
        seq_lengths=[1, 4, 0],
        resets=jnp.zeros((B, T), bool),
        key=jax.random.key(0),
        precision="highest",
    )
    assert y.shape == (B, T, H) and h_n.shape == c_n.shape == (2, B, H)
    step = ost.rnn_step(GRU, weights_of(GRU), zeros(B, I), zeros(1, B, H))
    assert step.y.shape == (B, H)


def test_concrete_lengths_are_checked_under_jit():
    lengths = jnp.array([1, 9, 2])
    with pytest.raises(ValueError) as info:
        jax.jit(lambda x: call(x=x, seq_lengths=lengths))(zeros(B, T, I))
    assert_says(info, "`seq_lengths` 0..4 9 sequence 1")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_traced_lengths_of_every_width_are_clamped(dtype):
    """Check lengths of every dtype, including those that cannot hold T."""
    spec, steps = ost.RNNSpec("rnn_tanh", 1, 1), 300
    run = jax.jit(
        lambda lengths: ost.rnn(
            spec, jnp.full(4, 0.5), jnp.ones((2, steps, 1)), seq_lengths=lengths
        )
    )
    y, _ = run(jnp.array([100, 3], dtype))
    assert (np.count_nonzero(y[..., 0], axis=1) == [100, 3]).all()
    if not dtype.startswith("u"):
        y, _ = run(jnp.array([100, -3], dtype))
        assert (np.count_nonzero(y[..., 0], axis=1) == [100, 0]).all()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_missing_backend_raises_with_the_reason(name):
    status = ost.backends()[name]
    if status.available:
        pytest.skip(f"this machine has the backend {name}")
    with pytest.raises(ost.BackendError) as info:
        call(backend=name)
    assert name in str(info.value) and isinstance(info.value, RuntimeError)
    assert status.detail
    explained = ost.explain(LSTM, zeros(B, T, I))
    assert explained.backend != name and explained.rejected[name] in str(info.value)


def test_backend_without_the_dtype_raises():
    x = zeros(B, T, I, dtype=jnp.float16)
    with pytest.raises(ost.BackendError, match="cpu"):
        call(LSTM, weights_of(LSTM, jnp.float16), x, backend="cpu")
