"""Truncated backpropagation: gradients against loops, memory, burn-in, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_options import usual_jit
from jax import export, lax
from tolerance import assert_close

import ostinato as ost

CHUNKS, B, T, I, H = 7, 2, 3, 4, 5  # noqa: E741
SPEC = ost.RNNSpec("lstm", I, H, num_layers=2)


def arrays(chunks=CHUNKS):
    rng = np.random.default_rng(0)
    weights = 0.3 * rng.standard_normal(ost.num_params(SPEC))
    x = rng.standard_normal((chunks, B, T, I))
    resets = rng.random((chunks, B, T)) < 0.2
    state = tuple(0.5 * rng.standard_normal(SPEC.state_shape(B)[0]) for _ in "hc")
    return weights, state, (x, resets)


def step_of(weights):
    def step(state, chunk):
        x, resets = chunk
        y, state = ost.rnn(SPEC, weights, x, state, resets=resets)
        return state, {"loss": jnp.sum(y**2), "last": y[:, -1]}

    return step


def loss_of(outputs, state):
    """Return a loss that weighs every output, and the final state, differently."""
    count = outputs["loss"].shape[0]
    loss = jnp.sum(outputs["loss"] * jnp.arange(1.0, count + 1))
    return loss + jnp.sum(jnp.sin(state[0])) + jnp.sum(state[1] ** 3)


def truncated(weights, state, chunks, **options):
    state, outputs = ost.tbptt(step_of(weights), state, chunks, **options)
    return loss_of(outputs, state)


def looped(weights, state, chunks, detach_every, burn_in=0):
    """Do the same by a Python loop."""
    step, found = step_of(weights), []
    for i in range(len(chunks[0])):
        state, outputs = step(state, jax.tree.map(lambda a, i=i: a[i], chunks))
        after = i + 1 - burn_in
        if after > 0:
            found.append(outputs)
        if after == 0 or (after % detach_every == 0 and after + burn_in < CHUNKS):
            state = lax.stop_gradient(state)
    return loss_of(jax.tree.map(lambda *a: jnp.stack(a), *found), state)


@pytest.mark.parametrize("detach_every, burn_in", [(1, 0), (2, 0), (3, 1), (2, 3)])
def test_gradients_equal_those_of_a_loop(detach_every, burn_in):
    weights, state, chunks = arrays()
    options = {"detach_every": detach_every, "burn_in": burn_in}
    both = (0, 1)
    got = jax.jit(
        jax.value_and_grad(lambda w, s: truncated(w, s, chunks, **options), both)
    )
    want = jax.jit(
        jax.value_and_grad(lambda w, s: looped(w, s, chunks, **options), both)
    )
    jax.tree.map(
        lambda a, b: assert_close(a, b, terms=200),
        got(weights, state),
        want(weights, state),
    )
    reaches_state = any(np.any(g) for g in got(weights, state)[1][1])
    assert reaches_state == (burn_in == 0)


@pytest.mark.parametrize("detach_every", [CHUNKS, CHUNKS + 3])
def test_enough_chunks_are_full_backpropagation(detach_every):
    weights, state, (x, resets) = arrays()

    def whole(weights, state):
        joined = [
            np.moveaxis(a, 0, 1).reshape(B, CHUNKS * T, *a.shape[3:])
            for a in (x, resets)
        ]
        y, state = ost.rnn(SPEC, weights, joined[0], state, resets=joined[1])
        losses = jnp.sum(y.reshape(B, CHUNKS, T, H) ** 2, (0, 2, 3))
        return loss_of({"loss": losses}, state)

    got = jax.value_and_grad(
        lambda w, s: truncated(w, s, (x, resets), detach_every=detach_every), (0, 1)
    )(weights, state)
    want = jax.value_and_grad(whole, (0, 1))(weights, state)
    jax.tree.map(lambda a, b: assert_close(a, b, terms=200), got, want)


def test_values_are_those_of_a_scan():
    weights, state, chunks = arrays()
    want = lax.scan(step_of(weights), state, chunks)
    for options in (
        {"detach_every": 3},
        {"detach_every": 7},
        {"detach_every": 2, "burn_in": 2},
    ):
        carry, outputs = ost.tbptt(step_of(weights), state, chunks, **options)
        after = options.get("burn_in", 0)
        assert outputs["last"].shape == (CHUNKS - after, B, H)
        jax.tree.map(lambda a, b: assert_close(a, b, terms=50), carry, want[0])
        jax.tree.map(
            lambda a, b, n=after: assert_close(a, b[n:], terms=50), outputs, want[1]
        )


def test_tangents_and_vmap_stop_where_gradients_do():
    weights, state, chunks = arrays()

    def run(weights):
        return truncated(weights, state, chunks, detach_every=2, burn_in=1)

    direction = np.random.default_rng(1).standard_normal(weights.shape)
    _, tangent = jax.jvp(run, (weights,), (direction,))
    assert_close(tangent, jnp.vdot(jax.grad(run)(weights), direction), terms=2000)
    two = np.stack([weights, 0.5 * weights])
    want = np.stack([jax.grad(run)(w) for w in two])
    assert_close(jax.vmap(jax.grad(run))(two), want, terms=200)


def test_a_call_goes_on_from_a_stored_carry(tmp_path):
    weights, state, chunks = arrays()
    run = lambda state, part: ost.tbptt(step_of(weights), state, part, detach_every=2)  # noqa: E731
    whole, _ = run(state, chunks)
    state, _ = run(state, jax.tree.map(lambda a: a[:4], chunks))
    np.savez(tmp_path / "state.npz", *state)
    with np.load(tmp_path / "state.npz") as stored:
        state = tuple(stored.values())
    state, _ = run(state, jax.tree.map(lambda a: a[4:], chunks))
    jax.tree.map(lambda a, b: assert_close(a, b, terms=50), state, whole)


def temporary_bytes(chunks, **options):
    weights, state, data = arrays(chunks)
    grad = usual_jit(jax.grad(lambda w: truncated(w, state, data, **options)))
    return grad.lower(weights).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_one_part():
    def growth(**options):
        return temporary_bytes(160, **options) - temporary_bytes(40, **options)

    full = growth(detach_every=160)
    assert 0 < growth(detach_every=4) < full / 8
    assert temporary_bytes(160, detach_every=160, burn_in=158) < full / 8


def test_no_chunks_after_the_burn_in():
    weights, state, chunks = arrays()
    carry, outputs = ost.tbptt(
        step_of(weights), state, chunks, detach_every=1, burn_in=CHUNKS
    )
    assert outputs["last"].shape == (0, B, H)
    assert_close(carry[0], lax.scan(step_of(weights), state, chunks)[0][0], terms=50)
    none = jax.tree.map(lambda a: a[:0], chunks)
    assert ost.tbptt(step_of(weights), state, none, detach_every=1)[0][0] is not None


def test_bad_arguments():
    weights, state, chunks = arrays()
    step = step_of(weights)
    with pytest.raises(ValueError, match="`detach_every` must be at least 1, got 0"):
        ost.tbptt(step, state, chunks, detach_every=0)
    with pytest.raises(ValueError, match="at most the number of chunks, 7, got 8"):
        ost.tbptt(step, state, chunks, detach_every=1, burn_in=8)
    with pytest.raises(TypeError, match="`detach_every` must be an integer, got str"):
        ost.tbptt(step, state, chunks, detach_every="auto")
    with pytest.raises(TypeError, match="`step` must be a function of a carry and a"):
        ost.tbptt(state, step, chunks, detach_every=1)
    (count,) = export.symbolic_shape("n")
    with pytest.raises(NotImplementedError, match="a fixed number of chunks, got n"):
        jax.eval_shape(
            lambda x: ost.tbptt(lambda c, x: (c, c), 0.0, x, detach_every=2),
            jax.ShapeDtypeStruct((count,), np.float32),
        )
    with pytest.raises(TypeError, match="`chunks` must have an array, got tuple"):
        ost.tbptt(step, state, (), detach_every=1)
    with pytest.raises(ValueError, match=r"equally many in each, got float64\[7, 2"):
        ost.tbptt(step, state, (chunks[0], chunks[1][1:]), detach_every=1)
    with pytest.raises(TypeError, match=r"return a tuple \(carry, output\), got fl"):
        ost.tbptt(lambda carry, chunk: carry[0], state, chunks, detach_every=2)


def test_a_second_call_traces_the_step_no_more():
    weights, state, chunks = arrays()
    step, traced = step_of(weights), []

    def counted(carry, chunk):
        traced.append(carry)
        return step(carry, chunk)

    for burn_in in (0, 2):
        ost.tbptt(counted, state, chunks, detach_every=7, burn_in=burn_in)
        before = len(traced)
        ost.tbptt(counted, state, chunks, detach_every=7, burn_in=burn_in)
        assert len(traced) == before


def total(carry, chunk):
    """Add up the chunks."""
    carry = carry + chunk[0]
    return carry, carry


@pytest.mark.parametrize("number", [0.5, np.float64(0.5), jnp.zeros(())])
@pytest.mark.parametrize("first", [False, True])
def test_a_number_among_the_chunks_is_refused(number, first):
    """It has no first axis, wherever it stands."""
    pair = (number, np.ones(3)) if first else (np.ones(3), number)
    with pytest.raises(ValueError, match=r"the chunks as their first axis.*float"):
        ost.tbptt(total, jnp.zeros(()), pair, detach_every=1)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_returns_another_number_of_values_is_refused(count):
    step = lambda carry, chunk: (carry,) * count  # noqa: E731
    with pytest.raises(TypeError, match=r"return a tuple \(carry, output\), got tuple"):
        ost.tbptt(step, jnp.zeros(()), np.ones(3), detach_every=2)
