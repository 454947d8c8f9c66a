"""Sessions of `ost.stream` for cells and step functions, on both backends."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import CASES, make, numpy_tree, oracle
from oracles import net64
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import _native, cells

needs_library = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
# The others have no step of vectors: one linear recurrence, or convolutions.
NATIVE = [name for name in CASES if not name.startswith(("conv", "rg-lru"))]


def session_of(case, params, x, **options):
    inputs = jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
    return ost.stream(case.cell, params, x.shape[0], inputs=inputs, **options)


def run_in_parts(session, x, lengths=None):
    """Run two steps, then a chunk of the rest, and return the outputs of all."""
    active = [None, None]
    if lengths is not None:
        active = [np.array(lengths) > t for t in range(2)]
        lengths = np.maximum(np.array(lengths) - 2, 0)
    y = np.stack([session.step(x[:, t], active[t]) for t in range(2)], 1)
    return np.concatenate([y, session.chunk(x[:, 2:], lengths)], 1)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("name", CASES)
def test_steps_and_chunks_of_cells_equal_the_float64_loop(name, backend):
    case = CASES[name]
    params, x, states = make(case)
    session = session_of(case, params, x, backend=backend)
    if backend is None and name in NATIVE and _native.status().library is not None:
        assert session.backend == "cpu", session.why
    session.state = jax.tree.map(np.asarray, states)
    want = oracle(case, params, x, states)
    assert_close(run_in_parts(session, np.asarray(x)), want.outputs, terms=500)
    jax.tree.map(lambda a, b: assert_close(a, b, terms=500), session.state, want.states)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_streams_without_input_keep_their_states(backend):
    case, lengths = CASES["norm-lstm"], (3, 0, 5)
    params, x, states = make(case, "float32", lengths)
    session = session_of(case, params, x, backend=backend)
    session.state = jax.tree.map(np.asarray, states)
    want = oracle(case, params, x, states, lengths=lengths, padding="zero")
    got = run_in_parts(session, np.asarray(x), lengths)
    assert_close(got, want.outputs, terms=100)
    jax.tree.map(lambda a, b: assert_close(a, b, terms=100), session.state, want.states)
    before = session.state
    x = np.nan_to_num(np.asarray(x))
    y = session.step(x[:, 0], active=[True, False, True])
    assert not y[1].any() and y[0].all()
    for now, old in zip(session.state, before, strict=True):
        assert_same_bits(now[1], old[1])
        assert (now[::2] != old[::2]).any(-1).all()
    assert session.step(x[:, 0]).all()  # all of them again


def swap(params, states, x, t):
    """Move states of several types; results include inputs and what all share."""
    count = jnp.where(x["on"], states["n"] + 1, states["n"])
    a = jnp.tanh(states["b"] @ params["w"] + x["v"] * params["w"].sum())
    new = {"a": a, "b": states["a"], "n": count, "last": x["v"]}
    shared = jnp.broadcast_to(params["w"][0], a.shape)
    return new, (a, count > 2, x["v"], shared, count.astype(jnp.bfloat16))


def numpy_swap(params, states, x, t):
    count = states["n"] + x["on"]
    a = np.tanh(states["b"] @ params["w"] + x["v"] * params["w"].sum())
    new = {"a": a, "b": states["a"], "n": count, "last": x["v"]}
    return new, (a, float(count > 2), x["v"], params["w"][0], count)


def swap_case(batch, steps):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 4)).astype(np.float32) / 2
    a, b, last = rng.standard_normal((3, batch, 4)).astype(np.float32)
    states = {"a": a, "b": b, "n": np.zeros(batch, np.float32), "last": last}
    v = rng.standard_normal((batch, steps, 4)).astype(np.float32)
    x = {"v": v, "on": rng.random((batch, steps)) < 0.7}
    return {"w": w}, states, x


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_trees_of_states_inputs_and_outputs(batch, backend):
    params, states, x = swap_case(batch, 6)
    at = lambda t: jax.tree.map(lambda a: a[:, t], x)  # noqa: E731
    session = ost.stream(
        swap, params, batch, inputs=at(0), initial_states=states, backend=backend
    )
    first = [session.step(at(0)), session.step(at(1))]
    rest = session.chunk(jax.tree.map(lambda a: a[:, 2:], x))
    arguments = numpy_tree(x), numpy_tree(states)
    want = net64.run(numpy_swap, *arguments, params=numpy_tree(params))
    types = ["float32", "bool", "float32", "float32", "bfloat16"]
    for k, (whole, dtype) in enumerate(zip(want.outputs, types, strict=True)):
        parts = [np.stack([y[k] for y in first], 1), rest[k]]
        assert all(part.dtype == jnp.dtype(dtype) for part in parts)
        assert_close(np.concatenate(parts, 1).astype(np.float32), whole, terms=100)
    jax.tree.map(lambda a, b: assert_close(a, b, terms=100), session.state, want.states)
    idle = np.arange(batch) % 2 == 0
    for outputs in (
        session.step(at(0), ~idle),
        jax.tree.map(lambda a: a[:, 0], session.chunk(x, np.where(idle, 0, 6))),
    ):
        assert not any(y[idle].any() for y in outputs)
        assert all(y[~idle].all() for y in (outputs[0], *outputs[2:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_floats_equal_the_step(dtype):
    case = CASES["lstm"]
    params, x, states = make(case, dtype)
    session = session_of(case, params, x)
    session.state = states
    want = ost.recurrent_net(case.cell, x, states, params=params)
    got = run_in_parts(session, np.asarray(x))
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, np.asarray(want.outputs), terms=100)
    assert jax.tree.all(jax.tree.map(lambda a: a.dtype == got.dtype, session.state))


def wait(params, states, x, t):
    return states + params * jnp.float32(t), states


@pytest.mark.parametrize(
    "step, params, inputs, reason",
    [
        (wait, np.float32(2), None, "reads `t`"),
        (
            lambda p, s, x, t: (s + p[x], s + p[x]),
            np.eye(4, dtype=np.float32),
            np.zeros(3, np.int32),
            "inputs of int32|operations of inputs",
        ),
        (
            lambda p, s, x, t: (jnp.sort(s) @ p, s),
            np.eye(4, dtype=np.float32),
            None,
            "`sort` at .*test_step_streams.py",
        ),
    ],
)
def test_a_jitted_step_where_the_loop_lacks_something(step, params, inputs, reason):
    states = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"inputs": inputs, "initial_states": states}
    session = ost.stream(step, params, 3, **given)
    assert session.backend == "xla"
    if _native.status().library is not None:
        with pytest.raises(NotImplementedError, match=reason):
            ost.stream(step, params, 3, **given, backend="cpu")
    want, now = [], states
    for t in range(6):
        now, y = step(params, now, inputs, t)
        want.append(np.asarray(y))
    got = [session.step(inputs) for _ in range(2)]
    x = None if inputs is None else np.zeros((3, 4), np.int32)
    rest = session.chunk(x, length=4)
    assert_close(
        np.concatenate([np.stack(got, 1), rest], 1), np.stack(want, 1), terms=50
    )
    assert_close(session.state, np.asarray(now), terms=50)


@needs_library
def test_what_does_not_change_is_computed_once():
    params, states, x = swap_case(5, 3)
    given = {"initial_states": states, "inputs": jax.tree.map(lambda a: a[:, 0], x)}
    session = ost.stream(swap, params, 5, **given)
    before = params["w"].copy()
    params["w"][:] = np.nan
    again = ost.stream(swap, {"w": before}, 5, **given)
    jax.tree.map(assert_same_bits, session.chunk(x), again.chunk(x))


@pytest.mark.parametrize("backend", [None, "xla"])
def test_reset_and_state(backend):
    params, states, x = swap_case(5, 3)
    given = {"initial_states": states, "inputs": jax.tree.map(lambda a: a[:, 0], x)}
    session = ost.stream(swap, params, 5, **given, backend=backend)
    session.chunk(x)
    later = session.state
    session.reset([1, 4])
    for now, old, first in zip(
        *map(jax.tree.leaves, (session.state, later, states)), strict=True
    ):
        assert_same_bits(now[[1, 4]], first[[1, 4]])
        assert_same_bits(now[[0, 2, 3]], old[[0, 2, 3]])
    session.state = later
    jax.tree.map(assert_same_bits, session.state, later)
    session.reset()
    jax.tree.map(assert_same_bits, session.state, states)
    y = session.step(given["inputs"])
    kept = jax.tree.map(np.copy, y)
    session.step(given["inputs"])
    jax.tree.map(assert_same_bits, y, kept)  # results are not overwritten


def test_large_inputs_and_no_steps():
    cell = cells.LSTM(600, 4)
    params = cell.init(jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((130, 2, 600)).astype(np.float32)
    session = ost.stream(cell, params, 130)
    lengths = np.arange(130) % 3
    y = [session.step(x[:, t], lengths > t) for t in range(2)]
    want = ost.recurrent_net(
        cell,
        x,
        cell.initial_state(130),
        params=params,
        seq_lengths=lengths,
        padding="zero",
    )
    assert_close(np.stack(y, 1), np.asarray(want.outputs), terms=900)
    before = session.state
    assert session.chunk(x[:, :0]).shape == (130, 0, 4)
    jax.tree.map(assert_same_bits, session.state, before)


def test_sessions_of_several_threads():
    case = CASES["norm-gru"]
    params, x, _ = make(case, "float32")
    x, found = np.repeat(np.asarray(x), 10, 1), {}
    want = session_of(case, params, x).chunk(x)

    def serve(name):
        session = session_of(case, params, x)
        found[name] = np.stack([session.step(x[:, t]) for t in range(x.shape[1])], 1)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for y in found.values():
        assert_close(y, want, terms=500)
    session = session_of(case, params, x)
    session._free.acquire()
    with pytest.raises(RuntimeError, match="one thread at a time, and another thread"):
        session.step(x[:, 0])
    with pytest.raises(RuntimeError, match="make a session for each thread"):
        session.chunk(x)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda s: s.step(np.ones(3)), ValueError, r"`x` must have shape \(2, 3\)"),
        (
            lambda s: s.step((np.ones((2, 3)),)),
            TypeError,
            "`x` must have the structure",
        ),
        (lambda s: s.step(np.ones((2, 3), complex)), TypeError, "convert to float32"),
        (lambda s: s.step(np.ones((2, 3)), [1, 0]), TypeError, "`active` must be bool"),
        (lambda s: s.chunk(np.ones(2)), ValueError, r"leaves \[B, T, ...\], got"),
        (lambda s: s.chunk(np.ones((2, 4, 1))), ValueError, r"shape \(2, 4, 3\), got"),
        (lambda s: s.chunk(np.ones((2, 4, 3)), [4, 5]), ValueError, r"0..T = 0..4, go"),
        (lambda s: s.chunk(np.ones((2, 4, 3)), length=3), ValueError, "None or T = 4"),
        (lambda s: s.chunk(), ValueError, "`length` must be given where `x` holds no"),
        (lambda s: s.reset([2]), IndexError, "index 2 is out of bounds"),
        (lambda s: s.reset([True]), ValueError, r"`streams` must have shape \(B\)"),
        (lambda s: setattr(s, "state", 1), TypeError, "`state` must have the structu"),
        (lambda s: setattr(s, "state", (1, 1)), ValueError, r"`state\[0\]` must have"),
    ],
)
def test_errors_of_a_session(call, error, message):
    cell = cells.LSTM(3, 5)
    session = ost.stream(cell, cell.init(jax.random.key(0)), 2)
    with pytest.raises(error, match=message):
        call(session)


def test_errors_of_stream():
    cell = cells.LSTM(3, 5)
    params = cell.init(jax.random.key(0))
    with pytest.raises(TypeError, match="`spec` must be an RNNSpec, a cell or a st"):
        ost.stream(3, params, 2)
    with pytest.raises(TypeError, match="`initial_states` must be given for a step"):
        ost.stream(wait, 1.0, 2)
    with pytest.raises(ValueError, match="`batch` must be at least 1, got 0"):
        ost.stream(cell, params, 0)
    with pytest.raises(ValueError, match=r"`inputs` must have shape \[B, ...\] with B"):
        ost.stream(cell, params, 2, inputs=np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match=r"`initial_states\[1\]` must have shape"):
        ost.stream(cell, params, 2, initial_states=(np.ones((2, 5)), np.ones((1, 5))))
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(TypeError, match=r"`initial_states\[1\]` .*random.key_data"):
        ost.stream(cell, params, 2, initial_states=(np.ones((2, 5)), keys))
    with pytest.raises(ValueError, match="`backend` must be"):
        ost.stream(cell, params, 2, backend="cuda")
    with pytest.raises(TypeError, match="must not be traced, as they are under jit"):
        jax.jit(lambda p: ost.stream(cell, p, 2).step(np.ones((2, 3))))(params)
    with pytest.raises(TypeError, match="must return states"):
        ost.stream(lambda p, s, x, t: (1.0, s), 1.0, 2, initial_states=(np.ones(2),))
    spec = ost.RNNSpec("gru", 3, 5)
    with pytest.raises(TypeError, match="are for cells and step functions"):
        ost.stream(spec, np.zeros(spec.num_params), 2, inputs=np.ones((2, 3)))


@needs_library
def test_an_error_of_the_library_is_raised():
    cell = cells.LSTM(3, 5)
    session = ost.stream(cell, cell.init(jax.random.key(0)), 2)
    session._loop._step.batch = 3
    with pytest.raises(RuntimeError, match="the native library failed: .* elements"):
        session.step(np.ones((2, 3)))


def test_a_session_without_the_library(monkeypatch):
    cell = cells.LSTM(3, 5)
    monkeypatch.setattr(
        _native, "status", lambda: _native.NativeStatus(None, "not built")
    )
    session = ost.stream(cell, cell.init(jax.random.key(0)), 2)
    assert session.backend == "xla" and "not built" in repr(session)


@pytest.mark.parametrize("batch", [1, 2])
def test_products_whose_columns_threads_share(batch):
    """At 2^18 multiply-adds, threads share the columns of a single sequence."""
    cell, rng = cells.RNN(530, 530), np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: rng.standard_normal(a.shape) / 20, cell.init(jax.random.key(0))
    )
    x = rng.standard_normal((batch, 3, 530))
    session = ost.stream(cell, params, batch)
    h, want = np.zeros((batch, 530)), []
    for t in range(3):
        pre = x[:, t] @ params.w_ih.T + params.b_ih + params.b_hh
        h = np.tanh(pre + h @ params.w_hh.T)
        want.append(h)
    first = session.step(x[:, 0])
    got = np.concatenate([first[:, None], session.chunk(x[:, 1:])], 1)
    assert_close(got, np.stack(want, 1), terms=3 * 530)


OUTPUTS = {  # of h, x and b, in numpy or in JAX
    "new states": lambda h, x, b, use: (h, h),
    "an input": lambda h, x, b, use: (x, h),
    "shorter": lambda h, x, b, use: (h.astype("float32"), x.astype("float32")),
    "of all sequences": lambda h, x, b, use: (b * h[:, :1], use.cos(b)),
    "integers": lambda h, x, b, use: ((h > 0).sum(-1), h > 0),
    "turned": lambda h, x, b, use: (
        h[:, ::-1],
        h.reshape(len(h), 2, -1).swapaxes(1, 2),
    ),
}


@pytest.mark.parametrize("batch, size", [(3, 8), (300, 128)], ids=["small", "large"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_kind_are_0_where_a_stream_has_no_step(name, batch, size):
    rng = np.random.default_rng(0)
    w, b, h = (rng.normal(size=s) for s in ((size, size), (1, size), (batch, size)))
    w /= size

    def outputs(h, x, b, use):
        y = OUTPUTS[name](h, x, b, use)
        return [use.broadcast_to(a, (batch, *a.shape[1:])) for a in y]

    def step(p, h, x, t):
        w, b = p
        h = jnp.tanh(h @ w.T + x)
        return h, outputs(h, x, b, jnp)

    inputs = jax.ShapeDtypeStruct((batch, size), float)
    session = ost.stream(step, (w, b), batch, inputs=inputs, initial_states=h)
    found, wanted = [], []
    for t in range(6):
        x = rng.normal(size=(batch, size))
        active = None if t % 3 == 0 else rng.random(batch) < 0.5
        own = np.ones(batch, bool) if active is None else active
        h = np.where(own[:, None], np.tanh(h @ w.T + x), h)
        if t % 2:
            got = session.step(x, active)
        else:
            lengths = None if active is None else active.astype(np.int32)
            got = [a[:, 0] for a in session.chunk(x[:, None], lengths)]
        found += got
        for y in outputs(h, x, b, np):
            y = np.where(own.reshape(-1, *[1] * (y.ndim - 1)), y, np.zeros((), y.dtype))
            wanted.append(y)
        np.testing.assert_allclose(session.state, h, rtol=1e-9, atol=1e-12)
    for a, y in zip(found, wanted, strict=True):  # no later step has changed them
        assert a.dtype == y.dtype
        np.testing.assert_allclose(a, y, rtol=1e-5, atol=1e-6)


def test_inputs_that_no_float32_holds_are_exact():
    def step(p, h, x, t):
        h = jnp.tanh(h @ p)
        return h, x % 10

    w, h = np.eye(8, dtype=np.float32), np.ones((3, 8), np.float32)
    x = 2**30 + np.arange(3, dtype=np.int32)
    inputs = jax.ShapeDtypeStruct((3,), np.int32)
    session = ost.stream(step, w, 3, inputs=inputs, initial_states=h)
    for t in range(4):
        np.testing.assert_array_equal(session.step(x + t), (x + t) % 10)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", ["params", "states"])
def test_large_integers_that_a_session_keeps_are_exact(where, sign):
    def step(p, states, x, t):
        w, n = p
        h, k = states
        h = jnp.tanh(h @ w + x)
        return (h, k), jnp.where(h[:, 0] > 2, 0, n - k)

    large = np.full(3, sign * (2**24 + 1), np.int32)
    n = large[0] if where == "params" else np.int32(0)
    k = large if where == "states" else np.zeros(3, np.int32)
    w, h = np.eye(8, dtype=np.float32), np.ones((3, 8), np.float32)
    inputs = jax.ShapeDtypeStruct((3, 8), np.float32)
    session = ost.stream(step, (w, n), 3, inputs=inputs, initial_states=(h, k))
    for _ in range(2):
        np.testing.assert_array_equal(session.step(np.ones((3, 8), np.float32)), n - k)
    np.testing.assert_array_equal(session.state[1], k)


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("chunked", [False, True])
def test_outputs_of_a_session_have_memory_of_their_own(chunked):
    def step(w, h, x, t):
        h = jnp.tanh(h @ w + x)
        return h, (x, x, jnp.sin(h), jnp.sin(h))

    w, h, x = np.eye(8), np.ones((3, 8)), np.ones((3, 8))
    inputs = jax.ShapeDtypeStruct((3, 8), float)
    session = ost.stream(step, w, 3, inputs=inputs, initial_states=h)
    x = x[:, None] if chunked else x
    outputs = session.chunk(x) if chunked else session.step(x)
    arrays = [x, *outputs]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])
