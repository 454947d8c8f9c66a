"""Programs as strangers write them: what `ragged.vmap` once rejected or got wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from jax.sharding import PartitionSpec as P

from ostinato import ragged

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


def equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------ what max_length allows

TABLE = jnp.asarray(np.random.default_rng(6).standard_normal((6, 4)))
MASK = jnp.tril(jnp.ones((8, 8), bool))
CUT = {
    "positions": lambda x: x + TABLE[: x.shape[0]],
    "causal": lambda x: jnp.where(MASK[: x.shape[0], : x.shape[0]], x @ x.T, 0) @ x,
}


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("name", CUT)
def test_beginnings_of_tables_as_long_as_max_length(name, least):
    lengths = (3, least, 4)
    parts = np.split(ROWS, np.cumsum(lengths))[:3]
    mapped = fast_jit(ragged.vmap(CUT[name], min_length=least))
    equal(mapped(batch(lengths)).to_list(), map(CUT[name], map(jnp.asarray, parts)))


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
    equal(mapped(mlp, batch()).to_list(), [jax.vmap(mlp)(p) for p in PARTS])

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
