"""Sessions of `ost.stream`: the numbers of `rnn_step`, on every backend."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from harness import spec_of
from oracles import loop64
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import _native
from ostinato._rnn import streaming
from ostinato._rnn.spec import state_shapes

needs_library = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
FORWARD = [
    case
    for case in CASES
    if not (case.spec.bidirectional or case.resets or case.keyed or case.unbatched)
    and case.padding == "zero"
    and case.steps < 20
    and case.batch
]
SPEC = ost.RNNSpec("lstm", 3, 5, num_layers=2)


def draw(spec, batch, steps, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    weights = 0.5 * rng.standard_normal(spec.num_params)
    x = rng.standard_normal((batch, steps, spec.input_size))
    return jnp.asarray(weights, dtype), np.asarray(x, jnp.dtype(dtype))


def assert_states_close(session, result, terms):
    state = session.state
    wanted = list(result[1:])
    if (
        isinstance(state, tuple) and len(state) == 4
    ):  # the oracle has the cell states of an sLSTM in one array
        wanted[1:] = np.moveaxis(wanted[1], 2, 0)
    for got, want in zip(
        state if isinstance(state, tuple) else (state,), wanted, strict=False
    ):
        assert_close(got, want, terms=terms)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.id)
def test_chunks_and_steps_equal_the_float64_loop(case, backend):
    """Steps first, a chunk then: each goes on from the states of the other."""
    spec, batch, steps = spec_of(case), case.batch, case.steps
    weights, x = draw(spec, batch, steps, "float64")
    rng = np.random.default_rng(1)
    states = [rng.standard_normal(s) for s in state_shapes(spec, batch)]
    if case.slstm:
        states[2] = 0.5 + np.abs(states[2])  # n, which counts what c has in it
    cells = [np.stack(states[1:], 2) if case.slstm else c for c in states[1:2]]
    want = loop64.forward(case.spec, weights, x, states[0], *cells)
    session = ost.stream(spec, weights, batch, backend=backend)
    session.state = tuple(states) if len(states) > 1 else states[0]
    first = min(2, steps)
    y = [session.step(x[:, t]) for t in range(first)]
    rest = session.chunk(x[:, first:])
    assert rest.shape == (batch, steps - first, spec.output_size)
    if steps:
        y = np.concatenate([np.stack(y, 1), rest], 1)
        assert_close(y, want.y, terms=case.terms)
    assert_states_close(session, want, case.terms)


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_steps_have_the_bits_of_rnn_step_with_prepared_weights(mode, dtype):
    spec = ost.RNNSpec(mode, 7, 21, num_layers=2)
    weights, x = draw(spec, 3, 4, dtype)
    prepared = ost.prepare(spec, weights)
    run = jax.jit(lambda x_t, state: ost.rnn_step(spec, prepared, x_t, state))
    session, state = ost.stream(spec, prepared, 3), None
    assert session.backend == "cpu" and session.dtype == dtype
    for t in range(4):
        y, state = run(x[:, t], state)
        assert_same_bits(session.step(x[:, t]), y)
    jax.tree.map(assert_same_bits, session.state, state)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_streams_without_input_keep_their_states(backend):
    weights, x = draw(SPEC, 3, 4)
    session = ost.stream(SPEC, weights, 3, backend=backend)
    session.chunk(x)
    before = session.state
    x[1] = np.nan
    y = session.step(x[:, 0], active=[True, False, True])
    assert not y[1].any() and y[0].all()
    for now, old in zip(session.state, before, strict=True):
        assert_same_bits(now[:, 1], old[:, 1])
        assert (now[:, ::2] != old[:, ::2]).all()
    want = ost.rnn(SPEC, weights, x, session.state, seq_lengths=jnp.array([2, 0, 4]))
    assert_close(session.chunk(x, [2, 0, 4]), want.y, terms=100)
    assert_states_close(session, (None, *want.state), 100)
    assert session.step(np.nan_to_num(x[:, 0])).all()  # all of them again


@pytest.mark.parametrize(
    "which", [None, 1, [0, 2], np.array([True, False, True]), np.array([2], np.uint8)]
)
def test_reset_begins_streams_anew(which):
    weights, x = draw(SPEC, 3, 4)
    session = ost.stream(SPEC, weights, 3)
    session.chunk(x)
    before = session.state
    session.reset(which)
    chosen = np.zeros(3, bool)
    chosen[slice(None) if which is None else which] = True
    for now, old in zip(session.state, before, strict=True):
        assert not now[:, chosen].any()
        assert_same_bits(now[:, ~chosen], old[:, ~chosen])
    fresh = ost.stream(SPEC, weights, 3)
    assert_close(session.step(x[:, 0])[chosen], fresh.step(x[:, 0])[chosen], terms=40)


def test_the_state_is_a_copy_that_can_be_put_back():
    weights, x = draw(SPEC, 2, 6)
    session = ost.stream(SPEC, weights, 2)
    session.chunk(x[:, :3])
    saved = session.state
    later = session.chunk(x[:, 3:])
    saved_again = tuple(a.copy() for a in saved)
    assert all((a == b).all() for a, b in zip(saved, saved_again, strict=True))
    other = ost.stream(SPEC, weights, 2)
    other.state = saved
    assert_same_bits(other.chunk(x[:, 3:]), later)
    outputs = session.step(x[:, 0])
    kept = outputs.copy()
    session.step(x[:, 1])
    assert_same_bits(outputs, kept)  # results are not overwritten


def test_inputs_are_converted():
    weights, x = draw(SPEC, 2, 1)
    numbers = np.round(4 * x[:, 0])
    sessions = [ost.stream(SPEC, weights, 2) for _ in range(4)]
    inputs = numbers, numbers.astype(int), numbers.tolist(), jnp.asarray(numbers)
    y = [s.step(given) for s, given in zip(sessions, inputs, strict=True)]
    assert all(one.dtype == np.float32 and (one == y[0]).all() for one in y)
    transposed = np.asfortranarray(numbers)
    assert_same_bits(ost.stream(SPEC, weights, 2).step(transposed), y[0])
    steps = np.asfortranarray(np.stack([numbers, numbers], 1).astype(np.float64))
    assert_close(ost.stream(SPEC, weights, 2).chunk(steps)[:, 0], y[0], terms=20)


def test_steps_of_many_streams(monkeypatch):
    weights, x = draw(SPEC, 7, 3)
    few, many = (ost.stream(SPEC, weights, 7) for _ in range(2))

    def in_place(*arguments):
        with monkeypatch.context() as large:
            large.setattr(streaming, "MOST_COPIED", 0)
            return many.step(*arguments)

    for t in range(3):
        active = np.arange(7) % 3 != t
        assert_same_bits(in_place(x[:, t], active), few.step(x[:, t], active))
    assert_same_bits(in_place(x[:, 0]), few.step(x[:, 0]))
    jax.tree.map(assert_same_bits, many.state, few.state)


@needs_library
def test_sessions_share_prepared_weights():
    weights, _ = draw(SPEC, 1, 1)
    prepared = ost.prepare(SPEC, weights)
    sessions = [ost.stream(SPEC, prepared, 1) for _ in range(2)]
    given = np.asarray(prepared.packed)
    assert all(np.shares_memory(s._kept[1], given) for s in sessions)
    damaged = prepared._replace(packed=jnp.zeros_like(prepared.packed))
    session = ost.stream(SPEC, damaged, 1)
    assert_same_bits(session._kept[1], given)


def test_sessions_of_several_threads():
    weights, x = draw(SPEC, 2, 50)
    want = ost.stream(SPEC, weights, 2).chunk(x)
    prepared, found = ost.prepare(SPEC, weights), {}

    def serve(name):
        session = ost.stream(SPEC, prepared, 2)
        found[name] = np.stack([session.step(x[:, t]) for t in range(50)], 1)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for y in found.values():
        assert_close(y, want, terms=500)


def test_a_session_refuses_a_second_thread():
    weights, x = draw(SPEC, 2, 3)
    session = ost.stream(SPEC, weights, 2)
    session._free.acquire()
    with pytest.raises(RuntimeError, match="one thread at a time, and another thread"):
        session.step(x[:, 0])
    with pytest.raises(RuntimeError, match="make a session for each thread"):
        session.chunk(x)
    session._free.release()
    with pytest.raises(ValueError, match="`x` must have"):
        session.step(x)
    assert session.step(x[:, 0]).all()  # an error leaves it free


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda s: s.step(np.ones(3)), ValueError, r"\(B, I\) = \(2, 3\), got \(3,\)"),
        (lambda s: s.step(np.ones((2, 3), complex)), TypeError, "convert to float32"),
        (lambda s: s.step(np.ones((2, 3)), [1, 0]), TypeError, "`active` must be bool"),
        (lambda s: s.chunk(np.ones((2, 3))), ValueError, r"shape \[B, T, I\], got \[2"),
        (lambda s: s.chunk(np.ones((2, 4, 1))), ValueError, r"\(B, T, I\) = \(2, 4, 3"),
        (lambda s: s.chunk(np.ones((2, 4, 3)), [4, 5]), ValueError, r"0..T = 0..4, go"),
        (lambda s: s.reset([2]), IndexError, "index 2 is out of bounds"),
        (lambda s: s.reset([True]), ValueError, r"`streams` must have shape \(B\)"),
        (lambda s: s.reset([0.5]), TypeError, "`streams` must hold integers"),
        (lambda s: setattr(s, "state", 1), TypeError, r"`state` must be \(h, c\) for"),
        (lambda s: setattr(s, "state", (1, 1)), ValueError, r"`state\[0\]` must have"),
    ],
)
def test_errors_of_a_session(call, error, message):
    session = ost.stream(SPEC, draw(SPEC, 2, 1)[0], 2)
    with pytest.raises(error, match=message):
        call(session)


def test_errors_of_stream():
    weights, _ = draw(SPEC, 1, 1)
    with pytest.raises(ValueError, match="must be unidirectional for `stream`, got"):
        ost.stream(ost.RNNSpec("gru", 3, 5, bidirectional=True), weights, 1)
    with pytest.raises(ValueError, match="`batch` must be at least 1, got 0"):
        ost.stream(SPEC, weights, 0)
    with pytest.raises(ValueError, match="`weights` must have"):
        ost.stream(SPEC, weights[1:], 1)
    with pytest.raises(TypeError, match="must not be traced, as they are under jit"):
        jax.jit(lambda w: ost.stream(SPEC, w, 1).step(np.ones((1, 3))))(weights)
    with pytest.raises(ost.BackendError, match="backend 'cuda' cannot run this"):
        ost.stream(SPEC, weights, 1, backend="cuda")
    with pytest.raises(ost.BackendError, match="no kernels for float16"):
        ost.stream(SPEC, weights.astype("float16"), 1, backend="cpu")


def test_a_jitted_program_where_there_are_no_kernels(monkeypatch):
    spec = ost.RNNSpec("gru", 3, 5, reset_after=False)
    assert ost.stream(spec, draw(spec, 1, 1)[0], 1).backend == "xla"
    half = ost.stream(SPEC, draw(SPEC, 1, 1)[0].astype("float16"), 1)
    assert half.backend == "xla" and half.step(np.ones((1, 3))).dtype == np.float16
    missing = _native.NativeStatus(None, "not built")
    monkeypatch.setattr(_native, "status", lambda: missing)
    weights, x = draw(SPEC, 2, 3)
    session = ost.stream(SPEC, weights, 2)
    assert session.backend == "xla"
    assert_close(session.chunk(x), ost.rnn(SPEC, weights, x).y, terms=50)
    with pytest.raises(ost.BackendError, match="not built"):
        ost.stream(SPEC, weights, 2, backend="cpu")


@needs_library
def test_an_error_of_the_library_is_raised():
    session = ost.stream(SPEC, draw(SPEC, 1, 1)[0], 1)
    session._call.dtype = 7
    with pytest.raises(RuntimeError, match="failed: there are no kernels for dtype 7"):
        session.step(np.ones((1, 3)))


def test_a_large_step_leaves_inactive_streams_as_they_are(monkeypatch):
    """Check `active` where inputs are read where they lie, and not copied."""
    monkeypatch.setattr(streaming, "MOST_COPIED", 0)
    weights, x = draw(SPEC, 3, 2)
    session = ost.stream(SPEC, weights, 3)
    session.step(x[:, 0])
    before = session.state
    active = np.array([True, False, True])
    y = session.step(x[:, 1], active)
    want, states = ost.rnn(SPEC, weights, x)
    for got, old, new in zip(session.state, before, states, strict=True):
        assert_same_bits(got[:, 1], old[:, 1])
        np.testing.assert_allclose(got[:, active], new[:, active], rtol=1e-5)
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_allclose(y[active], want[active, 1], rtol=1e-5)


PROJECTED = ost.RNNSpec("lstm", 3, 4, proj_size=2)


def session(batch):
    return ost.stream(PROJECTED, ost.init_weights(jax.random.key(0), PROJECTED), batch)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch, shape", [(1, (3,)), (2, (3, 2)), (2, (1, 6))], ids=str)
def test_as_many_numbers_of_another_shape_are_refused(batch, shape, dtype):
    wanted = rf"`x` must have shape \(B, I\) = \({batch}, 3\), got"
    with pytest.raises(ValueError, match=wanted):
        session(batch).step(np.zeros(shape, dtype))


@pytest.mark.parametrize("wrong, axes", [(0, "L, B, S"), (1, "L, B, H")])
def test_errors_name_the_axes_of_each_state(wrong, axes):
    state = [np.zeros((1, 2, 2)), np.zeros((1, 2, 4))]
    state[wrong] = np.zeros((1, 2, 3))
    with pytest.raises(ValueError, match=rf"`state\[{wrong}\]` must .* \({axes}\) = "):
        session(2).state = tuple(state)


@pytest.mark.parametrize("dtype", ["float32", "float16"], ids=["native", "jitted"])
def test_an_interrupt_between_two_states_leaves_both_written(dtype):
    """There are no kernels for float16: a jitted program returns new states."""
    weights = ost.init_weights(jax.random.key(0), PROJECTED).astype(dtype)
    streams = [ost.stream(PROJECTED, weights, 2) for _ in range(2)]
    one, other = streams
    x = np.ones((2, 3), dtype)
    one.step(x)
    new = one.state
    write, interrupts = other._write, []

    def interrupted(values, which=slice(None)):
        if not interrupts:
            interrupts.append(1)
            other._states[0][:, which] = values[0]
            raise KeyboardInterrupt
        write(values, which)

    other._write = interrupted
    with pytest.raises(KeyboardInterrupt):
        if other.backend == "cpu":
            other.state = new
        else:
            other.step(x)
    for a, b in zip(other.state, new, strict=True):
        np.testing.assert_array_equal(a, b)
