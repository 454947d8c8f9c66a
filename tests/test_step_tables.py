"""Gradients of tables that the native loop reads at words which the step has chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
T, H = 5, 6
BOTH = None, "scan"
STEPS = {}


@pytest.fixture(autouse=True)
def any_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def step_of(*shape):
    """Keep a step for all sequences, with a table of this shape."""

    def keep(step):
        STEPS[step.__name__] = step, shape
        return step

    return keep


def word(p, h, n):
    """Choose one of n words."""
    return jnp.argmax(h @ p["g"][:, :n], -1)


def columns_of(table, at):
    return jax.vmap(lambda i: table[:, i])(at)


@step_of(7, H, H)
def experts(p, h, x, t):
    z = jnp.tanh(h + x)
    return 0.5 * z + jnp.einsum("bh,bhk->bk", z, p["table"][word(p, z, 7)]), z


@step_of(3000, H)
def words(p, h, x, t):
    """Feed back the word that the state has chosen, of a table beyond 2^14 numbers."""
    h = jnp.tanh(0.5 * h + x + p["table"][word(p, h, 3000)])
    return h, h


@step_of(3000, H)
def two_words(p, h, x, t):
    first, second = word(p, h, 3000), word(p, h + x, 40)
    h = jnp.tanh(0.5 * h + x * p["table"][first] - p["table"][second])
    return h, h


@step_of(9, H)
def two_words_of_a_small_table(p, h, x, t):
    first, second = word(p, h, 9), word(p, h + x, 2)
    h = jnp.tanh(0.5 * h + x * p["table"][first] - p["table"][second])
    return h, h


@step_of(30, H)
def windows_and_rows(p, h, x, t):
    read = lambda i: jax.lax.dynamic_slice(p["table"], (i, 0), (3, H))  # noqa: E731
    row = p["table"][word(p, h, 9)] - jax.vmap(read)(word(p, x, 28)).sum(1)
    return jnp.tanh(0.5 * h + x + row + p["table"][word(p, h + x, 9)]), row


@step_of(H, 4000)
def columns(p, h, x, t):
    first, second = word(p, h, 4000), word(p, h, 30)
    h = jnp.tanh(0.5 * h + x + columns_of(p["table"], first) - p["table"][:, second].T)
    return h, h


@step_of(50, 90, H)
def pairs(p, h, x, t):
    row = p["table"][word(p, h, 50), word(p, x, 90)]
    return jnp.tanh(0.5 * h + x + row), row


@step_of(4000, 2)
def windows(p, h, x, t):
    """Read three rows from a chosen one on, which may be the same as at other steps."""
    read = lambda i: jax.lax.dynamic_slice(p["table"], (i, 0), (3, 2))  # noqa: E731
    row = jax.vmap(read)(word(p, h, 12)).reshape(-1, H)
    return jnp.tanh(0.5 * h + x + row), row


@step_of(9, 1, H)
def places_outside_of_an_axis_of_one(p, h, x, t):
    """A read outside is the last row, but of the default mode it has no gradient."""
    at = word(p, h, 9), word(p, x, 3)
    rows = p["table"][at] - 2 * p["table"].at[at].get(mode="clip")
    rows += p["table"].at[at].get(mode="fill", fill_value=0.5)
    return jnp.tanh(0.5 * h + x + rows), rows


@step_of(3000, H)
def some_words_outside(p, h, x, t):
    """A word outside is 0.25, without a gradient, or the last one."""
    n = word(p, h, 4000)
    filled = p["table"].at[n].get(mode="fill", fill_value=0.25)
    clipped = p["table"].at[n - 500].get(mode="clip")
    return jnp.tanh(0.5 * h + x + filled - clipped), filled


@step_of(8, H)
def table_and_its_sum(p, h, x, t):
    """The gradient of the table is a sum of two, of which one has all rows."""
    row = p["table"][word(p, h, 8)] + jnp.sin(p["table"]).sum(0) * h
    return jnp.tanh(0.5 * h + x + row), row


@step_of(8, H)
def table_and_scores(p, h, x, t):
    """A product with the table gives the word of which the row is read."""
    scores = h @ p["table"].T
    row = p["table"][jnp.argmax(scores, -1)] * jax.nn.softmax(scores).max(1)[:, None]
    return jnp.tanh(0.5 * h + x + row), row


def given(name, batch, dtype="float64"):
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.5 * rng.standard_normal(shape).astype(dtype)  # noqa: E731
    params = {"g": draw(H, 4000), "table": draw(*STEPS[name][1])}
    return params, draw(batch, H), draw(batch, T, H)


def results(step, arguments, backend, lengths=None):
    """Return outputs, states and the gradients of all that the loop is given."""

    def of(params, h, x):
        net = dict(params=params, seq_lengths=lengths, backend=backend)
        out = ost.recurrent_net(step, x, h, **net)
        return out.outputs, out.states

    def both(*arguments):
        found, pull = jax.vjp(of, *arguments)
        return found, pull(jax.tree.map(jnp.cos, found))

    return fast_jit(both)(*arguments)


def gradients(loss, argument):
    """Return those of `loss(argument, backend)` by default, and by `lax.scan`."""
    return [fast_jit(jax.grad(lambda a, e=each: loss(a, e)))(argument) for each in BOTH]


def check(one, other, tolerance=1e-10):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 3, 18])
@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients_equal_those_of_scan(name, batch):
    params, h, x = given(name, batch)
    told = str(ost.explain(STEPS[name][0], x, h, params=params, backend="cpu"))
    assert "backward" in told and "xla" not in told
    lengths = np.array([5, 0, 3] * 6)[:batch]
    step, arguments = STEPS[name][0], (params, h, x)
    check(*(results(step, arguments, each, lengths) for each in ("cpu", "scan")))


@pytest.mark.parametrize("name", ["experts", "words"])
def test_sums_of_many_steps_and_sequences_are_those_of_float64(name):
    """A word that is read ten thousand times has all digits of float32."""
    batch, steps = 50, 1100
    rng = np.random.default_rng(1)
    params, h, _ = given(name, batch, "float32")
    x = 0.1 * rng.standard_normal((batch, steps, H)).astype("float32")

    def one_word(p, h, x, t):
        at = jnp.argmax(h[:, :1], -1)
        return 0.5 * h + x, p["table"][at].reshape(len(h), -1)[:, :H] * (1 + x)

    def of(table):
        net = dict(params=params | {"table": table}, backend="cpu")
        return ost.recurrent_net(one_word, x, h, **net).outputs.sum()

    found = fast_jit(jax.grad(of))(params["table"])
    wanted = np.zeros(params["table"].shape)
    wanted[0].reshape(-1)[:H] = (1 + x.astype("float64")).sum((0, 1))
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_what_is_read_from_a_table_is_not_stored():
    """It is read again: 16 matrices for each step would be most of what is stored."""
    params, h, x = given("experts", 16)
    step = STEPS["experts"][0]
    told = str(ost.explain(step, x, h, params=params))
    assert told.startswith("cpu") and f"[16, {H}, {H}]" not in told


def test_what_is_read_from_a_state_is_stored():
    """Of a memory that changes, what was read is much less than the memory."""

    def step(p, memory, x, t):
        read = memory[jnp.arange(16), word(p, x, 30)]
        written = jnp.roll(memory, 1, 1).at[:, 0].set(jnp.tanh(read * x))
        return written, jnp.sin(read) * x

    params, _, x = given("experts", 16)
    told = str(ost.explain(step, x, jnp.ones((16, 30, H)), params=params))
    assert "[16, 30, 6]" not in told


def test_tables_for_very_many_sequences_run_by_xla():
    """Each few sequences add to a table of their own."""

    def step(p, h, x, t):
        row = p["table"][jnp.argmax(h, -1)]
        return jnp.tanh(h @ p["w"] + x + row), row

    rng = np.random.default_rng(0)
    h, x, table = (rng.standard_normal(s) for s in ((200, H), (200, 3, H), (5000, H)))

    def loss(table, backend):
        params = {"table": table, "w": x[:H, 0]}
        net = dict(params=params, backend=backend)
        return ost.recurrent_net(step, x, h, **net).outputs.sum()

    told = str(ost.explain(step, x, h, params={"table": table, "w": x[:H, 0]}))
    assert "gradients on xla" in told and "the gradient of a table" in told
    check(*gradients(loss, table))


def test_a_large_table_that_is_computed_with_runs_by_xla():
    def step(p, h, x, t):
        every = jnp.tanh(p["table"] * h[:, None]).mean(1)
        h = jnp.tanh(0.5 * h + x + p["table"][word(p, h, 3000)] + every)
        return h, h

    params, h, x = given("words", 3)
    told = str(ost.explain(step, x, h, params=params))
    assert "on xla: it computes with the gradient of a large table" in told

    def loss(params, backend):
        return ost.recurrent_net(
            step, x, h, params=params, backend=backend
        ).states.sum()

    check(*gradients(loss, params))


def test_members_have_tables_of_their_own():
    def loss(table, backend):
        params, h, x = given("words", 3)
        net = dict(params=params | {"table": table}, backend=backend)
        return jnp.sum(
            jnp.sin(ost.recurrent_net(STEPS["words"][0], x, h, **net).states)
        )

    tables = np.random.default_rng(2).standard_normal((3, 3000, H))
    found, wanted = (
        fast_jit(jax.vmap(jax.grad(lambda a, each=each: loss(a, each))))(tables)
        for each in ("cpu", "scan")
    )
    check(found, wanted)


def test_second_derivatives():
    params, h, x = given("experts", 2)

    def loss(table, backend):
        net = dict(params=params | {"table": table}, backend=backend)
        out = ost.recurrent_net(STEPS["experts"][0], x, h, **net).outputs
        return jnp.sum(jnp.sin(out))

    def directional(table, backend):
        grad = jax.grad(lambda a: loss(a, backend))
        return jax.jvp(grad, (table,), (jnp.cos(table),))[1]

    check(*(directional(params["table"], each) for each in ("cpu", "scan")))


# Several rows at once. Sequences of a memory have states of their own.
OF_EACH = {}


def of_each(one):
    """Keep a step of one sequence, `one(p, memory, h, x, t)`."""
    OF_EACH[one.__name__] = one
    return one


def two_places(p, h):
    scores = h @ p["g"]
    return jnp.stack([jnp.argmax(scores[:9]), jnp.argmax(scores[9:18])])


@of_each
def read_children(p, memory, h, x, t):
    """A tree: each step reads its children's states and writes its own."""
    i = two_places(p, h)
    children = jnp.where((i > 2)[:, None], memory[i], 0.5)
    h = jnp.tanh(0.5 * h + x + (children * jnp.array([[1.0], [-2.0]])).sum(0))
    return memory.at[t].set(h), h


@of_each
def add_to_places(p, memory, h, x, t):
    """The places may be one: it is added to twice."""
    i = two_places(p, h)
    memory = memory.at[i].add(jnp.stack([x, jnp.tanh(h)]))
    return memory, jnp.tanh(h + memory[i[0]] - memory[i[1] // 2] + x)


@of_each
def write_to_places(p, memory, h, x, t):
    """XLA runs the gradient, which finds out which of two writes was the last."""
    i = two_places(p, h) * 2 + jnp.array([0, 1])
    memory = memory.at[i].set(jnp.stack([h, x + h]))
    return memory, jnp.tanh(h + memory[i[0] // 2] + x)


@of_each
def words_of_a_table(p, memory, h, x, t):
    """A bag of words: three rows of a table of all sequences, some of them twice."""
    i = jnp.concatenate([two_places(p, h), two_places(p, -h)[:1]])
    return memory, jnp.tanh(h + x * p["table"][i].sum(0))


@of_each
def write_then_read(p, memory, h, x, t):
    """The memory that is read has a row that is not that of the state."""
    new, i = jnp.sin(memory), two_places(p, h) % 3
    return new, jnp.tanh(h + x + memory.at[i[0]].set(h)[i[1]])


@of_each
def views_of_a_memory(p, memory, h, x, t):
    """Rows of several shapes are read from a memory that is computed with, too."""
    new, i = jnp.sin(memory), two_places(p, h)
    rows = memory.reshape(2, 6, H)[i[0] % 2], memory.reshape(6, 2, H)[i[1] % 6]
    both = rows[0].sum(0) - 2 * rows[1].sum(0) + memory.reshape(3, 4, H)[1, i[1] % 4]
    return new, jnp.tanh(h + x + both * memory[i[0]])


@of_each
def pairs_of_pairs(p, memory, h, x, t):
    """Places [2, 2], a window, and elements of a vector by several places."""
    i = two_places(p, h)
    square = memory[jnp.stack([i, i[::-1]])]
    some = jnp.take_along_axis(h, i % H, 0)
    part = jax.lax.dynamic_slice(memory, (i[0], 0), (2, H))
    return memory + 0.1 * x, jnp.tanh(h + x + square[0, 1] * some[1] - part.sum(0))


@pytest.mark.parametrize("batch", [1, 3, 18])
@pytest.mark.parametrize(
    "name, size", [*((name, 12) for name in OF_EACH), ("words_of_a_table", 3000)]
)
def test_several_rows_equal_those_of_scan(name, size, batch):
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.5 * rng.standard_normal(shape)  # noqa: E731
    params = {"g": draw(H, 18), "table": draw(size, H)}
    states = draw(batch, 12, H), draw(batch, H)
    x = draw(batch, T, H)

    def step(p, states, x, t):
        memory, h = jax.vmap(OF_EACH[name], (None, 0, 0, 0, None))(p, *states, x, t)
        return (memory, h), h

    told = str(ost.explain(step, x, states, params=params, backend="cpu"))
    assert "cpu loop" in told
    assert name == "write_to_places" or ("backward" in told and "xla" not in told)

    lengths, arguments = np.array([5, 0, 3] * 6)[:batch], (params, states, x)
    check(*(results(step, arguments, each, lengths) for each in ("cpu", "scan")))


def test_more_rows_than_instructions_run_by_xla():
    def step(p, h, x, t):
        at = (jnp.argmax(h, -1)[:, None] + jnp.arange(20)) % 30
        h = jnp.tanh(h @ p["w"] + x + p["table"][at].sum(1))
        return h, h

    params, h, x = given("experts", 3)
    params = {"w": params["g"][:, :H], "table": params["g"][:H, :30].T}

    def loss(params, backend):
        net = dict(params=params, backend=backend)
        return ost.recurrent_net(step, x, h, **net).states.sum()

    assert "it has many indices" in str(ost.explain(step, x, h, params=params))
    check(*gradients(loss, params))


def test_a_memory_of_which_a_square_is_turned():
    """What is added to a place is added to it in both orders of axes."""

    def step(p, states, x, t):
        square, h = states
        turned = square.swapaxes(1, 2) * 0.5

        def one(square, h, x):
            i, j = jnp.argmax(h @ p["g"][:, :5]), jnp.argmax(x @ p["g"][:, :5])
            return jnp.tanh(h + x + square[i, j])

        h = jax.vmap(one)(square, h, x)
        return (turned, h), h

    params, h, x = given("experts", 3)
    square = np.random.default_rng(3).standard_normal((3, 5, 5, H))

    def loss(square, backend):
        net = dict(params={"g": params["g"]}, backend=backend)
        return ost.recurrent_net(step, x, (square, h), **net).outputs.sum()

    check(*gradients(loss, square))
