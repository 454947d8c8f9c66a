"""Step functions and cells of one example under `ragged.vmap`: one compiled loop.

Against the loop over examples as `lax.scan`; then how often the native library is
called, that nothing padded is made, and what runs where it cannot run the step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from ragged_loop import check
from ragged_programs.program import D, Program
from test_transforms import assert_trees_close

import ostinato as ost
from ostinato import cells, ragged
from ostinato._step import tokens
from ostinato._step.xla import Loop

native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
PROGRAMS = []


def program(fn=None, **options):
    """Register `fn(backend, *inputs)`, to run compiled and as `lax.scan`."""
    if fn is None:
        return functools.partial(program, **options)
    run = Program(
        fn.__name__, functools.partial(fn, "cpu"),
        reference=functools.partial(fn, "scan"), **options,
    )  # fmt: skip
    PROGRAMS.append(run)
    return fn


def net(step, x, state, backend, **options):
    return ost.recurrent_net(step, x[None], state, backend=backend, **options)


@program(at_least=0)
def several_inputs_and_states(backend, x, x2, s, d, w, u, b):
    def step(p, states, inputs, t):
        (h, c), (x_t, x2_t, s_t) = states, inputs
        gate = jax.nn.sigmoid(x_t @ p + h @ u + b[None])
        c = gate * c + (1 - gate) * jnp.tanh(x2_t + s_t[:, None])
        h = c * jnp.cos(h) + 0.1 * t.astype(h.dtype)
        return (h, c), {"h": h, "sum": c.sum(-1)}

    given = x[None], x2[None], s[None]
    out = ost.recurrent_net(
        step, given, (d[None], 0.5 * d[None]), params=w, backend=backend,
        return_all_states=True,
    )  # fmt: skip
    return jax.tree.map(lambda a: a[0], out)


@program
def reversed_with_arrays_of_the_example(backend, x, d, own_w, w):
    def step(p, h, x_t, t):
        h = jnp.tanh(x_t @ own_w + h @ p + d[None])
        return h, h * jnp.sin(t.astype(h.dtype))

    out = net(step, x, d[None], backend, params=w, reverse=True)
    return out.outputs[0], out.states


@program
def resets(backend, x, d, w):
    def step(p, h, x_t, t):
        h = jnp.tanh(x_t + h @ p)
        return h, h

    out = net(step, x, d[None], backend, params=w, resets=(x[:, 0] > 0)[None])
    return out.outputs[0], out.states


@program
def window(backend, x, d, w):
    def step(p, h, x_t, t):
        new = jnp.tanh(x_t + h[:, 0] @ p - h[:, 1])
        return new, new

    start = jnp.stack([d, 2 * d])[None]
    out = net(step, x, start, backend, params=w, window=2)
    return out.outputs[0], out.states


@program
def words_and_counts(backend, i, d, table, w):
    def step(p, states, word, t):
        h, count = states
        h = jnp.tanh(table[word] + h @ p)
        count = count + (word == 2).astype(jnp.int32)
        return (h, count), (h, count)

    start = d[None], jnp.zeros(1, jnp.int32)
    out = net(step, i, start, backend, params=w)
    return jax.tree.map(lambda a: a[0], (out.outputs, out.states))


@program
def sequences_in_an_example(backend, x, x2, d, w):
    def step(p, h, x_t, t):
        h = jnp.tanh(x_t @ p + h)
        return h, h

    both = jnp.stack([x, x2])
    start = jnp.stack([d, -d])
    out = ost.recurrent_net(step, both, start, params=w, backend=backend)
    return out.outputs[1], out.states


@program
def attention(backend, x, y, d, w, u):
    def step(p, h, x_t, t):
        scores = jax.nn.softmax((h @ p) @ y.T)
        h = jnp.tanh(x_t + scores @ y)
        return h, (h, scores)

    out = net(step, x, d[None], backend, params=w)
    return jax.tree.map(lambda a: a[0], out.outputs)


@program
def sorted_inputs(backend, x, d, w):
    """A step that the native loop runs only with values computed ahead of it."""

    def step(p, h, x_t, t):
        h = jnp.tanh(jnp.sort(x_t) + h @ p)
        return h, h

    return net(step, x, d[None], backend, params=w).outputs[0]


@program
def recompute(backend, x, d, w):
    def step(p, h, x_t, t):
        gate = ost.tag(jax.nn.sigmoid(x_t @ p), "gate")
        h = gate * jnp.sin(h) + (1 - gate) * x_t
        return h, h

    return net(step, x, d[None], backend, params=w, recompute=("gate",)).outputs[0]


@program
def derivatives_in_an_example(backend, x, d, w):
    def run(x, w):
        def step(p, h, x_t, t):
            h = jnp.tanh(x_t @ p + h)
            return h, h

        return net(step, x, d[None], backend, params=w).outputs[0]

    tangent = jax.jvp(run, (x, w), (jnp.sin(x), w))[1]
    return tangent, jax.grad(lambda w: jnp.sum(run(x, w) ** 2))(w)


@functools.cache
def parameters(cell):
    with jax.ensure_compile_time_eval():
        return cell.init(jax.random.key(2), jnp.float64)


@program
def cell(backend, x, scale):
    cell = cells.MILSTM(D, 2)
    params = jax.tree.map(lambda a: scale * a, parameters(cell))
    start = cell.initial_state(1, x.dtype)
    out = net(cell, x, start, backend, params=params)
    return out.outputs[0], out.states


@native
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_program_equals_the_loop(program):
    check(program, {})


# ------------------------------------------------------------- larger, without a mark

LENGTHS = (5, 0, 9, 2, 1, 7)
H = 16


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def steps(x, h, w, **options):
    def step(p, h, x_t, t):
        h = jnp.tanh(x_t @ p["w"] + h @ p["u"] + p["b"])
        return h, h * h

    out = ost.recurrent_net(step, x[None], h[None], params=w, **options)
    return out.outputs[0], out.states[0]


def scanned(x, h, w):
    def step(h, x_t):
        h = jnp.tanh(x_t @ w["w"] + h @ w["u"] + w["b"][0])
        return h, h * h

    h, y = jax.lax.scan(step, h, x)
    return y, h


def batch(extra=3, dtype=jnp.float64):
    """Return a batch with NaN in the unused capacity, states, and weights."""
    data = np.concatenate([draw(sum(LENGTHS), H), np.full((extra, H), np.nan)])
    x = ragged.RaggedArray(
        jnp.asarray(data, dtype), jnp.asarray(LENGTHS, jnp.int32), dim="n", max_length=9
    )
    w = {"w": draw(H, H, seed=1) / 4, "u": draw(H, H, seed=2) / 4}
    w = {k: jnp.asarray(a, dtype) for k, a in (w | {"b": draw(1, H, seed=3)}).items()}
    return x, jnp.asarray(draw(len(LENGTHS), H, seed=4), dtype), w


def mapped(fn, x, h, w, **options):
    run = functools.partial(fn, **options) if options else fn
    return ragged.vmap(run, (0, 0, None), min_length=0)(x, h, w)


def numpy_loop(x, h, w, reverse=False):
    """Return all outputs one after another, and the last states."""
    x, h = np.asarray(x.data, float), np.asarray(h, float)
    w = {k: np.asarray(a, float) for k, a in w.items()}
    y, last, first = [], [], 0
    for b, length in enumerate(LENGTHS):
        state, own = h[b], np.zeros((length, H))
        for t in reversed(range(length)) if reverse else range(length):
            state = np.tanh(x[first + t] @ w["w"] + state @ w["u"] + w["b"][0])
            own[t] = state**2
        y.append(own)
        last.append(state)
        first += length
    return np.concatenate(y), np.stack(last)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", [None, "xla", "scan"])
def test_values_against_numpy(backend, reverse):
    x, h, w = batch()
    y, last = mapped(steps, x, h, w, backend=backend, reverse=reverse)
    want, want_last = numpy_loop(x, h, w, reverse)
    np.testing.assert_allclose(y.data[: sum(LENGTHS)], want, atol=1e-12)
    np.testing.assert_allclose(last, want_last, atol=1e-12)


def loss(fn, w, h, data, x, **options):
    y, last = mapped(fn, ragged.RaggedArray(
        data, x.lengths, dim="n", max_length=9), h, w, **options)  # fmt: skip
    slopes = jnp.cos(jnp.arange(y.data.size, dtype=y.data.dtype)).reshape(y.data.shape)
    return jnp.vdot(slopes, y.data) + jnp.sum(jnp.sin(last))


OVER_NUMBERS = {
    "all": lambda h, s, x: (jnp.tanh(h + s * x), None),
    "greatest": lambda h, s, x: (jnp.tanh(h - s * x), h.max()),
    "softmax": lambda h, s, x: (jax.nn.softmax(h + s * x), (h * x).sum()),
    "checkpoint": jax.checkpoint(lambda h, s, x: (jnp.tanh(h + s * x), h.sum())),
}


@pytest.mark.parametrize("name", OVER_NUMBERS)
def test_loops_over_numbers_may_carry_the_whole_example(name):
    """Tokens without axes: there is no axis of sequences to look at."""

    def one(x):
        last, ys = jax.lax.scan(lambda h, s: OVER_NUMBERS[name](h, s, x), x, x)
        return jnp.sin(last).sum() + sum(jnp.sin(y).sum() for y in jax.tree.leaves(ys))

    rows = [jnp.sin(jnp.arange(n) + n) for n in (3, 5, 2, 1)]
    batch = ragged.RaggedArray.from_list(rows)
    total = lambda batch: ragged.vmap(one)(batch).sum()  # noqa: E731
    gradient = fast_jit(ragged.grad(total))(batch)
    want = [jax.value_and_grad(one)(x) for x in rows]
    np.testing.assert_allclose(fast_jit(total)(batch), sum(w for w, _ in want))
    for got, (_, d) in zip(gradient, want, strict=True):
        np.testing.assert_allclose(got, d, atol=1e-12)


@native
@pytest.mark.parametrize("fn", [steps, scanned], ids=["recurrent_net", "scan"])
def test_a_gradient_is_two_calls_of_the_native_loop(fn):
    x, h, w = batch()
    gradient = jax.grad(functools.partial(loss, fn), argnums=(0, 1, 2))
    text = jax.jit(gradient).lower(w, h, x.data, x).as_text()
    assert text.count("custom_call @ostinato_step(") == 2
    jaxpr = str(jax.make_jaxpr(gradient)(w, h, x.data, x))
    assert " scan[" not in jaxpr
    assert f"f64[{max(LENGTHS)},{len(LENGTHS)}," not in jaxpr  # nothing is padded
    got = fast_jit(gradient)(w, h, x.data, x)
    of_scan = functools.partial(loss, steps, backend="scan")
    want = fast_jit(jax.grad(of_scan, argnums=(0, 1, 2)))(w, h, x.data, x)
    assert_trees_close(got, want, terms=1000)


@native
def test_further_derivatives_and_maps():
    x, h, w = batch()

    def results(backend):
        total = functools.partial(loss, steps, x=x, backend=backend)
        slope = lambda w, h, data: jax.grad(total)(w, h, data)  # noqa: E731
        data = jnp.nan_to_num(x.data)
        tangents = jax.tree.map(jnp.cos, (w, h, data))
        second = jax.jvp(slope, (w, h, data), tangents)[1]
        several = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), w)
        return second, jax.vmap(slope, (0, None, None))(several, h, data)

    got = fast_jit(lambda: results("cpu"))()
    assert_trees_close(got, fast_jit(lambda: results("scan"))(), terms=1000)


@native
def test_traced_lengths_that_do_not_fit_reach_no_other_memory():
    x, h, w = batch(extra=0)

    @jax.jit
    def run(lengths):
        given = ragged.RaggedArray(x.data, lengths, dim="n", max_length=9)
        return mapped(steps, given, h, w)

    y, _ = run(jnp.asarray([9, 9, 9, 2**30, -5, 9], jnp.int32))
    assert y.data.shape == x.data.shape


@native
def test_bits_do_not_depend_on_the_number_of_threads(configure):
    x, h, w = batch()
    gradient = jax.jit(jax.grad(functools.partial(loss, steps), argnums=(0, 1, 2)))
    found = []
    for threads in (1, 2, 3):
        configure("avx2", threads)
        found.append(jax.tree.map(np.asarray, gradient(w, h, x.data, x)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def test_what_the_native_loop_lacks_runs_as_before():
    def step(p, h, x_t, t):
        h = jnp.sort(h @ p + x_t, -1)
        return h, h

    def run(x, h, w, backend=None):
        out = ost.recurrent_net(step, x[None], h[None], params=w, backend=backend)
        return out.outputs[0]

    x, h, w = batch()
    got, want = (mapped(run, x, h, w["u"], backend=b) for b in (None, "scan"))
    np.testing.assert_allclose(got.data, want.data)
    with pytest.raises(NotImplementedError, match="the cpu loop cannot run this step"):
        mapped(run, x, h, w["u"], backend="cpu")


def root(u, h, x, t):
    h = jnp.sqrt(x + h @ u)
    return h, (jnp.argmax(h, 1), h)


def across(u, h, x, t):
    """The sequences are in another axis of what is stored."""
    z = u.T @ h.T
    z = (z / jnp.linalg.norm(z, axis=0, keepdims=True)).T
    return z + x, z


@native
@pytest.mark.parametrize("step", [root, across], ids=["root", "across"])
def test_derivatives_of_a_reverse_loop_over_tokens(step):
    """The first token of each example is a pole of `root` at the initial state.

    It is where an example runs its last step, from another state. Nothing, neither the
    next example nor unused tokens, may stand for steps that an example does not have.
    """
    lengths, start = np.array([2, 0, 4]), float(step is across)
    x = np.random.default_rng(0).random((8, 2)) + 0.5
    x[[0, 2]] = 0.0
    x[6:] = np.nan
    u = np.eye(2) + 0.1

    def of_one(x, u):
        h = jnp.full((1, 2), start)
        options = {"params": u, "reverse": True, "backend": "cpu"}
        return ost.recurrent_net(step, x[None], h, **options).states[0]

    def loss(x, u):
        batch = ragged.RaggedArray(x, lengths, max_length=4)
        return jnp.sum(jnp.sin(ragged.vmap(of_one, (0, None), min_length=0)(batch, u)))

    def plain(x, u):
        total = lengths[1] * 0.0 + 2 * jnp.sin(start)  # of the empty example
        for first, last in ((0, 2), (2, 6)):
            h = jnp.full((1, 2), start)
            for t in reversed(range(first, last)):
                h, _ = step(u, h, x[t : t + 1], None)
            total += jnp.sum(jnp.sin(h))
        return total

    def both(x, u):
        return [jax.jacrev(f, (0, 1))(x, u) for f in (loss, plain)]

    got, want = fast_jit(both)(jnp.asarray(x), u)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert not np.any(got[0][6:])


def test_inputs_that_decide_alone_have_gradients_of_zero():
    rng = np.random.default_rng(0)
    x, h, u = (rng.normal(size=s) for s in ((8, 16), (3, 16), (16, 16)))

    def slopes(data, h, u):
        def step(u, h, x, t):
            h = jnp.tanh(h @ u + jnp.where(x[0] > 0, 1.0, 0.5) * x[1])
            return h, h

        def loss(first, other):
            def both(x, y, h):
                out = ost.recurrent_net(step, (x[None], y[None]), h[None], params=u)
                return out.outputs[0]

            make = lambda a: ragged.RaggedArray(a, jnp.array([3, 1, 2]), max_length=3)  # noqa: E731
            return jnp.sum(ragged.vmap(both)(make(first), make(other), h).data[:6])

        return jax.grad(loss, (0, 1))(data, data)

    first, other = jax.jit(slopes)(x, h, u)
    assert first.shape == x.shape and not first.any()
    assert other[:6].all() and not other[6:].any()


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("backend", [None, "xla"])
def test_sequences_of_one_length(backend, extra):
    data, (_, h, w) = draw(27 + extra, H), batch()
    lengths = jnp.full(3, 9, jnp.int32)
    x = ragged.RaggedArray(jnp.asarray(data), lengths, dim="n", max_length=9)
    y, last = mapped(steps, x, h[:3], w, backend=backend)
    for b in range(3):
        state = np.asarray(h[b])
        for t in range(9 * b, 9 * b + 9):
            state = np.tanh(data[t] @ w["w"] + state @ w["u"] + w["b"][0])
            np.testing.assert_allclose(y.data[t], state**2, atol=1e-12)
        np.testing.assert_allclose(last[b], state, atol=1e-12)


LENGTHS_OF_FOUR = np.array([2, 0, 3, 1], np.int32)


def loop_of(lengths, reverse=False):
    most = int(lengths.max())
    return Loop(None, most, most, reverse, None, True, "xla", capacity=9)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("lengths", [LENGTHS_OF_FOUR, LENGTHS_OF_FOUR[::-1]])
def test_tokens_of_steps_and_back(lengths, axis, reverse):
    """Past its end a sequence repeats its first step to run; unused tokens are 0."""
    loop, count = loop_of(lengths, reverse), len(lengths)
    data = np.random.default_rng(0).standard_normal((9, 2))
    data[lengths.sum() :] = np.nan
    want = np.empty((loop.length, count, 2))
    ends = np.cumsum(lengths)
    for b, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        own = data[end - length : end]
        want[:length, b] = own
        if length:  # another sequence stands for one without steps
            want[length:, b] = own[-1 if reverse else 0]
    padded = tokens._to_steps(loop, jnp.asarray(lengths), jnp.asarray(data), axis)
    got = np.moveaxis(padded, 1 + axis, 1)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[:, lengths > 0], want[:, lengths > 0])
    back = tokens.to_tokens(loop, jnp.asarray(lengths), padded, axis)
    data[lengths.sum() :] = 0
    np.testing.assert_array_equal(back, data)
