"""Batches dealt out to four devices: the results of one, and what is communicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_options import usual_jit
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import collectives, elements
from tolerance import assert_close

import ostinato as ost
from ostinato import ragged
from ostinato._step.own_rows import with_own_rows
from ostinato.apps.g2p.data import read_cmudict

LENGTHS = (3, 1, 7, 2, 0, 5, 4, 1)
WIDTH = 3
MESH = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))
SPEC = ost.RNNSpec("gru", WIDTH, 4)


def draw(lengths=LENGTHS, dim="n", seed=0, axis=0):
    rng = np.random.default_rng(seed)
    tokens = [np.moveaxis(rng.standard_normal((n, WIDTH)), 0, axis) for n in lengths]
    return ragged.RaggedArray.from_list(tokens, dim=dim, axis=axis, capacity=40)


def scanned(x, w):
    step = lambda h, a: ((h := jnp.tanh(w @ (h + a))), h)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(WIDTH), x)


def softmax(x, w):
    scores = jax.nn.softmax(x @ w, axis=0)
    return (scores * x).sum(0), scores


FUNCTIONS = {  # of the tokens of an example and weights [WIDTH, WIDTH]
    "softmax": softmax,
    "scan": scanned,
    "rnn": lambda x, w: ost.rnn(SPEC, jnp.tile(w.ravel(), 12)[:108], x).y,
    "attention": lambda x, w: (jax.nn.softmax(x @ w @ x.T) @ x, x @ x.T),
    "sort": lambda x, w: jnp.sort(x @ w, axis=0)[:, :2],
}


def outputs_of(result):
    """Return results of a batch, in the caller's order, as a list of lists."""
    leaves = jax.tree.leaves(
        result, is_leaf=lambda x: not isinstance(x, (tuple, dict, list))
    )
    leaves = [x.in_order() if isinstance(x, ragged.ShardedBatch) else x for x in leaves]
    return [x.to_list() if hasattr(x, "to_list") else list(x) for x in leaves]


def assert_same(got, want):
    for many, wanted in zip(outputs_of(got), outputs_of(want), strict=True):
        for a, b in zip(many, wanted, strict=True):
            assert_close(a, b, terms=100)


def total(result):
    leaves = jax.tree.leaves(result)
    return sum(jnp.sum(jnp.sin(x)) for x in leaves if x.dtype.kind == "f")


LOOPS = {  # what step functions close over, count in, or carry, and branches
    "constant": lambda x, w: jax.lax.scan(
        lambda c, t: (jnp.tanh(0.5 * c + t @ w), c), jnp.zeros(WIDTH), x
    ),
    "number": lambda x, w: jax.lax.scan(
        lambda c, t: (jnp.tanh(c @ w + t[0] * t[1].astype(float)), c),
        jnp.zeros(x.shape[1]),
        (x, jnp.arange(x.shape[0])),
    ),
    "wide": lambda x, w: LOOPS["number"](jnp.tile(x, 6), jnp.tile(w, (6, 6))),
    "whole": lambda x, w: jax.lax.scan(
        lambda c, t: (jnp.tanh(c + t * (x @ w)[:, 0]), c.max()), x[:, 0], x[:, 1]
    ),
    "net": lambda x, w: ost.recurrent_net(
        lambda p, h, t, _: ((h := jnp.tanh(t + 0.5 * h @ p)), h),
        x[None],
        x[:1],
        params=w,
    ).outputs[0],
    "branch": lambda x, w: jax.lax.cond(  # one device may have no example that takes it
        jnp.array(x.shape[0]) > 5,
        lambda: jnp.sqrt(1 + jnp.tanh(x @ w)),
        lambda: x - x.sum() * w[:1],
    ),
}


@pytest.mark.alike
@pytest.mark.parametrize("kind", list(AxisType)[:2])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_those_on_one_device(name, kind):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    batch, w = draw([1, 3, 2, 5, 4, 1, 6, 2]), 0.1 * jnp.arange(9.0).reshape(3, 3)
    mapped = ragged.vmap(LOOPS[name], in_axes=(0, None))
    gradient = jax.jit(jax.grad(lambda w, x: total(mapped(x, w))))
    want = gradient(w, batch)
    with jax.set_mesh(mesh):
        shares, run = ragged.shard(batch, mesh, "batch"), jax.jit(mapped)
        assert_same(run(shares, w), run(batch, w))
        assert_close(gradient(w, shares), want, terms=100)


def test_loops_that_choose_entries_run_without_jit():
    """The numbers of rows are constants, and not computed in the `shard_map`."""

    def function(x):
        def step(h, t):
            pairs = jnp.outer(t, t)[jnp.arange(WIDTH), jnp.argmax(t)[None]]
            return jnp.tanh(h + pairs), None

        return jax.lax.scan(step, jnp.zeros(WIDTH), x)[0]

    with_own_rows.cache_clear()
    batch = draw((3, 1, 7, 2, 4, 5, 4, 1))
    got = ragged.vmap(function)(ragged.shard(batch, MESH, "batch"))
    assert_close(got.in_order(), ragged.vmap(function)(batch), terms=100)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_equal_one_device(name):
    batch, w = draw(), jnp.asarray(np.random.default_rng(1).standard_normal((3, 3)))
    mapped = ragged.vmap(FUNCTIONS[name], in_axes=(0, None), min_length=0)
    shares = ragged.shard(batch, MESH, "batch")
    run = jax.jit(mapped)
    assert_same(run(shares, w), run(batch, w))

    loss = lambda w, batch: total(mapped(batch, w))  # noqa: E731
    gradient = jax.jit(ragged.grad(loss, (0, 1)))
    (got, tokens), (want, want_tokens) = gradient(w, shares), gradient(w, batch)
    assert_close(got, want, terms=200)
    assert_same(tokens, want_tokens)


@pytest.mark.parametrize("name", ["softmax", "rnn", "attention"])
def test_the_gradient_of_weights_is_all_that_is_communicated(name):
    shares, w = ragged.shard(draw(), MESH, "batch"), jnp.eye(WIDTH)
    mapped = ragged.vmap(FUNCTIONS[name], in_axes=(0, None), min_length=0)
    forward = usual_jit(mapped).lower(shares, w).compile()
    assert collectives(forward) == []
    for x in jax.tree.leaves(forward(shares, w)):
        want = NamedSharding(MESH, P("batch"))
        assert x.sharding.is_equivalent_to(want, x.ndim)

    loss = lambda w, shares: total(mapped(shares, w))  # noqa: E731
    backward = usual_jit(jax.grad(loss)).lower(w, shares).compile()
    found = collectives(backward)
    assert {operation for operation, _ in found} == {"all-reduce"}
    assert sum(elements(shape) for _, shape in found) == w.size


def test_labels_and_several_sizes_are_dealt_out_alike():
    other = tuple(reversed(LENGTHS))
    labels = np.arange(8.0)
    given = {"x": draw(), "y": draw(other, "m", seed=2), "label": labels}

    def one(example):
        pairs = example["x"] @ example["y"].T
        return {"loss": pairs.sum() * example["label"], "y": 2 * example["y"]}

    shares = ragged.shard(given, MESH, "batch")
    sums = (np.array(LENGTHS) + other)[np.asarray(shares["x"].order)]
    assert sums.reshape(4, 2).sum(1).max() <= sums.sum() / 4 + max(sums)
    assert_close(shares["label"].in_order(), labels)
    mapped = jax.jit(ragged.vmap(one, min_length=0))
    got, want = mapped(shares), mapped(given)
    assert isinstance(got["loss"], ragged.ShardedBatch) and got["y"].dim == "m"
    assert_same(got, want)


@pytest.mark.parametrize("kind", list(AxisType)[:2])
def test_meshes_with_automatic_and_explicit_axes(kind):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    batch, w = draw(), jnp.eye(WIDTH) / 2
    mapped = ragged.vmap(softmax, in_axes=(0, None), min_length=0)
    shares = ragged.shard(batch, mesh, "batch")
    run = jax.jit(mapped)
    assert_same(run(shares, w), run(batch, w))
    loss = lambda w, batch: jnp.sum(jax.tree.leaves(mapped(batch, w))[0] ** 2)  # noqa: E731
    got, want = (jax.jit(jax.grad(loss))(w, b) for b in (shares, batch))
    assert_close(got, want, terms=100)


@pytest.mark.parametrize("kind", list(AxisType)[:2])
@pytest.mark.parametrize("lengths", [LENGTHS, (0,) * 4], ids=["some", "empty"])
def test_results_of_several_sizes_are_listed(kind, lengths):
    mesh, batch = jax.make_mesh((4,), ("batch",), axis_types=(kind,)), draw(lengths)
    mapped = ragged.vmap(lambda x: x @ x.T, min_length=0)
    want = mapped(batch).to_list()
    got = mapped(ragged.shard(batch, mesh, "batch"))
    listed = got.data.to_list()
    for result, i in zip(listed, got.order.tolist(), strict=True):
        np.testing.assert_allclose(result, want[i], rtol=1e-6)
    for result, expected in zip(got.in_order().to_list(), want, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_to_list_gives_the_examples_in_order(axis):
    batch = draw(axis=axis)
    shares = ragged.shard(batch, MESH, "batch")
    assert shares.capacity == ragged.round_capacity(7) and len(shares) == 8
    assert sorted(np.asarray(shares.order)) == list(range(8))
    for got, want in zip(shares.to_list(), batch, strict=True):
        np.testing.assert_array_equal(got, want)
    mapped = jax.jit(ragged.vmap(lambda x: jnp.cumsum(x, axis), min_length=0))
    assert_same(mapped(shares), mapped(batch))
    assert "8 examples over 'batch', dim='n'" in repr(shares)


def test_two_axes_of_a_mesh():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    batch, w = draw(), jnp.eye(WIDTH) / 2
    mapped = jax.jit(ragged.vmap(scanned, in_axes=(0, None), min_length=0))
    for axis, count in ((("a", "b"), 4), ("b", 2)):
        shares = ragged.shard(batch, mesh, axis)
        assert shares.shares == count
        assert_same(mapped(shares, w), mapped(batch, w))


def lognormal(count):
    drawn = np.random.default_rng(0).lognormal(3.3, 0.7, count)
    return np.clip(drawn, 5, 400).astype(int)


def words(count):
    every = np.array([len(word) for word in read_cmudict()])
    return np.random.default_rng(0).permutation(every)[:count]


@pytest.mark.parametrize("count", [64, 256])
@pytest.mark.parametrize("lengths", [lognormal, words])
def test_devices_get_as_many_tokens(lengths, count):
    lengths = lengths(count)
    tokens = np.zeros(lengths.sum(), np.float32)
    batch = ragged.RaggedArray(tokens, lengths)
    for devices in (2, 4):
        mesh = jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
        shares = ragged.shard(batch, mesh, "d", capacity=None)
        assert shares.imbalance <= 0.05
        assert shares.capacity <= 1.05 * lengths.sum() / devices


LOST = {  # what an example of two shares of different orders gets
    "dense": lambda x, y: x.sum() + y.sum(),
    "tokens": lambda x, y: x + y.sum(),
    "pairs": lambda x, y: x @ y.T,
    "number": lambda x, y: jnp.int32(x.shape[0]),
}


@pytest.mark.parametrize("name", LOST)
def test_shares_of_different_orders_have_no_results_under_jit(name):
    one, other = draw(), draw((3, 1, 2, 7, 0, 5, 4, 1), "m", seed=2)
    x, y = (ragged.shard(batch, MESH, "batch") for batch in (one, other))
    mapped = ragged.vmap(LOST[name], min_length=0)
    with pytest.raises(ValueError, match="by one call of ragged.shard, .* different"):
        mapped(x, y)
    (got,) = outputs_of(jax.jit(mapped)(x, y))
    (want,) = outputs_of(mapped(one, other))
    same = np.asarray(x.order) == np.asarray(y.order)
    assert 0 < same.sum() < len(same)
    for i, agree in zip(np.asarray(x.order), same, strict=True):
        if agree:
            np.testing.assert_allclose(got[i], want[i], rtol=1e-10)
        elif name == "number":
            assert got[i] == np.iinfo(np.int32).min
        else:
            assert np.isnan(got[i]).all()

    together = ragged.shard((one, other), MESH, "batch")
    (got,) = outputs_of(jax.jit(mapped)(*together))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_labels_of_another_call_have_no_results_under_jit():
    shares = ragged.shard(draw(), MESH, "batch")
    turned = (draw()[::-1], np.arange(8.0))
    labels = ragged.shard(turned, MESH, "batch")[1]
    mapped = jax.jit(ragged.vmap(lambda x, y: x.sum() + y, min_length=0))
    same = np.asarray(shares.order) == np.asarray(labels.order)
    assert (np.isnan(mapped(shares, labels).data) == ~same).all() and not same.all()
    dense = jax.jit(ragged.vmap(lambda y, z: y + z))
    sums = dense(mapped(shares, labels), mapped(shares, labels))
    assert (np.isnan(sums.data) == ~same).all()


def test_orders_that_are_compared_communicate_nothing():
    shares = ragged.shard((draw(), np.arange(8.0)), MESH, "batch")
    mapped = ragged.vmap(lambda x, y: (x.sum() + y, x * y), min_length=0)
    assert collectives(usual_jit(mapped).lower(*shares).compile()) == []


WRONG = {  # arguments that one device refuses: lengths, options, the message
    "short": ((LENGTHS,), {}, "of 'n' must be at least `min_length` = 1"),
    "shorter": (((2,) * 7 + (1,),), {"min_length": {"n": 2}}, "at least `min_length`"),
    "unequal": ((LENGTHS, LENGTHS[::-1]), {"min_length": 0}, "must have equal lengths"),
    "odd": (
        ((2,) * 6 + (3, 1),),
        {"constraints": ("mod(n, 2) == 0",)},
        r"the constraint 'mod\(n, 2\) == 0' must hold",
    ),
}


@pytest.mark.parametrize("kind", list(AxisType)[:2])
@pytest.mark.parametrize("case", WRONG)
def test_lengths_are_checked_as_on_one_device(case, kind):
    lengths, options, message = WRONG[case]
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    mapped = ragged.vmap(lambda *xs: sum(x.sum() for x in xs), **options)
    batches = tuple(map(draw, lengths))
    shares = ragged.shard(batches, mesh, "batch")
    with pytest.raises(ValueError, match=message) as of_one:
        mapped(*batches)
    with pytest.raises(ValueError, match=message) as of_four:
        mapped(*shares)
    assert str(of_four.value) == str(of_one.value)
    error, _ = jax.jit(checkify.checkify(mapped))(*shares)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


@pytest.mark.parametrize("kind", list(AxisType)[:2])
def test_checkify_finds_nothing_wrong(kind):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    given = (draw(), np.arange(8.0))
    mapped = ragged.vmap(lambda x, y: x.sum() + y, min_length=0)
    run = jax.jit(checkify.checkify(mapped))
    error, sums = run(*ragged.shard(given, mesh, "batch"))
    assert error.get() is None
    assert_same(sums, mapped(*given))
    other = ragged.shard((draw()[::-1], given[1]), mesh, "batch")[1]
    error, _ = run(ragged.shard(draw(), mesh, "batch"), other)
    assert "by one call of ragged.shard" in error.get()


def test_bad_arguments():
    batch = draw()
    with pytest.raises(ValueError, match="must name axes of the mesh, of 'batch', got"):
        ragged.shard(batch, MESH, "data")
    with pytest.raises(
        ValueError, match="must have a multiple of 4 examples, .* got 7"
    ):
        ragged.shard(batch[:7], MESH, "batch")
    with pytest.raises(ValueError, match=r"got 3 in `batch\[1\]` and 8 in the first"):
        ragged.shard((batch, np.ones(3)), MESH, "batch")
    with pytest.raises(
        TypeError, match=r"`batch\['y'\]\[0\]` must be an array .* np.ar"
    ):
        ragged.shard({"x": batch, "y": [1, 0] * 4}, MESH, "batch")
    with pytest.raises(ValueError, match="must hold the 7 tokens of the fullest"):
        ragged.shard(batch, MESH, "batch", capacity=5)
    with pytest.raises(TypeError, match="`batch` must have a RaggedArray, got float64"):
        ragged.shard(np.ones(4), MESH, "batch")
    shares = ragged.shard(batch, MESH, "batch")
    labels = jnp.arange(8.0)
    with pytest.raises(ValueError, match="must be dealt out together, .* got float64"):
        ragged.vmap(lambda x, y: x.sum() + y)(shares, labels)
    turned = ragged.shard(batch[::-1], MESH, "batch")
    with pytest.raises(ValueError, match="by one call of ragged.shard, got Sharded"):
        ragged.vmap(lambda x, y: x.sum() + y.sum())(shares, turned)
    with pytest.raises(ValueError, match="`in_axes` must be 0 for an argument that"):
        ragged.vmap(lambda x: x, in_axes=None)(shares)
    with pytest.raises(ValueError, match="`out_axes` must be 0 for results of a batch"):
        ragged.vmap(lambda x: x.sum(0), out_axes=1)(shares)
    with pytest.raises(ValueError, match="`data` must have 28 tokens on axis 0, got"):
        shares.with_data(np.ones((3, 3)))


@pytest.mark.parametrize(
    "mesh, axis, error, message",
    [
        (MESH, 0, TypeError, "must be the name of an axis .* got int 0"),
        (MESH, None, TypeError, "must be the name of an axis .* got NoneType None"),
        (MESH, b"batch", TypeError, "must be the name of an axis .* got bytes"),
        (MESH, (), ValueError, r"must name axes of the mesh, of 'batch', got \(\)"),
        (MESH, ("batch",) * 2, ValueError, "must name each axis of the mesh once"),
        (jax.devices(), "batch", TypeError, "must be a jax.sharding.Mesh, got list"),
        (None, "batch", TypeError, "must be a jax.sharding.Mesh, got NoneType"),
        (NamedSharding(MESH, P()), "batch", TypeError, "Mesh, got NamedSharding"),
    ],
)
def test_bad_meshes_and_axes(mesh, axis, error, message):
    with pytest.raises(error, match=message):
        ragged.shard(draw(), mesh, axis)


def test_a_list_of_axes_is_a_tuple():
    shares = ragged.shard(draw(), MESH, ["batch"])
    mapped = ragged.vmap(lambda x: x.sum(0), min_length=0)
    assert_same(jax.jit(mapped)(shares), mapped(draw()))


@pytest.mark.parametrize("several", [False, True])
def test_keys_are_dealt_out(several, monkeypatch):
    if several:  # as on devices of several processes
        local = property(lambda sharding: False)
        monkeypatch.setattr(NamedSharding, "is_fully_addressable", local)
    keys = jax.random.split(jax.random.key(0), 8)
    dealt = ragged.shard((draw(), keys), MESH, "batch")[1]
    monkeypatch.undo()
    assert dealt.data.sharding.is_equivalent_to(NamedSharding(MESH, P("batch")), 1)
    got, want = map(jax.random.key_data, (dealt.data, keys[dealt.order]))
    np.testing.assert_array_equal(got, want)


def test_arrays_of_numpy_are_dealt_out_by_numpy():
    labels = np.arange(8).view(_Labels)
    dealt = ragged.shard((draw(), labels), MESH, "batch")[1]
    assert labels.taken
    np.testing.assert_array_equal(dealt.data, np.arange(8)[dealt.order])


class _Labels(np.ndarray):
    """An array of numpy that notes that it was indexed."""

    taken = False

    def __getitem__(self, index):
        self.taken = True
        return np.asarray(self)[index]
