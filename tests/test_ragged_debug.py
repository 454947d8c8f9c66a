"""`jax.debug` within `ragged.vmap`: which examples are seen, and in what order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ostinato import ragged

LENGTHS = (3, 1, 2)
ROWS = [np.arange(n) + 10.0 * n for n in LENGTHS]


def batch(arrays=ROWS):
    made = ragged.RaggedArray.from_list(arrays, capacity=9, max_length=4)
    tokens = jnp.arange(9, dtype=jnp.int32)
    return made.with_data(jnp.where(tokens < sum(map(len, arrays)), made.data, jnp.nan))


class Seen(list):
    """Calls of a callback, with what came as lists."""

    def __call__(self, *args, **kwargs):
        values = [np.asarray(a).tolist() for a in (*args, *kwargs.values())]
        self.append(values[0] if len(values) == 1 else tuple(values))


def seen_by(make, wrap=jax.jit, **options):
    """Return the calls of a callback when `make(callback)` runs on a batch."""
    seen = Seen()
    wrap(ragged.vmap(make(seen), **options))(batch())
    jax.effects_barrier()
    return seen


def call(callback, *args, **kwargs):
    jax.debug.callback(callback, *args, **kwargs)


def returning(effect):
    """Return a function of one example that has an effect and a result."""
    return lambda seen: lambda x: (effect(seen, x), x.sum())[1]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("ordered", [False, True])
def test_each_example_is_seen_once_at_its_size(wrap, ordered):
    effect = returning(
        lambda seen, x: call(seen, x, n=jnp.array(x.shape[0]), ordered=ordered)
    )
    want = [(x.tolist(), len(x)) for x in ROWS]
    assert seen_by(effect, wrap) == want


@pytest.mark.parametrize("tiers", [None, 2])
def test_calls_come_in_the_order_of_the_program(tiers):
    """Check calls before, between and after values that run by tiers."""

    def make(seen):
        def function(x):
            say = lambda place, a: call(seen, place, a[0], ordered=True)  # noqa: E731
            say(0, x)
            pairs = x[:, None] * x[None]
            say(1, pairs[0])
            say(2, x)
            rows = jnp.sort(pairs, axis=1).sum(1)
            say(3, rows)
            say(4, x)
            return rows

        return function

    places = [place for place, _ in seen_by(make, tiers=tiers)]
    assert places == [place for place in range(5) for _ in LENGTHS]


def test_print_formats_each_example(capsys):
    def show(x):
        jax.debug.print("{n}: {} of {kind}", x, n=x.shape[0], kind="rows")
        return x

    jax.jit(ragged.vmap(show))(batch())
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "3: [30. 31. 32.] of rows",
        "1: [10.] of rows",
        "2: [20. 21.] of rows",
    ]


PLACES = {
    "sums": (lambda x: x.sum(), [93.0, 10.0, 41.0]),
    "sizes_that_are_shared": (
        lambda x: jnp.arange(x.shape[0]),
        [[0, 1, 2], [0], [0, 1]],
    ),
    "pairs": (
        lambda x: x[:, None] - x[None],
        [[[0, -1, -2], [1, 0, -1], [2, 1, 0]], [[0]], [[0, -1], [1, 0]]],
    ),
    "shared": (lambda x: jnp.ones(2), [[1.0, 1.0]]),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("tiers", [None, ((1, 2), (2, 1))], ids=["plain", "tiers"])
def test_values_of_every_layout_are_seen(name, tiers):
    """Tiers that do not fit, too: nothing is seen twice or cut."""
    value, want = PLACES[name]

    def make(seen):
        def function(x):
            call(seen, value(x))
            return jnp.sum(x[:, None] * x[None])

        return function

    assert seen_by(make, tiers=tiers) == want


def running(seen):
    def step(total, a):
        call(seen, total, a)
        return total + a, total

    return lambda x: lax.scan(step, jnp.zeros(()), x)[0]


STEPS = [(0, 30), (0, 10), (0, 20), (30, 31), (20, 21), (61, 32)]


@pytest.mark.parametrize(
    "options", [{"scan": "padded"}, {"scan": "packed", "lanes": 2}]
)
def test_a_loop_shows_the_steps_that_an_example_has(options):
    assert sorted(seen_by(running, **options)) == sorted(STEPS)


def test_a_while_loop_shows_the_examples_that_are_in_it():
    def make(seen):
        return lambda x: lax.while_loop(
            lambda s: s < 25, lambda s: (call(seen, s), s + 10)[1], x[0]
        )

    assert seen_by(make) == [10, 20, 20]


def test_a_branch_shows_the_examples_that_take_it():
    def make(seen):
        def branch(name):
            return lambda x: (call(seen, name, x), x)[1]

        return lambda x: lax.cond(x[0] > 15, branch(1), branch(0), x)

    want = [(0, [10]), (1, [20, 21]), (1, [30, 31, 32])]
    assert sorted(seen_by(make)) == want


def test_effects_under_transformations():
    seen = Seen()

    def square(x):
        call(seen, x)
        return jnp.sum(x**2)

    mapped = ragged.vmap(square)

    def total(tokens):
        return mapped(batch().with_data(tokens)).sum()

    gradient = jax.jit(jax.grad(total))(batch().data)
    jax.effects_barrier()
    assert seen == [x.tolist() for x in ROWS]
    np.testing.assert_allclose(gradient[:6], 2 * np.concatenate(ROWS))
    seen.clear()
    jax.vmap(total)(jnp.stack([batch().data, -batch().data]))
    jax.effects_barrier()
    want = [x.tolist() for x in ROWS]
    assert sorted(seen) == sorted(want + [(-x).tolist() for x in ROWS])


@pytest.mark.parametrize("least", [0, 1])
def test_examples_that_are_not_there_are_not_seen(least):
    seen = Seen()
    none = ragged.RaggedArray.from_list([])
    out = ragged.vmap(lambda x: (call(seen, x), x.sum())[1], min_length=least)(none)
    jax.effects_barrier()
    assert out.shape == (0,)
    assert seen == []


def test_empty_examples_are_seen():
    empty = batch([ROWS[1], ROWS[1][:0]])
    seen = Seen()
    ragged.vmap(lambda x: (call(seen, x), x)[1], min_length=0)(empty)
    jax.effects_barrier()
    assert seen == [[10.0], []]


def test_keys_of_each_example_can_be_printed(capsys):
    keys = jax.random.split(jax.random.key(0), 3)
    show = ragged.vmap(lambda x, key: (jax.debug.print("{}", key), x.sum())[1])
    assert show(batch(), keys).shape == (3,)
    jax.effects_barrier()
    assert len(capsys.readouterr().out.splitlines()) >= 3
