"""Programs as strangers write them: what `ragged.vmap` once rejected or got wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit, one_by_one
from jax import lax
from jax.export import symbolic_shape
from jax.sharding import PartitionSpec as P

from ostinato import ragged
from ostinato.ragged.core import sizes

try:
    import equinox as eqx
except ImportError:
    eqx = None
needs_equinox = pytest.mark.skipif(
    eqx is None, reason="needs equinox, of the extra `peers`"
)
LENGTHS = (3, 1, 4)
ROWS = np.random.default_rng(4).standard_normal((10, 4))
PARTS = np.split(ROWS, np.cumsum(LENGTHS))[:3]
W = jnp.asarray(np.random.default_rng(5).standard_normal((4, 4)))


def batch(lengths=LENGTHS, dim="n"):
    """Return a batch of eight tokens and a capacity of ten."""
    return ragged.RaggedArray(ROWS, lengths, dim=dim, max_length=6)


def equal(got, want, error=1e-12):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=error, atol=error)


# --------------------------------------------------- as many tokens as features


def test_values_of_the_example_before_the_axis_of_as_many_tokens():
    """Once transposed where the capacity was the number of features."""
    square = ROWS[:4]
    parts = square[:3], square[3:]
    tokens = ragged.RaggedArray(square, [3, 1], max_length=3)

    def sums(x):
        return jnp.broadcast_to(x.sum(0)[:, None], x.T.shape) * x.T

    def loss(x):
        return jnp.sum(jnp.sin(sums(x)))

    equal(ragged.vmap(sums)(tokens).to_list(), one_by_one(sums, parts))
    gradient = ragged.grad(lambda b: jnp.sum(ragged.vmap(loss)(b)))(tokens)
    equal(gradient.to_list(), one_by_one(jax.grad(loss), parts))


# ------------------------------------------------------------ what max_length allows

TABLE = jnp.asarray(np.random.default_rng(6).standard_normal((6, 4)))
MASK = jnp.tril(jnp.ones((8, 8), bool))
SQUARE = TABLE @ TABLE.T
CUT = {
    "positions": lambda x: x + TABLE[: x.shape[0]],
    "causal": lambda x: jnp.where(MASK[: x.shape[0], : x.shape[0]], x @ x.T, 0) @ x,
    "einsum": lambda x: jnp.einsum("ab,ad->bd", SQUARE[: x.shape[0], : x.shape[0]], x),
}


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("name", CUT)
def test_beginnings_of_tables_as_long_as_max_length(name, least):
    lengths = (3, least, 4)
    parts = np.split(ROWS, np.cumsum(lengths))[:3]
    mapped = fast_jit(ragged.vmap(CUT[name], min_length=least))
    equal(mapped(batch(lengths)).to_list(), one_by_one(CUT[name], parts))


def test_tables_shorter_than_max_length_are_told_of():
    with pytest.raises(TypeError, match="incompatible") as caught:
        ragged.vmap(lambda x: x + TABLE[:5][: x.shape[0]])(batch())
    assert any("`min_length`" in note for note in caught.value.__notes__)


def test_max_length_does_not_change_what_traces_without_it():
    for most in (1, 2, 6):
        x = ragged.RaggedArray(ROWS, (1, 1, 0), max_length=most)
        out = ragged.vmap(lambda x: (x[2:], x[:4]), min_length=0)(x)
        assert [a.dim for a in out] == ["- min(n, 2) + n", "min(n, 4)"]
    x = ragged.RaggedArray(ROWS, (1, 1, 1), max_length=1)
    out = ragged.vmap(lambda x: (x + TABLE[: x.shape[0]], x[1:]))(x)
    equal(out[0].to_list(), [row[None] + TABLE[:1] for row in ROWS[:3]])
    assert out[1].lengths.tolist() == [0, 0, 0]


# ----------------------------------------------------------- constraints, least sizes


def halves(x):
    return x.reshape(x.shape[0] // 2, 2, 4).sum(1)


def test_constraints_where_examples_may_be_empty():
    lengths = (2, 0, 4)
    options = {"min_length": 0, "constraints": ("mod(n, 2) == 0",)}
    got = fast_jit(ragged.vmap(halves, **options))(batch(lengths))
    parts = np.split(ROWS, np.cumsum(lengths))[:3]
    equal(got.to_list(), [p.reshape(-1, 2, 4).sum(1) for p in parts])
    with pytest.raises(ValueError, match="must hold for every example"):
        ragged.vmap(halves, **options)(batch((2, 1, 4)))


@pytest.mark.parametrize("constraint", ["m == n", "2*m <= 2*n", "m == n + 0"])
def test_constraints_between_dims_that_may_be_empty(constraint):
    x, y = batch((2, 0, 4)), batch((2, 0, 4), "m")
    bound = ragged.vmap(
        lambda x, y: x + y if "==" in constraint else (x, y[: x.shape[0]]),
        min_length=0,
        constraints=(constraint,),
    )
    assert jax.tree.leaves(bound(x, y))[0].shape == (10, 4)


def test_a_least_length_for_each_dim():
    x, y = batch(), batch((2, 0, 3), "m")
    got = fast_jit(ragged.vmap(lambda x, y: x.max(0) + y.sum(0), min_length={"m": 0}))(
        x, y
    )
    sums = [p.sum(0) for p in np.split(ROWS, (2, 2, 5))[:3]]
    equal(got, [p.max(0) + s for p, s in zip(PARTS, sums, strict=True)])
    with pytest.raises(ValueError, match="names 'k'.*'n', 'm'"):
        ragged.vmap(jnp.matmul, min_length={"k": 0})(x, y)
    with pytest.raises(ValueError, match="`constraints` names 'k'.*'n'"):
        ragged.vmap(jnp.sum, constraints=("n >= k",))(x)


@pytest.mark.parametrize("least", [{"m": 0}, {"m": 0, "n": 2}, {"n": 0}, 0])
def test_pairs_of_dims_of_which_some_may_be_empty(least):
    """A product of sizes is not negative, whichever of them may be 0."""

    def pairs(x, y):
        product = y[:, None, 0] * x[None, :, 0]
        counted = jnp.arange(y.shape[0] * x.shape[0]).reshape(product.shape)
        repeated = jnp.repeat(x[:, 0], y.shape[0])
        total = product.reshape(-1).sum() + jnp.sort(product, axis=None).sum()
        return total + (product * counted.astype(product.dtype)).sum() + repeated.sum()

    sizes = {"n": (2, 3), "m": (4, 0)}
    if least == {"n": 0}:
        sizes = {"n": (2, 0), "m": (4, 3)}
    x, y = batch(sizes["n"]), batch(sizes["m"], "m")
    got = fast_jit(ragged.vmap(pairs, min_length=least))(x, y)
    equal(got, [pairs(*parts) for parts in zip(x.to_list(), y.to_list(), strict=True)])


# ---------------------------------------------------------------------- random numbers


def test_masks_of_pairs_with_a_key_for_each_head():
    def heads(x, key):
        draw = lambda k: jax.random.bernoulli(k, 0.5, (x.shape[0],) * 2)  # noqa: E731
        return jax.vmap(draw)(jax.random.split(key, 2))

    keys = jax.random.split(jax.random.key(0), 3)
    got = fast_jit(ragged.vmap(heads))(batch(), keys)
    for a, x, key in zip(got.to_list(), PARTS, keys, strict=True):
        np.testing.assert_array_equal(a, heads(x, key))


# --------------------------------------------------------------------- eqx.error_if


def limited(x, most):
    return eqx.error_if(x, x > most, "too big")


LIMITED = {  # with the largest number that each compares
    "rows": (limited, ROWS[:8].max()),
    "sums": (lambda x, m: limited(x.sum(0), m), max(p.sum(0).max() for p in PARTS)),
    "pairs": (lambda x, m: limited(x @ x.T, m), max((p @ p.T).max() for p in PARTS)),
}


@needs_equinox
@pytest.mark.parametrize("name", LIMITED)
def test_error_if_raises_where_an_example_is_wrong_and_nowhere_else(name):
    function, most = LIMITED[name]
    far = batch().with_data(
        jnp.asarray(ROWS).at[8:].set(99.0)
    )  # in the unused capacity
    run = eqx.filter_jit(ragged.vmap(function, in_axes=(0, None)))
    right = run(far, most + 1e-6)
    want = [jnp.asarray(p) for p in PARTS]
    equal(right, [function(p, jnp.inf) for p in want])
    with pytest.raises(eqx.EquinoxRuntimeError, match="too big"):
        run(far, most - 1e-6)


@needs_equinox
def test_error_if_does_not_look_at_an_example_that_has_left_the_loop():
    def total(x):
        def body(state):
            i, so_far = state
            i = eqx.error_if(i, i >= x.shape[0], "past the end")
            return i + 1, so_far + x[jnp.minimum(i, x.shape[0] - 1)].sum()

        first = jnp.array(0), jnp.zeros(())
        return lax.while_loop(lambda s: s[0] < jnp.array(x.shape[0]), body, first)[1]

    run = eqx.filter_jit(ragged.vmap(total))
    equal(run(batch()), [p.sum() for p in PARTS])


# ------------------------------------------------------------------------- shard_map


@jax.custom_vjp
def doubled_back(x, w):
    return x @ w


doubled_back.defvjp(
    lambda x, w: (doubled_back(x, w), (x, w)),
    lambda kept, dy: (dy @ kept[1].T, 2 * kept[0].T @ dy),
)


def recur(x, w):
    return lax.scan(lambda h, a: (jnp.tanh(h @ w + a),) * 2, jnp.zeros(4), x)[1]


IN_SHARDS = {
    "elements": (lambda x, w: jnp.tanh(x @ w + 1) * jnp.arange(4.0)[None], {}),
    "attention": (lambda x, w: jax.nn.softmax(x @ w @ x.T) @ x, {"tiers": 2}),
    "lockstep": (recur, {"scan": "padded"}),
    "lanes": (recur, {"scan": "packed", "lanes": 2}),
    "branch": (lambda x, w: lax.cond(x.sum() > 0, jnp.sin, lambda a: a @ w, x), {}),
    "own_derivative": (lambda x, w: doubled_back(x, w).max(0), {}),
    "table": (lambda x, w: w[jnp.argsort(x[:, 0]) % 4] + x[-1][None], {}),
}


@pytest.mark.parametrize("name", IN_SHARDS)
def test_shard_map_with_its_default_check(name):
    function, options = IN_SHARDS[name]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, data, lengths):
        x = ragged.RaggedArray(data, lengths, max_length=4)
        y = ragged.vmap(function, in_axes=(0, None), **options)(x, w)
        return jnp.sum(jnp.sin(jax.tree.leaves(y)[0]))

    def shard(w, data, lengths):
        value, gradient = jax.value_and_grad(loss)(w, data, lengths)
        return lax.psum(value, "d"), gradient  # summed over shards by JAX

    data, lengths = np.concatenate([ROWS[:8]] * 2), np.array([3, 1, 4, 2, 4, 1])
    specs = P(), P("d"), P("d")
    run = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P())
    got = fast_jit(run)(W, data, lengths)
    parts = [
        fast_jit(jax.value_and_grad(loss))(W, data[:8], n) for n in np.split(lengths, 2)
    ]
    equal(jax.tree.leaves(got), jax.tree.leaves(jax.tree.map(jnp.add, *parts)))


# ---------------------------------------------------------------------- fori_loop

TURNS = {
    "to_the_size": lambda x: lax.fori_loop(0, x.shape[0], *turn(x)),
    "from_one": lambda x: lax.fori_loop(1, x.shape[0] - 1, *turn(x)),
    "half": lambda x: lax.fori_loop(x.shape[0] // 2, jnp.array(x.shape[0]), *turn(x)),
}


def turn(x):
    return (lambda i, s: jnp.tanh(s @ W) + x[i], jnp.zeros(4))


@pytest.mark.parametrize("dtype", [bool, "int8", "int32"])
def test_a_bound_in_another_type_is_what_that_type_has(dtype):
    def count(x):
        bound = jnp.asarray(x.shape[0]).astype(dtype).astype(jnp.int32)
        return lax.fori_loop(0, bound, lambda i, s: s + 1, 0)

    equal([ragged.vmap(count)(batch())], [np.array([count(p) for p in PARTS])])


@pytest.mark.parametrize("name", TURNS)
def test_loops_that_a_size_counts_have_a_gradient(name):
    mapped = ragged.vmap(TURNS[name])
    total = lambda rows: mapped(batch().with_data(rows)).sum()  # noqa: E731
    got = fast_jit(jax.grad(total))(jnp.asarray(ROWS))
    want = [jax.grad(lambda x: TURNS[name](x).sum())(jnp.asarray(p)) for p in PARTS]
    equal([got], [np.concatenate([*want, np.zeros((2, 4))])])


# -------------------------------------------------------- shared without being arrays


@needs_equinox
def test_shared_arguments_that_are_no_arrays():
    mlp = eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0), dtype=jnp.float64)
    mapped = ragged.vmap(lambda m, x: jax.vmap(m)(x), in_axes=(None, 0))
    equal(mapped(mlp, batch()).to_list(), one_by_one(jax.vmap(mlp), PARTS))

    def loss(mlp):
        return mapped(mlp, batch()).data.sum()

    gradient = eqx.filter_grad(loss)(mlp)
    assert np.abs(gradient.layers[0].weight).sum() > 0
    by_name = ragged.vmap(lambda x, f, k: getattr(x, f)(0)[:k], (0, None, None))
    equal(by_name(batch(), "mean", 2), [p.mean(0)[:2] for p in PARTS])
    with pytest.raises(TypeError) as caught:
        ragged.vmap(lambda x, f: x, in_axes=(0, 0))(batch(), "mean")
    assert any("None shares" in note for note in caught.value.__notes__)


# ------------------------------------------------------------- names of results


def test_results_are_arguments_under_the_names_they_have():
    x = batch()
    longer = ragged.vmap(lambda x: jnp.concatenate([x, x[:1]]))(x)
    assert longer.dim == "n + 1"
    again = ragged.vmap(lambda y: jnp.concatenate([y, y[:1]]))(longer)
    assert (again.dim, again.lengths.tolist()) == ("n + 2", [5, 3, 6])
    for run in (lambda f: f, fast_jit):
        both = run(ragged.vmap(lambda y, x: (x + y[1:], y)))(longer, x)
        assert [a.dim for a in both] == ["n", "n + 1"]
        parts = [p + np.concatenate([p, p[:1]])[1:] for p in PARTS]
        equal(both[0].to_list(), parts)
    other = batch((2, 2, 2), "n + 1")
    with pytest.raises(ValueError, match=r"'n \+ 1' must be what its name says"):
        ragged.vmap(lambda x, y: x)(x, other)


@pytest.mark.parametrize("name", ["max", "min", "mod", "floordiv"])
def test_sizes_with_the_names_of_functions(name):
    mapped = ragged.vmap(
        lambda x: x[: x.shape[0] // 2 + 1],
        constraints=[f"{name} >= max(1, {name} - 2)"],
    )
    want = [part[: len(part) // 2 + 1] for part in PARTS]
    equal(mapped(batch(dim=name)).to_list(), want)


# --------------------------------------------------------------------------- advice

ASKED_OF_PYTHON = {
    "element_of_a_table": lambda x: W[x.shape[0], x.shape[0]],
    "part_of_a_numpy_table": lambda x: x + ROWS[: x.shape[0]],
    "numpy_range": lambda x: x[:, 0] * np.arange(x.shape[0]),
    "range_of_floats": lambda x: jnp.arange(x.shape[0] + 1.0),
    "boolean_index": lambda x: x[x > 0],
    "array_split": lambda x: jnp.array_split(x, 2),
}


@pytest.mark.parametrize("name", ASKED_OF_PYTHON)
def test_what_python_asks_of_a_size_gets_the_advice(name):
    with pytest.raises((TypeError, IndexError)) as caught:
        ragged.vmap(ASKED_OF_PYTHON[name])(batch())
    assert sum("`min_length`" in note for note in caught.value.__notes__) == 1


def instead(x):
    """What the docs write in the place of `refused`."""
    k, score = jnp.arange(x.shape[0]), jnp.round(x[:, 0])
    distance = jnp.abs(k[:, None] - k[None])
    heads = x.reshape(x.shape[0], 2, 2)
    s = jnp.sort(score)
    ends = jnp.concatenate([x[-1:], x, x[:1]])
    return (
        score[distance],
        jax.nn.dot_product_attention(heads, heads, heads, mask=(distance <= 1)[None]),
        s[jnp.argmax((s[:, None] == s[None]).sum(1))],
        jnp.cumprod(score < 1) == 1,
        ends[:-2] + 2 * ends[2:],
        jnp.sort(score, descending=True),
        x[jnp.arange(x.shape[0] - 1), k[1:] % 4].sum(),
    )


def refused(x):
    n, score = x.shape[0], jnp.round(x[:, 0])
    heads = x.reshape(n, 2, 2)
    wrapped = jnp.pad(x, ((1, 1), (0, 0)), mode="wrap")
    attend = jax.nn.dot_product_attention
    return (
        jax.scipy.linalg.toeplitz(score),
        attend(heads, heads, heads, local_window_size=(1, 1)),
        jax.scipy.stats.mode(score).mode,
        jnp.logical_and.accumulate(score < 1),
        wrapped[:-2] + 2 * wrapped[2:],
        lax.top_k(score, n)[0],
        jnp.take_along_axis(x[:-1], jnp.arange(n)[1:, None] % 4, 1).sum(),
    )


def test_what_the_docs_write_instead():
    with jax.numpy_dtype_promotion("standard"):  # functions of JAX rely on it
        results = ragged.vmap(instead)(batch())
        wanted = zip(*one_by_one(refused, PARTS), strict=True)
    for got, want in zip(results, wanted, strict=True):
        got = got.to_list() if hasattr(got, "to_list") else got
        equal(got, want, 1e-6)  # JAX's attention is in float32


# ----------------------------------------------------- numbers past the longest example


def weighted_by_position(x, w):
    """Infinite at the eighth position, which no example has."""
    place = jnp.arange(x.shape[0], dtype=x.dtype)
    return (x * ((1 / (7 - place))[:, None] @ w)).sum()


def weighted_by_two_positions(x, y, w):
    """Infinite at the place (4, 4), where no example has both."""
    i = jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None]
    j = jnp.arange(y.shape[0], dtype=x.dtype)[None, :, None]
    return ((1 / (8 - i - j)) @ w).sum((0, 1)) @ (x.sum(0) + y.sum(0))


def test_products_that_all_examples_share_have_a_finite_gradient():
    w = W[:1]
    mapped = ragged.vmap(weighted_by_position, in_axes=(0, None))
    x = ragged.RaggedArray(ROWS, LENGTHS, max_length=8)
    got = fast_jit(jax.grad(lambda w: mapped(x, w).sum()))(w)
    alone = lambda w: sum(weighted_by_position(p, w) for p in PARTS)  # noqa: E731
    equal([got], [fast_jit(jax.grad(alone))(w)])
    x, y = batch((5, 1, 2)), batch((1, 5, 2), "m")
    both = ragged.vmap(weighted_by_two_positions, in_axes=(0, 0, None))
    got = fast_jit(jax.grad(lambda w: both(x, y, w).sum()))(w)
    pairs = list(zip(x.to_list(), y.to_list(), strict=True))
    one = weighted_by_two_positions
    alone = lambda w: sum(one(a, b, w) for a, b in pairs)  # noqa: E731
    equal([got], [fast_jit(jax.grad(alone))(w)])


# ------------------------------------------------------------------- sizes, capacity


def test_bounds_of_quotients_by_sizes_of_either_sign():
    ranges = {"n": sizes.Range(1, 7), "m": sizes.Range(1, 9)}
    functions = (
        lambda n, m: (n * m) // (m - 4),
        lambda n, m: (5 - n) // (m - 4),
        lambda n, m: n % (m - 4),
        lambda n, m: (3 - n) % (m - 10),
        lambda n, m: n // -3 + m % -2,
    )
    for function in functions:
        dim = function(*symbolic_shape("n, m"))
        values = []
        for n, m in itertools.product(range(1, 8), range(1, 10)):
            if m == 4:  # a divisor of 0, whose result has no meaning
                continue
            values.append(function(n, m))
            for make in (int, np.array, jnp.array):
                given = {"n": make(n), "m": make(m)}
                assert sizes.evaluate(dim, given) == values[-1]
        assert sizes.smallest(dim, ranges) <= min(values)
        assert sizes.largest(dim, ranges) >= max(values)


def test_a_reshape_of_two_sizes_whose_padding_cancels_out():
    x = ragged.RaggedArray(ROWS[:, 0], (4, 2), max_length=5)
    y = ragged.RaggedArray(ROWS[:, 1], (2, 4), dim="m", max_length=5)

    def function(x, y):
        n, m = x.shape[0], y.shape[0]
        pairs = (x[:, None] * y[None]).reshape(n, m // 2, 2)
        return pairs.reshape(n // 2, 2, m)

    even = ("mod(n, 2) == 0", "mod(m, 2) == 0")
    got = ragged.vmap(function, constraints=even)(x, y)
    equal(got.to_list(), one_by_one(function, x.to_list(), y.to_list()))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_constraints_that_ask_for_more_capacity_than_there_is(jitted):
    rng = np.random.default_rng(8)
    short, long = (
        [rng.standard_normal((n, 4)) for n in lengths] for lengths in ((8, 9), (9, 10))
    )
    run = fast_jit if jitted else (lambda f: f)
    x = ragged.RaggedArray.from_list(short)
    y = ragged.RaggedArray.from_list(long, dim="m")
    assert y.capacity < x.capacity + 2
    got = run(ragged.vmap(lambda x, y: x + y[1:], constraints=("m == n + 1",)))(x, y)
    equal(got.to_list(), [a + b[1:] for a, b in zip(short, long, strict=True)])
    z = ragged.RaggedArray.from_list(short, dim="m", capacity=None)
    got = run(ragged.vmap(jnp.add, constraints=("m == n",)))(x, z)
    equal(got.to_list(), [2 * a for a in short])
    keys = z.with_data(jax.random.split(jax.random.key(0), 17))
    last = lambda x, k: (x, jax.random.key_data(k)[-1])  # noqa: E731
    got = run(ragged.vmap(last, constraints=("m == n",)))(x, keys)[1]
    np.testing.assert_array_equal(
        got, jax.random.key_data(keys.data)[jnp.array([7, 16])]
    )


def test_a_constraint_that_fixes_a_size():
    x = batch((2, 2, 2))
    fixed = ragged.vmap(lambda x: (x.ravel(), x + x[::-1]), constraints=("n == 2",))
    flat, folded = fast_jit(fixed)(x)
    assert flat.shape == (3, 8) and folded.shape == (3, 2, 4)
    equal(flat, [a.ravel() for a in x.to_list()])
    equal(folded, [a + a[::-1] for a in x.to_list()])


# ----------------------------------------------------------------- loops and branches


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_loop_that_no_example_is_in_ends(shared):
    """Doubled, 0 never gets large; the number of turns is bounded for this test."""
    calls = []

    def count(turn):
        calls.append(turn)
        return np.int32(turn + 1)

    def doubled(state):
        turn, s = state
        turn = jax.pure_callback(
            count, jax.ShapeDtypeStruct((), jnp.int32), turn, vmap_method="sequential"
        )
        return turn, 2 * s

    def going(state):
        return (state[0] < 40) & (state[1] < 100)

    def loop(s):
        return lax.while_loop(going, doubled, (jnp.int32(0), s))[1]

    def function(x, s):
        s = s if shared else x[0]
        return lax.cond(x[0] > 0, loop, lambda s: s, s)

    first = [-1.0, 0.0] if shared else [3.0, 0.0]
    x = ragged.RaggedArray(jnp.asarray(first), (1, 1))
    got = fast_jit(ragged.vmap(function, in_axes=(0, None)))(x, jnp.zeros(()))
    jax.effects_barrier()
    assert got.tolist() == ([0, 0] if shared else [192, 0])
    assert len(calls) == (0 if shared else 2 * 6)  # a callback for each example


def test_a_loop_that_all_share_runs_without_examples():
    def function(x, s):
        return lax.while_loop(lambda s: s < 9, lambda s: 2 * s, s)

    mapped = ragged.vmap(function, in_axes=(0, None), out_axes=None)
    assert mapped(ragged.RaggedArray.from_list([]), jnp.ones(())) == 16


def test_loops_that_a_size_counts_may_print():
    seen = []

    def turn(i, total):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return total + i

    def function(x):
        return lax.fori_loop(0, x.shape[0], turn, jnp.array(0))

    assert fast_jit(ragged.vmap(function))(batch()).tolist() == [3, 0, 6]
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 0, 1, 1, 2, 2, 3]


SHARED = {
    "branch": lambda x, w: lax.cond(w[0, 0] > 0, jnp.sin, lambda w: 2 * w, w),
    "constant_branch": lambda x, w: lax.switch(
        jnp.int32(w[0, 0] > 0), [lambda: 1.0, lambda: 2.0]
    ),
    "solution": lambda x, w: jnp.linalg.solve(w, w[0]),
    "inverse": lambda x, w: jnp.linalg.inv(w + 5 * jnp.eye(4)),
    "own_rule": lambda x, w: doubled_back(w, w),
}


@pytest.mark.parametrize("name", SHARED)
def test_results_that_all_examples_share(name):
    function = SHARED[name]
    mapped = ragged.vmap(function, in_axes=(0, None), out_axes=None)
    equal([fast_jit(mapped)(batch(), W)], [function(None, W)])
    gradient = jax.grad(lambda w: jnp.sin(mapped(batch(), w)).sum())
    want = fast_jit(jax.grad(lambda w: jnp.sin(function(None, w)).sum()))
    equal([gradient(W)], [want(W)])


def test_a_branch_that_differs_from_example_to_example_in_one_case():
    def function(x, w):
        return lax.cond(w[0, 0] > 0, lambda x: x.sum(), lambda x: w[0, 1], x)

    for sign in (1, -1):
        mapped = ragged.vmap(function, in_axes=(0, None))
        w = sign * jnp.abs(W)
        equal(mapped(batch(), w), [function(p, w) for p in PARTS])


IN_ANOTHER_ORDER = {
    "ravel": lambda x: jnp.ravel(x, order="F"),
    "reshape": lambda x: x.reshape((2, x.shape[0]), order="F"),
    "axes": lambda x: jax.lax.reshape(x, (x.shape[0] * 2,), (1, 0)),
    "one more": lambda x: x.reshape((x.shape[0], 2, 1), order="F"),
    "pairs": lambda x: (x @ x.T).ravel(order="F"),
}


@pytest.mark.parametrize("name", IN_ANOTHER_ORDER)
def test_reshapes_in_the_order_of_fortran(name):
    function = IN_ANOTHER_ORDER[name]
    xs = [jnp.arange(2.0 * n).reshape(n, 2) ** 2 for n in (3, 1, 2)]
    got = ragged.vmap(function)(ragged.RaggedArray.from_list(xs))
    for y, x in zip(got, xs, strict=True):
        np.testing.assert_array_equal(y, function(x))


INTO = lax.ScatterDimensionNumbers((), (0,), (0,))
WINDOW = lax.GatherDimensionNumbers((0, 1), (), (0,))
FAR = {
    "unsigned": np.uint32(2**32 - 1),
    "long": np.int64(2**40),
    "long, before": np.int64(-(2**40)),
    "unsigned, long": np.uint64(2**63),
}


@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
def test_places_beyond_int32_stay_outside(far):
    """They would be within an axis if their lower bits were taken alone."""

    def function(x):
        some = jnp.where(x[:, 0] > 0, jnp.arange(x.shape[0]).astype(far.dtype), far)
        one = jnp.array([far])
        return (
            lax.gather(x, one, WINDOW, (1, 4), mode="clip"),
            lax.scatter_add(x[:, 0], one, jnp.ones(()), INTO, mode="drop"),
            lax.scatter_add(x[:, 0], one, jnp.ones(()), INTO, mode="clip"),
            jnp.take(x, one, 0, mode="clip"),
            jnp.take(x, some, 0, mode="clip"),
            *(
                lax.scatter_add(a, i[:, None], b, INTO, mode=mode)
                for mode in ("clip", "drop")
                for a, i, b in (
                    (x[:, 0], one, jnp.ones(1)),
                    (jnp.zeros(3), some, x[:, 1]),
                    (x[:, 0], some, x[:, 1]),
                )
            ),
        )

    mapped = fast_jit(ragged.vmap(function))(batch())
    each = zip(*map(function, PARTS), strict=True)  # of all examples, result by result
    for got, want in zip(mapped, each, strict=True):
        equal(got, want)
