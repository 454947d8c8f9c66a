"""Sessions of `ost.stream` of both kinds: ends, threads, interrupts, arguments."""

import contextlib
import copy
import gc
import pickle
import random
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import without_jit
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import _native, cells
from ostinato._rnn import streaming

needs_library = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
SPEC = ost.RNNSpec("lstm", 3, 5, num_layers=2)
CELL = cells.LayerNormLSTM(3, 5)
BATCH = 3
X = np.random.default_rng(0).standard_normal((BATCH, 4, 3)).astype(np.float32)
STATES = np.random.default_rng(1).standard_normal((BATCH, 3)).astype(np.float32)
KINDS = pytest.mark.parametrize("kind", ["spec", "cell"])
BACKENDS = pytest.mark.parametrize("backend", [None, "xla"])


def open_session(kind, backend=None):
    if kind == "spec":
        weights = ost.init_weights(jax.random.key(0), SPEC)
        return ost.stream(SPEC, weights, BATCH, backend=backend)
    return ost.stream(CELL, CELL.init(jax.random.key(0)), BATCH, backend=backend)


def open_step(step, params, states=STATES, **options):
    return ost.stream(
        step, params, BATCH, inputs=X[:, 0], initial_states=states, **options
    )


# ------------------------------------------------------------------ threads, interrupts

ENDS = """
import gc, threading, time
import jax, numpy as np, ostinato as ost
cell = ost.cells.LayerNormLSTM(16, 64)
params, x = cell.init(jax.random.key(0)), np.ones((4, 20_000, 16), np.float32)

class Decoder:
    def __init__(self):
        self.session, self.me = ost.stream(cell, params, 4), self
        self.want = self.session.step(x[:, 0])
        self.session.reset()
    def __del__(self):
        reused = [bytearray(n) for n in range(64, 20_000, 64)]
        print((self.session.step(x[:, 0]) == self.want).all())

Decoder()
gc.collect()

def serve():
    session = ost.stream(cell, params, 4)
    while True:
        session.chunk(x)

threading.Thread(target=serve, daemon=True).start()
time.sleep(0.5)
"""


@needs_library
def test_the_library_keeps_a_session_that_can_still_be_called():
    """In `__del__` of a cycle, and in a thread that the interpreter leaves behind."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


class Interrupt(Exception):
    pass


@pytest.fixture
def interrupts():
    """A function that calls another one until a signal interrupts it."""

    def interrupt(*_):
        raise Interrupt

    def run(call):
        with contextlib.suppress(Interrupt):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 1e-4))
            for _ in range(500):  # takes longer; some callbacks of Python lose it
                call()

    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    yield run
    signal.signal(signal.SIGALRM, before)


@needs_library
@KINDS
def test_an_interrupt_leaves_a_session_free(kind, interrupts):
    session = open_session(kind)
    for _ in range(300):
        interrupts(lambda: session.step(X[:, 0]))
        interrupts(lambda: session.chunk(X))
        assert not session._free.locked()


@needs_library
@KINDS
def test_an_interrupt_leaves_all_states_old_or_all_new(kind, interrupts):
    session = open_session(kind)
    ones = tuple(np.ones_like(a) for a in session.state)
    twos = tuple(a + a for a in ones)

    def write():
        session.state = ones
        session.state = twos
        session.reset([1])

    for _ in range(300):
        interrupts(write)
        for h, c in zip(*session.state, strict=True):
            assert_same_bits(h, c)


@BACKENDS
@KINDS
def test_no_call_is_made_while_another_thread_is_in_one(kind, backend):
    session = open_session(kind, backend)
    state = session.state
    calls = (
        lambda: session.step(X[:, 0]),
        lambda: session.chunk(X),
        lambda: session.state,
        lambda: setattr(session, "state", state),
        lambda: session.reset(),
    )
    for call in calls:
        session._free.acquire()
        with pytest.raises(RuntimeError, match="another thread is in a call; make a"):
            call()
        session._free.release()
        call()


# ----------------------------------------------------------------------------- integers


def keep(params, states, x, t):
    kept, h = states
    return (kept, h / 2 + x), (kept, jnp.broadcast_to(params, h.shape))


@pytest.mark.parametrize(
    "number, param",
    [
        (np.int32(2**25 + 1), 1),
        (np.uint32(4_000_000_001), 1),
        (np.int32(-(2**31)), 1),
        (np.int32(1), 2**25 + 1),
        (np.int32(1), -(2**22) - 1),
    ],
)
def test_integers_for_which_floats_cannot_stand(number, param):
    states, params = (np.full(BATCH, number), STATES), np.int32(param)
    session = open_step(keep, params, states)
    kept, shown = session.step(X[:, 0])
    assert (kept == number).all() and (shown == param).all()
    assert (session.state[0] == number).all()
    if _native.status().library is not None:
        assert session.backend == "xla" and "it has integers above" in session.why
        with pytest.raises(NotImplementedError, match="it has integers above"):
            open_step(keep, params, states, backend="cpu")


@needs_library
def test_a_state_is_set_to_integers_for_which_floats_cannot_stand():
    session = open_step(keep, np.int32(1), (np.zeros(BATCH, np.int32), STATES))
    assert session.backend == "cpu"
    message = (
        r"`state\[0\]` must hold integers of at most 8388608 .*, got 8388609; open a"
    )
    with pytest.raises(ValueError, match=message):
        session.state = np.full(BATCH, 2**23 + 1), STATES
    session.state = np.full(BATCH, -(2**23)), STATES
    assert (session.step(X[:, 0])[0] == -(2**23)).all()


@BACKENDS
def test_a_state_is_set_to_integers_that_its_type_lacks(backend):
    states = np.zeros(BATCH, np.int8), STATES
    session = open_step(keep, np.int32(1), states, backend=backend)
    for number in (128, -129, 2**40):
        message = (
            rf"`state\[0\]` must hold integers of int8, -128 to 127, got {number}$"
        )
        with pytest.raises(ValueError, match=message):
            session.state = np.array([0, number, 1]), STATES
        assert (session.state[0] == 0).all()
    session.state = np.array([-128, 127, 0]), STATES
    assert session.state[0].tolist() == [-128, 127, 0]


# ---------------------------------------------------------------------------- arguments


@needs_library
@KINDS
def test_masks_and_lengths_stay_on_the_host(kind):
    session = open_session(kind)
    with jax.transfer_guard("disallow"):
        y = session.step(X[:, 0], np.array([True, False, True]))
        assert not y[1].any() and y[::2].all()
        assert not session.chunk(X, [4, 0, 2])[1].any()
        session.chunk(X, np.array([4, 0, 2], np.int64))


@BACKENDS
def test_parameters_that_are_no_arrays(backend):
    def step(params, h, x, t):
        for _ in range(params["times"]):
            h = jnp.tanh(h @ params["w"]) if params["kind"] == "tanh" else h
        return h + x, params["out"](h)

    w = np.random.default_rng(2).standard_normal((3, 3)).astype(np.float32)
    params = {"times": 2, "kind": "tanh", "on": True, "w": w, "out": jnp.exp}
    session = open_step(step, params, backend=backend)
    got = np.concatenate([session.step(X[:, 0])[:, None], session.chunk(X[:, 1:])], 1)
    want = ost.recurrent_net(step, X, STATES, params=params).outputs
    np.testing.assert_allclose(got, want, rtol=1e-5)


@BACKENDS
@KINDS
def test_parameters_are_read_once(kind, backend):
    if kind == "spec":
        params = np.array(ost.init_weights(jax.random.key(0), SPEC))
        session = ost.stream(SPEC, params, BATCH, backend=backend)
        leaves = [params]
    else:
        params = jax.tree.map(np.array, CELL.init(jax.random.key(0)))
        session = ost.stream(CELL, params, BATCH, backend=backend)
        leaves = jax.tree.leaves(params)
    first = session.step(X[:, 0])
    for leaf in leaves:
        leaf[...] = np.nan
    session.reset()
    assert_same_bits(session.step(X[:, 0]), first)


@BACKENDS
@KINDS
def test_results_belong_to_the_caller(kind, backend):
    session = open_session(kind, backend)
    for y in (session.step(X[:, 0]), session.chunk(X)):
        y *= 2


@needs_library
def test_equal_outputs_are_arrays_of_their_own():
    def step(params, h, x, t):
        h = jnp.tanh(h) + x
        return h, (h, h, x, x)

    session = open_step(step, None)
    for outputs in (session.step(X[:, 0]), session.chunk(X)):
        for i, a in enumerate(outputs):
            assert not any(np.shares_memory(a, b) for b in outputs[:i])


def test_sessions_of_a_spec_share_a_compiled_program():
    sessions = [open_session("spec", "xla") for _ in range(2)]
    assert sessions[0]._run is sessions[1]._run
    assert isinstance(sessions[0], streaming.Stream)


def test_the_count_of_steps_stays_at_its_largest():
    def step(params, h, x, t):
        return h, jnp.full((BATCH,), t)

    session = open_step(step, None)
    session._loop._t = 2**31 - 3
    chunk, last = session.chunk(X)[0].tolist(), 2**31 - 1
    assert chunk == [last - 2, last - 1, last, last]
    assert session.step(X[:, 0])[0] == session.step(X[:, 0])[0] == last


# ------------------------------------------------------------------------------- errors


@KINDS
def test_errors_of_both_kinds(kind):
    session = open_session(kind)
    h, c = session.state
    with pytest.raises(ValueError, match=r"`state\[1\]` must have shape"):
        session.state = h, c[..., :2]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled; save its `st"):
            copied(session)
    assert len(repr(session)) < 100


@BACKENDS
@KINDS
def test_masked_arrays_are_refused(kind, backend):
    session = open_session(kind, backend)
    masked, h = np.ma.masked_invalid, session.state[0]
    calls = {
        "x": [
            lambda: session.step(masked(X[:, 0])),
            lambda: session.chunk(masked(X)),
        ],
        "active": [lambda: session.step(X[:, 0], masked([True] * BATCH))],
        "seq_lengths": [lambda: session.chunk(X, masked([1, 2, 3]))],
        r"state\[1\]": [lambda: setattr(session, "state", (h, masked(h)))],
        "streams": [
            lambda: session.reset(masked([1])),
            lambda: session.reset(masked([True] * BATCH)),
        ],
    }
    if kind == "spec":  # whose inputs may be lists of rows
        calls["x"].append(lambda: session.step(list(masked(X[:, 0]))))
    for name, some in calls.items():
        message = (
            f"`{name}`: numpy masked arrays are not supported as direct inputs. Use "
            r"arr.filled\(\) to convert the value to a standard numpy array"
        )
        for call in some:
            with pytest.raises(ValueError, match=message):
                call()
    assert session.step(X[:, 0]).all()


def test_a_cell_refuses_masked_leaves():
    session = ost.stream(
        lambda params, h, x, t: (h + x["a"], h),
        None,
        BATCH,
        inputs={"a": X[:, 0]},
        initial_states=STATES,
    )
    with pytest.raises(ValueError, match=r"`x\['a'\]`: numpy masked arrays are not"):
        session.step({"a": np.ma.masked_invalid(X[:, 0])})


@KINDS
def test_streams_to_reset_are_a_number_or_a_vector(kind):
    session = open_session(kind)
    before = session.state
    for streams in ([[0, 1]], np.zeros((1, 1), int), jnp.ones((2, 2), int)):
        message = r"`streams` must be one index or have shape \[streams\], got \[\d, "
        with pytest.raises(ValueError, match=message):
            session.reset(streams)
    jax.tree.map(assert_same_bits, session.state, before)
    for streams in (1, np.int64(1), [], [-1], jnp.array([0, 2]), (True, False, True)):
        session.reset(streams)


@BACKENDS
@KINDS
def test_the_number_of_streams_stays(kind, backend):
    session = open_session(kind, backend)
    with pytest.raises(AttributeError, match="batch"):
        session.batch = 5
    assert session.batch == BATCH and session.step(X[:, 0]).all()


def test_rows_of_inputs_have_the_same_length():
    session = open_session("spec")
    for call in (session.step, session.chunk):
        with pytest.raises(ValueError, match="`x` must be an array, or a list whose"):
            call([[1.0, 2.0], [1.0]])
    with pytest.raises(
        ValueError, match=r"`state\[1\]` must be an array, or a list wh"
    ):
        session.state = session.state[0], [[[1.0], [1.0, 2.0]]]


def test_what_is_no_network():
    weights = ost.init_weights(jax.random.key(0), SPEC)
    with pytest.raises(TypeError, match=r"of 2 layers; ost.pack_weights\(weights, sp"):
        ost.stream(SPEC, ost.unpack_weights(weights, SPEC), 2)
    with pytest.raises(TypeError, match="got the class LSTM; make a cell of it"):
        ost.stream(cells.LSTM, None, 2)

    class Layer:
        spec = SPEC

        def __call__(self, *arguments):
            raise AssertionError

    with pytest.raises(TypeError, match="`spec` and `weights` of its freeze()"):
        ost.stream(Layer(), None, 2)


def test_a_step_without_its_inputs():
    step = lambda params, h, x, t: (h + x, h)  # noqa: E731
    with pytest.raises(TypeError) as caught:
        ost.stream(step, None, BATCH, initial_states=STATES)
    assert "called without `inputs`" in caught.value.__notes__[0]


def test_the_name_of_a_session_is_short():
    memory = np.ones((BATCH, 50, 4), np.float32)
    attention = cells.Attention(cells.LSTM(3 + 4, 5), "regular", memory_size=4)
    params = attention.init(jax.random.key(0))
    cell = attention.attend(memory)
    assert "streams of AttendingCell on" in repr(ost.stream(cell, params, BATCH))


@BACKENDS
@pytest.mark.parametrize("around", [jax.jit, without_jit])
def test_a_session_opened_while_jax_traces(backend, around):
    """Its weights are known; what they are packed into was traced."""
    opened, weights = [], ost.init_weights(jax.random.key(0), SPEC)

    @around
    def traced(x):
        opened.append(ost.stream(SPEC, weights, BATCH, backend=backend))
        return x

    traced(1.0)
    want = ost.stream(SPEC, weights, BATCH, backend=backend).chunk(X)
    assert_same_bits(opened[0].chunk(X), want)


@pytest.mark.parametrize("kind", ["spec", "cell"])
def test_a_traced_input_is_refused_by_name(kind):
    session = open_session(kind)
    for run in (lambda x: session.step(x[:, 0]), session.chunk):
        with pytest.raises(TypeError, match="`x.*` must not be traced, as it is under"):
            jax.jit(run)(X)


@needs_library
@KINDS
def test_small_numbers_of_the_calling_thread_stay_what_they_are(kind):
    """Kernels take denormal numbers for 0, in the thread that calls, and only there."""
    session, tiny = open_session(kind), np.full(3, 5e-324)
    session.step(X[:, 0])
    session.chunk(X)
    assert (tiny + tiny > tiny).all()


@pytest.mark.skipif(_native.status().library is None, reason="no native library")
def test_the_library_frees_a_session_once(monkeypatch):
    library, closed = _native.status().library, []
    close = library.ostinato_step_close

    def noted(session):
        closed.append(session)
        return close(session)

    monkeypatch.setattr(library, "ostinato_step_close", noted)

    def step(p, h, x, t):
        h = jnp.tanh(h @ p + x)
        return h, h

    inputs, h = jax.ShapeDtypeStruct((3, 8), float), np.zeros((3, 8))
    session = ost.stream(step, np.eye(8), 3, inputs=inputs, initial_states=h)
    session.step(h)
    assert session.backend == "cpu" and not closed
    del session
    gc.collect()
    assert len(closed) == 1
